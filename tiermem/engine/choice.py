"""OptimizerChoice: the optimizer that an engine builds after sharding; and the comparison of what
all ranks were given."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem import optim
from tiermem.config import MuonParams, OptimizerConfig, TiermemConfig
from tiermem.config.optimizer import BatchSizes
from tiermem.optim import Muon, NativeOptimizer
from tiermem.optimizers import PARAMS
from tiermem.plans.agreement import agree
from tiermem.precision import Precision
from tiermem.ranks.topology import find_topology
from tiermem.version import __version__

logger = logging.getLogger("tiermem")

# ---- the choice of an optimizer ------------------------------------------------------------------

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
OptimizerFactory = Callable[[Parameters], torch.optim.Optimizer]

KINDS: Mapping[str, type[NativeOptimizer]] = {name: getattr(optim, name) for name in PARAMS}

# half of the last of bf16's 8 significant bits, relative to the number, where that is smallest
_HALF_A_BIT = 2.0**-8
# in a parameter's name: Muon leaves these to AdamW, as in the reference
_NO_MATRIX = ("embed", "lm_head")


class OptimizerChoice(NamedTuple):
    """An optimizer that is chosen before its parameters are sharded and built afterwards.

        the user's optimizer    tiermem's or torch's: its groups, settings, states and hooks are kept, tiermem computes the
                                step. The groups are those of both from then on: a schedule of the
                                user's optimizer sets tiermem's rates
        the user's function     is called with the parameters; the optimizer that it returns is treated in the same way
        the config's section    type and params
        none of them            the engine is for inference

    The plan needs the number of moments per element before it shards. The optimizer makes its
    states after sharding, in the memory and the files that the plan left for them.
    """

    name: str  # a key of KINDS
    groups: Sequence[dict[str, Any]]
    defaults: Mapping[str, Any]  # settings that a group does not set itself
    given: torch.optim.Optimizer | None = None  # the user's
    states: Mapping[nn.Parameter, Mapping[str, Any]] = {}  # of it

    @property
    def num_moments(self) -> int:
        """Moments kept for each element, in the group that keeps most."""
        params = PARAMS[self.name]
        return max(params.most_moments({**self.defaults, **group}) for group in self.groups)

    def facts(self, model: nn.Module) -> dict[str, Any]:
        """The facts that must be equal on all ranks: the optimizer, the settings of its groups, the
        group of each parameter."""
        names = {id(param): name for name, param in model.named_parameters()}
        facts: dict[str, Any] = {
            "optimizer": self.name,
            "parameters that it stepped": len(self.states),
        }
        for number, group in enumerate(self.groups):
            settings = {**self.defaults, **group}
            facts |= {
                f"{key} of parameter group {number}": value
                for key, value in settings.items()
                if key != "params"
            }
            members = group["params"] if isinstance(group["params"], (list, tuple)) else ()
            facts |= {
                f"parameter group of {names.get(id(param), 'another')}": number for param in members
            }
        return facts

    def build(self) -> NativeOptimizer:
        """Builds the optimizer and the states of its sharded parameters. Collective; blocks.
        Raises ValueError for settings out of range."""
        given = self.given
        if given is None:
            return KINDS[self.name](self.groups, **self.defaults)
        for group, shown in zip(self.groups, given.param_groups, strict=True):
            shown.clear()
            shown.update(group)
        built = KINDS[self.name](given.param_groups, **self.defaults)
        for name, hooks in vars(given).items():
            if name.startswith("_optimizer_"):
                setattr(built, name, hooks)
        if self.states:
            built.restore(self.states, "the optimizer that was given")
            given.state.clear()  # else its memory would be held beside the plan's
        return built

    def warn_of_stalling(self, precision: Precision) -> None:
        """Warns when a bf16 second moment is rounded to nearest and a step's decay is too small to
        survive that rounding."""
        is_rounded = (precision.moments, precision.rounding) == ("bf16", "nearest")
        if not (PARAMS[self.name].averages_squares and is_rounded):
            return
        groups = ({"betas": (0.9, 0.999), **self.defaults, **group} for group in self.groups)
        change = min(1.0 - group["betas"][1] for group in groups)
        if change >= _HALF_A_BIT:
            return
        warnings.warn(
            "moments in bf16 are rounded to nearest, as bf16.bf16_optimizer_states and preset "
            f"'bf16' ask: with beta2 = {1.0 - change:.6g} a step lets exp_avg_sq decay by at most "
            f"1 - beta2 = {change:.2g} of itself ({change:.1%}), but bf16 has 8 significant bits, "
            "so a change below half of the last one, 0.2 to 0.4 % of the number, is rounded away: "
            "it never falls, and grows only where a squared gradient is several times as large. "
            'Set tiermem.precision.rounding to "stochastic", or tiermem.precision to "compact", or '
            "lower beta2",
            stacklevel=4,  # the caller of initialize
        )


def choose_optimizer(
    config: TiermemConfig,
    model: nn.Module,
    given: torch.optim.Optimizer | OptimizerFactory | None,
    parameters: Parameters | None,
) -> OptimizerChoice | None:
    """Returns the optimizer that the user or the config asks for, or None when neither does.

    Raises ValueError for an optimizer that cannot step states resting on tiers, and when it would
    have no parameters.
    """
    params: Any = (
        list(parameters)
        if parameters is not None
        else [p for p in model.parameters() if p.requires_grad]
    )
    if callable(given) and not isinstance(given, torch.optim.Optimizer):
        given = given(params)
    if given is not None:
        return take_over(given)
    if config.optimizer is None:
        return None
    if not params:
        raise ValueError(
            "the optimizer has no parameters: model_parameters is empty, or no parameter requires "
            "gradients"
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


def _halves(
    model: nn.Module, group: dict[str, Any], rates: Mapping[bool, float | None]
) -> list[dict[str, Any]]:
    """Splits a group into the parameters that Muon steps and those that AdamW steps.

    The group's `use_muon` decides, else the parameter's attribute `use_muon`, else its shape and
    name.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    members: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    given = group["params"]
    listed: Iterable[Any] = [given] if isinstance(given, torch.Tensor) else given
    for each in listed:
        param = each[1] if isinstance(each, tuple) else each  # with its name
        name = names.get(id(param), "").lower()
        is_hidden = param.ndim == 2 and not any(word in name for word in _NO_MATRIX)
        members[bool(group.get("use_muon", getattr(param, "use_muon", is_hidden)))].append(param)
    return [
        {
            **({} if rates[is_muon] is None else {"lr": rates[is_muon]}),
            **group,
            "params": half,
            "use_muon": is_muon,
        }
        for is_muon, half in members.items()
        if half
    ]


def take_over(given: torch.optim.Optimizer) -> OptimizerChoice:
    """Returns tiermem's optimizer of the same kind, with the groups, states and hooks of the user's
    optimizer. Raises ValueError for others, and for a subclass with a step of its own."""
    for name, kind in KINDS.items():
        theirs = getattr(torch.optim, name, kind)
        if isinstance(given, (kind, theirs)):
            if inspect.unwrap(type(given).step) not in map(
                inspect.unwrap, (kind.step, theirs.step)
            ):
                raise ValueError(
                    f"{type(given).__name__} has a step of its own, which would not run: tiermem's "
                    f"{name} steps in its place. Give {name} itself; its register_step_pre_hook "
                    "and register_step_post_hook run code before and after each step"
                )
            groups = [_group_for(kind, group, given.defaults) for group in given.param_groups]
            # schedules of transformers read the rate that they end at from the defaults
            defaults = _group_for(kind, given.defaults, given.defaults)
            return OptimizerChoice(name, groups, defaults, given, _states_of(given))
    names = [name for name in KINDS if hasattr(torch.optim, name)]
    raise ValueError(
        f"{type(given).__name__} cannot step states that rest on tiers; allowed are "
        f"{', '.join(KINDS)} of tiermem, and {', '.join(names)} of torch.optim. Give the nearest "
        "of these; another rule can step what is outside the engine alone"
    )


def _states_of(given: torch.optim.Optimizer) -> dict[nn.Parameter, Mapping[str, Any]]:
    """The states of the parameters that an optimizer has stepped, as in its state dict."""
    if not any(given.state.values()):
        return {}
    if isinstance(given, NativeOptimizer) and given.lost_states:
        logger.warning(
            "the optimizer's states were freed when its model was closed: they begin anew"
        )
        return {}
    saved = given.state_dict()["state"]
    params = (param for group in given.param_groups for param in group["params"])
    return {
        param: saved[number]
        for number, param in enumerate(params)
        # torch's Adagrad makes states before a step
        if number in saved and saved[number].get("step", 1)
    }


def _group_for(
    kind: type[NativeOptimizer], group: dict[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Keeps those of the optimizer's settings that tiermem's takes, without those about speed
    (foreach, fused), and what a schedule or the user has put into the group beside them."""
    known = set(inspect.signature(kind.__init__).parameters) - {
        "foreach",
        "fused",
        "precision",
        "policy",
        "params",
    }
    kept = {
        key: value
        for key, value in group.items()
        if key in known or (key not in settings and key != "param_names")
    }
    if kind is Muon and not kept.get("use_muon", True):
        kept["eps"] = kept["adam_eps"]  # AdamW steps this group, and its eps is called adam_eps
    return kept


# ---- agreement of ranks --------------------------------------------------------------------------


def agree_on_engine(
    config: TiermemConfig,
    sizes: BatchSizes,
    choice: OptimizerChoice | None,
    model: nn.Module,
    device: torch.device,
) -> None:
    """Compares versions, config, batch sizes, optimizer and groups on all ranks, before sharding.
    Collective; blocks.

    Raises ValueError on every rank and names the differences.
    """
    policy = config.policy()
    facts = {"tiermem": __version__, "torch": torch.__version__, **config.shared_by_ranks()}
    facts |= {"train_batch_size": sizes.total, "train_micro_batch_size_per_gpu": sizes.micro}
    facts["gradient_accumulation_steps"] = sizes.accumulation
    facts |= choice.facts(model) if choice is not None else {"optimizer": "none"}
    agree(find_topology(policy.stage, None, policy.timeout_s, device), facts, "tiermem.initialize")
