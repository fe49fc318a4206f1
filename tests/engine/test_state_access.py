"""Does a user of the reference system's `safe_get_*` and `safe_set_*` see, and change, what a plain
model's optimizer holds?

The twin is the same model, unsharded, stepped by the same optimizer: what is looked at is compared
with it to the bit, and what is put is put there too. Several ranks: test_state_access_on_ranks.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded, states_of, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Shards, Tier, checkpoint
from tiermem.precision import PRESETS
from tiermem.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
    safe_update_local_states_vectorized,
)

HOMES: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"params": Tier.HOST, "optim": Tier.HOST},
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.NVME},
    "nvme, not pipelined": {
        "params": Tier.NVME, "optim": Tier.NVME, "pipeline_read": False, "pipeline_write": False,
    },
    "nvme, a third resident": {"params": Tier.HOST, "optim": Tier.NVME, "resident_bytes": 100_000},
}  # fmt: skip
KEYS = ("exp_avg", "exp_avg_sq")

homes = pytest.mark.parametrize("home", HOMES)
homes_and_presets = pytest.mark.parametrize(
    ("home", "preset"),
    [
        pytest.param(home, preset, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, home in enumerate(HOMES)
        for j, preset in enumerate(PRESETS)
    ],
)
"""`make test` has every home and every precision, in half of their pairs; `make test-all` every pair."""


def policy(home: str, folder: Path, **fields: Any) -> OffloadPolicy:
    settings = {"paths": [folder], "persistence_numel": 100, "tile_numel": 4096}
    return OffloadPolicy(**(settings | HOMES[home] | fields))


def pairs(model: nn.Module, twin: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    return zip(model.parameters(), twin.parameters(), strict=True)


# ---- looking -------------------------------------------------------------------------------------


@homes
def test_the_debugging_loop_sees_what_a_plain_model_holds(home: str, tmp_path: Path) -> None:
    model = seeded(Tower)
    twin = copy.deepcopy(model)
    twin_optim = tiermem.AdamW(twin.parameters(), lr=1e-2)
    with tiermem.shard(model, policy(home, tmp_path)):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            train_steps(model, optim, [number])
            train_steps(twin, twin_optim, [number])
        loss_of(model, 2).backward()
        loss_of(twin, 2).backward()
        for mine, other in pairs(model, twin):
            assert torch.equal(safe_get_full_fp32_param(mine), other)
            assert torch.equal(safe_get_full_grad(mine), other.grad)
            for key in KEYS:
                assert torch.equal(
                    safe_get_full_optimizer_state(mine, key), twin_optim.state[other][key]
                )
                assert torch.equal(
                    safe_get_local_optimizer_state(mine, key),
                    twin_optim.state[other][key].flatten(),
                )
            assert torch.equal(safe_get_local_fp32_param(mine), other.detach().flatten())
            assert torch.equal(safe_get_local_grad(mine), other.grad.flatten())


@pytest.mark.sampled(8)
@homes_and_presets
def test_a_master_is_seen_in_every_precision(home: str, preset: str, tmp_path: Path) -> None:
    model = seeded(Tower).bfloat16()
    with tiermem.shard(model, policy(home, tmp_path, precision=PRESETS[preset])) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, [0])
        states = states_of(shards, optim)
        for name, param in model.named_parameters():
            master = safe_get_full_fp32_param(param)
            assert master.dtype == torch.float32
            assert torch.equal(master.flatten(), states[f"{name}.master"])
            assert torch.equal(
                safe_get_full_optimizer_state(param, "exp_avg").flatten(), states[f"{name}.exp_avg"]
            )
            assert torch.allclose(master, shards.weight(param).float(), rtol=2**-8)


def test_what_is_returned_is_a_copy(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy("none", tmp_path)):
        optim = tiermem.AdamW(model.parameters())
        train_steps(model, optim, [0])
        loss_of(model, 1).backward()
        param = model.head.weight
        for get in (
            safe_get_full_fp32_param,
            safe_get_full_grad,
            safe_get_local_fp32_param,
            safe_get_local_grad,
            lambda p: safe_get_full_optimizer_state(p, "exp_avg"),
        ):
            seen = get(param)
            assert seen is not None
            before = seen.clone()
            seen.fill_(7.0)
            assert torch.equal(get(param), before)


# ---- putting -------------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@homes
@pytest.mark.parametrize("form", ["full", "local"])
def test_what_is_put_is_what_training_goes_on_with(home: str, form: str, tmp_path: Path) -> None:
    model = seeded(Tower)
    twin = copy.deepcopy(model)
    twin_optim = tiermem.AdamW(twin.parameters(), lr=1e-2)
    with tiermem.shard(model, policy(home, tmp_path)):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, [0])
        train_steps(twin, twin_optim, [0])
        for mine, other in pairs(model, twin):
            value, first, second = torch.randn(
                3, *other.shape, generator=torch.Generator().manual_seed(other.numel())
            )
            other.data.copy_(value)
            twin_optim.state[other]["exp_avg"].copy_(first)
            twin_optim.state[other]["exp_avg_sq"].copy_(second.square())
            if form == "full":
                safe_set_full_fp32_param(mine, value)
                safe_set_full_optimizer_state(mine, first, "exp_avg")
                safe_set_full_optimizer_state(mine, second.square(), "exp_avg_sq")
            else:
                safe_set_local_fp32_param(mine, value.flatten())
                safe_set_local_optimizer_state(mine, first.flatten(), "exp_avg")
                safe_set_local_optimizer_state(mine, second.square().flatten(), "exp_avg_sq")
            assert torch.equal(safe_get_full_fp32_param(mine), value)
            assert torch.equal(safe_get_full_optimizer_state(mine, "exp_avg"), first)
        for number in range(1, 3):
            assert loss_of(model, number).item() == loss_of(twin, number).item()
            train_steps(model, optim, [number])
            train_steps(twin, twin_optim, [number])
        assert_same_tensors(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.sampled(8)
@homes_and_presets
def test_putting_back_what_was_seen_changes_no_bit(home: str, preset: str, tmp_path: Path) -> None:
    """Between backward and step, when tiles may have been read ahead."""
    found = []
    for puts in (False, True):
        model = seeded(Tower).bfloat16()
        with tiermem.shard(model, policy(home, tmp_path, precision=PRESETS[preset])) as shards:
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            train_steps(model, optim, [0])
            loss_of(model, 1).backward()
            for param in model.parameters() if puts else ():
                safe_set_full_fp32_param(param, safe_get_full_fp32_param(param))
                safe_set_full_grad(param, safe_get_full_grad(param))
                for key in KEYS:
                    safe_set_full_optimizer_state(
                        param, safe_get_full_optimizer_state(param, key), key
                    )
            optim.step()
            found.append(states_of(shards, optim) | dict(model.state_dict()))
            assert optim.grad_norm > 0
    assert_same_tensors(*found)


@homes
def test_a_low_precision_weight_follows_its_master(home: str, tmp_path: Path) -> None:
    model = seeded(Tower).bfloat16()
    with tiermem.shard(model, policy(home, tmp_path)):
        optim = tiermem.AdamW(model.parameters())
        train_steps(model, optim, [0])
        for param in model.parameters():
            value = torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
            safe_set_full_fp32_param(param, value)
            assert torch.equal(safe_get_full_fp32_param(param), value)
        for value in model.state_dict().values():
            assert torch.equal(
                value,
                torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).bfloat16(),
            )


@homes
def test_states_can_be_put_before_the_first_step(home: str, tmp_path: Path) -> None:
    model = seeded(Tower)
    twin = copy.deepcopy(model)
    twin_optim = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    with tiermem.shard(model, policy(home, tmp_path)):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for mine, other in pairs(model, twin):
            assert not safe_get_full_optimizer_state(mine, "exp_avg").any()
            value = torch.full(other.shape, 0.5)
            safe_set_full_optimizer_state(mine, value, "exp_avg")
            zero = torch.zeros_like(other)
            twin_optim.state[other] = {
                "step": torch.tensor(0.0),
                "exp_avg": value.clone(),
                "exp_avg_sq": zero,
            }
        saved = optim.state_dict()
        assert saved["state"][0]["step"] == 0
        assert torch.equal(saved["state"][0]["exp_avg"], torch.full(model.embed.weight.shape, 0.5))
        train_steps(model, optim, [0])
        train_steps(twin, twin_optim, [0])
        for mine, other in pairs(model, twin):
            assert torch.allclose(safe_get_full_fp32_param(mine), other, rtol=1e-5, atol=1e-6)
            assert torch.allclose(
                safe_get_full_optimizer_state(mine, "exp_avg"), twin_optim.state[other]["exp_avg"]
            )
        optim.load_state_dict(saved)
        assert torch.equal(
            safe_get_full_optimizer_state(model.embed.weight, "exp_avg"),
            saved["state"][0]["exp_avg"],
        )
        assert optim.state_dict()["state"][0]["step"] == 0


def test_a_master_that_was_put_before_the_first_step_is_saved(tmp_path: Path) -> None:
    model = seeded(Tower).bfloat16()
    with tiermem.shard(model, policy("nvme", tmp_path)):
        optim = tiermem.AdamW(model.parameters())
        value = torch.randn(model.head.weight.shape)
        safe_set_full_fp32_param(model.head.weight, value)
        states = optim.state_dict()["state"]
        assert [list(entry) for entry in states.values()] == [["step", "master"]]
        safe_set_full_fp32_param(model.head.weight, torch.zeros_like(value))
        optim.load_state_dict({**optim.state_dict(), "state": states})
        assert torch.equal(safe_get_full_fp32_param(model.head.weight), value)


# ---- gradients -----------------------------------------------------------------------------------


@homes
def test_a_gradient_that_was_put_is_stepped_and_measured(home: str, tmp_path: Path) -> None:
    model = seeded(Tower)
    twin = copy.deepcopy(model)
    twin_optim = tiermem.AdamW(twin.parameters(), lr=1e-2)
    with tiermem.shard(model, policy(home, tmp_path)):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, 0).backward()
        loss_of(twin, 0).backward()
        for mine, other in pairs(model, twin):
            other.grad.mul_(3.0).add_(0.01)
            safe_set_full_grad(mine, other.grad)
            assert torch.equal(safe_get_full_grad(mine), other.grad)
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5).item()
        optim.step(max_norm=0.5)
        twin_optim.step()
        assert optim.grad_norm == pytest.approx(norm, rel=1e-6)
        for mine, other in pairs(model, twin):
            assert torch.allclose(safe_get_full_fp32_param(mine), other, rtol=1e-6, atol=1e-7)


def test_a_gradient_that_was_put_is_added_to_by_the_next_backward(tmp_path: Path) -> None:
    model = seeded(Tower)
    twin = copy.deepcopy(model)
    with tiermem.shard(model, policy("nvme", tmp_path)):
        loss_of(model, 0).backward()
        for param in model.parameters():
            safe_set_local_grad(param, torch.ones(param.numel()))
        loss_of(model, 1).backward()
        loss_of(twin, 1).backward()
        for mine, other in pairs(model, twin):
            assert torch.equal(safe_get_full_grad(mine), torch.ones_like(other).add_(other.grad))


@homes
def test_the_vectorised_form_changes_every_gradient_once(home: str, tmp_path: Path) -> None:
    model = seeded(Tower)
    twin = copy.deepcopy(model)
    with tiermem.shard(model, policy(home, tmp_path)):
        loss_of(model, 0).backward()
        loss_of(twin, 0).backward()
        seen: list[nn.Parameter] = []

        def double(grad: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
            seen.append(param)
            return grad * 2

        safe_update_full_grad_vectorized([*model.parameters(), model.head.weight], double)
        assert len(seen) == len({id(param) for param in seen}) == len(list(model.parameters()))
        for mine, other in pairs(model, twin):
            assert torch.equal(safe_get_full_grad(mine), other.grad * 2)


def test_gradients_are_there_between_backward_and_step_alone(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy("nvme", tmp_path)):
        optim, param = tiermem.AdamW(model.parameters()), model.head.weight
        said = r"no gradient of head\.weight now: there are gradients after backward.*until the step or zero_grad"
        for get in (
            safe_get_full_grad,
            safe_get_local_grad,
            lambda p: safe_set_full_grad(p, torch.zeros_like(p)),
        ):
            with pytest.raises(RuntimeError, match=said):
                get(param)
        loss_of(model, 0).backward()
        assert safe_get_full_grad(param) is not None
        optim.zero_grad()
        with pytest.raises(RuntimeError, match=said):
            safe_get_full_grad(param)
        for to_none in (True, False):
            loss_of(model, 0).backward()
            optim.step()
            optim.zero_grad(set_to_none=to_none)
            if not to_none:
                assert not safe_get_full_grad(param).any()  # zeros, as torch leaves them
                continue
            with pytest.raises(RuntimeError, match=said):
                safe_get_full_grad(param)


def test_an_unused_parameter_has_no_gradient_while_others_have(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy("cpu", tmp_path)):
        optim = tiermem.AdamW(model.parameters(), lr=0.1)
        model.layers[1](torch.ones(2, 31)).sum().backward()
        assert safe_get_full_grad(model.head.weight) is None
        assert safe_get_full_grad(model.layers[1].up.weight) is not None
        before = safe_get_full_fp32_param(model.head.weight)
        safe_set_full_grad(model.head.weight, torch.ones_like(before))
        optim.step()
        assert not torch.equal(safe_get_full_fp32_param(model.head.weight), before)


def test_a_parameter_without_gradient_has_none_before_the_others_are_reduced() -> None:
    model = seeded(Tower)
    with tiermem.shard(model, OffloadPolicy(stage=1)) as shards, shards.no_sync():
        model.layers[1](torch.ones(2, 31)).sum().backward()
        assert safe_get_full_grad(model.layers[1].up.weight) is not None
        assert safe_get_full_grad(model.head.weight) is None
        model.zero_grad()
        with pytest.raises(RuntimeError, match="there is no gradient of"):
            safe_get_full_grad(model.head.weight)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_has_not_been_reduced_is_that_of_this_rank(stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    twin = seeded(Tower)
    engine, _, _, _ = tiermem.initialize(model=seeded(Tower), config=config)
    weight = engine.module.head.weight
    for micro in range(2):
        with engine.no_sync():
            loss_of(engine, micro).backward()
            (loss_of(twin, micro) / 2).backward()
            found = safe_get_full_grad(weight)
            assert found is not None
            torch.testing.assert_close(found, twin.head.weight.grad)
            found.zero_()  # a copy
        if stage < 2 and micro == 0:
            with pytest.raises(
                RuntimeError, match="has not been reduced over the ranks yet: below stage 2"
            ):
                safe_set_full_grad(weight, torch.zeros_like(found))
        engine.step()
    assert engine.was_step_applied()
    engine.close()


def test_gradients_that_are_used_up_in_backward_are_not_shown(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy("nvme", tmp_path, grads=None, step_in_backward=True)):
        tiermem.AdamW(model.parameters())
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match="is not kept: step_in_backward uses it up"):
            safe_get_full_grad(model.head.weight)


# ---- many at once --------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@homes_and_presets
def test_a_visit_changes_what_single_puts_change(home: str, preset: str, tmp_path: Path) -> None:
    found = []
    for is_vectorised in (False, True):
        model = seeded(Tower).bfloat16()
        with tiermem.shard(model, policy(home, tmp_path, precision=PRESETS[preset])) as shards:
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            train_steps(model, optim, [0])
            loss_of(model, 1).backward()
            chosen = [p for p in model.parameters() if p.ndim == 2]
            if is_vectorised:
                safe_update_local_states_vectorized(chosen, halve)
            for param in () if is_vectorised else chosen:
                safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.5)
                safe_set_full_optimizer_state(
                    param, safe_get_full_optimizer_state(param, "exp_avg") * 0.25, "exp_avg"
                )
            found.append(states_of(shards, optim) | dict(model.state_dict()))
            optim.step()
            found[-1] |= {
                f"{name}, stepped": value for name, value in states_of(shards, optim).items()
            }
    assert_same_tensors(*found)


def halve(states: dict[str, torch.Tensor], param: nn.Parameter, elements: slice) -> None:
    assert list(states) == ["fp32_param", *KEYS]
    states["fp32_param"].mul_(0.5)
    states["exp_avg"].mul_(0.25)


def test_a_visit_reads_and_writes_each_tile_once(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy("nvme", tmp_path)) as shards:
        optim = tiermem.AdamW(model.parameters())
        train_steps(model, optim, [0])
        shards.prefetcher.empty()  # what was being fetched for the next forward
        before = shards.store.stats()
        pieces: dict[nn.Parameter, list[tuple[int, int]]] = {}

        def note(states: dict[str, torch.Tensor], param: nn.Parameter, elements: slice) -> None:
            assert states["fp32_param"].shape == (elements.stop - elements.start,)
            pieces.setdefault(param, []).append((elements.start, elements.stop))

        safe_update_local_states_vectorized(model.parameters(), note)
        tiles = [tile for tile in optim.tiles_of(shards).tiles if tile.state_home is Tier.NVME]
        after = shards.store.stats()
        streamed = sum(
            tile.state_bytes + (tile.slice_bytes if tile.live.entry else 0) for tile in tiles
        )
        assert after.nvme_read_bytes - before.nvme_read_bytes == streamed
        assert after.nvme_written_bytes - before.nvme_written_bytes == streamed
        for param in model.parameters():
            ends = sorted(pieces[param])
            assert [end for _, end in ends] == [*(start for start, _ in ends[1:]), param.numel()]
        assert max(len(ends) for ends in pieces.values()) > 1  # a tile cuts through a parameter


def test_a_visit_before_the_first_step_makes_the_states(tmp_path: Path) -> None:
    model = seeded(Tower).bfloat16()
    weights = copy.deepcopy(dict(model.state_dict()))
    with tiermem.shard(model, policy("nvme", tmp_path)):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)

        def fill(states: dict[str, torch.Tensor], param: nn.Parameter, elements: slice) -> None:
            assert not states["exp_avg"].any()
            states["exp_avg"].copy_(torch.arange(elements.start, elements.stop))

        safe_update_local_states_vectorized([model.head.weight], fill)
        expected = torch.arange(model.head.weight.numel()).view_as(model.head.weight).float()
        assert torch.equal(safe_get_full_optimizer_state(model.head.weight, "exp_avg"), expected)
        assert_same_tensors(dict(model.state_dict()), weights)
        train_steps(model, optim, [0])
        assert (
            safe_get_full_optimizer_state(model.head.weight, "exp_avg")[-1, -1] / expected[-1, -1]
            - 0.9
        ).abs() < 1e-3


# ---- what is asked wrongly -----------------------------------------------------------------------


def test_an_unknown_state_names_those_there_are(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy("cpu", tmp_path)):
        tiermem.AdamW(model.parameters())
        said = r"head\.weight has no optimizer state 'momentum'; those it has: exp_avg, exp_avg_sq"
        for ask in (
            lambda p: safe_get_full_optimizer_state(p, "momentum"),
            lambda p: safe_get_local_optimizer_state(p, "momentum"),
            lambda p: safe_set_full_optimizer_state(p, torch.zeros_like(p), "momentum"),
            lambda p: safe_set_local_optimizer_state(p, torch.zeros(p.numel()), "momentum"),
        ):
            with pytest.raises(ValueError, match=said):
                ask(model.head.weight)


@pytest.mark.parametrize(
    ("optimizer", "settings", "keys"),
    [
        (tiermem.Lion, {}, ["exp_avg"]),
        (tiermem.Adagrad, {}, ["sum"]),
        (tiermem.SGD, {"momentum": 0.9}, ["momentum_buffer"]),
        (tiermem.AdamW, {"amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    ],
)
def test_every_optimizers_states_have_torchs_names(
    optimizer: Any, settings: dict[str, Any], keys: list[str], tmp_path: Path
) -> None:
    model = seeded(Tower)
    twin = copy.deepcopy(model)
    twin_optim = optimizer(twin.parameters(), lr=1e-2, **settings)
    with tiermem.shard(model, policy("nvme", tmp_path, num_moments=3)):
        optim = optimizer(model.parameters(), lr=1e-2, **settings)
        for number in range(2):
            train_steps(model, optim, [number])
            train_steps(twin, twin_optim, [number])
        for mine, other in pairs(model, twin):
            for key in keys:
                assert torch.equal(
                    safe_get_full_optimizer_state(mine, key), twin_optim.state[other][key]
                )


def test_frozen_parameters_have_no_master_gradient_or_state(tmp_path: Path) -> None:
    model = seeded(Tower).bfloat16()
    model.layers[0].requires_grad_(False)
    with tiermem.shard(model, policy("nvme", tmp_path)) as shards:
        tiermem.AdamW([p for p in model.parameters() if p.requires_grad])
        loss_of(model, 0).backward()
        frozen = model.layers[0].up.weight
        assert safe_get_full_grad(frozen) is None
        assert safe_get_full_optimizer_state(frozen, "exp_avg") is None
        assert safe_get_full_fp32_param(frozen) is None
        assert safe_get_local_fp32_param(frozen) is None
        safe_set_full_fp32_param(frozen, torch.ones(frozen.shape))
        assert (shards.weight(frozen) == 1).all()
        with pytest.raises(ValueError, match=r"layers\.0\.up\.weight is frozen"):
            safe_set_full_optimizer_state(frozen, torch.ones(frozen.shape), "exp_avg")
        with pytest.raises(ValueError, match=r"layers\.0\.up\.weight is frozen"):
            safe_set_full_grad(frozen, torch.ones(frozen.shape))


def test_values_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy("cpu", tmp_path)):
        tiermem.AdamW(model.parameters())
        with pytest.raises(
            ValueError,
            match=r"head\.weight has shape \(61, 31\); the value that was given has \(31, 61\)",
        ):
            safe_set_full_fp32_param(model.head.weight, torch.zeros(31, 61))
        with pytest.raises(
            ValueError, match=r"part of head\.weight has shape \(1891,\).*has \(61, 31\)"
        ):
            safe_set_local_fp32_param(model.head.weight, torch.zeros(61, 31))


def test_a_parameter_without_shards_or_optimizer_is_an_error_that_says_so(tmp_path: Path) -> None:
    plain = nn.Linear(3, 5)
    with pytest.raises(
        ValueError,
        match=r"shape \(5, 3\) is not one of a sharded model: it needs tiermem.initialize",
    ):
        safe_get_full_fp32_param(plain.weight)
    model = seeded(Tower)
    with tiermem.shard(model, policy("cpu", tmp_path)):
        assert torch.equal(safe_get_full_fp32_param(model.head.weight), seeded(Tower).head.weight)
        with pytest.raises(RuntimeError, match="before there is an optimizer: build it first"):
            safe_get_full_optimizer_state(model.head.weight, "exp_avg")
    with pytest.raises(ValueError, match="is not one of a sharded model"):
        safe_get_full_fp32_param(model.head.weight)


def test_there_are_no_local_parts_in_stage_0(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, OffloadPolicy(stage=0)):
        with pytest.raises(RuntimeError, match="in stage 0 every rank holds everything"):
            safe_get_local_fp32_param(model.head.weight)
        assert torch.equal(safe_get_full_fp32_param(model.head.weight), seeded(Tower).head.weight)


def test_steps_are_counted_for_parameters_of_a_group_alone(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy("cpu", tmp_path)) as shards:
        optim = tiermem.AdamW([p for p in model.parameters() if p.ndim > 1])
        for number in range(3):
            train_steps(model, optim, [number])
        counts = {shard.name: shard.num_steps for _, shard in shards.parameters()}
        assert counts["head.weight"] == 3
        assert counts["head.bias"] == 0
        optim.add_param_group({"params": [model.head.bias]})
        train_steps(model, optim, [3])
        assert optim.state_dict()["state"][len(optim.param_groups[0]["params"])]["step"] == 1


def test_a_closed_model_has_no_states_left(tmp_path: Path) -> None:
    model = seeded(Tower)
    shards = tiermem.shard(model, policy("nvme", tmp_path))
    optim = tiermem.AdamW(model.parameters())
    checkpoint.save(shards, optim, tmp_path / "out")
    shards.close(materialize=True)
    assert isinstance(shards, Shards)
    for act in (checkpoint.save, checkpoint.load):
        with pytest.raises(RuntimeError, match="this store is closed"):
            act(shards, optim, tmp_path / "out")
    with pytest.raises(RuntimeError, match="this store is closed"):
        shards.weight(model.head.weight)
    with pytest.raises(
        ValueError, match="once the engine or the shards are closed, its states are gone"
    ):
        safe_get_full_fp32_param(model.head.weight)


@pytest.mark.parametrize("preset", ["exact", "tiny"])
def test_states_of_a_large_tile_are_seen_and_put_in_pieces(preset: str) -> None:
    """In memory a tile is as large as a unit. What shows it in fp32 takes room for a piece alone."""
    torch.manual_seed(0)
    model = nn.Linear(1100, 2000, bias=False).bfloat16()
    fields = {"params": Tier.HOST, "optim": Tier.HOST, "precision": PRESETS[preset]}
    with tiermem.shard(model, OffloadPolicy(**fields)) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        model(torch.ones(1, 1100).bfloat16()).float().sum().backward()
        optim.step()
        assert len(optim.tiles_of(shards).tiles) == 1
        before = states_of(shards, optim)
        seen: list[int] = []

        def add(states: dict[str, torch.Tensor], param: nn.Parameter, elements: slice) -> None:
            seen.append(states["exp_avg"].numel())
            states["exp_avg"] += torch.arange(elements.start, elements.stop) % 2

        safe_update_local_states_vectorized([model.weight], add)
        assert max(seen) == 1 << 20 and sum(seen) == model.weight.numel()
        moved = safe_get_local_optimizer_state(model.weight, "exp_avg")
        odd = torch.arange(moved.numel()) % 2
        most = 0.1 if preset == "tiny" else 0.0
        torch.testing.assert_close(moved, before["weight.exp_avg"] + odd, rtol=0.0, atol=most)
        safe_set_full_optimizer_state(
            model.weight, before["weight.exp_avg"].view_as(model.weight), "exp_avg"
        )
        assert_same_tensors(states_of(shards, optim), before)
