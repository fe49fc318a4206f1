"""Is every file that a training makes a new one? strace shows the calls, those of native code too.

tests/checkpoint/test_planted_links.py plants links at the names that Python makes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tensorboard")

CALLS = "open,openat,creat,mkdir,mkdirat,link,linkat,symlink,symlinkat,mknod,mknodat"
SHAPE = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def calls_in(trace: str) -> list[tuple[str, str, Path]]:
    """The calls that succeeded: the name of each, its arguments, and the path, which a descriptor
    may begin."""
    found = []
    for name, arguments in re.findall(r"^\d+\s+(\w+)\((.*)\)\s+= \d", trace, re.MULTILINE):
        path, folder = (
            re.search(r'"([^"]*)"', arguments),
            re.match(r"(?:AT_FDCWD|\d+)<([^>]*)>", arguments),
        )
        if path is not None:
            found.append((name, arguments, Path(folder[1] if folder else "") / path[1]))
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_what_a_training_makes_is_new_or_lies_in_its_own_new_folder(tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE))
    (tmp_path / "nvme").mkdir()
    trace, out = tmp_path / "trace", tmp_path / "out"
    words = [
        "train",
        "--model",
        tmp_path / "shape.json",
        "--offload",
        "nvme",
        "--nvme",
        tmp_path / "nvme",
    ]
    words += [
        "--steps",
        3,
        "--seq",
        32,
        "--batch",
        2,
        "--save-every",
        2,
        "--save",
        out / "ck",
        "--runs",
        out / "runs",
    ]
    words += ["--json", out / "train.json", "--tensorboard", out / "board"]
    strace = ["strace", "-f", "-qq", "-y", "-s", "4096", "-e", f"trace={CALLS}", "-o", trace]
    run = [*strace, sys.executable, "-c", "from tiermem.tools.cli import main; main()", *words]
    done = subprocess.run(
        list(map(str, run)), capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [
        each for each in calls_in(trace.read_text(errors="replace")) if tmp_path in each[2].parents
    ]
    made = {path for name, _, path in calls if name.startswith("mkdir")}
    opened = [(path, flags) for name, flags, path in calls if name.startswith("open")]
    written = {path: flags for path, flags in opened if re.search("O_WRONLY|O_RDWR|O_CREAT", flags)}
    assert {name for name, _, _ in calls} == {"openat", "mkdir"}
    follows = {
        path
        for path, flags in written.items()
        if not re.search("O_EXCL|O_TMPFILE|O_NOFOLLOW", flags)
    }
    assert {path.parent for path in follows} == {
        path for path in made if path.parent == out / "board"
    }  # TensorBoard's own
    names = " ".join(map(str, written))
    for name in (
        "segment.bin",
        "tiermem.json.new",
        "latest.new",
        "train.json.new",
        "events.jsonl",
        "loss.png.new",
        "tfevents",
    ):
        assert name in names
