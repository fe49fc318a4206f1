"""Does a unit come out of 8-bit blocks in its place, whatever the number of ranks? The layouts,
without processes."""

from __future__ import annotations

import pytest
import torch
from programs import models
from programs.twins import seeded

from tiermem import OffloadPolicy
from tiermem.ranks.topology import Topology
from tiermem.units.quantised import INT8, pack, unpack
from tiermem.units.unit import Unit, divide
from tiermem.wires.packed import PackedGather, wire_bytes

POLICY = OffloadPolicy(persistence_numel=50, quantised_frozen=True)


def units_of(num_shards: int, dtype: torch.dtype = torch.float32) -> list[Unit]:
    model = seeded(models.frozen_tower).to(dtype)
    return [unit for unit in divide(model, POLICY, num_shards).units if not unit.is_resident]


def shard_of(unit: Unit, rank: int) -> torch.Tensor:
    """A rank's flat shard layout."""
    flat = torch.zeros(unit.shard_numel, dtype=unit.dtype)
    for part in unit.shards:
        mine = part.param.detach().reshape(-1)[
            part.shard_numel * rank : part.shard_numel * (rank + 1)
        ]
        flat[part.shard_offset : part.shard_offset + mine.numel()] = mine
    return flat


def test_frozen_matrices_rest_in_packed_bytes_and_other_parameters_do_not() -> None:
    units = units_of(3, torch.bfloat16)
    assert {unit.is_packed for unit in units} == {True, False}
    for unit in units:
        assert {not unit.is_trainable and part.param.dim() > 1 for part in unit.shards} == {
            unit.is_packed
        }
        blocks = INT8.packed_bytes(unit.packed_numel)
        assert blocks / (unit.packed_numel * 2) == 0.53125  # a byte and a 64th of four, of two
        assert unit.shard_bytes == (
            -(-blocks // 4096) * 4096 if unit.is_packed else unit.shard_numel * 2
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_rank_unpacks_what_it_put(dtype: torch.dtype) -> None:
    alone = Topology(None, 0, 1, 1, 0)
    for unit in units_of(1, dtype):
        full = torch.full((unit.full_numel,), float("nan"), dtype=dtype)
        gather = PackedGather(alone, unit, full, None)
        shard = shard_of(unit, 0)
        gather.put(pack(shard[: unit.packed_numel]) if unit.is_packed else shard)
        pending = gather.start()
        pending.wait()
        pending.wait()  # again: nothing more happens
        numel = unit.packed_numel
        expected = unpack(pack(shard[:numel]), numel, torch.empty(numel, dtype=dtype))
        for part in unit.shards:
            came = full[part.full_offset : part.full_offset + part.numel]
            assert torch.equal(came, expected[part.shard_offset : part.shard_offset + part.numel])
            assert (
                came.float() - part.param.detach().reshape(-1).float()
            ).abs().max() < part.param.abs().max() / 100


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_the_buffer_of_a_gather_is_own_blocks_and_those_of_all(num_shards: int) -> None:
    for unit in units_of(num_shards):
        blocks = unit.packed_numel // 64 * 68
        assert wire_bytes(unit, num_shards) == (
            blocks if num_shards == 1 else blocks * (num_shards + 1)
        )
