"""Is the chunked loss torch's, value and gradients, with a sharded weight too, and does it never
hold all logits?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tiermem
from tiermem import OffloadPolicy, Tier

VOCAB, WIDTH, TOKENS = 97, 16, 70


def given(dtype: torch.dtype = torch.float32, has_bias: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(2, TOKENS // 2, WIDTH),
        torch.randn(VOCAB, WIDTH),
        torch.randn(VOCAB),
    )
    floats = [hidden, weight, *([bias] if has_bias else [])]
    return [each.to(dtype).requires_grad_() for each in floats]


def targets_of(ignored: int = 9) -> torch.Tensor:
    targets = torch.randint(0, VOCAB, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    targets.view(-1)[:ignored] = -100
    return targets


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor, **fields: Any
) -> torch.Tensor:
    return F.cross_entropy(
        F.linear(hidden, weight, bias).float().flatten(0, 1), targets.flatten(), **fields
    )


def both(
    dtype: torch.dtype, has_bias: bool, scale: float = 1.0, **fields: Any
) -> list[list[torch.Tensor]]:
    """Loss and gradients: the chunked ones, and torch's."""
    found = []
    chunk = fields.pop("chunk_tokens", 16)
    for function, named in (
        (tiermem.chunked_cross_entropy, fields | {"chunk_tokens": chunk}),
        (plain, fields),
    ):
        floats = given(dtype, has_bias)
        bias = floats[2] if has_bias else None
        loss = function(
            floats[0],
            floats[1],
            *((targets_of(), bias) if named is not fields else (bias, targets_of())),
            **named,
        )
        (loss * scale).backward()
        found.append([loss.detach(), *(each.grad for each in floats)])
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 16, 70, 1000, None])
def test_value_and_gradients_are_torchs(
    reduction: str, has_bias: bool, chunk_tokens: int | None
) -> None:
    ours, theirs = both(torch.float32, has_bias, reduction=reduction, chunk_tokens=chunk_tokens)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "scale", "close"), [(torch.bfloat16, 1.0, 2e-2), (torch.float16, 65536.0, 4e-3)]
)
def test_16_bit_gradients_are_torchs_to_their_rounding(
    dtype: torch.dtype, scale: float, close: float
) -> None:
    """fp16 with a scaled loss: gradients of a mean are computed before the scale is known, and none
    becomes zero."""
    ours, theirs = both(dtype, True, scale)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == expected.dtype
        difference = (mine.double() - expected.double()).norm() / expected.double().norm()
        assert difference < close


def test_under_autocast_products_are_in_its_dtype() -> None:
    floats = [given(), given()]
    losses = []
    for (hidden, weight, bias), chunked in zip(floats, (True, False), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(
                tiermem.chunked_cross_entropy(hidden, weight, targets_of(), bias, chunk_tokens=16)
                if chunked
                else plain(hidden, weight, bias, targets_of())
            )
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for mine, expected in zip(*floats, strict=True):
        assert mine.grad is not None and expected.grad is not None
        assert (mine.grad - expected.grad).norm() < 2e-2 * expected.grad.norm()


def test_no_target_that_counts_gives_torchs_nan_and_frozen_weights_no_gradient() -> None:
    hidden, weight, _ = given()
    nothing = tiermem.chunked_cross_entropy(hidden, weight, torch.full((2, TOKENS // 2), -100))
    assert nothing.isnan()
    weight.requires_grad_(False)
    tiermem.chunked_cross_entropy(hidden, weight, targets_of()).backward()
    assert weight.grad is None and hidden.grad is not None
    with torch.no_grad():
        assert not tiermem.chunked_cross_entropy(hidden, weight, targets_of()).requires_grad


def test_a_second_backward_of_one_loss_is_refused_in_words() -> None:
    hidden, weight, _ = given()
    loss = tiermem.chunked_cross_entropy(hidden, weight, targets_of())
    loss.backward(retain_graph=True)
    found = hidden.grad.clone()
    with pytest.raises(RuntimeError, match="has one backward, which scales its gradients in place"):
        loss.backward()
    assert torch.equal(hidden.grad, found)


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return made


def test_logits_of_all_tokens_are_never_there() -> None:
    hidden, weight, bias = given()
    with _Largest() as largest:
        tiermem.chunked_cross_entropy(hidden, weight, targets_of(), bias, chunk_tokens=4).backward()
    assert largest.numel == max(VOCAB * WIDTH, TOKENS * WIDTH) < VOCAB * TOKENS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "hidden has shape"),
        ({"reduction": "none"}, 'allowed are "mean" and "sum"'),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
    ],
)
def test_bad_arguments_are_one_clear_error(change: dict[str, Any], said: str) -> None:
    hidden, weight, _ = given()
    with pytest.raises(ValueError, match=said):
        tiermem.chunked_cross_entropy(
            **{"hidden": hidden, "weight": weight, "targets": targets_of()} | change
        )


class _Model(nn.Module):
    def __init__(self, is_inside: bool, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embed.weight
        self.is_inside = is_inside

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.embed(tokens)).tanh()
        return self.loss_of(hidden, targets) if self.is_inside else hidden

    def loss_of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return tiermem.chunked_cross_entropy(
            hidden, self.head.weight, targets, self.head.bias, chunk_tokens=16
        )


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("home", [Tier.NVME, Tier.DEVICE])
def test_the_weight_may_be_a_sharded_parameter(
    home: Tier, is_inside: bool, is_tied: bool, tmp_path: Path
) -> None:
    """Inside a forward of the model and after it; the bits are those of the plain model."""
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model, losses = _Model(is_inside, is_tied), []
        shards = None
        if is_sharded:
            policy = OffloadPolicy(
                params=home, optim=Tier.HOST, paths=[tmp_path], persistence_numel=0
            )
            shards = tiermem.shard(model, policy)
        grads = []
        for step in range(2):
            tokens = torch.randint(
                0, VOCAB, (2, TOKENS // 2), generator=torch.Generator().manual_seed(step)
            )
            out = model(tokens, targets_of())
            loss = out if is_inside else model.loss_of(out, targets_of())
            loss.backward()
            losses.append(loss.detach())
            for param in model.parameters():
                grad = param.grad if shards is None else shards.gradient(param)
                assert grad is not None
                grads.append(grad.clone())
            model.zero_grad()
        if shards is not None:
            shards.close()
        found.append([*losses, *grads])
    assert all(torch.equal(mine, expected) for mine, expected in zip(*found, strict=True))
