"""The ZeRO partitioner: how a model becomes units whose parts rest on tiers, and come back when its modules run.

Rooms, and the files outside them, in the order in which to read (imports go the same way, downward):

    unit         parameters fetched together, and their two layouts
    order        the learnt sequence of uses            registry     Parameter -> who looks after it
    ranks/       who shares what, and what they call together
    state_pieces what of an entry on NVMe has a checksum
    plan         bytes of every tier, beforehand        estimate     needs of an imagined model
    weights/     a unit's values, at rest and present
    gradients/   from autograd to where they rest until the step
    marks        where backward is                      uses         what backward has not answered yet
    hooks        forward and backward call the rest
    building/    a model that may not fit: zero.Init, tiles, leaf modules
    pools        the arena, carved as planned           settling     weights go home
    shards       a sharded model
    partition_parameters   names for migration
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DeepSpeedTensorOverride": "tiermem.zero.building.init",
    "GatheredParameters": "tiermem.zero.weights.gathered",
    "Init": "tiermem.zero.building.init",
    "MiCS_Init": "tiermem.zero.building.mics",
    "OffloadDeviceEnum": "tiermem.config",
    "OffloadStateTypeEnum": "tiermem.config",
    "Shards": "tiermem.zero.shards",
    "TiledLinear": "tiermem.zero.building.tiled",
    "TiledLinearReturnBias": "tiermem.zero.building.tiled",
    "TiledMLP": "tiermem.zero.building.tiled_mlp",
    "ZeroParamStatus": "tiermem.zero.weights.attributes",
    "ZeroParamType": "tiermem.zero.weights.attributes",
    "apply_gathered": "tiermem.zero.weights.gathered",
    "estimate_mem_needs": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs_all_cold": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs_all_live": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs_all_cold": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs_all_live": "tiermem.zero.estimate",
    "register_external_parameter": "tiermem.zero.weights.external",
    "shard": "tiermem.zero.shards",
    "unregister_external_parameter": "tiermem.zero.weights.external",
    "unwrap_model_for_generation": "tiermem.zero.weights.present",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiermem.zero' has no attribute {name!r}")
