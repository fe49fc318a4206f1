"""Do the estimators print what is published, and do tiermem's own rows say what its plan
allocates?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.zero import (
    estimate_mem_needs,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

OURS = "tiermem, from its own plan"


def published(printed: str) -> list[str]:
    """The reference's part of what was printed."""
    return printed.partition(OURS)[0].splitlines()


def test_zero3_table_of_a_3b_model_on_8_gpus_is_the_documented_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    estimate_zero3_model_states_mem_needs_all_cold(
        total_params=2851e6, largest_layer_params=32e6, num_gpus_per_node=8, num_nodes=1
    )
    assert published(capsys.readouterr().out) == [
        "Estimated memory needed for params, optim states and gradients for a:",
        "HW: Setup with 1 node, 8 GPUs per node.",
        "SW: Model with 2851M total params, 32M largest layer params.",
        "  per CPU  |  per GPU |   Options",
        "   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1",
        "  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0",
        "   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1",
        "  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0",
        "    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1",
        "  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0",
    ]


def test_zero3_table_of_t0_3b_on_one_gpu_is_the_documented_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    estimate_zero3_model_states_mem_needs_all_cold(
        total_params=2_783_959_040, largest_layer_params=32128 * 2048
    )
    assert published(capsys.readouterr().out)[1:] == [
        "HW: Setup with 1 node, 1 GPU per node.",
        "SW: Model with 2783M total params, 65M largest layer params.",
        "  per CPU  |  per GPU |   Options",
        "   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1",
        "   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0",
        "   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1",
        "   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=0",
        "    0.37GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=1",
        "   15.56GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=0",
    ]


def test_zero2_table_counts_weights_on_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero2_model_states_mem_needs_all_cold(
        total_params=2851e6, num_gpus_per_node=8, num_nodes=1
    )
    assert published(capsys.readouterr().out) == [
        "Estimated memory needed for params, optim states and gradients for a:",
        "HW: Setup with 1 node, 8 GPUs per node.",
        "SW: Model with 2851M total params.",
        "  per CPU  |  per GPU |   Options",
        "  127.45GB |   5.31GB | offload_optimizer=cpu ",
        "  127.45GB |  11.28GB | offload_optimizer=none",
    ]


def test_formulas_of_zero3_by_case() -> None:
    needs = estimate_zero3_model_states_mem_needs
    total, largest = 1_000_003, 7_001
    assert needs(total, largest, 4, 3) == (int(total * 18 / 3 * 1.5), 4 * largest, 4 * largest)
    assert needs(total, largest, 4, 3, zero_init=False)[0] == int(
        total * 16 * 1.5
    )  # 4 copies in fp32 are more than 18 / 3
    on_gpu = needs(total, largest, 4, 3, cpu_offload_params=False)
    assert on_gpu == (int(total * 16 / 3 * 1.5), 4 * largest + 2 * total // 12, 4 * largest)
    nothing = needs(
        total,
        largest,
        4,
        3,
        cpu_offload=False,
        cpu_offload_params=False,
        additional_buffer_factor=1.0,
    )
    assert nothing == (largest * 4 * 4, 4 * largest + 18 * total // 12, 4 * largest)
    assert estimate_zero2_model_states_mem_needs(total, 4, 3) == (int(total * 48 * 1.5), 2 * total)


def tied_tower() -> nn.Module:
    model = nn.Sequential(nn.Linear(37, 41), nn.Linear(41, 37, bias=False), nn.Linear(37, 41))
    model[2].weight = model[0].weight
    return model


def test_live_counts_each_parameter_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = tied_tower()
    total, largest = 37 * 41 + 41 + 41 * 37 + 41, 37 * 41 + 41
    estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2, num_nodes=3)
    live = capsys.readouterr().out
    estimate_zero3_model_states_mem_needs_all_cold(total, largest, num_gpus_per_node=2, num_nodes=3)
    assert live == capsys.readouterr().out
    assert "HW: Setup with 3 nodes, 2 GPUs per node." in live
    estimate_zero2_model_states_mem_needs_all_live(model)
    assert "SW: Model with 0M total params." in capsys.readouterr().out


def test_live_counts_a_partitioned_model_as_a_whole_one(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero3_model_states_mem_needs_all_live(nn.Linear(300, 500))
    whole = capsys.readouterr().out
    with tiermem.shard(
        nn.Linear(300, 500), OffloadPolicy(params=Tier.HOST, persistence_numel=0)
    ) as shards:
        estimate_zero3_model_states_mem_needs_all_live(shards.model)
    assert capsys.readouterr().out == whole


def test_nvme_rows_follow_the_reference_and_say_whose_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    estimate_zero3_model_states_mem_needs_all_cold(2851e6, 32e6, 8, 2)
    rows = capsys.readouterr().out.partition(OURS)[2].splitlines()
    assert rows[1] == "  per CPU  |  per GPU |  per NVMe | Options"
    sizes = {row.split("|")[3].strip(): row.split("|")[:3] for row in rows[2:]}
    assert list(sizes) == [
        "offload_param=cpu , offload_optimizer=cpu",
        "offload_param=none, offload_optimizer=cpu",
        "offload_param=cpu , offload_optimizer=nvme",
        "offload_param=nvme, offload_optimizer=nvme",
        "offload_param=none, offload_optimizer=nvme",
    ]
    nvme = float(sizes["offload_param=nvme, offload_optimizer=nvme"][2].strip().removesuffix("GB"))
    # two slots; of a node of two
    assert nvme == pytest.approx(2 * 2851e6 * (12 + 2) / 2 / 2**30, rel=0.01)
    assert sizes["offload_param=cpu , offload_optimizer=cpu"][2].strip() == "0.00GB"


def test_nvme_rows_of_stage_2_offload_the_optimizer_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    estimate_zero2_model_states_mem_needs_all_cold(2851e6, 8, 1)
    rows = capsys.readouterr().out.partition(OURS)[2].splitlines()[2:]
    assert [row.split("|")[3].strip() for row in rows] == [
        "offload_optimizer=cpu",
        "offload_optimizer=nvme",
    ]


@pytest.mark.parametrize("offload", [Tier.HOST, Tier.NVME])
def test_own_rows_are_what_a_model_of_such_layers_allocates(offload: Tier, tmp_path: Path) -> None:
    layers = [nn.Linear(300, 501, bias=False) for _ in range(4)] + [nn.Linear(7, 11, bias=False)]
    model = nn.ModuleList(layers).to(torch.bfloat16)
    total, largest = sum(p.numel() for p in model.parameters()), 300 * 501
    policy = OffloadPolicy(
        params=offload, optim=offload, paths=[tmp_path] if offload is Tier.NVME else ()
    )
    with tiermem.shard(model, policy) as shards:
        real = shards.plan
    assert estimate_mem_needs(total, largest, policy=policy, is_gpu=False) == (
        real.host_bytes,
        0,
        real.disk_bytes,
    )


def test_a_layer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="largest_layer_params is 7 and total_params 5"):
        estimate_mem_needs(5, 7)
