"""Are some blocks recomputed in backward while the others keep their activations, and is that chosen
where memory has room for a part?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.forecast import Rates
from tiermem.tools.job.launcher import Job
from tiermem.tools.plan.budget import ActivationBytes
from tiermem.tools.plan.planned import Cluster, Planned, Scenario, plan_scenario
from tiermem.tools.plan.prediction import build_model
from tiermem.tools.presets import ModelSizes

pytest.importorskip("transformers")

NUM_LAYERS = 8
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "use_cache": False,
}
NUM_TOKENS = 160
MIB = 1 << 20


def trained(num_kept: int) -> tuple[list[int], list[torch.Tensor]]:
    """How often each block ran in a forward and a backward; the loss and the gradients."""
    policy = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST)
    job = Job("", SHAPE, seq=NUM_TOKENS, is_checkpointing=True, num_kept=num_kept)
    model: Any = build_model(job, policy=policy, dtype=torch.float32)
    counts = [0] * NUM_LAYERS
    for index, block in enumerate(model.model.layers):
        block.mlp.register_forward_pre_hook(lambda *_, at=index: count(counts, at))
    with tiermem.shard(model, policy) as shards:
        tokens = torch.arange(NUM_TOKENS)[None] % 300
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        params = [*model.parameters()]
        grads = [shards.gradient(param) for param in params]
    assert all(each is not None for each in grads)
    return counts, [loss.detach(), *(each for each in grads if each is not None)]


def count(counts: list[int], at: int) -> None:
    counts[at] += 1


@pytest.mark.parametrize("num_kept", [1, 5, NUM_LAYERS])
def test_the_last_blocks_keep_and_no_bit_is_another(num_kept: int) -> None:
    counts, found = trained(num_kept)
    assert counts == [2] * (NUM_LAYERS - num_kept) + [1] * num_kept
    again, expected = trained(0)
    assert again == [2] * NUM_LAYERS
    assert all(map(torch.equal, found, expected))


def of_blocks(num_kept: int, is_checkpointing: bool = True) -> ActivationBytes:
    return ActivationBytes(
        ModelSizes.of(SHAPE), NUM_TOKENS, "fp32", "fp32", is_checkpointing, True, num_kept=num_kept
    )


def kept_bytes(each: ActivationBytes) -> int:
    return next(row.num_bytes for row in each.rows() if row.what == "activations")


def test_a_block_that_keeps_takes_what_it_saves_in_place_of_its_input() -> None:
    whole = kept_bytes(of_blocks(0, is_checkpointing=False)) // NUM_LAYERS
    one_input = NUM_TOKENS * 64 * 4
    for num_kept in range(NUM_LAYERS):
        expected = num_kept * whole + (NUM_LAYERS - num_kept) * one_input
        assert kept_bytes(of_blocks(num_kept)) == expected
    parts = [of_blocks(each).recomputed_part for each in (0, 2, 7)]
    assert parts == [1.0, 0.75, 0.125]


def on_card(num_bytes: int, is_checkpointing: bool | None = None) -> Planned:
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
    }
    rates = Rates(1e9, 1e9, link_bytes_s=50e9, kernel_bytes_s=100e9)
    cluster = Cluster(1, 1, num_bytes)
    return plan_scenario(Scenario(SHAPE, config, cluster, rates, 1e11, 128, is_checkpointing))


def test_more_of_a_card_keeps_more_blocks_and_is_no_slower() -> None:
    sizes = [size * MIB for size in range(16, 96, 8)]
    plans = [each for each in map(on_card, sizes) if not each.problems]
    kept = [NUM_LAYERS - each.activations.num_recomputed for each in plans]
    assert kept == sorted(kept) and {0, NUM_LAYERS} < set(kept)
    seconds = [each.forecast.total_s for each in plans]
    assert seconds == sorted(seconds, reverse=True)
    some = next(each for each in plans if each.activations.num_kept)
    assert some.choice is not None
    assert some.choice.reasons[0].startswith("all blocks but the last")
    told = [on_card(some.scenario.cluster.gpu_bytes or 0, each) for each in (True, False)]
    assert told[1].problems and some.forecast.total_s < told[0].forecast.total_s


def test_what_is_asked_for_recomputes_all_or_none() -> None:
    for is_asked in (True, False):
        found = on_card(1 << 30, is_asked).activations
        assert found.num_recomputed == (NUM_LAYERS if is_asked else 0)


def test_inputs_that_fit_on_a_disk_alone_are_planned_there_whatever_the_memory() -> None:
    """On a CPU: inputs of all blocks are larger than the memory itself."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096}
    shape = SHAPE | wide | {"num_hidden_layers": 200}
    rates = Rates(1e9, 1e9, kernel_bytes_s=100e9)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "."},
            "offload_optimizer": {"device": "nvme", "nvme_path": "."},
        },
    }

    def within(num_mib: int) -> Planned:
        cluster = Cluster(1, 1, None, num_mib * MIB)
        return plan_scenario(Scenario(shape, config, cluster, rates, 1e11, 2048, None))

    sizes = range(2000, 7000, 1000)
    fits = [not within(size).problems for size in sizes]
    assert fits == sorted(fits) and not fits[0] and fits[-1]
    least = within(sizes[fits.index(True)])
    assert least.policy.activations is Tier.NVME
