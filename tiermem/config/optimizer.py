"""The sections of a training run: `optimizer`, `scheduler` and the three batch sizes."""

from __future__ import annotations

import difflib
import functools
import operator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import pydantic
from pydantic import Field, SerializeAsAny, ValidationInfo

from tiermem.keys import is_auto
from tiermem.optimizers import PARAMS
from tiermem.optimizers.adam import AdamParams
from tiermem.optimizers.base import OptimizerParams
from tiermem.policy import CombinedError
from tiermem.schedule import check_params, schedule_class
from tiermem.section import ConfigModel, Problems

# ---- optimizer -----------------------------------------------------------------------------------
#
#     Adam, AdamW    as in DeepSpeed, "Adam" means AdamW (decoupled weight decay) unless `adam_w_mode` is false
#     Muon           Muon steps the matrices of hidden layers, AdamW the other parameters
#
# Their settings: optimizers/.

if TYPE_CHECKING:
    OptimizerName = str
    AnyParams = OptimizerParams
else:
    OptimizerName = Literal[tuple(PARAMS)]
    AnyParams = functools.reduce(operator.or_, PARAMS.values())


class OptimizerConfig(ConfigModel):
    """`optimizer`: its type and settings."""

    section: ClassVar[str] = "optimizer"

    type: OptimizerName
    """The rule of a step, in any case."""
    params: SerializeAsAny[AnyParams] = Field(default=AdamParams(), validate_default=True)
    """Settings of the optimizer."""
    legacy_fusion: bool = False
    """Fused optimizer of old; does not exist here."""

    @pydantic.field_validator("params", mode="before")
    @classmethod
    def _read_params_of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.data.get("type")
        if name is None:  # not known: one error is enough
            return AdamParams()
        kind = PARAMS[name]
        if isinstance(value, OptimizerParams):
            value = {field: getattr(value, field) for field in value.model_fields_set}
        if isinstance(value, dict):
            _check_keys(name, kind, value)
        return kind.model_validate(value)

    @property
    def name(self) -> str:
        """The class of tiermem.optim that is meant: "Adam" means AdamW unless adam_w_mode is
        false."""
        return "AdamW" if self.type == "Adam" and not self._is_coupled else self.type

    @property
    def _is_coupled(self) -> bool:
        """Whether weight decay acts on the gradient, where the rule is Adam's."""
        return isinstance(self.params, AdamParams) and not self.params.adam_w_mode

    def contradictions(self) -> Problems:
        if self.type == "AdamW" and self._is_coupled:
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
        if not isinstance(key, str):
            continue  # pydantic tells of it
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
                "them, and gradient_accumulation_steps if micro-batches are to be accumulated"
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
            f"gradient_accumulation_steps {accumulation} * ranks {num_ranks} = {product}; remove "
            f"one of the three, or set train_batch_size to {product}"
        )
    return BatchSizes(micro, accumulation, product)


def _divided(total: int, given: int, name: str, num_ranks: int) -> int:
    quotient, remainder = divmod(total, given * num_ranks)
    if remainder or not quotient:
        nearest = max(1, round(total / (given * num_ranks))) * given * num_ranks
        raise ValueError(
            f"train_batch_size {total} is not a multiple of {name} {given} * ranks {num_ranks} = "
            f"{given * num_ranks}; the nearest that is: {nearest}"
        )
    return quotient
