"""Commit: makes a durable step of a sharded model in the store's own files. States on NVMe are not
copied.

    every rank   the step ends -> store.freeze (pending writes end, files are synced) -> states in memory to data-<commit>.bin
                 -> part
    together     exchange sizes and checksums, or errors
    rank 0       manifest -> <dir>/<tag>/tiermem.json -> <dir>/latest -> remove the manifests of dropped steps
    together     exchange rank 0's result
    every rank   thaw the dropped steps, remove their data and parts

Each arrow is durable before the next begins. If all processes stop at any moment, every manifest
describes a whole step: the previous one or this one.

An error on any rank is raised on all ranks. The new files are removed, the new freeze is thawed,
and older durable steps are unchanged. Files that cannot be removed (the disk has become read-only)
are removed by the next commit. If a rank is lost while rank 0 writes, the other ranks cannot know
whether the manifest exists. They leave all files, and opening the folder finds one step or the
other.

After a commit, optimizer steps write to slots that no kept commit holds (swap/store/entry.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermem.checkpoint.format.fields import Json, encode
from tiermem.checkpoint.format.finding import dir_of, known_latest, real, written
from tiermem.checkpoint.format.manifest import (
    LATEST_FILE,
    POINTER_FILE,
    Manifest,
    data_name,
    manifest_name,
    part_name,
)
from tiermem.checkpoint.saving.capture import ordinary_of
from tiermem.checkpoint.saving.pieces import write_data
from tiermem.checkpoint.saving.publish import (
    Content,
    check_seen,
    drop_step,
    drop_tags,
    frozen,
    manifest_of,
    publish,
    remove_pointer,
    write_part,
)
from tiermem.checkpoint.together import together
from tiermem.ranks.topology import Topology
from tiermem.run.shards import Shards
from tiermem.swap.disk.run_folder import is_of_commit, remove
from tiermem.swap.store.entry import Freeze

if TYPE_CHECKING:
    from tiermem.optim.base import NativeOptimizer


# ---- scalars: JSON saved beside the states -------------------------------------------------------
#
# optimizer   {"name": "AdamW", "groups": [{"params": [names], "values": {"lr": 0.1, ...}}]}
# rng         {"python", "numpy", "torch" [, "cuda" or another accelerator's name]}: the generators of this rank
# others      the `state_dict()` of a scheduler, a loss scaler or a loader; null if there is none


def optimizer_json(shards: Shards, optimizer: NativeOptimizer | None) -> Json:
    """The optimizer's class and its groups. Parameters have their names in the manifest. None
    without an optimizer."""
    if optimizer is None:
        return None
    names = {id(shard.param): shard.name for _, shard in shards.parameters()}
    names |= {id(param): name for name, param in ordinary_of(optimizer).items()}
    groups = [
        {
            "params": [names[id(param)] for param in group["params"]],
            "values": encode(
                {
                    key: value
                    for key, value in group.items()
                    if key not in ("params", "param_names")
                },
                f"optimizer.param_groups[{number}]",
            ),
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    return {"name": type(optimizer).__name__, "groups": groups}


def state_json(owner: Any, where: str) -> Json:
    """The `state_dict()` of an object; null for None or without that method. Raises TypeError that
    names the place."""
    state = getattr(owner, "state_dict", None)
    return None if state is None else encode(state(), where)


# ---- durable steps -------------------------------------------------------------------------------

logger = logging.getLogger("tiermem")

SAVING = "saving the checkpoint"
COPYING = "copying the checkpoint"


@dataclasses.dataclass(frozen=True)
class HeldStep:
    """A durable step of this run, and the files and the freeze that this rank holds for it."""

    commit: int
    step: int
    tag: str | None
    freeze: Freeze
    manifest: Path  # rank 0's
    pointer: Path | None  # of its tag, without links, each of which would be another name of it
    files: tuple[Path, ...]  # part and data

    @property
    def save_dir(self) -> Path | None:
        """The folder that its tag lies in."""
        if self.pointer is None or self.tag is None:
            return None
        return dir_of(self.pointer.parent, self.tag)


class Commits:
    """The durable steps of one sharded model that lie in the store's files. Lives as long as the
    store.

    tags    The newest `keep` tags stay, tags of earlier runs in the same folder included (publish.py). An older tag is dropped,
            with a warning that names it. In `older_kept` that waits for the end of the block.
    steps   durability="step" makes a commit without a tag for every optimizer step. The next such commit drops it, and so
            does a tag from which a run can continue (`Content.is_whole`).
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.run_id = shards.store.run.run_id  # the same on every rank
        self.number = 0  # of the last attempt
        # all durable steps, oldest first; at most one has no tag (durability="step")
        self.steps: list[HeldStep] = []
        # manifest of an earlier run's untagged step that this model was loaded from
        self._opened: Path | None = None
        self._keep = shards.policy.keep  # tags that stay; all in `older_kept`

    def make(self, content: Content) -> None:
        """Makes the states durable as they are now. Collective; blocks. Errors: see the module, and
        those of the step."""
        self.number += 1
        commit = self.number
        topology = self._shards.topology
        with contextlib.ExitStack() as undo:
            (kept, _), told = together(
                topology,
                SAVING,
                lambda: self._save_own(content, commit, undo),
                tell=lambda own: own[1],
            )
            doomed = self._doomed(kept, content.is_whole)
            gone = self.publish_together(
                topology, content, commit, kept.manifest, told, doomed, undo
            )
        self.steps.append(kept)
        if content.is_whole:
            self._drop_opened()
        self._drop(kept, gone)
        self._sweep()

    def publish_together(
        self,
        topology: Topology,
        content: Content,
        commit: int,
        path: Path,
        told: Sequence[Any],
        doomed: Sequence[HeldStep],
        undo: contextlib.ExitStack,
        is_copy: bool = False,
    ) -> list[HeldStep]:
        """Rank 0 publishes the manifest `path` and removes those of the doomed steps. Returns the
        steps whose manifests are gone. Collective; blocks.

        told: of every rank, by `write_part`.
        undo: forgotten when the manifest names the files that it would remove, or may name them.
        """
        replaced: Path | None = None

        def save_all() -> list[int]:
            nonlocal replaced
            if topology.rank:
                return []
            if is_copy:
                check_seen(told)
            manifest = manifest_of(content, commit, told, path.parent)
            replaced = publish(content, manifest, path, told, undo)
            return _removed(doomed)

        def unheard(went_well: bool) -> None:
            if topology.rank or went_well:
                undo.pop_all()
                if not is_copy:
                    self._shards.store.keep_files()

        _, (gone, *_) = together(
            topology, COPYING if is_copy else SAVING, save_all, unheard=unheard
        )
        undo.pop_all()
        if replaced is not None:
            tag = content.manifest.tag
            drop_step(replaced, f"checkpoint {tag!r} of an earlier run is dropped: saved again")
        return [each for each in doomed if each.commit in gone]

    @contextlib.contextmanager
    def older_kept(self) -> Iterator[None]:
        """A block in which a new tag drops no older one, for a caller whose own files make its
        checkpoint whole after the save. No optimizer step may run inside. Tags beyond `keep` are
        dropped when the block ends without an error. Collective; blocks."""
        self._keep = sys.maxsize
        try:
            yield
        finally:
            self._keep = self._shards.policy.keep
        tags = [each for each in self.steps if each.tag is not None]
        if not tags:
            return
        doomed = self._beyond_keep(tags)
        topology = self._shards.topology
        _, (gone, *_) = together(
            topology, SAVING, lambda: [] if topology.rank else _removed(doomed)
        )
        self._drop(tags[-1], [each for each in doomed if each.commit in gone])

    # ---- every rank ------------------------------------------------------------------------------

    def _save_own(
        self, content: Content, commit: int, undo: contextlib.ExitStack
    ) -> tuple[HeldStep, Any]:
        """Freezes, and writes this rank's data and part; `undo` reverts both. Also returns the
        values for other ranks."""
        shards = self._shards
        shards.check_whole()
        shards.check_gathers()
        freeze = shards.store.freeze()
        undo.callback(shards.store.thaw, freeze)
        # a reader may have another working directory
        files = [each.absolute() for each in freeze.files]
        folder = shards.store.folders()[0].absolute()
        placed = [frozen(shards, content, freeze)]
        if content.in_memory:
            files.append(folder / data_name(commit))
            undo.callback(remove, files[-1])
            placed.append(write_data(content.in_memory, files[-1], len(files) - 1, shards.workers))
        names = [written(file, folder) for file in files]
        path = folder / part_name(commit, content.part.rank)
        undo.callback(remove, path)
        told = write_part(path, commit, content, names, placed)
        own = (path, *files[len(freeze.files) :])
        manifest = folder / manifest_name(commit)
        step = content.manifest
        pointer = content.pointer and real(content.pointer.parent) / POINTER_FILE
        kept = HeldStep(commit, step.step, step.tag, freeze, manifest, pointer, own)
        return kept, told

    def _doomed(self, kept: HeldStep, is_whole: bool) -> list[HeldStep]:
        """The steps that the new one replaces: the untagged step, the same tag, tags beyond `keep`.
        Equal on all ranks."""
        same = [each for each in self.steps if each.pointer == kept.pointer]
        if kept.pointer is None:
            return same
        untagged = [each for each in self.steps if each.pointer is None]
        others = [each for each in self.steps if each.pointer not in (None, kept.pointer)]
        return (untagged if is_whole else []) + same + self._beyond_keep([*others, kept])

    def _beyond_keep(self, tags: list[HeldStep]) -> list[HeldStep]:
        return tags[: max(0, len(tags) - self._keep)]

    def _drop(self, kept: HeldStep, doomed: Sequence[HeldStep]) -> None:
        """Drops the steps that a new durable step replaces, those of earlier runs too."""
        save_dir = kept.save_dir
        self.forget(doomed)
        if self._shards.topology.rank == 0:
            for each in doomed:
                if each.pointer is None or each.pointer == kept.pointer:
                    continue
                remove_pointer(each.pointer, self.run_id)
                latest = None if save_dir is None else known_latest(save_dir)
                logger.warning(
                    "checkpoint %r (step %d) is dropped for %r (step %d): keep=%d. Keep more with "
                    'OffloadPolicy(keep=...), or "tiermem": {"keep": ...} in a config; copy=True '
                    "makes copies, which are never dropped%s",
                    each.tag, each.step, kept.tag, kept.step, self._shards.policy.keep,
                    f"; {LATEST_FILE} in {save_dir} still names it"
                    if latest is not None and latest.tag == each.tag else "",
                )  # fmt: skip
            if save_dir is not None:
                num_own = sum(each.save_dir == save_dir for each in self.steps)
                drop_tags(save_dir, self.run_id, max(0, self._keep - num_own))

    def _drop_opened(self) -> None:
        """Drops the step that the model was loaded from. Call it when this run has a durable step
        that a run can continue from."""
        opened = self._opened
        self._opened = None
        if opened is not None and self._shards.topology.rank == 0:
            why = "this run has gone on from it, and has a durable step of its own"
            drop_step(opened, f"{opened} is removed: {why}")

    def went_on_from(self, manifest: Path, opened: Manifest) -> None:
        """Records the manifest that the model was loaded from. The next commit from which a run can
        continue drops an earlier run's untagged step."""
        self._opened = manifest if opened.tag is None and opened.run_id != self.run_id else None

    def forget(self, gone: Sequence[HeldStep]) -> None:
        """Thaws these steps and removes their files. Call it after rank 0 has removed their
        manifests durably."""
        self.steps = [each for each in self.steps if each not in gone]
        self._shards.store.keep_files(bool(self.steps))
        for each in gone:
            self._shards.store.thaw(each.freeze)
            for file in each.files:
                remove(file)

    def _sweep(self) -> None:
        """Removes this rank's files of failed commits that could not be removed then; rank 0 also
        removes manifests."""
        folder = self._shards.store.folders()[0].absolute()
        names = {file.name for each in self.steps for file in (each.manifest, *each.files)}
        for file in sorted(folder.iterdir()):
            if is_of_commit(file.name) and file.name not in names:
                remove(file)


def _removed(doomed: Sequence[HeldStep]) -> list[int]:
    """Removes manifests; returns the commits whose manifest is gone. The others stay durable. Rank
    0 only."""
    return [each.commit for each in doomed if remove(each.manifest)]
