"""Do arrays say of what rests on NVMe, however it is cut, frozen and known, what going through it
row by row says?"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.finding import Key, Rows, joined_rows
from tiermem.checkpoint.saving.copies import lay_out
from tiermem.checkpoint.saving.pieces import Resting, Stretch, checksums, cuts
from tiermem.swap.base.native import Workers
from tiermem.swap.disk.files import Extent
from tiermem.swap.disk.queue import Recorder
from tiermem.swap.store.checksum import Pieces, Sums, crc32c
from tiermem.swap.store.entry import Freeze, Stored

MIB, BLOCK = 1 << 20, 4096


class Made:
    """States of a few parameters, cut into stretches that lie in entries, whose parts lie in files,
    all at random."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.bytes: dict[tuple[str, str, str], torch.Tensor] = {}
        self.entries: dict[str, torch.Tensor] = {}
        self.stretches: list[Stretch] = []
        names = [
            ("w", "weight", "bf16"),
            ("w", "m", "8bit"),
            ("w", "m.scales", "8bit-scales"),
            ("v", "m", "fp32"),
        ]
        for param, state, kind in names:
            numel = 64 * self.chance.randrange(1, 30_000) + self.chance.randrange(64)
            data = torch.randint(0, 256, (kinds.bytes_of(kind, numel),), dtype=torch.uint8)
            self.bytes[param, state, kind] = data
            edges = sorted(
                {0, numel, *(64 * self.chance.randrange(numel // 64 + 1) for _ in range(4))}
            )
            for start, stop in itertools.pairwise(edges):
                first, end = kinds.bytes_of(kind, start), kinds.bytes_of(kind, stop)
                place = self._put(data[first:end])
                self.stretches.append(
                    Stretch(param, state, kind, start, stop - start, first, place)
                )
        self.chance.shuffle(self.stretches)

    def _put(self, data: torch.Tensor) -> tuple[str, int]:
        """Behind what an entry holds already, at a multiple of 64 bytes."""
        name = f"entry{self.chance.randrange(3)}"
        before = self.entries.get(name, torch.zeros(0, dtype=torch.uint8))
        padded = torch.cat([before, torch.zeros(-before.numel() % 64 + 64, dtype=torch.uint8)])
        self.entries[name] = torch.cat([padded, data])
        return name, padded.numel()

    def freeze(self, folder: Path) -> Freeze:
        """Entries cut at whole blocks and strewn over two files."""
        files, parts = [bytearray(), bytearray()], {}
        for name, data in self.entries.items():
            self.entries[name] = data = torch.cat(
                [data, torch.zeros(-data.numel() % BLOCK, dtype=torch.uint8)]
            )
            blocks = data.numel() // BLOCK
            edges = sorted({0, blocks, *(self.chance.randrange(blocks) for _ in range(5))})
            parts[name] = []
            for start, stop in itertools.pairwise(edges):
                number = self.chance.randrange(2)
                files[number] += bytes(BLOCK * self.chance.randrange(1, 3))
                length = (stop - start) * BLOCK
                parts[name].append(
                    Stored(start * BLOCK, Extent(number, len(files[number]), length))
                )
                files[number] += data[start * BLOCK : stop * BLOCK].numpy().tobytes()
        paths = (folder / "a", folder / "b")
        for path, held in zip(paths, files, strict=True):
            path.write_bytes(held)
        return Freeze(1, paths, parts)

    def sums(self) -> Sums:
        """What a store knows: nothing of one entry, of the others most of what it has pieces
        for."""
        made = Sums(Recorder(1))
        for entry in self.entries.keys() - {"entry0"}:
            found = []
            for each in self.stretches:
                assert isinstance(each.place, tuple)
                if each.place[0] == entry and each.start % 3:
                    shift = each.place[1] - each.first_byte
                    # as a save has them, or in two
                    for at, size in cuts(each.first_byte, each.num_bytes):
                        edges = sorted(
                            {at, at + size // 2 + 1, at + size}
                            if each.start // 64 % 2
                            else {at, at + size}
                        )
                        found += [(a + shift, b + shift) for a, b in itertools.pairwise(edges)]
            made.protect(entry, Pieces(*np.array(sorted(found), np.int64).reshape(-1, 2).T))
            table = made.of(entry)
            assert table is not None
            crcs = crc32c([self.entries[entry][a:b].clone() for a, b in sorted(found)])
            table.put(np.arange(len(crcs)), np.array(crcs, np.uint32))
            table.is_known[::7] = False
        return made


def rows_of(keys: Sequence[Key], rows: Sequence[tuple[int, int, int, int, int, int]]) -> Rows:
    """Rows from tuples (key, start, numel, file, offset, bytes)."""
    return Rows(keys, *np.array(rows, np.int64).reshape(-1, 6).T)


def whole(rows: Sequence[Sequence[int]], kind: str, files: Sequence[Path]) -> list[int]:
    """The checksum of a state's pieces, put together; they follow one another."""
    data, end = b"", 0
    for start, numel, file, offset in rows:
        assert start == end
        data += files[file].read_bytes()[offset : offset + kinds.bytes_of(kind, numel)]
        end = start + numel
    return crc32c([torch.frombuffer(bytearray(data), dtype=torch.uint8)])


@pytest.mark.parametrize("seed", range(12))
def test_pieces_and_checksums_are_those_of_the_bytes(seed: int, tmp_path: Path) -> None:
    made = Made(seed)
    resting, freeze = Resting(made.stretches), made.freeze(tmp_path)
    rows, read = resting.rows(freeze), []

    def read_entry(entry: str, start: int, stop: int) -> torch.Tensor:
        read.append(entry)
        return made.entries[entry][start:stop].clone()

    known = made.sums()
    with contextlib.closing(Workers(1)) as workers:
        sums = resting.sums(known, read_entry, workers)
        num_read = len(read)
        assert resting.sums(known, read_entry, workers) == sums
        # what had a place in a table is known since
        assert len(read) - num_read < num_read or not known.of("entry1")
    for (param, state, kind), data in made.bytes.items():
        [own] = [
            each
            for each in rows.states()
            if (each.param, each.state, each.kind) == (param, state, kind)
        ]
        assert crc32c([data]) == whole(own.pieces, kind, freeze.files)
        assert len(sums[param, state]) == 1
        assert checksums(sums[param, state], state) == tuple(
            crc32c([part.clone() for part in data.split(MIB)])
        )
    extents, moved = lay_out(rows, 8192)
    copy = bytearray(extents[-1].place + extents[-1].num_bytes)
    for file, offset, num_bytes, place in extents:
        assert {offset % BLOCK, num_bytes % BLOCK, place % BLOCK} == {0}
        copy[place : place + num_bytes] = freeze.files[file].read_bytes()[
            offset : offset + num_bytes
        ]
    (tmp_path / "copy").write_bytes(copy)
    for own in moved.states():
        data = made.bytes[own.param, own.state, own.kind]
        assert crc32c([data]) == whole(own.pieces, own.kind, [tmp_path / "copy"])


def test_nothing_rests_on_nvme(tmp_path: Path) -> None:
    resting = Resting([])
    assert not resting.entries
    assert resting.rows(Freeze(1, (tmp_path,), {})).states() == ()
    with contextlib.closing(Workers(1)) as workers:
        assert resting.sums(Sums(Recorder(1)), lambda *_: torch.empty(0), workers) == {}
    assert joined_rows([]).states() == ()
    assert lay_out(rows_of([], []), 0)[0] == []


def test_keys_of_several_rows_become_one() -> None:
    a = rows_of(
        [("w", "m", "fp32"), ("v", "m", "fp32")], [(1, 0, 5, 0, 64, 20), (0, 3, 3, 0, 0, 12)]
    )
    b = rows_of([("v", "m", "fp32"), ("w", "m", "fp32")], [(1, 0, 3, 1, 0, 12)])
    assert [dataclasses.astuple(each) for each in joined_rows([a, b]).states()] == [
        ("w", "m", "fp32", [[0, 3, 1, 0], [3, 3, 0, 0]]),
        ("v", "m", "fp32", [[0, 5, 0, 64]]),
    ]


def test_bytes_that_are_not_frozen_are_refused(tmp_path: Path) -> None:
    freeze = Freeze(1, (tmp_path,), {"e": [Stored(0, Extent(0, 4096, 8192))]})
    one = np.array([0])
    with pytest.raises(ValueError, match="outside"):
        freeze.find(["e"], one, np.array([8000]), np.array([200]))
    with pytest.raises(KeyError):
        freeze.find(["f"], one, one, one)
