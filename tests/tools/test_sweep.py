"""Is every setting measured in every loop, turn and turn about, with witnesses among them?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from sweep_values import MIB, options, outcome, setting

from tiermem.tools.bench.io import bytes_of, is_witnessed, jobs_of, settings_of, sweep
from tiermem.tools.bench.io_ranks import CannotRun, RankJob, RankOutcome, Ranks, Setting

GIB = 1 << 30


class FakeRanks(Ranks):
    """Notes the jobs; cannot run what it is told."""

    def __init__(self, cannot: str = "") -> None:
        self.jobs: list[Sequence[RankJob]] = []
        self._cannot = cannot

    def run(self, jobs: Sequence[RankJob]) -> list[RankOutcome]:
        """An outcome for each."""
        self.jobs.append(jobs)
        if jobs[0].setting.engine == self._cannot:
            raise CannotRun("no ring here")
        return [outcome(read=job.num_bytes) for job in jobs]


class FakeFiles:
    """Files that are names."""

    def name(self, place: int, number: int = 0) -> str:
        return f"file {place}.{number}"

    paths = (Path("/folder0"), Path("/folder1"), Path("/folder2"))

    sizes = (64 * MIB,) * 4

    def is_direct(self, places: Sequence[int]) -> bool:
        return 1 not in places


class FakeWitness:
    """Notes when it was asked."""

    name = "somebody"

    def __init__(self, ranks: FakeRanks) -> None:
        self.asked: list[tuple[int, str, int, int]] = []
        self._ranks = ranks

    def measure(self, setting: Setting, num_bytes: int, loop: int) -> None:
        self.asked.append((len(self._ranks.jobs), setting.mode, num_bytes, loop))


def test_settings_take_turns_within_a_mode() -> None:
    given = options(modes=["read", "write"], engines=["auto", "aio"], depths=[1, 8], loops=2)
    ranks = FakeRanks()
    sweep(settings_of(given), given, FakeFiles(), ranks)
    order = [
        (jobs[0].setting.mode, jobs[0].setting.depth, jobs[0].setting.engine) for jobs in ranks.jobs
    ]
    loop = [(1, "auto"), (1, "aio"), (8, "auto"), (8, "aio")]
    assert order == [
        (mode, *which) for mode in ("read", "write") for _ in range(2) for which in loop
    ]


def test_a_witness_stands_after_the_settings_it_judges_in_every_loop() -> None:
    given = options(
        modes=["read", "tensors"], engines=["auto", "aio"], depths=[1, 8], ranks=[1, 2], loops=2
    )
    settings = settings_of(given)
    ranks = FakeRanks()
    witness = FakeWitness(ranks)
    told: list[str] = []
    sweep(settings, given, FakeFiles(), ranks, [witness], told.append)
    asked = [(4, 0), (8, 0), (12, 1), (16, 1)]  # after how many passes, in which loop
    assert witness.asked == [(passes, "read", 64 * MIB, loop) for passes, loop in asked]
    assert len(told) == 2 * len(settings) + len(witness.asked)


def test_an_engine_that_cannot_run_is_tried_once_and_the_others_go_on() -> None:
    given = options(engines=["uring", "threads"], loops=3)
    ranks = FakeRanks(cannot="uring")
    refused, measured = sweep(settings_of(given), given, FakeFiles(), ranks)
    assert [jobs[0].setting.engine for jobs in ranks.jobs] == [
        "uring",
        "threads",
        "threads",
        "threads",
    ]
    assert (refused.error, refused.outcomes) == ("no ring here", [])
    assert (measured.error, len(measured.gbps())) == (None, 3)


def test_several_paths_are_measured_alone_and_all_at_once() -> None:
    given = options("/a", "/b")
    settings = settings_of(given)
    assert [(each.path, each.path_indices) for each in settings] == [
        ("/a", (0,)),
        ("/b", (1,)),
        ("all", (0, 1)),
    ]
    assert [is_witnessed(each) for each in settings] == [True, True, False]
    ranks = FakeRanks()
    measured = sweep(settings, given, FakeFiles(), ranks)
    assert [each.is_direct for each in measured] == [True, False, False]
    assert ranks.jobs[2][0].files == ("file 0.0", "file 1.0")
    assert [jobs[0].num_bytes for jobs in ranks.jobs] == [64 * MIB] * 3


def test_one_path_has_no_all() -> None:
    assert {each.path for each in settings_of(options())} == {"/a"}


def test_random_has_its_own_block_and_sustained_one_setting() -> None:
    settings = settings_of(
        options(
            modes=["random", "sustained"],
            engines=["auto", "aio"],
            blocks=[MIB, 4 * MIB],
            depths=[1, 8],
            ranks=[1, 2],
        )
    )
    assert {each.block_bytes for each in settings if each.mode == "random"} == {4096}
    assert [each for each in settings if each.mode == "sustained"] == [
        setting("sustained", block_bytes=4 * MIB)
    ]


@pytest.mark.parametrize(
    ("mode", "block", "depth", "expected"),
    [
        ("read", 3 * MIB, 8, 63 * MIB),  # whole blocks
        ("mixed", MIB, 8, 32 * MIB),  # each way
        ("mixed", 64 * MIB, 8, 64 * MIB),  # never nothing
        ("random", 4096, 1, 2048 * 4096),
        ("random", 4096, 64, 64 * MIB),  # never more than the file
        ("sustained", 3 * MIB, 8, GIB // (3 * MIB) * 3 * MIB),
    ],
)
def test_bytes_of_a_pass(mode: str, block: int, depth: int, expected: int) -> None:
    assert (
        bytes_of(setting(mode, block_bytes=block, depth=depth), options(sustained_bytes=GIB))
        == expected
    )


def test_each_rank_has_a_file_and_a_seed_of_its_own() -> None:
    jobs = jobs_of(setting("random", ranks=3), options(threads=5), FakeFiles(), seed=2)
    assert [job.files for job in jobs] == [(f"file 0.{rank}",) for rank in range(3)]
    assert len({job.seed for job in jobs}) == 3
    assert {job.threads for job in jobs} == {5}


@pytest.mark.parametrize(
    ("mode", "is_synced"),
    [
        ("read", False),
        ("random", False),
        ("tensors", False),
        ("write", True),
        ("mixed", True),
        ("random-write", True),
    ],
)
def test_only_what_writes_ends_with_a_sync(mode: str, is_synced: bool) -> None:
    assert jobs_of(setting(mode), options(sync=True), FakeFiles())[0].sync is is_synced
