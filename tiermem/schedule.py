"""Learning-rate schedules with the documented names: WarmupLR, WarmupDecayLR, WarmupCosineLR,
OneCycle, LRRangeTest.

    warm-up, then constant                       WarmupLR
    warm-up, then a linear decay                 WarmupDecayLR
    warm-up, then half a cosine                  WarmupCosineLR
    rise, fall, then decay                       OneCycle
    rise without end                             LRRangeTest

Each is an ordinary torch LRScheduler: construct it on an optimizer and call `step()` after each
optimizer step. The first optimizer step uses the rate that the constructor sets. Warm-up counts as
DeepSpeed's schedules do: the first two optimizer steps both run at the start of the warm-up.
Optimizer step k, counted from 0, has warm-up iteration max(k - 1, 0). OneCycle and LRRangeTest
count from the first step.

`build_scheduler` makes a schedule from a config section, also any schedule of
torch.optim.lr_scheduler by its name.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

_log = logging.getLogger("tiermem")

WARMUP_TYPES = ("log", "linear")


class _Documented(LRScheduler):
    """A schedule that also continues from DeepSpeed's state of its name: {"last_batch_iteration":
    steps - 1}.

    `last_batch_iteration` is the documented name of torch's `last_epoch`. The rates that it counts
    from are the groups' own, unless another schedule has noted those.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        for group in optimizer.param_groups if last_batch_iteration != -1 else ():
            group.setdefault("initial_lr", group["lr"])  # as torch asks
        super().__init__(optimizer, last_batch_iteration)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state. The rates of the groups stay as they are until the next `step`,
        as in torch."""
        if set(state_dict) == {"last_batch_iteration"}:
            self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
            self._last_lr = [float(rate) for rate in self.get_lr()]
        else:
            super().load_state_dict(state_dict)


class WarmupLR(_Documented):
    """Raises each group's rate from warmup_min_lr to warmup_max_lr over warmup_num_steps steps,
    then holds it.

    `warmup_type` "log" rises with log(iteration + 1) / log(warmup_num_steps), "linear" with
    iteration / warmup_num_steps. Rates may be lists, one value per parameter group. Without
    warmup_max_lr each group rises to its own rate in the optimizer. Raises ValueError for bad
    arguments.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self.min_lrs = _per_group("warmup_min_lr", warmup_min_lr, optimizer)
        if warmup_max_lr is None:  # each group's rate before the first schedule changed it
            warmup_max_lr = [float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups]
        self.max_lrs = _per_group("warmup_max_lr", warmup_max_lr, optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        factor = self._factor(max(self.last_epoch - 1, 0))
        return [
            low + (high - low) * factor
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _factor(self, iteration: int) -> float:
        """Returns the fraction of the way from the lowest to the highest rate, 0 to 1."""
        return _warmup(iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """Warms up like WarmupLR, then decays linearly to warmup_min_lr at iteration total_num_steps,
    and stays there.

    warmup_max_lr null means each group's own rate in the optimizer; left out it is 0.001, as in
    DeepSpeed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _whole("total_num_steps", total_num_steps)
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _factor(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return super()._factor(iteration)
        decaying = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - iteration) / decaying)


class WarmupCosineLR(_Documented):
    """Raises each group's rate from warmup_min_ratio times its initial rate to that rate, then
    lowers it by half a cosine.

    The rate reaches cos_min_ratio times the initial rate at iteration total_num_steps - 1 and stays
    there.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _whole("total_num_steps", total_num_steps)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        ratio = self._ratio(max(self.last_epoch - 1, 0))
        return [base * ratio for base in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            part = _warmup(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * part
        decaying = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (iteration - self.warmup_num_steps + 1) / decaying)
        return (
            self.cos_min_ratio
            + (1.0 - self.cos_min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0
        )


class OneCycle(_Documented):
    """Raises the rate from cycle_min_lr to cycle_max_lr, lowers it again, then decays it below;
    momentum moves inversely.

    The rise takes cycle_first_step_size steps and the fall cycle_second_step_size steps (None: the
    same number; 0: the rate drops at once). Rates and momenta may be lists, one value per parameter
    group. A stair count above 0 makes that many equal stairs. After the cycle the rate is
    cycle_min_lr / (1 + decay_lr_rate * steps / decay_step_size), with the steps since the end of
    the cycle; with decay_step_size 0 it does not decay. With cycle_momentum the first beta falls
    from cycle_max_mom to cycle_min_mom and rises again; after the cycle it is multiplied by 1 +
    decay_mom_rate * steps / decay_step_size. The other betas do not change. For an optimizer
    without betas the momentum does not cycle, and a warning says so.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.rising = _whole("cycle_first_step_size", cycle_first_step_size)
        self.falling = _whole("cycle_second_step_size", second, 0)
        falling_stairs = (
            cycle_first_stair_count
            if cycle_second_stair_count is None
            else cycle_second_stair_count
        )
        self.rising_stairs = _whole("cycle_first_stair_count", cycle_first_stair_count, 0)
        self.falling_stairs = _whole("cycle_second_stair_count", falling_stairs, 0)
        self.decay_step_size = _number("decay_step_size", decay_step_size)
        self.decay_lr_rate = _number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = _number("decay_mom_rate", decay_mom_rate)
        self.min_lrs = _per_group("cycle_min_lr", cycle_min_lr, optimizer)
        self.max_lrs = _per_group("cycle_max_lr", cycle_max_lr, optimizer)
        self.cycle_momentum = (
            _flag("cycle_momentum", cycle_momentum) and "betas" in optimizer.defaults
        )
        if cycle_momentum and not self.cycle_momentum:
            _log.warning(
                "OneCycle: %s has no betas, so momentum is not cycled", type(optimizer).__name__
            )
        self.min_momenta = _per_group("cycle_min_mom", cycle_min_mom, optimizer)
        self.max_momenta = _per_group("cycle_max_mom", cycle_max_mom, optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        if self._is_past_cycle:
            divisor = 1.0 + self.decay_lr_rate * self._decay_intervals
            return [low / divisor for low in self.min_lrs]
        height = self._height()
        return [
            low + (high - low) * height
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """The betas of each group in the current step; None when the momentum does not cycle."""
        if not self.cycle_momentum:
            return None
        growth = 1.0 + self.decay_mom_rate * self._decay_intervals
        height = 0.0 if self._is_past_cycle else self._height()
        return [
            ((high - (high - low) * height) * growth, *group["betas"][1:])
            for low, high, group in zip(
                self.min_momenta, self.max_momenta, self.optimizer.param_groups, strict=True
            )
        ]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    @property
    def _is_past_cycle(self) -> bool:
        return self.last_epoch > self.rising + self.falling

    @property
    def _decay_intervals(self) -> float:
        steps = max(0, self.last_epoch - self.rising - self.falling)
        return steps / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self) -> float:
        """Returns the fraction of the way from the lowest to the highest rate, 0 to 1."""
        if self.last_epoch <= self.rising:
            return _stairs(self.last_epoch, self.rising, self.rising_stairs)
        return _stairs(
            self.rising + self.falling - self.last_epoch, self.falling, self.falling_stairs
        )


class LRRangeTest(_Documented):
    """Raises the rate without end, to find the highest rate that still trains.

    The rate is lr_range_test_min_lr * (1 + lr_range_test_step_rate * steps /
    lr_range_test_step_size). With lr_range_test_staircase the quotient steps /
    lr_range_test_step_size is rounded down.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 0.001,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        self.step_size = _whole("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.is_staircase = _flag("lr_range_test_staircase", lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        intervals = (
            self.last_epoch // self.step_size
            if self.is_staircase
            else self.last_epoch / self.step_size
        )
        return [low * (1.0 + self.step_rate * intervals) for low in self.min_lrs]


_CLASSES = (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
DOCUMENTED: Mapping[str, type[LRScheduler]] = {each.__name__: each for each in _CLASSES}
"""The five documented schedules by name."""


def build_scheduler(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Builds the schedule of a name, as a config section has it and its arguments; raises
    ValueError for arguments it cannot take."""
    cls = schedule_class(name)
    missing = [
        each
        for each, argument in arguments_of(cls).items()
        if argument.default is argument.empty and each not in params
    ]
    if missing:
        raise ValueError(f"scheduler {name} needs {', '.join(missing)}: set it in scheduler.params")
    try:
        return cls(optimizer, **params)
    except TypeError as error:
        raise ValueError(f"scheduler {name} cannot be built from {params}: {error}") from error


def schedule_class(name: str) -> type[LRScheduler]:
    """Finds a schedule by its name; raises ValueError with the nearest name."""
    found = DOCUMENTED.get(name) or getattr(lr_scheduler, name, None)
    if isinstance(found, type) and issubclass(found, LRScheduler) and not name.startswith("_"):
        if found is lr_scheduler.ReduceLROnPlateau:
            raise ValueError(
                "'ReduceLROnPlateau' needs a metric at each step; build it and step it yourself"
            )
        return found
    torch_names = [n for n in dir(lr_scheduler) if n.endswith("LR") and not n.startswith("_")]
    near = difflib.get_close_matches(name, [*DOCUMENTED, *torch_names], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"{name!r} given; allowed are {', '.join(DOCUMENTED)} and the classes of "
        f"torch.optim.lr_scheduler{hint}"
    )


def check_params(name: str, params: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the arguments that the schedule does not have, or what is wrong with the values, each
    with a sentence.

    A documented schedule is tried on an optimizer of as many groups as its longest list has values.
    """
    cls = schedule_class(name)
    known = arguments_of(cls)
    problems = []
    for given in params:
        if given not in known:
            near = difflib.get_close_matches(given, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(known)}"
            problems.append((given, f"unknown argument of {name}; {hint}"))
    needed = [each for each, argument in known.items() if argument.default is argument.empty]
    if problems or cls not in DOCUMENTED.values() or not params.keys() >= set(needed):
        return problems
    num_groups = max(
        (len(each) for each in params.values() if isinstance(each, (list, tuple))), default=1
    )
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(num_groups)]
    try:
        cls(torch.optim.AdamW(groups), **params)
    except (TypeError, ValueError) as error:
        problems.append(("", str(error)))
    return problems


def arguments_of(cls: type[LRScheduler]) -> dict[str, inspect.Parameter]:
    """Returns the arguments that `scheduler.params` may hold for a schedule, by name: all but the
    optimizer."""
    arguments = dict(inspect.signature(cls).parameters)
    arguments.pop("optimizer", None)
    return arguments


def _warmup(iteration: int, num_steps: int, kind: str) -> float:
    if iteration >= num_steps:
        return 1.0
    return (
        iteration / num_steps if kind == "linear" else math.log(iteration + 1) / math.log(num_steps)
    )


def _stairs(position: int, size: int, count: int) -> float:
    return (position * count // size) / count if count > 0 else position / size


def _warmup_steps(value: int) -> int:
    return max(2, _whole("warmup_num_steps", value, 0))  # fewer have no logarithm to rise by


def _warmup_type(value: str) -> str:
    if value not in WARMUP_TYPES:
        raise ValueError(f"warmup_type is {value!r}; allowed are {' and '.join(WARMUP_TYPES)}")
    return value


def _whole(name: str, value: float, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least or value % 1:
        allowed = "a positive whole number" if least else "a whole number, 0 or more"
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")
    return int(value)


def _flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")
    return value


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")
    return value


def _per_group(name: str, value: float | Sequence[float], optimizer: Optimizer) -> list[float]:
    num_groups = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [float(_number(name, value))] * num_groups  # type: ignore[arg-type]  # no sequence
    if len(value) != num_groups:
        raise ValueError(
            f"{name} has {len(value)} values, but the optimizer has {num_groups} parameter groups"
        )
    return [float(_number(name, each)) for each in value]
