"""IoGrid: the settings of the queue that are worth trying: engines that run here x block sizes x depths.

What is in flight, block size x depth, is kept between 2 and 64 MiB: less starves a disk, more feeds none faster and takes
memory from the training. For the threads engine the depth is its number of threads: each serves one block at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.swap.native import ENGINES, Queue
from tiermem.swap.settings import IoSettings
from tiermem.tools.byte_size import format_bytes

BLOCKS = tuple(256 << 10 << power for power in range(6))  # 256 KiB to 8 MiB
DEPTHS = (4, 8, 16, 32, 64, 128)
_MOST_THREADS = 32
_LEAST_WINDOW_BYTES, _MOST_WINDOW_BYTES = 2 << 20, 64 << 20


def engines_that_run(asked: Sequence[str]) -> list[str]:
    """The engines to try: those named, or for "auto" all that run here. Raises OSError for a named one that does not."""
    found = []
    for name in ENGINES:
        if name == "auto" or not {name, "auto"} & set(asked):
            continue
        try:
            Queue(name).close()
        except OSError:
            if name in asked:
                raise
            continue
        found.append(name)
    return found


def default_of(engines: Sequence[str]) -> IoSettings:
    """The settings without tuning, on the engine they would take, or on the first that was asked for."""
    queue = Queue("auto")
    queue.close()
    return IoSettings() if queue.engine in engines else IoSettings(engine=engines[0])


def candidates_of(engines: Sequence[str], file_bytes: int, default: IoSettings) -> list[IoSettings]:
    """The grid: what a disk may like, engine by engine; the defaults are the last."""
    grid = [
        IoSettings(engine, block, depth, threads=depth if engine == "threads" else 1)
        for engine in engines
        for block in BLOCKS
        for depth in DEPTHS
        if _LEAST_WINDOW_BYTES <= block * depth <= min(_MOST_WINDOW_BYTES, file_bytes // 2)
        and (engine != "threads" or depth <= _MOST_THREADS)
    ]
    taken = default.engine if default.engine != "auto" else engines[0]
    twin = IoSettings(taken, default.block_bytes, default.depth, threads=1)
    return [*(each for each in grid if each != twin), default]


def describe(io: IoSettings) -> str:
    """Settings in a few words."""
    threads = f", {io.threads} threads" if io.engine == "threads" and io.threads else ""
    return f"{io.engine}, {format_bytes(io.block_bytes)} x {io.depth}{threads}"
