"""The names of ZeRO's partitioner: `zero.Init`, `zero.GatheredParameters`, `zero.shard` and others,
imported when first used.

partition_parameters    names for programs that migrate
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DeepSpeedTensorOverride": "tiermem.run.init",
    "GatheredParameters": "tiermem.run.access",
    "Init": "tiermem.run.init",
    "MiCS_Init": "tiermem.run.init",
    "OffloadDeviceEnum": "tiermem.config",
    "OffloadStateTypeEnum": "tiermem.config",
    "Shards": "tiermem.run.shards",
    "TiledLinear": "tiermem.layers.tiled",
    "TiledLinearReturnBias": "tiermem.layers.tiled",
    "TiledMLP": "tiermem.layers.tiled",
    "ZeroParamStatus": "tiermem.weights.absent",
    "ZeroParamType": "tiermem.weights.absent",
    "apply_gathered": "tiermem.run.access",
    "estimate_mem_needs": "tiermem.compat.estimate",
    "estimate_zero2_model_states_mem_needs": "tiermem.compat.estimate",
    "estimate_zero2_model_states_mem_needs_all_cold": "tiermem.compat.estimate",
    "estimate_zero2_model_states_mem_needs_all_live": "tiermem.compat.estimate",
    "estimate_zero3_model_states_mem_needs": "tiermem.compat.estimate",
    "estimate_zero3_model_states_mem_needs_all_cold": "tiermem.compat.estimate",
    "estimate_zero3_model_states_mem_needs_all_live": "tiermem.compat.estimate",
    "kv_cache_bytes": "tiermem.run.kv_cache",
    "register_external_parameter": "tiermem.run.access",
    "shard": "tiermem.engine.sharding",
    "unregister_external_parameter": "tiermem.run.access",
    "unwrap_model_for_generation": "tiermem.run.access",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiermem.zero' has no attribute {name!r}")
