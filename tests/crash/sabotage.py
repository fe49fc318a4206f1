"""Sabotage: ways to break what keeps states whole, each of which a harness must notice.

Each is done to this process, before it forks. They are what somebody might get wrong: a sync left
out, an order turned round, a slot given back too early, a file, a descriptor or a range forgotten.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiermem.checkpoint.saving import commit, publish
from tiermem.checkpoint.saving.commit import Commits
from tiermem.optim.tiles import StateTiles
from tiermem.swap.disk import durable
from tiermem.swap.disk.files import Segment
from tiermem.swap.disk.run_folder import SEGMENT, RunFolder
from tiermem.swap.store.store import TensorStore
from tiermem.weights.step_run import StepRun


def counts_come_before_the_mark() -> None:
    """A step counts itself before it marks the model as torn, and only an exception in its tiles'
    run does."""
    step, enter = StateTiles.step, contextlib.nullcontext()
    StepRun.changing_all = lambda steps: enter  # type: ignore[method-assign]

    def marking(tiles: StateTiles, *args: Any, **kwargs: Any) -> None:
        try:
            step(tiles, *args, **kwargs)
        except BaseException:
            tiles._shards.steps.is_torn = True
            raise

    StateTiles.step = marking  # type: ignore[method-assign]


def store_is_not_synced() -> None:
    """A freeze waits for writes, and does not sync them."""
    sync = durable.sync
    durable.sync = lambda fd, name: None if name.name == SEGMENT else sync(fd, name)


def small_files_are_not_synced() -> None:
    """Manifests, parts and pointers are renamed before their bytes are on the disk."""
    sync = durable.sync
    durable.sync = lambda fd, name: None if name.suffix == durable.NEW_SUFFIX else sync(fd, name)


def renames_are_not_synced() -> None:
    """The folder of a small file is not synced."""
    durable.sync_folder = lambda folder: None


def small_files_are_written_in_place() -> None:
    """No temporary name, no rename."""

    def write_file(path: Path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            durable.write_all(fd, data[: len(data) // 2], path)
            durable.write_all(fd, data[len(data) // 2 :], path)
            durable.sync(fd, path)
        finally:
            os.close(fd)
        durable.sync_folder(path.parent)

    durable.write_file = write_file


def manifest_comes_before_the_data() -> None:
    """The store is synced once all is published, and not before."""
    make, sync = Commits.make, durable.sync
    late: dict[int, Path] = {}

    def make_first(self: Commits, content: Any) -> None:
        make(self, content)
        while late:
            sync(*late.popitem())

    def sync_late(fd: int, name: Path) -> None:
        if name.name == SEGMENT:
            late[fd] = name
        else:
            sync(fd, name)

    Commits.make, durable.sync = make_first, sync_late  # type: ignore[method-assign]


def slots_are_thawed_at_once() -> None:
    """What a durable step holds is written over by the next one."""
    freeze = TensorStore.freeze

    def freeze_and_thaw(self: TensorStore) -> Any:
        frozen = freeze(self)
        self.thaw(frozen)
        return frozen

    TensorStore.freeze = freeze_and_thaw  # type: ignore[method-assign]


def old_manifest_goes_before_the_new_one() -> None:
    """What is replaced is removed first."""
    publish = commit.publish

    def publish_late(content: Any, manifest: Any, path: Path, *rest: Any) -> None:
        for old in path.parent.glob("manifest-*.json"):
            durable.remove(old)
        publish(content, manifest, path, *rest)

    commit.publish = publish_late


def commits_do_not_wait_for_the_step() -> None:
    """A step that goes on under the next forward is made durable before it has ended."""
    save_own, finish = Commits._save_own, StepRun.finish

    def save_at_once(self: Commits, *given: Any) -> Any:
        StepRun.finish = lambda _: None  # type: ignore[method-assign]
        try:
            return save_own(self, *given)
        finally:
            StepRun.finish = finish  # type: ignore[method-assign]

    Commits._save_own = save_at_once  # type: ignore[method-assign]


def copies_are_not_synced() -> None:
    """A complete copy is made known before its bytes are on the disk."""
    sync = durable.sync
    durable.sync = lambda fd, name: None if name.name.startswith("data-") else sync(fd, name)


def a_file_is_left() -> None:
    """What a predecessor has left stays."""
    publish.remove = lambda path: True
    close = RunFolder.close
    RunFolder.close = lambda self, keep: close(self, True)  # type: ignore[method-assign]


def a_descriptor_is_left() -> None:
    """A segment is never closed."""
    close = Segment.close

    def close_but_one(self: Segment, keep: bool) -> None:
        os.dup(self.fd)
        close(self, keep)

    Segment.close = close_but_one  # type: ignore[method-assign]


def space_is_left() -> None:
    """A store that stays takes more room than what is durable in it."""
    close = Segment.close

    def close_large(self: Segment, keep: bool) -> None:
        close(self, keep)
        if keep:
            with self.file.open("r+b") as file:
                os.posix_fallocate(file.fileno(), self.file.stat().st_size, 2 << 20)

    Segment.close = close_large  # type: ignore[method-assign]


def failed_syncs_are_not_told() -> None:
    """A sync that fails counts as done."""
    sync = durable.sync

    def sync_at_best(fd: int, name: Path) -> None:
        with contextlib.suppress(OSError):
            sync(fd, name)

    durable.sync = sync_at_best


def files_go_before_their_manifest() -> None:
    """What a manifest names is removed although the manifest cannot be."""
    remove = publish.remove

    def remove_and_go_on(file: Path) -> bool:
        remove(file)
        return True

    publish.remove = remove_and_go_on


DEATHS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        store_is_not_synced,
        small_files_are_not_synced,
        renames_are_not_synced,
        small_files_are_written_in_place,
        manifest_comes_before_the_data,
        slots_are_thawed_at_once,
        old_manifest_goes_before_the_new_one,
        copies_are_not_synced,
        commits_do_not_wait_for_the_step,
    )
}
LEAKS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (a_file_is_left, a_descriptor_is_left, space_is_left)
}
FAULTS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (failed_syncs_are_not_told, files_go_before_their_manifest)
}
INTERRUPTS: dict[str, Callable[[], None]] = {
    counts_come_before_the_mark.__name__: counts_come_before_the_mark
}
WAYS = DEATHS | LEAKS | FAULTS | INTERRUPTS
