"""StepRun: the run of an optimizer step over a model's tiles, which may go on under the next
forward; whether states are whole.

    step       `start` starts the run and returns. Units that can be read without a fetch have been stepped by then. What an
               accelerator has stepped may still be on its way to host memory (`copied`)
    forward    `read` and `await_unit`: the fetch of a unit waits for the unit's own tiles, and takes new weights from memory
    backward   with overlap "backward", tiles are stepped beside what they replace (optim/tentative.py). Nothing reads the
               results before `start` has committed them, so that no step is under way until then
    the end    `end` waits for the last write: before the next backward, which replaces the gradients that the run reads (those
               that an accelerator reads are replaced by ones that depend on what it has written),
               and before the next step
    a look     `finish` waits for the accelerator, too. Every other access to what rests calls it first:

        Values               each read and write of weights, states and gradients where they rest
        GradientHomes        each look at the values of `p.grad`, and each change of them
        Shards.check_whole   each save, load and replacement of values
        RestingParameter     `ds_tensor`, a view of weights in host memory
        Shards.close         the end

    commit     makes the step durable if that is due (durability="step"). All ranks do this together, so it has fixed places in
               their program: the begin of the next backward, or before it the next step, save,
               load, change of values or close

Errors of reads, checksums and kernels are raised by the fetch of a unit that needs them, all others
by `finish`. Either way the model is torn afterwards: its states are of two different steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, Literal, cast

import torch

from tiermem.plans.plan import Plan
from tiermem.policy import OffloadPolicy, Overlap, Tier
from tiermem.swap.base.native import NORMAL
from tiermem.swap.program.program import Program
from tiermem.swap.program.run_read import RunRead
from tiermem.swap.program.table import TileWork
from tiermem.swap.store.checksum import Range
from tiermem.swap.store.move import Move
from tiermem.weights import backward_marks as marks

logger = logging.getLogger("tiermem")


def overlap_of(
    policy: OffloadPolicy, plan: Plan, is_gpu: bool
) -> Literal["none", "forward", "backward"]:
    """What runs beside the steps of a model, by its policy: see `OffloadPolicy.overlap`."""
    wanted = policy.wanted_overlap(plan.states, is_gpu)
    homes = plan.unit_homes.values()
    if is_gpu and (plan.kept_bytes or plan.streamed_part or Tier.DEVICE in (plan.states, *homes)):
        return "none"  # a step that an accelerator takes part in ends before the next forward
    if wanted == "none" or not any(
        unit.is_trainable and not unit.is_resident for unit in plan.division.units
    ):
        return "none"
    return "backward" if wanted == "backward" and plan.may_attempt else "forward"


def kept_overlap(policy: OffloadPolicy, plan: Plan, is_gpu: bool, saved: str) -> OffloadPolicy:
    """The policy with the `overlap` that a saved run had, unless it names one. Warns where the plan
    has no room for that."""
    if policy.overlap != "auto":
        return policy
    policy = dataclasses.replace(policy, overlap=cast(Overlap, saved))
    if saved == "backward" and overlap_of(policy, plan, is_gpu) != saved:
        lacks = (
            plan.lacks
            or 'to be named at the start (overlap "backward"), so that its slot is planned'
        )
        logger.warning(
            'the run that is resumed had overlap "backward", which needs %s. It goes on without',
            lacks,
        )
    return policy


class StepRun:
    """The step under way, if there is one. For one thread at a time, but for `read` and the methods
    of what it returns.

    program: runs the tiles of the model.
    """

    def __init__(self, program: Program[Any]) -> None:
        # a step or a restore has not ended; it failed or was interrupted, or it is under way now
        self.is_torn = False
        self.is_between_plans = False  # it goes over to another plan, or that has failed
        self._is_changing = False  # it is under way now
        self.is_partial = False  # with step_in_backward: units were stepped since the last step
        self.half_loaded: set[Hashable] = set()  # what a load has begun to replace
        self.has_slot = False  # the disk space of steps under backward is taken
        self.num_early = 0  # steps that took what backward had stepped
        self.num_redone = 0  # steps whose tiles were stepped in backward, dropped and stepped again
        self._program = program
        self._due: Callable[[], None] | None = None  # what `commit` calls, once
        # the end of an accelerator's copies to weights in host memory
        self.copied: torch.Event | None = None

    def start(
        self,
        tiles: Sequence[Any],
        work: TileWork[Any],
        at_once: Sequence[int],
        lane: str,
        accept: Callable[[], None] | None = None,
    ) -> None:
        """Starts a step, and blocks until some units are stepped; a run that Python takes part in,
        until its end.

        at_once: the numbers of these units. accept: given if the tentative run has stepped its
            tiles as this step would; they are then not stepped again, unless it has failed. Called
            before its results count. Raises what a run raises.
        """
        is_attempted = bool(self._program.attempted)
        if accept is not None and is_attempted and not self._program.has_failed:
            accept()
            self._program.commit(tiles, work)
            self.num_early += 1
        else:
            self.num_redone += is_attempted
            self._program.start(tiles, work, lane=lane)
        if not self._program.is_native:
            self._program.finish()
        for unit in at_once:
            self._program.wait(unit)

    @property
    def is_under_way(self) -> bool:
        """Whether the last step has not been finished."""
        return self._program.is_running

    def is_stepped(self, unit: int) -> bool:
        """Whether a unit's weights at rest are those of the last step. Does not block."""
        return self._program.is_stepped(unit)

    def await_unit(self, unit: int) -> None:
        """Blocks until a unit's weights in memory are those of the last step. Raises the error of
        the run."""
        self._program.wait(unit)

    def stepped(self, unit: int) -> Iterator[slice]:
        """The elements of a unit's shard in memory that the step under way changes, each range when
        it has been stepped.

        Blocks before each as `await_unit`. Nothing: the unit has been stepped, or no step changes
        it.
        """
        for tile in () if self.is_stepped(unit) else self._program.computed(unit):
            yield slice(tile.start, tile.start + tile.numel)

    def read(
        self, ranges: Sequence[Range], name: str, unit: int, priority: int = NORMAL
    ) -> Move | RunRead:
        """Starts reading a unit's weights of the last step, as `TensorStore.read`. Does not block,
        in any thread."""
        return self._program.read(ranges, name, unit, priority)

    def finish(self) -> None:
        """`finish_tiles`, and blocks until an accelerator has written the weights in host
        memory."""
        try:
            self.finish_tiles()
        finally:
            copied = self.copied
            self.copied = None
            if copied is not None and not copied.query():
                copied.synchronize()

    def finish_tiles(self) -> None:
        """Blocks until the last write of the step has ended. Raises its error, once; then the model
        is torn.

        An interrupt leaves the step under way.
        """
        if not self.is_under_way:
            return
        try:
            self._program.finish()
        finally:
            if not self._program.is_running and self._program.has_failed:
                self.is_torn = True
                self._is_changing = False

    def check_whole(self) -> None:
        """Raises RuntimeError if the model is torn, also by a backward that has stepped units and
        was left."""
        if (self.is_torn and not self._is_changing) or (
            self.is_partial and not marks.in_backward()
        ):
            self._check_plan()
            raise RuntimeError(
                "a step, or opening a checkpoint, failed half-way, so that this model is a mixture "
                "of two steps: open a checkpoint that is whole, or close it"
            )

    def _check_plan(self) -> None:
        if self.is_between_plans:
            raise RuntimeError(
                "going over to another plan (rehome, or parameters that were unfrozen) ended "
                "half-way, so that the memory of this model is torn between two plans: close it, "
                "build and shard it again, and open a checkpoint"
            )

    def check_loaded(self) -> None:
        """Raises RuntimeError if a load was interrupted."""
        if self.half_loaded:
            raise RuntimeError(
                "a load (load_state_dict, load_safetensors, GatheredParameters with a "
                "modifier_rank, EMA.copy_to) ended half-way, so that this model is torn between "
                "what it was and what was loaded: load again, or open a checkpoint that is whole, "
                "or close it"
            )

    def commit_later(self, act: Callable[[], None] | None) -> None:
        """Sets what the next `commit` calls: it finishes the step and makes it durable. None:
        nothing."""
        self._due = act

    def commit(self) -> None:
        """Makes the step durable if that is due. Collective then; blocks; raises the errors of the
        step and of the commit.

        Afterwards it is not due, also after an error, but after an interrupt it is.
        """
        if self._due is None:
            return
        try:
            self._due()
        except Exception:
            self._due = None
            raise
        self._due = None

    def end(self) -> None:
        """`commit`, then `finish_tiles`."""
        self.commit()
        self.finish_tiles()

    def abandon(self) -> None:
        """Ends the step under way early, and forgets failures, because every state is about to be
        replaced. Blocks. Raises RuntimeError for a model between two plans, which no state
        mends."""
        self._check_plan()
        self._program.drop()
        self.is_torn = self._is_changing = self.is_partial = False
        self._due = None
        self.half_loaded.clear()

    def changing_all(self) -> contextlib.AbstractContextManager[None]:
        """A block that changes many states. If it fails, or an interrupt ends it, the model is
        torn. Not to be nested."""
        return _Changing(self)

    @contextlib.contextmanager
    def loading(self, keys: Collection[Hashable]) -> Iterator[None]:
        """A block that replaces these parameters. Until all are replaced, steps and forwards raise
        RuntimeError: all keep their marks when the block fails, or an interrupt ends it."""
        self.half_loaded.update(keys)
        yield
        self.half_loaded.difference_update(keys)


class _Changing(contextlib.AbstractContextManager[None]):
    """Marks the model as torn, and clears the mark at the end of a block that did not fail.

    An interrupt before `__exit__` of a block that has ended leaves both marks: the model is whole,
    and is not refused.
    """

    def __init__(self, steps: StepRun) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        self._steps._is_changing = True
        self._steps.is_torn = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._steps.is_torn = False
        self._steps._is_changing = False
