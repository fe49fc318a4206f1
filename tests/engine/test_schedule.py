"""Do the schedules give the documented rates, and survive a save and a load?"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from tiermem.config import ConfigError, SchedulerConfig, load_config
from tiermem.schedule import (
    DOCUMENTED,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    arguments_of,
    build_scheduler,
)

CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 5}),
    ("WarmupDecayLR", {"warmup_num_steps": 3, "total_num_steps": 8, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"warmup_num_steps": 3, "total_num_steps": 8}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 4,
            "decay_step_size": 2,
        },
    ),
    ("LRRangeTest", {"lr_range_test_step_size": 2}),
]


def adam(lr: float = 0.5, num_groups: int = 1) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(num_groups)]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.5, 0.95))


def built(section: SchedulerConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule of a section of a config."""
    return build_scheduler(section.type, section.params, optimizer)


def rates(schedule: LRScheduler, num_steps: int) -> list[float]:
    """The rate that each optimizer step runs with."""
    found = []
    for _ in range(num_steps):
        found.append(float(schedule.optimizer.param_groups[0]["lr"]))
        schedule.optimizer.step()
        schedule.step()
    return found


def test_linear_warmup_rises_by_equal_steps_and_stays() -> None:
    schedule = WarmupLR(
        adam(), warmup_min_lr=0.0, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear"
    )
    assert rates(schedule, 7) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_log_warmup_is_the_default_and_rises_with_the_logarithm() -> None:
    schedule = WarmupLR(adam(), warmup_min_lr=0.1, warmup_max_lr=1.1, warmup_num_steps=4)
    expected = [0.1 + math.log(i + 1) / math.log(4) for i in (0, 0, 1, 2, 3)] + [1.1]
    assert rates(schedule, 6) == pytest.approx(expected)


def test_warmup_defaults_are_the_documented_ones() -> None:
    schedule = WarmupLR(adam(lr=0.5))
    assert (schedule.min_lrs, schedule.max_lrs, schedule.warmup_num_steps) == ([0.0], [0.5], 1000)
    assert WarmupDecayLR(adam(lr=0.5), 2000).max_lrs == [0.001]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("WarmupLR", {}),
        ("WarmupLR", {"warmup_max_lr": None}),
        ("WarmupDecayLR", {"warmup_max_lr": None, "total_num_steps": 99}),
        ("WarmupCosineLR", {"total_num_steps": 99}),
    ],
)
def test_warmup_without_a_highest_rate_rises_to_each_group_s_own(
    name: str, params: dict[str, Any]
) -> None:
    optimizer = adam(num_groups=2)
    optimizer.param_groups[0]["lr"] = 3e-5
    section = SchedulerConfig(type=name, params={**params, "warmup_num_steps": 3})
    schedule = built(section, optimizer)
    highest = [0.0, 0.0]
    for _ in range(6):
        highest = [
            max(high, float(group["lr"]))
            for high, group in zip(highest, optimizer.param_groups, strict=True)
        ]
        optimizer.step()
        schedule.step()
    assert highest == pytest.approx([3e-5, 0.5], rel=0.01)


def test_a_schedule_built_after_another_rises_to_the_first_rate() -> None:
    optimizer = adam(lr=0.5)
    WarmupLR(optimizer)
    assert (optimizer.param_groups[0]["lr"], WarmupLR(optimizer).max_lrs) == (0.0, [0.5])


def test_decay_falls_on_a_line_to_the_least_rate_and_stays() -> None:
    schedule = WarmupDecayLR(
        adam(),
        total_num_steps=6,
        warmup_min_lr=1.0,
        warmup_max_lr=2.0,
        warmup_num_steps=2,
        warmup_type="linear",
    )
    assert rates(schedule, 9) == pytest.approx([1.0, 1.0, 1.5, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0])


def test_cosine_falls_from_the_optimizer_s_rate_to_its_ratio_and_stays() -> None:
    schedule = WarmupCosineLR(
        adam(lr=2.0), total_num_steps=6, warmup_num_steps=2, cos_min_ratio=0.5, warmup_type="linear"
    )
    cosine = [0.5 + 0.5 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4, 4)]
    assert rates(schedule, 8) == pytest.approx([2 * r for r in [0.0, 0.0, 0.5, *cosine]])


def test_cosine_warms_up_from_its_least_ratio() -> None:
    schedule = WarmupCosineLR(
        adam(lr=2.0), 100, warmup_min_ratio=0.25, warmup_num_steps=2, warmup_type="linear"
    )
    assert rates(schedule, 3) == pytest.approx([0.5, 0.5, 1.25])


def test_one_cycle_rises_falls_and_decays() -> None:
    schedule = OneCycle(
        adam(),
        1.0,
        3.0,
        cycle_first_step_size=2,
        cycle_second_step_size=4,
        decay_step_size=2,
        decay_lr_rate=1.0,
    )
    assert rates(schedule, 9) == pytest.approx([1.0, 2.0, 3.0, 2.5, 2.0, 1.5, 1.0, 1 / 1.5, 0.5])


def test_one_cycle_without_decay_stays_at_the_least_rate() -> None:
    assert rates(OneCycle(adam(), 1.0, 3.0, cycle_first_step_size=1), 5) == [
        1.0,
        3.0,
        1.0,
        1.0,
        1.0,
    ]


def test_one_cycle_moves_in_stairs() -> None:
    schedule = OneCycle(adam(), 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2)
    assert rates(schedule, 9) == [0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0]


def test_momentum_runs_opposite_to_the_rate_and_leaves_the_second_beta() -> None:
    schedule = OneCycle(
        adam(), 0.0, 1.0, cycle_first_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9
    )
    seen = []
    for _ in range(5):
        seen.append(schedule.optimizer.param_groups[0]["betas"])
        schedule.optimizer.step()
        schedule.step()
    assert [b[0] for b in seen] == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9])
    assert {b[1] for b in seen} == {0.95}


def test_momenta_may_differ_by_group() -> None:
    optimizer = adam(num_groups=2)
    lists = {"cycle_min_mom": [0.8, 0.6], "cycle_max_mom": [0.9, 0.7]}
    schedule = OneCycle(optimizer, [0.1, 0.2], [1.0, 2.0], cycle_first_step_size=1, **lists)  # type: ignore[arg-type]
    optimizer.step()
    schedule.step()
    assert schedule.get_mom() == [group["betas"] for group in optimizer.param_groups]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.95), (0.6, 0.95)]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.0, 2.0])
    assert OneCycle(adam(), 0.0, 1.0, cycle_momentum=False).get_mom() is None


def test_one_cycle_without_a_fall_drops_to_the_least_rate() -> None:
    schedule = OneCycle(adam(), 1.0, 3.0, cycle_first_step_size=2, cycle_second_step_size=0)
    assert rates(schedule, 5) == [1.0, 2.0, 3.0, 1.0, 1.0]


def test_momentum_is_left_alone_when_not_cycled() -> None:
    schedule = OneCycle(adam(), 0.0, 1.0, cycle_momentum=False)
    assert schedule.optimizer.param_groups[0]["betas"] == (0.5, 0.95)


def test_optimizer_without_betas_is_scheduled_too() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    assert rates(OneCycle(optimizer, 0.0, 1.0, cycle_first_step_size=2), 3) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("staircase", "expected"),
    [(False, [1.0, 1.25, 1.5, 1.75, 2.0]), (True, [1.0, 1.0, 1.5, 1.5, 2.0])],
)
def test_range_test_rises_without_end(staircase: bool, expected: list[float]) -> None:
    schedule = LRRangeTest(adam(), 1.0, 2, 0.5, staircase)
    assert rates(schedule, 5) == expected


@pytest.mark.parametrize("value", [-1, 2.5, True, "10"])
@pytest.mark.parametrize("cls", [WarmupLR, lambda o, **k: WarmupCosineLR(o, 10, **k)])
def test_warmup_steps_are_a_whole_number(cls: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="warmup_num_steps is"):
        cls(adam(), warmup_num_steps=value)


_CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        (
            "WarmupLR",
            {"warmup_num_steps": -1},
            "warmup_num_steps is -1; it must be a whole number, 0 or more",
        ),
        ("WarmupLR", {"warmup_min_lr": None}, "warmup_min_lr is None; it must be a finite number"),
        ("WarmupLR", {"warmup_max_lr": "1e-3"}, "warmup_max_lr is '1e-3'"),
        ("WarmupLR", {"warmup_max_lr": [0.1, None]}, "warmup_max_lr is None"),
        (
            "WarmupLR",
            {"warmup_max_lr": [1, 2], "warmup_min_lr": [1, 2, 3]},
            "warmup_max_lr has 2 values",
        ),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": "x"}, "cos_min_ratio is 'x'"),
        (
            "WarmupCosineLR",
            {"total_num_steps": 9, "warmup_min_ratio": [0.1]},
            "warmup_min_ratio is",
        ),
        ("OneCycle", {**_CYCLE, "cycle_second_step_size": -1}, "cycle_second_step_size is -1"),
        ("OneCycle", {**_CYCLE, "cycle_min_mom": "low"}, "cycle_min_mom is 'low'"),
        ("OneCycle", {**_CYCLE, "cycle_first_stair_count": 1.5}, "cycle_first_stair_count is 1.5"),
        (
            "OneCycle",
            {**_CYCLE, "cycle_momentum": "false"},
            "cycle_momentum is 'false'; it must be true",
        ),
        ("LRRangeTest", {"lr_range_test_staircase": 1}, "lr_range_test_staircase is 1"),
        ("OneCycle", {**_CYCLE, "decay_step_size": None}, "decay_step_size is None"),
        ("OneCycle", {**_CYCLE, "decay_lr_rate": float("nan")}, "decay_lr_rate is nan"),
        ("LRRangeTest", {"lr_range_test_step_rate": "fast"}, "lr_range_test_step_rate is 'fast'"),
    ],
)
def test_a_value_that_a_documented_schedule_cannot_take_is_told_when_the_config_is_read(
    name: str, params: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"scheduler.params: {told}")):
        load_config({"train_batch_size": 1, "scheduler": {"type": name, "params": params}})


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_of_no_or_one_step_counts_as_two(kind: str) -> None:
    none, one, two = (rates(WarmupLR(adam(), 0.0, 1.0, steps, kind), 4) for steps in (0, 1, 2))
    assert none == one == two


def test_warmup_type_is_log_or_linear() -> None:
    with pytest.raises(ValueError, match="allowed are log and linear"):
        WarmupLR(adam(), warmup_type="cubic")


def test_rates_may_differ_by_group() -> None:
    schedule = WarmupLR(adam(num_groups=2), 0.0, [1.0, 2.0], 2, "linear")
    rates(schedule, 4)
    assert [g["lr"] for g in schedule.optimizer.param_groups] == [1.0, 2.0]
    with pytest.raises(ValueError, match="3 values, but the optimizer has 2"):
        WarmupLR(adam(num_groups=2), warmup_max_lr=[1.0, 2.0, 3.0])


@pytest.mark.parametrize(("name", "params"), CASES)
def test_schedule_continues_after_a_save_and_a_load(name: str, params: dict[str, Any]) -> None:
    section = SchedulerConfig(type=name, params=params)
    unbroken = rates(built(section, adam()), 12)
    first = built(section, adam())
    head = rates(first, 5)
    optimizer = adam()
    second = built(section, optimizer)
    second.load_state_dict(first.state_dict())
    optimizer.load_state_dict(first.optimizer.state_dict())
    assert head + rates(second, 7) == unbroken


WARMUP = {
    "warmup_min_lr": 0.1,
    "warmup_max_lr": 2.0,
    "warmup_num_steps": 6,
    "warmup_type": "linear",
}
FLIPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "WarmupLR": ({"warmup_num_steps": 4}, {**WARMUP, "last_batch_iteration": 2}),
    "WarmupDecayLR": (
        {"warmup_num_steps": 3, "total_num_steps": 9},
        {**WARMUP, "total_num_steps": 12, "last_batch_iteration": 2},
    ),
    "WarmupCosineLR": (
        {"warmup_num_steps": 3, "total_num_steps": 9},
        {
            "total_num_steps": 12,
            "warmup_min_ratio": 0.5,
            "warmup_num_steps": 5,
            "cos_min_ratio": 0.5,
            "warmup_type": "linear",
            "last_batch_iteration": 2,
        },
    ),
    "OneCycle": (
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 4,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
        },
        {
            "cycle_min_lr": 0.2,
            "cycle_max_lr": 2.0,
            "decay_lr_rate": 1.0,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 2,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 2,
            "decay_step_size": 3,
            "cycle_momentum": False,
            "cycle_min_mom": 0.7,
            "cycle_max_mom": 0.95,
            "decay_mom_rate": 0.5,
            "last_batch_iteration": 2,
        },
    ),
    "LRRangeTest": (
        {"lr_range_test_step_size": 2},
        {
            "lr_range_test_min_lr": 0.5,
            "lr_range_test_step_size": 3,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
            "last_batch_iteration": 2,
        },
    ),
}  # a schedule's arguments, and for each of all those it has another value
ONE_BY_ONE = [
    (name, key, value) for name, (_, flips) in FLIPS.items() for key, value in flips.items()
]


def test_every_argument_of_every_documented_schedule_is_flipped_below() -> None:
    assert {name: set(flips) for name, (_, flips) in FLIPS.items()} == {
        name: set(arguments_of(cls)) for name, cls in DOCUMENTED.items()
    }


@pytest.mark.parametrize(("name", "key", "value"), ONE_BY_ONE)
def test_every_argument_changes_what_steps_run_with(name: str, key: str, value: Any) -> None:
    runs = []
    for params in (FLIPS[name][0], FLIPS[name][0] | {key: value}):
        optimizer, seen = adam(), []
        schedule = built(SchedulerConfig(type=name, params=params), optimizer)
        for _ in range(14):
            seen.append(
                (float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["betas"][0])
            )
            optimizer.step()
            schedule.step()
        runs.append(seen)
    assert runs[0] != runs[1]


@pytest.mark.parametrize(("name", "params"), CASES)
def test_schedule_begins_where_last_batch_iteration_says(name: str, params: dict[str, Any]) -> None:
    """The step with which it begins is the one that follows so many."""
    whole = rates(built(SchedulerConfig(type=name, params=params), adam()), 12)
    section = SchedulerConfig(type=name, params={**params, "last_batch_iteration": 3})
    direct = DOCUMENTED[name](adam(), **{**params, "last_batch_iteration": 3})
    for schedule in (built(section, adam()), direct):
        assert rates(schedule, 8) == pytest.approx(whole[4:])


@pytest.mark.parametrize(("name", "params"), CASES)
def test_schedule_continues_from_the_state_that_deepspeed_saves(
    name: str, params: dict[str, Any]
) -> None:
    section = SchedulerConfig(type=name, params=params)
    whole = rates(built(section, adam()), 12)
    resumed = built(section, adam())
    resumed.load_state_dict({"last_batch_iteration": 3})  # saved after four steps
    assert resumed.get_last_lr() == pytest.approx([whole[4]])
    assert rates(resumed, 8)[1:] == pytest.approx(whole[5:])


def test_schedule_of_torch_is_built_by_its_name() -> None:
    schedule = built(
        SchedulerConfig(type="StepLR", params={"step_size": 2, "gamma": 0.1}), adam(lr=1.0)
    )
    assert rates(schedule, 3) == pytest.approx([1.0, 1.0, 0.1])


@pytest.mark.parametrize("name", ["WarmupLrr", "Optimizer", "ReduceLROnPlateau", "_LRScheduler"])
def test_name_that_is_no_schedule_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(type=name)


def test_argument_that_is_missing_is_named_when_built() -> None:
    with pytest.raises(ValueError, match="WarmupDecayLR needs total_num_steps"):
        built(SchedulerConfig(type="WarmupDecayLR", params={"total_num_steps": "auto"}), adam())


def test_argument_of_the_wrong_type_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="MultiStepLR cannot be built"):
        built(SchedulerConfig(type="MultiStepLR", params={"milestones": 3}), adam())
