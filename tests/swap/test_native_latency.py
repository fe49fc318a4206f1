"""Are latencies counted for every block, and do their quantiles lie where the blocks' times lie?"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from tiermem.swap.base.native import NUM_LATENCY_BUCKETS, READ, WRITE, IoSettings, Map, Op, Queue
from tiermem.tools.bench.io_report import latency_quantiles


def bucket_of(ns: int) -> int:
    """The bucket as native/tiermem.h defines it: 64 ns wide below 1024 ns, then 16 to every
    doubling."""
    units = ns // 64
    octave = max(units.bit_length() - 5, 0)
    return min(16 * octave + (units >> octave), NUM_LATENCY_BUCKETS - 1)


def counts_of(
    times_ns: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """What a queue would count for blocks that took these times."""
    return np.bincount(
        [bucket_of(t) for t in times_ns.tolist()], minlength=NUM_LATENCY_BUCKETS
    ).astype(np.uint64)


@pytest.mark.parametrize("scale_ns", [1_000, 80_000, 5_000_000, 900_000_000])
def test_quantiles_are_those_of_the_times_to_a_sixteenth(scale_ns: int) -> None:
    times = np.random.default_rng(scale_ns).lognormal(0, 1, 20_000) * scale_ns
    quantiles = (0.01, 0.5, 0.9, 0.99, 0.999)
    found = latency_quantiles(counts_of(times.astype(np.int64)), quantiles)
    wanted = np.quantile(times, quantiles) / 1e3
    assert np.all(np.abs(found - wanted) <= wanted / 16 + 0.064)


def test_quantiles_of_one_block_are_its_bucket() -> None:
    for ns in (0, 63, 64, 1023, 1024, 1025, 50_000, 7_654_321):
        low, high = latency_quantiles(counts_of(np.array([ns])), (0.0, 1.0))
        assert low - 1e-6 <= ns / 1e3 <= high <= low * 17 / 16 + 0.065


def test_of_no_block_there_is_no_quantile() -> None:
    found = latency_quantiles(np.zeros(NUM_LATENCY_BUCKETS, np.uint64), (0.5, 0.99))
    assert len(found) == 2 and all(math.isnan(q) for q in found)


def test_empty_buckets_between_are_passed_over() -> None:
    counts = counts_of(np.array([10_000] * 50 + [1_000_000] * 50))
    below, half, above = latency_quantiles(counts, (0.49, 0.5, 0.51))
    assert below < half < 10_900 / 1e3
    assert 900 < above < 1100


def test_each_kind_is_counted_by_itself(engine: str, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    memory = Map(1 << 20)
    memory.commit(0, 1 << 20)
    queue = Queue(IoSettings(engine, 65536, 4))
    for kind, num_bytes in ((WRITE, 1 << 20), (READ, 65536 * 3 + 1)):
        answer = queue.wait(queue.submit([Op(kind, fd, memory.address, num_bytes, 0)]))
        assert answer is not None
        queue.raise_for(answer)
    assert (queue.latencies(WRITE).sum(), queue.latencies(READ).sum()) == (16, 4)
    assert latency_quantiles(queue.latencies(READ), [1.0])[0] > 0
    queue.close()
    memory.close()
    os.close(fd)
