"""Is what a card leaves taken by weights, explained, and refused where it is too little for any
plan?"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")

from on_simulated import python

from tiermem.forecast import Rates
from tiermem.forecast.rates import Compute
from tiermem.policy import Tier
from tiermem.tools.job.train_job import make_config
from tiermem.tools.measure.gpu_link import measure_memory
from tiermem.tools.options import PlanOptions, TrainOptions
from tiermem.tools.plan.budget import ActivationBytes
from tiermem.tools.plan.plan import EXIT_FITS, plan
from tiermem.tools.plan.planned import Card, Cluster, Scenario
from tiermem.tools.plan.settle import choose_config
from tiermem.tools.presets import ModelSizes, preset

GIB, MIB = 1 << 30, 1 << 20
SHAPE = preset("151m") | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "vocab_size": 301,
}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4}
SPEED = Compute(1e-12, 2e-12), Rates(2e9, 1e9, link_bytes_s=1e9)
CONFIG = make_config(TrainOptions(offload="cpu", precision="fp32"), [Path("/tmp")])


def activations(num_tokens: int = 1024) -> ActivationBytes:
    return ActivationBytes(ModelSizes.of(SHAPE), num_tokens, "fp32", "fp32", True, True)


def chosen(
    card_mib: int, speed: Any = SPEED, num_tokens: int = 1024, num_micro: int = 1, **own: Any
) -> tuple[dict[str, Any], str]:
    """What is set in the config's own section, and the lines."""
    config = CONFIG | {"tiermem": CONFIG.get("tiermem", {}) | own}
    config["gradient_accumulation_steps"] = num_micro
    cluster = Cluster(1, 1, card_mib * MIB)
    compute, rates = speed or SPEED
    config["train_micro_batch_size_per_gpu"] = num_tokens // 64
    scenario = Scenario(SHAPE, config, cluster, rates, compute, 64, is_checkpointing=True)
    found, how, said, _ = choose_config(scenario, speed is not None)
    assert (how is None) == (speed is None or not said)
    return {
        name: found["tiermem"].get(name) for name in ("device_bytes", "activations")
    }, "; ".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"is_checkpointing": True}, {}])
def test_7b_on_a_card_of_24_gb_is_planned_within_it(given: dict[str, Any], tmp_path: Path) -> None:
    """With 64 GB of RAM and nothing said of the card's use. Blocks are recomputed, said or not."""
    file, text = tmp_path / "plan.json", io.StringIO()
    options = PlanOptions(
        preset="7b", gpu_bytes=24 * GIB, host_bytes=58 * GIB, json_file=file, **given
    )
    assert plan(options, Console(file=text, width=600)) == EXIT_FITS
    found = json.loads(file.read_text())
    assert all(sentence in text.getvalue() for sentence in found["placement"])
    assert found["is_checkpointing"] and found["rank_bytes"]["DEVICE"] <= 24 * GIB
    lines = {line["what"]: line["num_bytes"] for line in found["lines"] if line["tier"] == "DEVICE"}
    assert lines["context"] == 512 * MIB and lines["torch"] == int(0.05 * 24 * GIB)


def test_weights_take_what_a_card_leaves_and_the_sentence_says_how_much() -> None:
    own, said = chosen(400, num_micro=8, overlap="none")
    left = card_budget(400, None)
    assert own == {"device_bytes": left, "activations": None}
    assert (
        "device_bytes: 400.0 MiB - " in said
        and f"= {left / MIB:.1f} MiB for the plan; the plan takes" in said
    )
    assert "activations: inputs of 12 checkpointed blocks take 12.0 MiB and stay on the GPU" in said


def card_budget(card_mib: int, home: Tier | None, num_tokens: int = 1024) -> int:
    return Card(card_mib * MIB, ()).budget(activations(num_tokens), home).left_bytes


def test_where_streaming_is_far_faster_no_more_units_stay_and_the_sentence_says_so() -> None:
    """A fast link brings units while the step of others goes on."""
    own, said = chosen(400, (SPEED[0], Rates(2e9, 1e9, kernel_bytes_s=5e9)), streamed_ratio=0.0)
    assert own == {"device_bytes": None, "activations": None}
    assert "device_bytes: not set, since no more units stay, which is faster: 400.0 MiB - " in said


@pytest.mark.parametrize("speed", [SPEED, None])
def test_inputs_leave_a_card_that_is_too_small_for_them(speed: Any) -> None:
    """By predicted time, and by rule where nothing was measured."""
    kept, moved = (card_budget(0, home, 16384) // MIB for home in (None, Tier.HOST))
    assert moved - kept == 10 * 16  # 10 of 12 inputs of 16384 x 256 in fp32
    own, said = chosen(-5 - kept, speed, 16384)
    assert own["activations"] == "cpu"
    assert "go from the GPU to HOST: " in said and "MiB too large to stay there" in said


def test_a_card_without_room_is_refused_with_the_arithmetic() -> None:
    little = 5 - card_budget(0, Tier.HOST) // MIB
    with pytest.raises(ValueError, match="the accelerator has too little memory: ") as refused:
        chosen(little)
    said = str(refused.value)
    assert f"{little}.0 MiB - " in said and "MiB for the plan; and the smallest plan needs" in said
    assert chosen(little, device_bytes=100 * MIB) == (
        {"device_bytes": 100 * MIB, "activations": None},
        "",
    )


def test_what_a_config_names_is_kept_and_said() -> None:
    own, said = chosen(400, device_bytes=50 * MIB, activations="cpu")
    assert own == {"device_bytes": 50 * MIB, "activations": "cpu"}
    assert (
        "device_bytes: 50.0 MiB, as the config says" in said
        and "from the GPU to HOST: as the config says" in said
    )


PROBE = """
import time
from tiermem.swap.memory.accelerator import find_device
from tiermem.tools.measure.gpu_link import measure_beside_copies, measure_memory
device = find_device()
copied, both = (measure_beside_copies(device, lambda: time.sleep(0.01), num_bytes, 1 << 20) for num_bytes in (0, 10**12))
print(measure_memory(device) > 0, copied > 0, both > 10**13)
"""


def test_the_cpus_memory_is_no_devices() -> None:
    assert measure_memory(torch.device("cpu")) is None


@pytest.mark.slow
def test_the_memory_of_a_device_and_that_of_the_host_are_measured() -> None:
    """Slow: the plan for this machine's card, below, measures them too, and says so."""
    assert python("-c", PROBE) == "True True True\n"


@pytest.mark.slow
def test_the_card_of_this_machine_is_planned_for(tmp_path: Path) -> None:
    """Without --gpu-memory: its size, its link, its memory and its maths are measured."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    words = [
        "--model",
        str(tmp_path / "config.json"),
        "--offload",
        "cpu",
        "--seq",
        "64",
        "--checkpointing",
    ]
    out = str(tmp_path / "plan.json")
    capacity = 1 << 30
    python(
        "-m", "tiermem.tools.cli", "plan", *words, "--json", out, TIERMEM_SIM_CAPACITY=str(capacity)
    )
    found = json.loads(Path(out).read_text())
    lines = {line["what"]: line["num_bytes"] for line in found["lines"] if line["tier"] == "DEVICE"}
    assert lines["torch"] == int(0.05 * capacity)
    budget = found["device_budget_bytes"]
    # None: with the rates of this moment no more units stay there
    assert budget is None or 0 < budget < capacity
    sources = " ".join(found["sources"])
    assert sources.count("measured here") == 2 and "trained for a moment" in sources
    assert re.search(
        r"CPU kernels beside copies: [1-9]\d* GB/s of memory traffic, measured", sources
    )
