"""Witnesses: fio, a bare loop and a peer, measured in the same loops and on the same files as our own settings.

Each gives a rate per (mode, block, depth, path), the median of its loops. A witness that fails says why once and is left
out from then on: what it has to say is beside ours, never in its way.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.tools.bare_loop import BareLoop
from tiermem.tools.bench_files import BenchFiles
from tiermem.tools.fio import ENGINES as FIO_ENGINES
from tiermem.tools.fio import run_fio
from tiermem.tools.sweep import Setting

_PEER_SCRIPT = Path(__file__).parent / "peer_aio.py"


class _Key(NamedTuple):
    mode: str
    block_bytes: int
    depth: int
    place: int

    @classmethod
    def of(cls, setting: Setting) -> _Key:
        return cls(setting.mode, setting.block_bytes, setting.depth, setting.places[0])


class FioWitness:
    """fio's better engine of two."""

    name = "fio"

    def __init__(self, program: str, files: BenchFiles, sync: bool) -> None:
        self.notes: list[str] = []
        self._program = program
        self._files = files
        self._sync = sync
        self._engines = list(FIO_ENGINES)
        self._rates: dict[tuple[_Key, str], list[float]] = {}

    def measure(self, setting: Setting, num_bytes: int, loop: int) -> None:
        """Runs both engines once."""
        key, file = _Key.of(setting), self._files.name(setting.places[0], 0, setting.mode)
        is_direct = self._files.is_direct(setting.places)
        for engine in list(self._engines):
            what = (setting.mode, setting.block_bytes, setting.depth, num_bytes, is_direct, self._sync)
            try:
                rate = run_fio(self._program, engine, file, self._files.file_bytes(setting.mode), *what)
            except OSError as error:
                self._engines.remove(engine)
                self.notes.append(f"{error}; left out from here on")
            else:
                self._rates.setdefault((key, engine), []).append(rate)

    def gbps(self, setting: Setting) -> float | None:
        """The higher of the engines' medians."""
        series = (self._rates.get((_Key.of(setting), engine)) for engine in FIO_ENGINES)
        return max((statistics.median(rates) for rates in series if rates), default=None)


class LoopWitness:
    """A program that speaks the protocol of bare_loop.py, a process for each path. A context manager.

    Args:
        name: how notes call it.
        command: of the program, without the file.
        modes: what it can do.
        sync: whether ours syncs what it writes; the programs do not, so then they are asked to read alone.
    """

    def __init__(
        self,
        name: str,
        command: Path | Sequence[str],
        files: BenchFiles,
        modes: Sequence[str],
        sync: bool,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.notes: list[str] = []
        self._command = command
        self._environment = environment
        self._files = files
        self._modes = [mode for mode in modes if not (sync and mode in ("write", "mixed"))]
        self._programs: dict[int, BareLoop] = {}
        self._has_failed = False
        self._rates: dict[_Key, list[float]] = {}
        self._user_us: dict[_Key, list[float]] = {}
        if len(self._modes) < len(modes):
            self.notes.append(f"{name} does not sync: with --fsync it stands beside reads alone")

    def __enter__(self) -> LoopWitness:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs.values():
            program.close()
        self._programs.clear()

    def measure(self, setting: Setting, num_bytes: int, loop: int) -> None:
        """Sends one command."""
        depth, place = setting.depth, setting.places[0]
        numbers = [num_bytes]
        if setting.mode == "mixed":  # our depth counts both ways, theirs each
            depth //= 2
            numbers *= 2
        elif setting.mode == "random":
            numbers.append(loop)
        if self._has_failed or not depth or setting.mode not in self._modes:
            return
        if not self._files.is_direct(setting.places):
            self._fail("it opens its file with O_DIRECT, which this path refuses")
            return
        try:
            program = self._programs.get(place)
            if program is None:
                file = Path(self._files.name(place, 0, setting.mode))
                program = self._programs[place] = BareLoop(self._command, file, self._environment)
            run = program.run(setting.mode, setting.block_bytes, depth, *numbers)
        except (OSError, ValueError) as error:
            self._fail(str(error))
            return
        key = _Key.of(setting)
        total = num_bytes * (2 if setting.mode == "mixed" else 1)
        self._rates.setdefault(key, []).append(total / run.seconds / 1e9)
        self._user_us.setdefault(key, []).append(run.user_s * setting.block_bytes / total * 1e6)

    def gbps(self, setting: Setting) -> float | None:
        """The median of its loops."""
        return _median(self.loops_gbps(setting))

    def loops_gbps(self, setting: Setting) -> list[float]:
        """The rate of each loop."""
        return self._rates.get(_Key.of(setting), [])

    def user_us(self, setting: Setting) -> float | None:
        """Microseconds of user CPU for a block: the mean, since a loop may be shorter than the kernel's tick."""
        series = self._user_us.get(_Key.of(setting))
        return statistics.fmean(series) if series else None

    def _fail(self, why: str) -> None:
        self._has_failed = True
        self.notes.append(f"{self.name} is left out: {why}")


def bare_witness(program: Path, files: BenchFiles, sync: bool) -> LoopWitness:
    """The yardstick: tests/native/bare_loop, built."""
    return LoopWitness("the yardstick", program, files, ("read", "write", "mixed", "random"), sync)


def peer_witness(python: Path, files: BenchFiles, sync: bool) -> LoopWitness:
    """DeepSpeed's aio_handle, in the interpreter that has it; its operator compiles before the first answer."""
    command = [str(python.absolute()), "-I", str(_PEER_SCRIPT)]
    environment = {**os.environ, "PATH": f"{python.absolute().parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    if not Path("/dev/nvidiactl").exists():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return LoopWitness("aio_handle", command, files, ("read", "write"), sync, environment)


def _median(series: list[float] | None) -> float | None:
    return statistics.median(series) if series else None
