"""The sections `zero_optimization`, `checkpoint` and `activation_checkpointing`: sharding,
communication of ranks."""

from __future__ import annotations

import enum
import sys
import warnings
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from tiermem.config.io import OffloadDevice, OffloadOptimizerConfig, OffloadParamConfig
from tiermem.section import (
    ConfigModel,
    Count,
    Problems,
    Whole,
    canonical_key,
)

# ---- activation_checkpointing --------------------------------------------------------------------
#
# The model itself says what it checkpoints, with torch.utils.checkpoint. The section says where
# that rests.


class ActivationConfig(ConfigModel):
    """`activation_checkpointing`: the inputs of blocks that the model checkpoints."""

    section: ClassVar[str] = "activation_checkpointing"

    cpu_checkpointing: bool = False
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


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _each_once(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _on_if_null(value: Any) -> Any:
    return True if value is None else value


Names = Annotated[list[str], BeforeValidator(_as_list), AfterValidator(_each_once)]


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

    stage: Annotated[ZeroStage, BeforeValidator(_stage_of_bool)] = ZeroStage.disabled
    contiguous_gradients: bool = True
    """Pack a unit's gradients into one buffer for each reduction between ranks."""
    reduce_scatter: bool = True
    """Reduce-scatter gradients in stages 1 to 3, instead of an all-reduce."""
    reduce_bucket_size: Count = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    """Reduce a bucket for all ranks in one call, instead of one call for each rank."""
    allgather_partitions: bool = True
    """All-gather updated parameters that stay gathered (all of them in stages 1 and 2), instead of
    broadcasts."""
    allgather_bucket_size: Count = 500_000_000
    overlap_comm: Annotated[bool, BeforeValidator(_on_if_null)] = Field(
        default=None, validate_default=True
    )
    """Overlap reductions with backward."""
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    """Open what was saved on another number of ranks; always possible here."""
    offload_param: OffloadParamConfig | None = None
    """Where parameters rest; needs stage 3."""
    offload_optimizer: OffloadOptimizerConfig | None = None
    """Where optimizer states rest; needs stage 1, 2 or 3."""
    sub_group_size: Count = 1_000_000_000
    """Elements of optimizer state read, stepped and written as one tile. Not set, or 0: planned."""
    cpu_offload_param: bool | None = None
    """Deprecated: offload_param {"device": "cpu"}."""
    cpu_offload_use_pin_memory: bool | None = None
    """Deprecated: pin_memory of offload_param and offload_optimizer."""
    cpu_offload: bool | None = None
    """Deprecated: offload_optimizer {"device": "cpu"}."""
    prefetch_bucket_size: Count = Field(
        default=50_000_000, validation_alias="stage3_prefetch_bucket_size"
    )
    param_persistence_threshold: Count = Field(
        default=100_000, validation_alias="stage3_param_persistence_threshold"
    )
    model_persistence_threshold: Count = Field(
        default=sys.maxsize, validation_alias="stage3_model_persistence_threshold"
    )
    max_live_parameters: Count = Field(
        default=1_000_000_000, validation_alias="stage3_max_live_parameters"
    )
    max_reuse_distance: Count = Field(
        default=1_000_000_000, validation_alias="stage3_max_reuse_distance"
    )
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
    allgather_sequential: bool = Field(
        default=False,
        validation_alias=AliasChoices(
            "stage3_allgather_sequential", "stage3_allgather_single_param"
        ),
    )
    """Gather parameter by parameter, in units as small as modules allow, and fetch nothing ahead:
    the smallest peak."""
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    """Old implementation of stage 1; does not exist here."""
    round_robin_gradients: bool = False
    """Begin every bucket with another rank's part, so that copies home are spread over ranks."""
    zero_hpz_partition_size: Count = 1
    """Ranks that keep a secondary copy of gathered parameters among them, from which backward gathers
    (hpZ). 0 and 1: none."""
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    """Keep frozen weights of two dimensions or more as 8-bit blocks where they rest, and gather
    them so."""
    zero_quantized_gradients: bool = False
    zeropp_loco_param: dict[str, Any] | None = None
    """Error feedback of quantised gradients; does not exist here."""
    mics_shard_size: Whole = -1
    """Ranks that share one copy of the states, the other groups of as many holding copies (MiCS).
    -1: all of them."""
    mics_hierarchical_params_gather: bool = False
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

    def contradictions(self) -> Problems:
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
                "offload_param; remove it and set pin_memory there",
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
