"""Hooks: how a model's own forward and backward tell which units they need, and when they have done with them.

Only hooks that torch offers are used. For every module that triggers units:

    before forward   its units are made present and held
    after forward    they are let go, unless backward is at work (activation checkpointing computes forward again inside it)
    before backward  when the gradient of an output arrives: present and held again
    after backward   when the gradient of an input comes, or that of the output of a module that ran before (marks.py says why
                     everything in between has been computed then): answered; the unit's own parameters have their
                     gradients, since autograd accumulates those at once

Each forward with gradients makes a *use* (uses.py), which backward answers. When none of a unit is left unanswered its
gradients are final; what is left when backward ends (inputs without gradients, such as token ids) is finished there.
Gradients add up at home, so a use that is answered late costs time, never correctness.

When backward has asked for a unit and no further read of parameters is expected, `on_last_read` is called: from then on the
disk would be idle, and whoever has something to read for the step may begin. Earlier, such reads would stand in the way
of fetches that somebody waits for, and could fetch no more, since what they fill is a fixed number of buffers. It may be
called again in the same backward, and for every micro-batch; it is called at the end of backward in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiermem.zero.gradients.grads import GradientHomes
from tiermem.zero.marks import handed_back, handed_over, made_by, mark, tensors_in
from tiermem.zero.outside_graphs import outside_graphs
from tiermem.zero.uses import Use, Uses, reads_weights_again
from tiermem.zero.weights.residency import LiveUnit, Residency
from tiermem.zero.weights.resting import RestingParameter


class Frame:
    """A forward under way: its use, and the units that it has borrowed until it ends (of parameters of other modules)."""

    def __init__(self, needed: Sequence[LiveUnit], use: Use | None) -> None:
        self.needed = needed
        self.use = use
        self.borrowed: list[LiveUnit] = []


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
        self._root = root
        self._units = units
        self._residency = residency
        self._recorder = residency.recorder
        self._homes = homes
        self._uses = Uses(units)
        self._held: list[Use] = []  # asked for by the backward under way
        self._frames: list[Frame] = []  # forwards under way, the innermost last
        self._returned: list[LiveUnit] = []  # of parameters that the root has returned; held until backward has ended
        self._is_training_pass = False  # the root's forward is under way and began with gradients
        self._is_backward = False  # its end is being watched
        self._watched = -1  # torch's number of the backward whose end is being watched
        self._num_backwards = 0  # begun
        self._clock = 0  # counts forwards that begin and end
        self.may_receive: Callable[[], bool] = lambda: True  # False: autograd goes on adding to p.grad
        self.on_last_read: Callable[[], None] = lambda: None
        self._handles: list[RemovableHandle] = []
        self._by_module: dict[nn.Module, list[LiveUnit]] = {}
        self._by_param = {id(shard.param): live for live in units for shard in live.unit.shards}
        self._handles.append(root.register_forward_pre_hook(self._begin_pass, prepend=True))
        for module, needed in triggers.items():
            for live in needed:
                self.add_need(module, live)
        self._handles.append(root.register_forward_hook(self._end_pass, with_kwargs=True, always_call=True))

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

    def add_need(self, module: nn.Module, live: LiveUnit) -> bool:
        """A module's forward needs a unit from now on; False if it did already."""
        if module not in self._by_module:
            needed = self._by_module[module] = []
            hooks = _ModuleHooks(self, needed)
            is_first = module is not self._root  # whose pass begins before it needs anything
            handle = module.register_forward_pre_hook(hooks.before_forward, prepend=is_first, with_kwargs=True)
            self._handles.append(handle)
            after = module.register_forward_hook(hooks.after_forward, with_kwargs=True, always_call=True)
            self._handles.append(after)
        if live in self._by_module[module]:
            return False
        self._by_module[module].append(live)
        return True

    def drop_need(self, module: nn.Module, live: LiveUnit) -> None:
        """A module's forward does without a unit from now on."""
        self._by_module[module].remove(live)

    # ---- forward ---------------------------------------------------------------------------------------------------------

    def enter(self, needed: Sequence[LiveUnit], args: Any, kwargs: Any, reads_again: bool = True) -> Frame:
        """A forward begins: its units are made present; its inputs are marked when gradients will flow."""
        frame = Frame(tuple(needed), None)
        for live in frame.needed:
            live.hold()
            self._residency.ensure(live)
        self._frames.append(frame)
        if not torch.is_grad_enabled():
            if self._is_training_pass:
                self._uses.promise(frame.needed, 1)
            return frame
        if _in_backward():
            self._uses.promise(frame.needed, -1)
        use = frame.use = Use(frame.needed, reads_again)
        use.entered = self._tick()
        self._uses.add(use)
        given = handed_over(args, kwargs)
        mark([tensor for tensor in given if tensor.grad_fn is not None], use, self._computed)
        mark([tensor for tensor in given if tensor.grad_fn is None], use, self._computed_to_a_leaf)
        return frame

    def leave(self, frame: Frame, made: list[torch.Tensor]) -> None:
        """A forward has ended, perhaps in an exception: its units are let go until backward asks for them.

        `made` are the tensors that it handed back.
        """
        while self._frames and self._frames.pop() is not frame:
            pass  # frames above were left by an exception
        for live in (*frame.needed, *frame.borrowed):
            live.let_go()
            if not _in_backward():
                self._residency.release(live)
        if frame.use is not None and frame.use.units:
            frame.use.left = self._tick()
            self._record("forward", frame.use)
            mark(made, frame.use, self._hold)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    @outside_graphs
    def _begin_pass(self, module: nn.Module, args: Any) -> None:
        if _in_backward():
            return
        self._abandon_backward()
        self._frames = [Frame((), Use(()) if torch.is_grad_enabled() else None)]
        for live in self._units:
            if live.num_users:
                live.let_all_go()
        self._is_training_pass = torch.is_grad_enabled()
        has_backward = torch.is_grad_enabled() and module.training
        self._residency.begin_pass((has_backward, module.training), has_backward)

    @outside_graphs
    def _end_pass(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        made = handed_back(module, args, kwargs, output)
        if not _in_backward():
            self._is_training_pass = False
            if self._frames:
                self.leave(self._frames[0], made)
        for tensor in tensors_in(output):
            if type(tensor) is RestingParameter and id(tensor) in self._by_param:
                self._keep(self._by_param[id(tensor)])
        mark(made, self, Hooks._see_backward)
        if not _in_backward() and not torch.is_grad_enabled():
            self._residency.end_pass()  # of an evaluation: no step follows that would change weights

    # ---- parameters of other modules -------------------------------------------------------------------------------------

    @property
    def may_lend(self) -> bool:
        """Whether a forward or a backward is at work, so that every rank will ask for the same."""
        return bool(self._frames) or _in_backward()

    def lend(self, params: Sequence[nn.Parameter], func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of torch's with resting parameters brought back: see external.py."""
        needed = list({self._by_param[id(p)].unit.index: self._by_param[id(p)] for p in params}.values())
        frame = self.enter(needed, args, kwargs)
        output = None
        try:
            output = func(*args, **kwargs)
        finally:
            made = tensors_in(output)
            for live in needed:
                if any(live.memory.sees(tensor) for tensor in made):
                    self._lend_to(self._frames[-2] if len(self._frames) > 1 else None, live)
            self.leave(frame, made_by(made))
        return output

    def borrow(self, live: LiveUnit) -> None:
        """Makes a unit present for as long as the innermost forward runs, and for its backward."""
        self._lend_to(self._frames[-1] if self._frames else None, live)

    def _lend_to(self, frame: Frame | None, live: LiveUnit) -> None:
        if frame is None:
            use = Use([live])  # backward is at work: until it ends
            use.left = self._tick()
            self._hold(use)
            return
        live.hold()
        self._residency.ensure(live)
        frame.borrowed.append(live)
        if frame.use is not None:
            self._uses.extend(frame.use, live)

    def _keep(self, live: LiveUnit) -> None:
        """The root has returned a parameter: its unit stays until backward has ended, or the next pass begins."""
        live.hold()
        self._residency.ensure(live)
        self._returned.append(live)

    # ---- backward ----------------------------------------------------------------------------------------------------------

    def answer(self, use: Use) -> None:
        """A use's backward has been computed: its units are let go, and their gradients received if they are final."""
        use.answered_in = self._num_backwards
        self._uses.answer(use)
        self._let_go(use)
        with torch._C.DisableTorchFunctionSubclass():  # asking resting parameters for their gradients is quicker so
            for live in use.units:
                if live.unit.is_trainable and self._uses.is_final(live) and self.may_receive():
                    self._homes.receive(live.unit)

    def check_backward_ended(self) -> None:
        """Raises RuntimeError before a step of gradients that an exception has cut short; they are forgotten."""
        if self._is_backward:
            self._abandon_backward()
            raise RuntimeError(
                "the last backward ended in an exception, so the gradients are those of a part of the model. They are "
                "forgotten: run forward and backward again before the step"
            )

    def finish_backward(self) -> None:
        """Receives what is left of gradients and lets every held unit go. Runs by itself at the end of backward."""
        self._is_backward = False
        self._uses.forget_promises()
        while self._held:
            self.answer(self._held[-1])
        while self._returned:
            live = self._returned.pop()
            live.let_go()
            self._residency.release(live)
        with torch._C.DisableTorchFunctionSubclass():
            if self.may_receive():
                self._homes.finish()
            for live in self._units:
                if live.unit.is_trainable:
                    self._homes.show(live.unit)
        self.on_last_read()

    def _hold(self, use: Use, grad: torch.Tensor | None = None) -> None:
        """The gradient of a tensor that a forward handed back has come."""
        self._watch_backward()
        if use.is_held or use.answered_in == self._num_backwards:
            return
        for later in [other for other in self._held if other.entered > use.left]:
            self.answer(later)  # what was recorded after this forward has been computed
        use.is_held = True
        if grad is not None and grad.requires_grad:  # a backward through this one needs the units until it is back here
            mark([grad], use, self._come_back)
        self._uses.add(use)
        self._held.append(use)
        for live in use.needed_again:
            live.hold()
            self._residency.ensure(live)
        use.start_ns = time.monotonic_ns()
        if not self._residency.expects_reads():
            self.on_last_read()

    def _computed(self, use: Use, grad: torch.Tensor) -> None:
        """The gradient of a tensor that was handed to a forward has come."""
        if use.answered_in != self._num_backwards:
            self.answer(use)
        if grad.requires_grad:  # a backward through this one begins here
            mark([grad], use, self._hold)

    def _computed_to_a_leaf(self, use: Use, grad: torch.Tensor) -> None:
        """The gradient of a leaf has come, in no order with those of the parameters used beside it.

        Reentrant checkpointing makes its inputs leaves of a backward of their own; at its end all are there.
        """
        if torch._C._current_graph_task_id() == self._watched:
            self._computed(use, grad)
        else:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._computed(use, grad))

    def _come_back(self, use: Use, grad: torch.Tensor) -> None:
        """A backward through a backward has left the forward's operations."""
        self._let_go(use)

    def _let_go(self, use: Use) -> None:
        if use.is_held:
            use.is_held = False
            self._held.remove(use)
            self._record("backward", use)
            for live in use.needed_again:
                live.let_go()
                self._residency.release(live)

    def _see_backward(self, grad: torch.Tensor) -> None:
        self._watch_backward()

    def _record(self, phase: str, use: Use) -> None:
        end_ns = time.monotonic_ns()
        for live in use.units:
            self._recorder.add("unit", f"{phase} {live.unit.name}", use.start_ns, end_ns)

    def _watch_backward(self) -> None:
        """At the first sign of a backward: clears the way for autograd's gradients and asks to be told of its end."""
        if self._is_backward:
            return
        self._is_backward = True
        self._watched = torch._C._current_graph_task_id()
        self._num_backwards += 1
        with torch._C.DisableTorchFunctionSubclass():
            self._homes.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)

    def _abandon_backward(self) -> None:
        """After a backward that ended in an exception: nothing of it is waited for any more, and no gradient is kept."""
        if self._is_backward:
            self._homes.abandon()
        self._is_backward = False
        while self._held:
            self._let_go(self._held[-1])
        self._returned.clear()


class _ModuleHooks:
    """The two forward hooks of one module; carries the use from the first to the second."""

    def __init__(self, hooks: Hooks, needed: list[LiveUnit]) -> None:
        self._hooks = hooks
        self._needed = needed
        self._frames: list[Frame | None] = []  # of forwards under way (a module may call itself)

    @outside_graphs
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._frames.append(None)
        self._frames[-1] = self._hooks.enter(self._needed, args, kwargs, reads_weights_again(module))

    @outside_graphs
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        frame = self._frames.pop() if self._frames else None
        if frame is not None:
            self._hooks.leave(frame, handed_back(module, args, kwargs, output) if frame.use is not None else [])


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
