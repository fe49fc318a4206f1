"""Witnesses: fio, a bare loop and a peer, measured in the same loops and on the same files as our
own settings."""

from __future__ import annotations

import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from tiermem.tools.bench.io_ranks import Setting
from tiermem.tools.measure.files import BenchFiles
from tiermem.tools.options import RANDOM

# ---- programs that are asked a line and answer one -----------------------------------------------
#
#     us -> a command                     it -> one line, which begins with "error" when it refuses
#     us -> quit
#
# stderr is kept, and its last line is told when the program ends without an answer.

_STOP_S = 10.0


class LineProgram(AbstractContextManager["LineProgram"]):
    """A running program. A context manager; for one thread.

    Args:
        command: the command line.
        name: what errors call it.

    Raises OSError when the program cannot be started.
    """

    def __init__(self, command: Sequence[str], name: str) -> None:
        self.name = name
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # what it says on stderr, told when it fails
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                text=True,
                bufsize=1,
            )
        except BaseException:
            self._words.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def say(self, line: str) -> str:
        """Sends one line and waits for the line that answers it.

        Raises OSError when the program ended, ValueError with its words when it refuses.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = self._process.stdout.readline()  # it may have said why before it ended
        if not answer:
            raise OSError(
                f"{self.name} ended (status {self._end()}) at {line!r}: {self._last_words()}"
            )
        if answer.startswith("error"):
            raise ValueError(f"{self.name} answers {line!r} with {answer.strip()}")
        return answer.strip()

    def ask(self, line: str, how_many: int, what: str) -> list[float]:
        """Sends one line and waits for the numbers that answer it; `what` they are. Raises as
        `say`."""
        answer = self.say(line)
        try:
            numbers = list(map(float, answer.split()))
        except ValueError:
            numbers = []
        if len(numbers) != how_many:
            raise ValueError(f"{self.name} answers {line!r} with {answer!r} instead of {what}")
        return numbers

    def close(self) -> None:
        """Ends the program, by force when it does not; calling it twice does nothing."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            if self._process.poll() is None:
                self._process.stdin.write("quit\n")
            self._process.stdin.close()
        except OSError:
            pass  # it has ended already
        self._end()
        self._process.stdout.close()
        self._words.close()

    def _end(self) -> int:
        try:
            return self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _last_words(self) -> str:
        self._words.seek(0)
        return _words(self._words.read().decode(errors="replace"), -1)


def _words(said: str, number: int) -> str:
    """One of the lines that a program has said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[number] if lines else "it said nothing"


# ---- the bare loop -------------------------------------------------------------------------------
#
#     us   -> read 1048576 32 2147483648      it -> 0.512345 0.010000 0.120000       seconds, user CPU, system CPU
#
# Commands are `read BLOCK DEPTH BYTES`, `write BLOCK DEPTH BYTES`, `mixed BLOCK DEPTH READ_BYTES
# WRITE_BYTES` (both at once, DEPTH each way), `spread` (as mixed, in both halves of the file),
# `through` (as spread, added to on the way) and `random BLOCK DEPTH BYTES SEED`. The program is
# tests/native/bare_loop (`make yardsticks`) or another that speaks so, such as peer_operators.py.
# It opens the file itself, and overwrites what the file held.


class BareRun(NamedTuple):
    """What one command took: wall clock, and the CPU time of the program's process."""

    seconds: float
    user_s: float
    system_s: float


class BareLoop(LineProgram):
    """A running yardstick. A context manager; for one thread.

    Args:
        program: the file to run, or a command line whose last word, the file's name, is added here.
        file: exists, is as long as the commands will say, and is named: the program opens it.

    Raises OSError when the program cannot be started.
    """

    def __init__(self, program: Path | Sequence[str], file: Path) -> None:
        command = [str(program)] if isinstance(program, os.PathLike) else list(program)
        super().__init__([*command, str(file)], command[-1])

    def run(self, command: str, block_bytes: int, depth: int, *numbers: int) -> BareRun:
        """Sends one command and waits for its answer. `numbers`: bytes, and the seed of "random".

        Raises ValueError with the program's words when it refuses or does not speak the protocol,
        OSError when it ended.
        """
        line = " ".join(map(str, (command, block_bytes, depth, *numbers)))
        return BareRun(*self.ask(line, len(BareRun._fields), "seconds, user_s and system_s"))


# ---- fio -----------------------------------------------------------------------------------------
#
# Its two asynchronous engines run in turn, io_uring with registered buffers and files; the better
# one counts. fio gets a file that exists, and moves as many bytes as our own pass. Its memory is
# `depth` blocks, used again and again.

ENGINES = {"io_uring": ("--fixedbufs=1", "--registerfiles=1"), "libaio": ()}
_PATTERNS = {
    "read": "read",
    "write": "write",
    "mixed": "rw",
    "random": "randread",
    "random-write": "randwrite",
}
WRITING = ("write", "mixed", "random-write")
_PATIENCE_S = 600.0


def run_fio(
    program: str,
    engine: str,
    files: BenchFiles,
    setting: Setting,
    num_bytes: int,
    sync: bool = False,
) -> float:
    """GB (1e9 bytes) per second, both directions together. Moves num_bytes, for "mixed" each way.
    Blocks.

    Raises OSError with fio's words.
    """
    command = [
        program,
        "--name=tiermem",
        f"--filename={files.name(setting.path_indices[0])}",
        "--allow_file_create=0",
        "--fallocate=none",
        f"--size={files.sizes[0]}",
        f"--io_size={num_bytes * 2 if setting.mode == 'mixed' else num_bytes}",
        f"--rw={_PATTERNS[setting.mode]}",
        f"--bs={setting.block_bytes}",
        f"--iodepth={setting.depth}",
        f"--ioengine={engine}",
        f"--direct={int(files.is_direct(setting.path_indices))}",
        *ENGINES[engine],
        *(["--norandommap=1", "--randrepeat=0"] if setting.mode in RANDOM else []),
        *(["--end_fsync=1"] if sync and setting.mode in WRITING else []),
        "--output-format=json",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"fio ({engine}) took more than {_PATIENCE_S:.0f} s") from None
    if done.returncode:
        raise OSError(f"fio ({engine}) failed: {_words(done.stderr + done.stdout, 0)}")
    return read_rate(done.stdout)


def read_rate(report: str) -> float:
    """GB per second out of fio's JSON report. Raises OSError when it is none, or says that nothing
    was moved."""
    try:
        job = json.loads(report[report.index("{") :])["jobs"][0]
        num_bytes = sum(int(job[way]["io_bytes"]) for way in ("read", "write"))
        milliseconds = max(int(job[way]["runtime"]) for way in ("read", "write"))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise OSError(f"fio's report cannot be read ({type(error).__name__} {error})") from None
    if job.get("error") or not num_bytes:
        raise OSError(f"fio moved {num_bytes} bytes, error {job.get('error')}")
    return num_bytes / max(milliseconds, 1) / 1e6


# ---- witnesses -----------------------------------------------------------------------------------
#
# fio, a bare loop and a peer are measured in the same loops and on the same files as our own
# settings. A witness that fails says why once and is left out after that.


class Witness:
    """Another program that measures the same pattern on the same file. It keeps a figure of each
    loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.notes: list[str] = []
        self._figures: dict[Any, list[float]] = collections.defaultdict(list)

    def measure(self, setting: Setting, num_bytes: int, loop: int) -> None:
        """Measures once where it can; what it cannot it leaves out, and says so in its notes."""
        raise NotImplementedError

    def loops_gbps(self, setting: Setting) -> list[float]:
        """The rate of each loop; empty for a setting that it has not measured."""
        return self._series(setting)

    def user_us(self, setting: Setting) -> float | None:
        """Microseconds of user CPU for a block: the mean, since a loop may be shorter than the
        kernel's tick."""
        return statistics.fmean(series) if (series := self._series(setting, "user")) else None

    def _series(self, setting: Setting, kind: str = "") -> list[float]:
        """What was measured of a setting so far. The engine and the ranks are ours: a witness has
        neither."""
        return self._figures[
            kind, setting.mode, setting.block_bytes, setting.depth, setting.path_indices[0]
        ]


class FioWitness(Witness):
    """fio's better engine of two."""

    def __init__(self, program: str, files: BenchFiles, sync: bool) -> None:
        super().__init__("fio")
        self._program = program
        self._files = files
        self._sync = sync
        self._engines = list(ENGINES)

    def measure(self, setting: Setting, num_bytes: int, loop: int) -> None:
        for engine in list(self._engines):
            try:
                rate = run_fio(self._program, engine, self._files, setting, num_bytes, self._sync)
            except OSError as error:
                self._engines.remove(engine)
                self.notes.append(f"{error}; left out from here on")
            else:
                self._series(setting, engine).append(rate)

    def loops_gbps(self, setting: Setting) -> list[float]:
        series = (self._series(setting, engine) for engine in ENGINES)
        return max((rates for rates in series if rates), key=statistics.median, default=[])


class LoopWitness(Witness, AbstractContextManager["LoopWitness"]):
    """A program that speaks the protocol of witnesses.py, a process for each path. A context
    manager.

    Args:
        name: how notes call it.
        command: of the program, without the file.
        modes: what it can do.
        sync: whether ours syncs what it writes; the programs do not, so then they are asked to read
            alone.
    """

    def __init__(
        self,
        name: str,
        command: Path | Sequence[str],
        files: BenchFiles,
        modes: Sequence[str],
        sync: bool,
    ) -> None:
        super().__init__(name)
        self._command = command
        self._files = files
        self._modes = [mode for mode in modes if not (sync and mode in ("write", "mixed"))]
        self._programs: dict[int, BareLoop] = {}
        if len(self._modes) < len(modes):
            self.notes.append(f"{name} does not sync: with --fsync it stands beside reads alone")

    def __exit__(self, *_: object) -> None:
        for program in self._programs.values():
            program.close()
        self._programs.clear()

    def measure(self, setting: Setting, num_bytes: int, loop: int) -> None:
        ways = 2 if setting.mode == "mixed" else 1
        depth = setting.depth // ways  # ours counts both ways, theirs each
        if not depth or setting.mode not in self._modes:
            return
        try:
            seed = [loop] if setting.mode == "random" else []
            program = self._program_on(setting)
            run = program.run(setting.mode, setting.block_bytes, depth, *[num_bytes] * ways, *seed)
        except (OSError, ValueError) as error:
            self._modes = []
            self.notes.append(f"{self.name} is left out: {error}")
            return
        self._series(setting).append(ways * num_bytes / run.seconds / 1e9)
        self._series(setting, "user").append(
            run.user_s * setting.block_bytes / (ways * num_bytes) * 1e6
        )

    def _program_on(self, setting: Setting) -> BareLoop:
        index = setting.path_indices[0]
        if not self._files.is_direct(setting.path_indices):
            raise ValueError("it opens its file with O_DIRECT, which this path refuses")
        if index not in self._programs:
            file = Path(self._files.name(index))
            self._programs[index] = BareLoop(self._command, file)
        return self._programs[index]


def bare_witness(program: Path, files: BenchFiles, sync: bool) -> LoopWitness:
    """The yardstick: tests/native/bare_loop, built."""
    return LoopWitness("the yardstick", program, files, ("read", "write", "mixed", "random"), sync)


def peer_program(python: Path, operator: str, **variables: str) -> list[str]:
    """Command line of DeepSpeed's operator ("adam" or "aio") behind lines, in the interpreter that
    has it."""
    script = Path(__file__).parent / "peer_operators.py"
    return [*peer_command(python, **variables), str(script), operator]


def peer_command(python: Path, name: str = "deepspeed", **variables: str) -> list[str]:
    """How a peer's command line begins: its interpreter's tools come first (ninja), no GPU means
    DS_ACCELERATOR=cpu."""
    # Packages that a bare machine has in PYTHONPATH alone are this interpreter's own.
    is_ours = "PYTHONPATH" in os.environ and python.absolute() == Path(sys.executable).absolute()
    variables["PATH"] = (
        f"{python.absolute().parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    )
    if name == "deepspeed" and not has_gpu():
        variables["DS_ACCELERATOR"] = os.environ.get("DS_ACCELERATOR", "cpu")
    return [
        "/usr/bin/env",
        *(f"{key}={value}" for key, value in variables.items()),
        str(python.absolute()),
        *["-I"] * (not is_ours),
    ]


def has_gpu() -> bool:
    """Whether a driver of NVIDIA or AMD has made its device; the launcher imports no torch to
    ask."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))
