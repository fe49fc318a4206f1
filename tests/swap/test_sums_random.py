"""Whatever is written, in whatever parts, with whatever is frozen meanwhile: is every known
checksum that of the bytes, and does no read of what was written call them corrupt?"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from drawn import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiermem.swap.base.native import IoSettings
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.queue import Recorder
from tiermem.swap.store.checksum import Pieces, PiecesIn, PieceTable, Sums, WrittenBytes, crc32c
from tiermem.swap.store.store import TensorStore
from tiermem.swap.store.stream import Bounce

PAGE = 4096
NUM_PAGES = 9
NUM_BYTES = NUM_PAGES * PAGE
EDGES = st.sets(
    st.integers(0, NUM_BYTES) | st.sampled_from(range(0, NUM_BYTES + 1, PAGE)), max_size=24
)
RANGE = st.tuples(st.integers(0, NUM_BYTES), st.integers(0, NUM_BYTES)).map(sorted)
STEP = st.tuples(
    st.sampled_from(["write", "bounce", "read", "fetch", "freeze", "thaw", "cut", "complete"]),
    RANGE,
    EDGES,
)


def pieces_of(edges: set[int]) -> Pieces:
    """The ranges between edges but for every third: some touch, some have gaps."""
    found = np.array(sorted(edges), np.int64)
    chosen = np.arange(max(0, len(found) - 1)) % 3 != 2
    return Pieces(found[:-1][chosen], found[1:][chosen])


@given(EDGES, st.lists(RANGE, max_size=20))
def test_a_table_knows_what_was_written_whole(edges: set[int], writes: list[list[int]]) -> None:
    sums = Sums(Recorder())
    table = PieceTable(pieces_of(edges), "", 0)
    bounds = list(zip(table.pieces.starts.tolist(), table.pieces.stops.tolist(), strict=True))
    known: dict[int, int] = {}
    for number, (start, stop) in enumerate(writes, 1):
        inside = [i for i, (first, last) in enumerate(bounds) if start <= first and last <= stop]
        touched = [
            i
            for i, (first, last) in enumerate(bounds)
            if first < stop and start < last and start < stop
        ]
        assert list(range(len(bounds)))[table.inside(start, stop - start)] == inside
        assert list(range(len(bounds)))[table.touching(start, stop - start)] == touched
        pieces = PiecesIn(
            table, 0, table.inside(start, stop - start), table.touching(start, stop - start)
        )
        sums.keep([WrittenBytes(pieces, np.full(len(inside), number, np.uint32))])
        if start < stop:
            known = {i: crc for i, crc in known.items() if i not in touched} | dict.fromkeys(
                inside, number
            )
        assert {i: int(table.crcs[i]) for i in np.flatnonzero(table.is_known)} == known
        assert set(np.flatnonzero(~table.is_known)) == set(range(len(bounds))) - known.keys()


class User:
    """One entry of a store, and the bytes that it holds."""

    def __init__(self, store: TensorStore, seed: int) -> None:
        self._store = store
        self._numbers = torch.Generator().manual_seed(seed)
        self._bounce = Bounce(store, PAGE, 2)
        self._slot = store.arena.take(NUM_BYTES, "a test").tensor
        self._freezes: list[Any] = []
        store.reserve("x", (NUM_BYTES,), torch.uint8, Tier.NVME)
        self.holds = self._fresh(NUM_BYTES)
        self._bounce.write("x", 0, self.holds)

    def write(self, start: int, stop: int, _: set[int]) -> None:
        first, last = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
        data = self._slot[: last - first]
        data.copy_(self._fresh(last - first))
        self._store.write([("x", first, data)], "x").wait()
        self.holds[first:last] = data

    def bounce(self, start: int, stop: int, _: set[int]) -> None:
        data = self._fresh(stop - start)
        self._bounce.write("x", start, data)
        self.holds[start:stop] = data

    def read(self, start: int, stop: int, _: set[int]) -> None:
        first, last = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
        self._store.read([("x", first, self._slot[: last - first])], "x").wait()
        assert torch.equal(self._slot[: last - first], self.holds[first:last])

    def fetch(self, start: int, stop: int, _: set[int]) -> None:
        found = self._store.fetch("x").wait()
        assert torch.equal(found, self.holds)
        is_dirty = (stop - start) % 2 == 1
        if is_dirty:
            self.holds = self._fresh(NUM_BYTES)
            found.copy_(self.holds)
        move = self._store.release("x", dirty=is_dirty)
        if move is not None:
            move.wait()  # ranges are not ordered behind it

    def freeze(self, *_: object) -> None:
        if not self._freezes:
            self._freezes.append(self._store.freeze())

    def thaw(self, *_: object) -> None:
        if self._freezes:
            self._store.thaw(self._freezes.pop())

    def cut(self, _: int, __: int, edges: set[int]) -> None:
        self._store.sums.protect("x", pieces_of(edges))

    def complete(self, *_: object) -> None:
        table = self._store.sums.complete("x", self._bytes)
        assert table is None or table.is_known.all()

    def check(self) -> None:
        table = self._store.sums.of("x")
        if table is not None:
            known = np.flatnonzero(table.is_known)
            bounds = zip(
                table.pieces.starts[known].tolist(), table.pieces.stops[known].tolist(), strict=True
            )
            assert table.crcs[known].tolist() == crc32c(
                [self.holds[start:stop] for start, stop in bounds]
            )

    def _bytes(self, start: int, stop: int) -> torch.Tensor:
        out = torch.empty(stop - start, dtype=torch.uint8)
        self._bounce.read("x", start, stop, out)
        return out

    def _fresh(self, num_bytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=self._numbers)


@settings(max_examples=drawn(25), suppress_health_check=[HealthCheck.too_slow])
@given(EDGES, st.lists(STEP, max_size=40), st.integers(0, 1 << 30))
def test_known_checksums_are_those_of_the_bytes(
    edges: set[int], steps: list[Any], seed: int
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        TensorStore(folder, 1 << 20, IoSettings("threads", 4096), num_slots=2) as store,
    ):
        user = User(store, seed)
        store.sums.protect("x", pieces_of(edges))
        for act, (start, stop), cuts in steps:
            getattr(user, act)(start, stop, cuts)
            user.check()
        user.thaw()
        user.fetch(0, 0, set())
