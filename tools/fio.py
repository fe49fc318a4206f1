"""fio's figure for the same file, block, depth and pattern: somebody else's benchmark as a witness of ours.

Its two asynchronous engines run in turn, io_uring with registered buffers and files; what counts is the better one. It gets
a file that exists, never makes one, and is bounded by the bytes that ours moves. Its memory is its own: `depth` blocks,
used again and again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

ENGINES = {"io_uring": ("--fixedbufs=1", "--registerfiles=1"), "libaio": ()}
_PATTERNS = {"read": "read", "write": "write", "mixed": "rw", "random": "randread"}
_PATIENCE_S = 600.0


def find_fio() -> str | None:
    """The program, if it is installed."""
    return shutil.which("fio")


def run_fio(
    program: str,
    engine: str,
    file: str,
    file_bytes: int,
    mode: str,
    block_bytes: int,
    depth: int,
    num_bytes: int,
    is_direct: bool = True,
    sync: bool = False,
) -> float:
    """GB (1e9 bytes) per second, both directions together. Moves num_bytes, for "mixed" each way. Blocks.

    Raises OSError with fio's words.
    """
    command = [
        program,
        "--name=tiermem",
        f"--filename={file}",
        "--allow_file_create=0",
        "--fallocate=none",
        f"--size={file_bytes}",
        f"--io_size={num_bytes * 2 if mode == 'mixed' else num_bytes}",
        f"--rw={_PATTERNS[mode]}",
        f"--bs={block_bytes}",
        f"--iodepth={depth}",
        f"--ioengine={engine}",
        f"--direct={int(is_direct)}",
        *ENGINES[engine],
        *(["--norandommap=1", "--randrepeat=0"] if mode == "random" else []),
        *(["--end_fsync=1"] if sync and mode in ("write", "mixed") else []),
        "--output-format=json",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"fio ({engine}) took more than {_PATIENCE_S:.0f} s") from None
    if done.returncode:
        raise OSError(f"fio ({engine}) failed: {_first_words(done.stderr + done.stdout)}")
    return read_rate(done.stdout)


def read_rate(report: str) -> float:
    """GB per second out of fio's JSON report. Raises OSError when it is none, or says that nothing was moved."""
    try:
        job: dict[str, Any] = json.loads(report[report.index("{") :])["jobs"][0]
        num_bytes = sum(int(job[way]["io_bytes"]) for way in ("read", "write"))
        milliseconds = max(int(job[way]["runtime"]) for way in ("read", "write"))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise OSError(f"fio's report cannot be read ({type(error).__name__} {error})") from None
    if job.get("error") or not num_bytes:
        raise OSError(f"fio moved {num_bytes} bytes, error {job.get('error')}")
    return num_bytes / max(milliseconds, 1) / 1e6


def _first_words(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[0] if lines else "it said nothing"
