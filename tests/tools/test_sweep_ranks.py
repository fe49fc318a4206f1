"""Do ranks start together, say what they cannot do, and leave nothing when one dies?"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

pytest.importorskip("_tiermem_native")

from tiermem.tools.bench.io_ranks import CannotRun, RankJob, Ranks, Setting
from tiermem.tools.measure.files import BenchFiles

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BenchFiles]:
    with BenchFiles([tmp_path], [8 * MIB, 8 * MIB, 32 * MIB]) as opened:
        yield opened


@pytest.fixture(scope="module", autouse=True)
def tracker() -> None:
    """Starting processes needs a helper of Python's, which then stays."""
    resource_tracker.ensure_running()


@pytest.fixture(scope="module")
def ranks(tracker: None) -> Iterator[Ranks]:
    """Two, for tests that leave them as they are: starting one takes seconds."""
    with Ranks(2) as started:
        yield started


def content(file: str) -> bytes:
    return Path(file).read_bytes()


def job(
    files: BenchFiles,
    rank: int,
    mode: str = "write",
    io: tuple[str, int, int] = ("auto", MIB, 2),
    **changed: object,
) -> RankJob:
    """A job that moves the rank's file once. `io`: engine, block_bytes, depth."""
    number = -1 if mode == "sustained" else rank
    plain = RankJob(
        Setting(mode, *io, 1, str(files.paths[0]), (0,)),
        files=(files.name(0, number),),
        folders=(str(files.paths[0]),),
        file_bytes=files.sizes[number],
        num_bytes=files.sizes[number],
        is_direct=files.is_direct([0]),
    )
    return plain._replace(**changed)  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_measure_together_refuse_together_and_go_on(files: BenchFiles, ranks: Ranks) -> None:
    first, second = ranks.run([job(files, rank) for rank in (0, 1)])
    assert first.moved.written_bytes == second.moved.written_bytes == 8 * MIB
    assert (first.moved.read_bytes, first.num_blocks, sum(first.latencies)) == (0, 8, 8)
    assert 0 <= first.idle_fraction <= 1
    held = content(files.name(0))
    with pytest.raises(CannotRun, match="engine"):
        ranks.run([job(files, 0), job(files, 1, io=("floppy", MIB, 2))])
    assert content(files.name(0)) == held, "one that cannot keeps the other from starting"
    mixed = ranks.run([job(files, 0, "mixed", num_bytes=4 * MIB)])
    assert [each.moved for each in mixed] == [(4 * MIB, 4 * MIB)]
    both = (files.name(0, 0), files.name(0, 1))
    together = ranks.run([job(files, 0, "read", num_bytes=12 * MIB)._replace(files=both)])
    assert together[0].moved.read_bytes == 12 * MIB


@pytest.mark.slow
def test_tensors_are_set_beside_sequential_passes_and_their_store_goes(
    files: BenchFiles, ranks: Ranks, tmp_path: Path
) -> None:
    (outcome,) = ranks.run([job(files, 0, "tensors")])
    assert [what for what, _, _ in outcome.shares] == ["put", "fetch", "change"]
    assert all(rate > 0 and beside > 0 for _, rate, beside in outcome.shares)
    assert outcome.moved.read_bytes == 8 * MIB
    assert list(tmp_path.iterdir()) == []


def test_a_sustained_write_is_a_series_that_grows(files: BenchFiles, ranks: Ranks) -> None:
    (outcome,) = ranks.run([job(files, 0, "sustained", ("auto", 65536, 1), num_bytes=96 * MIB)])
    assert outcome.moved.written_bytes == 96 * MIB, "beyond the file it begins again"
    sizes, times = zip(*outcome.series, strict=True)
    assert len(sizes) > 2
    assert list(sizes) == sorted(sizes)
    assert list(times) == sorted(times)
    (stopped,) = ranks.run([job(files, 0, "sustained", num_bytes=1 << 40, seconds=0.05)])
    assert 0 < stopped.moved.written_bytes < 1 << 40


@pytest.mark.slow
def test_a_rank_that_dies_is_an_error_and_its_store_is_removed(
    files: BenchFiles, tmp_path: Path
) -> None:
    with Ranks(1, [tmp_path]) as ranks:
        rank = ranks._ranks[0]
        rank.connection.send(job(files, 0, "tensors"))
        assert rank.connection.recv() == "ready"
        assert [folder.name.split("-")[0] for folder in tmp_path.iterdir()] == ["tiermem"]
        rank.process.kill()
        rank.process.join()
        with pytest.raises(OSError, match="rank 0 ended with status -9"):
            ranks.run([job(files, 0)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_rank_that_is_stopped_unwinds(files: BenchFiles, tmp_path: Path) -> None:
    ranks = Ranks(1)  # removes nothing itself
    ranks._ranks[0].connection.send(job(files, 0, "tensors"))
    assert ranks._ranks[0].connection.recv() == "ready"
    ranks.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_file_shorter_than_promised_ends_the_benchmark(files: BenchFiles, tmp_path: Path) -> None:
    with Ranks(1, [tmp_path]) as ranks, pytest.raises(OSError, match="shorter"):
        ranks.run([job(files, 0, "read", file_bytes=16 * MIB, num_bytes=16 * MIB)])
