"""Activations: the memory that a forward and a backward take beside weights and their gradients,
found by a run on tensors without values.

The model's own code runs under torch's FakeTensorMode: each tensor has a shape, a dtype and a
device, and no memory. The run takes seconds and nothing of the device. A model whose code looks at
values, such as a mixture of experts that counts tokens, cannot run so.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

_TORCH_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")

LossOf = Callable[[nn.Module, Any], torch.Tensor]
"""(model, batch) -> the loss, a tensor of one element."""


class PredictedActivations(NamedTuple):
    """Bytes of one forward and backward beside weights, buffers and the batch; gradients of weights
    are dropped as they come."""

    kept_bytes: int
    """At the end of the forward."""
    peak_bytes: int
    """At most, during both."""
    forward_flops: int
    """Operations of the forward's products: two for each multiplication and addition."""


def activations_of(
    model: nn.Module, loss_of: LossOf, batch: Any, device: torch.device
) -> PredictedActivations | None:
    """The activations of a model on a batch. Computes and allocates nothing; blocks for seconds.

    Args:
        model: not sharded; its weights are neither read nor changed, and may be on any device, also
            on the meta device or under zero.Init.
        loss_of: called once, with the model and the batch without values.
        batch: any nest of tensors and other values.
        device: on which the maths will run, so that torch takes that device's kernels.

    None: the code of the model, or `loss_of`, needs values, or raises anything.
    """
    mode = FakeTensorMode()

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        is_leaf = tensor.requires_grad and tensor.is_leaf
        with mode, torch._C.DisableTorchFunctionSubclass():
            return torch.empty(
                tensor.shape, dtype=tensor.dtype, device=device, requires_grad=is_leaf
            )

    weights = {name: without_values(param) for name, param in model.named_parameters()}
    buffers = {name: without_values(buffer) for name, buffer in model.named_buffers()}
    for weight in weights.values():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(_drop_gradient)
    given = tree_map(
        lambda value: without_values(value) if isinstance(value, torch.Tensor) else value, batch
    )
    run = _Run(model, loss_of, given)
    there = [*weights.values(), *buffers.values(), *tree_leaves(given)]
    states = {f"model.{name}": value for name, value in {**weights, **buffers}.items()}
    modules = list(model.modules())
    before = [dict(vars(module)) for module in modules]
    tables: list[dict[str, Any]] = [
        each for module in modules for each in (module._buffers, module._modules)
    ]
    held = [dict(table) for table in tables]
    _TORCH_LOGGER.addFilter(_drop_record)  # else it logs a traceback of what cannot run so
    try:
        with mode, _LiveBytes(each for each in there if isinstance(each, torch.Tensor)) as count:
            torch.func.functional_call(run, states, (count,))
    except Exception:  # of a model's own code, which needs values
        return None
    finally:
        _TORCH_LOGGER.removeFilter(_drop_record)
        # what a forward has kept on its modules has no values
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
        for table, entries in zip(tables, held, strict=True):
            table.clear()
            table.update(entries)
    return PredictedActivations(run.kept_bytes, count.peak_bytes, run.forward_flops)


class _Run(nn.Module):
    """The forward and the backward, which may compute blocks again, with the same weights."""

    def __init__(self, model: nn.Module, loss_of: LossOf, batch: Any) -> None:
        super().__init__()
        self.model = model
        self._loss_of = loss_of
        self._batch = batch
        self.kept_bytes = 0
        self.forward_flops = 0

    def forward(self, count: _LiveBytes) -> None:
        with torch.enable_grad(), FlopCounterMode(display=False) as flops:
            loss = self._loss_of(self.model, self._batch)
        self.forward_flops = flops.get_total_flops()
        self.kept_bytes = count.num_bytes
        loss.backward()


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that live. ignored: tensors that are not counted."""

    def __init__(self, ignored: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self.peak_bytes = 0
        self._storages = {tensor.untyped_storage()._cdata for tensor in ignored}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return output

    def _see(self, storage: torch.UntypedStorage) -> None:
        storage_id = storage._cdata
        if storage_id in self._storages:
            return
        num_bytes = storage.nbytes()
        self._storages.add(storage_id)
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._forget, storage_id, num_bytes)

    def _forget(self, storage_id: int, num_bytes: int) -> None:
        self._storages.discard(storage_id)
        self.num_bytes -= num_bytes


def _drop_record(_: object) -> bool:
    return False


def _drop_gradient(weight: torch.Tensor) -> None:
    weight.grad = None
