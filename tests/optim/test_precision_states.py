"""Are the states of a sharded model, kept in any precision, what they would be elsewhere: looked
at, put back, exact?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded, states_of, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Shards, Tier
from tiermem.precision import PRESETS, Precision
from tiermem.units.state_layout import MASTER
from tiermem.zero import Init

PRECISIONS = PRESETS | {
    "stochastic bf16": Precision("bf16", "bf16"),
    "fp32 gradients": Precision("split", "8bit", "fp32"),
}


def policy(home: Tier, folder: Path, precision: Precision, **fields: Any) -> OffloadPolicy:
    settings = {
        "params": home,
        "optim": home,
        "paths": [folder],
        "persistence_numel": 100,
        "tile_numel": 4096,
    }
    return OffloadPolicy(precision=precision, **(settings | fields))


def step_by(optim: tiermem.AdamW, model: nn.Module, seed: int) -> None:
    """A step whose gradients do not depend on the weights."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optim.step()
    optim.zero_grad()


# ---- split is exact ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_split_master_is_the_fp32_master_over_a_thousand_steps() -> None:
    def build(precision: Precision) -> tuple[Shards, tiermem.AdamW]:
        model = seeded(lambda: nn.Linear(61, 43)).bfloat16()
        shards = tiermem.shard(
            model, OffloadPolicy(optim=Tier.HOST, params=Tier.HOST, precision=precision)
        )
        return shards, tiermem.AdamW(model.parameters(), lr=1e-3)

    num_ties = 0
    (exact, exact_optim), (split, split_optim) = build(Precision()), build(Precision("split"))
    with exact, split:
        for step in range(1000):
            step_by(exact_optim, exact.model, step)
            step_by(split_optim, split.model, step)
            if step % 10:
                continue
            masters = states_of(exact, exact_optim)
            assert_same_tensors(states_of(split, split_optim), masters)
            for name, weight in exact.model.named_parameters():
                other = split.model.get_parameter(name)
                is_tie = (
                    masters[f"{name}.master"].view(weight.shape).view(torch.int32) & 0xFFFF
                    == 0x8000
                )
                assert torch.equal(weight[~is_tie], other[~is_tie])
                num_ties += int((weight != other).sum())
    assert num_ties > 0


# ---- looking and putting -------------------------------------------------------------------------


def load_all(
    shards: Shards, optim: tiermem.AdamW, states: dict[str, torch.Tensor], num_steps: int
) -> None:
    tiles = optim.tiles_of(shards)
    for _, shard in shards.parameters():
        for name in (MASTER, "exp_avg", "exp_avg_sq"):
            tiles.load(shard, name, states[f"{shard.name}.{name}"])
        shard.num_steps = num_steps


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("name", "homes"),
    [
        pytest.param(name, homes, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, name in enumerate(PRECISIONS)
        for j, homes in enumerate(
            [(Tier.NVME, Tier.NVME), (Tier.NVME, Tier.HOST), (Tier.HOST, Tier.NVME)]
        )
    ],
)
def test_states_that_are_loaded_go_on_to_the_bit(
    name: str, homes: tuple[Tier, Tier], tmp_path: Path
) -> None:
    precision = PRECISIONS[name]
    model, other = seeded(Tower).bfloat16(), seeded(Tower, 1).bfloat16()
    with tiermem.shard(model, policy(homes[0], tmp_path, precision)) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(shards.model, optim, range(3))
        states, weights = states_of(shards, optim), dict(model.state_dict())
        losses = train_steps(shards.model, optim, range(3, 5))
        at_the_end = states_of(shards, optim)
    with tiermem.shard(other, policy(homes[1], tmp_path, precision)) as shards:
        optim = tiermem.AdamW(other.parameters(), lr=1e-2)
        load_all(shards, optim, states, 3)
        assert_same_tensors(states_of(shards, optim), states)
        assert_same_tensors(dict(other.state_dict()), weights)
        assert train_steps(shards.model, optim, range(3, 5)) == losses
        assert_same_tensors(states_of(shards, optim), at_the_end)


def test_a_load_that_is_refused_changes_no_state(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(Tier.NVME, tmp_path, PRECISIONS["exact"])) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(shards.model, optim, range(1))
        states = states_of(shards, optim)
        others = {name: state + 1 for name, state in states.items()}
        with (
            tiermem.zero.unwrap_model_for_generation(model),
            pytest.raises(RuntimeError, match="weights cannot change"),
        ):
            load_all(shards, optim, others, 1)
        assert_same_tensors(states_of(shards, optim), states)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["exact", "compact"])
def test_what_is_loaded_between_backward_and_step_is_what_the_step_reads(
    name: str, tmp_path: Path
) -> None:
    model = seeded(Tower).bfloat16()
    with tiermem.shard(model, policy(Tier.NVME, tmp_path, PRECISIONS[name])) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=0.0)
        train_steps(shards.model, optim, range(2))
        loss_of(model, 2).backward()
        assert shards.program.begun
        wanted = {
            key: torch.full_like(value, 3.0) for key, value in states_of(shards, optim).items()
        }
        load_all(shards, optim, wanted, 2)
        optim.param_groups[0].update(lr=0.0, weight_decay=0.0, betas=(0.999999, 0.999999))
        optim.step()
        for key, value in states_of(shards, optim).items():
            assert torch.allclose(value, wanted[key], rtol=1e-2), key


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("name", PRECISIONS)
def test_states_before_the_first_step_are_zero_and_masters_the_weights(
    name: str, home: Tier, tmp_path: Path
) -> None:
    model = seeded(Tower).bfloat16()
    with tiermem.shard(model, policy(home, tmp_path, PRECISIONS[name])) as shards:
        optim = tiermem.AdamW(model.parameters())
        tiles = optim.tiles_of(shards)
        _, some = list(shards.parameters())[4]
        # which starts its tiles, and the others' states in them
        tiles.load(some, "exp_avg", torch.ones(some.numel))
        for _, shard in shards.parameters():
            assert torch.equal(
                tiles.state(shard, MASTER), shards.weight(shard.param).float().view(-1)
            )
            assert torch.equal(
                tiles.state(shard, "exp_avg"), torch.full((shard.numel,), float(shard is some))
            )
            assert not tiles.state(shard, "exp_avg_sq").any()


def test_values_and_names_that_do_not_fit_are_refused() -> None:
    model = seeded(Tower)
    with tiermem.shard(model, OffloadPolicy()) as shards:
        optim = tiermem.AdamW(model.parameters())
        tiles = optim.tiles_of(shards)
        _, shard = next(iter(shards.parameters()))
        with pytest.raises(
            ValueError, match=rf"exp_avg of {shard.name}: \(3,\) values .* has \({shard.numel},\)"
        ):
            tiles.load(shard, "exp_avg", torch.zeros(3))
        with pytest.raises(
            ValueError, match="has no state 'sum'; it has master, exp_avg, exp_avg_sq"
        ):
            tiles.load(shard, "sum", torch.zeros(shard.numel))
        with pytest.raises(ValueError, match="has no state 'sum'"):
            tiles.state(shard, "sum")


# ---- starting ------------------------------------------------------------------------------------


@pytest.mark.sampled(16)
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("resident_bytes", [0, 60_000, 1 << 30])
@pytest.mark.parametrize("name", ["exact", "compact", "tiny"])
def test_masters_start_from_the_fp32_initial_values(
    name: str, home: Tier, resident_bytes: int, tmp_path: Path
) -> None:
    initial = {key: p.detach() for key, p in seeded(Tower).named_parameters()}
    fields = {"master_from": "init", "resident_bytes": resident_bytes}
    torch.manual_seed(0)
    with Init(policy=policy(home, tmp_path, PRECISIONS[name], **fields), dtype=torch.bfloat16):
        model = Tower()
    with tiermem.shard(model, policy(home, tmp_path, PRECISIONS[name], **fields)) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        for _ in range(2):  # gradients of zero leave masters as they are
            for _, shard in shards.parameters():
                assert torch.equal(
                    optim.tiles_of(shards).state(shard, MASTER), initial[shard.name].flatten()
                )
                assert not optim.tiles_of(shards).state(shard, "exp_avg_sq").any()
            model(torch.zeros(1, 3, dtype=torch.long)).sum().mul(0.0).backward()
            optim.step()
            optim.zero_grad()
        assert not any(name.startswith("initial/") for name in shards.store._entries)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_parameter_whose_first_gradient_comes_late_starts_then(name: str, tmp_path: Path) -> None:
    """One tile holds all: what is started late lies between what has been stepped."""
    model, twin = seeded(Tower).bfloat16(), seeded(Tower).bfloat16()
    fields = {"persistence_numel": 1 << 20, "tile_numel": 1 << 20}
    with (
        tiermem.shard(model, policy(Tier.NVME, tmp_path, PRECISIONS[name], **fields)) as shards,
        tiermem.shard(twin, policy(Tier.HOST, tmp_path, PRECISIONS[name], **fields)) as alone,
    ):
        optims = [tiermem.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
        for step in range(3):
            late = model.layers[1].up.weight
            for param, other in zip(model.parameters(), twin.parameters(), strict=True):
                grad = torch.full_like(param, 0.5 + step, dtype=torch.bfloat16)
                param.grad = grad.clone() if step or param is not late else None
                other.grad = grad.clone() if step and param is late else None
            for optim in optims:
                optim.step()
                optim.zero_grad()
        states, lone = states_of(shards, optims[0]), states_of(alone, optims[1])
        for key in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(
                states[f"layers.1.up.weight.{key}"], lone[f"layers.1.up.weight.{key}"]
            )
        assert torch.equal(
            shards.weight(model.layers[1].up.weight), alone.weight(twin.layers[1].up.weight)
        )


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("grads", "total"), [(None, 256.0), ("bf16", 256.0), ("fp32", 258.0)])
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_micro_batches_add_up_in_the_dtype_asked_for(
    grads: Any, total: float, home: Tier, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(5, 7)).bfloat16()
    precision = Precision("split", "bf16", grads)
    with tiermem.shard(
        model, policy(home, tmp_path, precision, grads=home, persistence_numel=0)
    ) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for value in (256.0, 1.0, 1.0):
            for live in shards.units:
                for shard in live.unit.shards:
                    shard.param.grad = torch.full(shard.shape, value, dtype=torch.bfloat16)
                shards.homes.receive(live.unit)
                shards.homes.show(live.unit)
        for param in model.parameters():
            gradient = shards.gradient(param)
            assert gradient is not None
            assert gradient.dtype == (torch.float32 if grads == "fp32" else torch.bfloat16)
            assert torch.equal(gradient.float(), torch.full(param.shape, total))
        num_elements = sum(param.numel() for param in model.parameters())
        optim.step()
        assert optim.grad_norm == pytest.approx(total * num_elements**0.5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_step_that_is_not_finite_leaves_every_state_to_the_bit(name: str, tmp_path: Path) -> None:
    model = seeded(Tower).bfloat16()
    with tiermem.shard(model, policy(Tier.NVME, tmp_path, PRECISIONS[name])) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(shards.model, optim, range(2))
        before, weights = states_of(shards, optim), dict(model.state_dict())
        (loss_of(model, 2) * float("inf")).backward()
        optim.step()
        assert optim.was_skipped
        optim.zero_grad()
        assert_same_tensors(states_of(shards, optim), before)
        assert_same_tensors(dict(model.state_dict()), weights)


# ---- room ----------------------------------------------------------------------------------------


def test_an_optimizer_that_keeps_more_than_planned_is_refused_and_one_that_keeps_fewer_is_not(
    tmp_path: Path,
) -> None:
    model = seeded(Tower).bfloat16()
    with (
        tiermem.shard(
            model, policy(Tier.NVME, tmp_path, PRESETS["compact"], num_moments=1)
        ) as shards,
        pytest.raises(ValueError, match=r"num_moments=1.*OffloadPolicy\(num_moments=2\)"),
    ):
        tiermem.AdamW(model.parameters())
    model = seeded(Tower).bfloat16()
    with tiermem.shard(
        model, policy(Tier.NVME, tmp_path, PRESETS["compact"], num_moments=3)
    ) as shards:
        optim = tiermem.AdamW(model.parameters())
        train_steps(shards.model, optim, range(2))
        assert all(len(tile.layout.parts) == 3 for tile in optim.tiles_of(shards).tiles)


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_step_moves_the_bytes_of_its_precision(name: str, tmp_path: Path) -> None:
    model, precision = nn.ModuleList([nn.Linear(512, 512, bias=False)]).bfloat16(), PRECISIONS[name]
    fields = {"grads": Tier.NVME, "prefetch_numel": 0, "tile_numel": 1 << 17}
    with tiermem.shard(model, policy(Tier.NVME, tmp_path, precision, **fields)) as shards:
        optim = tiermem.AdamW(model.parameters())
        for _ in range(2):
            (live,) = shards.units
            live.unit.shards[0].param.grad = torch.ones(512, 512, dtype=torch.bfloat16)
            shards.homes.receive(live.unit)
            shards.homes.show(live.unit)
            shards.homes.store.flush()
            before = shards.store.stats()
            optim.step()
            shards.check_whole()  # the step may be under way
            after = shards.store.stats()
            optim.zero_grad()
        tiny = 4 + 2 / 64
        states = {
            "exact": 12,
            "compact": 6,
            "bf16": 4,
            "tiny": tiny,
            "stochastic bf16": 4,
            "fp32 gradients": tiny,
        }[name]
        weights, grads = 0 if name == "exact" else 2, 4 if precision.grads == "fp32" else 2
        assert (
            after.nvme_read_bytes - before.nvme_read_bytes == (states + weights + grads) * 512 * 512
        )
        assert after.nvme_written_bytes - before.nvme_written_bytes == (states + 2) * 512 * 512
