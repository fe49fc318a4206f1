"""Are bytes that a file gives back wrong found before anybody sees them, and named?"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tiermem.swap.base.errors import CorruptionError
from tiermem.swap.base.native import Fault, Workers
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.store.checksum import ROTATION, Pieces, crc32c
from tiermem.swap.store.store import TensorStore
from tiermem.swap.store.stream import Bounce, Parts

MakeStore = Callable[..., TensorStore]
Pattern = Callable[..., torch.Tensor]
PAGE = 4096
NUM_BYTES = 5 * PAGE
# gaps before, between and behind
CUTS = [(3, 700), (700, PAGE), (PAGE, 2 * PAGE + 5), (3 * PAGE, 5 * PAGE - 100)]


def _pieces(cuts: list[tuple[int, int]] = CUTS) -> Pieces:
    starts, stops = (np.array(each, np.int64) for each in zip(*cuts, strict=True))
    return Pieces(starts, stops, lambda number: f"part {number} of x")


def _protected(store: TensorStore, data: torch.Tensor, name: str = "x") -> None:
    """An entry with pieces, all of them known."""
    store.reserve(name, data.shape, data.dtype, Tier.NVME)
    store.sums.protect(name, _pieces())
    slot = store.arena.take(data.numel(), "a test")
    slot.tensor.copy_(data)
    store.write([(name, 0, slot.tensor)], name).wait()
    store.arena.give_back(slot)


def _flip(folder: Path, data: torch.Tensor, at: int) -> int:
    """Flips a bit of byte `at` of an entry on disk; returns its place in the file."""
    (file,) = folder.glob("tiermem-*/segment.bin")
    place = file.read_bytes().index(data.numpy().tobytes()) + at
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 16]))
        opened.flush()
        os.fsync(opened.fileno())
    return place


def test_what_was_written_comes_back_and_its_sums_are_those_of_the_bytes(
    store: TensorStore, pattern: Pattern
) -> None:
    data = pattern(NUM_BYTES)
    _protected(store, data)
    table = store.sums.of("x")
    assert table is not None and table.is_known.all()
    assert table.crcs.tolist() == crc32c([data[start:stop] for start, stop in CUTS])
    assert torch.equal(store.fetch("x").wait(), data)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("at", "piece"), [(3, 0), (699, 0), (700, 1), (2 * PAGE, 2), (5 * PAGE - 101, 3)]
)
@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_flipped_bit_is_named_before_the_bytes_are_seen(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path, at: int, piece: int, num_threads: int
) -> None:
    store, data = make_store(), pattern(NUM_BYTES)
    workers = Workers(num_threads) if num_threads else None
    store.sums.use(workers, "always")
    _protected(store, data)
    _flip(tmp_path, data, at)
    with pytest.raises(
        CorruptionError, match=f"part {piece} of x: .*are not those that were written"
    ) as caught:
        store.fetch("x").wait()
    error, (start, stop) = caught.value, CUTS[piece]
    assert error.errno == errno.EIO and str(error.filename).endswith("segment.bin")
    assert (error.entry, error.entry_offset, error.length) == ("x", start, stop - start)
    assert (
        Path(error.filename).read_bytes()[error.offset :][: stop - start]
        != data[start:stop].numpy().tobytes()
    )
    assert error.written == crc32c([data[start:stop]])[0] != error.seen
    with pytest.raises(CorruptionError):
        store.fetch("x").wait()  # it did not become present
    if workers is not None:
        store.sums.use(None, "always")
        workers.close()


def test_a_flipped_bit_between_pieces_is_nobodys(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path
) -> None:
    store, data = make_store(), pattern(NUM_BYTES)
    _protected(store, data)
    _flip(tmp_path, data, 2 * PAGE + 5)
    assert not torch.equal(store.fetch("x").wait(), data)


def test_ranges_are_checked_where_they_hold_a_piece_whole(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path
) -> None:
    store, data = make_store(), pattern(NUM_BYTES)
    _protected(store, data)
    _flip(tmp_path, data, 4 * PAGE)
    slot = store.arena.take(NUM_BYTES, "a test").tensor
    store.read([("x", 0, slot[: 3 * PAGE])], "whole pieces").wait()
    store.read(
        [("x", 3 * PAGE, slot[:PAGE]), ("x", 4 * PAGE, slot[PAGE : 2 * PAGE])], "halves of one"
    ).wait()
    with pytest.raises(CorruptionError, match="part 3 of x"):
        store.read(
            [("x", 0, slot[: 2 * PAGE]), ("x", 3 * PAGE, slot[2 * PAGE : 4 * PAGE])], "both"
        ).wait()


@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_cancelled_read_leaves_nothing_unverified_and_a_later_one_is_checked(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path, has_arrived: bool
) -> None:
    store, data = make_store(), pattern(NUM_BYTES)
    _protected(store, data)
    _flip(tmp_path, data, 5)
    move = store.fetch("x")
    if has_arrived:  # the move may be checked by then: it has failed either way
        other = store.arena.take(NUM_BYTES, "a test").tensor
        store.read([("x", 4 * PAGE, other[:PAGE])], "read behind it, of no whole piece").wait()
    move.cancel()
    assert move.has_failed if has_arrived else move.was_cancelled
    assert not store.is_present("x")
    with pytest.raises(CorruptionError):
        store.fetch("x").wait()


def test_a_part_that_is_overwritten_is_unknown_until_completed(
    store: TensorStore, pattern: Pattern
) -> None:
    data, fresh = pattern(NUM_BYTES), pattern(2 * PAGE, seed=1)
    _protected(store, data)
    slot = store.arena.take(NUM_BYTES, "a test").tensor
    slot[: 2 * PAGE].copy_(fresh)
    store.write([("x", PAGE, slot[: 2 * PAGE])], "x").wait()  # piece 2 whole
    store.write([("x", 4 * PAGE, slot[PAGE : 2 * PAGE])], "x").wait()  # cuts piece 3
    table = store.sums.of("x")
    assert table is not None and table.is_known.tolist() == [True, True, True, False]
    data[PAGE : 3 * PAGE], data[4 * PAGE :] = fresh, fresh[PAGE:]
    assert torch.equal(store.fetch("x").wait(), data)
    bounce = Bounce(store, PAGE, 2)

    def read(start: int, stop: int) -> torch.Tensor:
        out = torch.empty(stop - start, dtype=torch.uint8)
        bounce.read("x", start, stop, out)
        return out

    assert store.sums.complete("x", read) is table and table.is_known.all()
    assert table.crcs.tolist() == crc32c([data[start:stop] for start, stop in CUTS])


@pytest.mark.parametrize(
    ("start", "stop", "known"),
    [
        (3, 700, [1, 1, 1, 1]),
        (3, 701, [1, 0, 1, 1]),
        (100, 5000, [0, 1, 0, 1]),
        (0, 5 * PAGE, [1, 1, 1, 1]),
    ],
)
def test_bytes_at_odd_offsets_make_known_what_they_hold_whole(
    store: TensorStore, pattern: Pattern, start: int, stop: int, known: list[int]
) -> None:
    data, fresh = pattern(NUM_BYTES), pattern(stop - start, seed=2)
    _protected(store, data)
    Bounce(store, PAGE, 2).write("x", start, fresh)
    data[start:stop] = fresh
    table = store.sums.of("x")
    assert table is not None and table.is_known.tolist() == [bool(each) for each in known]
    due = crc32c([data[first:last] for first, last in CUTS])
    assert [crc for crc, is_known in zip(table.crcs.tolist(), known, strict=True) if is_known] == [
        crc for crc, is_known in zip(due, known, strict=True) if is_known
    ]
    assert torch.equal(store.fetch("x").wait(), data)


def test_what_shares_a_block_with_odd_bytes_keeps_its_sum_and_not_that_of_what_was_read(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path
) -> None:
    store, data = make_store(), pattern(NUM_BYTES)
    _protected(store, data)
    _flip(tmp_path, data, 10)
    # reads the block, the wrong byte with it
    Bounce(store, PAGE, 2).write("x", 700, pattern(PAGE - 700, seed=3))
    with pytest.raises(CorruptionError, match="part 0 of x"):
        store.fetch("x").wait()


@pytest.mark.parametrize(
    ("start", "at", "number"), [(0, 10, 0), (700, PAGE + 10, 2), (PAGE, 5 * PAGE - 101, 3)]
)
def test_a_piece_that_no_buffer_holds_whole_is_verified(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path, start: int, at: int, number: int
) -> None:
    store, data = make_store(), pattern(NUM_BYTES)
    _protected(store, data)
    place = _flip(tmp_path, data, at)
    into = torch.empty(NUM_BYTES - start, dtype=torch.uint8)
    with pytest.raises(CorruptionError, match=f"part {number} of x") as caught:
        Bounce(store, PAGE, 2).read("x", start, NUM_BYTES, into)
    assert caught.value.offset == place - (at - caught.value.entry_offset)


@pytest.mark.parametrize(("at", "number"), [(10, 0), (2 * PAGE, 2)])
def test_a_piece_that_a_read_of_elements_cuts_is_verified(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path, at: int, number: int
) -> None:
    store, data = make_store(), pattern(NUM_BYTES)
    _protected(store, data)
    parts = Parts(store, Bounce(store, PAGE, 2))
    cut = slice(12, PAGE + 8)
    assert torch.equal(parts.read_part("x", torch.uint8, cut), data[cut])
    _flip(tmp_path, data, at)
    with pytest.raises(CorruptionError, match=f"part {number} of x"):
        parts.read_part("x", torch.uint8, cut)


def test_an_entry_is_cut_between_its_pieces(store: TensorStore, pattern: Pattern) -> None:
    _protected(store, pattern(NUM_BYTES))
    store.reserve("y", (NUM_BYTES,), torch.uint8, Tier.NVME)

    def cuts(entry: str, most_bytes: int) -> list[tuple[int, int]]:
        return [(c.start, c.stop) for c in store.sums.cuts(entry, NUM_BYTES, most_bytes)]

    assert cuts("x", 2 * PAGE) == [
        (0, PAGE), (PAGE, 2 * PAGE + 5), (2 * PAGE + 5, 4 * PAGE + 5), (4 * PAGE + 5, NUM_BYTES),
    ]  # fmt: skip
    assert cuts("x", NUM_BYTES) == [(0, NUM_BYTES)]
    assert cuts("y", 4 * PAGE) == [(0, 4 * PAGE), (4 * PAGE, NUM_BYTES)]


def test_the_file_that_is_named_is_the_one_of_its_path(
    make_store: MakeStore, pattern: Pattern, two_paths: list[NvmePath]
) -> None:
    store, named = make_store(paths=two_paths), set()
    for seed in range(4):
        data = pattern(NUM_BYTES, seed)
        _protected(store, data, f"x{seed}")
        (path,) = [
            each.path
            for each in two_paths
            if data.numpy().tobytes() in next(each.path.glob("tiermem-*/segment.bin")).read_bytes()
        ]
        _flip(path, data, 2 * PAGE)
        with pytest.raises(CorruptionError) as caught:
            store.fetch(f"x{seed}").wait()
        assert Path(caught.value.filename).parents[1] == path
        named.add(path)
    assert len(named) == 2


def test_wrong_bytes_can_be_overwritten(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path
) -> None:
    store, data = make_store(), pattern(NUM_BYTES)
    _protected(store, data)
    _flip(tmp_path, data, 10)
    data[3:700] = pattern(697, seed=3)
    Bounce(store, PAGE, 2).write("x", 3, data[3:700])
    assert torch.equal(store.fetch("x").wait(), data)


def test_a_write_that_failed_is_not_taken_for_what_was_written(
    make_store: MakeStore, pattern: Pattern, engine: str
) -> None:
    store = make_store(engine=engine, faults=(Fault(1, "error", errno.EIO),))
    store.reserve("x", (NUM_BYTES,), torch.uint8, Tier.NVME)
    store.sums.protect("x", _pieces())
    slot = store.arena.take(NUM_BYTES, "a test").tensor
    slot.copy_(pattern(NUM_BYTES))
    store.write([("x", 0, slot)], "x").wait()
    slot.copy_(pattern(NUM_BYTES, seed=1))
    with pytest.raises(OSError, match="failed"):
        store.write([("x", 0, slot)], "x").wait()
    with pytest.raises(CorruptionError):
        store.read([("x", 0, slot)], "x").wait()
    with pytest.raises(OSError, match="writing"):
        store.flush()


@pytest.mark.parametrize("num_entries", [1, 5])
def test_sampling_checks_every_entry_once_in_sixteen_reads(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path, num_entries: int
) -> None:
    store = make_store()
    store.sums.use(None, "sample")
    names = [f"x{i}" for i in range(num_entries)]
    for i, name in enumerate(names):
        _protected(store, pattern(NUM_BYTES, seed=i), name)
        _flip(tmp_path, pattern(NUM_BYTES, seed=i), 2 * PAGE)
    slot = store.arena.take(NUM_BYTES, "a test").tensor
    found: dict[str, list[int]] = {name: [] for name in names}
    for turn in range(2 * ROTATION):
        for name in names:
            try:
                store.read([(name, 0, slot)], name).wait()
            except CorruptionError:
                found[name].append(turn)
    first = [turns[0] for turns in found.values()]
    assert len({*first}) == num_entries and max(first) < ROTATION  # another entry each time
    # what was found damaged is due in each later read
    assert list(found.values()) == [[*range(turn, 2 * ROTATION)] for turn in first]


def test_with_verify_resume_sums_are_taken_and_nothing_is_compared(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path
) -> None:
    store, data = make_store(), pattern(NUM_BYTES)
    store.sums.use(None, "resume")
    _protected(store, data)
    _flip(tmp_path, data, 5)
    store.fetch("x").wait()
    table = store.sums.of("x")
    assert table is not None and table.crcs.tolist() == crc32c(
        [data[start:stop] for start, stop in CUTS]
    )


def test_put_and_write_back_are_summed_as_well(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path
) -> None:
    store, data = make_store(), pattern(NUM_BYTES, seed=4)
    store.reserve("x", data.shape, data.dtype, Tier.NVME)
    store.sums.protect("x", _pieces())
    store.fetch("x").wait().copy_(data)  # undefined, and of unknown sums
    move = store.release("x", dirty=True)
    assert move is not None
    assert torch.equal(store.fetch("x").wait(), data)
    store.release("x")
    _flip(tmp_path, data, 700)
    with pytest.raises(CorruptionError, match="part 1 of x"):
        store.fetch("x").wait()


def test_other_pieces_of_an_entry_keep_what_both_have(store: TensorStore, pattern: Pattern) -> None:
    data = pattern(NUM_BYTES)
    _protected(store, data)
    store.sums.protect(
        "x", _pieces([(3, 700), (700, 800), (PAGE, 2 * PAGE + 5), (4 * PAGE, 5 * PAGE)])
    )
    table = store.sums.of("x")
    assert table is not None and table.is_known.tolist() == [True, False, True, False]
    assert table.crcs[[0, 2]].tolist() == crc32c([data[3:700], data[PAGE : 2 * PAGE + 5]])
    store.drop("x")
    assert store.sums.of("x") is None


def test_pieces_and_words_that_make_no_sense_are_refused(store: TensorStore) -> None:
    for cuts in ([(5, 5)], [(0, 9), (8, 12)], [(9, 12), (0, 4)]):
        with pytest.raises(ValueError, match="ranges in order"):
            store.sums.protect("x", _pieces(cuts))
    with pytest.raises(ValueError, match="'always', 'sample', 'resume'"):
        store.sums.use(None, "never")  # type: ignore[arg-type]


def test_a_read_without_memory_to_sum_in_fails_alone(
    store: TensorStore, pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move that another one's start looks at says that it is done; its own `wait` raises."""
    data = pattern(NUM_BYTES)
    _protected(store, data)

    def refused(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr("tiermem.swap.store.checksum.crc32c_of", refused)
        move = store.fetch("x")
        while not move.is_done():
            pass
        with pytest.raises(OSError, match="no memory"):
            move.wait()
    assert torch.equal(store.fetch("x").wait(), data)
