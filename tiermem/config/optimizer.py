"""The sections of a training run: `optimizer`, `scheduler` and the three batch sizes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import pydantic
from pydantic import Field, SerializeAsAny, ValidationInfo

from tiermem.config.base import ConfigModel, Number, PositiveCount
from tiermem.config.keys import is_auto
from tiermem.policy import CombinedError
from tiermem.schedule import check_params, schedule_class

# ---- optimizer -----------------------------------------------------------------------------------
#
#     Adam, AdamW    as in DeepSpeed, "Adam" means AdamW (decoupled weight decay) unless `adam_w_mode` is false
#     Adagrad, Lion, SGD
#     Muon           Muon steps the matrices of hidden layers, AdamW the other parameters
#
# Settings have the names of torch's optimizers; where DeepSpeed's names differ, those are accepted,
# too.

Beta = Annotated[Number, Field(lt=1.0)]
"""A decay rate in [0, 1)."""


class OptimizerParams(ConfigModel):
    """`optimizer.params`: what every optimizer has."""

    section: ClassVar[str] = "optimizer.params"

    lr: Number = 1e-3
    """Learning rate."""
    weight_decay: Number = 0.0
    """Weight decay per step: times lr on the weight where it is decoupled, else added to the
    gradient."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _point_to_clipping(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("max_grad_norm") is not None:
            raise ValueError(
                'max_grad_norm is not a setting of the optimizer; set "gradient_clipping": '
                f"{raw['max_grad_norm']} at "
                "the top of the config instead"
            )
        return raw

    @property
    def num_moments(self) -> int:
        """Moments kept for each element."""
        return 1

    def settings(self) -> dict[str, Any]:
        """Arguments of the optimizer, by name."""
        return {
            name: getattr(self, name) for name in type(self).model_fields if name not in _ABOUT_US
        }


class AdamParams(OptimizerParams):
    """`optimizer.params` of Adam and AdamW."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: Number = 1e-8
    """Added to the root of the second moment."""
    amsgrad: bool = False
    """Divide by the root of the largest second moment so far, which is a third moment to keep."""
    maximize: bool = False
    """Climb instead of descending."""
    adam_w_mode: bool = True
    """Whether weight decay is decoupled."""
    fp32_optimizer_states: bool = True
    """Keep moments in fp32; false: in the master's dtype (config/root.py)."""
    bias_correction: bool = True
    """Divide the moments by 1 - beta**step; always so here."""
    torch_adam: bool = False
    """Use torch's own Adam; sharded states need ours."""

    @property
    def num_moments(self) -> int:
        return 3 if self.amsgrad else 2


class AdagradParams(OptimizerParams):
    """`optimizer.params` of Adagrad."""

    lr: Number = 1e-2
    """Learning rate."""
    lr_decay: Number = 0.0
    """The rate is divided by 1 + step * lr_decay."""
    initial_accumulator_value: Number = 0.0
    """What the sum of squares starts from."""
    eps: Number = 1e-10
    """Added to the root of the sum."""
    maximize: bool = False
    """Climb instead of descending."""


class LionParams(OptimizerParams):
    """`optimizer.params` of Lion."""

    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Decay rate of the moment in the update, and of the moment that is kept."""
    maximize: bool = False
    """Climb instead of descending."""


class SgdParams(OptimizerParams):
    """`optimizer.params` of SGD."""

    momentum: Number = 0.0
    """Decay rate of the momentum; 0 keeps none."""
    dampening: Number = 0.0
    """Part of the gradient that does not reach the momentum."""
    nesterov: bool = False
    """Step along the momentum after next; needs momentum and no dampening."""
    maximize: bool = False
    """Climb instead of descending."""

    @property
    def num_moments(self) -> int:
        return int(self.momentum > 0)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.nesterov and not (self.momentum > 0 and self.dampening == 0):
            given = f"momentum {self.momentum} and dampening {self.dampening}"
            yield "nesterov", f"true with {given}; it needs momentum above 0 and dampening 0"


class MuonParams(OptimizerParams):
    """`optimizer.params` of Muon."""

    momentum: Beta = 0.95
    """Decay rate of a matrix's momentum."""
    nesterov: bool = True
    """Step along the momentum after next."""
    ns_steps: PositiveCount = 5
    """Iterations that make an update orthogonal."""
    ns_method: Literal["gram", "standard"] = "gram"
    """How they are computed."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW, for what is no matrix of a hidden layer."""
    eps: Number = 1e-8
    """Added to the root of AdamW's second moment."""
    muon_lr: Number | None = None
    """Learning rate of matrices. Not set: lr."""
    adam_lr: Number | None = None
    """Learning rate of the rest. Not set: lr."""

    @property
    def num_moments(self) -> int:
        return 2


_PARAMS: dict[str, type[OptimizerParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "SGD": SgdParams,
    "Muon": MuonParams,
}
_ABOUT_US = ("adam_w_mode", "fp32_optimizer_states", "bias_correction", "torch_adam", "ns_method")


class OptimizerConfig(ConfigModel):
    """`optimizer`: its type and settings."""

    section: ClassVar[str] = "optimizer"

    type: Literal["Adam", "AdamW", "Adagrad", "Lion", "SGD", "Muon"]
    """The rule of a step, in any case."""
    params: SerializeAsAny[AdamParams | AdagradParams | LionParams | SgdParams | MuonParams] = (
        Field(default=AdamParams(), validate_default=True)
    )
    """Settings of the optimizer."""
    legacy_fusion: bool = False
    """Fused optimizer of old; does not exist here."""

    @pydantic.field_validator("params", mode="before")
    @classmethod
    def _read_params_of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.data.get("type")
        if name is None:  # not known: one error is enough
            return AdamParams()
        kind = _PARAMS[name]
        if isinstance(value, OptimizerParams):
            value = {field: getattr(value, field) for field in value.model_fields_set}
        if isinstance(value, dict):
            _check_keys(name, kind, value)
        return kind.model_validate(value)

    @property
    def name(self) -> str:
        """The class of tiermem.optim that is meant: "Adam" means AdamW unless adam_w_mode is
        false."""
        is_coupled = (
            self.type == "Adam"
            and isinstance(self.params, AdamParams)
            and not self.params.adam_w_mode
        )
        return "AdamW" if self.type == "Adam" and not is_coupled else self.type

    @property
    def is_decoupled(self) -> bool:
        """Whether weight decay acts on the weight rather than on the gradient."""
        return self.name in ("AdamW", "Lion", "Muon")

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if (
            self.type == "AdamW"
            and isinstance(self.params, AdamParams)
            and not self.params.adam_w_mode
        ):
            yield (
                "params.adam_w_mode",
                "false given, but AdamW decouples weight decay; set type to Adam",
            )


def _check_keys(name: str, kind: type[OptimizerParams], given: dict[str, Any]) -> None:
    """Raises for settings of another optimizer, naming the nearest of this one."""
    found = []
    for key in given:
        if key in kind.model_fields or key == "max_grad_norm" or is_auto(given[key]):
            continue
        near = difflib.get_close_matches(key, kind.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {kind.path_of(near[0])}? Allowed" if near else "allowed"
        found.append((key, f"unknown key of {name}; {hint} are {', '.join(kind.model_fields)}"))
    if found:
        raise CombinedError(found)


# ---- scheduler -----------------------------------------------------------------------------------
#
# It names one of DeepSpeed's five schedules or a class of torch.optim.lr_scheduler;
# `tiermem/schedule.py` builds it.


class SchedulerConfig(ConfigModel):
    """`scheduler`: its type and settings."""

    section: ClassVar[str] = "scheduler"

    type: str
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class of
    torch.optim.lr_scheduler."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the schedule, by name; those that are "auto" are left out."""

    @pydantic.field_validator("type")
    @classmethod
    def _know_type(cls, value: str) -> str:
        schedule_class(value)
        return value

    @pydantic.field_validator("params")
    @classmethod
    def _know_params(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        params = {name: inner for name, inner in value.items() if not is_auto(inner)}
        problems = check_params(info.data["type"], params) if "type" in info.data else []
        if problems:
            raise CombinedError(problems)
        return params


# ---- batch sizes ---------------------------------------------------------------------------------


class BatchSizes(NamedTuple):
    """The three sizes: micro-batch in samples, accumulation in micro-batches, total in samples."""

    micro: int
    """Samples in one forward of one rank."""
    accumulation: int
    """Forwards of one rank per optimizer step."""
    total: int
    """Samples per optimizer step, over all ranks."""


def solve_batch(
    total: int | None, micro: int | None, accumulation: int | None, num_ranks: int
) -> BatchSizes:
    """Computes the sizes that are None from the others: total = micro * accumulation * num_ranks.

    If only the total or only the micro-batch is given, accumulation is 1. Raises ValueError, with
    the arithmetic, when the sizes do not multiply to the total, and when neither the total nor the
    micro-batch is given.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; it must be at least 1")
    if micro is None:
        if total is None:
            raise ValueError(
                "neither train_batch_size nor train_micro_batch_size_per_gpu is given; set one of "
                "them, and "
                "gradient_accumulation_steps if micro-batches are to be accumulated"
            )
        accumulation = accumulation or 1
        micro = _divided(total, accumulation, "gradient_accumulation_steps", num_ranks)
    elif accumulation is None:
        accumulation = (
            1
            if total is None
            else _divided(total, micro, "train_micro_batch_size_per_gpu", num_ranks)
        )
    product = micro * accumulation * num_ranks
    if total not in (None, product):
        raise ValueError(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} * "
            "gradient_accumulation_steps "
            f"{accumulation} * ranks {num_ranks} = {product}; remove one of the three, or set "
            f"train_batch_size to {product}"
        )
    return BatchSizes(micro, accumulation, product)


def _divided(total: int, given: int, name: str, num_ranks: int) -> int:
    quotient, remainder = divmod(total, given * num_ranks)
    if remainder or not quotient:
        nearest = max(1, round(total / (given * num_ranks))) * given * num_ranks
        raise ValueError(
            f"train_batch_size {total} is not a multiple of {name} {given} * ranks {num_ranks} = "
            f"{given * num_ranks}; "
            f"the nearest that is: {nearest}"
        )
    return quotient
