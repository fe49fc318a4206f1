"""Programs: what people do around forward, backward and step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.hooks import RemovableHandle

from programs import models
from programs.faces import Face, Found, Program
from programs.layers import noise, predict
from programs.models import logits_of
from programs.twins import batch, loss_of

# ---- groups, schedules, clipping, scaling --------------------------------------------------------


def groups_with_decay_split_and_two_rates(face: Face) -> Found:
    model = face.shard(models.ShortTower())
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if p.ndim > 1 and "head" not in n],
            "weight_decay": 0.1,
        },
        {"params": [p for n, p in model.named_parameters() if p.ndim < 2], "weight_decay": 0.0},
        {"params": model.head.parameters(), "lr": 3e-3},
    ]
    optim = face.adamw(groups)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optim, [lambda n: 0.9**n, lambda n: 1.0, lambda n: 1 / (1 + n)]
        ),
        torch.optim.lr_scheduler.OneCycleLR(
            optim, [2e-2, 1e-2, 4e-3], total_steps=9, cycle_momentum=True
        ),
    ]
    losses, rates = [], []
    for step in range(4):
        loss = loss_of(model, face.sample(step))
        loss.backward()
        face.step(optim)
        schedules[step % 2].step()
        losses.append(loss.item())
        rates.append([(group["lr"], group["betas"]) for group in optim.param_groups])
    return {"losses": losses, "rates": rates, "weights": face.weights(model)}


def clipping_by_torch(face: Face) -> Found:
    """The norm is torch's fp32 one in the plain program: only what is far from rounding is
    compared."""
    model = face.shard(models.ShortTower())
    optim = face.adamw(model.parameters())
    norms = []
    for step in range(3):
        loss_of(model, face.sample(step)).backward()
        face.reduce(model.parameters())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optim.step()
        optim.zero_grad()
    weights = {
        name: [round(v, 4) for v in value.flatten().tolist()]
        for name, value in face.weights(model).items()
    }
    return {"norms": [round(norm, 4) for norm in norms], "some": weights["head.weight"][:5]}


def grad_scaler_with_a_step_that_overflows(face: Face) -> Found:
    model = face.shard(models.ShortTower())
    optim = face.adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    scales = []
    for step in range(4):
        loss = loss_of(model, face.sample(step)) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        face.reduce(model.parameters())
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        scales.append(scaler.get_scale())
    return {"scales": scales, "weights": face.weights(model)}


# ---- which modules run, and in which order -------------------------------------------------------


def walk(face: Face, paths: list[list[int]]) -> Found:
    model = face.shard(models.Tower())
    optim = face.adamw(model.parameters())
    losses = []
    for step, path in enumerate(paths):
        model.path = path
        loss = predict(model, face.sample(step))
        loss.backward()
        face.step(optim)
        losses.append(loss.item())
    return {"losses": losses, "weights": face.weights(model)}


def layers_skipped_at_random(face: Face) -> Found:
    drawn = random.Random(3)
    return walk(face, [[i for i in range(4) if drawn.random() < 0.6] for _ in range(6)])


def another_order_in_every_step(face: Face) -> Found:
    drawn = random.Random(4)
    return walk(face, [drawn.sample(range(4), 4) for _ in range(5)])


def modules_called_several_times(face: Face) -> Found:
    return walk(face, [[0, 1, 0, 1, 2], [3, 3, 3], [2, 1, 0, 1, 2]])


# ---- between forward, backward and step ----------------------------------------------------------


def evaluation_between_micro_batches(face: Face) -> Found:
    model = face.shard(models.ShortTower())
    optim = face.adamw(model.parameters())
    losses = []
    for step in range(3):
        for micro in range(3):
            loss = loss_of(model, face.sample(step * 3 + micro)) / 3
            loss.backward()
            losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model, 100 + micro).item())
            model.train()
        if face.world == 1:  # on several ranks micro-batches and ranks are added in another order
            face.step(optim)
        else:
            optim.zero_grad()
    return {"losses": losses, "weights": face.weights(model)}


def generation_between_steps(face: Face) -> Found:
    model = face.shard(models.NanoGPT())
    optim = face.adamw(model.parameters())
    written = []
    for step in range(2):
        loss_of(model, face.sample(step)).backward()
        face.step(optim)
        tokens = torch.tensor([[1, 2, 3]])
        with torch.no_grad():
            for _ in range(5):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        written.append(tokens)
    return {"written": written, "weights": face.weights(model)}


def exceptions_in_forward_and_backward(face: Face) -> Found:
    model = face.shard(models.ShortTower())
    optim = face.adamw(model.parameters())
    losses = []
    for step in range(4):
        if step == 1:
            with broken(model.layers[1].register_forward_hook(fail)), pytest.raises(Interrupted):
                loss_of(model, 50)
        if step == 2:
            with broken(model.layers[1].up.register_full_backward_hook(fail)):
                loss = loss_of(model, 50)
                with pytest.raises(Interrupted):
                    loss.backward()
            del loss
            optim.zero_grad()
        loss = loss_of(model, face.sample(step))
        loss.backward()
        face.step(optim)
        losses.append(loss.item())
    return {"losses": losses, "weights": face.weights(model)}


class broken:  # noqa: N801  # reads as a word
    def __init__(self, handle: RemovableHandle) -> None:
        self.handle = handle

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


class Interrupted(Exception):
    pass


def fail(*_: Any) -> None:
    raise Interrupted


# ---- the user's own hooks ------------------------------------------------------------------------


def forward_and_backward_hooks_of_the_user(face: Face) -> Found:
    model = models.ShortTower()
    seen: list[Any] = []
    model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    model.layers[1].up.register_forward_hook(lambda module, args, output: output + 0.25)
    model.layers[1].up.register_full_backward_hook(
        lambda module, grads, outputs: seen.append(grads[0].clone())
    )
    model.head.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))
    model = face.shard(model)
    model.layers[2].register_forward_hook(
        lambda module, args, output: seen.append(output.detach().clone())
    )
    model.layers[2].down.register_full_backward_hook(
        lambda module, grads, outputs: (grads[0] * 2.0,)
    )
    optim = face.adamw(model.parameters())
    for step in range(2):
        loss_of(model, face.sample(step)).backward()
        face.step(optim)
    return {"seen": seen, "weights": face.weights(model)}


def hooks_on_parameters(face: Face) -> Found:
    """Both see this rank's gradient, before ranks are added up; what they make of it is what is
    stepped."""
    model = face.shard(models.ShortTower())
    seen: list[Any] = []
    model.head.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.clone())
        param.grad.mul_(0.5)

    model.head.weight.register_post_accumulate_grad_hook(halve)
    model.layers[1].up.weight.register_post_accumulate_grad_hook(halve)
    model.layers[1].norm.weight.register_post_accumulate_grad_hook(halve)
    optim = face.adamw(model.parameters())
    for step in range(2):
        loss_of(model, face.sample(step)).backward()
        face.step(optim)
    return {"seen": seen, "weights": face.weights(model)}


def hooks_on_the_optimizer(face: Face) -> Found:
    model = face.shard(models.ShortTower())
    optim = face.adamw(model.parameters())
    seen: list[str] = []
    optim.register_step_pre_hook(lambda *_: seen.append("before"))
    optim.register_step_post_hook(lambda *_: seen.append("after"))
    for step in range(2):
        loss_of(model, face.sample(step)).backward()
        face.step(optim)
    return {"seen": seen, "weights": face.weights(model)}


# ---- other gradients -----------------------------------------------------------------------------


def gradients_of_gradients(face: Face) -> Found:
    """The penalty of a Wasserstein critic: the norm of its gradient by its input is part of the
    loss."""
    model = face.shard(
        nn.Sequential(nn.Linear(13, 61), nn.Tanh(), nn.Linear(61, 53), nn.Tanh(), nn.Linear(53, 1))
    )
    optim = face.adamw(model.parameters())
    losses = []
    for step in range(3):
        x = noise(face.sample(step), 5, 13).requires_grad_()
        score = model(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        loss = score / 5 + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        face.step(optim)
        losses.append(loss.item())
    return {"losses": losses, "weights": face.weights(model)}


def gradients_asked_of_autograd(face: Face) -> Found:
    model = face.shard(models.ShortTower())
    optim = face.adamw(model.parameters())
    grads = torch.autograd.grad(
        loss_of(model, face.sample(0)), [model.head.weight, model.layers[0].up.bias]
    )
    loss_of(model, face.sample(1)).backward()
    face.step(optim)
    return {"grads": [grad.clone() for grad in grads], "weights": face.weights(model)}


def gradients_at_detached_pieces(face: Face) -> Found:
    """Backward in two pieces, as when a user cuts the graph: head first, then the tower with the
    gradient it got."""
    model = face.shard(nn.Sequential(nn.Linear(13, 61), nn.Tanh(), nn.Linear(61, 53)))
    optim = face.adamw(model.parameters())
    for step in range(3):
        below = model[1](model[0](noise(face.sample(step), 5, 13)))
        cut = below.detach().requires_grad_()
        model[2](cut).square().mean().backward()
        below.backward(cut.grad)
        face.step(optim)
    return {"weights": face.weights(model)}


# ---- several models ------------------------------------------------------------------------------


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 61), nn.ReLU(), nn.Linear(61, 13))


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 61), nn.LeakyReLU(0.2), nn.Linear(61, 1))


def two_models_against_each_other(face: Face) -> Found:
    made, judge = face.shard(generator()), face.shard(discriminator())
    optim_made, optim_judge = (
        face.adamw(made.parameters(), lr=1e-3),
        face.adamw(judge.parameters(), lr=2e-3),
    )
    losses = []
    for step in range(3):
        real, seed = noise(face.sample(step), 5, 13), noise(face.sample(step) + 5, 5, 7)
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made(seed).detach())).mean()
        loss.backward()
        face.step(optim_judge)
        cheat = F.softplus(-judge(made(seed))).mean()
        cheat.backward()
        face.step(optim_made)
        optim_judge.zero_grad()
        losses += [loss.item(), cheat.item()]
    return {"losses": losses, "made": face.weights(made), "judge": face.weights(judge)}


def two_models_one_frozen_at_a_time(face: Face) -> Found:
    made, judge = face.shard(generator()), face.shard(discriminator())
    optim_made, optim_judge = (
        face.adamw(made.parameters(), lr=1e-3),
        face.adamw(judge.parameters(), lr=2e-3),
    )
    for step in range(3):
        real, seed = noise(face.sample(step), 5, 13), noise(face.sample(step) + 5, 5, 7)
        judge.requires_grad_(True)
        made.requires_grad_(False)
        (F.softplus(-judge(real)).mean() + F.softplus(judge(made(seed))).mean()).backward()
        face.step(optim_judge)
        judge.requires_grad_(False)
        made.requires_grad_(True)
        F.softplus(-judge(made(seed))).mean().backward()
        face.step(optim_made)
    return {"made": face.weights(made), "judge": face.weights(judge)}


def actor_with_a_frozen_reference(face: Face) -> Found:
    reference = models.NanoGPT().eval().requires_grad_(False)
    actor = models.NanoGPT()
    actor.load_state_dict(reference.state_dict())
    reference, actor, critic = (
        face.shard(reference),
        face.shard(actor),
        face.shard(models.ShortTower()),
    )
    optims = [face.adamw(actor.parameters()), face.adamw(critic.parameters())]
    losses = []
    for step in range(3):
        tokens, _ = batch(face.sample(step))
        with torch.no_grad():
            before = reference(tokens).log_softmax(-1)
        now, value = actor(tokens).log_softmax(-1), logits_of(critic(tokens)).mean(-1)
        gain = now.gather(-1, tokens[..., None]).squeeze(-1)
        loss = -(gain * (1 - value.detach())).mean() + F.kl_div(
            now, before, log_target=True, reduction="batchmean"
        )
        (loss + (value - 1).square().mean()).backward()
        for optim in optims:
            face.step(optim)
        losses.append(loss.item())
    return {"losses": losses, "actor": face.weights(actor), "critic": face.weights(critic)}


# ---- data ----------------------------------------------------------------------------------------


def loader_with_forked_workers(face: Face) -> Found:
    model = face.shard(nn.Sequential(nn.Linear(13, 61), nn.ReLU(), nn.Linear(61, 7)))
    optim = face.adamw(model.parameters())
    data = TensorDataset(noise(face.rank, 12, 13), noise(face.rank + 2, 12, 7))
    losses = []
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=5, num_workers=2, multiprocessing_context="fork"):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            face.step(optim)
            losses.append(loss.item())
    return {"losses": losses, "weights": face.weights(model)}


def a_step_without_forward(face: Face) -> Found:
    model = face.shard(models.ShortTower())
    optim = face.adamw(model.parameters())
    optim.step()
    losses = []
    for step in range(2):
        loss = loss_of(model, face.sample(step))
        loss.backward()
        face.step(optim)
        optim.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": face.weights(model)}


PROGRAMS: dict[str, Program] = {
    each.__name__: each
    for each in (
        groups_with_decay_split_and_two_rates,
        clipping_by_torch,
        grad_scaler_with_a_step_that_overflows,
        layers_skipped_at_random,
        another_order_in_every_step,
        modules_called_several_times,
        evaluation_between_micro_batches,
        generation_between_steps,
        exceptions_in_forward_and_backward,
        forward_and_backward_hooks_of_the_user,
        hooks_on_parameters,
        hooks_on_the_optimizer,
        gradients_of_gradients,
        gradients_asked_of_autograd,
        gradients_at_detached_pieces,
        two_models_against_each_other,
        two_models_one_frozen_at_a_time,
        actor_with_a_frozen_reference,
        loader_with_forked_workers,
        a_step_without_forward,
    )
}
