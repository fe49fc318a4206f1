"""`aio`: how blocks move between host memory and files. Every key may be left out; the queue has good defaults.

One knob has three spellings in the wild: `intra_op_parallelism` (what the reference reads), `thread_count` (what its
documentation says) and `num_threads` (what its tuner prints). They mean the same here.

In the reference each of n threads keeps queue_depth requests in flight. Here one queue keeps them all:

    requests in flight   queue_depth * n             io_uring, Linux AIO; at most 4096
    threads              n                           the threads engine, where a thread serves one request at a time

With n alone the queue keeps its own depth, or the reference's 8 * n where that is more.
"""

from __future__ import annotations

from typing import ClassVar

import pydantic

from tiermem.config import gds
from tiermem.config.base import ConfigModel, Count, PositiveCount
from tiermem.policy import IoSettings

__all__ = ["AioConfig"]

_SPELLINGS = ("intra_op_parallelism", "thread_count", "num_threads")
_MAX_DEPTH = 4096


class AioConfig(ConfigModel):
    """`aio`: block size, depth and threads of the queue."""

    section: ClassVar[str] = "aio"

    block_size: PositiveCount = 1 << 20
    """Bytes of one request to the device."""
    queue_depth: PositiveCount = 8
    """Requests in flight for each of intra_op_parallelism threads. Not set: the queue's own, larger default."""
    intra_op_parallelism: Count = 1
    """Multiplies queue_depth; the number of threads of the threads engine. Not set: that engine chooses."""
    thread_count: Count | None = None
    """The same as intra_op_parallelism."""
    num_threads: Count | None = None
    """The same as intra_op_parallelism."""
    single_submit: bool = False
    """Hand requests to the kernel one by one. Not set: all that are ready at once."""
    overlap_events: bool = True
    """Submit while earlier requests are in flight; false: only when all of those have ended."""
    use_gds: bool = False
    """GPUDirect Storage; refused with the reason that a look at the machine gives."""

    @property
    def threads(self) -> int | None:
        """Threads that the user asked for, under whichever spelling; None when not set."""
        given = [getattr(self, name) for name in _SPELLINGS if self.is_set(name) and getattr(self, name) is not None]
        return given[0] if given else None

    @property
    def depth(self) -> int | None:
        """Requests in flight in all; None when the queue's own depth stands."""
        threads = self.threads or 1
        if self.is_set("queue_depth"):
            return self.queue_depth * threads
        return max(IoSettings.depth, self.queue_depth * threads) if threads > 1 else None

    @pydantic.field_validator("use_gds", mode="after")
    @classmethod
    def _refuse_gds(cls, value: bool) -> bool:
        if value:
            raise ValueError(f"true given, but {gds.why_not()}")
        return value

    def contradictions(self) -> list[tuple[str, str]]:
        return [*self._spellings_that_disagree(), *self._too_deep()]

    def _spellings_that_disagree(self) -> list[tuple[str, str]]:
        given = {name: getattr(self, name) for name in _SPELLINGS if self.is_set(name)}
        given = {name: value for name, value in given.items() if value is not None}
        if len(set(given.values())) > 1:
            shown = ", ".join(f"{name} {value}" for name, value in given.items())
            return [("intra_op_parallelism", f"{shown} given; the three names mean the same, so keep one")]
        return []

    def _too_deep(self) -> list[tuple[str, str]]:
        depth = self.depth or 0
        if depth <= _MAX_DEPTH:
            return []
        product = f"queue_depth {self.queue_depth}"
        if self.threads and self.threads > 1:
            product += f" * intra_op_parallelism {self.threads} = {depth}"
        return [("queue_depth", f"{product} requests in flight, but allowed are at most {_MAX_DEPTH}; lower it")]
