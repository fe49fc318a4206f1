"""Unfinished: what a save leaves in a tag's folder whose process dies before the tag's pointer names it, and how it goes.

    <dir>/<tag>/    held by flock of the folder itself while somebody saves into it (publish.py), which ends with its process
        data-<run id>-<commit>-<rank>.bin, part-..., tiermem.json.new    named by no pointer: a copy that was not finished

The next save into <dir> removes them, unless somebody holds that folder, or might on another host. A folder with a manifest but
no pointer is left alone, for somebody may have moved a whole copy there; so are empty folders, which may be anybody's.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tiermem.checkpoint.format.finding import read_pointer
from tiermem.checkpoint.format.manifest import POINTER_FILE, ManifestError
from tiermem.checkpoint.saving.publish import remove, remove_empty
from tiermem.swap.durable import NEW_SUFFIX
from tiermem.swap.run_folder import RunName
from tiermem.swap.run_lock import is_of_one_host

logger = logging.getLogger("tiermem")

OURS = re.compile(r"(?:manifest|part|data)-([0-9a-f]{1,32}-\d+)(?:-(\d+))?\.(?:json|bin)(?:\.new)?")
"""A file of a complete copy: its run and commit, and the rank; the manifest has none."""


def remove_unfinished(save_dir: Path) -> None:
    """Removes what killed saves have left in the folders of tags. Blocks; never raises OSError. For one rank of a run."""
    try:
        if not is_of_one_host(save_dir):
            return
        below = [each for each in sorted(save_dir.iterdir()) if each.is_dir() and not each.is_symlink()]
    except OSError:  # not there yet, or not to be read: the save will tell
        return
    for folder in below:
        with contextlib.suppress(OSError):  # what somebody else does there meanwhile
            if RunName.of(folder) is None and _unfinished(folder):
                _tidy(folder)


def _tidy(folder: Path) -> None:
    with alone(folder) as is_alone:
        files = _unfinished(folder) if is_alone else []
        if files:
            logger.warning(
                "%s: a save that was killed left %s: removed", folder, ", ".join(file.name for file in files)
            )
        for file in files:
            remove(file)
        if files:
            remove_empty(folder)


def _unfinished(folder: Path) -> list[Path]:
    """The files in a tag's folder that no pointer names, nor will: unless somebody saves into it now."""
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
    found = [name for name in names if (match := OURS.fullmatch(name)) is not None and match[1] != kept]
    found += names & {POINTER_FILE + NEW_SUFFIX}
    return [folder / name for name in sorted(found)]


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether nobody saves into a folder, nor begins to while the block runs."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except OSError:
            is_alone = False
        yield is_alone
    finally:
        os.close(fd)
