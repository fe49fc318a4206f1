"""Together: a stage that every rank goes through by itself, and then all know how it went.

    stage on every rank -> exchange -> nobody failed: what each said
                                       somebody failed: an error on every rank, which names the rank, the path and the reason

So no rank goes on to the next stage while another has failed, and none waits for one that will not come.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tiermem.zero.ranks.collectives import exchange
from tiermem.zero.ranks.topology import Topology

Talk = Callable[[str], list[str]]
"""Hands a string to every rank and returns everybody's, in the order of ranks."""


def talk_over(topology: Topology) -> Talk:
    """Among the ranks of a topology, by its own collectives."""
    return lambda text: exchange(topology, text)


def together(
    talk: Talk, what: str, stage: Callable[[], Any], unheard: Callable[[bool], None] | None = None
) -> list[Any]:
    """Runs a stage and returns what it returned on every rank: JSON values, in the order of ranks. Collective; blocks.

    unheard: called, with whether this rank's own stage went well, when another rank is lost before it has been heard. What
        the stage has done may stand then, or may not: whoever takes it back must know that it does not.

    Raises this rank's own error as it is; where only others failed an OSError or RuntimeError that tells of them.
    """
    value, own = None, None
    try:
        value = stage()
    except Exception as error:
        own = error
    try:
        said = [json.loads(each) for each in talk(json.dumps([value, None if own is None else _told(own)]))]
    except BaseException:
        if unheard is not None:
            unheard(own is None)
        raise
    if own is not None:
        raise own
    failed = [(rank, told) for rank, (_, told) in enumerate(said) if told is not None]
    if failed:
        raise _of_others(what, failed)
    return [value for value, _ in said]


def _told(error: Exception) -> dict[str, Any]:
    """What other ranks hear of an error."""
    number = error.errno if isinstance(error, OSError) else None
    return {"errno": number, "text": f"{type(error).__name__}: {error}", "path": getattr(error, "filename", None)}


def _of_others(what: str, failed: list[tuple[int, dict[str, Any]]]) -> Exception:
    text = f"{what} failed on " + "; ".join(f"rank {rank}: {told['text']}" for rank, told in failed[:4])
    _, first = failed[0]
    return RuntimeError(text) if first["errno"] is None else OSError(first["errno"], text)
