"""The keys that tiermem does not simply honour.

    REFUSED    tiermem does not have the effect: any value but the documented default is an error that says why
    COMPUTED   the plan decides the effect, or it is always on: any value is accepted, and the report says what happens
    PLANNED    honoured when set; when not set, the plan computes the value instead of taking the documented default

Every other key of the models is honoured. Keys are dotted paths from the top of the config. A top-level key in REFUSED for
which no model has a field is a section or switch that tiermem only recognises: `is_off` says whether its value asks for
nothing. Some of these do not change the training (monitors, profilers): their refusal has `is_inert`, so they are dropped
with a warning, and refused only with tiermem.strict.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["COMPUTED", "PLANNED", "REFUSED", "Refusal", "is_auto", "is_off", "is_recognised_only"]


class Refusal(NamedTuple):
    """Why a key is refused, and for keys that no model has, its value that asks for nothing."""

    reason: str
    """A clause that fits after "..., but ": what does not exist, and what to do."""
    off: Any = None
    """The documented default; None, false, {} and {"enabled": false} ask for nothing too."""
    is_inert: bool = False
    """Nothing of what is trained depends on it: it is refused with tiermem.strict alone."""


_ZERO = "zero_optimization"
_PARAM = "zero_optimization.offload_param"
_OPTIM = "zero_optimization.offload_optimizer"

REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        # zero_optimization
        f"{_ZERO}.legacy_stage1": Refusal("the old stage 1 does not exist here; remove the key"),
        f"{_ZERO}.zeropp_loco_param": Refusal(
            "error feedback (LoCo) would keep every gradient of the model whole on each rank, which sharding exists to avoid; "
            "remove the key"
        ),
        f"{_ZERO}.save_muon_momentum_buffer_in_memory": Refusal(
            "momentum rests with the other states; to keep a part of them in memory set tiermem.resident_bytes"
        ),
        f"{_ZERO}.zenflow": Refusal("asynchronous selective updates (ZenFlow) do not exist; remove the key"),
        f"{_OPTIM}.super_offload": Refusal(
            "SuperOffload does not exist here, nor its step_subgroup and rollback_subgroup; tiermem.step_in_backward steps "
            "each unit while backward runs. Remove the key"
        ),
        f"{_OPTIM}.cpuadam_cores_perc": Refusal("it belongs to SuperOffload, which does not exist; remove the key"),
        # precision
        "amp": Refusal('apex amp cannot be combined with ZeRO; use "bf16" or "fp16"'),
        "seq_parallel_communication_data_type": Refusal("sequence parallelism does not exist; remove it", off="fp32"),
        # optimizer
        "optimizer.params.bias_correction": Refusal("moments are always corrected for their start; remove the key"),
        "optimizer.legacy_fusion": Refusal("there is no fused legacy optimizer; remove the key"),
        # the rest of the top level
        "sparse_gradients": Refusal(
            "sparse gradients are neither reduced nor stepped here; build embeddings with sparse=False, or freeze them, and "
            "remove the key"
        ),
        "disable_allgather": Refusal("updated parameters are always gathered; remove the key"),
        "memory_breakdown": Refusal("use `tiermem plan` for where memory goes; remove the key", is_inert=True),
        "vocabulary_size": Refusal("nothing depends on it; remove the key", is_inert=True),
        "flops_profiler": Refusal(
            "there is no FLOPS profiler; use torch.profiler and remove the section", is_inert=True
        ),
        "activation_checkpointing": Refusal(
            "activations are checkpointed by the model (torch.utils.checkpoint), not by a config; remove the section",
            is_inert=True,
        ),
        "sparse_attention": Refusal("attention is the model's own; remove the section"),
        "autotuning": Refusal("use `tiermem tune` and `tiermem plan`; remove the section", is_inert=True),
        "elasticity": Refusal("batch sizes are not chosen for you; remove the section"),
        "compression_training": Refusal("compression does not exist here; remove the section"),
        "data_efficiency": Refusal("curricula and data routing do not exist here; remove the section"),
        "curriculum_learning": Refusal("curricula do not exist here; remove the section"),
        "tensorboard": Refusal(
            "monitors are not started for you; log from the training loop and remove the section", is_inert=True
        ),
        "wandb": Refusal(
            "monitors are not started for you; log from the training loop and remove the section", is_inert=True
        ),
        "comet": Refusal(
            "monitors are not started for you; log from the training loop and remove the section", is_inert=True
        ),
        "csv_monitor": Refusal(
            "monitors are not started for you; log from the training loop and remove the section", is_inert=True
        ),
        "comms_logger": Refusal(
            "collectives are counted (Shards.topology.traffic) but not timed; use torch.profiler", is_inert=True
        ),
        "load_universal_checkpoint": Refusal(
            "what is saved opens on any number of ranks without it; remove the key", is_inert=True
        ),
        "use_node_local_storage": Refusal(
            "what is saved lies in the file or folder you name; remove the key", is_inert=True
        ),
        "nebula": Refusal("that service is not supported; remove the section", is_inert=True),
        "hybrid_engine": Refusal("there is no inference engine; remove the section"),
        "tensor_parallel": Refusal("tensor parallelism does not exist here; remove the section"),
        "expert_parallel": Refusal("expert parallelism does not exist here; remove the section"),
        "sequence_parallel_size": Refusal("sequence parallelism does not exist here; set 1 or remove it", off=1),
        "pipeline": Refusal("pipeline parallelism does not exist here; remove the section"),
        "use_data_before_expert_parallelism": Refusal(
            "expert parallelism does not exist; remove the key", is_inert=True
        ),
        "compile": Refusal("call engine.compile() after initialize; remove the section", is_inert=True),
        "graph_harvesting": Refusal("CUDA graphs are not captured for you; remove the key", is_inert=True),
        "disable_python_gc": Refusal("call gc.disable() and gc.collect() yourself; remove the key", is_inert=True),
        "log_level": Refusal('set it with logging.getLogger("tiermem").setLevel; remove the key', is_inert=True),
        "eigenvalue": Refusal("eigenvalues are not computed; remove the section", is_inert=True),
        "progressive_layer_drop": Refusal("layers are not dropped for you; remove the section"),
        "quantize_training": Refusal("quantised training does not exist here; remove the section"),
        "weight_quantization": Refusal("weights are not quantised; remove the section"),
    }
)

COMPUTED: Mapping[str, str] = MappingProxyType(
    {
        f"{_ZERO}.log_trace_cache_warnings": "there is no trace cache; an order that changes costs fetches, not correctness",
        f"{_ZERO}.enable_sanity_checks": "ranks that differ, gradients that are not finite and damaged reads are always found",
        f"{_ZERO}.contiguous_gradients": "gradients are always packed; reduce_bucket_size bounds the buffers",
        f"{_ZERO}.reduce_scatter": "stages 1 to 3 always reduce-scatter: half the bytes of an all-reduce; stage 0 all-reduces",
        f"{_ZERO}.use_multi_rank_bucket_allreduce": "one reduction of a bucket always serves all ranks, in one call",
        f"{_ZERO}.round_robin_gradients": "one reduction serves all ranks, so that they all copy at once",
        f"{_ZERO}.allgather_partitions": "updated parameters are always all-gathered: the same bits as broadcasts, in one call",
        f"{_ZERO}.overlap_comm": "reductions always overlap backward, two at once; reduce_bucket_size bounds their buffers",
        f"{_ZERO}.stage3_use_all_reduce_for_fetch_params": "units are gathered by all-gathers: the same bits, half the bytes",
        "optimizer.params.ns_method": "the standard iteration; gram is the same with fewer operations, but for rounding",
        f"{_ZERO}.elastic_checkpoint": "what is saved opens on any number of ranks, with it or without",
        f"{_ZERO}.pipeline_loading_checkpoint": "weights are read tensor by tensor, so ranks need not take turns",
        "checkpoint.load_universal": "what is saved opens on any number of ranks without it",
        "checkpoint.use_node_local_storage": "states on NVMe are saved on their node; a copy needs a folder that all ranks see",
        "checkpoint.parallel_write": "every rank writes its own part, at the same time",
        "checkpoint.writer": "what rests on NVMe is not written again; the rest goes past the page cache, from every rank",
        f"{_ZERO}.memory_efficient_linear": "no linear layer is replaced; autograd saves views of a unit's storage",
        f"{_ZERO}.compute_grad_norm": "the norm is computed with the check for NaN and infinity",
        f"{_ZERO}.parameter_alignment": "every parameter starts on a 64-byte boundary",
        f"{_OPTIM}.fast_init": "states on NVMe are always made in place, tile by tile",
        "optimizer.params.torch_adam": "states are stepped by tiermem's own Adam: the same mathematics as torch's",
        "zero_allow_untested_optimizer": "whatever is accepted is tested; another optimizer cannot step sharded states",
        "bf16.immediate_grad_update": "a gradient is reduced as soon as it is final",
        "tiermem.measured": "it is kept for the record, and nothing acts on it",
        "zero_force_ds_cpu_optimizer": "an optimizer whose states are sharded or offloaded is always tiermem's own",
    }
)

PLANNED: Mapping[str, str] = MappingProxyType(
    {
        f"{_ZERO}.sub_group_size": "the plan sizes tiles from the budget",
        f"{_ZERO}.stage3_prefetch_bucket_size": "what the unit buffers hold",
        f"{_ZERO}.stage3_max_live_parameters": "what the unit buffers hold",
        f"{_ZERO}.stage3_max_reuse_distance": "what the unit buffers hold",
        f"{_ZERO}.stage3_model_persistence_threshold": "no bound",
        f"{_PARAM}.buffer_count": "the plan counts unit buffers",
        f"{_PARAM}.buffer_size": "the largest unit",
        f"{_PARAM}.max_in_cpu": "none; set it to keep parameters in memory",
        f"{_PARAM}.pin_memory": "pinned where there is a GPU",
        f"{_OPTIM}.buffer_count": "the plan counts tiles in flight",
        f"{_OPTIM}.pin_memory": "pinned where there is a GPU",
        f"{_OPTIM}.pipeline_read": "on, unlike the reference: set false to read each tile when it is needed",
        f"{_OPTIM}.pipeline_write": "on, unlike the reference: set false to write each tile before the next",
        "aio.block_size": "the queue's default",
        "aio.queue_depth": "the queue's default",
        "aio.intra_op_parallelism": "the engine chooses",
        "tiermem.host_bytes": "what the plan needs",
        "tiermem.disk_bytes": "what the plan needs",
        "tiermem.paths": "the folders of nvme_path",
        "tiermem.grads": "cpu when the budget has room, else nvme",
        "tiermem.engine": "the first of uring, aio and threads that works",
    }
)


def is_auto(value: object) -> bool:
    """Whether a raw value asks for its key to be computed, which is the same as leaving the key out."""
    return isinstance(value, str) and value == "auto"


def is_recognised_only(path: str, fields: Container[str]) -> bool:
    """Whether a key of the top is refused and none of the top's fields."""
    return path in REFUSED and "." not in path and path not in fields


def is_off(value: Any, off: Any) -> bool:
    """Whether a recognised key's value asks for nothing: its default, or anything false, or a section of such."""
    if value is None or is_auto(value):
        return True
    if isinstance(value, Mapping):
        if "enabled" in value:
            return is_off(value["enabled"], None)
        defaults = off if isinstance(off, Mapping) else {}
        return all(is_off(inner, defaults.get(key)) for key, inner in value.items())
    return bool(value == off) if off is not None else not value
