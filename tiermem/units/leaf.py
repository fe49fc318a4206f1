"""Leaf modules: modules whose parameters form one unit, whichever of their children run.

In some blocks the data decides which children run (experts behind a router). On several ranks such
a block cannot be fetched child by child: a rank that sends no token to an expert would not join the
expert's gather, and the others would wait for ever. So the block is one unit there. On one rank no
other rank waits, and fetching only the chosen experts reads fewer bytes: each expert is a unit.

    marked by hand     set_z3_leaf_modules and the functions below it      one unit, on any number of ranks
    by the config      leaf_module {classes, names, name_suffixes}, stage3_module_granularity_threshold       as by hand
    found              a router beside a list of similar experts   one unit on several ranks, a unit per expert on one

A mark is kept on its module and on copies of it, and takes effect when the model is sharded. In
most models a whole decoder layer is one unit, experts included; then marks change nothing. They
matter where a layer is larger than a unit's buffer, on one rank, and outside every ModuleList.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from tiermem.policy import LeafRules
from tiermem.units import registry

logger = logging.getLogger("tiermem")

# elements; larger modules are split, whatever their granularity
LARGEST_BY_GRANULARITY = 1_000_000_000
_MARK = "_z3_leaf"
_ROUTERS = ("gate", "router", "wg", "switch")


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks every module of some classes, given as classes or as their names (with or without the
    Python module).

    Call it before sharding. Returns the marked modules. Raises ValueError when there is none and
    `raise_if_not_found` is True, TypeError when a class is neither a class nor a name.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Removes the marks from every module of some classes; otherwise like `set_z3_leaf_modules`."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by the names that `named_modules` gives. Returns (marked modules, names not
    found).

    Raises ValueError for names not found when `raise_if_not_found` is True.
    """
    return _mark_names(model, module_names, operator.eq, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules whose names end with one of the suffixes; otherwise like
    `set_z3_leaf_modules_by_name`."""
    return _mark_names(model, module_name_suffixes, str.endswith, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Sets or removes the mark of one module. A container without a forward is fetched by the
    module around it."""
    model.__dict__[_MARK] = flag


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of a model, outermost first."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(model.__dict__.get(_MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a parameter of a sharded model is fetched with a leaf module; False before
    sharding."""
    owner = registry.owner_of(model)
    return owner is not None and owner.is_of_leaf(model)


def apply_rules(model: nn.Module, rules: LeafRules) -> None:
    """Marks the modules that a policy names; logs a warning for names that the model does not
    have."""
    found = set_z3_leaf_modules(model, rules.classes, raise_if_not_found=False)
    missing = [] if found else list(rules.classes)
    missing += set_z3_leaf_modules_by_name(model, rules.names, raise_if_not_found=False)[1]
    missing += set_z3_leaf_modules_by_suffix(model, rules.name_suffixes, raise_if_not_found=False)[
        1
    ]
    if missing:
        logger.warning("leaf_module names what this model does not have: %s", ", ".join(missing))
    if rules.granularity_numel:
        for module in _fine_modules(model, rules.granularity_numel):
            set_z3_leaf_module(module, True)


class UsedInPieces(nn.Module):
    """A module whose children run one after another, so that each child is a unit: TiledLinear."""


def is_routed(module: nn.Module) -> bool:
    """Whether the data decides which children run: the module has a router and a list of similar
    experts."""
    if not has_forward(module):
        return False
    for name, child in module.named_children():
        if not isinstance(child, (nn.ModuleList, nn.ModuleDict)) or len(child) < 2:
            continue
        experts = list(child.children())
        is_alike = all(type(each) is type(experts[0]) and has_forward(each) for each in experts)
        is_named = "expert" in name.lower() or "expert" in type(experts[0]).__name__.lower()
        if is_alike and (is_named or _has_router(module, len(experts))):
            return True
    return False


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: bare containers cannot."""
    return (
        isinstance(module, torch.jit.ScriptModule) or type(module).forward is not nn.Module.forward
    )


def _has_router(module: nn.Module, num_experts: int) -> bool:
    for name, child in module.named_children():
        weight = getattr(child, "weight", None)
        if (
            name in _ROUTERS
            and isinstance(weight, nn.Parameter)
            and weight.shape[:1] == (num_experts,)
        ):
            return True
    return False


def _mark_classes(
    model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    wrong = [each for each in classes if not isinstance(each, (type, str))]
    if wrong:
        raise TypeError(f"{wrong[0]!r} is neither a class nor the name of one")
    found = [module for module in model.modules() if any(_is_of(module, each) for each in classes)]
    if not found and raise_if_not_found:
        raise ValueError(
            f"this {type(model).__name__} has no module of "
            f"{', '.join(map(str, classes)) or 'no class'}"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    cls = type(module)
    return wanted in (cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}")


def _mark_names(
    model: nn.Module,
    given: Sequence[str],
    fits: Callable[[str, str], bool],
    raise_if_not_found: bool,
) -> tuple[list[nn.Module], list[str]]:
    if isinstance(given, str):
        given = [given]
    named = list(model.named_modules())
    missing = [each for each in given if not any(fits(name, each) for name, _ in named)]
    if missing and raise_if_not_found:
        raise ValueError(f"this {type(model).__name__} has no module {', '.join(missing)}")
    found = [module for name, module in named if any(fits(name, each) for each in given)]
    for module in found:
        set_z3_leaf_module(module, True)
    return found, missing


def _fine_modules(module: nn.Module, granularity_numel: int) -> Iterable[nn.Module]:
    """The outermost modules below a module with at most `granularity_numel` parameters per inner
    module, on average."""
    for child in module.children():
        numel = sum(p.numel() for p in child.parameters())
        layers = sum(
            1 for m in child.modules() if has_forward(m) and any(True for _ in m.parameters())
        )
        is_split = any(True for _ in child.children()) and has_forward(child)
        if is_split and numel <= LARGEST_BY_GRANULARITY and numel <= granularity_numel * layers:
            yield child
        else:
            yield from _fine_modules(child, granularity_numel)
