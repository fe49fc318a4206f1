"""Predecessors: durable steps of earlier runs, which go once this run has one in their place.

A run that goes on from another's state has a store of its own, and the other's stays what it was until this run has saved:

    the step that it was opened from    goes with this run's first durable step, unless it is a tag's
    tags of one folder of checkpoints   the newest `keep` stay, whoever saved them; older ones go, with a warning each

With each goes a step without a tag that the same run saved before, which it stands in for: that run died before it could remove
it. A run's folders go with the last durable step in them. What goes is taken over first: a run that lives, or a folder that
somebody reads, is left as it is, with a word. Complete copies are never dropped. Rank 0 does all of it, on what it can see;
whatever a death in between leaves is taken away by the next save.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from tiermem.checkpoint.format.finding import (
    Found,
    Opened,
    read_latest,
    read_manifest,
    read_parts,
    read_pointer,
    real,
)
from tiermem.checkpoint.format.manifest import POINTER_FILE, ManifestError, Pointer, data_name, manifest_name
from tiermem.checkpoint.saving.publish import remove, remove_pointer
from tiermem.swap.run_folder import RunFolder, RunName, run_folders

logger = logging.getLogger("tiermem")


def drop_tags(save_dir: Path, run_id: str, num_more: int) -> None:
    """Of tags that other runs have saved, keeps the newest `num_more` that are whole. Blocks; never raises OSError."""
    try:
        pointers = _pointers(save_dir)
    except (ManifestError, OSError) as error:
        logger.warning("%s: checkpoints of earlier runs are left: %s", save_dir, error)
        return
    others = [(file, manifest) for file, pointer, manifest in pointers if pointer.run_id != run_id]
    stores = [(file, manifest) for file, manifest in others if RunName.of(manifest.parent) is not None]  # and no copies
    gone = [file for file, manifest in stores if is_removed(manifest)]
    for file in gone:  # a death came between the two
        remove_pointer(file)
    for file, manifest in [each for each in stores if each[0] not in gone][num_more:]:
        if drop_step(manifest, f"checkpoint {file.parent.name!r} of an earlier run is dropped: newer ones are kept"):
            remove_pointer(file)


def is_removed(manifest: Path) -> bool:
    """Whether a manifest in a run's folder was removed: it is gone, and that folder, or another run's beside it, is there.

    A disk that is not mounted, or a folder that may not be read, has removed nothing. Never raises OSError.
    """
    try:
        manifest.lstat()
    except FileNotFoundError:
        return manifest.parent.is_dir() or bool(run_folders(manifest.parent.parent))
    except OSError:
        return False
    return False


def drop_step(manifest: Path, why: str) -> bool:
    """Removes a durable step of a run that is no more, and its folders with the last one; whether it did. Blocks."""
    try:
        opened = read_manifest(Found(manifest, None))
        folders, superseded = _folders(opened), _superseded(opened)
    except (ManifestError, OSError) as error:
        logger.warning("%s is left: %s", manifest, error)
        return False
    with contextlib.ExitStack() as undo:
        try:
            claimed = [_claim(folder, undo) for folder in folders]
        except OSError as error:
            logger.warning("%s is left: %s: %s", manifest, error.filename, error.strerror)
            return False
        undo.pop_all()
        logger.warning("%s", why)
        commits = [*superseded, opened.manifest.commit]
        for commit in commits:
            remove(manifest.parent / manifest_name(commit))
        is_last = not any(manifest.parent.glob("manifest-*.json"))
        for each in claimed:
            for commit in () if is_last else commits:
                for file in [*each.folder.glob(f"part-{commit}-*.json"), each.folder / data_name(commit)]:
                    remove(file)
            each.close(keep=not is_last)
    return True


def _superseded(opened: Opened) -> list[int]:
    """The commits of steps without a tag for which a later one of the same run stands in."""
    newer, found = opened.manifest, []
    if newer.excluded or newer.optimizer is None:  # no run goes on from it alone
        return []
    for file in opened.file.parent.glob("manifest-*.json"):
        with contextlib.suppress(ManifestError, OSError):
            other = read_manifest(Found(file, None)).manifest
            if other.tag is None and other.commit < newer.commit:
                found.append(other.commit)
    return found


def _claim(folder: Path, undo: contextlib.ExitStack) -> RunFolder:
    claimed = RunFolder.claim(folder)
    undo.callback(claimed.close, True)
    return claimed


def _folders(opened: Opened) -> Sequence[Path]:
    """Every folder that the ranks of a saved step had, on all their paths."""
    found = {opened.file.parent}
    for folder, part in read_parts(opened):
        found.update(real(folder / file).parent for file in part.files)
        found.add(folder)
    return sorted(folder for folder in {real(each) for each in found} if folder.exists())


def _pointers(save_dir: Path) -> list[tuple[Path, Pointer, Path]]:
    """The pointers of a folder's tags with their manifests, newest first, but for what `latest` names.

    What is no pointer is not ours to judge. Raises ManifestError, OSError when `latest` cannot be read.
    """
    latest, found = read_latest(save_dir), []
    for file in save_dir.glob(f"*/{POINTER_FILE}"):
        if file.parent.name != latest:
            with contextlib.suppress(ManifestError, OSError):
                pointer, manifest = read_pointer(file)
                found.append((file.stat().st_mtime_ns, (file, pointer, real(manifest))))
    return [each for _, each in sorted(found, key=lambda each: each[0], reverse=True)]
