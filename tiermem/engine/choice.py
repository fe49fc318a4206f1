"""OptimizerChoice: which optimizer an engine will build, and what all ranks must have given alike."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem import __version__
from tiermem.config import MuonParams, OptimizerConfig, TiermemConfig
from tiermem.config.optimizer import BatchSizes
from tiermem.optim import SGD, Adagrad, Adam, AdamW, Lion, Muon, NativeOptimizer
from tiermem.precision import Precision
from tiermem.zero.agreement import agree
from tiermem.zero.topology import find_topology

# ---- OptimizerChoice: which optimizer an engine will build, known before its model is sharded ------------------------
#
#     the user's optimizer    ours or torch's: its groups and settings are kept, the step becomes ours
#     the user's function     called with the parameters; what it returns is treated so
#     the config's section    type and params
#     none of them            the engine is for inference
#
# Sharding comes between choosing and building: the plan has to know how many moments are kept for each element, and an
# optimizer makes its states where the plan left room for them.

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
OptimizerFactory = Callable[[Parameters], torch.optim.Optimizer]

KINDS: Mapping[str, type[NativeOptimizer]] = {
    "AdamW": AdamW,
    "Adam": Adam,
    "Adagrad": Adagrad,
    "Lion": Lion,
    "SGD": SGD,
    "Muon": Muon,
}
"""Optimizers by the name of the config; a subclass before its base."""

_HALF_A_BIT = 2.0**-8  # of bf16's eight significant bits, beside the largest number that has this one
_ABOUT_SPEED = ("foreach", "fused", "precision", "params")
_NO_MATRIX = ("embed", "lm_head")  # in a parameter's name: Muon leaves these to AdamW, as in the reference


class OptimizerChoice(NamedTuple):
    """An optimizer that can be built once its parameters are sharded."""

    name: str  # of KINDS
    groups: Sequence[dict[str, Any]]
    defaults: Mapping[str, Any]  # what a group does not say

    @property
    def num_moments(self) -> int:
        """Moments that are kept for each element, of the group that keeps most."""
        if self.name in ("Adam", "AdamW"):
            return 2 + int(any(self._values("amsgrad", False)))
        if self.name == "SGD":
            return int(any(self._values("momentum", 0.0)))
        return 2 if self.name == "Muon" else 1

    def facts(self, model: nn.Module) -> dict[str, Any]:
        """What ranks have to agree about: the optimizer, the settings of its groups, and who is in which."""
        names = {id(param): name for name, param in model.named_parameters()}
        facts: dict[str, Any] = {"optimizer": self.name}
        for number, group in enumerate(self.groups):
            settings = {**self.defaults, **{key: value for key, value in group.items() if key != "params"}}
            facts |= {f"{key} of parameter group {number}": value for key, value in settings.items()}
            members = group["params"] if isinstance(group["params"], (list, tuple)) else ()
            facts |= {f"parameter group of {names.get(id(param), 'another')}": number for param in members}
        return facts

    def build(self) -> NativeOptimizer:
        """Builds it; its sharded parameters' states are made. Raises ValueError for settings out of range."""
        return KINDS[self.name](self.groups, **self.defaults)

    def warn_of_stalling(self, precision: Precision) -> None:
        """Warns when a second moment in bf16 is rounded to nearest and decays by less than that rounds away."""
        if self.name not in ("Adam", "AdamW", "Muon") or (precision.moments, precision.rounding) != ("bf16", "nearest"):
            return
        change = min(1.0 - betas[1] for betas in self._values("betas", (0.9, 0.999)))
        if change >= _HALF_A_BIT:
            return
        warnings.warn(
            f"moments in bf16 are rounded to nearest, as bf16.bf16_optimizer_states and preset 'bf16' ask: with beta2 = "
            f"{1.0 - change:.6g} a step lets exp_avg_sq decay by at most 1 - beta2 = {change:.2g} of itself "
            f"({change:.1%}), but bf16 has 8 significant bits, so a change below half of the last one, 0.2 to 0.4 % of "
            "the number, is rounded away: it never falls, and grows only where a squared gradient is several times as large. "
            'Set tiermem.precision.rounding to "stochastic", or tiermem.precision to "compact", or lower beta2',
            stacklevel=4,  # whoever called initialize
        )

    def _values(self, key: str, default: Any) -> list[Any]:
        return [group.get(key, self.defaults.get(key, default)) for group in self.groups]


def choose_optimizer(
    config: TiermemConfig,
    model: nn.Module,
    given: torch.optim.Optimizer | OptimizerFactory | None,
    parameters: Parameters | None,
) -> OptimizerChoice | None:
    """What was asked for; None when nothing was. Raises ValueError for what cannot step states that rest on tiers."""
    params: Any = list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    if callable(given) and not isinstance(given, torch.optim.Optimizer):
        given = given(params)
    if given is not None:
        return _taken_over(given)
    if config.optimizer is None:
        return None
    if not params:
        raise ValueError(
            "the optimizer has no parameters: model_parameters is empty, or no parameter requires gradients"
        )
    return _configured(config.optimizer, model, params)


def _configured(section: OptimizerConfig, model: nn.Module, params: list[Any]) -> OptimizerChoice:
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    settings = section.params.settings()
    if isinstance(section.params, MuonParams):
        rates = {True: settings.pop("muon_lr"), False: settings.pop("adam_lr")}
        groups = [half for group in groups for half in _halves(model, group, rates)]
        settings["adam_eps"] = settings.pop("eps")
    return OptimizerChoice(section.name, groups, settings)


def _halves(model: nn.Module, group: dict[str, Any], rates: Mapping[bool, float | None]) -> list[dict[str, Any]]:
    """A group as what Muon steps and what AdamW does; `use_muon` on a parameter, or in the group, decides."""
    names = {id(param): name for name, param in model.named_parameters()}
    members: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for param in group["params"]:
        name = names.get(id(param), "").lower()
        is_hidden = param.ndim == 2 and not any(word in name for word in _NO_MATRIX)
        members[bool(group.get("use_muon", getattr(param, "use_muon", is_hidden)))].append(param)
    return [
        {**({} if rates[is_muon] is None else {"lr": rates[is_muon]}), **group, "params": half, "use_muon": is_muon}
        for is_muon, half in members.items()
        if half
    ]


def _taken_over(given: torch.optim.Optimizer) -> OptimizerChoice:
    """Ours with the groups of an optimizer that the user built."""
    for name, kind in KINDS.items():
        theirs = getattr(torch.optim, name, kind)
        if isinstance(given, (kind, theirs)):
            return OptimizerChoice(name, [_group_for(kind, group) for group in given.param_groups], {})
    names = [name for name in KINDS if hasattr(torch.optim, name)]
    raise ValueError(
        f"{type(given).__name__} cannot step states that rest on tiers; allowed are {', '.join(KINDS)} of tiermem, and "
        f"{', '.join(names)} of torch.optim. Give the nearest of these; another rule can step what is outside the engine alone"
    )


def _group_for(kind: type[NativeOptimizer], group: dict[str, Any]) -> dict[str, Any]:
    """The values of a group that ours has too; how it is computed is ours."""
    known = set(inspect.signature(kind.__init__).parameters) - set(_ABOUT_SPEED)
    kept = {key: value for key, value in group.items() if key in known or key in ("params", "initial_lr")}
    if kind is Muon and not kept.get("use_muon", True):
        kept["eps"] = kept["adam_eps"]  # what eps means in such a group
    return kept


# ---- Agreed: what all ranks must have given an engine alike, compared before anything is sharded ---------------------
# (zero/ranks/agreement)


def agree_on_engine(
    config: TiermemConfig, sizes: BatchSizes, choice: OptimizerChoice | None, model: nn.Module, device: torch.device
) -> None:
    """Compares versions, the config, sizes of batches, the optimizer and its groups. Collective; blocks.

    Raises ValueError on every rank, naming what differs.
    """
    policy = config.policy()
    facts = {"tiermem": __version__, "torch": torch.__version__, **config.shared_by_ranks()}
    facts |= {"train_batch_size": sizes.total, "train_micro_batch_size_per_gpu": sizes.micro}
    facts["gradient_accumulation_steps"] = sizes.accumulation
    facts |= choice.facts(model) if choice is not None else {"optimizer": "none"}
    agree(find_topology(policy.stage, None, policy.timeout_s, device), facts, "tiermem.initialize")
