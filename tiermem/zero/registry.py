"""The registry: which parameters are partitioned, and by whom.

One weak map from Parameter to its keeper, so that optimizers, loaders and state access find a parameter's shard without
anything being hung on the user's tensors. An entry dies with its parameter.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_keepers: WeakIdKeyDictionary = WeakIdKeyDictionary()


def enrol(param: nn.Parameter, keeper: Any) -> None:
    """Says that `keeper` (held weakly) looks after a parameter from now on."""
    _keepers[param] = weakref.ref(keeper)


def dismiss(param: nn.Parameter) -> None:
    """Says that a parameter is an ordinary one again."""
    _keepers.pop(param, None)


def keeper_of(param: nn.Parameter) -> Any | None:
    """Who looks after a parameter, or None for an ordinary one."""
    found = _keepers.get(param)
    return None if found is None else found()
