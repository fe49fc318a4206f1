"""LineProgram: a program in a process of its own that is asked a line and answers one, so that benchmarks take turns with it.

    us -> a command                     it -> one line, which begins with "error" when it refuses
    us -> quit

What it says on stderr is kept and told when it ends where it should have answered.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeVar

_STOP_S = 10.0
Program = TypeVar("Program", bound="LineProgram")


class LineProgram:
    """A running program. A context manager; for one thread.

    Args:
        command: the command line.
        name: what errors call it.
        environment: of the program; default ours.

    Raises OSError when the program cannot be started.
    """

    def __init__(self, command: Sequence[str], name: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # what it says on stderr, told when it fails
        try:
            self._process = subprocess.Popen(
                command,
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

    def __enter__(self: Program) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, line: str) -> str:
        """Sends one line and waits for the answer, which is returned without its end. Raises OSError when it ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = self._process.stdout.readline()  # it may have said why before it ended
        if not answer:
            raise OSError(f"{self.name} ended (status {self._end()}) at {line!r}: {self._last_words()}")
        return answer.strip()

    def ask_numbers(self, line: str, how_many: int, what: str) -> list[float]:
        """Sends one line that is answered with numbers. Raises ValueError with the program's words for another answer."""
        answer = self.ask(line)
        try:
            numbers = list(map(float, answer.split()))
        except ValueError:
            numbers = []
        if len(numbers) != how_many:
            said = answer if answer.startswith("error") else f"{answer!r} instead of {what}"
            raise ValueError(f"{self.name} answers {line!r} with {said}")
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
        said = self._words.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "it said nothing"
