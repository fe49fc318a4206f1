"""Content: what a commit or a copy saves, and what each rank tells rank 0 of its part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tiermem.checkpoint.format.crc import crc32c
from tiermem.checkpoint.format.manifest import Manifest, Parameter, Part, PartFile
from tiermem.checkpoint.format.places import written
from tiermem.checkpoint.format.plain import Json
from tiermem.checkpoint.saving.blocks import Run, checksums
from tiermem.checkpoint.saving.pieces import Placed
from tiermem.checkpoint.saving.resting import Resting
from tiermem.checkpoint.saving.stretch import Stretch
from tiermem.swap import durable
from tiermem.swap.freeze import Freeze
from tiermem.zero.ranks.topology import Topology
from tiermem.zero.shards import Shards


@dataclasses.dataclass(frozen=True)
class Content:
    """What is saved: the same on every rank, but for `save_dir`, and for `rng` and what follows, which are this rank's."""

    step: int
    tag: str | None  # None: a step that is made durable without one
    save_dir: Path | None  # None: the same
    save_latest: bool
    values: Mapping[str, Json]  # optimizer, scheduler, loss_scaler, engine, client_state, config
    parameters: Sequence[Parameter]
    excluded: Sequence[str]
    rng: Json
    data: Json
    resting: Resting  # on NVMe
    in_memory: Sequence[Stretch]

    @property
    def is_whole(self) -> bool:
        """Whether a run can go on from it alone: no parameter is left out, and the optimizer is in it."""
        return not self.excluded and self.values["optimizer"] is not None


def write_part(
    file: Path, run_id: str, commit: int, rank: int, content: Content, files: Sequence[str], placed: Placed
) -> Json:
    """Makes a rank's part durable: its pieces, by the number of one of `files`. Raises OSError.

    Returns what rank 0 has to know of it: where it is, its size and checksum, and those of its states.
    """
    data = Part(run_id, commit, rank, content.rng, content.data, tuple(files), placed.rows.states()).dump()
    durable.write_file(file, data)
    sums = [[param, state, [list(each) for each in found]] for (param, state), found in placed.sums.items()]
    return {"folder": str(file.parent), "file": file.name, "bytes": len(data), "crc32c": crc32c(data), "sums": sums}


def manifest_of(
    content: Content, run_id: str, commit: int, topology: Topology, told: Sequence[Any], folder: Path
) -> Manifest:
    """The manifest of what every rank has told, for a file in `folder`. Raises RuntimeError for a state that is not whole."""
    parts = tuple(
        PartFile(rank, written(Path(each["folder"]), folder), each["file"], each["bytes"], each["crc32c"])
        for rank, each in enumerate(told)
    )
    sums: dict[str, dict[str, list[Run]]] = {}
    for each in told:
        for param, state, runs in each["sums"]:
            sums.setdefault(param, {}).setdefault(state, []).extend(Run(*row) for row in runs)
    return Manifest(
        run_id=run_id,
        commit=commit,
        tag=content.tag,
        step=content.step,
        world=topology.world,
        num_shards=topology.num_shards,
        parts=parts,
        parameters=tuple(content.parameters),
        excluded=tuple(content.excluded),
        checksums={
            param: {state: checksums(found, f"{state} of {param}") for state, found in states.items()}
            for param, states in sums.items()
        },
        **content.values,
    )


def frozen(shards: Shards, content: Content, freeze: Freeze) -> Placed:
    """The pieces of what rests on NVMe, by the number of the file in `freeze.files()`. Blocks only for unknown checksums."""

    def read(entry: str, start: int, stop: int) -> torch.Tensor:
        return shards.values.read_part(entry, torch.uint8, slice(start, stop))

    resting = content.resting
    return Placed(resting.rows(freeze), resting.sums(shards.store.sums, read, shards.workers))
