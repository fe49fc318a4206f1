"""Does a checkpoint of frozen weights in blocks hold the blocks, and open under every other form of
the same weights?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import seeded
from safetensors.torch import load_file

import tiermem
from tiermem import OffloadPolicy, Shards, Tier, checkpoint
from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.interchange.export import export_weights
from tiermem.checkpoint.opening import restore
from tiermem.checkpoint.opening.source import Source, weights_of
from tiermem.units.quantised import BLOCK, FORMATS

NAME = "layers.1.up.weight"
FORMS = [*FORMATS, None]


def sharded(
    folder: Path, form: str | None, tier: Tier, seed: int = 0
) -> tuple[Shards, tiermem.AdamW]:
    fields: dict[str, Any] = {
        "params": tier,
        "optim": tier,
        "paths": [folder],
        "persistence_numel": 50,
    }
    model = seeded(models.frozen_tower, seed).bfloat16()
    shards = tiermem.shard(model, OffloadPolicy(**fields, frozen_quant_type=form))
    return shards, tiermem.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def weights(shards: Shards) -> dict[str, torch.Tensor]:
    return {shard.name: shards.weight(shard.param) for _, shard in shards.parameters()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("form", FORMATS)
def test_it_holds_the_blocks_and_opens_under_every_form(
    form: str, tier: Tier, tmp_path: Path
) -> None:
    shards, optim = sharded(tmp_path, form, tier)
    with shards:
        due = weights(shards)
        live, shard = shards.find(shards.model.get_parameter(NAME))
        held = shards.values.blocks(
            live, slice(shard.shard_offset, shard.shard_offset + shard.shard_numel)
        )
        checkpoint.save(shards, optim, tmp_path / "saved")
    with Source.open(tmp_path / "saved") as source:
        param = source.parameters[NAME]
        assert (param.at_rest, param.dtype) == (form, "bf16")
        assert source.kind(NAME, "weight") == kinds.AT_REST[form]
        assert source.bytes_of(NAME, "weight") == -(-param.numel * FORMATS[form].code_bits // 8)
        assert source.bytes_of(NAME, "weight.scales") == -(-param.numel // BLOCK) * 4
        for state in ("weight", "weight.scales"):
            assert sum(source.verify(NAME, state)) == source.bytes_of(NAME, state)
        found = source.blocks(NAME, 0, param.numel, FORMATS[form])
        assert found is not None and torch.equal(found, held[: found.numel()])
        assert torch.equal(
            source.weight(NAME, 100, 900, torch.bfloat16), due[NAME].view(-1)[100:1000]
        )
        assert source.parameters["layers.1.up.bias"].at_rest is None
    for other in FORMS:
        shards, optim = sharded(tmp_path, other, tier, seed=1)
        with shards:
            checkpoint.load(shards, optim, tmp_path / "saved")
            opened = weights(shards)
        if other in (form, None):
            assert all(torch.equal(opened[name], value) for name, value in due.items())
        else:  # packed from the values
            assert (opened[NAME].float() - due[NAME].float()).abs().max() <= due[
                NAME
            ].abs().max() * 0.16


def test_weights_that_were_saved_as_they_are_are_packed_when_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "CHUNK_NUMEL", BLOCK)  # pieces with a checksum are longer
    shards, optim = sharded(tmp_path, None, Tier.NVME)
    with shards:
        checkpoint.save(shards, optim, tmp_path / "saved")
    packed, _ = sharded(tmp_path, "nf4", Tier.HOST)
    with packed:
        due = weights(packed)
    shards, optim = sharded(tmp_path, "nf4", Tier.NVME, seed=1)
    with shards:
        checkpoint.load(shards, optim, tmp_path / "saved")
        assert all(torch.equal(value, due[name]) for name, value in weights(shards).items())
        tables = [shards.store.sums.of(live.entry) for live in shards.units if live.entry]
        assert any(tables) and all(table.is_known.all() for table in filter(None, tables))


def test_an_exported_model_has_the_values_of_the_blocks(tmp_path: Path) -> None:
    shards, optim = sharded(tmp_path, "nf4", Tier.NVME)
    with shards:
        due = weights(shards)
        checkpoint.save(shards, optim, tmp_path / "saved")
    with Source.open(tmp_path / "saved") as source:
        export_weights(weights_of(source), tmp_path / "exported", None)
    found = load_file(tmp_path / "exported" / "model.safetensors")
    assert found.keys() == due.keys()
    assert all(torch.equal(found[name], value) for name, value in due.items())
