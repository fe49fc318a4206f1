"""GpuPasses: what is run beside the bench in processes of its own: the tests, small trainings, and
the same under a watch.

    training    every place, beside a twin on the CPU
    passes      a smaller training again and again; its losses must equal those of the first pass to the bit
                  as it is             nothing else
                  blocking launches    the host waits for every kernel: a difference is a race between streams
                  memory checker       NVIDIA's compute-sanitizer looks at every access of a kernel (where it is installed)
                  stream checker       torch's own sanitizer looks at the order of streams; its reports are advice
    trace       a training under torch's profiler

All of them use deterministic algorithms and a fixed workspace of cuBLAS. A process that dies takes
nothing with it: an illegal access would make every later call of the process fail.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from bench import python_path
from bench.small_training import SAME, Sizes, compare
from tiermem.tools.words import read_json

ROOT = Path(__file__).resolve().parents[2]
FIXED_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""With it cuBLAS gives the same bits on every stream."""

_TESTS_TIMEOUT_S = 900.0
_TRAINING_TIMEOUT_S = 600.0
_PASS_TIMEOUT_S = 300.0
_END_PATIENCE_S = 15.0
_CHECKER = "compute-sanitizer"
_CHECKER_FAULTS = 86
"""Its exit status if it found errors."""
_KEPT_CHARACTERS = 4000


class Done(NamedTuple):
    """How a process ended: its exit status, or None for one that was stopped after its time; what
    it printed."""

    status: int | None
    output: str

    @property
    def last_line(self) -> str:
        """The last line that says something."""
        return next(
            (line.strip() for line in reversed(self.output.splitlines()) if line.strip()),
            "it said nothing",
        )


class Pass(NamedTuple):
    """A way to run the same training."""

    name: str
    environment: Mapping[str, str] = {}
    prefix: Sequence[str] = ()
    is_advice: bool = False
    """Whether its failure is told and is no failure of the bench."""


def run_process(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Done:
    """Runs a command to its end, or until its time is over. Blocks. It is ended gently, also when
    this raises."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
        )
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout_s)
        finally:
            _end(process)
        output.seek(0)
        return Done(status, output.read())


def run_tests(paths: Sequence[Path]) -> dict[str, Any]:
    """`pytest -m gpu` over paths, in a process of its own: totals, and the tests that failed.
    Blocks for some minutes."""
    if importlib.util.find_spec("pytest") is None:
        return {"not_run": "pytest is not installed"}
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        return {
            "not_run": f"there is no {', '.join(missing)}: an installed tiermem has no tests, a checkout does"
        }
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "tests.xml"
        words = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={file}"]
        command = [sys.executable, *words, *(str(path.resolve()) for path in paths)]
        done = run_process(command, _TESTS_TIMEOUT_S, FIXED_WORKSPACE, ROOT)
        if done.status is None:
            raise RuntimeError(
                f"pytest -m gpu did not end in {_TESTS_TIMEOUT_S:.0f} s: {done.last_line}"
            )
        if not file.exists():
            raise RuntimeError(
                f"pytest ended with status {done.status}: {done.output[-_KEPT_CHARACTERS:]}"
            )
        return {
            **totals_of(ElementTree.parse(file).getroot()),
            "exit_code": done.status,
            "output": done.output[-2 * _KEPT_CHARACTERS :],
        }


def train_everywhere(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """The small training in every place, compared. Blocks. Raises RuntimeError if the process ends
    without figures."""
    found, done = _train(sizes, folder, Pass("as it is"), _TRAINING_TIMEOUT_S)
    if found is None:
        raise RuntimeError(_why(done, _TRAINING_TIMEOUT_S))
    return {**found, "passed": False} if found["failures"] else {**found, **compare(found["runs"])}


def run_passes(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """The same training once for each pass. Blocks. Raises RuntimeError if the first pass fails.

    Of each pass: `is_equal` to the first, and `not_run` with a reason, or `errors` of a checker,
    where there are such.
    """
    places = [*SAME, "device"]
    wanted: dict[str, list[float]] | None = None
    found: dict[str, Any] = {}
    for each in passes():
        if each.prefix and shutil.which(each.prefix[0]) is None:
            found[each.name] = {"not_run": f"{each.prefix[0]} is not installed"}
            continue
        trained, done = _train(
            sizes, folder, each, _PASS_TIMEOUT_S, "--fill", "--places", ",".join(places)
        )
        losses = (
            None
            if trained is None
            else {place: run["losses"] for place, run in trained["runs"].items()}
        )
        if wanted is None:
            if trained is None or losses is None or trained["failures"]:
                raise RuntimeError(_why(done, _PASS_TIMEOUT_S))
            wanted = losses
        found[each.name] = _judged(each, done, losses, wanted)
    return found


def passes() -> Iterator[Pass]:
    """Every way to run the training; the first is the one that the others must equal."""
    yield Pass("as it is")
    yield Pass(
        "blocking launches",
        {"CUDA_LAUNCH_BLOCKING": "1", "AMD_SERIALIZE_KERNEL": "3", "AMD_SERIALIZE_COPY": "3"},
    )
    # Refusals of the driver that torch asks for and handles are no errors: only accesses are looked
    # at.
    words = [
        "--tool",
        "memcheck",
        "--report-api-errors",
        "no",
        "--error-exitcode",
        str(_CHECKER_FAULTS),
    ]
    yield Pass("memory checker", prefix=[_CHECKER, *words])
    yield Pass("stream checker", {"TORCH_CUDA_SANITIZER": "1"}, is_advice=True)


def trace_training(place: str, sizes: Sizes, folder: Path, trace: Path) -> dict[str, Any]:
    """A training in one place under the profiler; its figures, and the share of copies hidden.
    Blocks. Raises RuntimeError."""
    words = ("--places", place, "--trace", str(trace))
    found, done = _train(sizes, folder, Pass("trace"), _TRAINING_TIMEOUT_S, *words)
    if found is None or found["failures"]:
        raise RuntimeError(_why(done, _TRAINING_TIMEOUT_S))
    run: dict[str, Any] = found["runs"][place]
    return run


def totals_of(root: ElementTree.Element) -> dict[str, Any]:
    """Of a JUnit file: how many passed, failed and were skipped, and which failed with their first
    lines."""
    cases = list(root.iter("testcase"))
    faults = {case: [each for each in case if each.tag in ("failure", "error")] for case in cases}
    failed = [
        {
            "test": f"{case.get('classname')}::{case.get('name')}",
            "message": (found[0].get("message") or "")[:500],
        }
        for case, found in faults.items()
        if found
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    return {
        "num_passed": passed,
        "num_failed": len(failed),
        "num_skipped": skipped,
        "failed": failed,
    }


def _judged(
    each: Pass,
    done: Done,
    losses: Mapping[str, list[float]] | None,
    wanted: Mapping[str, list[float]],
) -> dict[str, Any]:
    """What a pass showed. A checker that did not run the program shows nothing, and says why."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error", done.output)
    num_errors = int(summary[1]) if summary else 0
    kept = done.output[-_KEPT_CHARACTERS:]
    if each.prefix and losses is None and not num_errors:
        return {
            "not_run": f"{each.prefix[0]} gave no result: {_why(done, _PASS_TIMEOUT_S)}",
            "output": kept,
        }
    found = {"is_equal": losses == wanted, "is_advice": each.is_advice, "num_errors": num_errors}
    return (
        found
        if found["is_equal"] and not num_errors
        else {**found, "output": kept, "why": _why(done, _PASS_TIMEOUT_S)}
    )


def _train(
    sizes: Sizes, folder: Path, each: Pass, timeout_s: float, *words: str
) -> tuple[dict[str, Any] | None, Done]:
    """The figures that a process of small_training.py wrote, None if it wrote none; and how it
    ended."""
    with tempfile.TemporaryDirectory(dir=folder) as home:
        file = Path(home) / "figures.json"
        command = [*each.prefix, sys.executable, "-m", "bench.small_training", "--folder", home]
        command += ["--json", str(file), *words]
        command += [
            word for name, value in sizes._asdict().items() for word in (f"--{name}", str(value))
        ]
        variables = {"PYTHONPATH": python_path(), **FIXED_WORKSPACE, **each.environment}
        done = run_process(command, timeout_s, variables)
        return (read_json(file) if file.is_file() else None), done


def _why(done: Done, timeout_s: float) -> str:
    ended = (
        f"it did not end in {timeout_s:.0f} s"
        if done.status is None
        else f"it ended with status {done.status}"
    )
    return f"{ended}: {done.last_line}"


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends a process that still runs: by SIGTERM, so that it removes its files, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_PATIENCE_S)
