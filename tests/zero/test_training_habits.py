"""What people do around forward, backward and step: does it do what it does in plain PyTorch, or
raise?"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.random_calls import Scaled
from programs.twins import assert_same_tensors, loss_of, seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier


class Pair:
    """A sharded model with its optimizer, and the plain twin with its own."""

    def __init__(
        self, policy: OffloadPolicy, model: nn.Module | None = None, **settings: Any
    ) -> None:
        self.model = model or seeded(models.ShortTower)
        self.plain = copy.deepcopy(self.model)
        self.shards = tiermem.shard(self.model, policy)
        settings = {"lr": 1e-2} | settings
        self.optim = tiermem.AdamW(self.model.parameters(), **settings)
        self.plain_optim = tiermem.AdamW(self.plain.parameters(), **settings)
        self.both = ((self.model, self.optim), (self.plain, self.plain_optim))

    def step(self, number: int = 0) -> None:
        """One whole step of both; their losses are equal."""
        losses = [train_steps(model, optim, [number]) for model, optim in self.both]
        assert losses[0] == losses[1]

    def close(self) -> None:
        self.shards.close()
        # the threads of an optimizer of ordinary parameters end with it
        del self.plain_optim, self.both

    def assert_same_weights(self) -> None:
        assert_same_tensors(dict(self.model.state_dict()), dict(self.plain.state_dict()))


@pytest.fixture(params=[Tier.HOST, Tier.NVME])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> OffloadPolicy:
    return OffloadPolicy(
        params=request.param, optim=request.param, paths=[tmp_path], persistence_numel=50
    )


@pytest.fixture
def on_nvme(tmp_path: Path) -> OffloadPolicy:
    return OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, paths=[tmp_path], persistence_numel=50)


@pytest.fixture
def pair(policy: OffloadPolicy) -> Iterator[Pair]:
    pair = Pair(policy)
    yield pair
    pair.close()


# ---- forward without backward --------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("is_training", [False, True])
def test_evaluation_between_steps_changes_nothing(
    pair: Pair, context: Any, is_training: bool
) -> None:
    pair.step(0)
    outputs = []
    for model, _ in pair.both:
        model.train(is_training)
        with context():
            outputs.append(loss_of(model, 7).item())
        model.train()
    assert outputs[0] == outputs[1]
    pair.step(1)
    pair.assert_same_weights()


def test_two_forwards_before_one_backward(pair: Pair) -> None:
    for model, optim in pair.both:
        (loss_of(model, 0) + loss_of(model, 1)).backward()
        optim.step()
        optim.zero_grad()
    pair.assert_same_weights()


def test_backward_twice_through_a_retained_graph(pair: Pair) -> None:
    for model, optim in pair.both:
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        optim.step()
    pair.assert_same_weights()


def test_a_submodule_called_by_itself(pair: Pair) -> None:
    x = torch.randn(2, 31, generator=torch.Generator().manual_seed(3))
    for model, optim in pair.both:
        model.layers[1](x).square().mean().backward()
        optim.step()
        optim.zero_grad()
    pair.step(1)
    pair.assert_same_weights()


def test_two_sharded_models_in_one_process(on_nvme: OffloadPolicy) -> None:
    first, second = Pair(on_nvme), Pair(on_nvme, seeded(models.NanoGPT))
    for number in range(3):
        first.step(number)
        second.step(number)
    first.close()
    second.step(3)
    second.assert_same_weights()
    second.close()


# ---- accumulation --------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("grads", [None, Tier.NVME])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_micro_batches_add_up(stage: int, grads: Tier | None, tmp_path: Path) -> None:
    policy = OffloadPolicy(stage=stage, grads=grads, paths=[tmp_path], persistence_numel=50)
    pair = Pair(policy, seeded(models.ShortTower).to(torch.bfloat16))
    for start in (0, 3):
        for model, optim in pair.both:
            for number in range(3):
                (loss_of(model, start + number) / 3).backward()
            optim.step()
            optim.zero_grad()
    pair.assert_same_weights()
    pair.close()


def test_zeroing_gradients_between_micro_batches_forgets_them(pair: Pair) -> None:
    for model, optim in pair.both:
        loss_of(model, 0).backward()
        optim.zero_grad()
        loss_of(model, 1).backward()
        optim.step()
    pair.assert_same_weights()


def test_scaling_gradients_and_then_adding_more(pair: Pair) -> None:
    for model, optim in pair.both:
        loss_of(model, 0).backward()
        for param in model.parameters():
            param.grad.mul_(0.25)
        loss_of(model, 1).backward()
        optim.step()
    pair.assert_same_weights()


# ---- exceptions ----------------------------------------------------------------------------------


def test_after_an_exception_in_forward_training_goes_on(pair: Pair) -> None:
    pair.step(0)
    for model, _ in pair.both:
        handle = model.layers[1].down.register_forward_hook(fail)
        with pytest.raises(Interrupted):
            loss_of(model, 5)
        handle.remove()
    pair.step(1)
    pair.step(2)
    pair.assert_same_weights()


def test_after_an_exception_in_backward_training_goes_on(pair: Pair) -> None:
    pair.step(0)
    for model, optim in pair.both:
        loss = loss_of(model, 5)
        handle = model.layers[1].up.register_full_backward_hook(fail)
        loss = loss_of(model, 5)
        with pytest.raises(Interrupted):
            loss.backward()
        handle.remove()
        del loss
        optim.zero_grad()
    pair.step(1)
    pair.step(2)
    pair.assert_same_weights()


class Interrupted(Exception):
    pass


def fail(*_: Any) -> None:
    raise Interrupted


# ---- optimizers and schedules --------------------------------------------------------------------


def test_parameter_groups_keep_their_settings_and_follow_a_schedule(policy: OffloadPolicy) -> None:
    model = seeded(models.ShortTower)
    plain = copy.deepcopy(model)
    shards = tiermem.shard(model, policy)
    losses = []
    for each in (model, plain):
        weights = [p for p in each.parameters() if p.ndim > 1]
        others = [p for p in each.parameters() if p.ndim == 1]
        optim = tiermem.AdamW(
            [{"params": weights, "weight_decay": 0.2}, {"params": others, "lr": 0.1}], lr=1e-2
        )
        schedule = torch.optim.lr_scheduler.StepLR(optim, step_size=2, gamma=0.3)
        for number in range(5):
            losses += train_steps(each, optim, [number])
            schedule.step()
    assert losses[:5] == losses[5:]
    shards.close()


def test_an_optimizer_of_some_parameters_leaves_the_others(policy: OffloadPolicy) -> None:
    model = seeded(models.ShortTower)
    before = copy.deepcopy(model.state_dict())
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.layers[0].parameters(), lr=1e-2)
        loss_of(model, 0).backward()
        optim.step()
        after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("layers.0.")}


def test_clip_grad_norm_returns_and_does_what_torch_does(pair: Pair) -> None:
    norms = []
    for model, optim in pair.both:
        loss_of(model, 0).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optim.step()
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    sharded, plain = pair.model.state_dict(), pair.plain.state_dict()
    for name in plain:
        torch.testing.assert_close(sharded[name], plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overflows", [False, True])
def test_grad_scaler_unscales_or_skips(pair: Pair, overflows: bool) -> None:
    for model, optim in pair.both:
        scaler = torch.amp.GradScaler("cpu", init_scale=float("inf") if overflows else 1024.0)
        scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optim)
        scaler.update()
    pair.assert_same_weights()


def test_grad_scaler_with_clipping_between(pair: Pair) -> None:
    norms = []
    for model, optim in pair.both:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(model, 0)).backward()
        scaler.unscale_(optim)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        scaler.step(optim)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_non_finite_gradient_skips_the_step_and_touches_nothing(policy: OffloadPolicy) -> None:
    pair = Pair(policy)
    pair.step(0)
    before = pair.model.state_dict()
    (loss_of(pair.model, 1) * float("nan")).backward()
    pair.optim.step()
    assert pair.optim.was_skipped
    pair.optim.zero_grad()
    assert_same_tensors(dict(before), dict(pair.model.state_dict()))
    pair.step(2)
    pair.assert_same_weights()
    pair.close()


def test_a_non_finite_gradient_raises_when_the_policy_says_so(tmp_path: Path) -> None:
    policy = OffloadPolicy(
        params=Tier.NVME, paths=[tmp_path], persistence_numel=50, on_nonfinite="raise"
    )
    with tiermem.shard(seeded(models.ShortTower), policy) as shards:
        optim = tiermem.AdamW(shards.model.parameters())
        (loss_of(shards.model, 0) * float("inf")).backward()
        with pytest.raises(RuntimeError, match=r"they hold NaN or infinity\. No state was touched"):
            optim.step()


def test_torchs_own_optimizer_raises_instead_of_doing_nothing(policy: OffloadPolicy) -> None:
    with tiermem.shard(seeded(models.ShortTower), policy) as shards:
        optim = torch.optim.AdamW(shards.model.parameters())
        loss_of(shards.model, 0).backward()
        with pytest.raises(
            RuntimeError,
            match=r"gradient of a sharded parameter|values rest elsewhere.*tiermem\.AdamW",
        ):
            optim.step()


def test_an_optimizer_built_before_sharding_raises_instead_of_doing_nothing(
    policy: OffloadPolicy,
) -> None:
    model = seeded(models.ShortTower)
    optim = tiermem.AdamW(model.parameters())
    with tiermem.shard(model, policy):
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match="sharded after this optimizer was built"):
            optim.step()


def test_a_gradient_of_a_frozen_parameter_raises_instead_of_doing_nothing(
    policy: OffloadPolicy,
) -> None:
    model = seeded(models.frozen_tower)
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.parameters())
        model.embed.weight.grad = torch.ones(model.embed.weight.shape)
        with pytest.raises(
            RuntimeError, match=r"embed\.weight has a gradient and no states: it is frozen"
        ):
            optim.step()


def test_a_second_optimizer_of_the_same_model_is_refused(policy: OffloadPolicy) -> None:
    with tiermem.shard(seeded(models.ShortTower), policy) as shards:
        optim = tiermem.AdamW(shards.model.layers.parameters())
        with pytest.raises(ValueError, match="one optimizer with several parameter groups"):
            tiermem.AdamW(shards.model.head.parameters())
        del optim


def test_an_optimizer_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        tiermem.AdamW([])


# ---- looking at gradients ------------------------------------------------------------------------


def test_a_set_gradient_survives_a_backward_that_begins_at_the_input_of_an_unused_forward(
    pair: Pair,
) -> None:
    first, second = pair.model.layers[0], pair.model.layers[1]
    param = max(second.parameters(), key=torch.numel)
    x = first(torch.ones(2, 3, 31)) * 2.0
    x.sum().backward(retain_graph=True)
    second(x)
    param.grad = torch.full(param.shape, 0.5)
    x.sum().backward()
    found = pair.shards.gradient(param)
    assert found is not None
    assert torch.equal(found, torch.full(param.shape, 0.5))


def test_a_gradient_that_the_user_has_set_is_read_back(pair: Pair) -> None:
    for model, _ in pair.both:
        loss_of(model, 0).backward()
        model.head.weight.grad = torch.full_like(model.head.weight.grad, 0.5)
    found = pair.shards.gradient(pair.model.head.weight)
    assert found is not None
    assert torch.equal(found, pair.plain.head.weight.grad)
    for _, optim in pair.both:
        optim.step()
    pair.assert_same_weights()


def test_reading_a_gradient_gives_its_values(pair: Pair) -> None:
    grads = []
    for model, _ in pair.both:
        loss_of(model, 0).backward()
        grads.append(model.head.weight.grad)
        assert grads[-1].shape == model.head.weight.shape
    for read in (
        lambda g: g + 1,
        lambda g: g.sum(),
        lambda g: g[0],
        lambda g: g.tolist(),
        lambda g: g.numpy(),
    ):
        mine, theirs = (torch.as_tensor(read(grad)) for grad in grads)
        torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_graph_that_would_be_lost_is_refused(pair: Pair) -> None:
    """A penalty of `p.grad` would have no gradient. Without gradients it is as ever."""
    for model, _ in pair.both:
        loss_of(model, 0).backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"take torch.autograd.grad\(loss, params, create_graph"):
        sum(param.grad.pow(2).sum() for param in pair.model.parameters())
    norms = [float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) for model, _ in pair.both]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for _, optim in pair.both:
        optim.zero_grad(set_to_none=False)
        optim.zero_grad()
    pair.step(1)


def test_gradients_can_be_gathered_between_backward_and_step(pair: Pair) -> None:
    for model, _ in pair.both:
        loss_of(model, 0).backward()
    for mine, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        assert torch.equal(pair.shards.gradient(mine), plain.grad)
    pair.optim.step()
    pair.optim.zero_grad()
    assert pair.shards.gradient(pair.model.head.weight) is None


def test_zeroing_in_place_forgets_gradients(pair: Pair) -> None:
    for model, optim in pair.both:
        loss_of(model, 0).backward()
        optim.zero_grad(set_to_none=False)
        loss_of(model, 1).backward()
        optim.step()
    pair.assert_same_weights()


# ---- modules in two places -----------------------------------------------------------------------


def _shrink(module: nn.Module, args: Any) -> None:
    module.scale.mul_(0.75)


def test_a_module_around_a_shared_one_has_its_own_parameters_in_forward(tmp_path: Path) -> None:
    shared = nn.Linear(6, 6)
    inner = Scaled(shared)
    model = nn.ModuleList([shared, Scaled(inner)])
    policy = OffloadPolicy(params=Tier.NVME, optim=Tier.HOST, paths=[tmp_path], persistence_numel=0)
    with tiermem.shard(model, policy) as shards:
        before = shards.weight(inner.scale).clone()
        inner.register_forward_pre_hook(_shrink)
        with torch.no_grad():
            inner(torch.ones(2, 6))
        assert torch.equal(shards.weight(inner.scale), before * 0.75)
