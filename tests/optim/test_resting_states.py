"""Do ordinary parameters train the same wherever a policy lets their states rest, and does the
policy bound their memory?"""

from __future__ import annotations

import copy
import dataclasses
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import (
    assert_same_tensors,
    decay_groups,
    flat_states,
    loss_of,
    seeded,
    train_steps,
)
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.swap.memory.arena import BudgetError

NUMEL = sum(p.numel() for p in Tower().parameters())


def tiers(nvme: Path, **fields: Any) -> Iterator[OffloadPolicy]:
    """Policies under which states rest elsewhere, and move in other tiles and through other
    buffers."""
    yield OffloadPolicy(optim=Tier.HOST, **fields)
    yield OffloadPolicy(optim=Tier.NVME, paths=[nvme], **fields)
    yield OffloadPolicy(
        optim=Tier.NVME,
        paths=[nvme],
        tile_numel=4096,
        tile_buffers=2,
        resident_bytes=99_000,
        **fields,
    )
    yield OffloadPolicy(
        optim=Tier.NVME,
        paths=[nvme],
        tile_numel=8192,
        pipeline_read=False,
        pipeline_write=False,
        **fields,
    )


def trained(
    kind: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype = torch.float32,
    num_steps: int = 3,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = seeded(Tower).to(dtype)
    optim = kind(decay_groups(model), **options)
    losses = train_steps(model, optim, range(num_steps))
    found = (
        losses,
        copy.deepcopy(model.state_dict()),
        copy.deepcopy(flat_states(optim.state_dict())),
    )
    if isinstance(optim, tiermem.optim.NativeOptimizer):
        optim.close()
    return found


CASES: dict[str, tuple[str, torch.dtype, str, dict[str, Any]]] = {
    "fp32": ("AdamW", torch.float32, "exact", {}),
    "bf16, exact": ("AdamW", torch.bfloat16, "exact", {"amsgrad": True}),
    "bf16, split": ("AdamW", torch.bfloat16, "compact", {}),
    "bf16, 8 bits": ("AdamW", torch.bfloat16, "tiny", {}),
    "plain SGD": ("SGD", torch.float32, "exact", {}),
    "Muon": ("Muon", torch.float32, "exact", {}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_a_tier_changes_no_bit(case: str, tmp_path: Path) -> None:
    name, dtype, preset, options = CASES[case]
    kind, precision = getattr(tiermem, name), Precision.preset(preset)
    losses, weights, states = trained(kind, dtype, precision=precision, **options)
    for policy in tiers(tmp_path, precision=precision):
        if name == "Muon" and policy.tile_numel:
            with pytest.raises(
                ValueError, match="stepped as a whole matrix, which no tile may cut"
            ):
                trained(kind, dtype, policy=policy)
            continue
        found = trained(kind, dtype, policy=policy, **options)
        assert found[0] == losses
        assert_same_tensors(found[1], weights)
        assert_same_tensors(found[2], states)


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_groups_schedulers_clipping_and_both_zero_grads_follow_torch(
    home: Tier, tmp_path: Path
) -> None:
    policy = OffloadPolicy(optim=home, paths=[tmp_path], tile_numel=4096)
    losses, weights = [], []
    for make in (
        torch.optim.AdamW,
        lambda groups, **options: tiermem.AdamW(groups, policy=policy, **options),
    ):
        model = seeded(Tower)
        optim = make(decay_groups(model), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 10)
        losses.append([])
        for step in range(10):
            loss = loss_of(model, step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optim.step()
            schedule.step()
            optim.zero_grad(set_to_none=step % 2 == 0)
            losses[-1].append(loss.item())
        weights.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("preset", ["exact", "compact"])
def test_a_run_resumes_to_the_bit_from_and_on_every_tier(preset: str, tmp_path: Path) -> None:
    policies = [None, *tiers(tmp_path, precision=Precision.preset(preset))][:3]
    precision = Precision.preset(preset)
    saved, weights, went_on = [], [], []
    for policy in policies:
        model = seeded(Tower).bfloat16()
        optim = tiermem.AdamW(
            model.parameters(), lr=1e-2, precision=None if policy else precision, policy=policy
        )
        train_steps(model, optim, range(3))
        saved.append(copy.deepcopy(optim.state_dict()))
        weights.append(copy.deepcopy(model.state_dict()))
        went_on.append(train_steps(model, optim, range(3, 5)))
    for policy, state, values in zip([*policies[1:], policies[0]], saved, weights, strict=True):
        other = seeded(Tower, 1).bfloat16()
        other.load_state_dict(values)
        optim = tiermem.AdamW(
            other.parameters(), precision=None if policy else precision, policy=policy
        )
        optim.load_state_dict(state)
        assert train_steps(other, optim, range(3, 5)) == went_on[0] == went_on[1] == went_on[2]


def test_torch_opens_the_states_and_the_reverse(tmp_path: Path) -> None:
    policy = OffloadPolicy(optim=Tier.NVME, paths=[tmp_path])
    kinds = (
        torch.optim.AdamW,
        lambda params, **options: tiermem.AdamW(params, policy=policy, **options),
    )
    for first, second in (kinds, kinds[::-1]):
        model = seeded(Tower)
        optim = first(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(3))
        other = copy.deepcopy(model)
        opened = second(other.parameters())
        opened.load_state_dict(optim.state_dict())
        expected = train_steps(model, optim, range(3, 6))
        assert train_steps(other, opened, range(3, 6)) == pytest.approx(expected, rel=2e-6)


def test_a_parameter_that_is_unfrozen_or_added_later_gets_room(tmp_path: Path) -> None:
    def weights(policy: OffloadPolicy | None) -> dict[str, torch.Tensor]:
        model = seeded(Tower)
        model.head.requires_grad_(False)
        layers = list(model.layers.parameters())
        optim = tiermem.AdamW(
            [*model.embed.parameters(), *model.head.parameters()], lr=1e-2, policy=policy
        )
        train_steps(model, optim, range(2))
        model.head.requires_grad_(True)
        optim.add_param_group({"params": layers, "lr": 1e-3})
        train_steps(model, optim, range(2, 4))
        assert [int(optim.state[p]["step"]) for p in model.parameters()] == [4] + [2] * (
            len(layers) + 2
        )
        return model.state_dict()

    for policy in tiers(tmp_path):
        assert_same_tensors(weights(policy), weights(None))


def test_parameters_that_are_not_contiguous_and_some_without_gradients(tmp_path: Path) -> None:
    def stepped(policy: OffloadPolicy | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        turned = nn.Parameter(torch.randn(70, 90).t())
        unused, empty, odd = (
            nn.Parameter(torch.randn(shape)) for shape in ((33, 7), (0, 3), (5001,))
        )
        optim = tiermem.AdamW([turned, unused, empty, odd], lr=0.1, policy=policy)
        for step in range(3):
            turned.grad, odd.grad, empty.grad = (
                turned.detach() * step,
                odd.detach().sin(),
                torch.zeros(0, 3),
            )
            unused.grad = unused.detach() if step == 1 else None
            optim.step()
        return [turned.detach(), unused.detach(), odd.detach()]

    expected = stepped(None)
    for policy in tiers(tmp_path):
        assert all(map(torch.equal, stepped(policy), expected))


def test_the_budget_holds_or_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    model = seeded(Tower)
    with pytest.raises(
        BudgetError,
        match=rf"states of {NUMEL} elements.*bytes of HOST memory are needed, and host_bytes",
    ):
        tiermem.AdamW(model.parameters(), policy=OffloadPolicy(optim=Tier.HOST, host_bytes=200_000))
    on_nvme = OffloadPolicy(optim=Tier.NVME, paths=[tmp_path], tile_numel=4096, host_bytes=200_000)
    optim = tiermem.AdamW(model.parameters(), policy=on_nvme)
    [states] = optim._resting
    assert states.host_bytes <= 200_000
    assert states._store.stats().host_peak_bytes == states.host_bytes
    train_steps(model, optim, range(2))
    assert states._store.stats().host_peak_bytes == states.host_bytes
    assert states._store.stats().nvme_read_bytes > 0
    [folder] = tmp_path.iterdir()
    optim.close()
    assert not folder.exists()
    with pytest.raises(RuntimeError, match="closed"):
        train_steps(model, optim, range(1))
    small = OffloadPolicy(optim=Tier.NVME, paths=[tmp_path], disk_bytes=100_000)
    with pytest.raises(OSError, match=f"states of {NUMEL}") as error:
        tiermem.AdamW(model.parameters(), policy=small)
    assert error.value.errno == errno.ENOSPC


def test_a_damaged_state_is_named_and_the_states_refuse_to_go_on(tmp_path: Path) -> None:
    model = seeded(Tower)
    optim = tiermem.AdamW(
        model.named_parameters(), policy=OffloadPolicy(optim=Tier.NVME, paths=[tmp_path])
    )
    train_steps(model, optim, range(1))
    saved = copy.deepcopy(optim.state_dict())
    [file] = [
        each for each in tmp_path.rglob("*") if each.is_file() and each.stat().st_size > NUMEL
    ]
    with file.open("r+b") as data:
        data.seek(400)
        data.write(b"\x7f\x7f\x7f")
    with pytest.raises(tiermem.CorruptionError, match=r"exp_avg of embed\.weight"):
        train_steps(model, optim, range(1, 2))
    with pytest.raises(RuntimeError, match="mixture of two steps"):
        train_steps(model, optim, range(1, 2))
    optim.load_state_dict(saved)
    optim.zero_grad()
    train_steps(model, optim, range(1, 2))


def test_what_cannot_be_is_refused_in_one_sentence(tmp_path: Path) -> None:
    param = nn.Parameter(torch.ones(3))
    host = OffloadPolicy(optim=Tier.HOST)
    of_shards = dataclasses.replace(host, params=Tier.NVME, durability="step", paths=[tmp_path])
    with pytest.raises(
        ValueError, match=r"sets params, durability, which only a sharded model follows"
    ):
        tiermem.AdamW([param], policy=of_shards)
    on_device = OffloadPolicy(params=Tier.HOST)
    with pytest.raises(ValueError, match=r"sets params, which only a sharded model follows"):
        tiermem.AdamW([param], policy=on_device)
    model = seeded(Tower)
    with (
        tiermem.shard(model, device="cpu"),
        pytest.raises(ValueError, match="every parameter belongs to a sharded model"),
    ):
        tiermem.AdamW(model.parameters(), policy=host)
    with pytest.raises(ValueError, match="leave precision out"):
        tiermem.AdamW([param], precision="compact", policy=host)
    with pytest.raises(ValueError, match="complex64"):
        tiermem.AdamW([nn.Parameter(torch.ones(3, dtype=torch.complex64))], policy=host)
    optim = tiermem.AdamW([param], policy=host)
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(ValueError, match="sparse=False"):
        optim.step()
    param.grad = torch.ones(3)
    optim.param_groups[0]["amsgrad"] = True
    with pytest.raises(
        ValueError, match="room for 2 moments and now keeps exp_avg, exp_avg_sq, max_exp_avg_sq"
    ):
        optim.step()
    with pytest.raises(RuntimeError, match="state_dict"):
        copy.deepcopy(optim)


class Wrapped(torch.Tensor):
    """A tensor that holds its values in another one, as quantised weights do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].inner)
        raise NotImplementedError(func)


def test_subclasses_that_hold_their_values_elsewhere_are_refused() -> None:
    with pytest.raises(
        ValueError, match="is a Wrapped, a subclass of Tensor that holds its values elsewhere"
    ):
        tiermem.AdamW([nn.Parameter(Wrapped(torch.ones(3)))])
