"""The scalars of a Foreign as a manifest keeps them: groups, scheduler, loss scale, counters, what the client saved.

What has no place in plain values is left behind, and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tiermem.checkpoint.interchange.foreign import Foreign
from tiermem.checkpoint.plain import Json, encode


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
    groups = [_kept(group, f"group {number}", lost) for number, group in enumerate(foreign.groups)]
    scheduler = None if foreign.scheduler is None else _kept(foreign.scheduler, "scheduler", lost)
    return (
        Scalars(
            optimizer={"groups": groups} if groups else None,
            scheduler=scheduler,
            loss_scaler=None,
            engine={"global_steps": foreign.global_steps},
            client_state=_kept(foreign.client_state, "client_state", lost),
            config=None,
        ),
        lost,
    )


def _kept(values: Mapping[str, Any], what: str, lost: list[str]) -> dict[str, Json]:
    found = {}
    for key, value in values.items():
        try:
            found[str(key)] = encode(value, f"{what}[{key!r}]")
        except TypeError as error:
            lost.append(str(error))
    return found
