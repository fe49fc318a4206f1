"""Whole: writes a saved step as a complete copy, which can be moved and copied as one folder."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from tiermem.checkpoint.format.fields import crc32c
from tiermem.checkpoint.format.finding import (
    Found,
    copy_name,
    find,
    is_tag,
    pointer_path,
    read_manifest,
    read_parts,
    rows_of_part,
)
from tiermem.checkpoint.format.manifest import LATEST_FILE, PartFile
from tiermem.checkpoint.interchange.write import Imported, new_folder
from tiermem.checkpoint.opening.source import Progress, Source, verify_all
from tiermem.checkpoint.saving.copies import Pace, copy, lay_out, take_room
from tiermem.checkpoint.saving.publish import replace, said_of
from tiermem.swap.disk import durable


def export_whole(
    where: Path, out: Path, tag: str | None = None, progress: Progress = lambda _: None
) -> Imported:
    """Writes OUT/<tag>/ and OUT/latest: every byte of a step, with all that a run needs to
    continue. Blocks.

    The bytes of states are copied as they are, then every checksum is compared. The folder has its
    name when it is whole.

    tag: which of the folder's; default: its latest. Raises FileExistsError when OUT has the tag,
        ManifestError, DamagedState and OSError for a step that is not whole or a full disk; then
        nothing is left, and `latest` is as it was.
    """
    opened = read_manifest(find(where, tag)[0])
    manifest = opened.manifest
    name = manifest.tag or f"global_step{manifest.step}"
    if not is_tag(name) or durable.exists(out / name):
        raise FileExistsError(17, "is there already; choose another folder", str(out / name))
    with contextlib.ExitStack() as undoing:
        with new_folder(out / name, undoing) as new:
            parts = read_parts(opened)
            # it keeps the folders from being removed meanwhile
            with Source(opened._replace(parts=parts)):
                told = []
                for folder, part in parts:
                    data = new / copy_name(part.run_id, part.commit, part.rank, "bin")
                    extents, rows = lay_out(rows_of_part(part), 0)
                    durable.write_file(data, b"")
                    take_room(data, extents)
                    copy([folder / each for each in part.files], extents, data, Pace())
                    text = dataclasses.replace(
                        part, files=(data.name,), states=rows.states()
                    ).dump()
                    file = copy_name(part.run_id, part.commit, part.rank, "json")
                    durable.write_file(new / file, text)
                    told.append(PartFile(part.rank, ".", file, len(text), crc32c(text)))
            whole = dataclasses.replace(manifest, tag=name, parts=tuple(told))
            file = copy_name(manifest.run_id, manifest.commit, None, "json")
            durable.write_file(new / file, whole.dump())
            with Source(read_manifest(Found(new / file))) as source:
                verify_all(source, progress)
                num_bytes = source.num_bytes
        said = said_of(out / name / file, out, name)
        replace([pointer_path(out, name), out / LATEST_FILE], said, undoing)
        undoing.pop_all()
    return Imported(out / name, name, manifest.step, len(manifest.parameters), num_bytes, ())
