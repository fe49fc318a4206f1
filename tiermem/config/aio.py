"""`aio`: how blocks move between host memory and files. Every key may be left out; the queue has good defaults.

One knob has three spellings in the wild: `intra_op_parallelism` (what the reference reads), `thread_count` (what its
documentation says) and `num_threads` (what its tuner prints). They mean the same here.
"""

from __future__ import annotations

from typing import ClassVar

from tiermem.config.base import ConfigModel, Count, PositiveCount

__all__ = ["AioConfig"]

_SPELLINGS = ("intra_op_parallelism", "thread_count", "num_threads")


class AioConfig(ConfigModel):
    """`aio`: block size, depth and threads of the queue."""

    section: ClassVar[str] = "aio"

    block_size: PositiveCount = 1 << 20
    """Bytes of one request to the device."""
    queue_depth: PositiveCount = 8
    """Requests in flight. Not set: the queue's own, larger default."""
    intra_op_parallelism: Count = 1
    """Threads that share the work, where the engine uses threads. Not set: the engine chooses."""
    thread_count: Count | None = None
    """The same as intra_op_parallelism."""
    num_threads: Count | None = None
    """The same as intra_op_parallelism."""
    single_submit: bool = False
    """Submit requests one by one; here always in batches."""
    overlap_events: bool = True
    """Submit without waiting for earlier requests; always so here."""
    use_gds: bool = False
    """GPUDirect Storage; does not exist here."""

    @property
    def threads(self) -> int | None:
        """Threads that the user asked for, under whichever spelling; None when not set."""
        given = [getattr(self, name) for name in _SPELLINGS if self.is_set(name) and getattr(self, name) is not None]
        return given[0] if given else None

    def contradictions(self) -> list[tuple[str, str]]:
        given = {name: getattr(self, name) for name in _SPELLINGS if self.is_set(name)}
        given = {name: value for name, value in given.items() if value is not None}
        if len(set(given.values())) > 1:
            shown = ", ".join(f"{name} {value}" for name, value in given.items())
            return [("intra_op_parallelism", f"{shown} given; the three names mean the same, so keep one")]
        return []
