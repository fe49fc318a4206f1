"""Together: a stage that every rank runs by itself; then all ranks exchange their results and
errors.

    together     for saving: every rank gets the values of all ranks; a rank that failed raises its own error, every other
                 rank raises an error that names the failed ranks
    everywhere   for opening: all ranks raise a damage error only if every failed rank found damage, so either all ranks may
                 fall back to an older step or none

No rank continues after another rank failed, and no rank waits for a rank that raised an error.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from tiermem.checkpoint.format.fields import ManifestError
from tiermem.ranks.collectives import exchange
from tiermem.ranks.topology import Topology

T = TypeVar("T")

DAMAGE = (ManifestError, OSError)
"""Errors that mean the saved step is damaged or incomplete."""


class DamageElsewhere(OSError):
    """Another rank failed to read its part of a saved step. errno is EIO; the text quotes that
    rank's error."""


def together(
    topology: Topology,
    what: str,
    stage: Callable[[], T],
    tell: Callable[[T], Any] = lambda own: own,
    unheard: Callable[[bool], None] | None = None,
) -> tuple[T, list[Any]]:
    """Runs a stage; returns its result here, and what all ranks tell of theirs, in the order of
    ranks. Collective; blocks.

    tell: makes a plain value from the stage's result, for the other ranks.
    unheard: called when the exchange itself fails because another rank is lost. Its argument says
        whether this rank's own stage succeeded. The effect of the stage on other ranks is then
        unknown: a rank takes its work back only if it knows that no other rank relies on it.

    Raises this rank's own error unchanged. Where only other ranks failed, raises OSError or
    RuntimeError that names them.
    """
    done, told, own = _attempt(stage, tell)
    try:
        values, failed = _heard(topology, told, own)
    except BaseException:
        if unheard is not None:
            unheard(own is None)
        raise
    if own is not None:
        try:
            raise own
        finally:
            # else error and frame keep each other alive, and with them the graph of a backward that
            # it ends
            own = None
    if failed:
        text = _told_of(what, failed)
        number = failed[0].errno
        raise RuntimeError(text) if number is None else OSError(number, text)
    return done[0], values


def everywhere(topology: Topology, what: str, act: Callable[[], T]) -> T:
    """Calls `act` on every rank and returns this rank's result. Collective; blocks.

    If every failed rank found damage, a failed rank raises its own error and the other ranks raise
    DamageElsewhere. If a rank failed for another reason, it raises its own error; ranks that
    succeeded or found damage raise RuntimeError.
    """
    done, told, own = _attempt(act, lambda _: None)
    _, failed = _heard(topology, told, own)
    if not failed:
        return done[0]
    is_all_damage = all(each.is_damage for each in failed)
    if own is not None and (is_all_damage or not isinstance(own, DAMAGE)):
        raise own
    if is_all_damage:
        raise DamageElsewhere(errno.EIO, _told_of(what, failed))
    raise RuntimeError(_told_of(what, failed)) from own


def _attempt(
    stage: Callable[[], T], tell: Callable[[T], Any]
) -> tuple[list[T], Any, Exception | None]:
    """The stage's result, if it has one, its value for other ranks, and its error, which is raised
    after they know of it."""
    try:
        done = stage()
        return [done], tell(done), None
    except Exception as error:
        return [], None, error


class _Failed(NamedTuple):
    """An error of one rank, as the other ranks receive it."""

    rank: int
    text: str
    errno: int | None
    is_damage: bool


def _heard(
    topology: Topology, value: Any, own: Exception | None
) -> tuple[list[Any], list[_Failed]]:
    """The values of all ranks, and which ranks failed."""
    number = own.errno if isinstance(own, OSError) else None
    told = (
        None if own is None else (f"{type(own).__name__}: {own}", number, isinstance(own, DAMAGE))
    )
    said = exchange(topology, (value, told))
    return [each for each, _ in said], [
        _Failed(rank, *told) for rank, (_, told) in enumerate(said) if told is not None
    ]


def _told_of(what: str, failed: list[_Failed]) -> str:
    return f"{what} failed on " + "; ".join(f"rank {each.rank}: {each.text}" for each in failed[:4])
