"""Marks on the tensors that enter and leave a module tell where backward is; functions outside torch.compile's graphs."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn

# ---- Outside graphs: what torch.compile must call rather than look into ----------------------------------------------
#
# Hooks touch files, queues and other ranks, which no graph can hold. Without the mark torch.compile tries every line of
# ours and says what it met there. With it, `torch.compile(block)` and `block.compile()`, before or after sharding, make
# one graph of a block's forward, which blocks of one class share, between its hooks. Limits:
#
#     fullgraph=True     is refused by torch where hooks are inside: compile `block.forward`, as engine.compile() does
#     the whole model    breaks into a graph between every two hooks: compile blocks, which is quicker and as good

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function as one that torch.compile calls as it is, with all that it calls.

    The compiler is 80 MiB of modules and is not imported for this: while it is not there, nothing can be compiled.
    """
    marked: list[Callable[_P, _R]] = []

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not marked:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            marked.append(torch.compiler.disable(function))
        return marked[0](*args, **kwargs)

    # A code of its own: torch.compile makes eight versions of one and then warns.
    call.__code__ = call.__code__.replace()
    return functools.wraps(function)(call)


# ---- Marks: how the tensors that enter and leave a module tell where backward is -------------------------------------
#
#     entering   their gradients come once nothing of the module's own backward is left to compute
#     leaving    their gradients come before anything of it is computed
#
# For autograd runs the operations that are ready in the reverse of the order in which they were recorded. Hooks on
# tensors are all that is needed: no tensor is replaced, no operation is added, so that gradients add up in the order of
# the plain model and inputs may be changed in place. Tensors are found wherever they are: in containers, ModelOutput,
# dataclasses, plain objects.
#
# A module that is given no tensor that requires gradients (token ids) tells nothing when it is done, and one that
# shares all its inputs with others tells late: hooks.py looks at what else has begun since.

Owner = TypeVar("Owner")


_PLAIN = (str, bytes, int, float, complex, type(None))


def handed_over(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Every tensor that a gradient flows through among the arguments of a forward; parameters are their own ends."""
    return [t for t in tensors_in([args, kwargs]) if not isinstance(t, nn.Parameter) and t.requires_grad]


def handed_back(module: nn.Module, args: Any, kwargs: Any, output: Any) -> list[torch.Tensor]:
    """Every tensor that a forward may have made: in its output, in what it was given to fill or to change, and on the module
    itself (losses that a trainer collects). A view that is changed in place afterwards leaves the graph; what it is a view of
    does not, and is among them."""
    given = [each for each in (*args, *kwargs.values()) if not isinstance(each, (torch.Tensor, *_PLAIN))]
    kept = [each for each in vars(module).values() if isinstance(each, torch.Tensor)]
    return made_by(tensors_in([output, given, kept]))


def made_by(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those that an operation has made, and what they are views of."""
    made = [t for t in tensors if not isinstance(t, nn.Parameter) and t.grad_fn is not None]
    return made + [t._base for t in made if t._base is not None and t._base.grad_fn is not None]


def mark(tensors: list[torch.Tensor], owner: Owner, on_gradient: Callable[[Owner, torch.Tensor], None]) -> None:
    """Calls `on_gradient` with the owner and the gradient of each tensor when it comes.

    The graph that made a tensor holds the owner. A leaf may outlive many passes: it forgets when the owner has gone.
    """
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.register_hook(lambda grad: on_gradient(owner, grad))
        else:
            handle = tensor.register_hook(WeakCall(owner, on_gradient))
            weakref.finalize(owner, handle.remove).atexit = False


class WeakCall(Generic[Owner]):
    """A hook that does not hold its owner."""

    def __init__(self, owner: Owner, on_gradient: Callable[[Owner, torch.Tensor], None]) -> None:
        self._owner = weakref.ref(owner)
        self._on_gradient = on_gradient

    def __call__(self, grad: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            self._on_gradient(owner, grad)


def in_backward() -> bool:
    """Whether autograd computes a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class EndOfBackward:
    """What torch calls when a backward has ended. It forgets it, uncalled, when that ends in an exception."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __call__(self) -> None:
        self._on_end()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a value: in nested containers, ModelOutput, dataclasses and plain objects."""
    found: list[torch.Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    if isinstance(value, _PLAIN) or callable(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (tuple, list, set, frozenset)):
        inside: Any = value
    elif isinstance(value, Mapping):
        inside = value.values()
    else:
        inside = vars(value).values() if hasattr(value, "__dict__") else ()
    for each in list(inside):
        _collect(each, found, seen)
