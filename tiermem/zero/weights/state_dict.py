"""State dicts: `model.state_dict()` shows whole weights, and `load_state_dict` puts them where the parameters rest.

    state_dict        each module's own parameters become gathered copies     (torch's post-hook)
    load_state_dict   values go home first; torch then copies nothing         (torch's pre-hook)

Both are collective, as gathering is. Every module has hooks of its own, so that a state dict of a part of the model works.
What is no partitioned parameter (buffers, extra state, the weights of a module that was copied) is left to torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiermem.zero import registry


class StateDicts:
    """Looks after the state dicts of one sharded model.

    weight: makes a copy of a parameter's whole value. replace: puts a whole value in a parameter's place.
    """

    def __init__(
        self,
        weight: Callable[[nn.Parameter], torch.Tensor],
        replace: Callable[[nn.Parameter, torch.Tensor], None],
    ) -> None:
        self._weight = weight
        self._replace = replace
        self._gathered: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._gathered_by: Callable[[], object] = lambda: None  # the state_dict under way, held weakly

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Hooks every module that has parameters; whoever calls takes the hooks off."""
        handles: list[RemovableHandle] = []
        for module in model.modules():
            if module._parameters:
                # torch marks the functions it is given, so each module gets one of its own
                fill, put = self._fill, self._take
                handles.append(module.register_state_dict_post_hook(lambda *args, fill=fill: fill(*args)))
                handles.append(module.register_load_state_dict_pre_hook(lambda *args, put=put: put(*args)))
        return handles

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replaces a module's own parameters in a state dict by gathered copies, in ordinary memory; tied ones by one."""
        if self._gathered_by() is not state:
            self._gathered_by = weakref.ref(state)
            self._gathered.clear()
        for name, param in module._parameters.items():
            if param is not None and prefix + name in state and registry.keeper_of(param) is not None:
                copy = self._gathered.get(id(param))
                if copy is None:
                    copy = self._gathered[id(param)] = self._weight(param)
                state[prefix + name] = copy

    def _take(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Before torch loads a module's own parameters: puts the values where the parameters rest."""
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            if param is None or registry.keeper_of(param) is None:
                continue
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                self._replace(param, value)
                state[prefix + name] = param  # torch copies it to itself, which does nothing
