"""Does an entry's map of slots say, for every byte, what a map that knows each byte by itself would
say?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.swap.store.entry import NoSlotError, SlotPart, Slots

NUM_BYTES = 23
BOUNDS = st.tuples(st.integers(0, NUM_BYTES), st.integers(0, NUM_BYTES)).map(
    lambda pair: (min(pair), max(pair))
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["write", "apart"]), BOUNDS),
        st.tuples(st.just("lose"), BOUNDS),
        st.tuples(st.just("freeze"), st.just((0, 0))),
        st.tuples(st.just("thaw"), st.tuples(st.integers(0, 5), st.just(0))),
    ),
    max_size=60,
)


def write(slots: Slots, start: int, stop: int, is_apart: bool = False) -> None:
    """Begins a write of a range."""
    for part in slots.targets(start, stop, is_apart):
        slots.write(part)


class ByteByByte:
    """The same, one byte at a time."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.current = [0] * NUM_BYTES
        self.holds: list[set[tuple[int, int]]] = [set() for _ in range(NUM_BYTES)]
        self.lost: list[set[int]] = [set() for _ in range(NUM_BYTES)]

    def target(self, byte: int, is_apart: bool) -> int | None:
        held = {slot for _, slot in self.holds[byte]}
        if self.current[byte] not in held and not is_apart:
            return self.current[byte]
        held.add(self.current[byte])
        return next((slot for slot in range(self.num_slots) if slot not in held), None)


def per_byte(parts: list[SlotPart], start: int, stop: int) -> list[int]:
    """The slot of each byte; parts are in order, without gaps, and no two neighbours could be
    one."""
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert all(one.slot != two.slot for one, two in itertools.pairwise(parts))
    if parts:
        assert (parts[0].start, parts[-1].stop) == (start, stop)
    return [part.slot for part in parts for _ in range(part.start, part.stop)]


@settings(max_examples=drawn(400))
@given(steps=STEPS, num_slots=st.integers(1, 4), looked=BOUNDS)
def test_slots_are_those_of_a_map_byte_by_byte(
    steps: list[tuple[str, tuple[int, int]]], num_slots: int, looked: tuple[int, int]
) -> None:
    slots, model = Slots(NUM_BYTES, num_slots), ByteByByte(num_slots)
    frozen: dict[int, list[SlotPart]] = {}
    unchanged: dict[int, list[Sequence[int | None]]] = {}
    for number, (what, (start, stop)) in enumerate(steps):
        if what in ("write", "apart"):
            wished = [model.target(byte, what == "apart") for byte in range(start, stop)]
            if None in wished:
                with pytest.raises(NoSlotError, match=f"all {num_slots} slots"):
                    slots.targets(start, stop, what == "apart")
                continue
            assert per_byte(slots.targets(start, stop, what == "apart"), start, stop) == wished
            assert per_byte(slots.current(0, NUM_BYTES), 0, NUM_BYTES) == model.current
            write(slots, start, stop, what == "apart")
            for byte, slot in zip(range(start, stop), wished, strict=True):
                assert slot is not None
                model.current[byte] = slot
                model.lost[byte].discard(slot)
        elif what == "lose":
            for part in slots.current(start, stop):
                slots.lose(part)
            for byte in range(start, stop):
                model.lost[byte].add(model.current[byte])
        elif what == "freeze":
            frozen[number] = slots.freeze(number)
            for byte in range(NUM_BYTES):
                model.holds[byte].add((number, model.current[byte]))
        elif frozen:
            gone = sorted(frozen)[start % len(frozen)]
            del frozen[gone]
            slots.thaw(gone)
            model.holds = [{hold for hold in holds if hold[0] != gone} for holds in model.holds]
        assert per_byte(slots.current(0, NUM_BYTES), 0, NUM_BYTES) == model.current
        assert per_byte(slots.current(*looked), *looked) == model.current[slice(*looked)]
        places: list[Sequence[int | None]] = [model.current[slice(*looked)]]
        places += [
            [model.target(byte, is_apart) for byte in range(*looked)] for is_apart in (False, True)
        ]
        assert unchanged.setdefault(slots.version, places) == places
        assert slots.held() == {slot for holds in model.holds for _, slot in holds}
        for held, parts in frozen.items():
            where = per_byte(parts, 0, NUM_BYTES)
            assert all((held, slot) in model.holds[byte] for byte, slot in enumerate(where))
            lost = {byte for part in slots.lost(held) for byte in range(part.start, part.stop)}
            assert lost == {byte for byte, slot in enumerate(where) if slot in model.lost[byte]}


def test_without_a_freeze_everything_stays_in_the_first_slot() -> None:
    slots = Slots(100, 3)
    for start in (0, 30, 99):
        write(slots, start, 100)
    assert slots.current(0, 100) == [SlotPart(0, 100, 0)]


def test_write_of_a_part_moves_that_part_and_a_thaw_joins_what_is_equal_again() -> None:
    slots = Slots(100, 2)
    slots.freeze(1)
    write(slots, 40, 60)
    assert slots.current(0, 100) == [SlotPart(0, 40, 0), SlotPart(40, 60, 1), SlotPart(60, 100, 0)]
    write(slots, 0, 100)
    assert slots.current(0, 100) == [SlotPart(0, 100, 1)]
    slots.thaw(1)
    assert slots.current(0, 100) == [SlotPart(0, 100, 1)]
    assert slots.held() == set()
    assert len(slots._pieces) == 1  # or a long run would look through more and more of them


def test_next_write_after_a_commit_goes_back_to_the_slot_that_was_thawed() -> None:
    slots = Slots(100, 2)
    slots.freeze(1)
    write(slots, 0, 100)
    slots.freeze(2)
    with pytest.raises(
        NoSlotError, match="bytes 0 to 50 cannot be written: freezes hold all 2 slots"
    ):
        slots.targets(0, 50)
    slots.thaw(1)
    assert slots.targets(0, 50) == [SlotPart(0, 50, 0)]
