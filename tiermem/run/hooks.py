"""Hooks: find out from a model's own forward and backward which units are needed, and when they are
needed no more.

Only hooks that torch offers are used. For every module that needs units:

    before forward   its units are made present and held
    after forward    its units are released, unless backward runs (activation checkpointing repeats forward inside backward)
    before backward  the gradient of an output has come: the units are made present and held again
    after backward   the gradient of an input has come, or of the output of a module that ran before: the use is *answered*.
                     All operations in between have been computed then (backward_marks.py). The
                     unit's own parameters have their gradients, since autograd accumulates those at
                     once

Each forward with gradients makes a *use* (prefetcher.py), which backward answers. A unit's
gradients are final when it has no unanswered use, on any rank that reduces them with this one. A
use that is still unanswered when backward ends (its inputs are token ids, for example) is answered
there. Gradients accumulate where they rest, so a late answer costs time, never correctness.

Any module of the tree may be called by itself, any number of times:

    a module that triggers units            needs these units, from any caller
    a module inside such a module           needs the units of its own parameters. Its hooks are removed while the module around
                                            it runs, which holds these units (torch.compile then
                                            sees the module without hooks)
    a module around such modules            needs the units of its own parameters alone. Its call shows where a pass begins, and
                                            its output shows backward
    a parameter that is always present      needs no module: a hook on the parameter shows that a backward has begun

An exception that torch does not show to hooks (KeyboardInterrupt, SystemExit, CancelledError)
leaves frames of a forward. They are dropped when the call that began it is on no thread's stack any
more. One that ends a hook leaves the prefetcher's mark, or that of the backward. `recover` then
makes every unit absent before the next pass, step or close.

The function `on_backward` is called when a backward begins, after the last step has ended: reads
for the next step may begin then. They are behind all other transfers, so that they take the disk
only when it is idle.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from tiermem.gradients.gradients import GradientHomes, lost_gradients
from tiermem.run.activations import Activations
from tiermem.run.memory_errors import MemoryErrors
from tiermem.swap.store.store import TensorStore
from tiermem.units.experts import MOST_SHARE, expected_share
from tiermem.units.registry import Uncopied
from tiermem.units.unit import reads_weights_again
from tiermem.weights import backward_marks as marks
from tiermem.weights.absent import RestingParameter, RestingView, without_loans
from tiermem.weights.prefetcher import Frame, Prefetcher, UnitUse, Uses
from tiermem.weights.step_run import StepRun
from tiermem.weights.unit_state import LiveUnit, needed_by_module, reset_all

logger = logging.getLogger("tiermem")


class Hooks(Uncopied):
    """Installs hooks on a model. They call the prefetcher's `acquire` and `release`, and `receive`
    of the gradient homes.

    Args:
        root: the model.
        triggers: the modules that need units, each with its units.
        units: all units.
        prefetcher: makes units present.
        homes: receives gradients.
        steps: the step that may be under way when a backward begins, and is durable afterwards
            where that is due.
        store: its recorder gets an event for every forward and backward of a unit.
        activations: moves what checkpoints save; None: it stays.
        memory_errors: explains that the device has no memory left.
    """

    def __init__(
        self,
        root: nn.Module,
        triggers: dict[nn.Module, list[LiveUnit]],
        units: list[LiveUnit],
        prefetcher: Prefetcher[LiveUnit],
        homes: GradientHomes,
        steps: StepRun,
        store: TensorStore,
        activations: Activations | None,
        memory_errors: MemoryErrors,
    ) -> None:
        self._root = root
        self.memory_errors = memory_errors
        self._steps = steps
        self.activations = activations
        self._units = units
        self.prefetcher = prefetcher
        self._store = store
        self._homes = homes
        self._uses = Uses(units, homes.any_of if homes.reduces_when_final else None)
        # in their order: uses whose units the backward under way holds
        self._held: dict[UnitUse, None] = {}
        self._frames: list[Frame] = []  # forwards under way, the innermost last
        # At most one: the outermost forward under way. A dict, since `setdefault` is one step.
        self._call: dict[str, _Call] = {}
        self._is_joined = False  # inside `joined`
        # units of parameters that the model returned; held until backward ends
        self._returned: list[LiveUnit] = []
        self._leader: nn.Module | None = None  # the module whose call began the pass
        self._pass_kind: tuple[bool, bool] | None = None
        self._trains_by_rows = True  # the last pass with gradients used few experts
        self.thread = threading.get_ident()  # the thread that computes
        # whether the outermost forward under way began with gradients
        self._is_training_pass = False
        # called at the end of the backward under way
        self._ending: weakref.ref[Callable[[], None]] | None = None
        self._watched = -1  # torch's number of the backward whose end calls `finish_backward`
        self.num_backwards = 0  # backwards that have begun
        # in `p.grad`: the last backward was not to receive them (`receive_if`)
        self.has_left_gradients = False
        self._clock = itertools.count(1)  # of begins and ends of forwards
        # False: autograd continues to add to p.grad
        self._may_receive: Callable[[], bool] = lambda: True
        # called when a backward begins: see the module's docstring
        self.on_backward: Callable[[], None] = lambda: None
        # called before an outermost forward with gradients; it may raise, then nothing has begun
        self.on_training: Callable[[], None] = lambda: None
        self._handles: list[RemovableHandle] = []
        self._by_param = {id(shard.param): live for live in units for shard in live.unit.shards}
        # ids of parameters whose gradients show that a backward has begun
        self._seen_params: set[int] = set()
        needed_by = needed_by_module(root, triggers, self._by_param)
        self._by_module = {
            module: _ModuleHooks(
                self, module, needed, is_inner=bool(needed) and module not in triggers
            )
            for module, needed in needed_by.items()
        }
        for module, hooks in self._by_module.items():
            inside = (self._by_module.get(each) for each in module.modules() if each is not module)
            hooks.covers([each for each in inside if each is not None and each.is_inner])
        for live in units:
            self.watch_gradients(live)

    def remove(self) -> None:
        """Removes every hook from the model, and ends transfers of activations. Blocks for them."""
        for hooks in self._by_module.values():
            hooks.remove()
        while self._handles:
            self._handles.pop().remove()
        if self.activations is not None:
            self.activations.close()

    def add_need(self, module: nn.Module, live: LiveUnit) -> bool:
        """Registers that a module's forward needs a unit; returns False if it was registered
        already."""
        if module not in self._by_module:
            self._by_module[module] = _ModuleHooks(self, module, [], is_inner=False)
        hooks = self._by_module[module]
        if live in hooks.needed:
            return False
        hooks.needed.append(live)
        for each in self._by_module.values():
            each.uncover(hooks)
        hooks.reset()
        return True

    def drop_need(self, module: nn.Module, live: LiveUnit) -> None:
        """Removes a registration that a module's forward needs a unit."""
        self._by_module[module].needed.remove(live)

    def watch_gradients(self, live: LiveUnit) -> None:
        """Watches the gradients of a trainable unit."""
        for param in (shard.param for shard in live.unit.shards):
            if not live.is_streamed:
                self.see_gradient_of(live, param)
            # noted twice is noted once
            if live.memory.has_streams and live.unit.is_trainable and param.requires_grad:
                note = marks.WeakCall(live, lambda live, param: live.memory.note_gradient())
                self._handles.append(param.register_post_accumulate_grad_hook(note))

    def see_gradient_of(self, live: LiveUnit, param: nn.Parameter) -> None:
        """Watches a parameter's gradient, which may be the only sign that a backward has begun."""
        if live.unit.is_trainable and param.requires_grad and id(param) not in self._seen_params:
            self._seen_params.add(id(param))
            # Weak, because torch keeps hooks of parameters where the garbage collector does not
            # look.
            see = marks.WeakCall(self, Hooks.watch_backward)
            self._handles.append(param.register_hook(unserializable_hook(see)))

    # ---- forward ---------------------------------------------------------------------------------

    def enter(
        self, needed: Sequence[LiveUnit], args: Any, kwargs: Any, reads_again: bool = True
    ) -> Frame:
        """Begins a forward whose units are present: marks its inputs when gradients will flow."""
        frame = Frame(tuple(needed))
        self._frames.append(frame)
        if not torch.is_grad_enabled():
            if self._is_training_pass:
                self._uses.promise(frame.needed, 1)
            return frame
        in_backward = marks.in_backward()
        if in_backward:
            self._uses.promise(frame.needed, -1)
        use = frame.use = UnitUse(frame.needed, reads_again)
        if not in_backward:
            self._uses.count(use)
        if not frame.needed:
            return frame
        use.entered = next(self._clock)
        self._uses.add(use)
        given = marks.handed_over(args, kwargs)
        marks.mark([tensor for tensor in given if tensor.grad_fn is not None], use, self._computed)
        marks.mark(
            [tensor for tensor in given if tensor.grad_fn is None], use, self._computed_to_a_leaf
        )
        return frame

    def leave(self, frame: Frame, made: list[torch.Tensor]) -> None:
        """Ends a forward, also one that raised: releases its units until backward asks for them.

        made: the tensors that the forward returned.
        """
        while self._frames and self._frames.pop() is not frame:
            pass  # an exception left the frames above
        if frame.use is not None:
            frame.use.keep_whole()
        for live in (*frame.needed, *frame.borrowed):
            self.prefetcher.release(live, may_evict=not marks.in_backward())
        if frame.use is not None and frame.use.units:
            frame.use.left = next(self._clock)
            frame.use.changes = {live: live.num_changes for live in frame.use.units}
            self._record("forward", frame.use)
            marks.mark(made, frame.use, self._hold)

    def is_outermost(self) -> bool:
        """Whether a call of a module that begins now is the outermost one, outside backward.

        Raises RuntimeError while another thread is in a forward or a backward of the model.
        """
        if marks.in_backward():
            return False
        is_in_backward = self._ending is not None and self._ending() is not None
        if self._is_joined and is_in_backward:
            return False
        if is_in_backward and self.is_foreign and _is_alive(self.thread):
            raise _in_another_thread("backward")
        found = self._call.get("outermost")
        if found is None:
            own = _Call.of_now()
            found = self._call.setdefault("outermost", own)
            if found is own:
                return True
        if found.is_under_way:
            if found.thread != threading.get_ident():
                raise _in_another_thread("forward")
            return False
        self._call["outermost"] = _Call.of_now()
        return True

    @property
    def is_foreign(self) -> bool:
        """Whether this thread is another one than that of the last pass, and not one of a
        backward."""
        return self.thread != threading.get_ident() and not marks.in_backward()

    def recover(self) -> None:
        """Before a call of the user: completes what an interrupt has left half-way. Blocks; raises
        OSError of a step.

        Does nothing inside a forward or a backward, nor if all is well.
        """
        if (
            marks.in_backward()
            or not (self._frames or self.prefetcher.is_changing)
            or self.may_lend
        ):
            return
        self._drop_frames()
        self._recover_units()

    def _recover_units(self) -> None:
        if self.prefetcher.is_changing:
            self._homes.check_alone()
            self._steps.finish_tiles()  # it may write to a buffer of a unit
            self.prefetcher.recover(functools.partial(reset_all, self._units))

    def begin_outermost(self, module: nn.Module) -> bool:
        """Begins the outermost call. Returns whether it begins a pass; then the prefetcher has to
        start fetching.

        A pass continues while its modules are called one after the other. It ends when the module
        that began it, or the model, is called again, or when a module is called in another mode.
        """
        self.thread = threading.get_ident()
        self.abandon_backward()
        self._drop_frames()
        self.recover()
        self._steps.check_whole()
        self._steps.check_loaded()
        for live in self._units:
            if live.num_users:
                live.let_all_go()
        self._is_training_pass = torch.is_grad_enabled()
        if self._is_training_pass:
            self.on_training()
        if module is self._root and not self._by_module[module].needed:
            self._uses.end_run()  # every rank calls it
        kind = (self._is_training_pass and module.training, module.training)
        order = self.prefetcher.order
        if (
            module not in (self._root, self._leader)
            and kind == self._pass_kind
            and not order.is_long
        ):
            return False
        self._leader = module
        self._pass_kind = kind
        self._expect_rows(self._trains_by_rows or not self._is_training_pass)
        self._store.check_process()
        self._store.on_device.check_there("param/")
        if self._is_training_pass:
            self._homes.adopt(self._root)
        order.begin(kind, has_backward=kind[0])
        return True

    def end_outermost(
        self, module: nn.Module, frame: Frame, output: Any, made: list[torch.Tensor]
    ) -> None:
        """Ends the outermost call, also one that raised."""
        if self.activations is not None:
            self.activations.end()
        self._is_training_pass = False
        for tensor in marks.tensors_in(output):
            if type(tensor) is RestingParameter and id(tensor) in self._by_param:
                self.acquire_whole(live := self._by_param[id(tensor)])
                self._returned.append(live)
        if frame.use is not None and not frame.use.units:
            marks.mark(made, self, Hooks.watch_backward)
        if module is self._root and not torch.is_grad_enabled() and not self.prefetcher.is_changing:
            # of an evaluation: weights do not change before the next pass
            self._expect_rows(True)  # a token may follow a prompt
            self.prefetcher.end_pass()
        self._call.clear()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Joins all forwards and backwards in the block to one pass and one backward; the caller
        receives the gradients.

        Call `begin_backward` before the first backward, and `answer_held` after each one. The last
        step may go on until then. When the block ends, the homes have every gradient; when it
        raises, the gradients are forgotten. Collective; blocks.
        """
        self.begin_outermost(self._root)
        self.prefetcher.acquire()
        self._is_training_pass = False
        ending = self._expect_end()
        before = self.receive_if(lambda: False)
        self._is_joined = True
        try:
            yield
        except BaseException:
            self.abandon_backward()
            raise
        finally:
            self._is_joined = False
            self.receive_if(before)
        ending()

    def answer_held(self) -> None:
        """Inside `joined`, after a backward: answers the uses that it began, whose operations have
        all been computed."""
        while self._held:
            self.answer(next(reversed(self._held)))

    def is_open(self, live: LiveUnit) -> bool:
        """Whether a unit has a use that no backward has answered."""
        return not self._uses.is_final(live)

    def needs(self) -> dict[nn.Module, Sequence[LiveUnit]]:
        """The units that each module's forward needs."""
        return {module: hooks.needed for module, hooks in self._by_module.items()}

    def _drop_frames(self) -> None:
        """Drops frames of a forward that an interrupt has ended, for which no hook was called."""
        if self._frames:
            for hooks in self._by_module.values():
                hooks.forget_frames()
            self._frames.clear()

    # ---- parameters of other modules -------------------------------------------------------------

    @property
    def may_lend(self) -> bool:
        """Whether a forward or a backward is under way, so that every rank makes the same call."""
        if marks.in_backward():
            return True
        found = self._call.get("outermost")
        return bool(self._frames) and (found is None or found.is_under_way)

    def lend(self, params: Sequence[nn.Parameter], func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a torch function with resting parameters gathered (access.py). Collective;
        blocks."""
        needed = list(dict.fromkeys(self._by_param[id(p)] for p in params))
        for live in needed:
            self.acquire_whole(live)
        frame = self.enter(needed, args, kwargs)
        output = None
        try:
            make = functools.partial(func, *args, **kwargs)
            output = without_loans(make(), params, make, may_borrow=torch.is_grad_enabled())
        finally:
            made = [
                tensor
                for tensor in marks.tensors_in(output)
                if not isinstance(tensor, (nn.Parameter, RestingView))
            ]
            for live in needed:
                if any(live.memory.sees(tensor) for tensor in made):
                    self._lend_to(self._frames[-2] if len(self._frames) > 1 else None, live)
            if output is None:  # it raised, perhaps because it wrote the values
                for live in needed:
                    live.forget_writes()
            self.leave(frame, marks.made_by(made))
            if output is None:
                for live in needed:
                    self.prefetcher.outdate(live)
        return output

    def borrow(self, live: LiveUnit) -> None:
        """Makes a unit present until the innermost forward ends, and in its backward."""
        self._lend_to(self._frames[-1] if self._frames else None, live)

    def _lend_to(self, frame: Frame | None, live: LiveUnit) -> None:
        if frame is None:
            use = UnitUse([live])  # no forward is under way: held until backward ends
            use.left = next(self._clock)
            self._hold(use)
            return
        self.acquire_whole(live)
        frame.borrowed.append(live)
        if frame.use is not None:
            self._uses.extend(frame.use, live)

    # ---- experts by rows -------------------------------------------------------------------------

    @contextlib.contextmanager
    def with_experts(self, live: LiveUnit, chosen: torch.Tensor) -> Iterator[None]:
        """A block in which the chosen rows of a unit's fused experts are there: see experts.py.
        Blocks; raises OSError.

        Tokens of later layers are as many, so the next fetches leave rows out if these tokens use
        few. chosen: numbers of rows, (tokens, choices of each).
        """
        # without users the parameters rest, and are lent whole
        if live.pages is None or not live.is_present or not live.num_users:
            yield
            return
        num_rows = live.pages.num_rows
        num_each = chosen.shape[-1]
        share = expected_share(chosen.numel() // max(1, num_each), num_each, num_rows)
        is_few = share <= MOST_SHARE
        self._expect_rows(is_few)
        if torch.is_grad_enabled():
            self._trains_by_rows = is_few
        rows = {row for row in chosen.unique().tolist() if row < num_rows} if is_few else None
        self._bring(live, rows)
        for use in (frame.use for frame in reversed(self._frames)):
            if use is not None and live in use.units:
                use.note_rows(live, rows)
                live.recalled.update(rows or ())
                break
        with live.with_experts():
            yield

    def _expect_rows(self, by_rows: bool) -> None:
        for live in self._units[:1]:
            live.passage.by_rows = by_rows

    def _bring(self, live: LiveUnit, rows: Collection[int] | None) -> None:
        if live.is_partial:
            self.prefetcher.fetch_more(live, functools.partial(live.bring, rows))

    def acquire_whole(self, live: LiveUnit) -> None:
        """`Prefetcher.acquire`, with every row of the unit's experts."""
        self.prefetcher.acquire(live)
        self._bring(live, None)

    # ---- backward --------------------------------------------------------------------------------

    def answer(self, use: UnitUse) -> None:
        """A use's backward has been computed: releases its units, and receives their gradients if
        they are final."""
        use.answered_in = self.num_backwards
        self._uses.answer(use)
        self._let_go(use)
        # reading the `grad` of resting parameters takes less time so
        with torch._C.DisableTorchFunctionSubclass():
            for live in use.units:
                if self._uses.is_final(live):
                    live.recalled.clear()
                live.memory.join()  # autograd may have computed and accumulated on other streams
                if live.unit.is_trainable and self._uses.is_final(live) and self._may_receive():
                    self._homes.receive(live.unit)

    def receive_if(self, may_receive: Callable[[], bool]) -> Callable[[], bool]:
        """Sets a condition: final gradients are received only if `may_receive()`. Returns the
        condition before."""
        before = self._may_receive
        self._may_receive = may_receive
        return before

    def check_backward_ended(self) -> None:
        """Raises RuntimeError before a step if the last backward ended in an exception; drops its
        gradients."""
        self._drop_frames()
        if self._ending is not None:
            self.abandon_backward()
            raise lost_gradients("the last backward")
        self._homes.check_whole()

    @marks.outside_transforms
    def finish_backward(self) -> None:
        """Receives the remaining gradients and releases every held unit. Called automatically at
        the end of backward."""
        self._uses.forget_promises()
        self.answer_held()
        while self._returned:
            self.prefetcher.release(self._returned.pop())
        with torch._C.DisableTorchFunctionSubclass():
            self.has_left_gradients = not self._may_receive()
            if not self.has_left_gradients:
                self._homes.finish()
            self._homes.show_all()
        self._ending = None

    def _hold(self, use: UnitUse, grad: torch.Tensor | None = None) -> None:
        """The gradient of a tensor that a forward returned has come: holds the use's units for its
        backward."""
        self.watch_backward()
        if use in self._held or use.answered_in == self.num_backwards:
            return
        for later in [other for other in self._held if other.entered > use.left]:
            self.answer(later)  # operations recorded after this forward have been computed
        # a second backward through this one needs the units until here
        if grad is not None and grad.requires_grad:
            marks.mark([grad], use, self._let_go)
        self._uses.add(use)
        self._held[use] = None
        for live in use.needed_again:
            if use.changes.get(live, live.num_changes) != live.num_changes:
                _tell_changed(live)
            self.prefetcher.acquire(live)
            if live.pages is not None:
                self._bring(live, use.rows.get(live))
        use.start_ns = time.monotonic_ns()

    def _computed(self, use: UnitUse, grad: torch.Tensor) -> None:
        """The gradient of an input of a forward has come, perhaps of another use of this input:
        answers the use."""
        self.watch_backward()
        if use.answered_in != self.num_backwards:
            self.answer(use)
        if grad.requires_grad:  # a second backward through this one begins here
            marks.mark([grad], use, self._hold)

    def _computed_to_a_leaf(self, use: UnitUse, grad: torch.Tensor) -> None:
        """The gradient of a leaf input has come; the order relative to gradients of parameters used
        beside it is not known. At the end of the leaf's backward all have come.

        Reentrant checkpointing makes its inputs leaves of an inner backward.
        """
        is_outer = torch._C._current_graph_task_id() == self._watched
        if is_outer and use in self._held and not grad.requires_grad:
            return  # `finish_backward` answers it
        if is_outer:
            self._computed(use, grad)
        else:
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self._computed(use, grad)
            )

    def _let_go(self, use: UnitUse, grad: torch.Tensor | None = None) -> None:
        """A use's backward, or a second backward through it, has passed the forward's operations:
        releases the units."""
        if use in self._held:
            del self._held[use]
            self._record("backward", use)
            for live in use.needed_again:
                self.prefetcher.release(live)

    def _record(self, phase: str, use: UnitUse) -> None:
        for live in use.units:
            self._store.recorder.add(
                "unit", f"{phase} {live.unit.name}", use.start_ns, time.monotonic_ns()
            )

    def watch_backward(self, grad: torch.Tensor | None = None) -> None:
        """At the first sign of a backward: clears `p.grad` and registers a callback for the end of
        the backward.

        Ends the last step first. Raises its errors, and RuntimeError in a forked child.
        """
        if self._ending is not None and self._ending() is not None:
            return
        self._store.check_process()
        if self._ending is not None or self._homes.is_changing:
            self.abandon_backward()  # the earlier backward ended in an exception
        if not self._frames:
            self._recover_units()
        self._steps.end()
        self._watched = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self._expect_end())
        self.begin_backward()

    def _expect_end(self) -> Callable[[], None]:
        """Returns the function that ends a backward. When nothing holds it any more, an exception
        has ended the backward."""
        ending = functools.partial(self.finish_backward)
        self._ending = weakref.ref(ending, self.memory_errors.of_backward())
        return ending

    @marks.outside_transforms
    def begin_backward(self) -> None:
        """Begins a backward, or all those of a `joined` block: ends the last step, which reads
        gradients; clears `p.grad`.

        Blocks; raises the errors of the step, and RuntimeError when no optimizer takes gradients
        that are not kept. Collective where a unit has more than one forward without backward.
        """
        self._homes.store.check_consumer()
        self._steps.end()
        self._uses.settle()
        self.num_backwards += 1
        with torch._C.DisableTorchFunctionSubclass():
            self._homes.begin()
        self.on_backward()

    def abandon_backward(self) -> None:
        """After a backward that ended in an exception: releases its units and drops its
        gradients."""
        if self._ending is not None or self._homes.is_changing:
            self._homes.abandon()
        while self._held:
            self._let_go(next(reversed(self._held)))
        self._returned.clear()
        self._ending = None


class _Call(NamedTuple):
    """An outermost forward: its thread, and torch's Python frame of it."""

    thread: int
    frame: types.FrameType | None

    @classmethod
    def of_now(cls) -> _Call:
        """The call of a module that runs its hooks now."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != _OF_MODULES:
            frame = frame.f_back
        return cls(threading.get_ident(), frame)

    @property
    def is_under_way(self) -> bool:
        """Whether the call has not ended. An exception may have ended it without a hook."""
        try:
            if self.frame is not None:
                self.frame.clear()  # which Python refuses for a frame that runs
        except RuntimeError:
            return True
        return False


def _tell_changed(live: LiveUnit) -> None:
    """Names a unit that was changed between a forward and its backward. Torch raises where backward
    needs the old weights, and cannot name it."""
    logger.warning(
        "weights of unit %r were stepped or replaced between this backward and its forward. Torch "
        "raises if backward needs the old ones: step and load before a forward, or after its "
        "backward",
        live.unit.name,
    )


def _is_alive(thread: int) -> bool:
    """Whether a thread, named by its ident, has not ended."""
    return any(each.ident == thread for each in threading.enumerate())


_OF_MODULES = nn.Module.__call__.__code__.co_filename


def _in_another_thread(phase: str) -> RuntimeError:
    return RuntimeError(
        f"another thread is in a {phase} of this model, whose fetches use the same buffers: wait "
        "until it has ended, or call "
        "the model in that thread"
    )


class _ModuleHooks:
    """The two forward hooks of one module; carries the frame from the first to the second.

    A module inside one that triggers units may be copied while its parameters are gathered. The
    hooks of the copy do nothing.
    """

    def __init__(
        self, hooks: Hooks, module: nn.Module, needed: list[LiveUnit], is_inner: bool
    ) -> None:
        self.module = module
        self.needed = needed
        self.is_inner = is_inner
        self._hooks = hooks
        # of modules whose units this module holds while it runs
        self._inside: list[_ModuleHooks] = []
        # Forwards under way (a module may call itself), and whether each is the outermost call.
        self._frames: list[tuple[Frame, bool] | None] = []
        self._num_off = 0  # modules around this one that run now
        self._before = module.register_forward_pre_hook(
            self.before_forward, prepend=True, with_kwargs=True
        )
        self._after = module.register_forward_hook(
            self.after_forward, with_kwargs=True, always_call=True
        )

    def covers(self, inside: list[_ModuleHooks]) -> None:
        """Sets the modules inside this one whose units are all held by this one."""
        self._inside = [each for each in inside if set(self.needed).issuperset(each.needed)]

    def __deepcopy__(self, memo: Any) -> marks.NoHooks:
        if not self.is_inner:
            self._hooks.__deepcopy__(memo)
        return marks.NoHooks()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (marks.NoHooks, ()) if self.is_inner else self._hooks.__reduce_ex__(protocol)

    def uncover(self, other: _ModuleHooks) -> None:
        """Removes a module inside this one that needs more units than this one holds."""
        if other in self._inside:
            self._inside.remove(other)

    def remove(self) -> None:
        """Removes the hooks from the module."""
        self._before.remove()
        self._after.remove()

    def reset(self) -> None:
        """Restores the hooks: no module around this one runs."""
        self._switch(-self._num_off)

    def forget_frames(self) -> None:
        """Drops all frames: no forward is under way."""
        self._frames.clear()
        self.reset()

    @marks.outside_graphs
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not self.module:  # the hook of a copy
            return
        hooks = self._hooks
        is_outermost = hooks.is_outermost()
        if is_outermost and hooks.begin_outermost(module):
            hooks.prefetcher.acquire()
        self._frames.append(None)
        for live in self.needed:
            hooks.prefetcher.acquire(live)
        frame = hooks.enter(self.needed, args, kwargs, reads_weights_again(module))
        if frame.use is not None:
            frame.use.by_rows()
        if is_outermost and hooks.activations is not None:
            hooks.activations.begin()
        self._frames[-1] = frame, is_outermost
        for each in self._inside:
            each._switch(1)

    @marks.outside_graphs
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if output is None:  # perhaps because of an exception
            phase = "backward" if marks.in_backward() else "forward"
            self._hooks.memory_errors.explain(sys.exc_info()[1], phase)
        ended = module is self.module and self._frames and not self._hooks.is_foreign
        frame, is_outermost = (self._frames.pop() if ended else None) or (None, False)
        if frame is None:
            return
        for each in self._inside:
            each._switch(-1)
        made = marks.handed_back(module, args, kwargs, output) if frame.use is not None else []
        self._hooks.leave(frame, made)
        if is_outermost:
            self._hooks.end_outermost(module, frame, output, made)

    def _switch(self, change: int) -> None:
        """Counts the modules around this one that run; torch calls the hooks only when the count is
        zero."""
        was_off = self._num_off > 0
        self._num_off = max(0, self._num_off + change)
        if was_off == (self._num_off > 0):
            return
        before: Any = self.module._forward_pre_hooks
        after: Any = self.module._forward_hooks
        if not was_off:
            before.pop(self._before.id, None)
            after.pop(self._after.id, None)
        else:
            before[self._before.id], after[self._after.id] = self.before_forward, self.after_forward
            before.move_to_end(self._before.id, last=False)
