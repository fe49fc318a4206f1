"""Places: the paths of a checkpoint's files, and how one file names another.

A path is written relative to the folder of the file that names it where both lie in one folder, or in two beside each other:
then the folders may be moved together. Else it is absolute.
"""

from __future__ import annotations

import os
from pathlib import Path

from tiermem.checkpoint.format.finding import is_tag, real
from tiermem.checkpoint.format.manifest import LATEST_FILE, POINTER_FILE


def written(path: Path, base: Path) -> str:
    """A path as a file in `base` names it; either may be relative to the working directory, or pass through links."""
    path, base = real(path), real(base)
    if path == base:
        return "."
    if path.parent == base:
        return path.name
    if path.parent == base.parent:
        return f"../{path.name}"
    if path.parent.parent == base.parent:
        return f"../{path.parent.name}/{path.name}"
    return str(path)


def named_folder(argument: str, folder: str | os.PathLike[str]) -> Path:
    """A folder that was given. Raises ValueError for an empty name, of which pathlib makes the working directory."""
    if not os.fspath(folder):
        raise ValueError(f"{argument} is empty; give the folder of checkpoints, '.' for the working directory")
    return Path(folder)


def tag_folder(save_dir: Path, tag: str) -> Path:
    """The folder of a tag. Raises ValueError for one that is no name of a folder below."""
    if not is_tag(tag):
        raise ValueError(
            f"tag is {tag!r}; allowed are names of a folder below the checkpoint's, such as 'global_step10'"
        )
    return save_dir / tag


def pointer_path(save_dir: Path, tag: str) -> Path:
    """The file that says where a tag's manifest is."""
    return tag_folder(save_dir, tag) / POINTER_FILE


def latest_path(save_dir: Path) -> Path:
    """The file that names the newest tag."""
    return save_dir / LATEST_FILE


def copy_name(run_id: str, commit: int, rank: int | None, suffix: str) -> str:
    """The file name of a complete copy's manifest (no rank), part or data: of its own for every run and commit."""
    if rank is None:
        return f"manifest-{run_id}-{commit}.{suffix}"
    return f"{'data' if suffix == 'bin' else 'part'}-{run_id}-{commit}-{rank}.{suffix}"
