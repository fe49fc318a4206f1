"""The ZeRO partitioner: how a model becomes units whose parts rest on tiers, and come back when its modules run.

Read in this order (imports go the same way, downward):

    unit         parameters fetched together, and their two layouts       order        the learnt sequence of uses
    rollcall     which rank is gone                                       traffic      what was handed to collectives
    topology     which ranks share parts                                  collectives  what ranks call together
    agreement    ranks were given the same                                memory       the storage a unit has for life
    plan         bytes of every tier, before anything is allocated        gather       parts into a unit's full layout
    residency    present, on its way, or home                             reduce       gradients into a rank's part
    grads        received, measured, sent home                            registry     Parameter -> who looks after it
    hooks        forward and backward call the rest                       shards       a sharded model
    init         building what does not fit                               estimate     needs of an imagined model
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Init": "tiermem.zero.init",
    "OffloadDeviceEnum": "tiermem.config",
    "OffloadStateTypeEnum": "tiermem.config",
    "Shards": "tiermem.zero.shards",
    "TiledLinear": "tiermem.zero.tiled",
    "estimate_mem_needs": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs_all_cold": "tiermem.zero.estimate",
    "estimate_zero2_model_states_mem_needs_all_live": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs_all_cold": "tiermem.zero.estimate",
    "estimate_zero3_model_states_mem_needs_all_live": "tiermem.zero.estimate",
    "shard": "tiermem.zero.shards",
    "unwrap_model_for_generation": "tiermem.zero.present",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiermem.zero' has no attribute {name!r}")
