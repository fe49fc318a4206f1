"""What every command shares: byte sizes, refusals, stopping by signal, and the files it may write."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer

# ---- Byte sizes as people write them: "1250MiB", "2GiB", "1G", "4096" ------------------------------------------------
#
# KB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB and the bare letters K, M, G, T are powers of 1024.

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Reads a size. Raises ValueError that says what is allowed."""
    match = _PATTERN.fullmatch(text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes, or for example 1250MiB, 2GiB, 1.5G or 500MB")
    return int(float(match.group(1)) * _UNITS[unit]) if "." in match.group(1) else int(match.group(1)) * _UNITS[unit]


def parse_count(text: str) -> int:
    """Reads a number of things: "256M", "1.3b", "4096"; K, M and B are powers of 1000. Raises ValueError."""
    match = _PATTERN.fullmatch(text)
    powers = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
    unit = match.group(2).lower() if match else None
    if match is None or unit not in powers:
        raise ValueError(f"{text!r} is not a number of parameters; write for example 256M, 1.3B or 4096")
    return int(float(match.group(1)) * powers[unit])


def parse_flops(text: str) -> float:
    """Reads operations a second: "150T", "2.5P", "300G", "1e14"; G, T and P are powers of 1000. Raises ValueError."""
    powers = {"g": 1e9, "t": 1e12, "p": 1e15}
    number, factor = (text[:-1], powers[text[-1].lower()]) if text[-1:].lower() in powers else (text, 1.0)
    try:
        return float(number) * factor
    except ValueError:
        raise ValueError(
            f"{text!r} is no number of operations a second; write for example 150T, 2.5P or 1e14"
        ) from None


def format_bytes(num_bytes: float) -> str:
    """A size for people: MiB up to 10 GiB, so that figures of one run compare; "1250.0 MiB", "19.53 GiB"."""
    if abs(num_bytes) < 10 << 10:
        return f"{num_bytes:.0f} B"
    if abs(num_bytes) < 1 << 20:
        return f"{num_bytes / (1 << 10):.1f} KiB"
    if abs(num_bytes) < 10 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"


# ---- Refusal: how every command tells the user what to change: one line on stderr, and an exit status ----------------
#
# 0 done    1 the command's own verdict    2 the user must change something    130 stopped by Ctrl-C

EXIT_USER, EXIT_INTERRUPTED = 2, 130


@contextlib.contextmanager
def refusing(
    command: str,
    is_debug: bool,
    stopped: str | None = None,
    errors: tuple[type[Exception], ...] = (ValueError, OSError),
) -> Iterator[None]:
    """Turns what a command's user must change into one line and EXIT_USER, and Ctrl-C into `stopped`, where that is given."""
    try:
        yield
    except errors as error:
        raise typer.Exit(refuse(command, error, is_debug)) from None
    except KeyboardInterrupt:
        if stopped is None:
            raise
        print(f"tiermem {command}: {stopped}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def refuse(command: str, error: Exception, is_debug: bool) -> int:
    """One line for the user, and the traceback when asked for."""
    if is_debug:
        traceback.print_exception(error)
    message = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror or error}"
    print(f"tiermem {command}: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USER


# ---- Stopping: SIGTERM unwinds as Ctrl-C does, so that what a command has made is removed on either way out ----------


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Within: SIGTERM raises KeyboardInterrupt. Elsewhere than in the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- Outputs: the files that a command was asked to write, and the mark by which it knows its own --------------------
#
# A file that exists is overwritten only when the same command made it. The mark differs with the kind of file:
#
#     .json   the key "made_by" at the top:         {"made_by": "tiermem bench step", ...}
#     .csv    the first line:                       # made by tiermem bench step
#     .png    the text "Software" in its header:    figure.savefig(file, metadata={"Software": "tiermem bench step"})
#
# Checked before anything is measured, so that an hour of measuring does not end in a refusal.

_HEADER_BYTES = 1 << 16  # matplotlib writes its texts right behind the picture's size


def check_outputs(paths: Iterable[Path | None], made_by: str) -> None:
    """Sees that every file can be written. None stands for an output that was not asked for.

    Raises FileExistsError for a file that `made_by` did not make, FileNotFoundError or PermissionError for a folder that is
    missing or closed to us, ValueError when two outputs are one file.
    """
    wanted = [path for path in paths if path is not None]
    if len({path.resolve() for path in wanted}) < len(wanted):
        raise ValueError(f"two outputs are one file: {', '.join(map(str, wanted))}; give each a name of its own")
    for path in wanted:
        _check_folder(path)
        if (path.exists() or path.is_symlink()) and not _is_made_by(path, made_by):
            raise FileExistsError(
                errno.EEXIST, f"not made by {made_by!r}, so it is not overwritten: move it, or name another", str(path)
            )


def csv_mark(made_by: str) -> str:
    """The first line of a CSV file, without its end."""
    return f"# made by {made_by}"


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, f"no such folder: make it first, or correct {path.name}", str(path.parent)
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{path.name} cannot be written here", str(path.parent))


def _is_made_by(path: Path, made_by: str) -> bool:
    if not path.is_file():
        return False
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            return isinstance(content, dict) and content.get("made_by") == made_by
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except (OSError, ValueError):  # not readable, or no JSON: not ours
        return False
    if path.suffix == ".csv":
        return header.splitlines()[:1] == [csv_mark(made_by).encode()]
    return header.startswith(b"\x89PNG") and b"tEXtSoftware\0" + made_by.encode() in header
