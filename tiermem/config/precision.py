"""The sections about precision: bf16, fp16, data_types, tiermem.precision and torch_autocast."""

from __future__ import annotations

import importlib
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import AliasChoices, Field
from torch import nn

from tiermem.policy import OffloadPolicy
from tiermem.precision import PRESETS, Master, Moments, Precision, Rounding
from tiermem.section import (
    ConfigModel,
    Count,
    DtypeName,
    Number,
    PositiveCount,
    Problems,
    Whole,
    did_you_mean,
)

# ---- bf16, fp16, data_types and tiermem.precision ------------------------------------------------
#
# The model computes in fp32 when neither bf16 nor fp16 is on; both together are refused. `root.py`
# has the table of what the four sections mean together and which combinations are refused.
#
# fp16 multiplies the loss by a scale, so that small gradients do not become zero. `loss_scale` 0 is
# dynamic: it starts at 2**initial_scale_power, halves when a step overflows (after `hysteresis`
# overflows, not below min_loss_scale), and doubles after `loss_scale_window` steps without
# overflow.


class Bf16Config(ConfigModel):
    """`bf16` (also `bfloat16`): compute in bfloat16; masters and moments are fp32 unless they are
    asked for in bf16."""

    section: ClassVar[str] = "bf16"

    enabled: bool = False
    """Compute in bfloat16."""
    immediate_grad_update: bool = False
    """Reduce a gradient as soon as it is final; always so here."""
    check_grad_overflow: bool = True
    """Look for NaN and infinity in the gradients before a step (tiermem.on_nonfinite says what
    follows); false: apply the step whatever they hold, which is on_nonfinite "apply". Unlike the
    reference, in every stage."""
    bf16_master_weights_and_grads: bool = False
    """The bf16 weight is the master, and gradients are kept in bf16. Stages 1 to 3; beside fp32
    moments with offload_optimizer on cpu or nvme alone."""
    bf16_optimizer_states: bool = False
    """Keep moments in bf16, too, rounded to nearest; needs bf16_master_weights_and_grads. Not set:
    fp32, also on nvme."""


class Fp16Config(ConfigModel):
    """`fp16`: compute in float16 with a loss scale; masters are fp32 unless they are asked for in
    fp16."""

    section: ClassVar[str] = "fp16"

    enabled: bool = False
    """Compute in float16."""
    auto_cast: bool = False
    """Cast floating-point tensors among the model's inputs to float16."""
    loss_scale: Number = 0.0
    """Static scale; 0 is dynamic."""
    initial_scale_power: Annotated[Count, Field(le=1023)] = 16
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: Whole = 1000
    """Steps without overflow after which the dynamic scale doubles."""
    hysteresis: PositiveCount = 2
    """Overflows after which the dynamic scale halves."""
    consecutive_hysteresis: bool = False
    """Count only overflows in a row: a step without overflow refills the hysteresis."""
    min_loss_scale: Whole = 1
    """The dynamic scale never falls below this."""
    fp16_master_weights_and_grads: bool = Field(
        default=False,
        validation_alias=AliasChoices(
            "fp16_master_weights_and_grads", "fp16_master_weights_and_gradients"
        ),
    )
    """The fp16 weight is the master, and gradients are kept in fp16; moments stay fp32. Stages 1 to
    3 with offload_optimizer on cpu or nvme."""

    @property
    def is_dynamic(self) -> bool:
        """Whether the loss scale follows the overflows."""
        return self.loss_scale == 0

    def contradictions(self) -> Problems:
        return self.unusable_scale() if self.enabled else ()

    def unusable_scale(self) -> Problems:
        """Yields the keys that keep this section from scaling a loss, each with a sentence."""
        for name in ("loss_scale_window", "min_loss_scale"):
            value = getattr(self, name)
            if self.is_dynamic and value <= 0:
                yield (
                    name,
                    f"{value} given; allowed with a dynamic loss scale is a whole number, 1 or "
                    "more",
                )


class DataTypesConfig(ConfigModel):
    """`data_types`: dtypes that differ from what bf16 and fp16 say."""

    section: ClassVar[str] = "data_types"

    grad_accum_dtype: DtypeName | None = None
    """What gradients are accumulated and kept in from backward to step. Not set: the parameters'
    dtype."""
    param_dtype: DtypeName | None = None
    """What parameters are kept in; must be what bf16 and fp16 say."""
    buffer_dtype: DtypeName | None = None
    """What the model's floating-point buffers are cast to. Not set: they keep their dtype."""
    keep_in_fp32_modules: tuple[str, ...] | None = None
    """Parts of the names of buffers that are fp32 beside bf16 or fp16, `*` for any characters. Not
    set: those that classes of transformers list (`_keep_in_fp32_modules_strict`; in fp16 also
        `_keep_in_fp32_modules`). []: none."""


class PrecisionConfig(ConfigModel):
    """`tiermem.precision`: the name of a preset, or an object of the parts. See
    `tiermem/precision.py`.

    "tiermem": {"precision": "compact"} or {"precision": {"master": "split", "moments": "bf16"}}
    """

    section: ClassVar[str] = "tiermem.precision"

    preset: Literal["exact", "compact", "bf16", "tiny"] | None = None
    """The precision that the other keys start from. Not set: exact."""
    master: Master = "fp32"
    """fp32; split: the bf16 weight and the 16 bits that it lacks; bf16 or fp16: the weight
    itself."""
    moments: Moments = "fp32"
    """What moments are kept in."""
    grads: DtypeName | None = None
    """What gradients are accumulated and kept in from backward to step. Not set: the parameters'
    dtype."""
    rounding: Rounding = "stochastic"
    """How every stored part below fp32 is rounded."""
    seed: Annotated[Count, Field(le=(1 << 64) - 1)] = 0
    """Seed of stochastic rounding. Not set: the config's seed."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_name(cls, raw: Any) -> Any:
        return {"preset": raw} if isinstance(raw, str) else raw

    @property
    def asked(self) -> dict[str, Any]:
        """Field of Precision -> value, for those that the preset or a key decides."""
        fields = {} if self.preset is None else dict(vars(PRESETS[self.preset]))
        fields.pop("seed", None)
        return fields | {
            name: getattr(self, name) for name in vars(Precision()) if self.is_set(name)
        }


# ---- torch_autocast ------------------------------------------------------------------------------
#
# The engine's forward runs under torch.autocast, alone or together with bf16 or fp16. torch decides
# for each operation whether it computes in the lower dtype. lower_precision_safe_modules names
# module classes whose parameters may be lowered: their gradients are reduced in the autocast dtype.
# With stage 3 on several ranks their fp32 weights are also cast to it before they are gathered
# (units/unit.py), so autograd keeps no lowered copy.
#
# On one rank weights are read into place in their own dtype. If that is fp32, autograd keeps a
# lowered copy of every weight from forward to backward: 2 bytes per parameter that no budget
# counts. With offloaded parameters, set bf16.enabled as well, or checkpoint activations.


class AutocastConfig(ConfigModel):
    """`torch_autocast`: torch.autocast around forward."""

    section: ClassVar[str] = "torch_autocast"

    enabled: bool = False
    """Run forward under torch.autocast."""
    dtype: DtypeName | None = None
    """bf16 or fp16. Not set: what torch takes for the device. With fp16 the loss is scaled as
    section fp16 says."""
    lower_precision_safe_modules: tuple[str, ...] | None = None
    """Module classes, such as "torch.nn.Linear", whose parameters' gradients are reduced in this
    dtype, and which are gathered in it (those forwards then run under autocast only). Not set:
    torch.nn's Linear, Conv1d, Conv2d and Conv3d. []: none."""

    @pydantic.field_validator("dtype")
    @classmethod
    def _only_lower(cls, value: str | None) -> str | None:
        if value == "fp32":
            raise ValueError(
                "fp32 given, but autocast lowers the precision; allowed are bf16 and fp16"
            )
        return value

    @property
    def safe_classes(self) -> tuple[type[nn.Module], ...]:
        """The classes of lower_precision_safe_modules. Raises ValueError for a name that is
        none."""
        names = self.lower_precision_safe_modules
        return (
            OffloadPolicy.lowered_modules
            if names is None
            else tuple(_class_of(name) for name in names)
        )

    def contradictions(self) -> Problems:
        for name in (self.lower_precision_safe_modules or ()) if self.enabled else ():
            try:
                _class_of(name)
            except ValueError as error:
                yield "lower_precision_safe_modules", str(error)


def _class_of(path: str) -> type[nn.Module]:
    """The module class at a dotted path. Raises ValueError that names the nearest there is."""
    package, _, name = path.rpartition(".")
    if not package:
        raise ValueError(
            f"{path!r} given; allowed is the full path of a class, such as 'torch.nn.{path}'"
        )
    try:
        module = importlib.import_module(package)
    except Exception as error:  # whatever the user's module raises when it is imported
        raise ValueError(f"{path!r} given, but {package} cannot be imported: {error}") from error
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    if found is not None:
        raise ValueError(
            f"{path!r} given, which is no class of modules but a {type(found).__name__}"
        )
    there = [
        each
        for each, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, nn.Module)
    ]
    hint = did_you_mean(path, [f"{package}.{each}" for each in there])
    raise ValueError(f"{path!r} given, but {package} has no {name}{hint}")
