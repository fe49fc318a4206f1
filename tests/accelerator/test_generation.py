"""Has a plan room for the KV cache of a generation, on an accelerator and on the CPU?"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.plans.budget import make_plan
from tiermem.plans.plan import Plan
from tiermem.ranks.topology import Topology
from tiermem.swap.memory.accelerator import free_and_total
from tiermem.units.unit import divide
from tiermem.zero import kv_cache_bytes, unwrap_model_for_generation

transformers: Any = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
SEQUENCES, TOKENS = 32, 60


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | sizes)).eval()


def planned(is_gpu: bool, **fields: Any) -> Plan:
    policy = OffloadPolicy(persistence_numel=0, **fields)
    division = divide(llama(), policy, 1, is_trained=False)
    return make_plan(division, policy, Topology(None, 0, 1, 1, 0), is_gpu, 1)


def generated(model: Any, device: torch.device | str) -> list[list[int]]:
    prompts = (
        torch.arange(SEQUENCES * 20, device="cpu")
        .view(SEQUENCES, 20)
        .remainder(59)
        .add(1)
        .to(device)
    )
    asked = {
        "max_new_tokens": TOKENS - 20,
        "min_new_tokens": TOKENS - 20,
        "do_sample": False,
        "pad_token_id": 0,
    }
    found: list[list[int]] = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), **asked
    ).tolist()
    return found


def test_the_formula_is_what_transformers_keeps() -> None:
    model = llama()
    kept = model(torch.zeros(3, 50, dtype=torch.int64), use_cache=True).past_key_values
    num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)
    assert kv_cache_bytes(model.config, 3, 50, torch.float32) == num_bytes * 5 // 4
    assert kv_cache_bytes(model.config, 3, 50, torch.bfloat16) == num_bytes * 5 // 8
    gpt2 = SimpleNamespace(n_layer=3, n_head=2, n_embd=8)
    assert kv_cache_bytes(gpt2, 1, 7) == (3 + 1) * 2 * 8 * 7 * 4
    with pytest.raises(ValueError, match="no num_hidden_layers: give kv_bytes"):
        kv_cache_bytes(SimpleNamespace(), 1, 1)
    with pytest.raises(ValueError, match="num_tokens is 0"):
        kv_cache_bytes(model.config, 1, 0)


def test_units_give_way_to_the_cache_of_a_generation() -> None:
    kv_bytes = kv_cache_bytes(llama().config, SEQUENCES, TOKENS)
    fields: dict[str, Any] = {"params": Tier.HOST, "unit_buffers": 2}
    least = planned(True, **fields)
    budget = least.device_bytes + 2 * max(unit.full_bytes for unit in least.division.units)
    without = planned(True, device_bytes=budget, **fields)
    with_cache = planned(True, device_bytes=budget, kv_bytes=budget - least.device_bytes, **fields)
    staying = [
        sum(unit.is_resident for unit in plan.division.units) for plan in (without, with_cache)
    ]
    assert staying[0] > staying[1] == 0
    assert max(without.device_bytes, with_cache.device_bytes) <= budget
    assert {row.what: row.num_bytes for row in with_cache.rows}[
        "KV cache"
    ] == budget - least.device_bytes
    assert planned(True, kv_bytes=kv_bytes, **fields).device_bytes == least.device_bytes + kv_bytes


@pytest.mark.parametrize("is_gpu", [True, False])
def test_one_byte_less_is_refused_with_the_cache_in_the_arithmetic(is_gpu: bool) -> None:
    fields: dict[str, Any] = {"params": Tier.HOST, "unit_buffers": 2, "kv_bytes": 123_457}
    needed = planned(is_gpu, **fields)
    budget, num_bytes = (
        ("device_bytes", needed.device_bytes) if is_gpu else ("host_bytes", needed.host_bytes)
    )
    if not is_gpu:
        assert needed.host_bytes - needed.arena_bytes == 123_457  # torch's own
    assert planned(is_gpu, **fields | {budget: num_bytes}) is not None
    with pytest.raises(
        ValueError,
        match=rf"{budget}={num_bytes - 1}.*KV cache 0\.1 MiB \(left to a generation: kv_bytes\)",
    ) as error:
        planned(is_gpu, **fields | {budget: num_bytes - 1})
    assert re.search(rf"needs {num_bytes} ", str(error.value))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("params", [Tier.HOST, Tier.NVME])
def test_a_generation_takes_no_more_of_the_device_than_its_plan(
    params: Tier, sim: ModuleType, tmp_path: Path
) -> None:
    expected = generated(llama(), "cpu")
    kv_bytes = kv_cache_bytes(llama().config, SEQUENCES, TOKENS)
    model = llama()
    policy = OffloadPolicy(params=params, paths=[tmp_path], kv_bytes=kv_bytes, persistence_numel=0)
    with tiermem.shard(model, policy, device="sim", is_trained=False) as shards:
        sim.synchronize()
        sim.reset_peak_memory_stats("sim")
        assert generated(model, "sim") == expected
        sim.synchronize()
        weights = shards.plan.device_bytes - kv_bytes
        peak = sim.max_memory_allocated("sim")
        # beside weights and cache: activations of one block, and the logits
        assert 0.8 * kv_bytes < peak - weights < 1.1 * kv_bytes, (peak, weights, kv_bytes)


def test_weights_are_not_kept_in_the_room_of_the_cache(
    sim: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    policy = OffloadPolicy(
        params=Tier.HOST, paths=[tmp_path], kv_bytes=1 << 20, persistence_numel=0
    )
    with tiermem.shard(model, policy, device="sim", is_trained=False) as shards:
        streamed = sum(live.unit.full_bytes for live in shards.units if live.is_streamed)
        for spare, is_kept in ((0, True), (-512, False)):
            free, total = free_and_total(torch.device("sim", 0))
            sim.set_capacity(total - free + streamed + (1 << 20) + spare, "sim")
            with unwrap_model_for_generation(model):
                assert all(not live.is_streamed for live in shards.units) == is_kept
    assert "1048576 of them left to the KV cache" in caplog.text
