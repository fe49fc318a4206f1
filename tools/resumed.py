"""Resumed: where `tiermem train --resume DIR` goes on from, and what it takes from there that is not said again.

    DIR          what `--save` was given, one of its tags, a run's folder (runs/<id>) or a store's: its newest durable step
    options      of the run that saved it: data, sizes, precision, learning rate, homes ...; what is given again wins
    shape        its model's; weights and states come from the step

The trainer saves them beside the states, as the client state, under CLIENT_KEY.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from tiermem.tools.train_options import TrainOptions

CLIENT_KEY = "tiermem train"
CHECKPOINTS = "checkpoints"
"""The folder in a run's own that checkpoints go to unless `--save` names another."""

_PATHS = ("data", "nvme")
_DECIDED_BY_CONFIG = ("offload", "nvme", "precision", "states", "lr", "batch", "resident_bytes", "durability", "keep")
_CARRIED = (*_DECIDED_BY_CONFIG, "data", "steps", "seq", "seed", "memory_bytes", "threads", "save_every")


class Resumed(NamedTuple):
    """A durable step to go on from."""

    place: Path  # what load_checkpoint is given
    step: int
    name: str  # of the run
    shape: dict[str, Any]
    config: dict[str, Any] | None  # of a run that was given one
    options: dict[str, Any]


def options_to_save(
    options: TrainOptions, name: str, shape: dict[str, Any], config: dict[str, Any] | None
) -> dict[str, Any]:
    """What a run saves of itself, as JSON."""
    kept = {field: getattr(options, field) for field in _CARRIED}
    kept |= {field: [str(path.absolute()) for path in kept[field]] for field in _PATHS}
    return {"name": name, "shape": shape, "config": config, "is_checkpointing": options.is_checkpointing, **kept}


def options_of_model(name: str, shape: dict[str, Any]) -> dict[str, Any]:
    """What makes another program's checkpoint one to go on from: its model. All else is said when it is resumed, or default."""
    return {"name": name, "shape": shape, "config": None, "is_checkpointing": False, **dict.fromkeys(_CARRIED)}


def find_resumed(where: Path) -> Resumed:
    """The newest durable step of a place. Raises OSError when there is none; ValueError for one that is not whole, or that
    another program saved."""
    from tiermem.checkpoint.opening.source import Source  # imports torch

    found: list[tuple[int, Path, Any]] = []
    for place in _places(where):
        with Source.open(place) as source:
            client = source.manifest.client_state
            found.append((source.manifest.step, source.place, client))
    step, place, client = max(found, key=lambda each: each[0])
    saved = client.get(CLIENT_KEY) if isinstance(client, dict) else None
    if not isinstance(saved, dict):
        raise ValueError(
            f"--resume: {place} was not saved by tiermem train, so it does not say how to go on; open it with "
            "engine.load_checkpoint"
        )
    try:
        options = {field: saved[field] for field in (*_CARRIED, "is_checkpointing")}
        return Resumed(place, step, str(saved["name"]), dict(saved["shape"]), saved["config"], options)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--resume: {place}: what tiermem train saved of itself is not complete: {error}") from error


def with_saved(options: TrainOptions, resumed: Resumed) -> TrainOptions:
    """The options, those that were not given taken from the run that saved. Raises ValueError when no step is left."""
    names = set(_CARRIED)
    if options.deepspeed_config is not None or resumed.config is not None:
        names -= set(_DECIDED_BY_CONFIG)
    if options.offload is not None:
        names -= {"offload", "nvme", "resident_bytes"}
    taken: dict[str, Any] = {}
    for name in names:
        if getattr(options, name) in (None, ()) and resumed.options[name] is not None:
            saved = resumed.options[name]
            taken[name] = tuple(Path(each) for each in saved) if name in _PATHS else saved
    both = options.is_checkpointing or bool(resumed.options["is_checkpointing"])
    found = dataclasses.replace(options, is_checkpointing=both, **taken)
    if found.steps is not None and found.steps <= resumed.step:
        raise ValueError(
            f"--resume: {resumed.place} has {resumed.step} steps behind it, and --steps counts from the first: give more than "
            f"{resumed.step}, not {found.steps}"
        )
    return found


def _places(where: Path) -> list[Path]:
    """What may hold a durable step there."""
    from tiermem.checkpoint.format.finding import NothingSaved, find

    if not where.exists():
        raise FileNotFoundError(2, "--resume: there is no such folder", str(where))

    def holds_steps(place: Path) -> bool:
        with contextlib.suppress(NothingSaved):
            return bool(find(place))
        return False

    stores = [each for each in sorted(where.glob("tiermem-*")) if each.is_dir() and holds_steps(each)]
    if len(stores) > 1:
        names = ", ".join(each.name for each in stores)
        raise ValueError(f"--resume: {where} holds the stores of several runs: name one of {names}")
    found = [each for each in (where, where / CHECKPOINTS) if each.exists() and holds_steps(each)] + stores
    if not found:
        find(where)  # raises what is missing there
    return found
