"""Publish: rank 0 writes a manifest, the tag's pointer and `latest`; then it removes old steps."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tiermem.checkpoint.format.fields import MOST_BYTES, Json, ManifestError, crc32c
from tiermem.checkpoint.format.finding import (
    MOST_POINTER_BYTES,
    Found,
    Opened,
    joined_rows,
    known_latest,
    newer_of,
    pointer_path,
    pointers_of,
    read_latest,
    read_manifest,
    read_parts,
    read_pointer,
    real,
    written,
)
from tiermem.checkpoint.format.manifest import (
    LATEST_FILE,
    POINTER_FILE,
    Manifest,
    Part,
    PartFile,
    Pointer,
    data_name,
    manifest_name,
)
from tiermem.checkpoint.saving.pieces import Placed, Resting, Run, Stretch, checksums
from tiermem.run.shards import Shards
from tiermem.swap.disk import durable
from tiermem.swap.disk.durable import NEW_PREFIX, NEW_SUFFIX
from tiermem.swap.disk.run_folder import (
    RunFolder,
    RunName,
    is_held,
    is_of_one_host,
    leads_to,
    remove,
    run_folders,
)
from tiermem.swap.store.entry import Freeze

# ---- the content of a commit or a copy -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Content:
    """The content of a commit or copy. The manifest and `save_latest` are equal on all ranks, the
    rest is this rank's.

    manifest: without its commit, parts and checksums. part: without its commit, files and states.
    save_dir: None for a durable step without a tag.
    """

    manifest: Manifest
    part: Part
    save_dir: Path | None
    save_latest: bool
    resting: Resting  # states on NVMe
    in_memory: Sequence[Stretch]

    @property
    def pointer(self) -> Path | None:
        """The pointer of its tag in `save_dir`; None for a durable step without a tag."""
        if self.save_dir is None or self.manifest.tag is None:
            return None
        return pointer_path(self.save_dir, self.manifest.tag)

    @property
    def is_whole(self) -> bool:
        """Whether a run can continue from it: no parameter is left out, and the optimizer is
        included."""
        return not self.manifest.excluded and self.manifest.optimizer is not None


def write_part(
    file: Path, commit: int, content: Content, files: Sequence[str], placed: Sequence[Placed]
) -> Json:
    """Writes this rank's part durably; its pieces refer to `files` by index. A state may have
    pieces in several of `placed`. Blocks; raises OSError.

    Returns JSON for rank 0: folder, file, size in bytes and CRC-32C of the part, the checksums of
    its states, and the folders of `files`.
    """
    states = joined_rows([each.rows for each in placed]).states()
    data = dataclasses.replace(
        content.part, commit=commit, files=tuple(files), states=states
    ).dump()
    durable.write_file(file, data)
    return {
        "folder": str(file.parent),
        "file": file.name,
        "bytes": len(data),
        "crc32c": crc32c(data),
        "sums": [(*key, found) for each in placed for key, found in each.sums.items()],
        "places": sorted({str(real(file.parent / each).parent) for each in files}),
    }


def manifest_of(content: Content, commit: int, told: Sequence[Any], folder: Path) -> Manifest:
    """The manifest, for a file in `folder`, from the values of all ranks. Raises RuntimeError if a
    state is not whole."""
    parts = tuple(
        PartFile(
            rank, written(Path(each["folder"]), folder), each["file"], each["bytes"], each["crc32c"]
        )
        for rank, each in enumerate(told)
    )
    sums: dict[str, dict[str, list[Run]]] = {}
    for each in told:
        for param, state, runs in each["sums"]:  # of other ranks a run is a list
            sums.setdefault(param, {}).setdefault(state, []).extend(runs)
    whole = {
        param: {state: checksums(found, state, "of", param) for state, found in states.items()}
        for param, states in sums.items()
    }
    return dataclasses.replace(content.manifest, commit=commit, parts=parts, checksums=whole)


def check_seen(told: Sequence[Any]) -> None:
    """Raises OSError when a rank has written to a folder that rank 0 does not see."""
    for rank, each in enumerate(told):
        if not (Path(each["folder"]) / each["file"]).is_file():
            raise FileNotFoundError(
                2,
                f"rank {rank} has written {each['file']}, which rank 0 does not see: a copy "
                "needs a folder that all ranks "
                "share. Save on the paths of the store, or to a shared file system",
                each["folder"],
            )


def frozen(shards: Shards, content: Content, freeze: Freeze) -> Placed:
    """The frozen pieces on NVMe; `file` is an index into `freeze.files`. Blocks only to compute
    unknown checksums, and to read again what a read has found damaged.

    Raises DamagedEntry for what has not been written since: a save of it would replace whole steps.
    """

    def read(entry: str, start: int, stop: int) -> torch.Tensor:
        return shards.values.read_part(entry, torch.uint8, slice(start, stop))

    resting = content.resting
    suspects = shards.store.sums.suspects
    for suspect in tuple(suspects):
        if suspect[0] in resting.entries:
            read(*suspect)
        del suspects[suspect]
    return Placed(resting.rows(freeze), resting.sums(shards.store.sums, read, shards.workers))


# ---- the manifest, the tag's pointer, `latest` ---------------------------------------------------
#
# Each file is durable before the next is written. Every write registers its reversal in `undo`:
# after an error the folder is as before.

logger = logging.getLogger("tiermem")


class SavingInto:
    """Makes a tag's folder if it is missing, and locks it shared. Until `close`, or the end of this
    process, no save removes unfinished files from it.

    undo: removes the folder again. Raises OSError: ENOTDIR for a link in its place, which may lead
        anywhere.
    """

    def __init__(self, folder: Path, undo: contextlib.ExitStack) -> None:
        self._own = durable.Owned()
        while not self._own:  # repeat if another save has just removed the folder
            make_folder(folder, undo)
            with contextlib.suppress(FileNotFoundError), durable.named(folder):
                self._own.append(
                    os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                )
                with contextlib.suppress(OSError):  # without locks no save removes unfinished files
                    fcntl.flock(self._own[0], fcntl.LOCK_SH)
                if not leads_to(folder, self._own[0]):
                    self.close()

    def close(self) -> None:
        """Releases the lock. Calling it twice does nothing."""
        self._own.close()


def publish(
    content: Content,
    manifest: Manifest,
    path: Path,
    told: Sequence[Any],
    undo: contextlib.ExitStack,
) -> Path | None:
    """Writes a manifest to its path and, for a tag, a README, the pointer and `latest`. Blocks;
    raises OSError. Returns the manifest in the store of another run that the tag named before.

    told: of every rank, by `write_part`.

    Without `save_latest`, a `latest` that names this tag already is written too: the pointer that
    it is a copy of has changed.
    """
    data = manifest.dump()
    undo.callback(remove, path)
    durable.write_file(path, data)
    if manifest.tag is None or content.save_dir is None:
        return None
    pointer = pointer_path(content.save_dir, manifest.tag)
    replaced = None
    with contextlib.suppress(ManifestError, OSError):
        old, file = read_pointer(pointer)
        is_of_store = RunName.of(real(file).parent) is not None
        if old.run_id != manifest.run_id and is_of_store and _is_own(pointer, old):
            replaced = file
    with contextlib.closing(SavingInto(pointer.parent, undo)), _in_turn(content.save_dir):
        latest = known_latest(content.save_dir)
        _explain(pointer, path, manifest, told, undo)
        said = pointer_to(path, data, manifest, content.save_dir, manifest.tag, latest).dump()
        names = [pointer]
        if content.save_latest or (latest is not None and latest.tag == manifest.tag):
            names.append(content.save_dir / LATEST_FILE)
        replace(names, said, undo)
    return replaced


@contextlib.contextmanager
def _in_turn(save_dir: Path) -> Iterator[None]:
    """A block that one process at a time runs in a folder of checkpoints: else the pointer of a tag
    may be one process's, and `latest` another's."""
    with durable.opened(save_dir) as fd:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # also that of a child, forked meanwhile


def pointer_to(
    path: Path, data: bytes, manifest: Manifest, save_dir: Path, tag: str, latest: Pointer | None
) -> Pointer:
    """A tag's pointer to its manifest `path`, whose bytes are `data`. Its number follows that of
    `latest`, if that is known."""
    series = secrets.token_hex(6)
    number = 0
    if latest is not None and latest.series:
        series = latest.series
        number = latest.number
    folder = pointer_path(save_dir, tag).parent
    where = written(path.parent, folder)
    witness = "" if where == "." else _witness_in(folder)
    file = where, path.name, len(data), crc32c(data)
    counted = tag, manifest.step, series, number + 1
    return Pointer(manifest.run_id, manifest.commit, *file, *counted, witness)


README_FILE = "README.txt"
_MARK = b"A checkpoint of tiermem: "


def _explain(
    pointer: Path, path: Path, manifest: Manifest, told: Sequence[Any], undo: contextlib.ExitStack
) -> None:
    """Says in a file beside a pointer where the bytes of the step lie; a complete copy has none. A
    user's file stays."""
    readme = pointer.parent / README_FILE
    places = sorted({place for each in told for place in each["places"]})
    if durable.exists(readme) and not _is_readme(readme):
        return
    if real(path).parent == real(pointer.parent):
        if durable.exists(readme):
            remove(readme)
        return
    folders = "".join(f"    {each}\n" for each in places)
    text = _TOLD.format(tag=manifest.tag, step=manifest.step, folders=folders)
    replace([readme], _MARK + os.fsencode(text), undo)
    logger.info(
        "checkpoint %r (step %d) stays where its states rest: %s; %s says how to take it along",
        manifest.tag, manifest.step, ", ".join(places), readme,
    )  # fmt: skip


_TOLD = """step {step}, tag {tag}.

This folder only names it. Its bytes stay where the run keeps its states:

{folders}
Delete or move one of them, and the checkpoint is lost. A folder that holds all of it is written by

    tiermem export --whole FOLDER_OF_CHECKPOINTS OUT --tag {tag}

or by the save itself: copy=True, or "tiermem": {{"copies": true}} in a config.
"""


def _witness_in(folder: Path) -> str:
    """What a copy of a tag's folder has not, also one with its name: the number of the README in
    its file system, and when that file changed. Empty if there is none."""
    with contextlib.suppress(FileNotFoundError):
        found = (folder / README_FILE).stat()
        return f"{found.st_ino:x}-{found.st_ctime_ns:x}"
    return ""


def _is_readme(file: Path) -> bool:
    with contextlib.suppress(OSError):
        return durable.read_file(file, MOST_POINTER_BYTES).startswith(_MARK)
    return False


def said_of(path: Path, save_dir: Path, tag: str) -> bytes:
    """The bytes of a tag's pointer to the manifest `path`, and of `latest`. Blocks; raises
    ManifestError, OSError."""
    data = durable.read_file(path, MOST_BYTES)
    manifest = read_manifest(Found(path)).manifest
    return pointer_to(path, data, manifest, save_dir, tag, known_latest(save_dir)).dump()


def replace(paths: Sequence[Path], data: bytes, undo: contextlib.ExitStack) -> None:
    """Writes the same bytes to files, one after the other. All take their disk space before the
    first changes, so that a full disk changes none. `undo` restores the old content, or removes
    files that there were not. Raises OSError."""
    with contextlib.ExitStack() as making:
        made = [making.enter_context(durable.NewFile(path)) for path in paths]
        for new in made:
            new.write(data)
        for new in made:
            if durable.exists(new.path):
                old = durable.read_file(new.path, MOST_POINTER_BYTES)
                undo.callback(_restore, new.path, old)
            else:
                undo.callback(remove, new.path)
            new.place()
            new.sync_names()


def make_folder(folder: Path, undo: contextlib.ExitStack) -> None:
    """Makes a folder and its missing parents. `undo` removes those that are empty."""
    missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
    for each in reversed(missing):
        undo.callback(remove_empty, each)
    durable.make_folder(folder)


def remove_pointer(pointer: Path, run_id: str | None = None) -> None:
    """Removes a tag's pointer and its README, and the tag's folder if it is then empty.

    run_id: a pointer that names another run's step by now stays.
    """
    with contextlib.suppress(ManifestError, OSError):
        if run_id not in (None, read_pointer(pointer)[0].run_id):
            return
    remove(pointer)
    if _is_readme(pointer.parent / README_FILE):
        remove(pointer.parent / README_FILE)
    remove_empty(pointer.parent)


def remove_empty(folder: Path) -> None:
    """Removes a folder if it is empty."""
    with contextlib.suppress(OSError):
        durable.remove_folder(folder)


def _restore(path: Path, data: bytes) -> None:
    try:
        if durable.read_file(path, MOST_POINTER_BYTES) != data:
            durable.write_file(path, data)
    except OSError as error:
        logger.warning("%s could not be put back: %s", path, error.strerror)


# ---- unfinished copies: files that a killed save left in a tag's folder --------------------------

OURS = re.compile(
    rf"{NEW_PREFIX}?(?:manifest|part|data)-([0-9a-f]{{1,32}}-\d+)(?:-(\d+))?\.(?:json|bin)(?:\.new)?"
)
"""The name of a complete copy's file: its run and commit, and the rank. A manifest's name has no
rank."""

_NEW = re.compile(
    rf"{NEW_PREFIX}?(?:{re.escape(POINTER_FILE)}|{LATEST_FILE}){re.escape(NEW_SUFFIX)}"
)


def remove_unfinished(save_dir: Path) -> None:
    """Removes files that killed saves left in the folders of tags. Blocks; never raises OSError.
    Call it on one rank of a run.

        <dir>/<tag>/    a process that saves into it holds a flock on the folder; the lock ends with the process
            data-<run id>-<commit>-<rank>.bin, part-..., <random>.tiermem.json.new    unfinished if no pointer names them
    <dir>/<random>.latest.new    unfinished if no process holds its lock

    A folder stays as it is if a process holds its lock. Nothing is removed if another host may use
    the file system, whose locks are not visible here. A folder with a manifest but no pointer
    stays: a user may have moved a whole copy there. Empty folders stay, because they may belong to
        other programs.
    """
    try:
        if not is_of_one_host(save_dir):
            return
        below = [
            each for each in sorted(save_dir.iterdir()) if each.is_dir() and not each.is_symlink()
        ]
    except OSError:  # missing or not readable: the save itself raises the error
        return
    remove_new(save_dir, [LATEST_FILE])
    for folder in below:
        with contextlib.suppress(OSError):  # another process may change it meanwhile
            if RunName.of(folder) is None and _unfinished(folder) and (files := tidy(folder)):
                logger.warning(
                    "%s: a save that was killed left %s: removed",
                    folder,
                    ", ".join(file.name for file in files),
                )


def remove_new(folder: Path, names: Iterable[str]) -> None:
    """Removes the files in the making of these names that killed processes left in a folder. Never
    raises OSError. Does nothing where another host's locks may be invisible."""
    with contextlib.suppress(OSError):
        for name in names if is_of_one_host(folder) else ():
            for file in durable.left_of(folder / name):
                if not is_held(file):
                    remove(file)


def tidy(folder: Path) -> list[Path]:
    """Removes the files in a tag's folder that no pointer names, unless a process saves into it.
    Returns them. Raises OSError."""
    with alone(folder) as is_alone:
        files = _unfinished(folder) if is_alone else []
        for file in files:
            remove(file)
        if files:
            remove_empty(folder)
    return files


def _unfinished(folder: Path) -> list[Path]:
    """The files in a tag's folder that no pointer names. They are unfinished unless a process saves
    into the folder."""
    names = {file.name for file in folder.iterdir()}
    kept = ""
    if POINTER_FILE in names:
        try:
            pointer, _ = read_pointer(folder / POINTER_FILE)
        except ManifestError:
            return []
        kept = f"{pointer.run_id}-{pointer.commit}"
    elif any(name.startswith("manifest-") and name.endswith(".json") for name in names):
        return []
    found = [
        name for name in names if (match := OURS.fullmatch(name)) is not None and match[1] != kept
    ]
    found += [name for name in names if _NEW.fullmatch(name)]
    return [folder / name for name in sorted(found)]


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Tries to lock a folder. Yields True if no process saves into it; then none starts to while
    the block runs."""
    with durable.opened(folder) as fd:
        is_alone = False
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        yield is_alone


# ---- durable steps of earlier runs ---------------------------------------------------------------
#
# A run that loads the state of an earlier run has its own store. The earlier run's store stays
# until this run has saved:
#
#     the step that was loaded             dropped after this run's first durable step that is whole, unless it has a tag
#     the tag that this run saves again    dropped with a warning when the new one is durable
#     tags in one folder of checkpoints    the newest `keep` of all runs stay; each older one is dropped with a warning
#     tags in a copy of a folder           stay, with a warning: the first folder may still name their states
#
# A dropped step takes with it the untagged steps that the same run made before it and did not live
# to remove. A run's folders are removed with its last durable step. Before anything is removed,
# this process claims the folders: if another process uses one, the step stays, with a warning.
# Complete copies are never dropped. Only rank 0 drops steps, on the paths that it can see. If it
# dies in between, the next save removes the rest.


def drop_tags(save_dir: Path, run_id: str, num_more: int) -> None:
    """Keeps the newest `num_more` tags of other runs and drops the older ones. Blocks; never raises
    OSError.

    A pointer whose manifest was removed is removed too, and does not count. Complete copies are
    neither dropped nor counted, nor are second names of a tag (links, copied pointers).
    """
    save_dir = real(save_dir)
    try:
        latest = read_latest(save_dir)
        pointers = pointers_of(save_dir)
    except (ManifestError, OSError) as error:
        logger.warning("%s: checkpoints of earlier runs are left: %s", save_dir, error)
        return
    named = None if latest is None else real(save_dir / latest.tag / POINTER_FILE)
    for file, pointer, manifest in pointers:
        tag = pointer.tag or file.parent.name
        if (
            pointer.run_id == run_id
            or file == named
            or not file == real(file) == save_dir / tag / POINTER_FILE
            or RunName.of(real(manifest).parent) is None
        ):
            continue
        if is_removed(pointer, manifest):  # a process died before it removed the pointer
            remove_pointer(file)
            continue
        num_more -= 1
        why = f"checkpoint {tag!r} of an earlier run is dropped: newer ones are kept"
        if num_more < 0 and _is_own(file, pointer) and drop_step(manifest, why):
            remove_pointer(file)


def _is_own(file: Path, pointer: Pointer) -> bool:
    """Whether a pointer lies in the tag's folder that its save wrote it to, or is older than that
    question. If not, a warning says that the states stay: another folder may name them."""
    is_own = pointer.witness in ("", _witness_in(file.parent))
    if not is_own:
        _tell_of_copy(file.parent, real(file.parent / pointer.folder))
    return is_own


@functools.cache  # once
def _tell_of_copy(folder: Path, states: Path) -> None:
    logger.warning(
        "%s: its states stay in %s, because the folder looks like a copy, and another folder may "
        "name the same states. Delete them when no checkpoint needs them",
        folder, states,
    )  # fmt: skip


def is_removed(pointer: Pointer, manifest: Path) -> bool:
    """Whether the manifest of a pointer was removed from a run's folder: it is missing, and that
    folder or another run's beside it exists, and the tag has no newer one there.

    If the disk is not mounted or the folder is not readable, the answer is False. Never raises
    OSError.
    """
    try:
        manifest.lstat()
    except FileNotFoundError:
        is_there = manifest.parent.is_dir() or bool(run_folders(manifest.parent.parent))
        return is_there and newer_of(pointer, manifest) is None
    except OSError:
        return False
    return False


def drop_step(manifest: Path, why: str) -> bool:
    """Removes a durable step of a run that has ended; its folders too if it is the last. Returns
    whether it did. Blocks."""
    try:
        opened = read_manifest(Found(manifest))
        folders = _folders(opened)
        superseded = _superseded(opened)
    except (ManifestError, OSError) as error:
        logger.warning("%s is left: %s", manifest, error)
        return False
    with contextlib.ExitStack() as closing:
        try:
            claimed = []
            for folder in folders:
                claimed.append(RunFolder.claim(folder))
                closing.callback(claimed[-1].close, True)
            logger.warning("%s", why)
            doomed = (*superseded, opened.manifest.commit)
            commits = [each for each in doomed if remove(manifest.parent / manifest_name(each))]
            is_last = not any(manifest.parent.glob("manifest-*.json"))
            for each in claimed:
                for commit in () if is_last else commits:
                    for file in [
                        *each.folder.glob(f"part-{commit}-*.json"),
                        each.folder / data_name(commit),
                    ]:
                        remove(file)
                each.close(keep=not is_last)
        except OSError as error:
            logger.warning("%s is left: %s", manifest, error)
            return False
    return opened.manifest.commit in commits


def _superseded(opened: Opened) -> list[int]:
    """The commits of earlier untagged steps of the same run that this step replaces."""
    newer = opened.manifest
    found = []
    if newer.excluded or newer.optimizer is None:  # no run can continue from it
        return []
    for file in opened.file.parent.glob("manifest-*.json"):
        with contextlib.suppress(ManifestError, OSError):
            other = read_manifest(Found(file)).manifest
            if other.tag is None and other.commit < newer.commit:
                found.append(other.commit)
    return found


def _folders(opened: Opened) -> Sequence[Path]:
    """Every existing folder that holds files of a saved step, of all ranks and paths."""
    found = {opened.file.parent}
    for folder, part in read_parts(opened):
        found.update(real(folder / file).parent for file in part.files)
        found.add(folder)
    return sorted(folder for folder in {real(each) for each in found} if folder.exists())
