"""Compiled: the forwards of a sharded model's units run through torch.compile, one by one.

    hooks: fetch the unit | compiled forward of its module | hooks: let it go

Hooks touch files, queues and other ranks, which a compiler cannot trace; `nn.Module.compile` would take them along. So the
`forward` of each module that has units of its own, and none inside it that has, is replaced on that instance, and given back
when the engine is closed. Blocks of one class share one graph. What lies around the units runs as it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn


class CompiledForwards:
    """Modules whose forward is compiled, until `restore`.

    Args:
        modules: candidates; those that hold others of them are left as they are.
        backend: torch.compile's.
        options: further arguments of torch.compile.
    """

    def __init__(
        self, modules: Iterable[nn.Module], backend: str | Callable[..., Any], options: Mapping[str, Any]
    ) -> None:
        self.modules = _innermost(list(modules))
        self._own = {module: module.__dict__.get("forward") for module in self.modules}  # what an instance had already
        for module in self.modules:
            module.forward = torch.compile(module.forward, **{**options, "backend": backend})

    def restore(self) -> None:
        """Gives the modules their own forwards back; repeating it does nothing."""
        while self._own:
            module, own = self._own.popitem()
            if own is None:
                del module.forward
            else:
                module.forward = own


def _innermost(modules: list[nn.Module]) -> list[nn.Module]:
    candidates = set(modules)
    return [m for m in modules if not any(inner in candidates for inner in m.modules() if inner is not m)]
