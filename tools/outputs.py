"""Outputs: the files that a command was asked to write, and the mark by which it knows its own.

A file that exists is overwritten only when the same command made it. The mark differs with the kind of file:

    .json   the key "made_by" at the top:         {"made_by": "tiermem bench step", ...}
    .csv    the first line:                       # made by tiermem bench step
    .png    the text "Software" in its header:    figure.savefig(file, metadata={"Software": "tiermem bench step"})

Checked before anything is measured, so that an hour of measuring does not end in a refusal.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path

_HEADER_BYTES = 1 << 16  # matplotlib writes its texts right behind the picture's size


def check_outputs(paths: Iterable[Path | None], made_by: str) -> None:
    """Sees that every file can be written. None stands for an output that was not asked for.

    Raises FileExistsError for a file that `made_by` did not make, FileNotFoundError or PermissionError for a folder that is
    missing or closed to us, ValueError when two outputs are one file.
    """
    wanted = [path for path in paths if path is not None]
    if len({path.resolve() for path in wanted}) < len(wanted):
        raise ValueError(f"two outputs are one file: {', '.join(map(str, wanted))}; give each a name of its own")
    for path in wanted:
        _check_folder(path)
        if (path.exists() or path.is_symlink()) and not _is_made_by(path, made_by):
            raise FileExistsError(
                errno.EEXIST, f"not made by {made_by!r}, so it is not overwritten: move it, or name another", str(path)
            )


def csv_mark(made_by: str) -> str:
    """The first line of a CSV file, without its end."""
    return f"# made by {made_by}"


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, f"no such folder: make it first, or correct {path.name}", str(path.parent)
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{path.name} cannot be written here", str(path.parent))


def _is_made_by(path: Path, made_by: str) -> bool:
    if not path.is_file():
        return False
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            return isinstance(content, dict) and content.get("made_by") == made_by
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except (OSError, ValueError):  # not readable, or no JSON: not ours
        return False
    if path.suffix == ".csv":
        return header.splitlines()[:1] == [csv_mark(made_by).encode()]
    return header.startswith(b"\x89PNG") and b"tEXtSoftware\0" + made_by.encode() in header
