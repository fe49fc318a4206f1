"""Save: makes a sharded model's states durable, in the store's own files or as a complete copy in
another folder.

    save           a tag: `<dir>/<tag>/tiermem.json` names its manifest        commit.py, copies.py
    make_durable   the current step, without a tag                             commit.py
    capture_step   the current step of durability="step", perhaps later        commit.py
    wait           blocks until the last step is durable and copies are complete

    in the store's files   states on NVMe are not copied: files are synced and a manifest is written
    a complete copy        with `copy`, when `save_dir` is on another file system than a rank's first path, when no state
                           rests on NVMe, and with durability="none"; if one rank must copy, all
                           ranks copy

A step that goes on under the next forward is made durable when it has ended (`StepRun.commit` says
where). All that a forward changes is captured when the step returns: counters, generators, the
position in the data, buffers.

Gradients are not saved. Between backward and step, a saved model therefore lacks its accumulated
gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tiermem.checkpoint.format.fields import Json, encode, no_collection
from tiermem.checkpoint.format.finding import named_folder, plain_tag
from tiermem.checkpoint.format.kinds import OF_RANK
from tiermem.checkpoint.format.manifest import (
    LATEST_FILE,
    Manifest,
    Part,
    check_parameters,
    choices_of,
)
from tiermem.checkpoint.saving import capture
from tiermem.checkpoint.saving.capture import Captures
from tiermem.checkpoint.saving.commit import (
    SAVING,
    Commits,
    HeldStep,
    optimizer_json,
    state_json,
)
from tiermem.checkpoint.saving.copies import Copies, remove_other_copies
from tiermem.checkpoint.saving.pieces import Stretch
from tiermem.checkpoint.saving.publish import Content, remove_unfinished
from tiermem.checkpoint.together import together
from tiermem.optim.base import NativeOptimizer
from tiermem.policy import Tier
from tiermem.run.shards import Shards
from tiermem.swap.base.errors import Place
from tiermem.swap.memory.accelerator import generators, is_accelerator
from tiermem.swap.store.checksum import crc32c
from tiermem.swap.store.entry import Freeze
from tiermem.weights.step_run import overlap_of

# ---- the durable steps that a corruption does not touch ------------------------------------------


def advice_on(place: Place, steps: Iterable[HeldStep]) -> str:
    """Advice at the end of a CorruptionError: the newest of these steps that does not hold the
    damaged bytes.

    A durable step shares its files with the store, so the damaged bytes may be part of it: a frozen
    weight is never written again, and the first step after a save reads the saved slots. A step
    that holds none of these bytes may be damaged elsewhere: opening it compares every byte.
    """
    newest_first = sorted(steps, key=lambda each: each.commit, reverse=True)
    if not newest_first:
        return (
            "Nothing of this run has been saved where it rests: go back to a checkpoint or a copy"
        )
    harmed = [each for each in newest_first if holds(each.freeze, place)]
    free = next((each for each in newest_first if each not in harmed), None)
    said = [f"{_name(each)} holds these bytes as well" for each in harmed]
    said.append(
        "go back to a complete copy, or to a checkpoint of another run"
        if free is None
        else f"{_name(free)} holds none of these bytes: to see whether it is whole elsewhere, open {free.manifest}"
    )
    text = "; ".join(said)
    return text[0].upper() + text[1:]


def holds(freeze: Freeze, place: Place) -> bool:
    """Whether a freeze holds any byte of a place."""
    if place.entry not in freeze.parts:
        return False
    files = freeze.files
    return any(
        each.path == files[frozen.path_index]
        and each.offset < frozen.offset + frozen.num_bytes
        and frozen.offset < each.offset + each.num_bytes
        for frozen in freeze.ranges(place.entry, place.offset, place.num_bytes)
        for each in place.ranges
    )


def _name(step: HeldStep) -> str:
    return f"step {step.step}" + (f" (tag {step.tag!r})" if step.tag else "")


# ---- saving --------------------------------------------------------------------------------------

logger = logging.getLogger("tiermem")

TagValidation = Literal["Warn", "Ignore", "Fail"]


@dataclasses.dataclass(frozen=True)
class Beside:
    """Values that are saved beside the states.

    scheduler, loss_scaler, loader: their `state_dict()` is saved; an object without one is left
        out.
    engine: counters. "global_steps" is the number of steps; default: the most steps that a
        parameter has seen.
    config: the run's configuration.
    client_state: numbers, strings, lists, tuples, sets, dicts, bytes, tensors and arrays; `load`
        returns it.
    """

    scheduler: Any = None
    loss_scaler: Any = None
    loader: Any = None
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    client_state: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Saver:
    """Saves one sharded model, and keeps its durable steps and its running copy. Lives as long as
    the model's store."""

    def __init__(self, shards: Shards, saves_each_step: bool = False) -> None:
        self._shards = shards
        self._saves_each_step = saves_each_step  # in `after_step`, when an optimizer step has ended
        self.captures = Captures(shards)
        self.commits = Commits(shards)
        self._copies = Copies(shards, self.commits)
        shards.store.sums.advice = lambda place: advice_on(place, self.commits.steps)

    def save(self, content: Content, copies: bool) -> None:
        """Makes a tag, or a step without a tag, durable. Collective; blocks, but not for a copy's
        thread."""
        self.wait()
        if content.pointer is not None and self._shards.topology.rank == 0:
            num_parts = len(Path(content.manifest.tag or "").parts)
            for folder in content.pointer.parents[1 : num_parts + 1]:
                remove_unfinished(folder)
        if not copies:
            self.commits.make(content)
            if content.pointer is not None:
                remove_other_copies(
                    content.pointer.parent, self.commits.run_id, 0, self._shards.topology
                )
            return
        self.commits.number += 1
        # Optimizer steps need a slot to write to while a copy holds one.
        has_free_slot = len(self.commits.steps) + 2 <= self._shards.policy.num_slots
        self._copies.make(content, self.commits.number, has_free_slot)

    def commit(self, content: Content) -> None:
        """Makes a captured step durable. Collective; blocks for a running copy, and raises its
        error when the step is durable."""
        self._copies.end()
        self.commits.make(content)
        self._copies.wait()

    def wait(self) -> None:
        """Blocks until the last step is durable, if that is due, and no copy is running. Raises the
        error of either, once."""
        self._shards.steps.commit()
        self._copies.wait()

    @property
    def keeps_files(self) -> bool:
        """Whether the store's files must stay when the store is closed."""
        return bool(self.commits.steps)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """`capture_step`, if durability="step". Collective then."""
        if self._saves_each_step:
            assert isinstance(optimizer, NativeOptimizer)
            capture_step(self._shards, optimizer)

    def close(self) -> None:
        """Makes the last step durable if that is due, and waits for a running copy. Raises the
        error of either.

        Not if the step has failed and its error was raised, nor on several ranks while an exception
        is being handled.
        """
        steps = self._shards.steps
        if self._shards.topology.world > 1 and sys.exc_info()[0] is not None:
            steps.commit_later(None)
        with contextlib.suppress(*[RuntimeError] if steps.is_torn else []):
            steps.commit()
        self._copies.wait()


@no_collection()
def save(
    shards: Shards,
    optimizer: NativeOptimizer | None,
    save_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    copy: bool = False,
    client_state: Mapping[str, Any] | None = None,
    scheduler: Any = None,
    loss_scaler: Any = None,
    loader: Any = None,
    beside: Beside | None = None,
    tag_validation: TagValidation = "Warn",
) -> bool:
    """Saves every state as it is now under a tag, so that a run can continue from it bit by bit.
    Returns True. A warning names a module whose extra state JSON cannot hold; the save lacks it.

    Args:
        optimizer: the optimizer that steps the model; None: only weights and buffers are saved, in
            the dtypes in which they rest. A run from there makes its masters from the weights.
        save_dir: the folder of checkpoints; made if it is missing.
        tag: the name of a folder below save_dir; default: `global_step<steps>`. Rank 0's tag is
            used, see `tag_validation`.
        save_latest: whether `<save_dir>/latest` names this tag afterwards.
        exclude_frozen_parameters: leaves out parameters that do not require gradients.
        copy: makes a complete copy in `<save_dir>/<tag>/`, as the policy's `copies` does for every
            save; the module says when a save is always a copy. States on NVMe are copied by a
            thread while training goes on, if steps have a slot to write to; `wait` waits for the
            copy.
        client_state: numbers, strings, lists, tuples, sets, dicts, bytes, tensors and arrays;
            `load` returns it.
        scheduler, loss_scaler, loader: their `state_dict()` is saved; an object without one is left
            out.
        beside: all of these and more in one value; replaces the arguments above.
        tag_validation: the reaction to different tags on ranks: "Warn", "Ignore" or "Fail"
            (ValueError).

    Collective; blocks. In the store's files the newest `keep` tags stay; tags of earlier runs in
    save_dir count. An older tag is dropped, with a warning.

    An error is raised on every rank and leaves earlier durable steps unchanged: OSError (full disk,
    failed sync or write); TypeError for a value of client_state that JSON cannot hold, naming the
    key; ValueError for an empty save_dir, an invalid tag, different arguments or states on ranks,
    and content that opening would refuse, such as a parameter's name with NUL.
    """
    saver = saver_of(shards)
    found = beside or Beside(scheduler, loss_scaler, loader, client_state=dict(client_state or {}))

    def draft() -> _Draft:
        folder = named_folder("save_dir", save_dir).absolute()
        shards.check_whole()
        return _draft(
            shards, optimizer, found, folder, tag, save_latest, exclude_frozen_parameters, copy
        )

    saver.save(*_agree(shards, draft, tag_validation))
    return True


@no_collection()
def make_durable(
    shards: Shards, optimizer: NativeOptimizer | None, beside: Beside | None = None
) -> None:
    """Makes the current step durable without a tag; it replaces the last such step. Collective;
    blocks; raises as `save`."""
    capture_step(shards, optimizer, beside)
    shards.steps.commit()


@no_collection()
def capture_step(
    shards: Shards, optimizer: NativeOptimizer | None, beside: Beside | None = None
) -> None:
    """Captures the current step, which the next `StepRun.commit` makes durable; at once where no
    step goes on.

    Collective; blocks; raises as `save`, and that `commit` does.
    """
    saver = saver_of(shards)
    found = beside or Beside()
    steps = shards.steps
    steps.commit()
    content, _ = _agree(shards, lambda: _draft(shards, optimizer, found), "Ignore")
    steps.commit_later(functools.partial(saver.commit, content))
    if overlap_of(shards.policy, shards.plan, is_accelerator(shards.device)) == "none":
        steps.commit()


def wait(shards: Shards) -> None:
    """Blocks until the last step is durable, with durability="step", and no copy of a model is
    running.

    Collective if there is anything to wait for; raises the error of a failed commit or copy.
    """
    saver = shards.find_attached(Saver)
    if saver is not None:
        saver.wait()


def saver_of(shards: Shards) -> Saver:
    """The Saver of a model; made if there is none."""
    saver = shards.find_attached(Saver)
    if saver is None:
        saver = Saver(shards)
        shards.attach(saver)
    return saver


class _Draft(NamedTuple):
    """The content that a rank would save, before it has heard of the other ranks."""

    content: Content
    own: list[Stretch]  # states that every rank holds whole: buffers, ordinary parameters
    facts: dict[str, Json]  # must be equal on all ranks
    is_copy: bool


def _draft(
    shards: Shards,
    optimizer: NativeOptimizer | None,
    beside: Beside,
    save_dir: Path | None = None,
    tag: str | None = None,
    save_latest: bool = False,
    exclude_frozen: bool = False,
    copies: bool = False,
) -> _Draft:
    """The content that a rank would save: a tag of `save_dir`, or without `save_dir` a step without
    a tag."""
    steps = int(
        beside.engine.get(
            "global_steps", max((s.num_steps for _, s in shards.parameters()), default=0)
        )
    )
    if save_dir is not None:
        tag = plain_tag(f"global_step{steps}" if tag is None else str(tag))
        if save_latest and Path(tag).parts[0] == LATEST_FILE:
            raise ValueError(
                f"tag is {tag!r}, and {LATEST_FILE} is the file that names the newest tag: choose "
                "another, or save_latest=False"
            )
        copies = copies or shards.policy.copies or not _may_stay(shards, save_dir)
    if optimizer is not None:
        optimizer.follow_state()
    parameters, excluded = capture.parameters(shards, optimizer, exclude_frozen)
    check_parameters(parameters, excluded)
    saver = saver_of(shards)
    topology = shards.topology
    manifest = Manifest(
        run_id=saver.commits.run_id,
        commit=0,
        tag=tag,
        step=steps,
        world=topology.world,
        num_shards=topology.num_shards,
        parts=(),
        optimizer=optimizer_json(shards, optimizer),
        scheduler=state_json(beside.scheduler, "lr_scheduler"),
        loss_scaler=state_json(beside.loss_scaler, "loss_scaler"),
        engine=encode(dict(beside.engine), "engine"),
        client_state=encode(dict(beside.client_state), "client_state"),
        config=encode(dict(beside.config), "config"),
        parameters=tuple(parameters),
        excluded=tuple(excluded),
        checksums={},
        choices=choices_of(
            shards.policy.compute_dtype, shards.policy.overlap, shards.plan.streamed_part
        ),
    )
    rng = encode(generators(shards.device), "rng")
    data = state_json(beside.loader, "loader")
    extra = capture.extra_states(shards.model)
    part = Part(manifest.run_id, 0, topology.rank, rng, data, (), (), extra)
    names = [each.name for each in parameters]
    resting, in_memory = saver.captures.take(names, optimizer is not None)
    content = Content(manifest, part, save_dir, save_latest, resting, in_memory)
    return _Draft(
        content,
        own=list(capture.own(shards, optimizer)),
        facts={
            "save_latest": save_latest,
            "exclude_frozen_parameters": exclude_frozen,
            "steps": steps,
        },
        is_copy=copies,
    )


def _agree(
    shards: Shards, make: Callable[[], _Draft], tag_validation: TagValidation
) -> tuple[Content, bool]:
    """The content that all ranks save, and whether as a copy: one rank that must copy is enough.
    Collective.

    Raises ValueError where arguments, or the size or dtype of a state, differ between ranks.
    """

    def tell(draft: _Draft) -> Json:
        return {
            "tag": draft.content.manifest.tag,
            "is_copy": draft.is_copy,
            "facts": draft.facts,
            "own": [
                [each.param, each.state, [each.kind, each.numel], _sum(each)] for each in draft.own
            ],
        }

    draft, told = together(shards.topology, SAVING, make, tell)
    rank = shards.topology.rank
    for other, each in enumerate(told):
        for name, value in told[0]["facts"].items():
            if each["facts"][name] != value:
                raise ValueError(
                    f"{name} is {value} on rank 0 and {each['facts'][name]} on rank {other}: save "
                    "alike on every rank"
                )
    tag = _agreed_tag([each["tag"] for each in told], tag_validation, rank)
    first = _agreed_own([each["own"] for each in told])
    # all states of a parameter together: codes need their scales, a split master its weight
    differing = {
        each.param for each in draft.own if first.get((each.param, each.state)) != _sum(each)
    }
    own = [each for each in draft.own if rank == 0 or each.param in differing]
    variant = f"{OF_RANK}{rank}" if rank else ""
    own = [each._replace(state=each.state + variant) for each in own]
    content = dataclasses.replace(
        draft.content,
        manifest=dataclasses.replace(draft.content.manifest, tag=tag),
        in_memory=[*draft.content.in_memory, *own],
    )
    return content, any(each["is_copy"] for each in told)


def _agreed_own(told: list[list[Any]]) -> dict[tuple[str, str], int]:
    """Rank 0's checksums. Raises ValueError where a rank's state has another size or dtype, or rank
    0 lacks the state."""
    first = {(param, state): (form, crc) for param, state, form, crc in told[0]}
    for rank, own in enumerate(told):
        for param, state, form, _ in own:
            there = first.get((param, state), (None,))[0]
            if there != form:
                here = "none" if there is None else f"{there[1]} elements of {there[0]}"
                raise ValueError(
                    f"{state} of {param}: rank 0 has {here}, rank {rank} has {form[1]} elements of "
                    f"{form[0]}: give it the same size and dtype on every rank"
                )
    return {key: crc for key, (_, crc) in first.items()}


def _agreed_tag(tags: list[str | None], validation: TagValidation, rank: int) -> str | None:
    """Rank 0's tag. Raises ValueError where another rank's tag differs and validation is "Fail"."""
    other = next((i for i, tag in enumerate(tags) if tag != tags[0]), None)
    if other is None or validation == "Ignore":
        return tags[0]
    text = f"the tag is {tags[0]!r} on rank 0 and {tags[other]!r} on rank {other}"
    if validation == "Fail":
        raise ValueError(
            f'{text}: give the same on every rank, or set "checkpoint": {{"tag_validation": '
            f'"Warn"}}'
        )
    if rank == 0:
        logger.warning("%s: saved as %r", text, tags[0])
    return tags[0]


def _may_stay(shards: Shards, save_dir: Path) -> bool:
    """Whether the store's files may be the checkpoint: states rest on NVMe, durably, on the file
    system of `save_dir`."""
    policy = shards.policy
    if policy.durability == "none" or Tier.NVME not in (policy.params, policy.optim):
        return False
    folder = next(each for each in (save_dir, *save_dir.parents) if each.is_dir())
    return folder.stat().st_dev == os.fstat(shards.store.descriptors()[0]).st_dev


def _sum(own: Stretch) -> int:
    assert isinstance(own.place, tuple) and isinstance(own.place[0], torch.Tensor)
    return crc32c([own.place[0].cpu()])[0]
