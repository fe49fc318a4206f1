"""Small models that are trained, saved and looked at: shapes that cut, wrap and leave tails."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from saved_by_hand import pieces_of
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.checkpoint.format.fields import crc32c
from tiermem.checkpoint.format.finding import cover
from tiermem.checkpoint.format.manifest import (
    Manifest,
    Part,
    parse_manifest,
    parse_part,
    parse_pointer,
)
from tiermem.swap.disk import durable


class Small(nn.Module):
    """Odd sizes, a tied weight, a parameter without dimensions, an empty one, buffers, and a frozen
    layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.norm = nn.BatchNorm1d(13)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.norm(x + self.frozen(x).tanh())
        return self.head(x * self.scale + self.empty.sum())


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Small:
    torch.manual_seed(seed)
    return Small().to(dtype)


def train(made: nn.Module, optimizer: Any, steps: int, seed: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 37, (11,), generator=generator)
        loss = nn.functional.cross_entropy(made(tokens).float(), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def policy(where: str, path: Path, **fields: Any) -> OffloadPolicy:
    """States on "nvme", in memory ("cpu"), or all on the device ("none")."""
    tier = {"nvme": Tier.NVME, "cpu": Tier.HOST, "none": Tier.DEVICE}[where]
    fields = {"stage": 3, "persistence_numel": 20, "tile_numel": 4096, **fields}
    params = tier if fields["stage"] == 3 else Tier.DEVICE
    return OffloadPolicy(
        params=params, optim=tier, paths=[path] if where == "nvme" else [], **fields
    )


def opened(save_dir: Path, tag: str) -> tuple[Path, Manifest, list[tuple[Path, Part]]]:
    """A tag's manifest and parts, with the folders they lie in; every size and checksum is
    compared, and what they cover."""
    pointer = parse_pointer((save_dir / tag / "tiermem.json").read_bytes(), "pointer")
    file = save_dir / tag / pointer.folder / pointer.file
    data = file.read_bytes()
    assert (len(data), crc32c(data)) == (pointer.num_bytes, pointer.crc32c)
    return file, *opened_at(file)


def opened_at(file: Path) -> tuple[Manifest, list[tuple[Path, Part]]]:
    """A manifest and its parts, as `opened` gives them."""
    manifest, parts = parse_manifest(file.read_bytes(), str(file)), []
    for each in manifest.parts:
        folder = file.parent / each.folder
        raw = (folder / each.file).read_bytes()
        assert (len(raw), crc32c(raw)) == (each.num_bytes, each.crc32c)
        parts.append((folder, parse_part(raw, each.file)))
    cover(manifest, [part for _, part in parts], str(file))
    return manifest, parts


def states_in(save_dir: Path, tag: str) -> dict[tuple[str, str], bytes]:
    """The bytes of every state of a tag, read with nothing but `open`; every MiB's checksum is
    compared."""
    return states_at(opened(save_dir, tag)[0])


def states_at(file: Path) -> dict[tuple[str, str], bytes]:
    """The bytes of every state of a manifest."""
    manifest, parts = opened_at(file)
    found: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    for folder, part in parts:
        for piece in pieces_of(part):
            with open(folder / part.files[piece.file], "rb") as file:
                file.seek(piece.offset)
                data = file.read(piece.num_bytes)
            found.setdefault((piece.param, piece.state), []).append((piece.start, data))
    whole = {key: b"".join(data for _, data in sorted(pieces)) for key, pieces in found.items()}
    for (param, state), data in whole.items():
        due = [crc32c(data[start : start + (1 << 20)]) for start in range(0, len(data), 1 << 20)]
        assert list(manifest.checksums[param][state]) == due, (param, state)
    return whole


def live_states(shards: tiermem.Shards) -> dict[tuple[str, str], torch.Tensor]:
    """Every weight, master and moment as it is now, whole and in fp32 (one rank)."""
    found = {}
    for live, shard in shards.parameters():
        found[shard.name, "weight"] = shards.weight(shard.param)
        if shards.states is not None and live.unit.is_trainable:
            for name in ("master", *shards.states.names(shard)):
                found[shard.name, name] = shards.states.state(shard, name)
    return found


def files_below(*folders: Path) -> Iterator[str]:
    """Every file, for comparing what is left."""
    for folder in folders:
        yield from sorted(
            str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()
        )


def counts(text: str) -> Any:
    return json.loads(text)


def failing(
    kind: str, ending: str, number: int = 1, code: int = errno.ENOSPC
) -> AbstractContextManager[None]:
    """The number-th step of a kind on files of some name raises, before it is done."""
    left = [number]

    def observe(step: durable.Step) -> None:
        if step.when == "before" and step.kind == kind and step.name.endswith(ending):
            left[0] -= 1
            if not left[0]:
                raise OSError(code, "it fails", step.name)

    return durable.watch(observe)


def read_only_from(
    number: int,
    kinds: Sequence[str] = ("sync", "write", "rename", "remove", "folder"),
    code: int = errno.EROFS,
) -> AbstractContextManager[None]:
    """From the number-th change to the disk on every one is refused, also those that take back what
    was done before."""
    left = [number]

    def observe(step: durable.Step) -> None:
        if step.when == "before" and step.kind in kinds:
            left[0] -= 1
            if left[0] <= 0:
                raise OSError(code, os.strerror(code), step.name)

    return durable.watch(observe)


def error_of(act: Callable[[], object]) -> OSError | None:
    """The OSError that something ends with; None: it goes well."""
    try:
        act()
    except OSError as error:
        return error
    return None
