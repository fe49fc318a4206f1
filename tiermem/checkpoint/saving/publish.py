"""Publish: rank 0 makes a manifest known: the manifest itself, the tag's pointer, `latest`; each durable before the next.

Every write puts into `undo` what takes it back: after an error the folder is as it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from tiermem.checkpoint.format.crc import crc32c
from tiermem.checkpoint.format.manifest import Manifest, Pointer
from tiermem.checkpoint.format.places import latest_path, pointer_path, written
from tiermem.checkpoint.saving.content import Content
from tiermem.swap import durable

logger = logging.getLogger("tiermem")

_MOST_BYTES = 1 << 20  # far more than a pointer has, and `latest`


class SavingInto:
    """A tag's folder, made if it is missing, that nobody tidies (unfinished.py) until `close`, or the end of this process.

    undo: takes the folder away again. Raises OSError.
    """

    def __init__(self, folder: Path, undo: contextlib.ExitStack) -> None:
        self._fd = -1
        while self._fd < 0:  # again, where somebody has just tidied it away
            make_folder(folder, undo)
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                with contextlib.suppress(OSError):  # without locks nobody tidies
                    fcntl.flock(self._fd, fcntl.LOCK_SH)
                if not (folder.exists() and os.path.samestat(folder.stat(), os.fstat(self._fd))):
                    self.close()

    def close(self) -> None:
        """Lets go. Twice does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def publish(content: Content, manifest: Manifest, path: Path, undo: contextlib.ExitStack) -> None:
    """Writes a manifest to its path and, for a tag, the pointer and `latest`. Blocks; raises OSError."""
    data = manifest.dump()
    undo.callback(remove, path)
    durable.write_file(path, data)
    if content.tag is None or content.save_dir is None:
        return
    pointer = pointer_path(content.save_dir, content.tag)
    with contextlib.closing(SavingInto(pointer.parent, undo)):
        where = written(path.parent, pointer.parent)
        said = Pointer(manifest.run_id, manifest.commit, where, path.name, len(data), crc32c(data))
        replace(pointer, said.dump(), undo)
    if content.save_latest:
        replace(latest_path(content.save_dir), content.tag.encode(), undo)


def replace(path: Path, data: bytes, undo: contextlib.ExitStack) -> None:
    """Writes a file whose old content, if any, comes back when it is undone."""
    before = durable.read_file(path, _MOST_BYTES) if os.path.lexists(path) else None
    if before is None:
        undo.callback(remove, path)
    else:
        undo.callback(_restore, path, before)
    durable.write_file(path, data)


def make_folder(folder: Path, undo: contextlib.ExitStack) -> None:
    """Makes a folder, and those above that are missing."""
    missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
    for each in reversed(missing):
        undo.callback(remove_empty, each)
    durable.make_folder(folder)


def remove(path: Path) -> None:
    """Removes a file that is there; what cannot be is said, and left."""
    try:
        if path.exists():
            durable.remove(path)
    except OSError as error:
        logger.warning("%s is left: %s", path, error.strerror)


def remove_pointer(pointer: Path) -> None:
    """Removes a tag's pointer, and its folder if there is nothing else in it."""
    remove(pointer)
    remove_empty(pointer.parent)


def remove_empty(folder: Path) -> None:
    """Removes a folder if there is nothing in it."""
    with contextlib.suppress(OSError):
        durable.remove_folder(folder)


def _restore(path: Path, data: bytes) -> None:
    try:
        durable.write_file(path, data)
    except OSError as error:
        logger.warning("%s could not be put back: %s", path, error.strerror)
