"""Are tiles stepped in strips, and to the same bits as whole tiles?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs.twins import assert_same_tensors
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.optim.tile import Tile
from tiermem.optim.tile_step import TilePass
from tiermem.precision import PRESETS
from tiermem.swap.base.ranges import Column
from tiermem.units import state_layout
from tiermem.units.state_layout import MASTER

TILE = 1 << 19
"""Elements; of 8-bit moments two strips of pages."""


class Wide(nn.Module):
    """A parameter that fills a tile and begins another, which another parameter shares."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1021, 577, bias=False), nn.Linear(577, 301)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def trained(folder: Path, precision: Precision) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"tile_numel": TILE, "tile_buffers": 2, "persistence_numel": 0, "resident_bytes": 0}
    homes = {"params": Tier.NVME, "grads": Tier.NVME, "optim": Tier.NVME, "paths": [folder]}
    policy = OffloadPolicy(precision=precision, overlap="backward", **homes, **sizes)
    with tiermem.shard(Wide().bfloat16(), policy) as shards:
        optim = tiermem.AdamW(shards.model.parameters(), lr=1e-2)
        for step in range(3):
            x = torch.randn(2, 1021, generator=torch.Generator().manual_seed(step))
            shards.model(x.bfloat16()).float().square().mean().backward()
            optim.step()
            optim.zero_grad()
        tiles, found = optim.tiles_of(shards), {}
        for _, shard in shards.parameters():
            found |= {
                f"{shard.name}.{name}": tiles.state(shard, name)
                for name in (MASTER, *tiles.names(shard))
            }
        return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("preset", PRESETS)
def test_strips_have_the_bits_of_whole_tiles(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = Precision.preset(preset)
    columns, most = TilePass.columns, list[int]()

    def count(self: TilePass, tile: Tile) -> list[Column]:
        found = columns(self, tile)
        most.append(
            max((-(-each.bytes.num_bytes // each.strip_bytes) for each in found), default=0)
        )
        return found

    monkeypatch.setattr(TilePass, "columns", count)
    monkeypatch.setattr(state_layout, "STRIP_NUMEL", 1 << 16)
    monkeypatch.setattr(state_layout, "AT_ONCE_BYTES", 0)
    in_strips = trained(tmp_path, precision)
    assert max(most) == (2 if precision.moments == "8bit" else 8)
    most.clear()
    monkeypatch.setattr(state_layout, "STRIP_NUMEL", 1 << 20)
    assert_same_tensors(trained(tmp_path, precision), in_strips)
    assert max(most) == 1


def test_strips_of_small_states_are_moved_several_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bits; their checksums stay those of single strips."""
    monkeypatch.setattr(state_layout, "STRIP_NUMEL", 1 << 16)
    monkeypatch.setattr(state_layout, "AT_ONCE_BYTES", 0)
    one_by_one = trained(tmp_path, Precision.preset("compact"))
    columns, strips = TilePass.columns, set[int]()

    def count(self: TilePass, tile: Tile) -> list[Column]:
        found = columns(self, tile)
        strips.add(sum(each.strip_bytes for each in found))
        return found

    monkeypatch.setattr(TilePass, "columns", count)
    monkeypatch.setattr(state_layout, "AT_ONCE_BYTES", 1 << 21)
    assert_same_tensors(trained(tmp_path, Precision.preset("compact")), one_by_one)
    assert strips == {3 * 10 << 16}, strips
