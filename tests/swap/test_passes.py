"""Does a pass move exactly the bytes it says, where it says, whatever sizes cut, wrap and leave
tails?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiermem.swap.base.native import READ, SYNC, WRITE, Blocks, IoSettings, Op
from tiermem.swap.disk.direct import open_unnamed
from tiermem.swap.disk.passes import MODES, Passes, Quota, memory_bytes, mixed_rate

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with open_unnamed(tmp_path)[0] as fd:
        os.posix_fallocate(fd, 0, 24 * MIB)
        yield fd


def watch(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> list[Op]:
    """Every transfer that a pass submits from now on."""
    seen: list[Op] = []
    submit, submit_blocks = passes.queue.submit, passes.queue.submit_blocks

    def note(ops: list[Op], *rest: int) -> int:
        seen.extend(ops)
        return submit(ops, *rest)

    def note_blocks(blocks: Blocks) -> int:
        kind, fd, addresses, offsets, length = blocks
        seen.extend(
            Op(kind, fd, int(a), length, int(o)) for a, o in zip(addresses, offsets, strict=True)
        )
        return submit_blocks(blocks)

    monkeypatch.setattr(passes.queue, "submit", note)
    monkeypatch.setattr(passes.queue, "submit_blocks", note_blocks)
    return seen


def bytes_of(ops: list[Op], kind: int) -> int:
    return sum(op.length for op in ops if op.kind == kind)


@pytest.mark.parametrize("mode", MODES)
# even, leaving a tail of the piece, beyond it
@pytest.mark.sampled(4)
@pytest.mark.parametrize("block_bytes", [4 * KIB, 68 * KIB, 5 * MIB])
@pytest.mark.parametrize("depth", [1, 7])
def test_bytes_are_those_that_the_kernel_completed(
    fd: int, mode: str, block_bytes: int, depth: int
) -> None:
    with Passes(fd, 24 * MIB, IoSettings(block_bytes=block_bytes, depth=depth)) as passes:
        done = passes.run(mode, 11 * MIB)
        counters = passes.queue.counters()
    whole = -(-11 * MIB // block_bytes) * block_bytes
    assert (done.read_bytes, done.written_bytes) == (counters.read_bytes, counters.written_bytes)
    assert done.read_bytes == whole * (mode not in ("write", "random-write"))
    assert done.written_bytes == whole * (mode in ("write", "mixed", "random-write"))
    assert done.gbps == pytest.approx((done.read_bytes + done.written_bytes) / done.seconds / 1e9)


def test_the_file_once_is_the_default_and_a_tail_shorter_than_a_block_is_left(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Passes(fd, 5 * MIB + 4 * KIB, IoSettings(block_bytes=MIB, depth=4)) as passes:
        seen = watch(passes, monkeypatch)
        assert passes.run("read").read_bytes == 5 * MIB
    assert [(op.offset, op.length) for op in seen] == [(0, 4 * MIB), (4 * MIB, MIB)]


def test_more_bytes_than_the_file_begin_again_at_its_start(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Passes(fd, 6 * MIB, IoSettings(block_bytes=MIB, depth=4)) as passes:
        seen = watch(passes, monkeypatch)
        assert passes.run("write", 15 * MIB).written_bytes == 15 * MIB
    at = [(op.offset // MIB, op.length // MIB) for op in seen]
    assert at == [(0, 4), (4, 2), (0, 4), (4, 2), (0, 3)]


def test_mixed_writes_half_a_file_away_from_where_it_reads(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Passes(fd, 20 * MIB, IoSettings(block_bytes=MIB, depth=4)) as passes:
        seen = watch(passes, monkeypatch)
        passes.run("mixed")
    assert covered(seen, READ, 20) == covered(seen, WRITE, 20) == [1] * 20
    reads, writes = ([op for op in seen if op.kind == kind] for kind in (READ, WRITE))
    assert (reads[0].offset, writes[0].offset) == (0, 10 * MIB)
    assert any(op.length < 4 * MIB for op in writes), "a write that the file's end cuts is split"


def covered(ops: list[Op], kind: int, num_blocks: int) -> list[int]:
    """How often each MiB of the file was moved."""
    counts = [0] * num_blocks
    for op in ops:
        if op.kind == kind:
            for block in range(op.offset // MIB, (op.offset + op.length) // MIB):
                counts[block] += 1
    return counts


@pytest.mark.parametrize("mode", MODES)
def test_no_two_transfers_in_flight_share_memory(
    fd: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place is used again only after its tag was waited for."""
    with Passes(fd, 24 * MIB, IoSettings(block_bytes=64 * KIB, depth=16)) as passes:
        seen = watch(passes, monkeypatch)
        in_flight: dict[int, list[Op]] = {}
        submit, submit_blocks, wait = (
            passes.queue.submit,
            passes.queue.submit_blocks,
            passes.queue.wait,
        )

        def check(tag: int, first: int) -> int:
            held = [
                (op.address, op.address + op.length) for ops in in_flight.values() for op in ops
            ]
            for op in seen[first:]:
                assert all(
                    op.address >= end or op.address + op.length <= start for start, end in held
                )
            in_flight[tag] = seen[first:]
            return tag

        def ended(tag: int, *rest: float) -> object:
            del in_flight[tag]
            return wait(tag, *rest)

        monkeypatch.setattr(
            passes.queue, "submit", lambda *a: check(*reversed((len(seen), submit(*a))))
        )
        monkeypatch.setattr(
            passes.queue,
            "submit_blocks",
            lambda *a: check(*reversed((len(seen), submit_blocks(*a)))),
        )
        monkeypatch.setattr(passes.queue, "wait", ended)
        passes.run(mode, 40 * MIB)
    assert seen
    assert not in_flight


def test_random_blocks_lie_in_the_file_and_follow_the_seed(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []
    for seed in (1, 1, 2):
        with Passes(fd, MIB + 8 * KIB, IoSettings(block_bytes=4 * KIB, depth=64)) as passes:
            seen = watch(passes, monkeypatch)
            passes.run("random", 5000 * 4 * KIB, seed=seed)
        assert len(seen) == 5000
        assert {op.kind for op in seen} == {READ}
        assert all(
            op.offset % (4 * KIB) == 0 and op.offset + op.length <= MIB + 8 * KIB for op in seen
        )
        places.append([op.offset for op in seen])
    assert places[0] == places[1] != places[2]
    assert len(set(places[0])) == 258, "every block of the file is met"


def test_what_is_written_is_no_run_of_zeros(fd: int) -> None:
    with Passes(fd, 8 * MIB, IoSettings(block_bytes=MIB, depth=2)) as passes:
        passes.run("write")
        passes.run("read")
    os.lseek(fd, 0, os.SEEK_SET)
    os.set_blocking(fd, True)
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        content = file.read(8 * MIB)
    assert all(
        len(set(content[start : start + 4096])) > 200 for start in range(0, 8 * MIB, 64 * KIB)
    )


def test_several_passes_share_a_quota(tmp_path: Path) -> None:
    quota, moved = Quota(10 * MIB), 0
    for _ in range(2):
        with open_unnamed(tmp_path)[0] as fd:
            os.posix_fallocate(fd, 0, 4 * MIB)
            with Passes(fd, 4 * MIB, IoSettings(block_bytes=MIB, depth=2)) as passes:
                moved += passes.run("write", quota).written_bytes
    assert moved == 10 * MIB
    assert quota.take(MIB) == 0


def test_a_sync_ends_the_pass_when_asked_for(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Passes(fd, 4 * MIB, IoSettings(depth=2)) as passes:
        seen = watch(passes, monkeypatch)
        passes.run("write", sync=True)
    assert [op.kind for op in seen] == [WRITE, SYNC]


def test_a_pattern_that_is_not_known_is_refused(fd: int) -> None:
    with (
        Passes(fd, 4 * MIB, IoSettings(depth=2)) as passes,
        pytest.raises(ValueError, match="'copy'; allowed are read"),
    ):
        passes.run("copy")


def test_a_block_beyond_the_file_is_refused(fd: int) -> None:
    with pytest.raises(ValueError, match="blocks of 8388608 bytes do not fit a file of 4194304"):
        Passes(fd, 4 * MIB, IoSettings(block_bytes=8 * MIB))


def test_memory_is_what_is_in_flight_and_as_much_again() -> None:
    assert memory_bytes(IoSettings(block_bytes=MIB, depth=32)) == 64 * MIB
    # at least four pieces
    assert memory_bytes(IoSettings(block_bytes=8 * MIB, depth=2)) == 48 * MIB
    assert memory_bytes(IoSettings(block_bytes=8 * MIB, depth=64)) == 768 * MIB  # at most 256 MiB


def test_the_mixed_rate_counts_both_directions(fd: int) -> None:
    assert mixed_rate(fd, 8 * MIB, IoSettings(depth=4), seconds=0.01) > 0
