"""chunked_cross_entropy: the loss of a language model, without the logits of all tokens at once.

    hidden [tokens, width] --+--> a chunk of tokens --> its logits --> its loss; gradients of its
    hidden states and, added
                             |                                         up, of the weight
                             +--> the next chunk, in the same memory

Logits take tokens x vocabulary x 4 bytes, three times over with their gradient: 12 GiB for 8192
tokens and 128k words. Those of a chunk take 64 MiB, or what the caller says. Gradients are computed
in forward, while the logits are there, and scaled in place in backward. So the weight is read once:
a sharded one is fetched for the forward of the loss, and backward needs the memory of its gradient
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["chunked_cross_entropy"]

CHUNK_BYTES = 64 << 20
"""Of fp32 logits in one chunk, where the caller gives no number of tokens."""


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Computes `F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`, one chunk of
    tokens after the other.

    Value and gradients equal torch's but for rounding: the gradient of the weight is added up chunk
    by chunk, in fp32 unless the products are bf16, which has its range. Under torch.autocast the
    products are computed in its dtype.

    Args:
        hidden: [..., width], floating point.
        weight: [vocabulary, width], of the output layer; also a parameter of a sharded model, which
            is gathered for the call. On several ranks call it in a forward of the model then.
        targets: [...], int64, of the shape of `hidden` without its last dimension.
        bias: [vocabulary] or None.
        ignore_index: targets of this value count for nothing.
        reduction: the mean over the targets that count, or their sum.
        chunk_tokens: tokens in a chunk; None: as many as have 64 MiB of fp32 logits.

    Returns:
        The loss: a scalar, fp32, differentiable once. With no target that counts the mean is NaN,
        as torch's.

    Raises:
        ValueError: shapes that do not go together, another reduction, or chunk_tokens below 1.
        RuntimeError: in a second backward of the loss, since the first scales the gradients in
            place.
    """
    given = (hidden, weight, targets, bias)
    if has_torch_function(given):
        loss: torch.Tensor = handle_torch_function(
            chunked_cross_entropy,
            given,
            *given,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk_tokens=chunk_tokens,
        )
        return loss
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets "
            f"{tuple(targets.shape)}; allowed are [..., width], [vocabulary, width] and [...]"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction is {reduction!r}; allowed are "mean" and "sum"')
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; allowed is 1 or more, or None")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    targets = targets.reshape(-1)
    apply: Callable[..., torch.Tensor] = _Chunked.apply
    with torch.autocast(device, enabled=False):
        total = apply(
            hidden, weight, bias, targets, ignore_index, chunk_tokens, torch.is_grad_enabled()
        )
        return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _Chunked(torch.autograd.Function):
    """The sum of the losses. Gradients are those of the sum, not yet of the mean, so that fp16
    holds them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        ignore_index: int,
        chunk_tokens: int,
        is_trained: bool,
    ) -> torch.Tensor:
        needs = [is_trained and need for need in ctx.needs_input_grad[:3]]
        summed = (
            torch.bfloat16
            if weight.dtype == torch.bfloat16
            else torch.promote_types(weight.dtype, torch.float32)
        )
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        of_weight = torch.zeros_like(weight, dtype=summed) if needs[1] else None
        of_bias = torch.zeros_like(bias, dtype=summed) if needs[2] and bias is not None else None
        total = torch.zeros(
            (), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device
        )
        for start in range(0, len(hidden), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            rows = hidden[part]
            wanted = targets[part]
            logits = F.linear(rows, weight, bias).to(total.dtype)
            counts = wanted != ignore_index
            wanted = torch.where(counts, wanted, 0).unsqueeze(1)
            log_sums = logits.logsumexp(1)
            total += torch.where(counts, log_sums - logits.gather(1, wanted).squeeze(1), 0.0).sum()
            if not any(needs):
                continue
            # the softmax, in the memory of the logits
            slopes = logits.sub_(log_sums.unsqueeze(1)).exp_()
            slopes.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=slopes.dtype))
            slopes = torch.where(counts.unsqueeze(1), slopes, 0.0).to(weight.dtype)
            if of_hidden is not None:
                torch.mm(slopes, weight, out=of_hidden[part])
            if of_weight is not None:
                of_weight.addmm_(slopes.t().to(summed), rows.to(summed))
            if of_bias is not None:
                of_bias += slopes.sum(0, dtype=summed)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes = [each.dtype if each is not None else None for each in (hidden, weight, bias)]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        try:
            grads = ctx.saved_tensors
        except RuntimeError as error:
            raise RuntimeError(
                "a loss of chunked_cross_entropy has one backward, which scales its gradients in "
                "place: compute the loss again"
            ) from error
        scaled = [
            None if grad is None else grad.mul_(factor.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)
