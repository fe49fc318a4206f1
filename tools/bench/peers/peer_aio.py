"""DeepSpeed's `aio_handle` behind the protocol of witnesses.py: the peer that reads and writes the same file by its means.

    python -I peer_aio.py FILE         read BLOCK DEPTH BYTES -> seconds user_s system_s

One thread, blocks submitted together, into page-locked memory of its own making, as its users set it. A pass is one call
where memory allows, as its own benchmark does it. Run by the interpreter that has DeepSpeed; imports nothing of ours.
The operator compiles at first use, before the first command is answered.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

_MOST_BYTES = 1 << 30  # of one call, and of locked memory


def main() -> int:
    """Obeys commands on stdin until `quit`, and answers each with a line; 1 after an error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what DeepSpeed prints on stdout is no answer
    peer: Peer | None = None
    for line in sys.stdin:
        words = line.split()
        if words == ["quit"]:
            return 0
        try:
            peer = peer or Peer(sys.argv[1])
            command, block_bytes, depth, num_bytes = words
            answers.write(peer.run(command, int(block_bytes), int(depth), int(num_bytes)) + "\n")
        except Exception as error:  # whatever it is, the benchmark shall hear of it
            answers.write(f"error {type(error).__name__}: {' '.join(str(error).split())}\n")
            return 1
    return 0


class Peer:
    """The operator, and locked memory that is kept between passes."""

    def __init__(self, file: str) -> None:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found, unused-ignore]

        self._torch: Any = torch
        self._operator: Any = AsyncIOBuilder().load(verbose=False)
        self._file = file
        self._buffer: Any = None

    def run(self, command: str, block_bytes: int, depth: int, num_bytes: int) -> str:
        """Moves the first num_bytes of the file and returns "seconds user_s system_s". Raises ValueError, OSError."""
        if command not in ("read", "write"):
            raise ValueError(f"{command} is not something that aio_handle does; it reads and writes")
        handle = self._operator.aio_handle(block_bytes, depth, False, True, 1)
        move = handle.sync_pread if command == "read" else handle.sync_pwrite
        buffer = self._locked(handle, min(num_bytes, _MOST_BYTES))
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        for offset in range(0, num_bytes, _MOST_BYTES):
            part = buffer[: min(_MOST_BYTES, num_bytes - offset)]
            if move(part, self._file, offset) != 1:
                raise OSError(f"aio_handle did not {command} {part.numel()} bytes at offset {offset}")
        seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
        return f"{seconds:.9f} {after.ru_utime - before.ru_utime:.6f} {after.ru_stime - before.ru_stime:.6f}"

    def _locked(self, handle: Any, num_bytes: int) -> Any:
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._buffer = handle.new_cpu_locked_tensor(num_bytes, self._torch.empty(0, dtype=self._torch.uint8))
            self._buffer.fill_(1)
        return self._buffer


if __name__ == "__main__":
    sys.exit(main())
