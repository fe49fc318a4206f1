"""Parameter groups, on their way in and out: whose optimizer they are, and which of their settings mean something there.

in     the class is known by its states and settings; a group keeps what any optimizer here may hold
out    a group gets every setting that torch's optimizer of that class has, since dcp.load asks for each of them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tiermem.checkpoint.format.plain import Json, decode, encode
from tiermem.checkpoint.interchange.foreign import Foreign
from tiermem.checkpoint.opening.source import Source
from tiermem.optim.arguments import IMPLEMENTATION
from tiermem.optim.layout import EXP_AVG, EXP_AVG_SQ

_SETTINGS = frozenset(
    (
        "lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay", "momentum",
        "dampening", "nesterov", "lr_decay", "initial_accumulator_value", "ns_steps", "ns_coefficients", "adjust_lr_fn",
    )
)  # fmt: skip
"""What groups of torch's optimizers that have a counterpart here hold, beside how they compute."""


def class_of(foreign: Foreign) -> str:
    """The name of the optimizer that these states and settings are of; AdamW where nothing says more."""
    states = {name for p in foreign.parameters for name in p.states}
    keys = {key for group in foreign.groups for key in group}
    if EXP_AVG_SQ in states:
        return "AdamW"
    if EXP_AVG in states:
        return "Lion"
    if "sum" in states or "lr_decay" in keys:
        return "Adagrad"
    if "ns_steps" in keys:
        return "Muon"
    if "momentum_buffer" in states or "momentum" in keys:
        return "SGD"
    return "AdamW"


def optimizer_of(foreign: Foreign, lost: list[str]) -> Json:
    """The field `optimizer` of a manifest; None without groups. What cannot be kept is added to `lost`."""
    if not foreign.groups:
        return None
    names: list[list[str]] = [[] for _ in foreign.groups]
    for p in foreign.parameters:
        if p.group is not None:
            names[p.group].append(p.name)
    groups = []
    for number, (group, params) in enumerate(zip(foreign.groups, names, strict=True)):
        unknown = sorted(str(key) for key in group if key not in _SETTINGS and not _says_nothing(key, group))
        lost += [f"{key} of group {number}" for key in unknown]
        values = {
            key: encode(_plain(value), f"group {number}: {key}") for key, value in group.items() if key in _SETTINGS
        }
        said = [name for name in group.get("params", ()) if name in params]
        groups.append({"values": values, "params": said if len(said) == len(params) else params})
    return {"name": class_of(foreign), "groups": groups}


def torch_groups(source: Source) -> list[dict[str, Any]]:
    """The groups of a saved step as a torch optimizer's state dict has them, `params` by name."""
    saved = source.manifest.optimizer
    if not isinstance(saved, dict):
        return []
    defaults = _defaults(str(saved.get("name")))
    known = {each.name for each in source.manifest.parameters if each.role == "parameter"}
    found = []
    for number, each in enumerate(saved.get("groups", ())):
        values = decode(each["values"], f"{source.file}: optimizer: group {number}")
        params = [name for name in each["params"] if name in known]
        found.append({**defaults, **values, "params": params, "param_names": params})
    return found


def _defaults(name: str) -> Mapping[str, Any]:
    """Every setting that torch's optimizer of a name has; of one that torch has not, none."""
    made = {
        "AdamW": torch.optim.AdamW,
        "Adam": torch.optim.Adam,
        "Adagrad": torch.optim.Adagrad,
        "SGD": torch.optim.SGD,
    }
    if name not in made:
        return {}
    group = made[name]([torch.zeros(1)], lr=1e-3).param_groups[0]
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _says_nothing(key: Any, group: Mapping[str, Any]) -> bool:
    """Whether a setting only says how, or that there is nothing special."""
    return key in IMPLEMENTATION or key in ("step", "bias_correction", "params", "param_names") or not group[key]


def _plain(value: Any) -> Any:
    """A setting as a number where it is a tensor of one, as torch keeps a learning rate that it compiles."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
