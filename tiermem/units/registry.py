"""The registry: a weak map from each partitioned Parameter to its owner, the object that keeps its
values.

With it optimizers, loaders and state access find a parameter's shard, and no attribute is set on
the user's tensors. An entry ends with its parameter.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

EXTERNAL = "_external_params"
"""The attribute of a module that lists the parameters of other modules that it needs. Copied and
pickled with the module."""

# by id(parameter); a step asks for each
_owners: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[Any]]] = {}
_gathered: WeakIdKeyDictionary = WeakIdKeyDictionary()
_num_open = 0


def register(param: nn.Parameter, owner: Any) -> None:
    """Registers `owner` (held weakly) as the owner of a parameter."""
    key = id(param)
    _owners[key] = weakref.ref(param, lambda _: _owners.pop(key, None)), weakref.ref(owner)


def unregister(param: nn.Parameter) -> None:
    """Removes a parameter's entry: it is an ordinary parameter again."""
    _owners.pop(id(param), None)


def externals_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of other modules that were registered with a module."""
    found: list[nn.Parameter] = module.__dict__.get(EXTERNAL, [])
    return found


def set_gathered(param: nn.Parameter, is_gathered: bool) -> None:
    """Notes whether a GatheredParameters context holds a parameter's values."""
    if is_gathered:
        _gathered[param] = True
    else:
        _gathered.pop(param, None)


def is_gathered(param: nn.Parameter) -> bool:
    """Whether a GatheredParameters context holds a parameter's values."""
    return has_gathered() and param in _gathered


def has_gathered() -> bool:
    """Whether any GatheredParameters context holds values."""
    return len(_gathered) > 0


def open_init(change: int) -> None:
    """Counts the zero.Init contexts that are open: 1 opens one, -1 closes it."""
    global _num_open
    _num_open += change


def is_building() -> bool:
    """Whether a zero.Init is open."""
    return _num_open > 0


def owner_of(param: nn.Parameter) -> Any | None:
    """The owner of a parameter, or None for an ordinary parameter."""
    found = _owners.get(id(param))
    return None if found is None else found[1]()


class Uncopied:
    """What hangs on a sharded model's modules, so that copying or pickling the model comes here."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "a sharded model cannot be copied or pickled: its weights rest elsewhere. Use "
            "model.state_dict(), which gathers "
            "them, or close the shards with materialize=True first"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__deepcopy__(None)
