"""Marks: gradient hooks on input and output tensors of modules tell how far backward is; calls
outside graphs, transforms."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from tiermem.weights.absent import RestingView

# ---- functions outside torch.compile's graphs ----------------------------------------------------
#
# Hooks use files, queues and other ranks, which no graph can hold. `outside_graphs` keeps
# torch.compile from tracing them. `torch.compile(block)` and `block.compile()`, before or after
# sharding, then make one graph of a block's forward between its hooks; blocks of one class share
# it. Limits:
#
#     fullgraph=True     torch refuses it where hooks are inside: compile `block.forward`, as engine.compile() does
#     the whole model    has a graph break at every hook: compile blocks, which takes less time and gives the same graphs

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function, with all that it calls, as one that torch.compile calls without tracing it.

    The mark is set at the first call after torch._dynamo is imported: the compiler is 80 MiB of
    modules, and this does not import it.
    """
    marked: list[Callable[_P, _R]] = []

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not marked:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            marked.append(torch.compiler.disable(function))
        return marked[0](*args, **kwargs)

    # Each function gets its own code object: torch.compile allows eight versions of one code object
    # and then warns.
    call.__code__ = call.__code__.replace()
    return functools.wraps(function)(call)


def outside_transforms(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a function run outside the transforms of torch.func around its caller, which wrap each
    tensor that is made."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch._C._functorch.peek_interpreter_stack() is None:
            return function(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return call


# ---- marks ---------------------------------------------------------------------------------------
#
#     input tensors    their gradients come when no operation of the module's own backward is left
#     output tensors   their gradients come before any operation of the module's backward
#
# Autograd runs the operations that are ready in the reverse of the order in which they were
# recorded, so hooks on tensors are enough. No tensor is replaced and no operation is added:
# gradients add up in the order of the plain model, and inputs may be changed in place.
#
# A module without an input that requires gradients (token ids) gives no mark at its end. A module
# that shares all its inputs with others gives it late. For both, hooks.py looks at which modules
# began their backward since.

Owner = TypeVar("Owner")


_PLAIN = (str, bytes, int, float, complex, type(None))


def handed_over(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among a forward's arguments that require gradients, without parameters (which end
    the graph themselves)."""
    ends = (nn.Parameter, RestingView)
    return [
        t
        for t in tensors_in([*args, *kwargs.values()])
        if not isinstance(t, ends) and t.requires_grad
    ]


def handed_back(module: nn.Module, args: Any, kwargs: Any, output: Any) -> list[torch.Tensor]:
    """The tensors that a forward may have made: in its output, in containers that it was given, and
    on the module itself (losses that a trainer collects). A view that is changed in place
    afterwards leaves the graph. Its base does not, so the bases of views are among them."""
    given = [
        each for each in (*args, *kwargs.values()) if not isinstance(each, (torch.Tensor, *_PLAIN))
    ]
    kept = [each for each in vars(module).values() if isinstance(each, torch.Tensor)]
    return made_by(tensors_in([output, *given, *kept]))


def made_by(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that an operation has made, and the bases of those that are views."""
    made = [t for t in tensors if not isinstance(t, nn.Parameter) and t.grad_fn is not None]
    return made + [t._base for t in made if t._base is not None and t._base.grad_fn is not None]


def mark(
    tensors: list[torch.Tensor], owner: Owner, on_gradient: Callable[[Owner, torch.Tensor], None]
) -> None:
    """Calls `on_gradient` with the owner and the gradient when the gradient of one of the tensors
    is computed.

    The graph that made a tensor holds the owner. A leaf may live for many passes, so its hook holds
    the owner weakly and is removed with it.
    """
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.register_hook(lambda grad: on_gradient(owner, grad))
        else:
            handle = tensor.register_hook(WeakCall(owner, on_gradient))
            weakref.finalize(owner, handle.remove).atexit = False


class WeakCall(Generic[Owner]):
    """A hook that holds its owner weakly."""

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


def check_thread(computing: int) -> None:
    """Raises RuntimeError in a thread beside the one that computes with the model (its ident),
    while that one lives."""
    if computing == threading.get_ident() or in_backward():
        return
    if any(each.ident == computing for each in threading.enumerate()):
        raise RuntimeError(
            "a resting parameter is read in another thread than the one that computes with the "
            "model, whose fetches use "
            "the same buffers: read it in that thread, or take a copy there"
        )


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
    if isinstance(value, (tuple, list, set, frozenset, collections.deque)):
        inside: Any = value
    elif isinstance(value, (dict, Mapping)):  # dict first: asking an abstract class takes longer
        inside = value.values()
    else:
        inside = [*getattr(value, "__dict__", {}).values(), *_in_slots(value)]
    for each in list(inside):
        _collect(each, found, seen)


def _in_slots(value: Any) -> Iterator[Any]:
    """The values of an object's slots that are set."""
    for each in type(value).__mro__:
        for slot in vars(each).values() if "__slots__" in vars(each) else ():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):
                    yield slot.__get__(value)


class NoHooks:
    """The hooks of a copied module."""

    module = None

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Does nothing."""

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Does nothing."""
