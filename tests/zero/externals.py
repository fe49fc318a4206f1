"""Models that use parameters outside the forward of the module that owns them, each in another way.
Tokens in, logits out.

Shared by test_external_parameters.py and the ranks of touch_on_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from programs.models import VOCAB, Block
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tiermem.zero import register_external_parameter


class LanguageModel(nn.Module):
    """The embedding's weight makes the logits, in the root's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, 31)
        self.layers = nn.ModuleList([Block(31, 97) for _ in range(3)])

    def body(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.body(tokens), self.embeddings.weight)


class ByView(LanguageModel):
    """A view of the weight goes into an operator, so the operator never sees the parameter."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body(tokens)
        turned = self.embeddings.weight.t()
        for layer in self.layers:  # the unit would leave if it were not held for the view
            x = layer(x)
        return x @ turned + self.embeddings.weight.data.sum() * 0.001


class Inside(nn.Module):
    """A module with units of its own is handed another's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(31, 31)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(self.inner(x), weight)


class Handed(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.head = Inside()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(tokens), self.embeddings.weight)


class Recomputed(Handed):
    """The use of the foreign weight is computed again in backward."""

    use_reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body(tokens)
        return checkpoint(
            lambda y: self.head(y, self.embeddings.weight), x, use_reentrant=self.use_reentrant
        )


class RecomputedReentrant(Recomputed):
    use_reentrant = True


class GivenToCheckpoint(LanguageModel):
    """A checkpoint gets weights as arguments: of a module that has run, and of one that never
    runs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.LayerNorm(31, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body(tokens)
        x = checkpoint(lambda y, w: (y * w).tanh(), x, self.scale.weight, use_reentrant=True)
        return checkpoint(F.linear, x, self.embeddings.weight, use_reentrant=True)


class CustomLinear(nn.Linear):
    """Returns its bias beside its output."""

    def forward(self, *input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(*input), self.bias


class Returned(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.custom = CustomLinear(31, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, bias = self.custom(self.body(tokens))
        return F.linear(x * bias, self.embeddings.weight)


class InNoModule(LanguageModel):
    """Changes its mind from pass to pass: which weights are used, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        x = self.body(tokens)
        for layer in self.layers[: self.num_forwards % 3]:
            x = x + F.linear(
                F.linear(x, layer.up.weight, layer.up.bias).relu(), weight=layer.down.weight
            )
        return torch.matmul(x, self.embeddings.weight.T)


class SharedAttention(LanguageModel):
    """torch's own attention hands its child's weight to a function, and never calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(
            [nn.ModuleDict({"a": nn.MultiheadAttention(31, 1, batch_first=True)})]
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body(tokens)
        return F.linear(
            self.attention[0]["a"](x, x, x, need_weights=False)[0], self.embeddings.weight
        )


class ModuleZ3(LanguageModel):
    """Says beforehand what it needs."""

    def __init__(self) -> None:
        super().__init__()
        register_external_parameter(self, self.embeddings.weight)
        register_external_parameter(self.layers[2], self.layers[0].up.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each
    for each in (
        LanguageModel,
        ByView,
        Handed,
        Recomputed,
        RecomputedReentrant,
        GivenToCheckpoint,
        Returned,
        InNoModule,
        SharedAttention,
        ModuleZ3,
    )
}
