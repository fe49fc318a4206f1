"""Does accumulation by layers serve blocks that take more than one tensor: two streams, what the
head makes for all of them, the output of an earlier block?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layerwise_runs import Run, cross_entropy, engine_of, micro_batches, train
from programs.models import VOCAB
from programs.twins import seeded
from torch import nn
from torch.nn import functional as F

from tiermem.run.chain import NoChainError

WIDTH = 16


class Mixing(nn.Module):
    """Takes two streams and a condition; each stream sees the other."""

    def __init__(self) -> None:
        super().__init__()
        self.of_x, self.of_c, self.of_t = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, c: torch.Tensor, t: torch.Tensor) -> Any:
        gate = torch.tanh(self.of_t(t))
        x = x + gate * self.of_x(x + c.mean(1, keepdim=True))
        return c + gate * self.of_c(c + x.mean(1, keepdim=True)), x


class Streams(nn.Module):
    """As a double-stream transformer: two lists of blocks, and a time that all of them take, and
    the tail."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.context = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.time = nn.Linear(WIDTH, WIDTH)
        self.doubles = nn.ModuleList([Mixing() for _ in range(3)])
        self.singles = nn.ModuleList([Mixing() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def begin(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        x = self.embed(tokens)
        return [x, self.context(tokens[:, :4]), self.time(x.mean(1, keepdim=True))]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, c, t = self.begin(tokens)
        for block in (*self.doubles, *self.singles):
            c, x = block(x=x, c=c, t=t)
        return self.head(x * t)


class Skipping(Streams):
    """Later blocks take the context as the first block left it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, c, t = self.begin(tokens)
        early = None
        for block in (*self.doubles, *self.singles):
            c, x = block(x, c if early is None else early, t)
            early = c if early is None else early
        return self.head(x)


class Counting(Streams):
    """A count of blocks goes from block to block; the first context is a parameter as it is."""

    class Block(Mixing):
        def forward(self, x: torch.Tensor, c: torch.Tensor, count: torch.Tensor) -> Any:
            t = (count / 8).expand(len(x), 1, WIDTH)
            return *super().forward(x, c.expand(len(x), -1, -1), t), count + 1

    def __init__(self) -> None:
        super().__init__()
        self.doubles = nn.ModuleList([self.Block() for _ in range(3)])
        self.queries = nn.Parameter(torch.randn(1, 4, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, c, count = self.embed(tokens), self.queries, torch.ones((), dtype=torch.long)
        for block in self.doubles:
            c, x, count = block(x, c, count)
        return self.head(x + c.mean(1, keepdim=True))


def t5() -> nn.Module:
    """An encoder-decoder: its decoder's blocks are the chain, and hand a bias of places on."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2}
    config = T5Config(vocab_size=VOCAB, use_cache=False, dropout_rate=0.0, **sizes)
    model = T5ForConditionalGeneration(config)

    class Translating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.inner(input_ids=tokens, decoder_input_ids=tokens, use_cache=False).logits

    return Translating()


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "two streams and a time": (Streams, 5),
    "the output of an earlier block": (Skipping, 5),
    "a parameter, and an integer": (Counting, 3),
    "an encoder and a decoder": (t5, 2),
}


def assert_close_runs(mine: Run, expected: Run) -> None:
    """A gradient that comes from several blocks is added in another order: a rounding apart."""
    assert mine.losses == pytest.approx(expected.losses, abs=2e-6, rel=0)
    assert mine.norms == pytest.approx(expected.norms, rel=1e-4)
    for name, each in expected.weights.items():
        torch.testing.assert_close(mine.weights[name], each, atol=2e-3, rtol=0, msg=name)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", [*MODELS, "two streams, frozen", "a parameter, frozen"])
def test_layers_train_as_batches(name: str, tmp_path: Path) -> None:
    """Frozen: what comes before the blocks, and the first block."""
    frozen = {"two streams, frozen": Streams, "a parameter, frozen": Counting}
    model = seeded(frozen[name] if name in frozen else MODELS[name][0])
    if name in frozen:
        for part, param in model.named_parameters():
            param.requires_grad_(any(word in part for word in ("1.", "2.", "head")))
    runs = [
        train(copy.deepcopy(model), order, 3, "nvme", tmp_path, None)
        for order in ("batches", "layers")
    ]
    assert_close_runs(runs[1], runs[0])


@pytest.mark.parametrize("name", MODELS)
def test_every_list_that_hands_its_outputs_on_is_a_part_of_the_chain(
    name: str, tmp_path: Path
) -> None:
    build, num_blocks = MODELS[name]
    with engine_of(seeded(build), "layers", 2, "cpu", tmp_path) as engine:
        engine.train_batch(micro_batches(0, 2), cross_entropy)
        assert len(engine._by_layer._links) == num_blocks  # type: ignore[union-attr]


@pytest.mark.slow
def test_inputs_of_both_streams_move_where_activations_rest(tmp_path: Path) -> None:
    class Wide(Streams):
        """Inputs of 64 KiB and more move."""

        def begin(self, tokens: torch.Tensor) -> list[torch.Tensor]:
            x, c, t = super().begin(tokens)
            return [x.repeat(1, 200, 1), c.repeat(1, 400, 1), t]

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x, c, t = self.begin(tokens)
            for block in (*self.doubles, *self.singles):
                c, x = block(x, c, t)
            return self.head(x[:, : tokens.shape[1]] + c[:, :1])

    model = seeded(Wide)
    runs = [
        train(copy.deepcopy(model), "layers", 3, "nvme", tmp_path, None, own)
        for own in (None, {"activations": "nvme"})
    ]
    assert runs[0].losses == runs[1].losses
    for name, each in runs[0].weights.items():
        assert torch.equal(runs[1].weights[name], each), name


# ---- refused -------------------------------------------------------------------------------------


class Deriving(Streams):
    """What a later block takes is computed from the output of an earlier one."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, c, t = self.begin(tokens)
        for block in self.doubles:
            c, x = block(x, c, t)
            t = F.normalize(x.mean(1, keepdim=True))
        return self.head(x)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.cat([x, x], 1) if x.shape[1] > 9 else x)


class Changing(Streams):
    """The shape of an output follows no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.doubles = nn.ModuleList([Growing() for _ in range(3)])
        del self.singles

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.doubles:
            x = block(x)
        return self.head(x[:, : tokens.shape[1]])


REFUSED = {
    "doubles.1 takes a tensor of shape .* that was made of the output of a block before": Deriving,
    "doubles.0 gives a tensor of shape .2, 20, 16. where .2, 10, 16.": Changing,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_chain_can_give_is_refused(reason: str, tmp_path: Path) -> None:
    with engine_of(seeded(REFUSED[reason]), "layers", 2, "cpu", tmp_path) as engine:
        with pytest.raises(NoChainError, match=reason):
            engine.train_batch(micro_batches(0, 2), cross_entropy)
        assert engine.global_steps == 0
        assert all(param.grad is None for param in engine.module.parameters())
