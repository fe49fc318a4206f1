"""Predecessors: durable steps of earlier runs, which go once this run has one in their place.

A run that goes on from another's state has a store of its own, and the other's stays what it was until this run has saved:

    the step that it was opened from    goes with this run's first durable step, unless it is a tag's
    tags of one folder of checkpoints   the newest `keep` stay, whoever saved them; older ones go, with a warning each

A run's folders go with the last durable step in them. What goes is taken over first: a run that lives, or a folder that
somebody reads, is left as it is, with a word. Complete copies are never dropped. Rank 0 does all of it, on what it can see;
whatever a death in between leaves is taken away by the next save.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from tiermem.checkpoint.format.finding import Found, read_latest, read_manifest, read_parts
from tiermem.checkpoint.format.manifest import POINTER_FILE, ManifestError, Pointer, parse_pointer
from tiermem.checkpoint.saving.publish import remove, remove_pointer
from tiermem.swap.run_folder import RunFolder, RunName

logger = logging.getLogger("tiermem")


def drop_tags(save_dir: Path, run_id: str, num_more: int) -> None:
    """Of tags that other runs have saved, keeps the newest `num_more` that are whole. Blocks; never raises OSError."""
    others = [(file, _manifest_of(file, pointer)) for file, pointer in _pointers(save_dir) if pointer.run_id != run_id]
    stores = [(file, manifest) for file, manifest in others if RunName.of(manifest.parent) is not None]  # and no copies
    for file, manifest in stores:
        if not manifest.exists():  # a death came between the two
            remove_pointer(file)
    for file, manifest in [each for each in stores if each[1].exists()][num_more:]:
        if drop_step(manifest, f"checkpoint {file.parent.name!r} of an earlier run is dropped: newer ones are kept"):
            remove_pointer(file)


def drop_step(manifest: Path, why: str) -> bool:
    """Removes a durable step of a run that is no more, and its folders with the last one; whether it did. Blocks."""
    try:
        folders = _folders(manifest)
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
        commit = manifest.stem.partition("-")[2]
        remove(manifest)
        is_last = not any(manifest.parent.glob("manifest-*.json"))
        for each in claimed:
            for file in (
                () if is_last else [*each.folder.glob(f"part-{commit}-*.json"), each.folder / f"data-{commit}.bin"]
            ):
                remove(file)
            each.close(keep=not is_last)
    return True


def _claim(folder: Path, undo: contextlib.ExitStack) -> RunFolder:
    claimed = RunFolder.claim(folder)
    undo.callback(claimed.close, True)
    return claimed


def _folders(manifest: Path) -> Sequence[Path]:
    """Every folder that the ranks of a saved step had, on all their paths."""
    found = {manifest.parent}
    for folder, part in read_parts(read_manifest(Found(manifest, None))):
        found.update((folder / file).resolve().parent for file in part.files)
        found.add(folder.resolve())
    return sorted(folder for folder in {each.resolve() for each in found} if folder.exists())


def _pointers(save_dir: Path) -> list[tuple[Path, Pointer]]:
    """The pointers of a folder's tags, newest first, but for what `latest` names; what is no pointer is not ours to judge."""
    latest, found = read_latest(save_dir), []
    for file in save_dir.glob(f"*/{POINTER_FILE}"):
        if file.parent.name != latest:
            with contextlib.suppress(ManifestError, OSError):
                found.append((file.stat().st_mtime_ns, file, parse_pointer(file.read_bytes(), str(file))))
    return [(file, pointer) for _, file, pointer in sorted(found, key=lambda each: each[0], reverse=True)]


def _manifest_of(file: Path, pointer: Pointer) -> Path:
    return (file.parent / pointer.folder / pointer.file).resolve()
