"""A checkpoint made by hand: states given as tensors, dealt over ranks, cut into pieces and strewn
over files.

`write` makes what an import would: DIR/latest, DIR/<tag>/ with a manifest, parts and data files.
`latest_of` and `rewrite` read and change small files; `flip` changes one bit of any file.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.fields import crc32c as crc32c_of_text
from tiermem.checkpoint.format.fields import seal
from tiermem.checkpoint.format.finding import read_latest
from tiermem.checkpoint.format.manifest import (
    CHECKSUM_BYTES,
    Manifest,
    Parameter,
    Part,
    PartFile,
    PartState,
    Piece,
    manifest_name,
    part_name,
)
from tiermem.checkpoint.saving.publish import said_of
from tiermem.swap.store.checksum import crc32c


def states_of(pieces: Iterable[Piece]) -> tuple[PartState, ...]:
    """Pieces as a part has them. Raises ValueError for two kinds of one state, which no part
    holds."""
    found: dict[tuple[str, str], PartState] = {}
    for each in pieces:
        state = found.setdefault(
            (each.param, each.state), PartState(each.param, each.state, each.kind, [])
        )
        if state.kind != each.kind:
            raise ValueError(f"{each.state} of {each.param} is {state.kind} and {each.kind}")
        state.pieces.append((each.start, each.numel, each.file, each.offset))
    return tuple(found.values())


def pieces_of(part: Part) -> list[Piece]:
    """All pieces of a part, one by one."""
    found = ((of, piece) for of in part.states for piece in of.pieces)
    return [
        Piece(of.param, of.state, of.kind, *piece, kinds.bytes_of(of.kind, piece[1]))
        for of, piece in found
    ]


States = Mapping[str, Mapping[str, torch.Tensor]]
"""By parameter and state; a split master is int16."""


def write(
    where: Path,
    states: States,
    tag: str = "step1",
    world: int = 1,
    most_numel: int = 10**9,
    commit: int = 1,
    **fields: Any,
) -> Path:
    """Writes a checkpoint of so many ranks in pieces of at most `most_numel` elements; returns the
    tag's folder."""
    folder = where / tag
    folder.mkdir(parents=True)
    files = [_Files(folder, rank) for rank in range(world)]
    sums: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in states}
    for param, own in states.items():
        for state, values in own.items():
            kind = (
                kinds.SPLIT
                if state == "master" and values.dtype == torch.int16
                else kinds.name_of(values.dtype)
            )
            flat = values.reshape(-1)
            sums[param][state] = tuple(crc32c(flat.view(torch.uint8).split(CHECKSUM_BYTES)))
            share = max(1, math.ceil(flat.numel() / world))
            for rank in range(world):
                for start in range(rank * share, min((rank + 1) * share, flat.numel()), most_numel):
                    stop = min(start + most_numel, (rank + 1) * share, flat.numel())
                    files[rank].add(param, state, kind, start, flat[start:stop])
    parts = [each.close(commit) for each in files]
    parameters = tuple(
        Parameter(
            name,
            (),
            "parameter",
            tuple(own["weight"].shape),
            kinds.name_of(own["weight"].dtype),
            True,
            1,
            0,
        )
        for name, own in states.items()
    )
    values = {
        "optimizer": None,
        "scheduler": None,
        "loss_scaler": None,
        "engine": None,
        "client_state": {},
        "config": {},
        "choices": {},
    }
    manifest = Manifest(
        "byhand", commit, tag, fields.pop("step", commit), world, world, tuple(parts), **(values | fields),
        parameters=parameters, excluded=(), checksums=sums,
    )  # fmt: skip
    (folder / manifest_name(commit)).write_bytes(manifest.dump())
    (where / "latest").write_bytes(said_of(folder / manifest_name(commit), where, tag))
    return folder


def latest_of(where: Path) -> str:
    """The tag that `latest` names."""
    found = read_latest(where)
    assert found is not None and found.series
    return found.tag


def rewrite(file: Path, /, **fields: Any) -> None:
    """Changes fields of a file of a checkpoint, or removes them (None); its checksum is right
    again."""
    content = json.loads(file.read_bytes()) | fields
    del content["crc32c"]
    file.write_bytes(
        seal({name: value for name, value in content.items() if fields.get(name, 0) is not None})
    )


class _Files:
    """The two data files of one rank: pieces go to either, with holes between."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._names = (f"data-{rank}.bin", f"more-{rank}.bin")
        self._data = (bytearray(), bytearray())
        self._pieces: list[Piece] = []
        self._random = random.Random(rank)

    def add(self, param: str, state: str, kind: str, start: int, values: torch.Tensor) -> None:
        number = self._random.randrange(2)
        data = self._data[number]
        data += bytes(self._random.randrange(100))
        self._pieces.append(
            Piece(param, state, kind, start, values.numel(), number, len(data), values.nbytes)
        )
        data += values.contiguous().view(torch.uint8).numpy().tobytes()

    def close(self, commit: int) -> PartFile:
        for name, data in zip(self._names, self._data, strict=True):
            (self._folder / name).write_bytes(data)
        text = Part(
            "byhand", commit, self._rank, None, None, self._names, states_of(self._pieces)
        ).dump()
        name = part_name(commit, self._rank)
        (self._folder / name).write_bytes(text)
        return PartFile(self._rank, ".", name, len(text), crc32c_of_text(text))


def flip(file: Path, offset: int, bit: int = 0) -> None:
    """Turns one bit of a file, durably."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ (1 << bit)]))
        opened.flush()
        os.fsync(opened.fileno())
