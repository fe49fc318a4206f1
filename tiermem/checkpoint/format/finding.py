"""Finding: which durable steps a place holds, newest first, and their manifests.

    DIR            what save_checkpoint was given: the tag asked for, else the one that `latest` names; then the others
    DIR/TAG        that tag, with its pointer or a complete copy in it
    a run folder   the newest commit in it; then the others
    a file         that manifest, or where a pointer points

Nothing is taken for another: what is asked for comes first, and what is older is only there for whoever asks for it. Files
are looked at here, never the states they speak of (source.py). They are regular files: a FIFO or a link in the place of one is
an error. Folders may be links, and so may a file that the user names.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tiermem.checkpoint.format.crc import crc32c
from tiermem.checkpoint.format.fields import MOST_BYTES
from tiermem.checkpoint.format.manifest import (
    LATEST_FILE,
    POINTER_FILE,
    Manifest,
    ManifestError,
    Part,
    Pointer,
    parse_manifest,
    parse_part,
    parse_pointer,
)
from tiermem.swap import durable

_MANIFEST = re.compile(r"manifest-(?:[^-]{1,64}-)?(\d{1,18})\.json")
_MOST_TAG_BYTES = 4096


class Found(NamedTuple):
    """A place where a durable step is said to be: a manifest, or a pointer to one."""

    file: Path
    tag: str | None  # the folder's name, where it is a tag's

    def __str__(self) -> str:
        return f"tag {self.tag!r}" if self.tag is not None else str(self.file)


class Opened(NamedTuple):
    """A manifest, whole and valid, and the folder that its paths are relative to."""

    file: Path
    manifest: Manifest
    place: Path  # what names it: the tag's folder, else the manifest


class NothingSaved(FileNotFoundError):
    """The place holds no durable step."""


def find(where: Path, tag: str | None = None) -> list[Found]:
    """The durable steps of a place: what is asked for, then the others, newest first.

    Raises NothingSaved (a FileNotFoundError) when there is none, or not that tag, naming those that are there.
    """
    if tag is not None and not is_tag(tag):
        raise ValueError(f"tag is {tag!r}; a tag is the name of a folder below the checkpoint's")
    if where.is_file():
        return [Found(real(where), None)]
    if not where.is_dir():
        raise NothingSaved(2, "there is no such checkpoint", str(where))
    tags = tags_of(where)
    if tag is not None:
        if not _is_of_tag(where / tag):
            known = ", ".join(tags) or "none"
            raise NothingSaved(2, f"there is no tag {tag!r} here; those there are: {known}", str(where))
        return [_in_tag(where, name) for name in [tag, *(other for other in tags if other != tag)]]
    latest = read_latest(where)
    if latest is not None:
        if not _is_of_tag(where / latest):
            known = ", ".join(tags) or "none"
            raise NothingSaved(2, f"latest names {latest!r}, which is not there; other tags: {known}", str(where))
        return [_in_tag(where, name) for name in [latest, *(other for other in tags if other != latest)]]
    own = _in_folder(where)
    if not own:
        others = f"; name one of its tags: {', '.join(tags)}" if tags else ""
        raise NothingSaved(2, f"holds no file named {LATEST_FILE}, and no manifest{others}", str(where))
    return own


def is_tag(tag: str) -> bool:
    """Whether a tag names a folder below another, and nothing outside it."""
    parts = Path(tag).parts
    return 0 < len(tag) <= 255 and "\0" not in tag and bool(parts) and ".." not in parts and not Path(tag).is_absolute()


def read_latest(where: Path) -> str | None:
    """The tag that `latest` names; None: there is no such file. Raises ManifestError when it names none."""
    file = where / LATEST_FILE
    if not os.path.lexists(file) or file.is_dir():
        return None
    tag = _read(file, _MOST_TAG_BYTES).decode(errors="replace").strip()
    if not is_tag(tag):
        raise ManifestError(f"{file}: {tag[:80]!r} is no tag")
    return tag


def real(path: Path) -> Path:
    """The path without links; where links go in a circle, as far as they lead."""
    return Path(os.path.realpath(path))


def read_pointer(file: Path) -> tuple[Pointer, Path]:
    """A tag's pointer, and the manifest that it names, which may be gone. Raises ManifestError, OSError."""
    pointer = parse_pointer(_read(file), str(file))
    return pointer, file.parent / pointer.folder / pointer.file


def read_manifest(found: Found) -> Opened:
    """The manifest of a place, through its pointer where there is one. Raises ManifestError, OSError."""
    if found.file.name != POINTER_FILE:
        manifest = parse_manifest(_read(found.file), str(found.file))
        return Opened(found.file, manifest, found.file if found.tag is None else found.file.parent)
    pointer, file = read_pointer(found.file)
    data = _read_whole(file, pointer.num_bytes, pointer.crc32c, str(found.file))
    manifest = parse_manifest(data, str(file))
    if (manifest.run_id, manifest.commit) != (pointer.run_id, pointer.commit):
        raise ManifestError(
            f"{found.file}: points at run {pointer.run_id}, commit {pointer.commit}; {file} is of run {manifest.run_id}, "
            f"commit {manifest.commit}"
        )
    return Opened(file, manifest, found.file.parent)


def read_parts(opened: Opened) -> list[tuple[Path, Part]]:
    """Every rank's part, with the folder it lies in. Raises ManifestError, OSError."""
    found = []
    for each in opened.manifest.parts:
        folder = opened.file.parent / each.folder
        data = _read_whole(folder / each.file, each.num_bytes, each.crc32c, str(opened.file))
        found.append((folder, parse_part(data, str(folder / each.file))))
    return found


def tags_of(where: Path) -> list[str]:
    """The tags below a folder, newest first. Raises OSError."""
    found = [(_age(each), each.name) for each in where.iterdir() if _is_of_tag(each)]
    return [name for _, name in sorted(found, reverse=True)]


def _is_of_tag(folder: Path) -> bool:
    if os.path.lexists(folder / POINTER_FILE):
        return True
    with contextlib.suppress(PermissionError):  # lost+found, or another user's
        return not folder.name.startswith("tiermem-") and bool(_commits(folder))
    return False


def _age(folder: Path) -> int:
    """When a tag was written."""
    files = [folder / POINTER_FILE, *(file for _, file in _commits(folder))]
    return max((file.lstat().st_mtime_ns for file in files if os.path.lexists(file)), default=0)


def _in_tag(where: Path, tag: str) -> Found:
    return _in_folder(where / tag)[0]._replace(tag=tag)


def _in_folder(folder: Path) -> list[Found]:
    """A folder's pointer, or its manifests, newest first."""
    if os.path.lexists(folder / POINTER_FILE):
        return [Found(folder / POINTER_FILE, None)]
    return [Found(file, None) for _, file in sorted(_commits(folder), reverse=True)]


def _commits(folder: Path) -> list[tuple[int, Path]]:
    return list(_iter_commits(folder)) if folder.is_dir() else []


def _iter_commits(folder: Path) -> Iterator[tuple[int, Path]]:
    for file in folder.iterdir():
        match = _MANIFEST.fullmatch(file.name)
        if match is not None:
            yield int(match[1]), file


def _read_whole(file: Path, num_bytes: int, crc: int, source: str) -> bytes:
    """A file that another one speaks of. Raises ManifestError when it is not what that says."""
    data = _read(file)
    if len(data) != num_bytes:
        raise ManifestError(f"{file}: has {len(data)} bytes; {source} says {num_bytes}: it was cut, or is another's")
    if crc32c(data) != crc:
        raise ManifestError(f"{file}: its CRC-32C is not the one that {source} says: it is damaged, or another's")
    return data


def _read(file: Path, most_bytes: int = MOST_BYTES) -> bytes:
    data = durable.read_file(file, most_bytes)
    if len(data) > most_bytes:
        raise ManifestError(f"{file}: has more than {most_bytes} bytes, which no such file has")
    return data
