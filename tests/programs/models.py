"""Models: small ones with the habits that make sharding hard. All take tokens and return what
`logits_of` understands.

    Tower                  embedding, blocks, head; its arguments are habits       ShortTower      three blocks, no bias
    Wandering              another path through the blocks in every forward        tied_tower      head and embedding share
    Layers                 modules in a list       SparseBlock                     experts behind a gate
    BareContainers         parameters in lists and dicts without a forward         frozen_tower    some blocks are frozen
    NanoGPT                weight tying, apply(_init_weights), a re-init by name   llama           Hugging Face's
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    note: str = "kept"


VOCAB = 61


class Block(nn.Module):
    """A residual block; its output is a tensor, or a dict or dataclass that holds it."""

    def __init__(self, width: int, inner: int, outputs: str = "tensor") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> Any:
        return wrap(x + self.down(torch.relu(self.up(self.norm(x)))), self.outputs)


class Tower(nn.Module):
    """Embedding, blocks in a ModuleList, head. The defaults make every parameter's size odd and cut
    by small tiles.

    outputs: "tensor", "dict" or "dataclass", of blocks and root. checkpoint: whether blocks are
    computed again, and whether reentrantly. rounds: how often each block is used in a forward.
    skips: the last block is never used, the first in every other forward. `path`: the blocks that
    are used, in this order, each as often as it stands there; None: all.
    """

    path: Sequence[int] | None = None

    def __init__(
        self,
        width: int = 31,
        inner: int = 97,
        num_blocks: int = 4,
        bias: bool = True,
        block: Callable[[int, int], nn.Module] | None = None,
        outputs: str = "tensor",
        checkpoint: bool | None = None,
        rounds: int = 1,
        skips: bool = False,
    ) -> None:
        super().__init__()
        make = block or functools.partial(Block, outputs=outputs)
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList([make(width, inner) for _ in range(num_blocks)])
        self.head = nn.Linear(width, VOCAB, bias=bias)
        self.outputs, self.checkpoint, self.rounds, self.skips = outputs, checkpoint, rounds, skips
        self.num_forwards = 0

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.used_layers() * self.rounds:
            x = self.through(layer, x)
        self.num_forwards += 1
        return wrap(self.head(x), self.outputs)

    def used_layers(self) -> list[nn.Module]:
        """The blocks of this forward, in order."""
        if self.path is not None:
            return [self.layers[index] for index in self.path]
        return list(self.layers[self.num_forwards % 2 : -1] if self.skips else self.layers)

    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoint is None or not self.training:
            return logits_of(layer(x))
        return recompute(lambda y: logits_of(layer(y)), x, use_reentrant=self.checkpoint)


class ShortTower(Tower):
    """Three blocks, and a head without bias."""

    def __init__(self, num_blocks: int = 3, **settings: Any) -> None:
        super().__init__(num_blocks=num_blocks, bias=False, **settings)


class Wandering(Tower):
    """Goes another path through its blocks in every forward, with repetitions; the same on every
    rank."""

    def used_layers(self) -> list[nn.Module]:
        chance = torch.Generator().manual_seed(self.num_forwards)
        self.path = torch.randint(0, 4, (5,), generator=chance).tolist()
        return super().used_layers()


class Layers(nn.Module):
    """Modules in a list, each of which gets what the one before it returns."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 41), nn.Linear(41, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class SparseBlock(nn.Module):
    """Sends everything to one expert: to the gate's first choice, or to the one that is `chosen`."""

    chosen: int | None = None

    def __init__(self, width: int = 31, num_experts: int = 5) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(width) for _ in range(num_experts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x)
        chosen = int(weights.sum((0, 1)).argmax()) if self.chosen is None else self.chosen
        return x + self.experts[chosen](x) * weights[..., chosen : chosen + 1].sigmoid()


def tied_tower(**settings: Any) -> ShortTower:
    model = ShortTower(**settings)
    model.head.weight = model.embed.weight
    return model


def frozen_tower(**settings: Any) -> ShortTower:
    model = ShortTower(**settings)
    model.embed.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    model.layers[2].up.requires_grad_(False)
    return model


class BareContainers(nn.Module):
    """Parameters in containers that have no forward: the module around them uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 31)
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(11, 31)) for _ in range(3)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.rand(11, 31))})
        self.layers = nn.ModuleList(
            [nn.ModuleList([Block(31, 97) for _ in range(2)]) for _ in range(3)]
        )
        self.heads = nn.ModuleDict({"words": nn.Linear(31, VOCAB)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.named["shift"]
        for scale, pair in zip(self.scales, self.layers, strict=True):
            for block in pair:
                x = block(x * scale)
        return self.heads["words"](x)


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.c_attn(x).split(x.shape[-1], dim=-1)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(found.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, num_heads)
        self.ln_2 = nn.LayerNorm(width)
        mlp = {"c_fc": nn.Linear(width, 4 * width), "act": nn.GELU()}
        mlp |= {"c_proj": nn.Linear(4 * width, width), "dropout": nn.Dropout(dropout)}
        self.mlp = nn.Sequential(OrderedDict(mlp))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """checkpoint: whether blocks are computed again, and whether reentrantly."""

    def __init__(
        self,
        width: int = 32,
        num_layers: int = 3,
        num_heads: int = 1,
        dropout: float = 0.0,
        is_tied: bool = True,
        checkpoint: bool | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        blocks = [GPTBlock(width, num_heads, dropout) for _ in range(num_layers)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, width),
                "wpe": nn.Embedding(16, width),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        if is_tied:
            self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, param in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(param, mean=0.0, std=0.02 / math.sqrt(2 * num_layers))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        again = self.checkpoint
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.transformer.wte(tokens) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x) if again is None else recompute(block, x, use_reentrant=again)
        return self.lm_head(self.transformer.ln_f(x))


def llama(tied: bool = False, **settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=VOCAB, tie_word_embeddings=tied, pad_token_id=0, **(sizes | settings)
    )
    return LlamaForCausalLM(config)


def checkpointed_llama(use_reentrant: bool) -> nn.Module:
    model = llama(use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model.train()


def wrap(x: torch.Tensor, outputs: str) -> Any:
    """An output of the kind that a model's `outputs` names."""
    if outputs == "tensor":
        return x
    return {"logits": x} if outputs == "dict" else Output(x)


def logits_of(output: Any) -> torch.Tensor:
    """The logits in the output of a model, which is a tensor, a dict or an object with a field
    `logits`."""
    if isinstance(output, torch.Tensor):
        return output
    return output["logits"] if isinstance(output, dict) else output.logits
