"""State dicts of optimizers: torch's own format and keys, whatever states rest where.

    {"state": {0: {"step": tensor(3.), "exp_avg": fp32, "exp_avg_sq": fp32 [, "master": fp32]}, 1: ...}, "param_groups": [...]}

torch's optimizers load ours, and ours load torch's. Every state is fp32 and has the parameter's shape; `master` is there
where a parameter of lower precision has one beside it (torch passes over it; a dict without it makes the master from the
        if name in given and shards.policy.loads_masters:
            values = shards.values.mine(shard, value_of(given, name, shard.shape, shard.name))

Of a sharded model each state is gathered, whole, one parameter at a time: every rank makes the dict, and every rank's CPU
memory holds all of it (12 bytes per parameter of a bf16 model under AdamW), beside one parameter's largest state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tiermem.optim.ordinary import MASTER, STEP, State, num_steps_of, value_of
from tiermem.optim.rules import Rule
from tiermem.optim.tiles import StateTiles
from tiermem.zero.shards import Shards
from tiermem.zero.unit import Shard


@dataclasses.dataclass(frozen=True)
class Sealed:
    """An entry on its way through torch's `load_state_dict`, which would cast fp32 states to the parameter's dtype."""

    entry: Mapping[str, Any]


def seal(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same dict with sealed entries."""
    return {**state_dict, "state": {number: Sealed(entry) for number, entry in state_dict["state"].items()}}


def export_sharded(shards: Shards, tiles: StateTiles, shard: Shard, rule: Rule) -> State:
    """The entry of a sharded parameter. Collective; blocks; raises OSError when a transfer failed."""
    found: State = {STEP: torch.tensor(float(shard.num_steps))}
    moments = rule.moments if shard.num_steps or shard.has_moments else ()
    for name in (*moments, *_masters(shards, shard)):
        found[name] = shards.values.assemble(shard, tiles.state(shard, name)).view(shard.shape)
    return found


def restore_sharded(
    shards: Shards, tiles: StateTiles, shard: Shard, given: Mapping[str, Any] | None, rule: Rule
) -> None:
    """Puts an entry where a sharded parameter's states rest; None: it has not been stepped. Collective; blocks.

    Raises ValueError for a state that is missing or misshapen, OSError when a transfer failed.
    """
    given = given or {}
    shard.num_steps = num_steps_of(given, rule)
    has_moments = shard.num_steps > 0 or any(given.get(name) is not None for name in rule.moments)
    for name in rule.moments if has_moments else ():
        tiles.load(shard, name, shards.values.mine(shard, value_of(given, name, shard.shape, shard.name)))
    for name in _masters(shards, shard):
        if name in given and shards.policy.loads_masters:
            values = shards.values.mine(shard, value_of(given, name, shard.shape, shard.name))
        else:
            values = shards.local_weight(shard.param).float()[: shards.values.num_mine(shard)]
        tiles.load(shard, name, values)
    shard.has_moments, shard.has_master = has_moments, MASTER in given


def _masters(shards: Shards, shard: Shard) -> tuple[str, ...]:
    return () if shards.policy.precision.master_of(shard.param.dtype) is None else (MASTER,)
