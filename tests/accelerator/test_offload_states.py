"""Do states, gradients and weights that rest on the device leave it, give its memory back, and
return to the bit?"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import loss_of, seeded, train_engine

import tiermem
from tiermem.engine import Engine
from tiermem.policy import Tier

CONFIGS: dict[str, dict[str, Any]] = {
    "all on the device": {"stage": 3},
    "stage 2": {"stage": 2},
    "weights on host": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 50,
    },
    "half of the states": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
        "sub_group_size": 4096,
    },
    "gradients there, a step goes on": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 50,
        "sub_group_size": 2048,
    },
}
OWN: dict[str, dict[str, Any]] = {
    "gradients there, a step goes on": {"grads": "device", "overlap": "forward"}
}


def started(zero: dict[str, Any], device: str = "sim", **own: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "tiermem": {**own, "strict": True},
    }
    return tiermem.initialize(model=seeded(models.ShortTower), config=config, device=device)[0]


def trained(engine: Engine, sim: ModuleType, sleeps: bool) -> tuple[list[Any], list[int]]:
    """Losses and weights of three steps of two micro-batches; and what the driver has while the
    states are away."""
    found, reserved = [], []
    for step in range(6):
        found += train_engine(engine, [step])
        if sleeps:
            before = sim.memory_reserved("sim")
            engine.offload_states()
            reserved.append(before - sim.memory_reserved("sim"))
            engine.reload_states()
    found += [value.cpu() for value in engine.module.state_dict().values()]
    return found, reserved


@pytest.mark.sampled(16)
@pytest.mark.parametrize("schedule", ["late", "random:3"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_rests_on_the_device_leaves_and_comes_back_to_the_bit(
    name: str, schedule: str, sim: ModuleType
) -> None:
    """Between micro-batches as well, when gradients rest there."""
    sim.set_schedule(schedule)
    twin, engine = (started(CONFIGS[name], **OWN.get(name, {})) for _ in range(2))
    expected, _ = trained(twin, sim, sleeps=False)
    found, given_back = trained(engine, sim, sleeps=True)
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(found, expected, strict=True)
    )
    states = [
        row for row in engine.shards.plan.rows if row.tier is Tier.DEVICE and row.what != "step"
    ]
    assert given_back[-1] >= 0.99 * sum(row.num_bytes for row in states) - (1 << 16), (
        given_back,
        states,
    )
    engine.close()
    twin.close()


def test_tiles_and_gradients_on_the_device_share_one_allocation_each(sim: ModuleType) -> None:
    engine = started({"stage": 3, "sub_group_size": 4096})
    train_engine(engine, [0, 1])
    store, optimizer = engine.shards.store, engine.optimizer
    assert optimizer is not None
    tiles = optimizer.tiles_of(engine.shards).tiles
    assert len(tiles) > 3 and all(tile.state_home is Tier.DEVICE for tile in tiles)
    states = {store.view(tile.entry).untyped_storage().data_ptr() for tile in tiles}
    grads = {
        store.view(f"grad/{u.index}/{u.name}").untyped_storage().data_ptr()
        for u in engine.shards.plan.division.units
    }
    assert len(states) == len(grads) == 1 and states != grads
    engine.close()


@pytest.mark.parametrize("config", ["all on the device", "weights on host"])
def test_views_of_weights_that_stay_follow_them_and_outlive_the_model(
    config: str, sim: ModuleType
) -> None:
    """All of them lie in one slab. Its storage comes back under them, and ends with the last
    view."""
    sim.set_schedule("late")
    engine = started(CONFIGS[config])
    norms = [layer.norm.weight.detach() for layer in engine.module.layers]
    assert len({norm.untyped_storage()._cdata for norm in norms}) == 1
    train_engine(engine, [0, 1])
    expected = [norm.cpu() for norm in norms]
    engine.offload_states()
    engine.reload_states()
    assert all(torch.equal(norm.cpu(), value) for norm, value in zip(norms, expected, strict=True))
    assert torch.equal(engine.module.layers[0].norm.weight.detach().cpu(), expected[0])
    engine.close()
    others = torch.full((1 << 20,), 3.0, device="sim")
    assert all(torch.equal(norm.cpu(), value) for norm, value in zip(norms, expected, strict=True))
    assert torch.equal(engine.module.layers[0].norm.weight.detach().cpu(), expected[0])
    del others


def test_only_what_is_asked_for_leaves(sim: ModuleType) -> None:
    engine = started({"stage": 3})
    train_engine(engine, [0])
    states = sum(row.num_bytes for row in engine.shards.plan.rows if row.what == "optimizer states")
    before = sim.memory_allocated("sim")
    engine.offload_states(include=["optim_states"])
    assert states == before - sim.memory_allocated("sim")
    with pytest.raises(RuntimeError, match="call reload_states first"):
        engine.offload_states(include=["lp_params"])
    assert torch.isfinite(loss_of(engine.module, 0, engine.device).cpu())  # the weights are there
    with pytest.raises(RuntimeError, match="has left the device"):
        engine.shards.store.view("state/0")
    engine.reload_states()
    engine.reload_states()  # a second call does nothing
    train_engine(engine, [1])
    engine.close()


def test_nothing_runs_while_states_are_away(sim: ModuleType, tmp_path: Any) -> None:
    engine = started({"stage": 3})
    train_engine(engine, [0])
    engine.offload_states()
    for refused in (
        lambda: engine(torch.zeros(1, 2, dtype=torch.int64, device="sim")),
        lambda: engine.module(torch.zeros(1, 2, dtype=torch.int64, device="sim")),
        lambda: engine.step(),
        lambda: engine.module.state_dict(),
        lambda: engine.load_checkpoint(str(tmp_path)),
    ):
        with pytest.raises(RuntimeError, match="reload_states first"):
            refused()
    engine.close()  # also while they are away


def test_a_budget_without_room_for_what_leaves_is_refused_before_anything_moves(
    sim: ModuleType,
) -> None:
    first = started({"stage": 3})
    needed = first.shards.plan.host_bytes
    first.close()
    engine = started({"stage": 3}, host_bytes=needed + 8192)
    train_engine(engine, [0])
    before = sim.memory_reserved("sim")
    with pytest.raises(
        ValueError, match=r"offload_states takes \d+ bytes of host memory, .* the plan leaves 8192"
    ):
        engine.offload_states()
    assert sim.memory_reserved("sim") == before
    train_engine(engine, [1])
    engine.close()


def test_weights_that_have_left_are_not_lost_by_a_close(sim: ModuleType) -> None:
    engine = started(CONFIGS["all on the device"])
    values = engine.module.state_dict()
    engine.offload_states()
    with pytest.raises(RuntimeError, match="call reload_states first"):
        engine.shards.close(materialize=True)
    engine.reload_states()
    engine.shards.close(materialize=True)
    for name, param in engine.module.named_parameters():
        assert torch.equal(param.detach().cpu(), values[name].cpu())
