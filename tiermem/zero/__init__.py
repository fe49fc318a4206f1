"""The ZeRO partitioner: how a model becomes units whose parts rest on tiers, and come back when its modules run.

Files in order: each imports only files before it.

    registry        Parameter -> the unit that it belongs to
    failures        which rank is gone, or went another way
    topology        which ranks share what, and their process groups
    joining         the ranks that a launcher started make the process group
    collectives     the calls that ranks make together
    quantised       blocks of 8-bit integers with a scale
    leaf            modules whose parameters are fetched as one
    unit            parameters fetched together, and how they lie in memory
    state_layout    where the parts of a tile's states lie
    packed          gathers and reductions of 8-bit blocks
    gather          every rank's part, brought together
    reduce          gradients in buckets, added up over ranks
    plan            bytes of every tier, beforehand
    estimate        needs of an imagined model
    agreement       ranks run the same program, or stop and say what differs
    absent          what a parameter is while its values are not in memory
    unit_state      a unit's state, storage and moves
    values          weights where they rest; state dicts
    prefetcher      the learnt order of uses, and which units come, stay and leave
    gradient_store  where gradients rest until the step
    gradients       from autograd to there
    backward_marks  where backward is
    hooks           forward and backward call the rest
    init_params     parameters while a model is built
    settle          weights go to where they rest
    shards          a sharded model
    access          whole parameters: GatheredParameters, generation
    tiled           layers cut into tiles
    init            zero.Init
    partition_parameters    names for migration
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DeepSpeedTensorOverride": "tiermem.zero.init",
    "GatheredParameters": "tiermem.zero.access",
    "Init": "tiermem.zero.init",
    "MiCS_Init": "tiermem.zero.init",
    "OffloadDeviceEnum": "tiermem.config",
    "OffloadStateTypeEnum": "tiermem.config",
    "Shards": "tiermem.zero.shards",
    "TiledLinear": "tiermem.zero.tiled",
    "TiledLinearReturnBias": "tiermem.zero.tiled",
    "TiledMLP": "tiermem.zero.tiled",
    "ZeroParamStatus": "tiermem.zero.absent",
    "ZeroParamType": "tiermem.zero.absent",
    "apply_gathered": "tiermem.zero.access",
    "estimate_mem_needs": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs_all_cold": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs_all_live": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs_all_cold": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs_all_live": "tiermem.zero.estimate",
    "register_external_parameter": "tiermem.zero.access",
    "shard": "tiermem.engine.sharding",
    "unregister_external_parameter": "tiermem.zero.access",
    "unwrap_model_for_generation": "tiermem.zero.access",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiermem.zero' has no attribute {name!r}")
