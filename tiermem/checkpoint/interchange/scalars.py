"""The scalars of a Foreign as a manifest keeps them: groups, scheduler, loss scale, counters, what the client saved.

What has no place in plain values is left behind, and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tiermem.checkpoint.format.plain import Json, encode
from tiermem.checkpoint.interchange.foreign import Foreign, LossScale
from tiermem.checkpoint.interchange.groups import optimizer_of


class Scalars(NamedTuple):
    """Fields of a Manifest, encoded."""

    optimizer: Json
    scheduler: Json
    loss_scaler: Json
    engine: Json
    client_state: Json
    config: Json


def scalars_of(foreign: Foreign) -> tuple[Scalars, list[str]]:
    """The scalars, and what of them could not be kept."""
    lost: list[str] = []
    scheduler = None if foreign.scheduler is None else _kept(foreign.scheduler, "scheduler", lost)
    return (
        Scalars(
            optimizer=optimizer_of(foreign, lost),
            scheduler=scheduler,
            loss_scaler=_scaler(foreign.loss_scale),
            engine={name: getattr(foreign, name) for name in ("global_steps", "global_samples", "skipped_steps")},
            client_state=_kept(foreign.client_state, "client_state", lost),
            config=None,
        ),
        lost,
    )


def _scaler(scale: LossScale | None) -> Json:
    """What a LossScaler goes on from."""
    if scale is None or not scale.scale > 0:
        return None
    hysteresis = scale.hysteresis if type(scale.hysteresis) is int else 1
    return {"scale": scale.scale, "hysteresis_left": hysteresis, "num_good": scale.good_steps}


def _kept(values: Mapping[str, Any], what: str, lost: list[str]) -> dict[str, Json]:
    found = {}
    for key, value in values.items():
        try:
            found[str(key)] = encode(value, f"{what}[{key!r}]")
        except TypeError as error:
            lost.append(str(error))
    return found
