"""Is any damaged or hostile checkpoint a documented error, within bounds of memory and time, with
nothing written or executed?

`make test` reads the kept cases again, and a few new ones. `make soak` runs atheris over each
reader for ten minutes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint import fuzzing
from checkpoint.fuzz_readers import READERS, Scene
from checkpoint.fuzzing import Wrong, bounded, kept_cases, mutated, with_program
from drawn import drawn
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

RUN_S = int(os.environ.get("TIERMEM_FUZZ_S", "600"))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    folder = tmp_path_factory.mktemp("scenes")
    return {name: make(folder / name) for name, make in READERS.items()}


@pytest.mark.parametrize("reader", READERS)
def test_kept_cases_are_read_or_refused(scenes: dict[str, Scene], reader: str) -> None:
    assert all(scenes[reader].bounded(case).is_read for case in scenes[reader].seeds())
    found = [scenes[reader].bounded(case).is_read for _, case in kept_cases(reader)]
    assert len(found) > 3 and not all(found)


@settings(max_examples=drawn(40), phases=[Phase.generate])
@given(reader=st.sampled_from(sorted(READERS)), seed=st.integers(0, 1 << 32))
def test_changed_files_are_read_or_refused(
    scenes: dict[str, Scene], reader: str, seed: int
) -> None:
    chance = random.Random(seed)
    scenes[reader].bounded(mutated(chance.choice(list(scenes[reader].seeds())), chance))


def test_the_programs_would_run(scenes: dict[str, Scene], tmp_path: Path) -> None:
    """Where a pickle is trusted they make the folder that the other tests look for."""
    data = next(case for case in scenes["dcp"].seeds() if case.startswith(b".metadata")).partition(
        b"\n"
    )[2]
    num_run = 0
    for seed in range(40):
        canary = tmp_path / str(seed)
        with contextlib.suppress(Exception):
            pickle.loads(with_program(data, random.Random(seed), str(canary)))
        num_run += canary.exists()
    assert num_run > 15


# ---- each bound is seen when it is passed --------------------------------------------------------


def _spins(_: Path) -> None:
    start = time.process_time()
    while time.process_time() < start + 0.8:
        pass


def _raises_another(_: Path) -> None:
    raise UnicodeDecodeError("utf-8", b"", 0, 1, "it is not text")


_left: list[int] = []


def _leaves_open(path: Path) -> None:
    _left.append(os.dup(1))


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (_spins, "took"),
        (_raises_another, "UnicodeDecodeError"),
        (_leaves_open, "1 descriptors stay open"),
        (lambda path: (path / "a").write_text("x"), "it changed something"),
        (lambda path: os.mkdir(path / "b"), "it changed something"),
        (lambda path: subprocess.run(["true"]), "it changed something"),
    ],
)
def test_each_bound_is_seen(tmp_path: Path, read: Callable[[Path], object], reason: str) -> None:
    with pytest.raises(Wrong, match=reason):
        bounded(lambda: read(tmp_path), 1000)
    while _left:
        os.close(_left.pop())


def test_too_much_memory_is_seen() -> None:
    with pytest.raises(MemoryError):
        bounded(lambda: bytearray(200 << 20), 1000)


# ---- ten minutes of each reader ------------------------------------------------------------------


@pytest.fixture
def totals_folder(tmp_path: Path) -> Iterator[Path]:
    """Keeps the totals and findings of a run where TIERMEM_SOAK_TOTALS says, also those of a run
    that failed."""
    yield tmp_path / "out"
    if (keep := os.environ.get("TIERMEM_SOAK_TOTALS")) is not None:
        for file in (tmp_path / "out").iterdir():
            if file.is_file():
                (Path(keep) / f"fuzz-{file.name}").write_bytes(file.read_bytes())


@pytest.mark.soak
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris has no wheel for this Python: make .venv/.fuzz",
)
@pytest.mark.parametrize("reader", READERS)
def test_ten_minutes_of_each_reader_find_nothing(
    totals_folder: Path, tmp_path: Path, reader: str
) -> None:
    command = [
        sys.executable,
        fuzzing.__file__,
        reader,
        str(tmp_path / "cases"),
        str(RUN_S),
        str(totals_folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S + 600)
    totals = json.loads((totals_folder / f"{reader}.json").read_text())
    print(totals)
    assert done.returncode == 0, done.stderr[-3000:]
    assert totals["findings"] == 0, [file.read_text() for file in totals_folder.glob("*.txt")]
    assert totals["executions"] > 100 and 0 < totals["read"] < totals["executions"]
