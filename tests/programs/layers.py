"""Programs: layers that keep or use their parameters in a way of their own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from programs.faces import Face, Found, Program, fit
from programs.models import VOCAB, Block
from programs.twins import batch


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def regress(model: nn.Module, seed: int) -> torch.Tensor:
    """A loss for models from (5, 13) to anything."""
    return model(noise(seed, 5, 13)).float().square().mean()


def predict(model: nn.Module, seed: int) -> torch.Tensor:
    """A loss for models from tokens to logits."""
    inputs, targets = batch(seed)
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


# ---- recurrent, attention, convolution -----------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 13, padding_idx=0)
        self.lstm = nn.LSTM(13, 17, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(34, 11, batch_first=True)
        self.head = nn.Linear(11, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embed(tokens))
        x, _ = self.gru(x)
        return self.head(x)


def lstm_and_gru(face: Face) -> Found:
    return fit(face, Recurrent(), predict)


class Attention(nn.Module):
    """The weight of `out_proj` is used by the attention around it, which never calls `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(13, 24)
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True, kdim=13, vdim=13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(self.inner(x)[None], x[None], x[None])[0]


def multihead_attention(face: Face) -> Found:
    return fit(face, Attention(), regress)


def multihead_attention_alone(face: Face) -> Found:
    def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
        x = noise(seed, 1, 5, 24)
        return model(x, x, x)[0].square().mean()

    return fit(face, nn.MultiheadAttention(24, 4, batch_first=True), loss_of)


def transformer_encoder_and_decoder(face: Face) -> Found:
    model = nn.Transformer(24, 4, 2, 2, 31, dropout=0.1, batch_first=True)

    def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)  # of dropout
        return model(noise(seed, 2, 7, 24), noise(seed + 1, 2, 5, 24)).square().mean()

    return fit(face, model, loss_of)


def convolutions_with_batch_norm(face: Face) -> Found:
    model = nn.Sequential(
        nn.Conv2d(3, 7, 3, bias=False),
        nn.BatchNorm2d(7),
        nn.ReLU(),
        nn.Conv2d(7, 5, 3),
        nn.BatchNorm2d(5, affine=False),
    )

    def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
        return (model(noise(seed, 2, 3, 9, 9)) - 1).square().mean()

    found = fit(face, model, loss_of)
    assert int(model[1].num_batches_tracked) == 3
    return found


# ---- parameters that are computed from others ----------------------------------------------------


def weight_norm_by_a_hook(face: Face) -> Found:
    return fit(
        face,
        nn.Sequential(weight_norm(nn.Linear(13, 31)), nn.ReLU(), weight_norm(nn.Linear(31, 7))),
        regress,
    )


def spectral_norm_by_a_hook(face: Face) -> Found:
    return fit(
        face, nn.Sequential(spectral_norm(nn.Linear(13, 31)), nn.ReLU(), nn.Linear(31, 7)), regress
    )


def weight_norm_by_parametrization(face: Face) -> Found:
    layers = [
        parametrizations.weight_norm(nn.Linear(13, 31)),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(31, 7)),
    ]
    return fit(face, nn.Sequential(*layers), regress)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Same(nn.Module):
    """Hands the parameter itself on, so that it is used after the forward of whoever owns it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def parametrized_weights(face: Face) -> Found:
    model = nn.Sequential(nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 31))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    parametrize.register_parametrization(model[2], "weight", Same())
    return fit(face, model, regress)


# ---- containers, sharing, odd sizes --------------------------------------------------------------


class Experts(nn.Module):
    """A ModuleDict of which every forward uses one; the router's weight is a parameter of the
    root."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(13))
        self.experts = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(13, 31), nn.Linear(31, 13)) for name in "abc"}
        )
        self.choice = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.experts[self.choice](x)


def experts_in_a_module_dict(face: Face) -> Found:
    model, choices = Experts(), iter("abaaca")

    def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
        model.choice = next(choices)
        return regress(model, seed)

    return fit(face, model, loss_of, 6)


class Odd(nn.Module):
    """Parameters without elements, without dimensions, of one element, of none at all, and frozen
    integers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.one = nn.Parameter(torch.rand(1))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.register_parameter("nothing", None)
        self.codes = nn.Parameter(
            torch.randint(-128, 127, (13, 31), dtype=torch.int8), requires_grad=False
        )
        self.inner = nn.Linear(13, 31, bias=False)
        self.unused = nn.Linear(13, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decoded = self.codes.float() / 127
        return self.scale * self.inner(x) + self.one * (x @ decoded) + self.empty.sum()


def odd_parameters(face: Face) -> Found:
    return fit(face, Odd(), regress)


class MixedBlock(nn.Module):
    """A bf16 block with an fp32 norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(13)
        self.up = nn.Linear(13, 47, dtype=torch.bfloat16)
        self.down = nn.Linear(47, 13, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x).bfloat16()))).float()


def bf16_blocks_with_fp32_norms(face: Face) -> Found:
    return fit(face, nn.Sequential(*(MixedBlock() for _ in range(3))), regress)


class Shared(nn.Module):
    """One block under three names, one weight under two, one parameter used by the root alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 31)
        block = Block(31, 47)
        self.layers = nn.ModuleList([block, Block(31, 47), block])
        self.again = block
        self.head = nn.Linear(31, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.places = nn.Parameter(torch.randn(11, 31))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.again(x))


def shared_modules_and_weights(face: Face) -> Found:
    return fit(face, Shared(), predict)


def weights_used_without_calling_their_module(face: Face) -> Found:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(13, 13) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(F.linear(x, layer.weight, layer.bias))
            return x

    return fit(face, Direct(), regress)


PROGRAMS: dict[str, Program] = {
    each.__name__: each
    for each in (
        lstm_and_gru,
        multihead_attention,
        multihead_attention_alone,
        transformer_encoder_and_decoder,
        convolutions_with_batch_norm,
        weight_norm_by_a_hook,
        spectral_norm_by_a_hook,
        weight_norm_by_parametrization,
        parametrized_weights,
        experts_in_a_module_dict,
        odd_parameters,
        bf16_blocks_with_fp32_norms,
        shared_modules_and_weights,
        weights_used_without_calling_their_module,
    )
}
