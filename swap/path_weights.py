"""PathWeights: how much each of several paths is given, measured before anything rests there.

A small unnamed file on each path is written once and then read and written at once, as the optimizer's step does, on all
paths at the same time: two paths that share a disk come out about equal, as they will be when they are used. The slowest
path weighs 1. It takes well under a second, and nothing is left behind.

Given weights are taken as they are, and one path is not measured. A path that cannot be measured weighs 1, with a warning:
what is wrong with it will be said when it is used.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tiermem.swap.direct import ALIGNMENT, open_unnamed, preallocate
from tiermem.swap.passes import mixed_rate
from tiermem.swap.paths import NvmePath
from tiermem.swap.settings import IoSettings

_FILE_BYTES = 32 << 20
_SECONDS = 0.25
_MOST_BLOCK_BYTES, _MOST_DEPTH = 1 << 20, 16  # bounds the memory that measuring takes: 32 MiB for each path

logger = logging.getLogger("tiermem")


def weigh(paths: Sequence[NvmePath], io: IoSettings) -> list[float]:
    """Each path's weight. Blocks while it measures; raises ValueError when only some weights are given."""
    given = [path.weight for path in paths if path.weight is not None]
    if len(given) == len(paths):
        return given
    if given:
        missing = ", ".join(str(path.path) for path in paths if path.weight is None)
        raise ValueError(
            f"weights are given for some paths and not for {missing}: give all of them, or none to measure them"
        )
    if len(paths) == 1:
        return [1.0]
    small = dataclasses.replace(
        io, block_bytes=min(io.block_bytes, _MOST_BLOCK_BYTES), depth=min(io.depth, _MOST_DEPTH)
    )
    with ThreadPoolExecutor(len(paths)) as together:
        rates = list(together.map(lambda path: _rate(path, small), paths))
    slowest = min((rate for rate in rates if rate), default=1.0)
    weights = [round((rate or slowest) / slowest, 3) for rate in rates]
    _report(paths, rates, weights)
    return weights


def _report(paths: Sequence[NvmePath], rates: list[float | None], weights: list[float]) -> None:
    figures = ", ".join(
        f"{path.path} {'not measured' if rate is None else f'{rate / 1e9:.2f} GB/s'} (weight {weight:g})"
        for path, rate, weight in zip(paths, rates, weights, strict=True)
    )
    logger.info("mixed reads and writes, all paths at once: %s", figures)


def _rate(path: NvmePath, io: IoSettings) -> float | None:
    """Bytes per second both ways, or None, with a warning, when the path cannot be measured."""
    num_bytes = _FILE_BYTES if path.max_bytes is None else min(_FILE_BYTES, path.max_bytes // ALIGNMENT * ALIGNMENT)
    try:
        if num_bytes < 2 * io.block_bytes:
            raise OSError(errno.ENOSPC, f"max_bytes={path.max_bytes} leaves no room to measure")
        fd, _ = open_unnamed(path.path)
        try:
            preallocate(fd, 0, num_bytes)
            return mixed_rate(fd, num_bytes, io, _SECONDS)
        finally:
            os.close(fd)
    except OSError as error:
        logger.warning("%s could not be measured and weighs 1: %s", path.path, error.strerror or error)
        return None
