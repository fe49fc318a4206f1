"""The ZeRO partitioner divides a model into units. It keeps their shards on tiers and gathers them when modules run.

A unit is a group of parameters that is fetched, gathered and released together. The files, in order of import (each
imports only files above it):

    registry        map from a Parameter to the object that keeps its values
    written         what a master becomes when the user has written its weight
    heartbeat       datagrams by which ranks know that the others run
    failures        finds the rank that is gone, and ranks whose collectives differ
    topology        which ranks share a tensor's parts, and their process groups
    joining         creates the process group from the launcher's environment
    collectives     calls that all ranks make together
    compute         the dtype of products, apart from that at rest
    quantised       blocks of 8-bit or 4-bit codes with one scale each
    leaf            modules whose parameters form one unit
    gradient_state  what the home of a parameter's gradient holds
    unit            how the parameters of a unit lie in memory
    state_layout    where the parts of a tile's states lie
    gather          brings the shards of all ranks together
    packed          gathers and reductions of blocks
    reduce          adds up buckets of gradients over ranks
    plan            bytes on every tier, computed before allocation
    budget          chooses the plan that the budgets hold
    pools           the store of a plan, and its buffers, carved from the arena
    estimate        memory needs of a model that does not exist yet
    agreement       compares program, model and policy over ranks
    absent          what a parameter shows while its values are not in memory
    backward_marks  hooks on tensors that tell how far backward is
    step_run        the step under way, perhaps under the next forward; whether states are whole
    unit_memory     a unit's memory; buffers, streams and threads that units share
    unit_state      a unit's state machine and transfers
    values          reads and writes weights where they rest; state dicts
    prefetcher      learns the order of uses; decides which units to fetch and to evict
    gradient_link   brings gradients from an accelerator to host memory
    resting_tensor  a tensor of the user's whose values rest elsewhere
    gradient_store  keeps gradients until the step
    gradient_norms  sums of squares of gradients, and their scales
    gradients       takes gradients from autograd to that store
    activations     moves inputs of checkpointed blocks to HOST or NVMe
    chain           finds the blocks that a model runs one after the other
    hooks           connects forward and backward of modules to the rest
    layerwise       a step's micro-batches, block by block
    init_params     parameters while a model is built
    settle          moves weights to where they rest
    unfreeze        plans for parameters that are unfrozen after sharding
    shards          a sharded model
    access          whole parameters: GatheredParameters, generation
    tiled           layers cut into tiles
    kv_cache        bytes of a generation's keys and values
    chunked_loss    a language model's loss, chunk by chunk
    init            zero.Init
    partition_parameters    names for programs that migrate
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
    "kv_cache_bytes": "tiermem.zero.kv_cache",
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
