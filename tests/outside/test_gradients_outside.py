"""Does `p.grad` of a sharded parameter answer as plain torch's after backward, and does the step
see what was written?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded, train_steps
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector

import tiermem
from tiermem import OffloadPolicy, Tier

HOMES: dict[str, dict[str, Any]] = {
    "host": {"params": Tier.HOST, "optim": Tier.HOST, "grads": Tier.HOST},
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.NVME},
}


def sharded(model: nn.Module, home: str, nvme: Path) -> tiermem.Shards:
    return tiermem.shard(
        model, OffloadPolicy(paths=[nvme], persistence_numel=50, **HOMES[home]), device="cpu"
    )


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "abs().max()": lambda g: g.abs().max(),
    "clone()": lambda g: g.clone(),
    "detach().clone()": lambda g: g.detach().clone(),
    "norm(1), norm(inf)": lambda g: (g.norm(1), g.norm(torch.inf)),
    "view(-1)[3:9].sum()": lambda g: g.view(-1)[3:9].sum(),
    "flatten().norm()": lambda g: g.flatten().double().norm(),
    "g[0]": lambda g: g[0] + 1,
    "isfinite": lambda g: torch.isfinite(g).all(),
    "cat": lambda g: torch.cat([g.view(-1), g.reshape(-1)]),
    "g == 0": lambda g: (g == 0).sum(),
    "x + g": lambda g: torch.ones_like(g) + g,
    "zeros.copy_(g)": lambda g: torch.zeros(g.shape).copy_(g),
    "lerp": lambda g: torch.zeros(g.shape).lerp_(g.clone(), 0.1),
    "tolist()": lambda g: torch.tensor(g.tolist()),
    "numpy()": lambda g: torch.tensor(g.numpy()),
    "item()": lambda g: g.view(-1)[0].item(),
}

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda g: g.add_(torch.ones_like(g), alpha=1e-3),
    "mul_ by a mask": lambda g: g.mul_((torch.arange(g.numel()) % 2).view(g.shape)),
    "sub_ of its mean": lambda g: g.sub_(g.mean()),
    "copy_": lambda g: g.copy_(g.sign()),
    "nan_to_num_": lambda g: torch.nan_to_num_(g),
    "clamp_": lambda g: g.clamp_(-1e-3, 2e-3),
    "clamp_ below": lambda g: g.clamp_(min=-1e-3),
    "foreach clamp": lambda g: torch._foreach_clamp_max_([g], 1e-3),
    "scaled, then clamped": lambda g: g.mul_(3.0).clamp_(-1e-3, 1e-3),
    "zeroed, then added to": lambda g: g.zero_().add_(1e-3),
    "out=": lambda g: torch.add(torch.ones_like(g), 1, out=g),
    "g[0] = x": lambda g: g.__setitem__(0, 0.1),
    "data = x": lambda g: setattr(g, "data", torch.full(g.shape, 1e-3)),
}


def after_backward(home: str, nvme: Path) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """A sharded model and its plain twin, after one step and another backward."""
    for is_sharded in (True, False):
        model = seeded(Tower)
        shards = sharded(model, home, nvme) if is_sharded else None
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(1))
        loss_of(model, 1).backward()
        yield model, optim
        if shards is not None:
            shards.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("home", HOMES)
def test_reads_equal_plain_torchs(home: str, tmp_path: Path) -> None:
    found = [
        {
            f"{call} {name}": read(p.grad)
            for call, read in READS.items()
            for name, p in model.named_parameters()
        }
        for model, _ in after_backward(home, tmp_path)
    ]
    for call, mine in found[0].items():
        torch.testing.assert_close(mine, found[1][call], rtol=1e-6, atol=0, msg=call)
        if "norm" not in call:
            torch.testing.assert_close(mine, found[1][call], rtol=0, atol=0, msg=call)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("home", HOMES)
def test_the_step_sees_what_was_written(home: str, tmp_path: Path) -> None:
    for call, write in WRITES.items():
        found = []
        for model, optim in after_backward(home, tmp_path):
            for param in model.parameters():
                write(param.grad)
            optim.step()
            found.append(dict(model.state_dict()))
        assert_same_tensors(*found), call


@pytest.mark.sampled(2)
@pytest.mark.parametrize("home", HOMES)
def test_clipping_by_value_and_by_norm_follow_torch(home: str, tmp_path: Path) -> None:
    found = []
    for model, optim in after_backward(home, tmp_path):
        for step in range(2, 6):
            clip_grad_norm_(model.parameters(), 2.0)
            clip_grad_value_(model.parameters(), 1e-3)
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(2):
                loss_of(model, 7 * step + micro).backward()
        found.append(dict(model.state_dict()))
    for name, mine in found[0].items():
        torch.testing.assert_close(mine, found[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("home", HOMES)
def test_clipping_takes_gradients_that_the_user_has_set(home: str, tmp_path: Path) -> None:
    found = []
    for model, optim in after_backward(home, tmp_path):
        for number, param in enumerate(model.parameters()):
            if number % 2 == 0:
                param.grad = param.grad * 2.0
        norms = [clip_grad_norm_(model.parameters(), 0.1, kind).item() for kind in (2.0, 1.0)]
        clip_grad_value_(model.parameters(), 1e-3)
        torch._foreach_add_([p.grad for p in model.parameters()], 1e-4)
        optim.step()
        optim.zero_grad(set_to_none=False)
        found.append((norms, model.state_dict()))
    (mine, weights), (theirs, expected) = found
    assert mine == pytest.approx(theirs, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("home", HOMES)
def test_a_gradient_given_to_another_parameter_is_its_gradient(home: str, tmp_path: Path) -> None:
    found = []
    for model, optim in after_backward(home, tmp_path):
        one, other = (model.layers[i].up.weight for i in (0, 1))
        one.grad, other.grad = other.grad, one.grad
        loss_of(model, 2).backward()
        model.layers[0].down.weight.grad = model.layers[1].down.weight.grad
        optim.step()
        found.append(dict(model.state_dict()))
    assert_same_tensors(*found)


def test_a_gradient_that_was_dropped_is_not_the_next_one(tmp_path: Path) -> None:
    """Code that mixes the gradients of two losses keeps those of the first one."""
    model = seeded(Tower)
    with sharded(model, "nvme", tmp_path):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, 0).backward()
        kept = [param.grad for param in model.parameters()]
        optim.zero_grad()
        loss_of(model, 1).backward()
        with pytest.raises(RuntimeError, match=r"is gone: .* Keep a copy: p.grad.clone"):
            kept[0].norm()
        for param, grad in zip(model.parameters(), kept, strict=True):
            param.grad = grad
        with pytest.raises(RuntimeError, match="is gone"):
            optim.step()


def test_writing_into_a_view_is_refused(tmp_path: Path) -> None:
    model, _ = next(after_backward("host", tmp_path))
    grad = model.head.weight.grad
    for write in (lambda: grad[0].zero_(), lambda: grad.view(-1).add_(1), lambda: grad.t().mul_(2)):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            write()


def test_optimizers_that_cannot_step_sharded_parameters_are_refused(tmp_path: Path) -> None:
    model, _ = next(after_backward("host", tmp_path))
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
        for foreach in (False, True):
            with pytest.raises(
                RuntimeError, match=r"the gradient of a sharded parameter|values rest elsewhere"
            ):
                kind(model.parameters(), lr=1e-2, foreach=foreach).step()


def test_a_penalty_a_vector_of_weights_and_norms_in_a_callback(tmp_path: Path) -> None:
    found = []
    for is_sharded in (True, False):
        model = seeded(Tower)
        shards = sharded(model, "nvme", tmp_path) if is_sharded else None
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        norms = []
        for step in range(3):
            penalty = sum(p.pow(2).sum() for p in model.parameters())
            (loss_of(model, step) + 1e-3 * penalty).backward()
            norms += [p.norm().item() for p in model.parameters()]
            norms += [p.grad.norm().item() for p in model.parameters()]
            optim.step()
            optim.zero_grad()
        found.append((parameters_to_vector(model.parameters()).detach(), norms))
        if shards is not None:
            shards.close()
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


@pytest.mark.parametrize("home", HOMES)
def test_freezing_and_unfreezing_after_sharding(home: str, tmp_path: Path) -> None:
    """Room is planned for what is trained when the model is sharded; what is frozen afterwards may
    be unfrozen again."""
    found = []
    for is_sharded in (True, False):
        model = seeded(Tower)
        shards = sharded(model, home, tmp_path) if is_sharded else None
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        model.layers[1].requires_grad_(False)
        losses = train_steps(model, optim, range(2))
        frozen = torch.equal(
            model.state_dict()["layers.1.up.weight"], seeded(Tower).layers[1].up.weight
        )
        model.layers[1].requires_grad_(True)
        model.head.requires_grad_(False)
        losses += train_steps(model, optim, range(2, 5))
        found.append((losses, frozen, dict(model.state_dict())))
        if shards is not None:
            shards.close()
    assert found[0][:2] == found[1][:2]
    assert found[0][1]
    assert_same_tensors(found[0][2], found[1][2])


@pytest.mark.slow
@pytest.mark.parametrize("home", HOMES)
def test_what_was_frozen_when_the_model_was_sharded_is_trained_after_a_checkpoint(
    home: str, tmp_path: Path
) -> None:
    """The model is sharded again with other parameters trained: first more of them, then fewer."""
    found = []
    for is_sharded in (True, False):
        model, losses, shards, optim = seeded(Tower), [], None, tiermem.AdamW([torch.zeros(1)])
        for part, is_trained in enumerate((False, True, False)):
            if is_sharded:
                model = seeded(Tower, seed=part)
            model.layers[1].requires_grad_(is_trained)
            model.embed.requires_grad_(is_trained)
            if is_sharded:
                shards = sharded(model, home, tmp_path)
            if is_sharded or not part:
                optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            if shards is not None and part:
                tiermem.checkpoint.load(shards, optim, tmp_path / "saved")
            losses += train_steps(model, optim, range(3 * part, 3 * part + 3))
            if shards is not None:
                tiermem.checkpoint.save(shards, optim, tmp_path / "saved")
                weights = dict(model.state_dict())
                shards.close()
        found.append((losses, weights if is_sharded else dict(model.state_dict())))
    assert found[0][0] == found[1][0]
    assert_same_tensors(found[0][1], found[1][1])
