"""States of a sharded model on NVMe, their bytes and their checksums: what test_checksums.py and
sums_on_ranks.py share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem import OffloadPolicy, Shards, Tier
from tiermem.checkpoint.saving.capture import stretches
from tiermem.checkpoint.saving.pieces import Run
from tiermem.precision import PRESETS


class Wide(nn.Module):
    """A weight of more than a MiB in two bytes an element, a bias that shares its tile, a norm, and
    a frozen layer.

    No number of elements is even, but for the frozen weight's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(701, 801)
        self.norm = nn.LayerNorm(801)
        self.frozen = nn.Linear(801, 50).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(torch.relu(self.up(x))))


def policy(folder: Path, preset: str, **fields: Any) -> OffloadPolicy:
    settings: dict[str, Any] = {
        "params": Tier.NVME,
        "optim": Tier.NVME,
        "paths": [folder],
        "persistence_numel": 0,
    }
    settings |= {
        "precision": PRESETS[preset],
        "overlap": "none",
        "resident_bytes": 0,
        "tile_numel": 20480,
        "quantised_frozen": True,
    }
    return OffloadPolicy(**(settings | fields))


def train(wide: nn.Module, optim: torch.optim.Optimizer, num_steps: int, seed: int = 0) -> None:
    for step in range(num_steps):
        x = torch.randn(3, 701, generator=torch.Generator().manual_seed(100 * seed + step)).to(
            torch.bfloat16
        )
        wide(x).float().square().mean().backward()
        optim.step()
        optim.zero_grad()


class Summed(NamedTuple):
    """This rank's bytes of one state of one parameter."""

    first_byte: int
    data: torch.Tensor
    fragments: list[Run]


def summed(shards: Shards) -> dict[tuple[str, str], list[Summed]]:
    """What this rank has of every state of every parameter, as it would be saved. Raises
    AssertionError for gaps."""
    found: dict[tuple[str, str], list[Summed]] = {}
    names = frozenset(shard.name for _, shard in shards.parameters())
    for each in stretches(shards, names, is_on_nvme=True):
        assert isinstance(each.place, tuple)
        entry, offset = each.place
        end, table = offset + each.num_bytes, shards.store.sums.of(entry)
        assert table is not None
        inside = table.inside(offset, each.num_bytes)
        assert table.is_known[inside].all()
        starts, stops = table.pieces.starts[inside].tolist(), table.pieces.stops[inside].tolist()
        assert [*starts, end] == [offset, *stops]  # without a gap
        shift = each.first_byte - offset
        rows = zip(starts, stops, table.crcs[inside].tolist(), strict=True)
        fragments = [Run(start + shift, stop - start, [crc]) for start, stop, crc in rows]
        data = shards.values.read_part(entry, torch.uint8, slice(offset, end)).clone()
        found.setdefault((each.param, each.state), []).append(
            Summed(each.first_byte, data, fragments)
        )
    return found


def model() -> nn.Module:
    torch.manual_seed(7)
    return Wide().to(torch.bfloat16)
