"""Together: a stage that every rank goes through by itself, after which all know how it went on each.
from tiermem.checkpoint.format.fields import ManifestError

    together     a stage of saving: every rank gets the values of all; a rank that failed raises its own error, the others
                 one that tells of it
    everywhere   a stage of opening: all raise damage only if all that failed found damage, so that either all ranks may fall
                 back to an older step or none

So no rank goes on while another has failed, and none waits for one that will not come.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from tiermem.checkpoint.format.fields import ManifestError
from tiermem.zero.collectives import exchange
from tiermem.zero.topology import Topology

T = TypeVar("T")

Talk = Callable[[str], list[str]]
"""Hands a string to every rank and returns those of all, in the order of ranks."""

DAMAGE = (ManifestError, OSError)
"""Errors of a step that is not whole."""


class DamageElsewhere(OSError):
    """Another rank could not read its part of a saved step; errno is EIO, the text that of its error."""


def talk_over(topology: Topology) -> Talk:
    """Among the ranks of a topology, by its own collectives."""
    return lambda text: exchange(topology, text)


def together(
    talk: Talk, what: str, stage: Callable[[], Any], unheard: Callable[[bool], None] | None = None
) -> list[Any]:
    """Runs a stage and returns what it returned on every rank: JSON values, in the order of ranks. Collective; blocks.

    unheard: called, with whether this rank's own stage went well, when another rank is lost before it has been heard. What
        the stage has done may stand then, or may not: only a rank that knows that it does not may take it back.

    Raises this rank's own error as it is; where only others failed an OSError or RuntimeError that tells of them.
    """
    value, own = None, None
    try:
        value = stage()
    except Exception as error:  # raised below, once the others know
        own = error
    try:
        values, failed = _heard(talk, value, own)
    except BaseException:
        if unheard is not None:
            unheard(own is None)
        raise
    if own is not None:
        raise own
    if failed:
        text, number = _told_of(what, failed), failed[0].errno
        raise RuntimeError(text) if number is None else OSError(number, text)
    return values


def everywhere(topology: Topology, what: str, act: Callable[[], T]) -> T:
    """Does something on every rank and returns what it has returned here. Collective; blocks.

    Raises, where a rank failed: damage if all of them found damage (its own error on a rank that did, DamageElsewhere on the
    others); else what is no damage, and RuntimeError on ranks where nothing or damage was found.
    """
    done: list[T] = []
    own: Exception | None = None
    try:
        done.append(act())
    except Exception as error:  # raised below, once the others know
        own = error
    _, failed = _heard(talk_over(topology), None, own)
    if not failed:
        return done[0]
    is_all_damage = all(each.is_damage for each in failed)
    if own is not None and (is_all_damage or not isinstance(own, DAMAGE)):
        raise own
    if is_all_damage:
        raise DamageElsewhere(errno.EIO, _told_of(what, failed))
    raise RuntimeError(_told_of(what, failed)) from own


class _Failed(NamedTuple):
    """What other ranks hear of an error."""

    rank: int
    text: str
    errno: int | None
    is_damage: bool


def _heard(talk: Talk, value: Any, own: Exception | None) -> tuple[list[Any], list[_Failed]]:
    """The values of all ranks, and which ranks failed."""
    number = own.errno if isinstance(own, OSError) else None
    told = None if own is None else [f"{type(own).__name__}: {own}", number, isinstance(own, DAMAGE)]
    said = [json.loads(each) for each in talk(json.dumps([value, told]))]
    return [each for each, _ in said], [_Failed(rank, *told) for rank, (_, told) in enumerate(said) if told is not None]


def _told_of(what: str, failed: list[_Failed]) -> str:
    return f"{what} failed on " + "; ".join(f"rank {each.rank}: {each.text}" for each in failed[:4])
