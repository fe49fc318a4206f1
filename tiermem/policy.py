"""OffloadPolicy: the frozen value that says where states rest and how they move.

`config/` makes one from a DeepSpeed-style config; Python users build one directly. The
packages below read the policy, never a config key. `None` means that the plan (`plans/plan.py`) computes the value and
reports it. Names of element counts end in `_numel`, names of sizes in bytes end in `_bytes`.

An annotation holds all that one field may be: its words (Literal), its numbers (Range), the stage
that it needs (FromStage). Fields that contradict each other are listed by `_contradictions`;
`config/` shows that list with keys instead of fields.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from torch import nn

from tiermem.precision import Precision, Range, check_fields, marks_of
from tiermem.swap.base.native import IoSettings
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.paths import AnyPath, NvmePath, as_paths

__all__ = ["IoSettings", "LeafRules", "NvmePath", "OffloadPolicy", "Precision", "Tier"]


class FromStage(NamedTuple):
    """An annotation of a field: the ZeRO stage from which on the field may differ from its
    default."""

    stage: int
    reason: str


class Key(NamedTuple):
    """An annotation of a field: a key of a config, or a section, that sets it. A field without one
    is the key of its name in the section "tiermem"."""

    path: str
    """Dotted, from the top of the config; empty: no key sets the field."""
    off: Any = None
    """The value of the key that leaves the field alone, as if the key were not set."""
    on: Any = None
    """What true becomes in the field, where it does not stay true."""


_SHARDED_STATES = FromStage(1, "offload needs stage 1, 2 or 3")
_SHARDED_GRADS = FromStage(2, "gradients are sharded in stages 2 and 3")
_SHARDED_PARAMS = FromStage(3, "it acts in stage 3 alone, where parameters are partitioned")
Overlap = Literal["auto", "none", "forward", "backward"]
Positive = Annotated[int, Range("it must be at least 1, or None for what the plan computes", 1)]
Count = Annotated[int, Range("it must be 0 or more", 0)]
Ranks = Annotated[int, Range("it is a number of ranks, 1 or more, that divides all of them", 1)]
Divisor = Annotated[
    float,
    Range('allowed are finite numbers more than 0, and "ranks"', math.ulp(0.0), sys.float_info.max),
]
Seconds = Annotated[float, Range("it must be more than 0", math.ulp(0.0))]


# Sizes that a plan tries where the policy has none, best first; with smaller ones a step is slower,
# and no result differs.
USUAL_TILE_NUMELS = [1 << 20 >> i for i in range(5)]
USUAL_UNITS_AHEAD = 2


LEAST_STAGES = {"params": 3, "optim": 1}
"""By field: the stage from which its home may be elsewhere than the device. What a stage does not
shard stays there."""


def usual_tile_buffers(pipeline_read: bool, pipeline_write: bool) -> list[int]:
    """Two for reads and two for writes keep a disk busy; more bridge its pauses."""
    num_off = int(not pipeline_read) + int(not pipeline_write)
    return [count >> num_off for count in (8, 4)]


class CombinedError(ValueError):
    """Several problems of one value: for each a field or key, empty for the whole, and a
    sentence."""

    def __init__(self, found: Sequence[tuple[str, str]], joint: str = ": ") -> None:
        self.found = tuple(found)
        self.joint = joint
        super().__init__(
            "; ".join(f"{key}{joint}{message}" if key else message for key, message in found)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.found, self.joint), self.__dict__


@dataclasses.dataclass(frozen=True)
class LeafRules:
    """Which modules are fetched as one, whatever runs inside them (units/leaf.py)."""

    classes: tuple[str, ...] = ()
    """Names of classes, bare or with their Python module."""
    names: tuple[str, ...] = ()
    """Names of modules, as `named_modules` gives them."""
    name_suffixes: tuple[str, ...] = ()
    """Ends of such names."""
    granularity_numel: int = 0
    """Modules with at most this many elements per inner module; 0: none."""


@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
    """Where parameters, gradients and optimizer states rest, and with how much memory they may
    move.

    Raises ValueError when the fields contradict each other; the message says what was given, what
    is allowed and what to change.
    """

    # ---- places: where what rests, and in which format

    stage: Annotated[int, Key("zero_optimization.stage")] = 3
    """ZeRO stage: 0 replicates everything, 1 shards optimizer states, 2 gradients too, 3 parameters
    too."""
    params: Annotated[Tier, _SHARDED_PARAMS, Key("zero_optimization.offload_param.device")] = (
        Tier.DEVICE
    )
    """Home of the (low-precision) parameters. HOST and NVME need stage 3."""
    optim: Annotated[Tier, _SHARDED_STATES, Key("zero_optimization.offload_optimizer.device")] = (
        Tier.DEVICE
    )
    """Home of the master weights and moments. What rests on an accelerator is stepped there, all
    else on the CPU, but for what streamed_ratio sends there."""
    grads: Annotated[Tier, Key("tiermem.grads", off="none")] | None = None
    """Tier of reduced gradients between backward and step. Not set: host memory when the budget has
    room, else NVMe."""
    precision: Precision = dataclasses.field(default_factory=Precision)
    """What masters, moments and gradients are kept in, and how they are rounded: exact, compact,
    bf16 or tiny, or the parts of a Precision. Not set: exact, or what the switches in bf16 and fp16
    of a config say."""
    num_moments: Annotated[int, Range("allowed are 0 to 3", 0, 3), Key("optimizer")] = 2
    """Moments of each parameter that the plan makes room for: 2 for Adam, 3 with amsgrad, 1 for
    Lion. An optimizer that keeps more is refused; one that keeps fewer leaves the rest unused."""
    paths: AnyPath | Sequence[AnyPath] = ()
    """Folders on the NVMe file systems, one or several, each with an optional cap and weight;
    needed when anything rests on NVMe. Caps are per node, divided by the ranks on it. Not set: in a
    config those of nvme_path, else none."""
    activations: (
        Annotated[
            Tier,
            Key("tiermem.activations", off="none"),
            Key("activation_checkpointing.cpu_checkpointing", off=False, on="cpu"),
        ]
        | None
    ) = None
    """Home of the inputs of checkpointed blocks (torch.utils.checkpoint) between forward and
    backward: host memory, which moves them where the maths runs on an accelerator, or NVMe. Not
    set: they stay where the maths runs."""
    optim_ratio: Annotated[
        float,
        Range("it is the offloaded part of the states, from 0 to 1", 0.0, 1.0),
        Key("zero_optimization.offload_optimizer.ratio"),
    ] = 1.0
    """Part of the states that rests at `optim`. The other tiles, evenly spread, rest on the
    accelerator and are stepped there. 0 is as optim=DEVICE. Without an accelerator they rest on
    HOST."""
    streamed_ratio: (
        Annotated[float, Range("it is the streamed part of the tiles, from 0 to 1", 0.0, 1.0)]
        | None
    ) = None
    """Part of the tiles of states in host memory or on NVMe that is stepped on the accelerator,
    evenly spread: their states, weights and gradients are copied there and back, while the CPU
    steps the other tiles. Such a step ends before the next forward. A tile of a whole matrix that
    is larger than a buffer is stepped on the CPU. Without an accelerator it does nothing. Not set:
    none, but `tiermem plan` and `tiermem train` choose it where that is predicted to be 10 %
    faster."""
    pin_memory: Annotated[
        bool,
        Key("zero_optimization.offload_param.pin_memory"),
        Key("zero_optimization.offload_optimizer.pin_memory"),
    ] = True
    """Register what crosses the link to an accelerator with its driver, where there is one."""
    frozen_quant_type: Annotated[Literal["int8", "nf4"], _SHARDED_PARAMS] | None = None
    """Keep frozen parameters of two dimensions or more, and of more than persistence_numel
    elements, in blocks where they rest: int8 (8.5 bits per element) or nf4 (4.5 bits, as in QLoRA).
    A fetch unpacks them to their own dtype, in which the maths and state dicts see them. Stage 3
    alone. Not set: as they are."""
    quantised_frozen: Annotated[
        bool, _SHARDED_PARAMS, Key("zero_optimization.zero_quantized_nontrainable_weights")
    ] = False
    """The same as frozen_quant_type "int8"."""

    # ---- budgets

    host_bytes: Positive | None = None
    """Budget of host memory per node, divided by the ranks on it. Not set: what the plan needs."""
    device_bytes: Positive | None = None
    """Budget of each rank's memory on its accelerator, for weights, gradients and states, without
    activations. Units whose fetch costs most stay there as far as it allows; widened ones
    (compute_dtype) do not. Not set: what the plan needs, and no more units stay."""
    disk_bytes: Positive | None = None
    """Most bytes to take on all NVMe paths together. Not set: what the plan needs."""
    resident_bytes: Count | None = None
    """Optimizer state kept in host memory although `optim` is NVME: that of the first units, which
    the next forward needs first. Not set: what the rest of the plan leaves of host_bytes."""
    activation_bytes: Positive | None = None
    """Most bytes of activations at their home at once, of each rank, counted in the plan; what does
    not fit stays where the maths runs, with a warning. Not set: as many as a forward has, within
    what the plan leaves of host_bytes or disk_bytes."""
    kv_bytes: Positive | None = None
    """Memory of each rank, where the maths runs, that is left to the KV cache of a generation: part
    of device_bytes, or of host_bytes where the CPU computes. `tiermem.zero.kv_cache_bytes` computes
    it. Not set: none is planned."""

    fills_device: bool = False
    """More units stay present on an accelerator than the plan has buffers for, as far as the most
    memory that the steps so far have taken leaves room: they are fetched once a step, not in each
    forward and backward. A forward with a larger input than any before begins with the plan's
    buffers again. On one rank; device_bytes is no limit of it. "auto" sets it where it knows no
    batch."""
    rehomes_states: bool = False
    """After the first step the part of the states on the accelerator (1 - optim_ratio), and of the
    other tiles that it steps (streamed_ratio), become those that its measured memory has room for
    and that are the fastest by the forecast. Before an input that is larger than any before, states
    leave again as far as its activations are expected to need their room, on one rank. Not for
    Muon. "auto" sets it where it knows no batch."""

    # ---- tiles and units: what moves as one, how much of it at once, what stays

    tile_numel: Annotated[Positive, Key("zero_optimization.sub_group_size", off=0)] | None = None
    """Elements of optimizer state read, stepped and written as one; may cut a parameter. Not set:
    1,048,576, or fewer where memory is short; a unit where a step finds all of it in memory."""
    tile_buffers: (
        Annotated[Positive, Key("zero_optimization.offload_optimizer.buffer_count", off=0)] | None
    ) = None
    """Tiles in flight (reading, stepping, writing). Not set: 8, or 4 where memory is short; half of
    that for each of pipeline_read and pipeline_write that is off."""
    unit_buffers: (
        Annotated[Positive, Key("zero_optimization.offload_param.buffer_count", off=0)] | None
    ) = None
    """Units of parameters present at once (the one in use and those fetched ahead). Not set: 3
    where memory allows."""
    unit_numel: (
        Annotated[Positive, Key("zero_optimization.offload_param.buffer_size", off=0)] | None
    ) = None
    """Most elements of one unit's buffer; a larger unit is refused. Not set: the largest unit."""
    sizes_are_least: bool = False
    """Tile and buffer sizes (buffer_count, sub_group_size, block_size and queue_depth of a config)
    are least numbers: a plan takes the usual ones where these are larger and memory allows, which
    is faster; buffer_size refuses no unit. Not set in a config: true, unless `strict`. Numbers that
    `tiermem tune` measured stand."""
    host_param_numel: Annotated[int, Key("zero_optimization.offload_param.max_in_cpu")] | None = (
        None
    )
    """Most elements of parameters on NVMe that stay in host memory all the time. Not set: 0."""
    prefetch_numel: Annotated[int, Key("zero_optimization.stage3_prefetch_bucket_size")] | None = (
        None
    )
    """Most elements fetched ahead of use. Not set: what the unit buffers hold."""
    max_live_numel: Annotated[int, Key("zero_optimization.stage3_max_live_parameters")] | None = (
        None
    )
    """Most elements of gathered parameters at once. Not set: what the unit buffers hold."""
    max_reuse_numel: Annotated[int, Key("zero_optimization.stage3_max_reuse_distance")] | None = (
        None
    )
    """A unit used again within this many elements stays gathered. Not set: what the unit buffers hold."""
    persistence_numel: Annotated[
        Count, Key("zero_optimization.stage3_param_persistence_threshold")
    ] = 100_000
    """Parameters of at most this many elements stay gathered."""
    model_persistence_numel: (
        Annotated[int, Key("zero_optimization.stage3_model_persistence_threshold")] | None
    ) = None
    """Most elements that stay gathered because they are small, in all."""
    leaves: Annotated[LeafRules, Key("zero_optimization.leaf_module")] = dataclasses.field(
        default_factory=LeafRules
    )
    """Modules that are fetched as one, beside those that are marked (units/leaf.py)."""

    # ---- communication of ranks

    gather_way: Annotated[
        Literal["coalesced", "single", "all_reduce"],
        Key("zero_optimization.stage3_allgather_sequential", off=False, on="single"),
    ] = "coalesced"
    """How the ranks' parts of a unit come together (wires/gather.py): all parameters in one call;
    or one parameter after the other, with units as small as the model's modules allow and nothing
    fetched ahead, for the smallest peak. "all_reduce" is accepted and gathers as "coalesced"
    does."""
    gather_dtype: Annotated[Literal["bf16", "fp16"], Key("torch_autocast")] | None = None
    """The dtype of the torch.autocast that forward runs under: wider weights of `lowered_modules`
    are cast to it before they are gathered, not after (units/unit.py). Not set: everything is
    gathered as it rests."""
    lowered_modules: Annotated[tuple[type[nn.Module], ...], Key("torch_autocast")] = (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
    )
    """Classes of modules whose parameters autocast lowers, exactly these."""
    reduce_bucket_numel: Annotated[Count, Key("zero_optimization.reduce_bucket_size")] = 500_000_000
    """Most elements of gradients handed to one reduction, those of all ranks' parts together."""
    allgather_bucket_numel: Annotated[Count, Key("zero_optimization.allgather_bucket_size")] = (
        500_000_000
    )
    """Most elements of updated parameters that come together in one call, those of all ranks' parts
    together."""
    reduce_op: Annotated[Literal["mean", "sum"], Key("gradient_allreduce_op")] = "mean"
    """What gradients are over the ranks."""
    predivide_factor: (
        Annotated[
            Divisor,
            Key("gradient_predivide_factor", off=1.0),
            Key("prescale_gradients", off=False, on="ranks"),
        ]
        | Literal["ranks"]
    ) = 1.0
    """Gradients are divided by this before they are added up over ranks, "ranks" by their number,
    and what is left of the mean after: for sums that overflow fp16."""
    reduce_dtype: (
        Annotated[
            Literal["fp32", "bf16", "fp16"],
            Key("communication_data_type"),
            Key("fp32_allreduce", off=False, on="fp32"),
        ]
        | None
    ) = None
    """What gradients are reduced in over the ranks. Not set: their own dtype."""
    shard_group_size: (
        Annotated[Ranks, _SHARDED_PARAMS, Key("zero_optimization.mics_shard_size", off=-1)] | None
    ) = None
    """Ranks that share one copy of the states (MiCS); the other groups of as many hold copies.
    Not set: all."""
    two_stage_gather: Annotated[
        bool, _SHARDED_PARAMS, Key("zero_optimization.mics_hierarchical_params_gather")
    ] = False
    """Gather across nodes first, then within each, where a shard group spreads over nodes."""
    secondary_group_size: Annotated[
        Ranks, _SHARDED_PARAMS, Key("zero_optimization.zero_hpz_partition_size", off=0)
    ] = 1
    """Neighbouring ranks that keep a secondary copy of gathered parameters among them, from which
    backward gathers (hpZ). 1: none is kept."""
    quantised_gather: Annotated[
        bool, _SHARDED_PARAMS, Key("zero_optimization.zero_quantized_weights")
    ] = False
    """Send parameters as 8-bit blocks (qwZ); masters and shards keep their precision."""
    quantised_reduction: Annotated[
        bool, _SHARDED_GRADS, Key("zero_optimization.zero_quantized_gradients")
    ] = False
    """Reduce gradients as 8-bit blocks, added up in fp32 (qgZ)."""
    timeout_s: Seconds = 1800.0
    """Longest wait for another rank before the run stops with an error, in seconds."""
    join_timeout_s: Seconds = 60.0
    """Longest wait for all ranks to start, in seconds, where the process group is made here; no
    more than timeout_s."""

    # ---- maths and steps

    compute_dtype: Literal["storage", "fp32", "measured"] = "storage"
    """What 16-bit parameters are multiplied in: the dtype in which they rest, or fp32, to which
    each fetched unit is widened in its buffer, which takes 4 bytes an element then. Weights travel,
    and gradients are kept, as without it. measured: fp32 where this machine's 16-bit products are
    slow, which is measured at the start, in less than a second. Stage 3 alone."""
    accumulation: Annotated[Literal["batches", "layers"], _SHARDED_PARAMS] = "batches"
    """How the micro-batches of a step run: "batches", one after the other through the model, each
    fetching every unit; or "layers", all of them through one block after the other, so that each
    fetch serves all and gradients are written once. The model is then a chain of blocks,
    `Engine.train_batch` or TiermemTrainer trains it, and the engine's other ways to train are
    refused. Stage 3 alone."""
    step_in_backward: bool = False
    """Step each unit as its gradients appear and hold none: no clipping, no accumulation,
    non-finite raises. With an accelerator, backward waits for each unit's gradients: host memory
    has them, and they are found finite, before a state changes. It does not wait for the steps;
    `step()` waits once, for the last of them."""
    on_nonfinite: Literal["skip", "raise", "apply"] = "skip"
    """A step whose gradients hold NaN or infinity: leave every state untouched and count it, raise,
    or apply it all the same, not clipped, since such gradients have no norm. Not set in a config
    with bf16.check_grad_overflow false: apply."""
    ignore_unused: Annotated[bool, Key("zero_optimization.ignore_unused_parameters")] = True
    """Go on when parameters got no gradient on any rank, and do not step them; false: a step with
    such parameters is an error naming them."""
    overlap: Overlap = "auto"
    """What runs beside the tiles of an optimizer step: nothing, so that `step` returns when the
    last one is written; or the next forward, whose fetches wait for their own units; or backward as
    well: tiles are stepped when their gradients have come, and stepped again where the step finds
    anything not as assumed, such as clipping. backward takes one more slot on disk, and memory for
    a second copy of weights that rest there; beside an accelerator also of states in host memory,
    of as many units as host_bytes leaves room for. The bits are the same. auto: forward where
    states on NVMe, or in host memory beside an accelerator, belong to units that are fetched; a
    config goes on to backward where the plan has room. A run that clips every step begins none
    under backward, and takes no disk for that."""
    early_steps: Annotated[bool, Key("")] = False
    """With overlap "auto": whether steps may also begin under backward, as with overlap "backward":
    of states on NVMe where the maths runs on the CPU, or of states on HOST beside an accelerator,
    where the plan has room: in host_bytes; without it, weights in memory have second copies where
    the plan takes at most half of the memory that is free, but states have none. The policy of a
    config sets it, whatever gradients are clipped to: a step that clips is made again, and steps
    before which some were clipped are not begun early (optim/tentative.py)."""
    pipeline_read: Annotated[bool, Key("zero_optimization.offload_optimizer.pipeline_read")] = True
    """Read the next tile while this one is stepped."""
    pipeline_write: Annotated[bool, Key("zero_optimization.offload_optimizer.pipeline_write")] = (
        True
    )
    """Write the previous tile while this one is stepped."""
    master_from: Literal["param", "init"] = "param"
    """fp32 masters start from the low-precision copy, or from the fp32 values that zero.Init
    saw."""
    loads_masters: Annotated[bool, Key("zero_optimization.load_from_fp32_weights")] = True
    """Take fp32 masters from a checkpoint or an optimizer's state dict, without loss; false: make
    them from the low-precision weights, with that loss."""

    # ---- durability

    durability: Literal["checkpoint", "step", "none"] = "checkpoint"
    """When what rests on NVMe becomes durable there: when a checkpoint is saved, after every
    optimizer step, or never. Each durable state takes its bytes on disk once more, and two of them
    with "step"; none halves the disk; frozen parameters take it once. With "step" a step that goes
    on under the next forward is made durable when it has ended, before the next backward, step,
    save, load, change of values or close. A run leaves its durable steps in the store's folder when
    it is closed: with "step" its last one too, also when it has saved copies alone, elsewhere."""
    keep: Annotated[int, Range("it is a number of checkpoints, at least 1", 1)] = 1
    """Durable checkpoints (tags) that stay on the NVMe paths, each with its bytes on disk; saving
    one more drops the oldest, with a warning."""
    copies: bool = False
    """Make every saved checkpoint a complete copy, as a save's copy=True: one folder that can be
    moved and archived. Else a checkpoint beside the NVMe paths only names the files of the run
    there, and a README.txt in its folder says where they are."""
    verify: Literal["always", "sample", "resume"] = "always"
    """When the checksums of what rests on NVMe are compared: at every read of a tile or a unit, at
    one read of each in 16, or only when a checkpoint is opened."""

    # ---- I/O

    io: Annotated[IoSettings, Key("aio")] = dataclasses.field(default_factory=IoSettings)
    """How the queue moves blocks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", as_paths(self.paths))
        if self.step_in_backward and self.on_nonfinite == "skip":
            object.__setattr__(self, "on_nonfinite", "raise")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage is {self.stage!r}; allowed are 0, 1, 2 and 3")
        if not isinstance(self.precision, Precision):
            raise ValueError(
                f"precision is {self.precision!r}; give a Precision, such as "
                "Precision.preset('compact') or Precision(master='split', moments='bf16')"
            )
        check_fields(self)
        if found := list(self._contradictions()):
            raise CombinedError(found, joint="=")

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is asked to rest on NVME (gradients may still be sent there by the
        plan)."""
        return Tier.NVME in (self.params, self.optim, self.grads, self.activations)

    @property
    def most_disk_bytes(self) -> int | None:
        """Bytes of a node that may rest on all NVMe paths together: disk_bytes, or what the paths'
        own bounds allow; None: no bound."""
        bounds = [path.max_bytes for path in as_paths(self.paths)]
        known = [each for each in bounds if each is not None]
        found = [] if len(known) < len(bounds) or not known else [sum(known)]
        found += [] if self.disk_bytes is None else [self.disk_bytes]
        return min(found, default=None)

    @property
    def frozen_blocks(self) -> str | None:
        """The form of blocks in which frozen parameters rest; None: as they are."""
        return self.frozen_quant_type or ("int8" if self.quantised_frozen else None)

    @property
    def num_slots(self) -> int:
        """Places on NVME for what steps write: for every durable step that is kept, and for the
        next one."""
        return {"none": 1, "checkpoint": 1 + self.keep, "step": 2 + self.keep}[self.durability]

    def wanted_overlap(self, states: Tier, is_gpu: bool) -> Literal["none", "forward", "backward"]:
        """What is to run beside steps, where units and plan allow it. states: the tier of the
        optimizer's states."""
        if not (self.pipeline_read and self.pipeline_write) or self.step_in_backward:
            return "none"
        if self.overlap != "auto":
            return self.overlap
        if states is (Tier.HOST if is_gpu else Tier.NVME):
            return "backward" if self.early_steps else "forward"
        return "forward" if states is Tier.NVME else "none"

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Yields the fields that do not go with the others, each with a sentence."""
        for name, (stage, reason) in marks_of(type(self), FromStage):  # type: ignore[arg-type]
            value = getattr(self, name)
            if self.stage < stage and value != getattr(type(self), name):
                shown = value.value if isinstance(value, Tier) else value
                yield (
                    name,
                    f"{shown} with stage {self.stage}, but {reason}; set stage to {stage}, or "
                    "leave it out",
                )
        for name in against_widening(self) if self.compute_dtype == "fp32" else ():
            yield (
                "compute_dtype",
                f'"fp32" is given, but {name} does not allow it; set "storage" or "measured"',
            )
        if self.uses_nvme and not self.paths:
            homes = ("params", "optim", "grads", "activations")
            wanted = [n for n in homes if getattr(self, n) is Tier.NVME]
            yield (
                "",
                f"{' and '.join(wanted)} rest on NVME but no path is given: set "
                "paths=['/mnt/nvme0', ...] (in a config: nvme_path)",
            )
        if self.activations is Tier.DEVICE:
            yield (
                "activations",
                "DEVICE is given, where they are without it; allowed are HOST, NVME and None",
            )
        if self.activation_bytes is not None and self.activations is None:
            yield (
                "activation_bytes",
                f"{self.activation_bytes} without activations, which names their home; set both",
            )
        if self.step_in_backward and self.overlap in ("forward", "backward"):
            yield (
                "overlap",
                f'"{self.overlap}" with step_in_backward, whose steps end in backward; set '
                '"auto" or "none"',
            )
        if self.durability == "step" and Tier.NVME not in (self.params, self.optim):
            yield (
                "durability",
                '"step" makes durable what rests on NVME, and nothing does: set optim=Tier.NVME, '
                'or leave it at "checkpoint" and save',
            )
        if self.quantised_frozen and self.frozen_quant_type == "nf4":
            yield (
                "quantised_frozen",
                'True means "int8", but frozen_quant_type is "nf4"; leave one of them out',
            )
        if self.accumulation == "layers" and self.step_in_backward:
            yield (
                "accumulation",
                '"layers" with step_in_backward, which holds no gradient to add to; set one of '
                "them alone",
            )
        if self.two_stage_gather and self.shard_group_size is None:
            yield (
                "two_stage_gather",
                "True without shard_group_size, but it is a way of gathering within a shard "
                "group; set both",
            )


def against_widening(policy: OffloadPolicy) -> Iterator[str]:
    """Yields the fields of a policy that keep units from being widened to fp32 for the maths."""
    if policy.stage != 3:
        yield "stage"  # parameters are always present, as they rest
    yield from (name for name in ("gather_dtype", "quantised_gather") if getattr(policy, name))


def check_kind(policy: Any) -> None:
    """Raises ValueError for what is neither a policy nor None."""
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise ValueError(
            f"policy is a {type(policy).__name__}; give an OffloadPolicy: "
            "tiermem.config.load_config(...).policy() makes one of a config, and "
            "tiermem.initialize takes the config itself"
        )


def check_model(model: Any) -> None:
    """Raises ValueError for what is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r:.60}; give a torch.nn.Module")
