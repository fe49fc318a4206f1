"""Admission: what a model may not hold, asked before a byte is moved.

    lazy parameters      have no shape yet: nothing can be planned
    sparse embeddings    their gradients are lists of rows, which are neither reduced nor stepped here (frozen ones are welcome)
    max_norm embeddings  they write weights in forward, where a copy may be; the master is not (frozen ones are welcome)
    complex parameters   no optimizer here steps them (frozen ones are welcome)

What depends on the policy (dtypes of masters, sizes of buffers) is asked where it is planned (plan.py, unit.py).
"""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["check_model"]


def check_model(model: nn.Module, is_trained: bool) -> None:
    """Raises ValueError for a model that cannot be partitioned, naming the parameter or module and what to change."""
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise ValueError(
                f"parameter {name!r} has no shape yet (a lazy module): call the model once before it is sharded"
            )
        if is_trained and param.requires_grad and param.is_complex():
            raise ValueError(
                f"parameter {name!r} is {param.dtype}, which no optimizer here steps: keep torch.view_as_real of it as the "
                "parameter and torch.view_as_complex that in forward, or freeze it"
            )
    for name, module in model.named_modules():
        if is_trained and isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.weight.requires_grad:
            _check_embedding(name, module)


def _check_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.sparse:
        raise ValueError(
            f"module {name!r} makes sparse gradients, which are neither reduced nor stepped here: build it with "
            "sparse=False, or freeze it"
        )
    if module.max_norm is not None:
        raise ValueError(
            f"module {name!r} has max_norm={module.max_norm}: it writes its weights in forward, where they are a copy of what "
            "is stepped, so that would be lost. Build it with max_norm=None and divide the rows that it looks up by their "
            "norms, or freeze it"
        )
