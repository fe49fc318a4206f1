"""What every optimizer has: a section of the config, a rule with its scalars, torch's face."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import pydantic
import torch
from pydantic import Field
from torch import nn

from tiermem.section import ConfigModel, Number
from tiermem.swap.base.parts import StepRule

# ---- the section of the config -------------------------------------------------------------------
#
# Settings have the names of torch's optimizers; where DeepSpeed's names differ, those are accepted,
# too.

Beta = Annotated[Number, Field(lt=1.0)]
"""A decay rate in [0, 1)."""


class OptimizerParams(ConfigModel):
    """`optimizer.params`: what every optimizer has."""

    section: ClassVar[str] = "optimizer.params"
    no_arguments: ClassVar[tuple[str, ...]] = ()
    """Keys that are no arguments of the optimizer."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Moments and settings by which a checkpoint of another system shows this optimizer."""
    averages_squares: ClassVar[bool] = False
    """Whether a moment averages squares by betas[1]: kept in bf16, it stalls when it is rounded to
    nearest."""

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
                f"{raw['max_grad_norm']} at the top of the config instead"
            )
        return raw

    @classmethod
    def most_moments(cls, group: Group) -> int:
        """Moments kept for each element of a parameter in a group with these settings, at most."""
        return 1

    @property
    def num_moments(self) -> int:
        """Moments kept for each element."""
        return self.most_moments(dict(self))

    def settings(self) -> dict[str, Any]:
        """Arguments of the optimizer, by name."""
        return {name: value for name, value in self if name not in self.no_arguments}


# ---- the rule ------------------------------------------------------------------------------------
#
#     StepRule      elementwise: one pass of a native kernel on the CPU; on other devices a Triton kernel or torch
#                   operations with the same bits. A piece may be any range of the parameter
#     MatrixStep    a whole matrix: elementwise momentum, an update that torch makes orthogonal, an elementwise step along it
#
# Before its first step a moment is zero, but for Adagrad's (initial_accumulator_value) and SGD's (the first gradient).
# Formulas: native/tiermem.h.


class MatrixStep(NamedTuple):
    """The scalars of one step of a whole matrix, Muon's (Jordan et al. 2024).

    A Newton-Schulz iteration, by default of five steps, turns the momentum into nearly the closest
    orthogonal matrix. While it runs, it takes about 16 bytes per element of the matrix beside the
    states. torch computes its products, so their last bits may depend on torch's number of threads
    and on the device. The iteration reads the momentum after it was rounded to its stored format;
    elementwise rules use moments before rounding.
    """

    momentum: StepRule  # sgd with a step size of 0: updates the moment only
    update: StepRule  # sgd without a moment: steps along the orthogonal update
    shape: tuple[int, int]
    nesterov: bool
    coefficients: tuple[float, float, float]
    num_iterations: int
    eps: float
    dtype: torch.dtype  # of the products


AnyStep = StepRule | MatrixStep
"""The rule and the scalars of one step."""


Group = Mapping[str, Any]
"""One of `optimizer.param_groups`."""


@dataclasses.dataclass(frozen=True, eq=False)  # each is made once
class Rule:
    """The update of one optimizer. Its numbers are in the parameter group.

    Schedulers change the group, so `scalars` is called for every step. A parameter counts its own
    steps from 1. In step 1 its moments are not read, even if other parameters of the same tile have
    been stepped before.
    """

    code: str
    """The native rule: a key of `swap.parts.MOMENTS`."""
    moments: tuple[str, ...]
    """The moments that are kept, under torch's keys, in the order of MOMENTS."""
    make_scalars: Callable[[Group, int], StepRule] = dataclasses.field(repr=False)
    """The scalars of a step, counted from 1, of gradients as they are."""
    is_matrix: bool = False
    """Whether a step needs the whole parameter at once. Then no tile may cut it."""

    def scalars(
        self, group: Group, num_steps: int, factor: float, shape: Sequence[int] = ()
    ) -> AnyStep:
        """The scalars of a parameter's step `num_steps`, counted from 1. Gradients are multiplied
        by `factor` first.

        shape: the parameter's shape; used by rules for whole matrices.
        """
        scalars = self.make_scalars(group, num_steps)
        return scalars._replace(grad_scale=factor, moments=self.moments)


# ---- torch's face --------------------------------------------------------------------------------

Params = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[dict[str, Any]]
"""Parameters, named parameters, or groups, as torch's optimizers accept them."""


def arguments_in(names: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a subclass's constructor, from its `locals()`. Each of them is the default
    of a group's value of the same name, except `params`, `precision` and `policy`."""
    return {
        name: tuple(value) if name in ("betas", "ns_coefficients") else value
        for name, value in names.items()
        if name not in ("self", "__class__")
    }


class OptimizerFace(torch.optim.Optimizer):
    """What an optimizer adds to the one that steps all of them (optim/base.py): torch's arguments,
    checks of a group, the rule of each parameter."""

    _not_negative: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")
    """Values of a group that are 0 or more."""

    _rule: ClassVar[Rule]
    """The rule of all parameters; a face of several rules has its own `rule_of`."""

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        """The rule of a parameter in a group."""
        return self._rule

    def check_group(self, group: Group) -> None:
        """Raises ValueError for values that a group must not have: decay rates outside [0, 1), and
        negative numbers."""
        for number, beta in enumerate(group.get("betas", ())):
            check_range(f"betas[{number}]", beta, 0.0, 1.0, is_open=True)
        for name in self._not_negative:
            check_range(name, float(group[name]), 0.0, math.inf)


IMPLEMENTATION: Mapping[str, tuple[Any, str]] = {
    "foreach": (
        None,
        "there is one implementation here, a native pass over every parameter; leave it out",
    ),
    "fused": (None, "there is one implementation here, and it is fused; leave it out"),
    "capturable": (
        False,
        "steps run on the CPU, where there is no CUDA graph to capture them; leave it out",
    ),
    "differentiable": (
        False,
        "a native step leaves no graph behind; use torch's own optimizer to differentiate "
        "through it",
    ),
}
"""torch's implementation options: the value that requests nothing, and the reason in the error for
other values."""


def check_range(name: str, value: float, low: float, high: float, is_open: bool = False) -> None:
    """Raises ValueError unless low <= value <= high (< high when open); NaN is never in range."""
    if not low <= value <= high or (is_open and value == high):
        raise ValueError(
            f"{name} is {value}; allowed are {low} to {high}" + (" (excluded)" if is_open else "")
        )


def check_implementation(group: Group) -> None:
    """Raises ValueError when a group requests one of torch's implementations."""
    for name, (nothing, why) in IMPLEMENTATION.items():
        if group.get(name, nothing) not in (nothing, False):
            raise ValueError(
                f"{name}={group[name]} asks for something that does not exist here: {why}"
            )
