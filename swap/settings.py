"""IoSettings: how a queue moves blocks. A value; what each engine makes of it is in native/tiermem.h."""

from __future__ import annotations

import dataclasses

from tiermem.swap.direct import ALIGNMENT

_MAX_BLOCK_BYTES = 1 << 30  # below what one system call transfers


@dataclasses.dataclass(frozen=True)
class IoSettings:
    """How the queue of each path moves blocks. Raises ValueError for what no engine takes."""

    engine: str = "auto"
    """"auto", "uring", "aio" or "threads"."""
    block_bytes: int = 1 << 20
    """Transfers are split into blocks of this size."""
    depth: int = 32
    """Blocks in flight, on each path."""
    threads: int = 0
    """Of the threads engine; 0 lets it choose."""
    single_submit: bool = False
    """Hand each block to the kernel by itself, instead of all that are ready at once."""
    overlap_events: bool = True
    """Hand over new blocks while earlier ones are in flight; False: only when all of those have ended."""

    def __post_init__(self) -> None:
        if self.engine not in ("auto", "uring", "aio", "threads"):
            raise ValueError(f"engine is {self.engine!r}; allowed are auto, uring, aio and threads")
        if not ALIGNMENT <= self.block_bytes <= _MAX_BLOCK_BYTES or self.block_bytes % ALIGNMENT:
            raise ValueError(
                f"block_bytes is {self.block_bytes}; allowed are multiples of {ALIGNMENT} up to {_MAX_BLOCK_BYTES}"
            )
        if not 1 <= self.depth <= 4096:
            raise ValueError(f"depth is {self.depth}; allowed are 1 to 4096 blocks in flight")
        if not 0 <= self.threads <= 1024:
            raise ValueError(f"threads is {self.threads}; allowed are 0 (the engine chooses) to 1024")
