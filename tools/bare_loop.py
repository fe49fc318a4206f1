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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.tools.line_program import LineProgram


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
        environment: of the program; default ours.

    Raises OSError when the program cannot be started.
    """

    def __init__(self, program: Path | Sequence[str], file: Path, environment: Mapping[str, str] | None = None) -> None:
        command = [str(program)] if isinstance(program, os.PathLike) else list(program)
        super().__init__([*command, str(file)], command[-1], environment)

    def run(self, command: str, block_bytes: int, depth: int, *numbers: int) -> BareRun:
        """Sends one command and waits for its answer. `numbers`: bytes, and the seed of "random".

        Raises ValueError with the program's words when it refuses or does not speak the protocol, OSError when it ended.
        """
        line = " ".join(map(str, (command, block_bytes, depth, *numbers)))
        return BareRun(*self.ask_numbers(line, len(BareRun._fields), "seconds, user_s and system_s"))
