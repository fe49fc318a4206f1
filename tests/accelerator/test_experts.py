"""Do fused experts come to an accelerator by rows, from HOST and from NVMe, under every schedule?

The simulated device fills new memory with NaN, so a row that was not copied and is used shows.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import tiermem
from tiermem import OffloadPolicy, Tier

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}


def tokens_of(step: int, device: torch.device, length: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, 61, (1, length), generator=generator).to(device)


def results(model: Any, home: Tier, folder: Path, device: str) -> dict[str, Any]:
    """Losses of three steps, logits of three decode steps, and for each layer of these whether
    some unit was there in part."""
    policy = OffloadPolicy(params=home, optim=home, grads=home, paths=[folder], persistence_numel=0)
    losses = []
    logits = []
    with tiermem.shard(model, policy, device=device) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            tokens = tokens_of(step, shards.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        shards.steps.finish()
        partial: list[bool] = []
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(
                lambda *_: partial.append(any(live.is_partial for live in shards.units))
            )
        with torch.no_grad():
            for step in range(3):
                logits.append(model(tokens_of(step, shards.device, 1)).logits.cpu())
        weights = [shards.weight(param) for param in model.parameters()]
    return {
        "losses": losses,
        "logits": logits,
        "weights": weights,
        "by rows": partial,
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_rows_on_an_accelerator_give_the_bits_of_the_cpu(
    sim: ModuleType, home: Tier, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES))
    expected = results(copy.deepcopy(model), home, tmp_path, "cpu")
    for schedule in ("at_once", "late", "side_first", "random:1"):
        sim.set_schedule(schedule)
        found = results(copy.deepcopy(model), home, tmp_path, "sim")
        # layers of the first pass may have come whole, under the end of the step
        assert len(found["by rows"]) == 12 and all(found["by rows"][4:])
        assert found["losses"] == expected["losses"], schedule
        for key in ("logits", "weights"):
            for mine, other in zip(found[key], expected[key], strict=True):
                assert torch.equal(mine, other), (schedule, key)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [3, 60])
def test_experts_that_are_always_present_are_whole_and_what_the_user_writes_counts(
    length: int, sim: ModuleType, tmp_path: Path
) -> None:
    """In stage 2 the shards lie in host memory, and the layouts that forward sees on the device."""
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(MixtralConfig(**SIZES))
    plain = copy.deepcopy(model)
    policy = OffloadPolicy(stage=2, optim=Tier.HOST, grads=Tier.HOST)
    with tiermem.shard(model, policy, device="sim") as shards:
        ours = tiermem.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
        with torch.no_grad():
            for layer in (*model.model.layers, *plain.model.layers):
                layer.mlp.experts.down_proj.mul_(30)
        for step in range(2):
            tokens = tokens_of(step, shards.device, length)
            losses = []
            for each, optim in ((model, ours), (plain, theirs)):
                here = tokens if each is model else tokens.cpu()
                loss = each(input_ids=here, labels=here).loss
                loss.backward()
                optim.step()
                optim.zero_grad()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(shards.weight(param), twin, atol=1e-4)
