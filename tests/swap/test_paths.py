"""Are bytes dealt over several paths within their caps, and is a path that is too small refused
with the arithmetic?"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drawn import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiermem.swap.base.ranges import ALIGNMENT
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.files import Extent, Files
from tiermem.swap.disk.paths import NvmePath, as_paths, deal_shares
from tiermem.swap.store.store import TensorStore

MIB = 1 << 20
Pattern = Callable[..., torch.Tensor]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three folders."""
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.mkdir()
    return paths


# ---- spelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", ["/mnt/a", Path("/mnt/a"), NvmePath(Path("/mnt/a"))])
def test_one_path_in_any_spelling_is_one_path(one: str | Path | NvmePath) -> None:
    assert as_paths(one) == as_paths([one]) == (NvmePath(Path("/mnt/a")),)


def test_several_spellings_go_together() -> None:
    capped = NvmePath(Path("/c"), 1 << 30, 2.0)
    assert as_paths(["/a", Path("/b"), capped]) == (
        NvmePath(Path("/a")),
        NvmePath(Path("/b")),
        capped,
    )
    assert as_paths(()) == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_bytes": 0}, "/a: max_bytes is 0; it must be at least 1"),
        ({"weight": 0.0}, "/a: weight is 0.0; it must be more than 0"),
        ({"weight": float("inf")}, "/a: weight is inf"),
        ({"weight": float("nan")}, "/a: weight is nan"),
    ],
)
def test_cap_or_weight_that_means_nothing_is_refused(
    fields: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        NvmePath(Path("/a"), **fields)  # type: ignore[arg-type]


# ---- shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "weights", "rooms", "shares"),
    [
        (0, [1, 1], [None, None], [0, 0]),
        (40, [1, 1, 2], [None] * 3, [10, 10, 20]),
        (100, [1, 1, 2], [None, None, 20], [40, 40, 20]),
        # the second is full only once it takes of the third's
        (100, [1, 1, 8], [None, 15, 20], [65, 15, 20]),
        (60, [5, 1, 1], [20, 20, 20], [20, 20, 20]),
        (10, [3, 1], [0, None], [0, 10]),
    ],
)
def test_what_a_full_path_cannot_take_is_dealt_over_the_others(
    num_bytes: int, weights: list[float], rooms: list[int | None], shares: list[int]
) -> None:
    scaled = [None if room is None else room * MIB for room in rooms]
    assert deal_shares(num_bytes * MIB, weights, scaled) == [share * MIB for share in shares]


@settings(max_examples=drawn(200))
@given(
    num_bytes=st.integers(1, 1 << 45),
    paths=st.lists(
        st.tuples(st.floats(1e-3, 1e3), st.none() | st.integers(0, 1 << 30)), min_size=1, max_size=6
    ),
)
def test_shares_hold_everything_within_every_room(
    num_bytes: int, paths: list[tuple[float, int | None]]
) -> None:
    weights = [weight for weight, _ in paths]
    rooms = [None if blocks is None else blocks * ALIGNMENT for _, blocks in paths]
    bounded = [room for room in rooms if room is not None]
    if len(bounded) == len(rooms) and sum(bounded) < num_bytes:
        with pytest.raises(ValueError, match="have no room"):
            deal_shares(num_bytes, weights, rooms)
        return
    shares = deal_shares(num_bytes, weights, rooms)
    assert num_bytes <= sum(shares) < num_bytes + len(paths) * ALIGNMENT
    assert all(share % ALIGNMENT == 0 for share in shares)
    assert all(room is None or share <= room for share, room in zip(shares, rooms, strict=True))
    free = [i for i in range(len(paths)) if rooms[i] != shares[i]]
    for i in free:  # those that are not full hold the same for their weight, but for rounding
        for j in free:
            assert (
                abs(shares[i] * weights[j] - shares[j] * weights[i])
                <= ALIGNMENT * (weights[i] + weights[j]) * 1.001
            )


# ---- caps ----------------------------------------------------------------------------------------


def test_reservation_follows_weights_and_caps(folders: list[Path]) -> None:
    paths = [
        NvmePath(folders[0], weight=1.0),
        NvmePath(folders[1], 6 * MIB + 1, 4.0),
        NvmePath(folders[2], weight=2.0),
    ]
    files = Files(paths)
    files.reserve(21 * MIB)
    assert [segment.size_bytes for segment in files.segments] == [5 * MIB, 6 * MIB, 10 * MIB]
    files.close(keep=False)


def test_reservation_counts_what_a_capped_path_holds_already(folders: list[Path]) -> None:
    files = Files([NvmePath(folders[0], 4 * MIB), NvmePath(folders[1])])
    files.allocate(3 * MIB)  # the first path's file grows to its cap
    files.reserve(10 * MIB)
    assert [segment.size_bytes for segment in files.segments] == [4 * MIB, 9 * MIB]
    files.close(keep=False)


def test_caps_that_are_too_small_together_are_refused_with_the_arithmetic(
    folders: list[Path],
) -> None:
    files = Files([NvmePath(folders[0], 4 * MIB), NvmePath(folders[1], 2 * MIB + 5)])
    files.allocate(MIB)
    message = re.escape(
        f"{8 * MIB} bytes are needed, the paths' caps leave {5 * MIB}: {folders[0]} {3 * MIB} "
        f"(max_bytes={4 * MIB}), "
        f"{folders[1]} {2 * MIB} (max_bytes={2 * MIB})"
    )
    before = [os.fstat(segment.fd).st_blocks for segment in files.segments]
    with pytest.raises(OSError, match=message) as refusal:
        files.reserve(8 * MIB)
    assert refusal.value.errno == errno.ENOSPC
    assert [os.fstat(segment.fd).st_blocks for segment in files.segments] == before
    files.reserve(5 * MIB)
    files.close(keep=False)


def test_capped_path_passes_extents_on(folders: list[Path]) -> None:
    files = Files([NvmePath(folders[0], 2 * MIB), NvmePath(folders[1]), NvmePath(folders[2], MIB)])
    extents = [files.allocate(MIB) for _ in range(9)]
    assert [extent.path_index for extent in extents] == [0, 1, 2, 0, 1, 1, 1, 1, 1]
    files.free(extents[0])
    assert files.allocate(MIB).path_index == 0
    files.close(keep=False)


def test_only_capped_paths_refuse_naming_each(folders: list[Path]) -> None:
    files = Files([NvmePath(folders[0], 2 * MIB), NvmePath(folders[1], MIB)])
    with pytest.raises(
        OSError, match=r"max_bytes=2097152 leaves 2097152\. Raise it or add a path"
    ) as refusal:
        files.allocate(3 * MIB)
    assert refusal.value.errno == errno.ENOSPC
    assert all(str(folder) in str(refusal.value) for folder in folders[:2])
    files.close(keep=False)


@settings(max_examples=drawn(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 400_000)), max_size=40),
    cap=st.integers(1, 2 * MIB),
)
def test_file_never_grows_beyond_its_cap(
    folders: list[Path], steps: list[tuple[bool, int]], cap: int
) -> None:
    files = Files([NvmePath(folders[0], cap), NvmePath(folders[1], 2 * cap)])
    held: list[Extent] = []
    for is_allocation, number in steps:
        if is_allocation or not held:
            with contextlib.suppress(OSError):  # no room on either
                held.append(files.allocate(number))
        else:
            files.free(held.pop(number % len(held)))
        assert os.fstat(files.segments[0].fd).st_size == files.segments[0].size_bytes <= cap
        assert os.fstat(files.segments[1].fd).st_size == files.segments[1].size_bytes <= 2 * cap
    files.close(keep=False)


# ---- a path with too little room -----------------------------------------------------------------


def test_path_with_less_free_than_its_share_is_refused_and_nothing_stays_taken(
    tmp_path: Path, folders: list[Path], mount: Callable[..., Path]
) -> None:
    small = mount("ext4", 24 * MIB)
    files = Files([NvmePath(folders[0], weight=1.0), NvmePath(small, weight=3.0)])
    first = files.allocate(MIB)
    held = [(segment.size_bytes, os.fstat(segment.fd).st_blocks) for segment in files.segments]
    with pytest.raises(OSError, match="its share is") as refusal:
        files.reserve(400 * MIB)
    told = str(refusal.value)
    assert (refusal.value.errno, refusal.value.filename) == (errno.ENOSPC, str(small))
    assert f"its share is {300 * MIB} of {400 * MIB} bytes (weight 3 of 4)" in told
    assert re.search(rf"{300 * MIB} bytes are needed, \d+ are free: No space left", told)
    assert (
        "free some space or add a path); or cap this path with max_bytes, or give it less weight"
        in told
    )
    assert [
        (segment.size_bytes, os.fstat(segment.fd).st_blocks) for segment in files.segments
    ] == held
    assert files.allocate(MIB).path_index in (0, 1)  # goes on
    files.free(first)
    files.reserve(4 * MIB)
    files.close(keep=False)


def test_paths_that_share_a_file_system_are_told_so(mount: Callable[..., Path]) -> None:
    small = mount("ext4", 48 * MIB)
    for name in ("a", "b"):
        (small / name).mkdir()
    files = Files([small / "a", small / "b"])
    with pytest.raises(
        OSError, match=re.escape(f"({small / 'a'} took theirs there first)")
    ) as refusal:
        files.reserve(60 * MIB)
    assert refusal.value.filename == str(small / "b")
    assert [os.fstat(segment.fd).st_blocks for segment in files.segments] == [0, 0]
    files.reserve(30 * MIB)
    files.close(keep=False)


def test_one_path_is_refused_without_talk_of_shares(mount: Callable[..., Path]) -> None:
    files = Files(mount("ext4", 24 * MIB))
    with pytest.raises(OSError, match="free some space or add a path") as refusal:
        files.reserve(64 * MIB)
    assert "share" not in str(refusal.value)
    files.close(keep=False)


# ---- the store -----------------------------------------------------------------------------------


def test_stats_tell_paths_apart_and_count_queues_that_were_closed(
    make_store: Callable[..., TensorStore], two_paths: list[NvmePath], pattern: Pattern
) -> None:
    store = make_store(host_bytes=16 << 20, paths=two_paths)
    for name, num_bytes in (("on a", 8192), ("on b", 12_288)):
        store.put(name, pattern(num_bytes), Tier.NVME)
    store.flush()
    queues = store.queues
    store.arena.give_back(store.arena.take(8 << 20))
    store.flush()  # more memory is registered: other queues
    assert store.queues is not queues
    store.fetch("on b").wait()
    paths = store.stats().paths
    assert [(p.path, p.weight, p.read_bytes, p.written_bytes, p.used_bytes) for p in paths] == [
        (two_paths[0].path, 1.0, 0, 8192, 8192),
        (two_paths[1].path, 1.0, 12_288, 12_288, 12_288),
    ]
    assert store.stats().nvme_written_bytes == 8192 + 12_288
    assert store.stats().nvme_bytes == 8192 + 12_288
    store.close()
    assert [(p.written_bytes, p.used_bytes) for p in store.stats().paths] == [
        (8192, 0),
        (12_288, 0),
    ]


def test_store_without_paths_has_none_in_its_stats(tmp_path: Path) -> None:
    with TensorStore(host_bytes=1 << 20) as store:
        assert store.stats().paths == ()
    with TensorStore(str(tmp_path), 1 << 20) as store:  # one path needs no list
        assert [path.path for path in store.stats().paths] == [tmp_path]
