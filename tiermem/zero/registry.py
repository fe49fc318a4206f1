"""The registry: which parameters are partitioned, and by whom.

One weak map from Parameter to its keeper, so that optimizers, loaders and state access find a parameter's shard without
anything being hung on the user's tensors. An entry dies with its parameter.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

EXTERNAL = "_external_params"
"""Where a module lists the parameters of other modules that it needs (access.py): copied and pickled with the module."""

_keepers: WeakIdKeyDictionary = WeakIdKeyDictionary()
_gathered: WeakIdKeyDictionary = WeakIdKeyDictionary()


def enrol(param: nn.Parameter, keeper: Any) -> None:
    """Says that `keeper` (held weakly) looks after a parameter from now on."""
    _keepers[param] = weakref.ref(keeper)


def dismiss(param: nn.Parameter) -> None:
    """Says that a parameter is an ordinary one again."""
    _keepers.pop(param, None)


def externals_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of other modules that a module was said to need."""
    found: list[nn.Parameter] = module.__dict__.get(EXTERNAL, [])
    return found


def set_gathered(param: nn.Parameter, is_gathered: bool) -> None:
    """Notes that a GatheredParameters context holds a parameter's values, or holds them no more."""
    if is_gathered:
        _gathered[param] = True
    else:
        _gathered.pop(param, None)


def is_gathered(param: nn.Parameter) -> bool:
    """Whether a context around the caller holds a parameter's values."""
    return param in _gathered


def keeper_of(param: nn.Parameter) -> Any | None:
    """Who looks after a parameter, or None for an ordinary one."""
    found = _keepers.get(param)
    return None if found is None else found()
