"""Programs: a base that is frozen, and the little that is trained beside it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from programs import models
from programs.faces import Face, Found, Program, fit
from programs.layers import noise
from programs.models import VOCAB
from programs.twins import batch, loss_of


class LoRA(nn.Module):
    """A frozen Linear with a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 10)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.down.to(x.dtype).T) @ self.up.to(x.dtype).T


def adapted(model: nn.Module) -> nn.Module:
    """Freezes a model and puts adapters on the Linears of its blocks."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in (
                "up",
                "down",
                "c_attn",
                "c_proj",
                "q_proj",
                "v_proj",
            ):
                setattr(module, name, LoRA(child))
    return model


def lora_on_a_frozen_base(face: Face) -> Found:
    return fit(face, adapted(models.ShortTower()), loss_of)


def lora_on_a_frozen_bf16_base(face: Face) -> Found:
    model = adapted(models.ShortTower().bfloat16())
    for module in model.modules():
        if isinstance(module, LoRA):
            module.down.data, module.up.data = module.down.data.float(), module.up.data.float()
    return fit(face, model, loss_of)


def lora_under_checkpointing(face: Face) -> Found:
    found = {}
    for use_reentrant in (False, True):
        model = adapted(models.ShortTower(checkpoint=use_reentrant))
        if use_reentrant:  # as transformers' enable_input_require_grads does
            model.embed.register_forward_hook(
                lambda module, args, output: output.requires_grad_(True)
            )
        found[str(use_reentrant)] = fit(face, model, loss_of)
    return found


def lora_on_llama(face: Face) -> Found:
    return fit(face, adapted(models.llama()), loss_of)


def only_norms_and_biases_trained(face: Face) -> Found:
    model = models.ShortTower()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name or name.endswith("bias"))
    return fit(face, model, loss_of)


def only_the_last_layer_trained(face: Face) -> Found:
    model = models.ShortTower().requires_grad_(False)
    model.head.requires_grad_(True)
    return fit(face, model, loss_of)


def gradient_of_the_input_of_a_frozen_model(face: Face) -> Found:
    model = face.shard(
        nn.Sequential(nn.Linear(13, 61), nn.Tanh(), nn.Linear(61, 53)).requires_grad_(False)
    )
    x = noise(face.rank, 5, 13).requires_grad_()
    found = []
    for _ in range(3):
        model(x).square().mean().backward()
        found.append(x.grad.clone())
        with torch.no_grad():
            x -= x.grad
        x.grad = None
    return {"found": found}


class Prompted(nn.Module):
    """A trained prompt in front of what a frozen model reads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(1, 4, 31))
        self.model = model.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.prompt.expand(len(tokens), -1, -1), self.model.embed(tokens)], 1)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.head(x[:, 4:])


def prompt_tuning(face: Face) -> Found:
    return fit(face, Prompted(models.ShortTower()), loss_of)


def a_prompt_that_is_not_sharded(face: Face) -> Found:
    """The prompt is an ordinary tensor outside the sharded model, stepped by the same class of
    optimizer."""
    model = face.shard(models.ShortTower().requires_grad_(False))
    prompt = nn.Parameter(torch.randn(1, 1, 31))
    optim = face.adamw([prompt])
    losses = []
    for step in range(3):
        tokens, targets = batch(step)
        x = model.embed(tokens) + prompt
        for layer in model.layers:
            x = layer(x)
        loss = F.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "prompt": prompt.detach().clone()}


def frozen_embedding_with_padding(face: Face) -> Found:
    model = models.ShortTower()
    model.embed = nn.Embedding(VOCAB, 31, padding_idx=3)
    model.embed.weight.requires_grad_(False)
    return fit(face, model, loss_of)


PROGRAMS: dict[str, Program] = {
    each.__name__: each
    for each in (
        lora_on_a_frozen_base,
        lora_on_a_frozen_bf16_base,
        lora_under_checkpointing,
        lora_on_llama,
        only_norms_and_biases_trained,
        only_the_last_layer_trained,
        gradient_of_the_input_of_a_frozen_model,
        prompt_tuning,
        a_prompt_that_is_not_sharded,
        frozen_embedding_with_padding,
    )
}
