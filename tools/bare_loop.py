"""BareLoop: a yardstick in a process of its own, driven line by line, so that its passes stand between those it judges.

    us   -> read 1048576 32 2147483648      it -> 0.512345 0.010000 0.120000       seconds, user CPU, system CPU
    us   -> quit

Commands are `read BLOCK DEPTH BYTES`, `write BLOCK DEPTH BYTES`, `mixed BLOCK DEPTH READ_BYTES WRITE_BYTES` (both at once,
DEPTH each way) and `random BLOCK DEPTH BYTES SEED`; what it cannot do it answers with a line `error ...` and ends. The
program is tests/native/bare_loop (`make yardsticks`), or any other that speaks so: peer_aio.py does. It opens the file
itself, and overwrites what the file held.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_STOP_S = 10.0


class BareRun(NamedTuple):
    """What one command took: wall clock, and the CPU time of the program's process."""

    seconds: float
    user_s: float
    system_s: float


class BareLoop:
    """A running yardstick. A context manager; for one thread.

    Args:
        program: the file to run, or a command line whose last word, the file's name, is added here.
        file: exists, is as long as the commands will say, and is named: the program opens it.
        environment: of the program; default ours.

    Raises OSError when the program cannot be started.
    """

    def __init__(self, program: Path | Sequence[str], file: Path, environment: Mapping[str, str] | None = None) -> None:
        self._command = [str(program)] if isinstance(program, os.PathLike) else list(program)
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # what it says on stderr, told when it fails
        try:
            self._process = subprocess.Popen(
                [*self._command, str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                env=environment,
                text=True,
                bufsize=1,
            )
        except BaseException:
            self._words.close()
            raise

    def __enter__(self) -> BareLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, command: str, block_bytes: int, depth: int, *numbers: int) -> BareRun:
        """Sends one command and waits for its answer. `numbers`: bytes, and the seed of "random".

        Raises ValueError with the program's words when it refuses or does not speak the protocol, OSError when it ended.
        """
        line = " ".join(map(str, (command, block_bytes, depth, *numbers)))
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = self._process.stdout.readline()  # it may have said why before it ended
        if not answer:
            raise OSError(f"{self._command[-1]} ended (status {self._end()}) at {line!r}: {self._last_words()}")
        words = answer.split()
        try:
            return BareRun(*map(float, words))
        except (TypeError, ValueError):
            refused = words[:1] == ["error"]
            said = answer.strip() if refused else f"{answer.strip()!r} instead of seconds, user_s and system_s"
            raise ValueError(f"{self._command[-1]} answers {line!r} with {said}") from None

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
        said = self._words.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "it said nothing"
