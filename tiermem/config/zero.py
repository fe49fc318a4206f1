"""The sections `zero_optimization`, `checkpoint` and `tiermem`: sharding, communication of ranks,
fields of the policy."""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import AliasChoices, BeforeValidator, Field

from tiermem.config.base import (
    Bytes,
    ConfigModel,
    Count,
    Number,
    PositiveCount,
    Sets,
    Whole,
    canonical_key,
)
from tiermem.config.io import OffloadDevice, OffloadOptimizerConfig, OffloadParamConfig, Paths
from tiermem.config.precision import PrecisionConfig
from tiermem.policy import (
    AccumulationOrder,
    ComputeDtype,
    Durability,
    FrozenQuantType,
    MasterFrom,
    OffloadPolicy,
    OnNonfinite,
    Overlap,
    Verify,
)

# ---- tiermem -------------------------------------------------------------------------------------
#
# The section for settings that DeepSpeed's keys do not cover. Its keys are fields of the policy,
# with their words and defaults.
#
#     "tiermem": {"host_bytes": "2GiB", "paths": ["/mnt/nvme0", "/mnt/nvme1"], "precision":
#     "compact"}


class OwnConfig(ConfigModel):
    """`tiermem`: budgets and choices that are this library's own. Sizes are bytes, or strings such
    as "2GiB"."""

    section: ClassVar[str] = "tiermem"

    host_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    """Budget of host memory per node, divided by the ranks on it. Not set: what the plan needs."""
    device_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    """Budget of each rank's memory on its accelerator, for weights, gradients and states, without
    activations. Weights stay there as far as it allows. Not set: what the plan needs, and no more
    weights stay."""
    disk_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    """Most bytes to take on all NVMe paths together. Not set: what the plan needs."""
    paths: Paths | None = None
    """Folders on NVMe file systems, each with an optional cap and weight. Not set: those of
    nvme_path."""
    resident_bytes: Bytes | None = None
    """Optimizer state kept in host memory although its home is NVMe."""
    grads: Annotated[
        Literal["device"] | OffloadDevice | None, Sets("grads", {"none": None, "device": "none"})
    ] = None
    """Tier of reduced gradients between backward and step: device (an accelerator), cpu or nvme.
    Not set: cpu when the budget has room, else nvme."""
    activations: Annotated[OffloadDevice | None, Sets("activations", {"none": None})] = None
    """Tier of the inputs of checkpointed blocks (torch.utils.checkpoint) between forward and
    backward: cpu, which moves them where the maths runs on an accelerator, or nvme. Not set: as
        activation_checkpointing.cpu_checkpointing says."""
    activation_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    """Most bytes of these inputs at their tier at once, on each rank; what does not fit stays, with
    a warning."""
    kv_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    """Memory of each rank, where the maths runs, that is left to the KV cache of a generation: part
    of device_bytes, or of host_bytes where the CPU computes. Not set: none is planned."""
    step_in_backward: bool = OffloadPolicy.step_in_backward
    """Step each unit as its gradients appear and hold none: no clipping, no accumulation,
    non-finite raises. With an accelerator, backward waits for each unit's gradients, which are
    found finite before a state changes."""
    accumulation: AccumulationOrder = OffloadPolicy.accumulation
    """How the micro-batches of a step run: "batches", one after the other through the model; or
    "layers", all of them through one block after the other, so that weights are read twice a step
    and gradients written once, whatever their number. The model is then a chain of blocks, and
    `engine.train_batch` or TiermemTrainer trains it. Stage 3 alone."""
    on_nonfinite: OnNonfinite = OffloadPolicy.on_nonfinite
    """A step whose gradients hold NaN or infinity: leave every state untouched and count it, raise,
    or apply it all the same (not clipped, since it has no norm). Not set, and
    bf16.check_grad_overflow false: apply."""
    precision: PrecisionConfig | None = None
    """What masters, moments and gradients are kept in: exact, compact, bf16 or tiny, or an object.
    Not set: exact, or what the switches in bf16 and fp16 say."""
    compute_dtype: ComputeDtype = OffloadPolicy.compute_dtype
    """What 16-bit weights are multiplied in: as they rest, or fp32, where the machine's 16-bit
    products are slow; "measured" finds that out at the start, in less than a second. Weights rest
    and travel, and gradients are kept, as without it; a unit's buffer takes 4 bytes an element.
    Stage 3 alone."""
    overlap: Overlap = OffloadPolicy.overlap
    """What runs beside the tiles of an optimizer step: nothing; or the next forward, whose fetches
    wait for their own units; or backward as well, which steps states as gradients come, and steps
    them again where the step finds anything not as assumed, such as clipping. backward takes one
    more slot on disk, and memory for a second copy of weights that rest there; beside an
    accelerator also of states there, of as many units as the memory is given for. The bits are the
    same. auto: backward where there is room, else forward, where it pays. A run that clips every
    step begins none under backward, and takes no disk for that."""
    streamed_ratio: Annotated[Number, Field(le=1.0)] | None = OffloadPolicy.streamed_ratio
    """Part of the tiles of states in host memory or on NVMe that is stepped on the GPU: their
    states, weights and gradients are copied there and back, while the CPU steps the other tiles.
    Without a GPU it does nothing. Not set: none, but `tiermem plan` and `tiermem train` choose it
    where that is predicted to be 10 % faster."""
    frozen_quant_type: FrozenQuantType | None = OffloadPolicy.frozen_quant_type
    """Keep frozen weights of two dimensions or more in blocks where they rest: int8 (8.5 bits per
    element) or nf4 (4.5 bits, as in QLoRA). The maths and state dicts see them in their own dtype.
    Stage 3 alone. Not set: as they are."""
    master_from: MasterFrom = OffloadPolicy.master_from
    """fp32 masters start from the low-precision copy, or from the fp32 values that zero.Init
    saw."""
    durability: Durability = OffloadPolicy.durability
    """When what rests on NVMe becomes durable there: when a checkpoint is saved, after every step,
    or never. Each durable state takes its bytes on disk once more, and two of them with "step";
    none halves the disk. With "step" a step is durable before the next backward, and a run that is
    closed leaves its last step in the store's folder."""
    keep: PositiveCount = OffloadPolicy.keep
    """Tags that stay on the NVMe paths; saving one more drops the oldest, with a warning. Each
    takes its bytes on disk."""
    copies: bool = OffloadPolicy.copies
    """Make every saved checkpoint a complete copy, which can be moved as one folder; else one
    beside the NVMe paths only names the files of the run there."""
    verify: Verify = OffloadPolicy.verify
    """When checksums of what is read from NVMe are compared: at every read, at one in 16, or only
    when a run is resumed."""
    engine: Literal["auto", "uring", "aio", "threads"] = "auto"
    """How files are read and written; auto takes the first that works."""
    strict: bool = False
    """Refuse sections and switches that do nothing here, such as monitors and profilers; false:
    drop them with a warning."""
    sizes_are_least: bool = OffloadPolicy.sizes_are_least
    """Small buffer_count, sub_group_size, block_size and queue_depth are least numbers: more is
    taken where memory allows, which is faster; buffer_size refuses no unit. Not set: true, unless
    `strict`. Numbers that `tiermem tune` measured stand."""

    measured: dict[str, Any] | None = None
    """What `tiermem tune` noted beside its settings: machine, date, rates."""
    timeout_s: Annotated[Number, Field(gt=0.0)] = OffloadPolicy.timeout_s
    """Longest wait for another rank before the run stops with an error, in seconds."""
    join_timeout_s: Annotated[Number, Field(gt=0.0)] = OffloadPolicy.join_timeout_s
    """Longest wait for all ranks to start, in seconds, where the process group is made here; no
    more than timeout_s."""

    @property
    def takes_more(self) -> bool:
        """Whether small sizes are least sizes."""
        return self.sizes_are_least if self.is_set("sizes_are_least") else not self.strict


# ---- activation_checkpointing --------------------------------------------------------------------
#
# The model itself says what it checkpoints, with torch.utils.checkpoint. The section says where
# that rests.


class ActivationConfig(ConfigModel):
    """`activation_checkpointing`: the inputs of blocks that the model checkpoints."""

    section: ClassVar[str] = "activation_checkpointing"

    cpu_checkpointing: Annotated[
        bool, Sets("activations", {True: OffloadDevice.cpu, False: None})
    ] = False
    """Keep inputs of checkpointed blocks in host memory between forward and backward; the same as
    tiermem.activations cpu."""
    partition_activations: bool = False
    """Partition activations over the ranks of a tensor-parallel group."""
    contiguous_memory_optimization: bool = False
    """Copy checkpointed activations to one buffer."""
    number_checkpoints: Count | None = None
    """Number of checkpointed blocks, for the size of that buffer."""
    synchronize_checkpoint_boundary: bool = False
    """Wait for the device at every checkpoint."""
    profile: bool = False
    """Log the time of each checkpoint."""


# ---- checkpoint ----------------------------------------------------------------------------------
#
# Whatever these keys say, a checkpoint opens on any number of ranks.


class CheckpointConfig(ConfigModel):
    """`checkpoint`: saving and loading."""

    section: ClassVar[str] = "checkpoint"

    tag_validation: Literal["Warn", "Ignore", "Fail"] = "Warn"
    """Tags that differ between ranks: a warning, nothing (rank 0's is saved either way), or an
    error."""
    load_universal: bool = False
    """Open what was saved on another number of ranks."""
    use_node_local_storage: bool = False
    """Every node saves to storage of its own."""
    parallel_write: dict[str, Any] | None = None
    """Which ranks of a pipeline write."""
    writer: dict[str, Any] | None = None
    """How files are written."""


# ---- zero_optimization ---------------------------------------------------------------------------
#
# A deprecated key sets its successor, with a DeprecationWarning. A config with both the deprecated
# key and its successor is refused. `ranks/topology.py` checks that the sizes of MiCS and hpZ divide
# the number of ranks, once that number is known.


def _names(value: Any) -> Any:
    """Returns a single name as a list of one name, and drops repeated names."""
    given = [value] if isinstance(value, str) else value
    return list(dict.fromkeys(given)) if isinstance(given, (list, tuple)) else given


def _on_if_null(value: Any) -> Any:
    return True if value is None else value


Names = Annotated[list[str], BeforeValidator(_names)]


class ZeroStage(enum.IntEnum):
    """What is sharded over the ranks: nothing (disabled), optimizer_states, gradients too, weights
    too."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


def _stage_of_bool(value: Any) -> Any:
    if isinstance(value, bool):
        warnings.warn(
            f"zero_optimization.stage: {value} is deprecated; write {int(value)}",
            DeprecationWarning,
            stacklevel=2,
        )
        return int(value)
    return value


class LeafModuleConfig(ConfigModel):
    """`zero_optimization.leaf_module`: modules whose parameters are fetched as one. Each key is a
    name or a list of names."""

    section: ClassVar[str] = "zero_optimization.leaf_module"

    classes: Names = Field(default=[])
    """Names of classes, bare or with their Python module."""
    names: Names = Field(default=[])
    """Names of modules, as `named_modules` gives them."""
    name_suffixes: Names = Field(default=[])
    """Ends of such names."""


class ZeroConfig(ConfigModel):
    """`zero_optimization`: stage, portions of communication and prefetch, offload. Sizes are in
    elements."""

    section: ClassVar[str] = "zero_optimization"

    stage: Annotated[ZeroStage, BeforeValidator(_stage_of_bool), Sets("stage")] = ZeroStage.disabled
    """0 replicates everything, 1 shards optimizer states, 2 gradients too, 3 parameters too."""
    contiguous_gradients: bool = True
    """Pack a unit's gradients into one buffer for each reduction between ranks."""
    reduce_scatter: bool = True
    """Reduce-scatter gradients in stages 1 to 3, instead of an all-reduce."""
    reduce_bucket_size: Annotated[Count, Sets("reduce_bucket_numel")] = 500_000_000
    """Most elements of gradients handed to one reduction."""
    use_multi_rank_bucket_allreduce: bool = True
    """Reduce a bucket for all ranks in one call, instead of one call for each rank."""
    allgather_partitions: bool = True
    """All-gather updated parameters that stay gathered (all of them in stages 1 and 2), instead of
    broadcasts."""
    allgather_bucket_size: Annotated[Count, Sets("allgather_bucket_numel")] = 500_000_000
    """Most elements of updated parameters that come together in one call."""
    overlap_comm: Annotated[bool, BeforeValidator(_on_if_null)] = Field(
        default=None, validate_default=True
    )
    """Overlap reductions with backward."""
    load_from_fp32_weights: Annotated[bool, Sets("loads_masters")] = True
    """Take fp32 masters from a checkpoint or an optimizer's state dict, without loss; false: make
    them from the low-precision weights, with that loss."""
    elastic_checkpoint: bool = False
    """Open what was saved on another number of ranks; always possible here."""
    offload_param: OffloadParamConfig | None = None
    """Where parameters rest; needs stage 3."""
    offload_optimizer: OffloadOptimizerConfig | None = None
    """Where optimizer states rest; needs stage 1, 2 or 3."""
    sub_group_size: Annotated[Count, Sets("tile_numel", {0: None})] = 1_000_000_000
    """Elements of optimizer state read, stepped and written as one tile. Not set, or 0: planned."""
    cpu_offload_param: bool | None = None
    """Deprecated: offload_param {"device": "cpu"}."""
    cpu_offload_use_pin_memory: bool | None = None
    """Deprecated: pin_memory of offload_param and offload_optimizer."""
    cpu_offload: bool | None = None
    """Deprecated: offload_optimizer {"device": "cpu"}."""
    prefetch_bucket_size: Annotated[Count, Sets("prefetch_numel")] = Field(
        default=50_000_000, validation_alias="stage3_prefetch_bucket_size"
    )
    """Most elements fetched ahead of use. Not set: planned."""
    param_persistence_threshold: Annotated[Count, Sets("persistence_numel")] = Field(
        default=100_000, validation_alias="stage3_param_persistence_threshold"
    )
    """Parameters of at most this many elements stay gathered."""
    model_persistence_threshold: Annotated[Count, Sets("model_persistence_numel")] = Field(
        default=sys.maxsize, validation_alias="stage3_model_persistence_threshold"
    )
    """Most elements that stay gathered because they are small, in all."""
    max_live_parameters: Annotated[Count, Sets("max_live_numel")] = Field(
        default=1_000_000_000, validation_alias="stage3_max_live_parameters"
    )
    """Most elements of gathered parameters at once. Not set: planned."""
    max_reuse_distance: Annotated[Count, Sets("max_reuse_numel")] = Field(
        default=1_000_000_000, validation_alias="stage3_max_reuse_distance"
    )
    """A unit used again within this many elements stays gathered. Not set: planned."""
    gather_16bit_weights_on_model_save: bool = Field(
        default=False, validation_alias="stage3_gather_16bit_weights_on_model_save"
    )
    """Whether save_16bit_model gathers sharded weights and writes them."""
    stage3_gather_fp16_weights_on_model_save: bool | None = None
    """Deprecated: stage3_gather_16bit_weights_on_model_save."""
    module_granularity_threshold: Count = Field(
        default=0, validation_alias="stage3_module_granularity_threshold"
    )
    """Modules with at most this many elements per inner module are fetched as one; 0: none."""
    use_all_reduce_for_fetch_params: bool = Field(
        default=False, validation_alias="stage3_use_all_reduce_for_fetch_params"
    )
    """Gather units by an all-reduce of layouts in which every rank fills its own part."""
    allgather_sequential: Annotated[bool, Sets("gather_way", {True: "single", False: None})] = (
        Field(
            default=False,
            validation_alias=AliasChoices(
                "stage3_allgather_sequential", "stage3_allgather_single_param"
            ),
        )
    )
    """Gather parameter by parameter, in units as small as modules allow, and fetch nothing ahead:
    the smallest peak."""
    ignore_unused_parameters: Annotated[bool, Sets("ignore_unused")] = True
    """Go on when parameters got no gradient on any rank; false: a step with such parameters is an
    error naming them."""
    legacy_stage1: bool = False
    """Old implementation of stage 1; does not exist here."""
    round_robin_gradients: bool = False
    """Begin every bucket with another rank's part, so that copies home are spread over ranks."""
    zero_hpz_partition_size: Annotated[Count, Sets("secondary_group_size", {0: None})] = 1
    """Ranks that keep a second copy of gathered parameters among them, from which backward gathers
    (hpZ). 0 and 1: none."""
    zero_quantized_weights: Annotated[bool, Sets("quantised_gather")] = False
    """Gather weights as 8-bit blocks (qwZ)."""
    zero_quantized_nontrainable_weights: Annotated[bool, Sets("quantised_frozen")] = False
    """Keep frozen weights of two dimensions or more as 8-bit blocks where they rest, and gather
    them so."""
    zero_quantized_gradients: Annotated[bool, Sets("quantised_reduction")] = False
    """Reduce gradients as 8-bit blocks, added up in fp32 (qgZ)."""
    zeropp_loco_param: dict[str, Any] | None = None
    """Error feedback of quantised gradients; does not exist here."""
    mics_shard_size: Annotated[Whole, Sets("shard_group_size", {-1: None})] = -1
    """Ranks that share one copy of the states, the other groups of as many holding copies (MiCS).
    -1: all of them."""
    mics_hierarchical_params_gather: Annotated[bool, Sets("two_stage_gather")] = False
    """Gather across nodes first, then within each, where a shard group spreads over nodes."""
    memory_efficient_linear: bool = True
    """Replace linear layers by ones that save less; not needed here."""
    pipeline_loading_checkpoint: bool = False
    """Load weights rank by rank, which saves host memory; nothing to save here."""
    override_module_apply: bool = True
    """Fetch what functions given to Module.apply touch, in zero.Init and Engine.apply; false leaves
    it to them."""
    compute_grad_norm: bool = True
    """Compute the norm of gradients in each step; always so here."""
    parameter_alignment: bool = False
    """Align parameters in flat buffers; always so here."""
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    """Modules fetched as one, beside the blocks of experts that are found by themselves."""
    log_trace_cache_warnings: bool = False
    """Warn when the order of units changes."""
    enable_sanity_checks: bool = False
    """Extra checks; always made here."""
    save_muon_momentum_buffer_in_memory: bool = False
    """Keep Muon's momentum off NVMe; does not exist here."""
    zenflow: dict[str, Any] | None = None
    """Selective asynchronous updates; do not exist here."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _accept_legacy_forms(cls, raw: Any) -> Any:
        if isinstance(raw, bool):
            return {"stage": raw}
        return _without_deprecated(dict(raw)) if isinstance(raw, dict) else raw

    @property
    def param_device(self) -> OffloadDevice:
        """Where parameters rest."""
        return self.offload_param.device if self.offload_param else OffloadDevice.none

    @property
    def optimizer_device(self) -> OffloadDevice:
        """Where optimizer states rest."""
        return self.offload_optimizer.device if self.offload_optimizer else OffloadDevice.none

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.mics_shard_size == 0 or self.mics_shard_size < -1:
            yield (
                "mics_shard_size",
                f"{self.mics_shard_size} given; allowed are 1 or more ranks, or -1 for all of them",
            )
        for old, new in _SUCCESSORS.items():
            if getattr(self, old) is not None and self.is_set(new):
                key = canonical_key(type(self), new)
                yield old, f"deprecated key given together with its successor {key}; remove {old}"
        if self.cpu_offload_use_pin_memory is not None and (
            self.offload_param or self.offload_optimizer
        ):
            yield (
                "cpu_offload_use_pin_memory",
                "deprecated key given together with its successors offload_optimizer and "
                "offload_param; remove it and "
                "set pin_memory there",
            )


_SUCCESSORS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
}


def _without_deprecated(raw: dict[str, Any]) -> dict[str, Any]:
    """Rewrites deprecated keys as their successors; leaves them where a successor is given (a
    contradiction)."""
    pin = raw.get("cpu_offload_use_pin_memory")
    if pin is not None:
        _warn_deprecated(
            "cpu_offload_use_pin_memory", "pin_memory in offload_optimizer and offload_param"
        )
    for old, new in _SUCCESSORS.items():
        if raw.get(old) is None:
            continue
        key = canonical_key(ZeroConfig, new)
        is_offload = old.startswith("cpu_offload")
        _warn_deprecated(old, f'{key}: {{"device": "cpu"}}' if is_offload else key)
        if new in raw or key in raw or (is_offload and raw[old] is not True):
            continue
        given = raw.pop(old)
        if is_offload:
            given = {"device": "cpu"} if pin is None else {"device": "cpu", "pin_memory": pin}
            raw.pop("cpu_offload_use_pin_memory", None)
        raw[key] = given
    return raw


def _warn_deprecated(old: str, new: str) -> None:
    warnings.warn(
        f"zero_optimization.{old} is deprecated; use {new}", DeprecationWarning, stacklevel=3
    )
