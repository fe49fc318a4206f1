"""Does a step leave parameters alone that it is not to step, whatever else lies in their tile?"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.utils import safe_get_full_fp32_param

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("resident_bytes", [0, 99_000])
def test_parameters_without_a_gradient_keep_their_bytes(
    home: Tier, dtype: torch.dtype, resident_bytes: int, tmp_path: Path
) -> None:
    """Their tiles are read and written all the same, through buffers that held other tiles
    before."""
    model = seeded(Tower).to(dtype)
    policy = OffloadPolicy(
        params=home,
        optim=Tier.NVME,
        paths=[tmp_path],
        persistence_numel=0,
        tile_numel=4096,
        tile_buffers=2,
        resident_bytes=resident_bytes,
    )
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        x = torch.randn(2, 31, generator=torch.Generator().manual_seed(3)).to(dtype)
        for step in range(2):
            loss_of(model, step).backward()
            optim.step()
            optim.zero_grad()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            model.layers[1](x).float().square().mean().backward()
            optim.step()
            optim.zero_grad()
            after = model.state_dict()
            changed = {name for name in before if not torch.equal(before[name], after[name])}
            assert changed == {name for name in before if name.startswith("layers.1.")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_of_no_group_keep_their_bytes_over_many_steps(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = seeded(Tower).to(dtype)
    plain = copy.deepcopy(model)
    policy = OffloadPolicy(
        params=Tier.NVME,
        optim=Tier.NVME,
        paths=[tmp_path],
        persistence_numel=0,
        tile_numel=4096,
        tile_buffers=2,
    )
    with tiermem.shard(model, policy):
        for each in (model, plain):
            weights = [p for p in each.parameters() if p.ndim > 1]  # a bias lies in the same tile
            optim = tiermem.AdamW(weights, lr=1e-2)
            for step in range(3):
                loss_of(each, step).backward()
                optim.step()
                each.zero_grad()
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_master_follows_values_that_are_put_behind_a_step(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = seeded(Tower).to(dtype)
    policy = OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, paths=[tmp_path], persistence_numel=0)
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(model.layers[0].parameters())
        # head has no gradient and is not stepped
        model.layers[0](torch.ones(2, 31, dtype=dtype)).sum().backward()
        optim.step()
        for param in (model.head.weight, next(model.layers[0].parameters())):
            value = torch.full_like(shards.weight(param), 0.25)
            shards.replace(param, value)
            assert torch.equal(shards.weight(param), value)
            assert torch.equal(safe_get_full_fp32_param(param), value.float())


@pytest.mark.parametrize("in_backward", [False, True])
def test_their_gradients_decide_nothing(in_backward: bool) -> None:
    """A gradient of them that is not finite skips no step, and clipping does not count them."""
    model = seeded(Tower)
    plain = copy.deepcopy(model)
    policy = OffloadPolicy(optim=Tier.HOST, step_in_backward=in_backward)
    with tiermem.shard(model, policy):
        for each in (model, plain):
            first, *others = [p for p in each.layers[1].parameters() if p.ndim > 1]
            optim = tiermem.AdamW(others, lr=1e-2)
            handle = first.register_hook(lambda grad: grad.fill_(float("nan")))
            for step in range(2):
                loss_of(each, step).backward()
                if in_backward:
                    optim.step()
                elif each is plain:
                    torch.nn.utils.clip_grad_norm_(others, 0.01)
                    optim.step()
                else:
                    optim.step(max_norm=0.01)
                    assert not optim.was_skipped and optim.grad_norm > 0.01
                each.zero_grad()
            handle.remove()
        found, expected = dict(model.state_dict()), dict(plain.state_dict())
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
