"""Hooks: how a model's own forward and backward tell which units they need, and when they have done with them.

Only hooks that torch offers are used. For every module that triggers units:

    before forward   its units are made present and held
    after forward    they are let go, unless backward is at work (activation checkpointing computes forward again inside it)
    before backward  when the gradient of an output arrives: present and held again
    after backward   when the gradients of all inputs that need one have been computed: answered; the unit's own parameters
                     have their gradients then, since autograd accumulates those first

Each forward with gradients makes a *use*, held by the autograd graph alone: a graph that is thrown away (an exception, an
evaluation without backward) takes its uses with it. Reentrant checkpointing runs forward without gradients first; that is
a *promise* of a use, made when backward computes forward again. When no use of a unit is left unanswered, and none promised,
its gradients are final; what is left when backward ends (inputs without gradients, such as token ids) is finished there.
Gradients add up at home, so a use that is answered late costs time, never correctness.

When backward has asked for a unit and no further read of parameters is expected, `on_last_read` is called: from then on the
disk would be idle, and whoever has something to read for the step may begin. Earlier, such reads would stand in the way
of fetches that somebody waits for, and could fetch no more, since what they fill is a fixed number of buffers. It may be
called again in the same backward, and for every micro-batch; it is called at the end of backward in any case.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from tiermem.zero.grads import GradientHomes
from tiermem.zero.residency import LiveUnit, Residency


class Use:
    """One forward of a module with gradients: which units it needs again, and whether backward has asked for them."""

    def __init__(self, units: list[LiveUnit]) -> None:
        self.units = units
        self.is_held = False
        self.is_answered = False


class Hooks:
    """Installs hooks on a model and turns them into `ensure`, `release` and `receive`.

    Args:
        root: the model.
        triggers: its modules that need units, with them.
        units: all of them.
        residency: makes units present.
        homes: receives gradients.
    """

    def __init__(
        self,
        root: nn.Module,
        triggers: dict[nn.Module, list[LiveUnit]],
        units: list[LiveUnit],
        residency: Residency,
        homes: GradientHomes,
    ) -> None:
        self._units = units
        self._residency = residency
        self._homes = homes
        self._uses: dict[int, weakref.WeakSet[Use]] = {u.unit.index: weakref.WeakSet() for u in units}
        self._held: list[Use] = []  # asked for by the backward under way
        self._promised: dict[int, int] = dict.fromkeys(self._uses, 0)  # uses that reentrant checkpointing will make
        self._is_training_pass = False  # the root's forward is under way and began with gradients
        self._is_backward = False  # its end is being watched
        self.may_receive: Callable[[], bool] = lambda: True  # False: autograd goes on adding to p.grad
        self.on_last_read: Callable[[], None] = lambda: None
        self._handles: list[RemovableHandle] = []
        for module, needed in triggers.items():
            self._install(module, needed)
        self._handles.append(root.register_forward_pre_hook(self._begin_pass, prepend=True))
        self._handles.append(root.register_forward_hook(self._end_pass))

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "a sharded model cannot be copied or pickled: its weights rest elsewhere. Use model.state_dict(), which gathers "
            "them, or close the shards with materialize=True first"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__deepcopy__(None)

    def remove(self) -> None:
        """Takes every hook off the model."""
        while self._handles:
            self._handles.pop().remove()

    # ---- forward ---------------------------------------------------------------------------------------------------------

    def enter(self, needed: list[LiveUnit], args: Any, kwargs: Any) -> tuple[Any, Any, Use | None]:
        """A module's forward begins: its units are made present; its inputs are marked when gradients will flow."""
        for live in needed:
            live.num_users += 1
            self._residency.ensure(live)
        if not torch.is_grad_enabled():
            if self._is_training_pass:
                self._promise(needed, 1)
            return args, kwargs, None
        if _in_backward():
            self._promise(needed, -1)
        use = Use(needed)
        for live in needed:
            self._uses[live.unit.index].add(use)
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if places:
            marked = _AfterBackward.apply(self, use, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
            for i, tensor in zip(places, marked, strict=True):
                leaves[i] = tensor
            args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs, use

    def leave(self, needed: list[LiveUnit], use: Use | None, output: Any) -> None:
        """A module's forward has ended, perhaps in an exception: its units are let go until backward asks for them."""
        for live in needed:
            live.num_users = max(0, live.num_users - 1)
            if not _in_backward():
                self._residency.release(live)
        if use is not None:
            for tensor in _tensors(output):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(lambda grad: self._hold(use))

    def _install(self, module: nn.Module, needed: list[LiveUnit]) -> None:
        hooks = _ModuleHooks(self, needed)
        self._handles.append(module.register_forward_pre_hook(hooks.before_forward, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(hooks.after_forward, always_call=True))

    def _begin_pass(self, module: nn.Module, args: Any) -> None:
        if _in_backward():
            return
        self._abandon_backward()
        for live in self._units:
            live.num_users = 0
        self._is_training_pass = torch.is_grad_enabled()
        has_backward = torch.is_grad_enabled() and module.training
        self._residency.order.begin((has_backward, module.training), has_backward)

    def _end_pass(self, module: nn.Module, args: Any, output: Any) -> None:
        self._is_training_pass = False
        for tensor in _tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: self._watch_backward())

    def _promise(self, needed: list[LiveUnit], change: int) -> None:
        for live in needed:
            self._promised[live.unit.index] = max(0, self._promised[live.unit.index] + change)

    # ---- backward ----------------------------------------------------------------------------------------------------------

    def answer(self, use: Use) -> None:
        """A use's backward has been computed: its units are let go, and their gradients received if they are final."""
        use.is_answered = True
        if use in self._held:
            self._held.remove(use)
        for live in use.units:
            self._uses[live.unit.index].discard(use)
        self._let_go(use)
        for live in use.units:
            is_final = not self._uses[live.unit.index] and not self._promised[live.unit.index]
            if live.unit.is_trainable and is_final and self.may_receive():
                self._homes.receive(live.unit)

    def finish_backward(self) -> None:
        """Receives what is left of gradients and lets every held unit go. Runs by itself at the end of backward."""
        self._is_backward = False
        self._promised = dict.fromkeys(self._promised, 0)
        while self._held:
            self.answer(self._held[-1])
        for live in self._units:
            if live.unit.is_trainable:
                if self.may_receive():
                    self._homes.receive(live.unit)
                self._homes.show(live.unit)
        self.on_last_read()

    def _hold(self, use: Use) -> None:
        self._watch_backward()
        if use.is_held:
            return
        use.is_held, use.is_answered = True, False  # answered before: the graph was retained, or an output came late
        for live in use.units:
            self._uses[live.unit.index].add(use)
        self._held.append(use)
        for live in use.units:
            live.num_users += 1
            self._residency.ensure(live)
        if not self._residency.expects_reads():
            self.on_last_read()

    def _let_go(self, use: Use) -> None:
        if use.is_held:
            use.is_held = False
            for live in use.units:
                live.num_users = max(0, live.num_users - 1)
                self._residency.release(live)

    def _watch_backward(self) -> None:
        """At the first sign of a backward: clears the way for autograd's gradients and asks to be told of its end."""
        if self._is_backward:
            return
        self._is_backward = True
        for live in self._units:
            if live.unit.is_trainable:
                self._homes.hide(live.unit)
        torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)

    def _abandon_backward(self) -> None:
        """After a backward that ended in an exception: nothing of it is waited for any more."""
        self._is_backward = False
        for use in self._held:
            self._let_go(use)
        self._held.clear()


class _ModuleHooks:
    """The two forward hooks of one module; carries the use from the first to the second."""

    def __init__(self, hooks: Hooks, needed: list[LiveUnit]) -> None:
        self._hooks = hooks
        self._needed = needed
        self._uses: list[Use | None] = []  # of forwards under way (a module may call itself)

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._uses.append(None)
        args, kwargs, self._uses[-1] = self._hooks.enter(self._needed, args, kwargs)
        return args, kwargs

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hooks.leave(self._needed, self._uses.pop() if self._uses else None, output)


class _AfterBackward(torch.autograd.Function):
    """Identity on a module's inputs; its backward runs when the module's own backward has been computed."""

    @staticmethod
    def forward(ctx: Any, hooks: Hooks, use: Use, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks, ctx.use = hooks, use
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.hooks.answer(ctx.use)
        return (None, None, *grads)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _tensors(output: Any) -> list[torch.Tensor]:
    """Every tensor in an output: nested containers, ModelOutput, dataclasses and plain objects."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (str, bytes, int, float, type(None), nn.Module)):
        return []
    if isinstance(output, Mapping):
        return [t for value in output.values() for t in _tensors(value)]
    if isinstance(output, (list, tuple, set)):
        return [t for value in output for t in _tensors(value)]
    return [t for value in vars(output).values() for t in _tensors(value)] if hasattr(output, "__dict__") else []
