"""What passes between a benchmark and the processes that do the measuring: a Job one way, an Outcome the other.

Values only, and light to import: the process that shows progress needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

SEQUENTIAL = ("read", "write", "mixed")
MODES = (*SEQUENTIAL, "random", "tensors", "sustained")
ENGINES = ("auto", "uring", "aio", "threads")


class Job(NamedTuple):
    """One pass of one rank. Its files are opened by these names, which may be those of descriptors in /proc."""

    mode: str
    engine: str
    block_bytes: int
    depth: int
    threads: int  # of the threads engine; 0 lets it choose
    files: tuple[str, ...]  # one on each path that takes part
    folders: tuple[str, ...]  # the paths themselves, where "tensors" opens its store
    file_bytes: int  # of each file
    num_bytes: int  # to move in all, "mixed" and "tensors": each way
    is_direct: bool
    sync: bool = False
    seed: int = 0
    seconds: float | None = None  # after which "sustained" ends


class Outcome(NamedTuple):
    """What a pass took. Times of day are CLOCK_MONOTONIC, the same for all processes."""

    start_s: float
    end_s: float
    read_bytes: int
    written_bytes: int
    user_s: float  # CPU time of the process, its queues' threads included
    system_s: float
    idle_fraction: float  # of the time, without a block in flight; mean over the queues
    latencies: list[int]  # blocks per bucket, see native.latency_quantiles
    engine: str  # that ran: what "auto" took
    kernel_read_bytes: int  # of /proc/self/io
    kernel_written_bytes: int
    num_blocks: int
    series: tuple[tuple[int, float], ...] = ()  # "sustained": bytes written so far, and when
    shares: tuple[tuple[str, float, float], ...] = ()  # "tensors": what, its GB/s, and the sequential GB/s beside it

    @property
    def seconds(self) -> float:
        """From the start to the last answer."""
        return self.end_s - self.start_s


class Failed(NamedTuple):
    """A job that could not be prepared (the engine cannot run, memory is missing), or broke."""

    message: str
    errno: int | None
    is_prepared: bool  # it broke while it ran
