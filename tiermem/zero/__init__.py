"""The ZeRO partitioner: how a model becomes units whose parts rest on tiers, and come back when its modules run.

Read in this order (imports go the same way, downward):

    unit         parameters fetched together, and their two layouts       order        the learnt sequence of uses
    rollcall     which rank is gone                                       traffic      what was handed to collectives
    topology     which ranks share parts                                  mesh         groups of ranks: MiCS, hpZ, nodes
    quantised    values as 8-bit blocks                                   collectives  what ranks call together
    agreement    ranks were given the same                                memory       the storage a unit has for life
    attributes   what a partitioned parameter shows                       plan         bytes of every tier, beforehand
    registry     Parameter -> who looks after it                          touch        calls that need values
    resting      a parameter that nobody holds says so                    gather       parts into a unit's full layout
    residency    present, on its way, or home                             buckets      gradients packed for ranks
    reduce       gradients into a rank's part                             grad_store   where gradients rest, measured
    sharded_grad what stands in `p.grad` meanwhile                        grads        received, reduced, sent home
    hooks        forward and backward call the rest                       gradient_put other values for a gradient
    nursery      parameters of a model that is being built                init         building what does not fit
    shards       a sharded model                                          external     used outside their own module
    gathered     whole values, for a while                                leaf         modules fetched as one
    tiled        layers cut into tiles                                    tiled_mlp    blocks cut along the sequence
    estimate     needs of an imagined model                               present      all units at once, for generation
    mics         building for groups of ranks                             partition_parameters   names for migration
    admission    what a model may not hold                                marks        where backward is
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DeepSpeedTensorOverride": "tiermem.zero.init",
    "GatheredParameters": "tiermem.zero.gathered",
    "Init": "tiermem.zero.init",
    "MiCS_Init": "tiermem.zero.mics",
    "OffloadDeviceEnum": "tiermem.config",
    "OffloadStateTypeEnum": "tiermem.config",
    "Shards": "tiermem.zero.shards",
    "TiledLinear": "tiermem.zero.tiled",
    "TiledLinearReturnBias": "tiermem.zero.tiled",
    "TiledMLP": "tiermem.zero.tiled_mlp",
    "ZeroParamStatus": "tiermem.zero.attributes",
    "ZeroParamType": "tiermem.zero.attributes",
    "apply_gathered": "tiermem.zero.gathered",
    "estimate_mem_needs": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs_all_cold": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs_all_live": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs_all_cold": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs_all_live": "tiermem.zero.estimate",
    "register_external_parameter": "tiermem.zero.external",
    "shard": "tiermem.zero.shards",
    "unregister_external_parameter": "tiermem.zero.external",
    "unwrap_model_for_generation": "tiermem.zero.present",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiermem.zero' has no attribute {name!r}")
