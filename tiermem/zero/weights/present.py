"""Present: all of a model's units in memory at once, while something uses them over and over, such as generation.

Streaming brings every unit once per token. Where there is room for the whole model, it comes once:

    with tiermem.zero.unwrap_model_for_generation(engine) as model:
        model.generate(...)

Units that come and go otherwise count as resident in between: hooks find them present and fetch nothing. Their memory is
torch's own, beside the arena, and counts against what the plan leaves of the budget (on an accelerator: what is free there);
where that is not enough, a warning says how much is missing and units are streamed as ever. Weights may not change meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from torch import nn

from tiermem.swap.accelerator import free_and_total, is_accelerator
from tiermem.zero import registry
from tiermem.zero.ranks.collectives import exchange
from tiermem.zero.ranks.topology import ranks_per_node
from tiermem.zero.shards import Shards
from tiermem.zero.weights.residency import LiveUnit, UnitState

logger = logging.getLogger("tiermem")

_Model = nn.Module


@contextlib.contextmanager
def unwrap_model_for_generation(model: _Model) -> Iterator[_Model]:
    """Keeps a sharded model, or an engine's, whole in memory inside the block; yields what it was given.

    Collective; blocks for the gathers. A model that is not sharded is yielded as it is. Raises RuntimeError inside the block
    when weights are stepped or replaced, OSError when a read failed. However the block ends, units are streamed again.
    """
    shards = _shards_of(model)
    streamed = [] if shards is None else [live for live in shards.units if not live.unit.is_resident]
    if shards is None or not streamed or not _has_room(shards, streamed):
        yield model
        return
    shards.is_held = True
    try:
        for live in streamed:
            _bring(shards, live)
        yield model
    finally:
        for live in streamed:
            _let_go(live)
        shards.is_held = False


def _shards_of(model: _Model) -> Shards | None:
    keepers = (registry.keeper_of(param) for param in model.parameters())
    return next((keeper for keeper in keepers if isinstance(keeper, Shards)), None)


def _has_room(shards: Shards, streamed: Sequence[LiveUnit]) -> bool:
    """Whether every rank has room for all units; says so, with the arithmetic, where one has not."""
    needed, room, what = sum(live.unit.full_bytes for live in streamed), *_room(shards)
    answers = exchange(shards.topology, "" if room is None or needed <= room else f"{needed} > {room} {what}")
    short = {rank: answer for rank, answer in enumerate(answers) if answer}
    for rank, answer in short.items():
        logger.warning(
            "generation fetches every unit for every token: the whole model does not fit on rank %d: %d units of %s. "
            "Raise the budget (host_bytes) to keep them",
            rank,
            len(streamed),
            answer,
        )
    return not short


def _room(shards: Shards) -> tuple[int | None, str]:
    """Bytes that may be taken beside the plan; None: nobody named a limit."""
    if is_accelerator(shards.device):
        return free_and_total(shards.device)[0], f"bytes free on {shards.device}"
    budget, ranks = shards.policy.host_bytes, ranks_per_node()
    if budget is None:
        return None, ""
    planned = shards.plan.host_bytes
    return budget // ranks - planned, f"bytes = host_bytes {budget} // {ranks} ranks - {planned} planned"


def _bring(shards: Shards, live: LiveUnit) -> None:
    shards.residency.outdate(live)
    whole = slice(0, live.unit.shard_numel)
    shard = live.shard if live.shard is not None else shards.values.elements(live, whole)
    live.memory.allocate()
    shards.values.regather(live.unit, shard, live.memory)
    live.memory.show()
    live.state, live.unit.is_resident = UnitState.PRESENT, True


def _let_go(live: LiveUnit) -> None:
    live.unit.is_resident = False
    if live.memory.is_present:
        live.memory.leave()
    live.state = UnitState.HOME
    live.let_all_go()
