"""Everywhere: something that every rank does by itself with what was saved, and an end that all ranks come to alike.

    nobody failed                           every rank goes on
    somebody found damage, nobody else      damage on every rank: its own error there, DamageElsewhere on the others
    anything else                           every rank raises, and none tries another step

so that ranks which may fall back to an older step all do or none does.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import TypeVar

from tiermem.checkpoint.manifest import ManifestError
from tiermem.zero.ranks.collectives import exchange
from tiermem.zero.ranks.topology import Topology

T = TypeVar("T")

DAMAGE = (ManifestError, OSError)
"""Errors of a step that is not whole."""


class DamageElsewhere(OSError):
    """Another rank could not read its part of a saved step; errno is EIO, the text that of its error."""


def everywhere(topology: Topology, what: str, act: Callable[[], T]) -> T:
    """Does something on every rank and returns what it has returned here. Collective; blocks. Raises as the module says."""
    done: list[T] = []
    error: Exception | None = None
    try:
        done.append(act())
    except Exception as caught:  # raised below, once the others know
        error = caught
    told = "" if error is None else f"{type(error).__name__}: {error}"
    said = [json.loads(each) for each in exchange(topology, json.dumps([told, isinstance(error, DAMAGE)]))]
    failed = [(rank, text, is_damage) for rank, (text, is_damage) in enumerate(said) if text]
    if not failed:
        return done[0]
    is_all_damage = all(is_damage for _, _, is_damage in failed)
    if error is not None and (is_all_damage or not isinstance(error, DAMAGE)):
        raise error
    text = f"{what} failed on " + "; ".join(f"rank {rank}: {text}" for rank, text, _ in failed[:4])
    if is_all_damage:
        raise DamageElsewhere(errno.EIO, text)
    raise RuntimeError(text) from error
