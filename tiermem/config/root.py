"""TiermemConfig: the top section of a config, with the checks across sections; and the Precision
that its keys select."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import AliasChoices, BeforeValidator, Field, PrivateAttr

import tiermem.config.translate as translate
from tiermem.config.io import AioConfig, OffloadDevice
from tiermem.config.optimizer import (
    BatchSizes,
    OptimizerConfig,
    SchedulerConfig,
    solve_batch,
)
from tiermem.config.own import OwnConfig
from tiermem.config.precision import AutocastConfig, Bf16Config, DataTypesConfig, Fp16Config
from tiermem.config.zero import ActivationConfig, CheckpointConfig, ZeroConfig
from tiermem.keys import INERT, OFF, RECOGNISED, is_off
from tiermem.optimizers.adam import AdamParams
from tiermem.policy import LEAST_STAGES, CombinedError, LeafRules, OffloadPolicy
from tiermem.precision import DTYPES, Precision
from tiermem.section import (
    KEY_OF,
    ConfigError,
    ConfigModel,
    Count,
    DtypeName,
    Number,
    PositiveCount,
    Problem,
    Problems,
)

# ---- precision -----------------------------------------------------------------------------------
#
# DeepSpeed's precision keys and tiermem.precision select one Precision, or are refused. The table
# gives the bytes of states per parameter:
#
#     bf16_master_     bf16_optimizer_  offload_
#     weights_and_grads       _states   optimizer   DeepSpeed                              here
#     false            false            any         fp32 master, fp32 moments: 12 bytes    the same
#     true             false            cpu         bf16 master, fp32 moments: 10          the same (8 beside the weight)
#     true             false            nvme        moments become bf16 after one step     bf16 master, fp32 moments, as asked
#     true             false            none        refused                                refused
#     true             true             any         all bf16: 6                            the same (4 beside the weight)
#     false            true             any         refused                                refused
#     true             any              stage 0     refused                                refused
#
# fp16_master_weights_and_grads follows the rows with bf16_optimizer_states false. In stage 0 and
# without offload it is refused. On cpu and nvme it selects an fp16 master with fp32 moments (fp16
# moments with optimizer.params.fp32_optimizer_states false). The row without offload is refused
# although tiermem steps on the CPU, so that a config means the same in both systems.
# tiermem.precision selects that combination without offload.
#
# DeepSpeed rounds to nearest, so the parts that its keys lower are rounded to nearest, unless
# tiermem.precision.rounding is set. A key that is false selects nothing, and tiermem.precision may.
# A key that is true and contradicts tiermem.precision is refused.

_BF16_MASTER = "bf16.bf16_master_weights_and_grads"
_BF16_STATES = "bf16.bf16_optimizer_states"
_FP16_MASTER = "fp16.fp16_master_weights_and_grads"
_FP32_STATES = "optimizer.params.fp32_optimizer_states"
_DEVICE = "zero_optimization.offload_optimizer.device"


class _Ask(NamedTuple):
    """What a switch asks of a field of Precision."""

    field: str
    value: str
    key: str


def precision_of(config: TiermemConfig) -> Precision:
    """What masters, moments and gradients are kept in. For a config without problems."""
    asks = list(_asks(config))
    own = config.tiermem.precision.asked if config.tiermem.precision is not None else {}
    fields: dict[str, Any] = {"seed": config.seed}
    if any(ask.field in ("master", "moments") and ask.value != "fp32" for ask in asks):
        fields["rounding"] = "nearest"
    fields |= {ask.field: ask.value for ask in asks}
    fields |= {name: value for name, value in own.items() if name != "grads" or value is not None}
    return Precision(**fields)


def _asks(config: TiermemConfig) -> Iterator[_Ask]:
    """What the reference's switches decide; true ones alone."""
    bf16 = config.bf16
    grads = config.data_types.grad_accum_dtype
    fp32_states = _fp32_states(config)
    for is_on, name, key in (
        (bf16.bf16_master_weights_and_grads, "bf16", _BF16_MASTER),
        (config.fp16.fp16_master_weights_and_grads, "fp16", _FP16_MASTER),
    ):
        if is_on:
            yield _Ask("master", name, key)
            if grads is None:
                yield _Ask("grads", name, key)
            if fp32_states is False:
                yield _Ask("moments", name, _FP32_STATES)
    if bf16.bf16_optimizer_states:
        yield _Ask("moments", "bf16", _BF16_STATES)
    elif fp32_states:
        yield _Ask("moments", "fp32", _FP32_STATES)
    if grads is not None:
        yield _Ask("grads", grads, "data_types.grad_accum_dtype")


def _fp32_states(config: TiermemConfig) -> bool | None:
    """optimizer.params.fp32_optimizer_states; None when it is not set."""
    params = config.optimizer.params if config.optimizer is not None else None
    if isinstance(params, AdamParams) and params.is_set("fp32_optimizer_states"):
        return params.fp32_optimizer_states
    return None


def _bf16_problems(config: TiermemConfig) -> Problems:
    master = config.bf16.bf16_master_weights_and_grads
    states = config.bf16.bf16_optimizer_states
    if states and not master:
        yield (
            _BF16_STATES,
            f"true with {_BF16_MASTER} false, but bf16 moments are kept beside a bf16 master; "
            "allowed is both true. "
            'For bf16 moments beside an fp32 master set tiermem.precision to {"moments": "bf16"}',
        )
    if master:
        yield from _unusable_switch(
            config, _BF16_MASTER, None if states else f", or {_BF16_STATES} true"
        )
    if states:
        yield from _unusable_switch(config, _BF16_STATES, None)
    if states and _fp32_states(config):
        yield (
            _FP32_STATES,
            f"true, but {_BF16_STATES} is true, which keeps moments in bf16; remove one of the two",
        )


def _fp16_problems(config: TiermemConfig) -> Problems:
    if config.fp16.fp16_master_weights_and_grads and config.bf16.bf16_master_weights_and_grads:
        yield (
            _FP16_MASTER,
            f"true, and {_BF16_MASTER} is true; allowed is one of them, that of the section "
            "enabled",
        )
    elif config.fp16.fp16_master_weights_and_grads:
        yield from _unusable_switch(config, _FP16_MASTER, "")


def _unusable_switch(config: TiermemConfig, key: str, or_else: str | None) -> Problems:
    """A switch outside stages 1 to 3, or whose section is off, or that needs offload; `or_else` is
    None if it does not."""
    section = key.partition(".")[0]
    if config.precision != section:
        yield (
            key,
            f"true with {section}.enabled false, but the weight itself is that master, and the "
            "model computes in "
            f"{config.precision}; set {section}.enabled to true or remove the key",
        )
    elif config.zero_optimization.stage == 0:
        yield (
            key,
            "true with zero_optimization.stage 0, but masters and optimizer states are kept so in "
            "stages 1, 2 and 3 only, where they are the sharded optimizer's; set the stage",
        )
    elif or_else is not None and config.zero_optimization.optimizer_device is OffloadDevice.none:
        yield (
            key,
            f"true with {_DEVICE} none, but a {section} master beside fp32 moments is the CPU "
            f"step's, of offloaded states; allowed are {_DEVICE} cpu and nvme{or_else}",
        )


def _contradicted(config: TiermemConfig) -> Problems:
    """Where data_types or tiermem.precision say one thing and a switch another."""
    given = config.data_types.param_dtype
    kept = config.precision
    own = config.tiermem.precision
    if given not in (None, kept):
        how = f"set {given}.enabled" if given != "fp32" else f"set {kept}.enabled to false"
        yield (
            "data_types.param_dtype",
            f"{given} given, but bf16 and fp16 say {kept}; remove the key or {how}",
        )
    if own is None:
        return
    for ask in _asks(config):
        value = own.asked.get(ask.field)
        if value is None or value == ask.value:
            continue
        path = f"tiermem.precision.{ask.field}" if own.is_set(ask.field) else "tiermem.precision"
        what = (
            f"{value!r} given"
            if own.is_set(ask.field)
            else f"preset {own.preset!r} has {ask.field} {value!r}"
        )
        yield path, f"{what}, but {ask.key} asks for {ask.value!r}; remove one of the two"


def _unkept(config: TiermemConfig) -> Problems:
    """A master that parameters of the config's dtype cannot have; unknown while no section casts
    the model."""
    if config.precision == "fp32" or config.tiermem.precision is None:
        return
    try:
        precision_of(config).check_dtype(DTYPES[config.precision], f"of {config.precision}.enabled")
    except ValueError as error:
        yield "tiermem.precision", str(error)


# ---- the whole config ----------------------------------------------------------------------------
#
#     JSON or dict --load.py--> TiermemConfig --translate.py--> OffloadPolicy, which zero/ and
#     optim/ read
#                                             --batch()-------> BatchSizes
#                                             --report()------> the outcome of every key
#
# The engine reads optimizer, scheduler, clipping, precision and printing from the config itself.
# TiermemConfig makes the checks that need two sections; each section makes its own.


def _never_if_infinite(value: Any) -> Any:
    # Accelerate writes infinity
    return None if isinstance(value, float) and math.isinf(value) else value


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value


class TiermemConfig(ConfigModel):
    """The top of a config. Values are frozen; `model_fields_set` of each section tells what the
    user wrote."""

    train_batch_size: PositiveCount | None = None
    """Samples per optimizer step, over all ranks."""
    train_micro_batch_size_per_gpu: PositiveCount | None = None
    """Samples in one forward of one rank."""
    gradient_accumulation_steps: PositiveCount | None = None
    """Forwards of one rank per optimizer step."""
    optimizer: OptimizerConfig | None = None
    """The optimizer that the engine builds, unless it is given one."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule that the engine builds, unless it is given one."""
    gradient_clipping: Number = 1.0
    """Largest global norm of the gradients in a step; 0 does not clip."""
    bf16: Bf16Config = Field(
        default=Bf16Config(), validation_alias=AliasChoices("bf16", "bfloat16")
    )
    """Compute in bfloat16."""
    fp16: Fp16Config = Fp16Config()
    """Compute in float16."""
    data_types: DataTypesConfig = DataTypesConfig()
    """Dtypes that differ from what bf16 and fp16 say."""
    communication_data_type: DtypeName | None = None
    """What gradients are reduced in over the ranks. Not set: their own dtype, or torch_autocast's
    where that says so."""
    fp32_allreduce: bool = False
    """Older name of communication_data_type "fp32"."""
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """What becomes of the ranks' gradients; a sum makes the step as many times as large as there
    are ranks, for SGD."""
    prescale_gradients: bool = False
    """Divide gradients by the number of ranks before they are added up, not after."""
    gradient_predivide_factor: Annotated[Number, Field(gt=0)] = 1.0
    """Divide gradients by this before they are added up, and by the rest of the number of ranks
    after."""
    managed_gradient_accumulation: bool = True
    """The engine counts micro-batches and steps at the last of a step; false: every call of `step`
    ends one."""
    torch_autocast: AutocastConfig = AutocastConfig()
    """Run forward under torch.autocast."""
    zero_optimization: ZeroConfig = ZeroConfig()
    """What is sharded and where it rests."""
    activation_checkpointing: Annotated[ActivationConfig, BeforeValidator(_empty_if_null)] = (
        ActivationConfig()
    )
    """Where inputs of blocks rest that the model checkpoints (torch.utils.checkpoint)."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What saving does where it has a choice."""
    aio: AioConfig = AioConfig()
    """How blocks move between memory and files."""
    tiermem: OwnConfig = OwnConfig()
    """What the documented keys have no word for."""
    steps_per_print: Annotated[Count | None, BeforeValidator(_never_if_infinite)] = 10
    """Optimizer steps between two lines of progress; null, 0 or infinity prints none."""
    wall_clock_breakdown: bool = False
    """Tell in every line of progress how long forward, backward and step took, on the average since
    the one before."""
    dump_state: bool = False
    """Log what became of every key when the engine starts, at level INFO like progress."""
    seed: Annotated[Count, Field(le=(1 << 64) - 1)] = 0
    """Seeds the shuffling of training_data, and rounding where it is stochastic."""
    dataloader_drop_last: bool = False
    """Leave out a last batch of training_data that is not full."""
    zero_allow_untested_optimizer: bool = False
    """Accept an optimizer from the user that was not tested with sharded states; there is none such
    here."""
    zero_force_ds_cpu_optimizer: bool = True
    """With offload, refuse optimizers that cannot step on the CPU; always so here."""

    _auto_keys: frozenset[str] = PrivateAttr(default=frozenset())
    _inert: dict[str, Any] = PrivateAttr(default_factory=dict)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_what_is_off(cls, raw: Any) -> Any:
        """Leaves out recognised keys that ask for nothing (`"tensorboard": {"enabled": false}`), or
        for nothing that trains."""
        if not isinstance(raw, dict):
            return raw
        own = raw.get("tiermem")
        is_strict = isinstance(own, dict) and own.get("strict") is True
        asked = [k for k in raw if k in RECOGNISED and not is_off(raw[k], OFF.get(k))]
        inert = [k for k in asked if k in INERT and not is_strict]
        if inert:
            said = "; ".join(f"{k} ({INERT[k]})" for k in inert)
            warnings.warn(
                f"of the config, this does nothing here: {said}. tiermem.strict refuses it",
                stacklevel=2,
            )
        return {
            k: v for k, v in raw.items() if k not in RECOGNISED or (k in asked and k not in inert)
        }

    @pydantic.model_validator(mode="after")
    def _say_what_is_least(self) -> TiermemConfig:
        if keys := translate.least_keys(self, self.aio, self.tiermem):
            said = f"{', '.join(keys)}; tiermem.sizes_are_least: false keeps them"
            warnings.warn(
                f"more than these small numbers is taken where memory allows: {said}", stacklevel=2
            )
        return self

    def get(self, key: str, default: Any = None) -> Any:
        """A top-level key's value as JSON holds it, as from a dict; tools that expect one call
        it."""
        return self.model_dump(mode="json").get(key, default)

    @property
    def auto_keys(self) -> frozenset[str]:
        """Dotted paths whose value was "auto"."""
        return self._auto_keys

    @property
    def moved(self) -> tuple[str, ...]:
        """Homes that are "auto": fields of the policy that the free memory decides. A stage that
        does not shard leaves them on the device."""
        return tuple(
            name
            for name, stage in LEAST_STAGES.items()
            if KEY_OF[name] in self._auto_keys and self.zero_optimization.stage >= stage
        )

    @property
    def precision(self) -> Literal["bf16", "fp16", "fp32"]:
        """What the model computes in."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    def batch(self, num_ranks: int) -> BatchSizes:
        """Computes the batch sizes on this many ranks; raises ConfigError with the arithmetic when
        they do not fit."""
        try:
            micro = self.train_micro_batch_size_per_gpu
            accumulation = self.gradient_accumulation_steps
            sizes = solve_batch(self.train_batch_size, micro, accumulation, num_ranks)
        except ValueError as error:
            auto = [
                key
                for key in ("train_batch_size", "train_micro_batch_size_per_gpu")
                if key in self._auto_keys
            ]
            hint = (
                (
                    f'; {" and ".join(auto)} "auto" is for a Trainer, whose arguments fill it in: '
                    "write numbers"
                )
                if auto
                else ""
            )
            raise ConfigError([Problem("", f"{error}{hint}")]) from error
        if self.tiermem.step_in_backward and sizes.accumulation > 1:
            raise ConfigError(
                [Problem("tiermem.step_in_backward", _NO_ACCUMULATION.format(sizes.accumulation))]
            )
        return sizes

    def policy(self, **overrides: Any) -> OffloadPolicy:
        """Builds the policy from the keys that are set; `overrides` are fields of OffloadPolicy
        that win over them."""
        zero = self.zero_optimization
        own = self.tiermem
        leaf = zero.leaf_module
        fields: dict[str, Any] = {
            "stage": 0,
            **translate.fields_of(self, not own.is_set("sizes_are_least") or own.sizes_are_least),
            "paths": translate.paths_of(zero, own, bool(self.moved)),
            "io": translate.io_of(self.aio, own),
            "precision": precision_of(self),
            "leaves": LeafRules(
                tuple(leaf.classes),
                tuple(leaf.names),
                tuple(leaf.name_suffixes),
                zero.module_granularity_threshold,
            ),
            "early_steps": True,
            "sizes_are_least": own.takes_more,
        }
        if own.takes_more:
            fields.pop("unit_numel", None)
        if self.optimizer is not None:
            fields["num_moments"] = self.optimizer.params.num_moments
        if self._applies_anything:
            fields["on_nonfinite"] = "apply"
        given = [
            each
            for each in (zero.offload_param, zero.offload_optimizer)
            if each and each.is_set("pin_memory")
        ]
        if given:
            fields["pin_memory"] = any(each.pin_memory for each in given)
        return OffloadPolicy(**(fields | overrides))

    def report(self) -> list[translate.ReportRow]:
        """Lists every key: its value, whether it is honoured, computed, inert or default, and a
        note."""
        rows = translate.report_of(self, self._auto_keys, self.policy().uses_nvme)
        inert = self._inert.items()
        return [*rows, *(translate.ReportRow(k, v, "inert", INERT[k]) for k, v in inert)]

    def shared_by_ranks(self) -> dict[str, Any]:
        """Keys that have to be the same on every rank, with their values."""
        return translate.shared_by_ranks(self)

    def contradictions(self) -> Problems:
        zero = self.zero_optimization
        own = self.tiermem
        if self.bf16.enabled and self.fp16.enabled:
            yield (
                "",
                "bf16.enabled and fp16.enabled are both true; allowed is one of them, or none "
                "for fp32",
            )
        for name in ("grads", "activations"):
            if getattr(own, name) == OffloadDevice.nvme and not translate.paths_of(zero, own):
                said = (
                    "nvme given without a path; set zero_optimization.offload_optimizer.nvme_path "
                    "or tiermem.paths"
                )
                yield f"tiermem.{name}", said
        if (
            own.activations not in (None, OffloadDevice.cpu)
            and self.activation_checkpointing.cpu_checkpointing
        ):
            said = (
                f"{own.activations.value} given, but activation_checkpointing.cpu_checkpointing "
                "is cpu; remove one"
            )
            yield "tiermem.activations", said
        if own.grads not in (None, OffloadDevice.none) and zero.stage == 0:
            yield (
                "tiermem.grads",
                "set with stage 0, but gradients rest elsewhere in stages 1, 2 and 3 only",
            )
        yield from translate.path_problems(zero, own)
        yield from [*_bf16_problems(self), *_fp16_problems(self), *_contradicted(self)] or _unkept(
            self
        )
        yield from self._overflow_conflicts()
        yield from self._reduction_conflicts()
        if own.step_in_backward:
            yield from self._step_in_backward_conflicts()
        try:
            translate.io_of(self.aio, own)
            self.policy()
        # of the policy: its fields become keys; paths have been looked at above
        except CombinedError as error:
            yield from translate.named_by_keys(self, [each for each in error.found if each[0]])
        except ValueError as error:
            yield "aio", f"{error} (block_bytes is block_size, threads is intra_op_parallelism)"

    @property
    def _applies_anything(self) -> bool:
        """Whether bf16.check_grad_overflow asks for steps with NaN and infinity."""
        return self.bf16.enabled and not self.bf16.check_grad_overflow

    @property
    def reduced_in(self) -> DtypeName | None:
        """What gradients are added up in over the ranks, where the config says so."""
        return "fp32" if self.fp32_allreduce else self.communication_data_type

    @property
    def scales_loss(self) -> bool:
        """Whether gradients pass through fp16, so that the loss is scaled as section fp16 says."""
        autocast = self.torch_autocast
        return self.fp16.enabled or (autocast.enabled and autocast.dtype == "fp16")

    def _overflow_conflicts(self) -> Problems:
        own = self.tiermem
        key = "tiermem.on_nonfinite"
        is_checked = self.bf16.is_set("check_grad_overflow") and self.bf16.check_grad_overflow
        if own.is_set("on_nonfinite") and self._applies_anything and own.on_nonfinite != "apply":
            yield (
                key,
                f'"{own.on_nonfinite}" with bf16.check_grad_overflow false, which is "apply"; '
                "remove one",
            )
        if own.on_nonfinite == "apply" and self.bf16.enabled and is_checked:
            yield (
                key,
                '"apply" with bf16.check_grad_overflow true, which is "skip" or "raise"; '
                "remove one",
            )
        if self.scales_loss and not self.fp16.enabled:
            yield from ((f"fp16.{name}", said) for name, said in self.fp16.unusable_scale())
        if (
            (own.on_nonfinite == "apply" or self._applies_anything)
            and self.scales_loss
            and self.fp16.is_dynamic
        ):
            asks = key if own.on_nonfinite == "apply" else "bf16.check_grad_overflow"
            yield (
                asks,
                "asks to apply every step, but a dynamic loss scale has to skip some; set "
                "fp16.loss_scale",
            )

    def _reduction_conflicts(self) -> Problems:
        """Two dtypes for one reduction or gather, or two divisors, both written down."""
        given = self.communication_data_type
        autocast = self.torch_autocast
        if self.fp32_allreduce and given not in (None, "fp32"):
            yield (
                "fp32_allreduce",
                f"true, but communication_data_type is {given}; remove fp32_allreduce",
            )
        if self.prescale_gradients and self.gradient_predivide_factor != 1.0:
            said = (
                f"{self.gradient_predivide_factor} with prescale_gradients, which divides by "
                "the ranks; remove one"
            )
            yield "gradient_predivide_factor", said
        if autocast.enabled and self.zero_optimization.zero_quantized_weights:
            said = "true with torch_autocast, which decides what weights are sent as; remove one"
            yield "zero_optimization.zero_quantized_weights", said
        if (
            autocast.enabled
            and autocast.lower_precision_safe_modules
            and self.reduced_in not in (None, autocast.dtype)
        ):
            yield (
                "torch_autocast.lower_precision_safe_modules",
                "gradients of these modules are reduced in "
                f"{autocast.dtype or 'the autocast dtype'}, but communication_data_type is "
                f"{self.reduced_in}; remove one of the two, or set torch_autocast.dtype to "
                f"{self.reduced_in}",
            )

    def _step_in_backward_conflicts(self) -> Problems:
        key = "tiermem.step_in_backward"
        if self.gradient_clipping > 0:
            whose = "" if self.is_set("gradient_clipping") else " (the default)"
            yield (
                key,
                f"true with gradient_clipping {self.gradient_clipping}{whose}, but the norm of all "
                "gradients is not known before the first is used; set gradient_clipping to 0",
            )
        if (self.gradient_accumulation_steps or 1) > 1:
            yield key, _NO_ACCUMULATION.format(self.gradient_accumulation_steps)
        if self.tiermem.is_set("on_nonfinite") and self.tiermem.on_nonfinite == "skip":
            yield (
                key,
                'true with on_nonfinite "skip", but a unit already stepped cannot be skipped; '
                'use "raise"',
            )
        if self.scales_loss and self.fp16.is_dynamic:
            yield (
                key,
                "true with a dynamic loss scale, which has to skip steps; set fp16.loss_scale "
                "or use bf16",
            )


_NO_ACCUMULATION = (
    "true with gradient_accumulation_steps {}, but no gradient is held to add to; set it to 1"
)
