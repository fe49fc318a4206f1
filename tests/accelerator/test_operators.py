"""Do operators compute late what the CPU computes, and is each that cannot be deferred counted?"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

Function = Callable[..., torch.Tensor]

FUNCTIONS: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(2, 5, 7), (3, 7), (3,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (7,), w, b), [(2, 5, 7), (7,), (7,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (7,), w), [(5, 7), (7,)]),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        [(4, 3, 5), (3,), (3,)],
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(3, 4, 5), (4,), (4,)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), [(2, 3, 6, 6), (4, 3, 3, 3)]),
    "softmax": (lambda x: x.softmax(-1), [(5, 7)]),
    "silu": (F.silu, [(5, 7)]),
    "gelu": (F.gelu, [(5, 7)]),
    "mse_loss": (F.mse_loss, [(5, 7), (5, 7)]),
    "attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        [(2, 2, 5, 8)],
    ),
    "attention with a mask": (
        lambda q: F.scaled_dot_product_attention(
            q, q, q, torch.ones(5, 5, device=q.device).tril().bool()
        ),
        [(2, 2, 5, 8)],
    ),
    "embedding": (
        lambda w: F.embedding(torch.tensor([[1, 2], [0, 1]], device=w.device), w),
        [(4, 3)],
    ),
    "index by numbers": (lambda x: x[torch.tensor([2, 0, 2]), 1:], [(5, 7)]),
    "cat, split and stack": (
        lambda x, y: torch.stack(torch.cat([x, y]).split(2)),
        [(2, 7), (4, 7)],
    ),
    "views": (lambda x: x.t().unflatten(0, (-1, 2)).flip(0).expand(3, -1, -1, -1) * 2, [(5, 8)]),
    "sort": (lambda x: x.sort(-1).values.cumsum(0), [(5, 7)]),
    "einsum": (lambda x, y: torch.einsum("bi,bj->ij", x, y), [(5, 7), (5, 3)]),
    "fft": (lambda x: torch.fft.ihfft(x).abs(), [(5,)]),
    "numbers": (lambda x: (3 - x * 2) / torch.tensor(1.5) + x.new_tensor(2.0), [(5, 7)]),
    "where": (lambda x: torch.where(x > 0, x, -1.0).masked_fill(x > 1, 5.0), [(5, 7)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_result_and_gradients_equal_the_cpus(
    sim: ModuleType, name: str, dtype: torch.dtype
) -> None:
    if name == "fft" and dtype is torch.bfloat16:
        pytest.skip("torch has no fft of bfloat16")

    def compute(device: str) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        function, shapes = FUNCTIONS[name]
        leaves = [
            torch.randn(shape, generator=draw).to(dtype).to(device).requires_grad_()
            for shape in shapes
        ]
        result = function(*leaves)
        grads = torch.autograd.grad(result, leaves, torch.ones_like(result))
        return [result.detach(), *grads]

    sim.set_schedule("late")
    expected = compute("cpu")
    found = compute("sim")
    assert sim.pending() > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
        assert torch.equal(mine.cpu(), theirs)
    assert sim.undeferred() == {}


def test_written_results_are_resized_and_filled(sim: ModuleType) -> None:
    sim.set_schedule("late")
    out = torch.empty(0, device="sim")
    torch.mm(torch.ones(2, 3, device="sim"), torch.ones(3, 4, device="sim"), out=out)
    assert out.tolist() == [[3.0] * 4] * 2


def test_wrong_shapes_are_errors_when_issued(sim: ModuleType) -> None:
    sim.set_schedule("late")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3, device="sim") @ torch.ones(2, 3, device="sim")


def test_an_operator_without_a_meta_kernel_runs_at_once_and_is_counted(sim: ModuleType) -> None:
    sim.set_schedule("late")
    x = torch.ones(3, device="sim")
    assert torch.allclose(x.logcumsumexp(0).cpu(), torch.ones(3).logcumsumexp(0))
    assert sim.undeferred() == {"aten::_logcumsumexp": 1}


def test_a_number_on_the_cpu_is_taken_as_it_is_when_issued(sim: ModuleType) -> None:
    sim.set_schedule("late")
    number = torch.tensor(2.0)
    doubled = torch.ones(3, device="sim") * number
    number.fill_(7.0)
    assert doubled.tolist() == [2, 2, 2]
