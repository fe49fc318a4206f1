"""Commit: a durable step of a sharded model made where its states rest; no state on NVMe is copied."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiermem.checkpoint.format.fields import Json, ManifestError, encode
from tiermem.checkpoint.format.finding import pointer_path, read_latest, written
from tiermem.checkpoint.format.manifest import LATEST_FILE, Manifest, data_name, manifest_name, part_name
from tiermem.checkpoint.saving.pieces import put_together, write_data
from tiermem.checkpoint.saving.publish import (
    Content,
    drop_step,
    drop_tags,
    frozen,
    manifest_of,
    publish,
    remove,
    remove_pointer,
    write_part,
)
from tiermem.checkpoint.together import talk_over, together
from tiermem.swap.accelerator import is_accelerator, rng_state
from tiermem.swap.entry import Freeze
from tiermem.swap.run_folder import is_of_commit
from tiermem.zero.shards import Shards

if TYPE_CHECKING:
    from tiermem.optim.base import NativeOptimizer


# ---- Scalars: what is saved beside the states, as JSON: the optimizer's groups, generators, schedules ----------------
#
# optimizer   {"name": "AdamW", "groups": [{"params": [names], "values": {"lr": 0.1, ...}}]}
# rng         {"python", "numpy", "torch" [, "cuda" or another accelerator's name]}: the generators of this rank
# others      the `state_dict()` of a scheduler, a loss scale or a loader; null where there is none


def optimizer_json(shards: Shards, optimizer: NativeOptimizer | None) -> Json:
    """The optimizer's class and its groups, parameters by their names in the manifest."""
    if optimizer is None:
        return None
    names = {id(shard.param): shard.name for _, shard in shards.parameters()}
    names |= {id(param): f"optimizer.{name}" for name, param in optimizer.named() if id(param) not in names}
    groups = [
        {
            "params": [names[id(param)] for param in group["params"]],
            "values": encode(
                {key: value for key, value in group.items() if key not in ("params", "param_names")},
                f"optimizer.param_groups[{number}]",
            ),
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    return {"name": type(optimizer).__name__, "groups": groups}


def rng_json(device: torch.device) -> Json:
    """This rank's generators."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if is_accelerator(device):
        found[device.type] = rng_state(device)
    return encode(found, "rng")


def state_json(owner: Any, where: str) -> Json:
    """What an object's `state_dict()` returns; null for None and for what has none. Raises TypeError, naming the place."""
    state = getattr(owner, "state_dict", None)
    return None if state is None else encode(state(), where)


# ---- Commit: a durable step of a sharded model, made where its states rest: nothing of a state that rests on NVMe ----
# is copied
#
#     every rank   store.freeze (writes settled, files synced) -> what rests in memory to data-<commit>.bin -> part
#     together     sizes, checksums or errors
#     rank 0       manifest -> <dir>/<tag>/tiermem.json -> <dir>/latest -> the manifest of what is dropped is removed
#     together     how that went
#     every rank   what was dropped is thawed, its data and part are removed
#
# Each arrow is durable before the next begins, so that whenever all stop, what a manifest names is whole: the step
# before or this one. An error on any rank is raised on all of them, everything new is removed and thawed, and what was
# durable before is untouched; what cannot be removed then, the disk having turned read-only, goes with the next commit.
# A rank that is lost while rank 0 writes leaves the others unsure whether the manifest stands: they leave all as it is,
# and opening the folder finds the one step or the other. Steps write to slots that no kept commit holds
# (swap/entry.py), as soon as this returns.
#
#     tags    the newest `keep`, of earlier runs too (publish.py); an older one is dropped, with a warning that names it
#     step    durability="step" commits after every step, without a tag; the one before is dropped, as it is for a tag

logger = logging.getLogger("tiermem")

WHAT = "saving the checkpoint"


@dataclasses.dataclass(frozen=True)
class Kept:
    """A durable step of this run, with what this rank holds of it."""

    commit: int
    step: int
    tag: str | None
    freeze: Freeze
    manifest: Path  # rank 0's
    pointer: Path | None
    files: tuple[Path, ...]  # part and data


class Commits:
    """The durable steps of one sharded model that lie where its states rest; lives as long as its store.

    run_id: the same on every rank.
    """

    def __init__(self, shards: Shards, run_id: str) -> None:
        self._shards = shards
        self.run_id = run_id
        self.number = 0  # of the last attempt
        self.steps: list[Kept] = []  # every durable one, in order; one at most has no tag: durability="step"
        self._opened: Path | None = None  # an earlier run's step without a tag that this model was opened from

    @property
    def newest(self) -> Kept | None:
        """The durable step that would be opened now."""
        return self.steps[-1] if self.steps else None

    def make(self, content: Content) -> None:
        """Makes the states as they are now durable. Collective; blocks; raises as the module says."""
        self.number += 1
        commit, topology, talk = self.number, self._shards.topology, talk_over(self._shards.topology)
        with _no_collection(), contextlib.ExitStack() as undo:
            saved: list[Kept] = []

            def save_own() -> Any:
                kept, told = self._save_own(content, commit, undo)
                saved.append(kept)
                return told

            told = together(talk, WHAT, save_own)
            [kept] = saved
            doomed = self._doomed(kept, content.is_whole)

            def save_all() -> None:
                if topology.rank == 0:
                    manifest = manifest_of(content, self.run_id, commit, topology, told, kept.manifest.parent)
                    publish(content, manifest, kept.manifest, undo)
                    for each in doomed:
                        remove(each.manifest)

            def unheard(went_well: bool) -> None:
                if topology.rank or went_well:
                    undo.pop_all()
                    self._shards.store.keep_files()

            together(talk, WHAT, save_all, unheard)
            undo.pop_all()
        self._take_over(kept, doomed, content.save_dir)
        self._sweep()

    # ---- every rank -----------------------------------------------------------------------------------------------------

    def _save_own(self, content: Content, commit: int, undo: contextlib.ExitStack) -> tuple[Kept, Any]:
        """Freezes, and writes this rank's data and part; `undo` takes all of it back. Also returns what other ranks hear."""
        shards, rank = self._shards, self._shards.topology.rank
        freeze = shards.store.freeze()
        undo.callback(shards.store.thaw, freeze)
        files = [each.absolute() for each in freeze.files()]  # what is written must be found from anywhere
        folder = shards.store.folders()[0].absolute()
        placed = [frozen(shards, content, freeze)]
        if content.in_memory:
            files.append(folder / data_name(commit))
            undo.callback(remove, files[-1])
            placed.append(write_data(content.in_memory, files[-1], len(files) - 1, shards.workers))
        whole, names = put_together(placed), [written(file, folder) for file in files]
        path = folder / part_name(commit, rank)
        undo.callback(remove, path)
        told = write_part(path, self.run_id, commit, rank, content, names, whole)
        pointer = None
        if content.tag is not None and content.save_dir is not None:
            pointer = pointer_path(content.save_dir, content.tag)
        own = (path, *files[len(freeze.files()) :])
        kept = Kept(commit, content.step, content.tag, freeze, folder / manifest_name(commit), pointer, own)
        return kept, told

    def _doomed(self, kept: Kept, is_whole: bool) -> list[Kept]:
        """What goes once the new one is durable: the step before, the same tag, tags beyond `keep`. The same on all ranks."""
        untagged = [each for each in self.steps if each.tag is None]
        if kept.tag is None:
            return untagged
        same = [each for each in self.steps if each.tag is not None and each.pointer == kept.pointer]
        others = [each for each in self.steps if each.tag is not None and each.pointer != kept.pointer]
        dropped = others[: max(0, len(others) + 1 - self._shards.policy.keep)]
        return (untagged if is_whole else []) + same + dropped

    def _take_over(self, kept: Kept, doomed: Sequence[Kept], save_dir: Path | None) -> None:
        """The new commit stands; what it takes the place of goes."""
        self.steps.append(kept)
        self.forget(doomed)
        for each in doomed:
            if self._shards.topology.rank == 0 and each.pointer is not None and each.pointer != kept.pointer:
                self._drop_pointer(each, kept, save_dir)
        if self._shards.topology.rank == 0:
            self._drop_predecessors(kept, save_dir)

    def _drop_predecessors(self, kept: Kept, save_dir: Path | None) -> None:
        """What earlier runs have left that this commit stands in for."""
        opened, self._opened = self._opened, None
        if opened is not None:
            drop_step(opened, f"{opened} is removed: this run has gone on from it, and has a durable step of its own")
        if save_dir is not None:
            num_own = sum(each.pointer is not None and each.pointer.parent.parent == save_dir for each in self.steps)
            drop_tags(save_dir, self.run_id, max(0, self._shards.policy.keep - num_own))

    def went_on_from(self, manifest: Path, opened: Manifest) -> None:
        """The model is what that manifest says; an earlier run's step without a tag is replaced by the next commit."""
        self._opened = manifest if opened.tag is None and opened.run_id != self.run_id else None

    def in_place_of(self, pointer: Path) -> list[Kept]:
        """The tags of this name, which something else takes the place of: `forget` them once their manifests are gone."""
        return [each for each in self.steps if each.pointer == pointer]

    def forget(self, gone: Sequence[Kept]) -> None:
        """Gives up what these steps held; rank 0 has removed their manifests, durably."""
        self.steps = [each for each in self.steps if each not in gone]
        self._shards.store.keep_files(bool(self.steps))
        for each in gone:
            self._shards.store.thaw(each.freeze)
            for file in each.files:
                remove(file)

    def _sweep(self) -> None:
        """Removes what earlier commits that failed could not: this rank's files of none that is kept; rank 0 also manifests."""
        folder = self._shards.store.folders()[0].absolute()
        names = {file.name for each in self.steps for file in (each.manifest, *each.files)}
        for file in sorted(folder.iterdir()):
            if is_of_commit(file.name) and file.name not in names:
                remove(file)

    def _drop_pointer(self, old: Kept, new: Kept, save_dir: Path | None) -> None:
        assert old.pointer is not None
        remove_pointer(old.pointer)
        latest = None
        with contextlib.suppress(ManifestError, OSError):
            latest = None if save_dir is None else read_latest(save_dir)
        logger.warning(
            "checkpoint %r (step %d) is dropped for %r (step %d): keep=%d. Keep more with OffloadPolicy(keep=...), or "
            '"tiermem": {"keep": ...} in a config; copy=True makes copies, which are never dropped%s',
            old.tag, old.step, new.tag, new.step, self._shards.policy.keep,
            f"; {LATEST_FILE} in {save_dir} still names it" if latest == old.tag else "",
        )  # fmt: skip


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps Python's collector away. A commit makes tens of thousands of tuples and no cycle; they would have it look through
    the whole heap, which takes longer than the commit."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
