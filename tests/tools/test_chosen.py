"""Do the keys that a choice is written as say what was chosen, and does a run take them?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tiermem.config import load_config
from tiermem.forecast import Rates
from tiermem.forecast.rates import Compute
from tiermem.policy import Tier
from tiermem.tools.job.train_job import make_config, with_host_bytes
from tiermem.tools.options import TrainOptions
from tiermem.tools.plan.planned import Cluster, Scenario
from tiermem.tools.plan.settle import choose_config, with_choice
from tiermem.tools.presets import preset

SHAPE = preset("151m") | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "vocab_size": 301,
}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4}
SLOW_DISK = Rates(disk_read_bytes_s=0.2e9, disk_write_bytes_s=4e9)
FAST_MATHS = Compute(1e-12, 2e-12)


def config(host_bytes: int | None = None, offload: str | None = "nvme") -> dict[str, Any]:
    made = make_config(TrainOptions(lr=1e-3, offload=offload), [Path("/tmp")])
    made |= {"gradient_accumulation_steps": 4}
    return made if host_bytes is None else with_host_bytes(made, host_bytes)


def scenario(config: dict[str, Any]) -> Scenario:
    return Scenario(SHAPE, config, Cluster(1, 1), SLOW_DISK, FAST_MATHS, 128, False)


def test_every_chosen_field_is_a_key_that_means_it() -> None:
    fields = {
        "grads": Tier.HOST,
        "tile_numel": 1 << 18,
        "tile_buffers": 6,
        "unit_buffers": 2,
        "host_param_numel": 12_345,
        "streamed_ratio": 0.5,
    }
    policy = load_config(with_choice(config(), fields)).policy()
    assert {name: getattr(policy, name) for name in fields} == fields
    counts = {"tile_buffers": 6, "unit_buffers": 2}
    for tier in Tier:
        chosen: dict[str, Any] = {"params": tier, "optim": tier, "grads": tier, **counts}
        chosen |= {"optim_ratio": 1.0 if tier is Tier.DEVICE else 0.25}
        loaded = load_config(with_choice(config(offload=None), chosen))
        assert loaded.moved == ()
        assert {name: getattr(loaded.policy(), name) for name in chosen} == chosen


def test_a_choice_leaves_the_given_config_alone() -> None:
    given = config()
    with_choice(given, {"tile_numel": 1 << 18})
    assert given == config()


def test_a_run_on_a_slow_disk_keeps_units_by_a_key_of_its_config() -> None:
    chosen, line, *_ = choose_config(scenario(config(96 << 20)))
    assert line is not None and "units of up to" in line
    assert chosen["zero_optimization"]["offload_param"]["max_in_cpu"] > 0
    assert (
        load_config(chosen).policy().host_param_numel
        == chosen["zero_optimization"]["offload_param"]["max_in_cpu"]
    )


@pytest.mark.parametrize(
    ("host_bytes", "homes"), [(1 << 30, (Tier.HOST, Tier.HOST)), (96 << 20, (Tier.NVME, Tier.NVME))]
)
def test_homes_that_are_auto_are_chosen_and_kept_by_the_config(
    host_bytes: int, homes: tuple[Tier, Tier]
) -> None:
    given = config(host_bytes, offload=None)
    del given["zero_optimization"]["offload_param"]["nvme_path"]
    assert load_config(given).moved == ("params", "optim")
    chosen = choose_config(scenario(given)._replace(moved=("params", "optim")))
    assert chosen.planned is not None
    loaded = load_config(chosen.config)
    assert loaded.moved == ()
    policy = loaded.policy()
    assert (policy.params, policy.optim) == homes
    kept = dataclasses.replace(chosen.planned.policy, paths=policy.paths)
    assert policy == kept


def test_without_a_budget_and_where_nothing_fits_there_is_nothing_to_say() -> None:
    assert choose_config(scenario(config()))[:3] == (config(), None, [])
    assert choose_config(scenario(config(1 << 20))) == (config(1 << 20), None, [], None)
