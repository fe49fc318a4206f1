"""Does `tiermem plan` find the best mix of homes: by rates that were measured, beside an exhaustive
grid, and never a slower one on a larger machine?"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tiermem.forecast import Rates, cards
from tiermem.policy import Tier
from tiermem.tools.measure.gpu_link import kernel_passes
from tiermem.tools.options import CARDS, PlanOptions
from tiermem.tools.plan.plan import advise, scenario_of, with_card
from tiermem.tools.plan.planned import WEAR, Planned, Scenario, plan_scenario

GIB = 1 << 30


def scenario(**given: Any) -> Scenario:
    fields: dict[str, Any] = {"precision": "bf16", "overlap": "forward", "flops": 1.5e14}
    return scenario_of(PlanOptions(**fields | given))[0]


def on_h200(gpu_gib: int, batch: int) -> Planned:
    """8B, compact, 16,384 tokens a step, 256 GB of host memory and no disk, with the rates that
    were measured on an H200."""
    found = scenario(
        preset="8b",
        states="compact",
        gpu_bytes=gpu_gib * GIB,
        host_bytes=250 * GIB,
        nvme_bytes=0,
        flops=4e14,
        batch=batch,
        accumulation=8 // batch,
    )
    rates = Rates(
        1e9,
        1e9,
        link_bytes_s=55e9,
        kernel_bytes_s=148e9,
        host_memory_bytes_s=103e9 + 61e9,  # kernels beside copies, and these
        device_memory_bytes_s=4.8e12,
        step_passes=kernel_passes(found_states(found)),  # 0.0066 ns an element
    )
    return plan_scenario(found._replace(rates=rates))


def found_states(scenario: Scenario) -> Any:
    from tiermem.config import load_config, resolve_auto

    return resolve_auto(load_config(scenario.config), 1).policy().precision


@pytest.mark.slow
def test_a_mix_fills_a_card_of_80_gb() -> None:
    found = on_h200(80, 2)
    assert not found.problems
    assert found.tokens_per_s >= 5800
    assert found.tier_bytes(Tier.DEVICE) > 70 * GIB  # where 2.9 were taken once


@pytest.mark.slow
def test_all_of_8b_rests_on_a_card_of_141_gb() -> None:
    found = on_h200(141, 1)
    assert not found.problems and found.choice is not None
    assert found.choice == on_h200(141, 1).choice
    assert found.tokens_per_s >= 6300
    assert found.policy.optim is found.policy.params is Tier.DEVICE


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("batch", "accumulation", "least"), [(4, 1, 1600), (2, 4, 2100)])
def test_8b_fits_24_gb_and_64_gb_without_a_disk(
    batch: int, accumulation: int, least: float
) -> None:
    """With an fp32 master (tiny), clipped, by the rates of docs/sizing.md."""
    found = plan_scenario(
        scenario(
            preset="8b",
            states="tiny",
            gpu_bytes=24 * GIB,
            host_bytes=58 * GIB,
            nvme_bytes=0,
            batch=batch,
            accumulation=accumulation,
        )
    )
    assert not found.problems
    assert found.tokens_per_s >= least
    assert not found.policy.uses_nvme


def test_a_plan_of_70b_tries_few_plans_and_says_why() -> None:
    """A plan takes some 10 ms, so that the command answers in seconds."""
    found = plan_scenario(scenario(preset="70b", gpu="h100", host_bytes=500 * GIB))
    assert found.choice is not None
    assert 20 < found.choice.num_tried < 250
    assert len(found.choice.reasons) >= 6


@pytest.mark.slow
def test_limits_of_wear_pinning_and_disk_are_kept() -> None:
    given: dict[str, Any] = {"preset": "1b", "gpu": "3090", "gpu_bytes": 8 * GIB}
    given["host_bytes"] = 14 * GIB
    free = plan_scenario(scenario(**given))
    assert free.written_bytes_day > 0
    worn = plan_scenario(scenario(**given, written_bytes_day=10**9))
    (problem,) = worn.problems
    assert problem.where == WEAR
    larger = next(each for each in advise(worn) if each.words.startswith("accumulation"))
    assert larger.fits and larger.planned.written_bytes_day <= 10**9
    enough = plan_scenario(scenario(**given, written_bytes_day=int(free.written_bytes_day) + 1))
    assert not enough.problems and enough.tokens_per_s >= 0.98 * free.tokens_per_s
    pinned = plan_scenario(scenario(**given, pinned_bytes=free.pinned_bytes - 1))
    assert pinned.pinned_bytes < free.pinned_bytes
    without = plan_scenario(scenario(**given, nvme_bytes=0))
    assert not without.policy.paths and without.problems


def test_every_named_card_is_a_row_with_its_source() -> None:
    assert tuple(cards.CARDS) == CARDS
    for name, card in cards.CARDS.items():
        options, (said,) = with_card(PlanOptions(preset="1b", gpu=name, flops=1e12))
        assert card.source in said and name in said
        assert options.gpu_bytes == card.memory_gib * GIB
        assert options.flops == 1e12  # what is given is kept


# ---- beside a grid -------------------------------------------------------------------------------

SHAPES: list[dict[str, Any]] = [
    {"preset": "8b", "states": "compact", "gpu": "h100", "host_bytes": 250 * GIB},
    {"preset": "8b", "states": "tiny", "gpu": "4090", "host_bytes": 58 * GIB, "nvme_bytes": 0},
    {"preset": "3b", "states": "exact", "gpu": "4060ti", "host_bytes": 58 * GIB},
    {"preset": "14b", "states": "compact", "gpu": "5090", "host_bytes": 122 * GIB},
    {"preset": "3b", "states": "exact", "host_bytes": 26 * GIB, "nvme_rate": "7,5"},
]


OF_FILES: dict[str, dict[str, Any]] = {
    "1.7b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
FLOPS_OF_CARD = {0: 1e12, 12: 5e13, 16: 8e13, 24: 1.5e14, 32: 2e14, 48: 2e14, 80: 4e14, 141: 4e14}
"""By GiB; 0: the CPU."""


def random_machines() -> Iterator[Any]:
    """Sixty models on machines, by one seed."""
    rng = random.Random(48)
    for number in range(60):
        card = rng.choice(list(FLOPS_OF_CARD))
        batch = rng.choice([1, 2, 4])
        given: dict[str, Any] = {
            "preset": rng.choice([*OF_FILES, "3b", "8b", "14b", "32b", "70b"]),
            "states": rng.choice(["exact", "compact", "tiny"]),
            "host_bytes": (rng.choice([32, 64, 128, 256, 512]) - 6) * GIB,
            "nvme_bytes": rng.choice([0, 1, 2]) * 2 * 10**12,
            "flops": FLOPS_OF_CARD[card],
            "batch": batch,
            "accumulation": 8 // batch,
        }
        if card:
            given["gpu_bytes"] = card * GIB
        if card >= 80:
            given |= {"link_bytes_s": 50e9, "gpu_memory_bytes_s": 2e12}
        yield pytest.param(given, marks=pytest.mark.soak, id=f"machine {number}")


@pytest.mark.parametrize(
    "given",
    [
        *(
            pytest.param(
                {**each, "batch": 2, "accumulation": 4}, marks=pytest.mark.slow, id=str(each)
            )
            for each in SHAPES
        ),
        *random_machines(),
    ],
)
def test_a_grid_finds_nothing_more_than_2_percent_better(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Buffers and tiles are those that were found; of an axis of many values every second one is
    in the grid."""
    from tiermem.forecast.choose import _Search

    if given["preset"] in OF_FILES:
        tmp_path.joinpath("config.json").write_text(json.dumps(OF_FILES[given["preset"]]))
        given = given | {"preset": None, "model": tmp_path / "config.json"}
    one = scenario(**given)
    found = plan_scenario(one)
    buffers = (0, 0) if found.choice is None else found.choice.point[-2:]
    num_points = list[int]()

    def every(self: Any, near: Any) -> Any:
        steps = [2 if size > 6 else 1 for size in self._sizes[:-2]]
        values = [range(0, size, step) for size, step in zip(self._sizes, steps, strict=False)]
        points = [(*point, *buffers) for point in itertools.product(*values)]
        num_points.append(len(points))
        best = min(points, key=self._seconds)
        if self._try(best) is None:
            raise ValueError("no plan fits")
        return best

    monkeypatch.setattr(_Search, "best", every)
    grid = plan_scenario(one)
    if grid.choice is not None and not grid.problems:
        assert found.choice is not None and not found.problems
        assert max(num_points) > found.choice.num_tried
        assert found.forecast.total_s <= 1.02 * grid.forecast.total_s


# ---- larger machines -----------------------------------------------------------------------------


Machine = tuple[int, int, int, str]
"""GiB of a card and of host memory, disks of 2 TB, and states."""
MORE = ["gpu", "host", "link", "kernels", "disk", "flops"]


@pytest.mark.slow
@settings(max_examples=12, derandomize=True)
@given(
    gpu_gib=st.integers(6, 48),
    host_gib=st.integers(10, 100),
    disks=st.integers(0, 1),
    states=st.sampled_from(["exact", "compact"]),
    more=st.sampled_from(MORE),
)
def test_a_larger_or_faster_machine_never_gets_a_slower_plan(
    gpu_gib: int, host_gib: int, disks: int, states: str, more: str
) -> None:
    machine = (gpu_gib, host_gib, disks, states)
    assert_no_slower(plan_of(*machine), machine, more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "more"),
    [
        ((7, 18, 1, "exact"), ["host", "disk"]),
        ((9, 30, 0, "compact"), ["gpu", "link", "kernels", "flops"]),
    ],
)
def test_a_machine_with_more_of_one_thing_gets_no_slower_plan(
    machine: Machine, more: list[str]
) -> None:
    before = plan_of(*machine)
    assert not before.problems
    for each in more:
        assert_no_slower(before, machine, each)


def plan_of(gpu_gib: int, host_gib: int, disks: int, states: str, more: str = "") -> Planned:
    """The plan of 1B on a machine, with half as much again of one thing, or one disk more."""
    given: dict[str, Any] = {
        "preset": "1b",
        "states": states,
        "gpu_bytes": gpu_gib * GIB,
        "host_bytes": host_gib * GIB,
        "nvme_bytes": disks * 2 * 10**12,
        "accumulation": 2,
        "flops": 5e13,
    }
    if more == "gpu":
        given["gpu_bytes"] = gpu_gib * GIB * 3 // 2
    elif more == "host":
        given["host_bytes"] = host_gib * GIB * 3 // 2
    elif more == "disk":
        given["nvme_bytes"] += 2 * 10**12
    elif more == "flops":
        given["flops"] *= 1.5
    found = scenario(**given)
    field = {"link": "link_bytes_s", "kernels": "kernel_bytes_s"}.get(more)
    if field is not None:
        faster: dict[str, Any] = {field: 1.5 * getattr(found.rates, field)}
        found = found._replace(rates=dataclasses.replace(found.rates, **faster))
    return plan_scenario(found)


def assert_no_slower(before: Planned, machine: Machine, more: str) -> None:
    after = plan_of(*machine, more)
    if not before.problems:
        assert not after.problems
        assert after.tokens_per_s >= 0.99 * before.tokens_per_s
