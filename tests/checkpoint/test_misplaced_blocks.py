"""Is a saved block found that is valid, but of another place or another time? The manifest holds
the checksums, not the block.

Misdirected and lost writes leave such blocks. (Of running training: tests/zero/test_checksums.py.)
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from runs import opened, policy
from saved_by_hand import pieces_of, write
from torch import nn

import tiermem
from tiermem import checkpoint
from tiermem.checkpoint.format.manifest import Piece
from tiermem.checkpoint.opening.source import Source
from tiermem.checkpoint.opening.verified import DamagedState
from tiermem.checkpoint.survey import survey


class Placed(NamedTuple):
    """A piece of a tag, and its file."""

    tag: str
    file: Path
    piece: Piece

    def read(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.piece.offset)
            return file.read(self.piece.num_bytes)

    def write(self, data: bytes) -> None:
        with self.file.open("r+b") as file:
            file.seek(self.piece.offset)
            file.write(data)


def pieces(where: Path, tag: str) -> list[Placed]:
    return [
        Placed(tag, folder / part.files[piece.file], piece)
        for folder, part in opened(where, tag)[2]
        for piece in pieces_of(part)
    ]


def exchange(one: Placed, other: Placed) -> None:
    mine = one.read()
    one.write(other.read())
    other.write(mine)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saved steps 1 and 2 in place; tensors of several tiles."""
    folder = tmp_path_factory.mktemp("blocks")
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 192), nn.Linear(192, 64))
    with tiermem.shard(made, policy("nvme", folder, keep=2)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.1)
        for tag in ("t1", "t2"):
            made(torch.randn(5, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.save(shards, optimizer, folder, tag)
    return folder


def check_named(where: Path, *damaged: Placed) -> None:
    """Opening names the file (with the run), the offset, the tensor, the state and the step; fsck
    says the same of a tag."""
    said: dict[str, list[str]] = {}
    for tag, file, piece in damaged:
        with Source.open(where, tag) as source, pytest.raises(DamagedState) as caught:
            list(source.verify(piece.param, piece.state))
        error = caught.value
        assert (error.param, error.state, error.step) == (piece.param, piece.state, int(tag[-1]))
        assert error.start <= piece.start < error.stop
        assert f"{piece.state} of {piece.param}, elements" in str(
            error
        ) and f"at offset {error.offset}" in str(error)
        assert error.filename.endswith(f"{file.parent.name}/{file.name}")
        said.setdefault(tag, []).append(f"{error.filename}: {error.strerror}".partition(". ")[0])
    for step in survey(where, verifies=True).steps:
        assert step.state == ("damaged" if step.tag in said else "whole")
        assert step.tag not in said or any(step.why.startswith(each) for each in said[step.tag])


Of = Callable[[Piece, Piece], bool]

EXCHANGES: dict[str, tuple[str, Of]] = {
    "one tensor": ("t2", lambda a, b: (a.param, a.state) == (b.param, b.state)),
    "two states": (
        "t2",
        lambda a, b: a.param == b.param and a.state != b.state and a.start == b.start,
    ),
    "two tensors": ("t2", lambda a, b: a.param != b.param and a.state == b.state),
    "two steps": ("t1", lambda a, b: a[:5] == b[:5]),
}


@pytest.mark.parametrize("what", EXCHANGES)
def test_exchanged_blocks_are_named(saved: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(saved, tmp_path / "saved")
    where, (tag, of) = tmp_path / "saved", EXCHANGES[what]
    one, other = next(
        (a, b)
        for a, b in itertools.product(pieces(where, tag), pieces(where, "t2"))
        if a.piece.num_bytes == b.piece.num_bytes > 1000
        and of(a.piece, b.piece)
        and a.read() != b.read()
    )
    exchange(one, other)
    check_named(where, one, other)
    if what == "two steps":  # the older one alone is put back: as after a lost write
        one.write(other.read())
        check_named(where, other)


def test_blocks_of_two_ranks_that_were_exchanged_are_named(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"w": {"weight": torch.arange(4000.0)}, "v": {"weight": torch.ones(2)}},
        "t1",
        world=2,
    )
    with Source.open(tmp_path) as source:
        parts = [
            (tmp_path / "t1" / part.files[each.file], each)
            for part in source.parts
            for each in pieces_of(part)
        ]
    one, other = (Placed("t1", *each) for each in parts if each[1].param == "w")
    exchange(one, other)
    check_named(tmp_path, one)
