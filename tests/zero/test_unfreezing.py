"""Does a parameter that was frozen when the model was sharded train, once it requires gradients, as
in the plain model?"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.precision import Precision

POLICIES: dict[str, dict[str, Any]] = {
    "host": {"params": Tier.HOST, "optim": Tier.HOST},
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.NVME, "tile_numel": 4096},
    "states on nvme": {"params": Tier.HOST, "optim": Tier.NVME},
    "device": {"params": Tier.DEVICE, "optim": Tier.DEVICE},
    "stage 2": {"stage": 2, "params": Tier.DEVICE, "optim": Tier.NVME},
    "stage 1": {"stage": 1, "params": Tier.DEVICE, "optim": Tier.HOST},
    "stage 0": {"stage": 0, "params": Tier.DEVICE, "optim": Tier.DEVICE},
}


def policy_of(name: str, nvme: Path, **fields: Any) -> OffloadPolicy:
    return OffloadPolicy(paths=[nvme], **{"persistence_numel": 50, **POLICIES[name], **fields})


def head_only(seed: int = 0) -> nn.Module:
    """A tower whose head and last block are trained."""
    model = seeded(Tower, seed)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model.layers[3].requires_grad_(True)
    return model


def groups_from_the_start(model: nn.Module) -> tiermem.AdamW:
    """Every parameter is in a group; frozen ones get no gradient, so they are not stepped."""
    body = {
        "params": [*model.embed.parameters(), *model.layers.parameters()],
        "lr": 5e-3,
        "weight_decay": 0.1,
    }
    return tiermem.AdamW([body, {"params": model.head.parameters()}], lr=1e-2)


def trained_alone(model: nn.Module) -> tiermem.AdamW:
    return tiermem.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def unfreeze(optim: torch.optim.Optimizer, part: nn.Module | nn.Parameter, lr: float) -> None:
    """Unfreezes as people do; adds a group for parameters that have none."""
    part.requires_grad_(True)
    held = {id(param) for group in optim.param_groups for param in group["params"]}
    params = [part] if isinstance(part, nn.Parameter) else list(part.parameters())
    if fresh := [param for param in params if id(param) not in held]:
        optim.add_param_group({"params": fresh, "lr": lr, "weight_decay": 0.05})


def progressively(model: nn.Module, optim: torch.optim.Optimizer) -> list[float]:
    """Ten steps: the head, then more and more of the body; one block is frozen and unfrozen
    again."""
    losses = train_steps(model, optim, range(2))
    unfreeze(optim, model.layers[2], lr=5e-3)
    losses += train_steps(model, optim, range(2, 4))
    unfreeze(optim, model.layers[1].norm, lr=3e-3)
    model.layers[2].requires_grad_(False)
    losses += train_steps(model, optim, range(4, 5))
    loss_of(model, 5).backward()
    unfreeze(optim, model.embed, lr=2e-3)  # between two micro-batches
    model.layers[2].requires_grad_(True)
    losses += train_steps(model, optim, range(6, 8))
    unfreeze(optim, model.layers[1].up.weight, lr=1e-3)
    return losses + train_steps(model, optim, range(8, 11))


def steps_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, float]:
    names = {id(param): name for name, param in model.named_parameters()}
    numbers = [names[id(param)] for group in optim.param_groups for param in group["params"]]
    return {
        numbers[number]: float(each["step"]) for number, each in optim.state_dict()["state"].items()
    }


@pytest.mark.sampled(16)
@pytest.mark.parametrize("build", [groups_from_the_start, trained_alone])
@pytest.mark.parametrize("home", POLICIES)
def test_unfreezing_equals_plain_training(
    home: str, build: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    found = []
    for is_sharded in (False, True):
        model = head_only()
        policy = policy_of(home, tmp_path)
        shards = tiermem.shard(model, policy, device="cpu") if is_sharded else None
        optim = build(model)
        losses = progressively(model, optim)
        found.append((losses, steps_of(model, optim), dict(model.state_dict())))
        if shards is not None:
            shards.close()
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1]
    assert {
        found[0][1][name] for name in ("layers.2.up.weight", "layers.1.norm.bias", "embed.weight")
    } == {7, 6, 5}
    assert_same_tensors(found[1][2], found[0][2])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("precision", "compute_dtype"), [("exact", "storage"), ("compact", "fp32"), ("tiny", "storage")]
)
def test_low_precision_masters_begin_with_the_weight(
    precision: str, compute_dtype: str, tmp_path: Path
) -> None:
    """A sharded model that was trained from the start, with the block frozen until then, has the
    same bits."""
    found = []
    policy = policy_of(
        "nvme", tmp_path, precision=Precision.preset(precision), compute_dtype=compute_dtype
    )
    for is_late in (False, True):
        model = head_only().bfloat16()
        if not is_late:
            model.layers[1].requires_grad_(True)
        with tiermem.shard(model, policy, device="cpu"):
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            model.layers[1].requires_grad_(False)
            losses = train_steps(model, optim, range(2))
            model.layers[1].requires_grad_(True)
            found.append(
                (losses + train_steps(model, optim, range(2, 5)), dict(model.state_dict()))
            )
    assert found[0][0] == found[1][0]
    assert_same_tensors(found[1][1], found[0][1])


@pytest.mark.parametrize("home", ["host", "states on nvme"])
def test_units_that_are_stepped_in_backward_are_unfrozen(home: str, tmp_path: Path) -> None:
    found = []
    for is_sharded in (False, True):
        model = head_only()
        policy = policy_of(home, tmp_path, step_in_backward=True)
        shards = tiermem.shard(model, policy, device="cpu") if is_sharded else None
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        losses = train_steps(model, optim, range(2))
        model.requires_grad_(True)
        found.append((losses + train_steps(model, optim, range(2, 5)), dict(model.state_dict())))
        if shards is not None:
            shards.close()
    assert found[0][0] == found[1][0]
    assert_same_tensors(found[1][1], found[0][1])


def test_room_is_taken_at_once_when_asked(tmp_path: Path) -> None:
    model = head_only()
    with tiermem.shard(model, policy_of("host", tmp_path), device="cpu") as shards:
        before = shards.plan.host_bytes
        shards.enable_training()
        assert shards.plan.host_bytes == before
        model.layers[0].requires_grad_(True)
        shards.enable_training()
        assert shards.plan.host_bytes == shards.store.arena.limit_bytes > before
        assert {live.unit.name for live in shards.units if live.unit.is_trainable} >= {
            "layers.0",
            "layers.3",
            "head",
        }


def test_a_model_that_was_frozen_whole_trains(tmp_path: Path) -> None:
    found = []
    for is_sharded in (False, True):
        model = seeded(Tower).requires_grad_(False)
        shards = (
            tiermem.shard(model, policy_of("nvme", tmp_path), device="cpu") if is_sharded else None
        )
        losses = [loss_of(model, 9).item()]
        model.requires_grad_(True)
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        found.append((losses + train_steps(model, optim, range(3)), dict(model.state_dict())))
        if shards is not None:
            shards.close()
    assert found[0][0] == found[1][0]
    assert_same_tensors(found[1][1], found[0][1])


def test_a_gradient_that_was_set_without_a_forward_is_stepped(tmp_path: Path) -> None:
    found = []
    for is_sharded in (False, True):
        model = head_only()
        shards = (
            tiermem.shard(model, policy_of("nvme", tmp_path), device="cpu") if is_sharded else None
        )
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        param = model.layers[0].up.weight.requires_grad_(True)
        param.grad = torch.full(param.shape, 0.5)
        optim.step()
        found.append(dict(model.state_dict()))
        if shards is not None:
            shards.close()
    assert_same_tensors(found[1], found[0])


def test_frozen_neighbours_of_an_unfrozen_parameter_are_not_missed(tmp_path: Path) -> None:
    model = head_only()
    with tiermem.shard(model, policy_of("host", tmp_path, ignore_unused=False)):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        model.layers[1].up.weight.requires_grad_(True)
        train_steps(model, optim, range(2))


@pytest.mark.parametrize("tile_numel", [None, 4096])
def test_weights_keep_their_checksums_when_they_are_unfrozen(
    tile_numel: int | None, tmp_path: Path
) -> None:
    model = head_only()
    with tiermem.shard(
        model, policy_of("nvme", tmp_path, tile_numel=tile_numel), device="cpu"
    ) as shards:
        tiermem.AdamW(model.parameters(), lr=1e-2)
        model.requires_grad_(True)
        loss_of(model, 0)
        tables = [
            shards.store.sums.of(live.entry) for live in shards.units if live.entry is not None
        ]
        assert len(tables) > 4
        assert all(table.is_known.all() for table in tables if table is not None)


# ---- refusals ------------------------------------------------------------------------------------


def smallest_budget(nvme: Path, **fields: Any) -> int:
    """The smallest host_bytes with which the model can be sharded, from a refusal."""
    with pytest.raises(ValueError, match="smallest plan") as refused:
        tiermem.shard(head_only(), tight(nvme, 1, **fields), device="cpu")
    found = re.search(r"the smallest plan needs (\d+) per rank", str(refused.value))
    assert found is not None
    return int(found[1])


def tight(nvme: Path, host_bytes: int, **fields: Any) -> OffloadPolicy:
    asked = {"tile_numel": 4096, "unit_buffers": 3, "host_bytes": host_bytes}
    return policy_of("nvme", nvme, grads=None, **asked, **fields)


def test_without_room_the_forward_raises_and_the_model_is_as_it_was(tmp_path: Path) -> None:
    plain, model = head_only(), head_only()
    expected = train_steps(plain, tiermem.AdamW(plain.parameters(), lr=1e-2), range(4))
    budget = smallest_budget(tmp_path, optim=Tier.HOST) + 4096
    with tiermem.shard(model, tight(tmp_path, budget, optim=Tier.HOST), device="cpu") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        losses = train_steps(model, optim, range(2))
        plan, before = shards.plan, shards.store.stats()
        model.requires_grad_(True)
        for _ in range(2):
            with pytest.raises(
                ValueError,
                match=r"no room to train embed\.weight, .*smallest plan needs .*as it was",
            ):
                loss_of(model, 2)
        assert shards.plan is plan
        assert shards.store.stats().host_bytes == before.host_bytes
        assert shards.store.stats().nvme_bytes == before.nvme_bytes
        for param in model.parameters():
            param.requires_grad_(
                any(
                    param is each
                    for each in (*model.head.parameters(), *model.layers[3].parameters())
                )
            )
        assert losses + train_steps(model, optim, range(2, 4)) == expected
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


SPARE = {"gradients": 130_000, "states": 200_000, "tile buffers": 330_000}
"""Bytes beyond the smallest budget; what gives way first, when the rest of the model is
unfrozen."""


@pytest.mark.parametrize("what", SPARE)
def test_what_a_budget_kept_in_memory_beyond_its_tier_gives_way(what: str, tmp_path: Path) -> None:
    budget, found = smallest_budget(tmp_path) + SPARE[what], []
    for is_sharded in (False, True):
        model = head_only()
        shards = tiermem.shard(model, tight(tmp_path, budget), device="cpu") if is_sharded else None
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        losses = train_steps(model, optim, range(2))
        plan = None if shards is None else shards.plan
        model.requires_grad_(True)
        losses += train_steps(model, optim, range(2, 5))
        found.append((losses, dict(model.state_dict())))
        if shards is not None and plan is not None:
            moved = [tile for tile in optim.tiles_of(shards).tiles if tile.entry.endswith("/moved")]
            gave = {
                "gradients": (plan.grads, shards.plan.grads) == (Tier.HOST, Tier.NVME),
                "states": len(moved) == 3,
                "tile buffers": (plan.tiles.num, shards.plan.tiles.num) == (8, 4),
            }
            assert [name for name, gives in gave.items() if gives] == [what]
            stats, regions = shards.store.stats(), shards.store.arena.regions
            held = (
                shards.plan.host_bytes,
                stats.host_bytes,
                stats.host_peak_bytes,
                sum(r.num_bytes for r in regions),
            )
            assert max(held) <= budget
            shards.close()
    assert found[0][0] == found[1][0]
    assert_same_tensors(found[1][1], found[0][1])


def test_a_full_disk_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    model = head_only()
    with tiermem.shard(model, policy_of("nvme", tmp_path), device="cpu") as shards:
        needed = shards.plan.disk_bytes
    with tiermem.shard(
        head_only(), policy_of("nvme", tmp_path, disk_bytes=needed), device="cpu"
    ) as shards:
        optim = tiermem.AdamW(shards.model.parameters(), lr=1e-2)
        losses = train_steps(shards.model, optim, range(2))
        shards.model.layers[1].requires_grad_(True)
        with pytest.raises(OSError, match="disk_bytes"):
            loss_of(shards.model, 2)
        shards.model.layers[1].requires_grad_(False)
        losses += train_steps(shards.model, optim, range(2, 4))
    plain = head_only()
    assert losses == train_steps(plain, tiermem.AdamW(plain.parameters(), lr=1e-2), range(4))


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    model = head_only()
    model.embed.max_norm = 1.0
    with tiermem.shard(model, policy_of("host", tmp_path)):
        model.embed.requires_grad_(True)
        with pytest.raises(ValueError, match=r"max_norm=1\.0"):
            loss_of(model, 0)


# ---- ranks ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_unfreeze_together(tmp_path: Path) -> None:
    """To 1e-6 of plain training, whose sums have another order; the tiers have the same bits."""
    (tmp_path / "out").mkdir()
    found = launch(
        Path(__file__).with_name("unfrozen_on_ranks.py"), 2, tmp_path / "out", str(tmp_path)
    )
    # without any trainable parameter
    assert [each.pop("norms of nothing") for each in found] == [[0.0] * 6] * 2
    for name, weights in found[0].items():
        if name == "differing":
            assert "ranks disagree" in weights
            assert "layers.0.norm.weight" in weights
            continue
        assert_same_tensors(found[1][name], weights)
        way = name.partition(", ")[2]
        assert_same_tensors(weights, found[0][f"host, {way}"]) if not name.startswith(
            "plain"
        ) else None
        for key, value in weights.items():
            torch.testing.assert_close(value, found[0][f"plain, {way}"][key], rtol=1e-5, atol=1e-6)
