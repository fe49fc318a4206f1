"""Superseded: the folders of a dead run give way, once the run that goes on from its last step has a durable step of its own.

A run that makes every step durable and is killed leaves its store and one manifest without a tag. Nobody but the run that
resumes it needs that: it is removed as soon as the new run could be resumed in its place, with a line that says so. What has
a tag stays, and so does a folder in which there is more than the one manifest.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tiermem.checkpoint.saver import saver_of
from tiermem.checkpoint.source import Source
from tiermem.swap.run_folder import RunFolder, RunName
from tiermem.zero.shards import Shards

logger = logging.getLogger("tiermem")


def supersede(shards: Shards, source: Source) -> None:
    """Removes what was opened with the first durable step of this model's own, if it is a step of a dead run without a tag."""
    manifest, folder = source.manifest, source.file.parent
    others = [file for file in folder.glob("manifest-*.json") if file != source.file]
    if manifest.tag is not None or others or manifest.run_id == shards.store.run.run_id:
        return
    folders = _folders_of(source, shards.topology.rank, shards.topology.world)
    saver_of(shards).commits.supersedes = lambda: _remove(folders)


def _folders_of(source: Source, rank: int, world: int) -> list[Path]:
    """The run's folders that this rank looks after, on every path, the one with the manifest first."""
    found: dict[Path, None] = {}
    for place, part in zip(source.manifest.parts, source.parts, strict=True):
        if place.rank % world == rank:
            base = source.file.parent / place.folder
            for folder in (base, *((base / file).parent for file in part.files)):
                found[folder.resolve()] = None
    return [folder for folder in found if RunName.of(folder) is not None]


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        try:
            RunFolder.claim(folder).close(keep=False)
        except OSError as error:
            logger.warning("%s is left: %s", folder, error.strerror)
        else:
            logger.warning("%s is removed: this run has gone on from it, and has a durable step of its own", folder)
