"""The keys that tiermem does not simply honour.

    REFUSED    tiermem does not have the effect: any value but the documented default is an error that says why
    COMPUTED   the plan decides the effect, or it is always on: any value is accepted, and the report says what happens
    PLANNED    honoured when set; when not set, the plan computes the value instead of taking the documented default

Every other key of the models is honoured. Keys are dotted paths from the top of the config. A
top-level key in REFUSED for which no model has a field is a section or switch that tiermem only
recognises: `is_off` says whether its value asks for nothing. Some of these do not change the
training (monitors, profilers): those in INERT are dropped with a warning, and refused only with
tiermem.strict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

_ZERO = "zero_optimization"
_PARAM = "zero_optimization.offload_param"
_OPTIM = "zero_optimization.offload_optimizer"

INERT: Mapping[str, str] = MappingProxyType(
    {
        "memory_breakdown": "use `tiermem plan` for where memory goes; remove the key",
        "vocabulary_size": "nothing depends on it; remove the key",
        "flops_profiler": "there is no FLOPS profiler; use torch.profiler and remove the section",
        "autotuning": "use `tiermem tune` and `tiermem plan`; remove the section",
        "comms_config": "it is the logger's section in some programs that write configs; remove the section",
        "comms_logger": "collectives are counted (Shards.topology.traffic) but not timed; use torch.profiler",
        "load_universal_checkpoint": "what is saved opens on any number of ranks without it; remove the key",
        "use_node_local_storage": "what is saved lies in the file or folder you name; remove the key",
        "nebula": "that service is not supported; remove the section",
        "use_data_before_expert_parallelism": "expert parallelism does not exist; remove the key",
        "compile": "call engine.compile() after initialize; remove the section",
        "graph_harvesting": "CUDA graphs are not captured for you; remove the key",
        "disable_python_gc": "call gc.disable() and gc.collect() yourself; remove the key",
        "log_level": 'set it with logging.getLogger("tiermem").setLevel; remove the key',
        "eigenvalue": "eigenvalues are not computed; remove the section",
        **dict.fromkeys(
            ("tensorboard", "wandb", "comet", "csv_monitor", "monitor_config"),
            "monitors are not started for you; log from the training loop and remove the section",
        ),
    }
)
"""Why keys do nothing here, of which nothing that is trained depends: refused with tiermem.strict
alone."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        f"{_ZERO}.legacy_stage1": "the old stage 1 does not exist here; remove the key",
        f"{_ZERO}.zeropp_loco_param": "error feedback (LoCo) would keep every gradient of the model whole on each "
        "rank, which sharding exists to avoid; remove the key",
        f"{_ZERO}.save_muon_momentum_buffer_in_memory": "momentum rests with the other states; to keep a part of them "
        "in memory set tiermem.resident_bytes",
        f"{_ZERO}.zenflow": "asynchronous selective updates (ZenFlow) do not exist; remove the key",
        f"{_OPTIM}.super_offload": "SuperOffload does not exist here, nor its step_subgroup and rollback_subgroup; "
        "tiermem.step_in_backward steps each unit while backward runs. Remove the key",
        f"{_OPTIM}.cpuadam_cores_perc": "it belongs to SuperOffload, which does not exist; remove the key",
        "fp8": 'nothing computes in 8 bits here; use "bf16", and tiermem.precision "tiny" for small optimizer states',
        "amp": 'apex amp cannot be combined with ZeRO; use "bf16" or "fp16"',
        "seq_parallel_communication_data_type": "sequence parallelism does not exist; remove it",
        "optimizer.params.bias_correction": "moments are always corrected for their start; remove the key",
        "optimizer.legacy_fusion": "there is no fused legacy optimizer; remove the key",
        "sparse_gradients": "sparse gradients are neither reduced nor stepped here; build embeddings with "
        "sparse=False, or freeze them, and remove the key",
        "disable_allgather": "updated parameters are always gathered; remove the key",
        "sparse_attention": "attention is the model's own; remove the section",
        "elasticity": "batch sizes are not chosen for you; remove the section",
        "compression_training": "compression does not exist here; remove the section",
        "data_efficiency": "curricula and data routing do not exist here; remove the section",
        "curriculum_learning": "curricula do not exist here; remove the section",
        "hybrid_engine": "there is no inference engine; remove the section",
        "tensor_parallel": "tensor parallelism does not exist here; remove the section",
        "expert_parallel": "expert parallelism does not exist here; remove the section",
        "sequence_parallel_size": "sequence parallelism does not exist here; set 1 or remove it",
        "pipeline": "pipeline parallelism does not exist here; remove the section",
        "progressive_layer_drop": "layers are not dropped for you; remove the section",
        "quantize_training": "quantised training does not exist here; remove the section",
        "weight_quantization": "weights are not quantised; remove the section",
        **INERT,
    }
)
"""Why keys are refused: a clause that fits after "..., but " and says what does not exist, and what
to do."""

RECOGNISED = tuple(key for key in REFUSED if "." not in key)
"""Keys of the top that no model has."""

OFF: Mapping[str, Any] = MappingProxyType(
    {"seq_parallel_communication_data_type": "fp32", "sequence_parallel_size": 1}
)
"""The documented default of a key that no model has; None, false, {} and {"enabled": false} ask for
nothing too."""

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
        "zero_allow_untested_optimizer": "whatever is accepted is tested; another optimizer cannot step sharded states",
        "bf16.immediate_grad_update": "a gradient is reduced as soon as it is final",
        "activation_checkpointing.partition_activations": "every rank has activations of samples of its own, none twice: "
        "there is nothing to partition without tensor parallelism",
        "activation_checkpointing.contiguous_memory_optimization": "inputs pass through buffers of one size",
        "activation_checkpointing.number_checkpoints": "the model says which blocks it checkpoints (torch.utils.checkpoint)",
        "activation_checkpointing.synchronize_checkpoint_boundary": "streams wait for each other, and the host for none",
        "activation_checkpointing.profile": "use torch.profiler",
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
        "tiermem.device_bytes": "what the plan needs, and no more weights stay on the device",
        "tiermem.disk_bytes": "what the plan needs",
        "tiermem.paths": "the folders of nvme_path",
        "tiermem.activation_bytes": "as many as a forward has, within what is left of host_bytes or disk_bytes",
        "tiermem.kv_bytes": "nothing is left to a KV cache",
        "tiermem.grads": "cpu when the budget has room, else nvme",
        "tiermem.engine": "auto",
    }
)


def is_comment(key: object) -> bool:
    """Whether a key of an object is a comment, which nothing reads."""
    return isinstance(key, str) and key.startswith(("_", "//"))


def given_twice(pairs: Sequence[tuple[str, Any]]) -> list[str]:
    """The keys that an object has twice, but comments."""
    counted = Counter(key for key, _ in pairs)
    return [key for key, count in counted.items() if count > 1 and not is_comment(key)]


def is_auto(value: object) -> bool:
    """Whether a raw value asks for its key to be computed, which is the same as leaving the key
    out."""
    return isinstance(value, str) and value == "auto"


def is_off(value: Any, off: Any) -> bool:
    """Whether a recognised key's value asks for nothing: its default, or anything false, or a
    section of such."""
    if value is None or is_auto(value):
        return True
    if isinstance(value, Mapping):
        return (
            is_off(value["enabled"], None)
            if "enabled" in value
            else all(is_off(each, None) for each in value.values())
        )
    return bool(value == off) if off is not None else not value
