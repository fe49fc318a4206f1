"""Outside graphs: what torch.compile must call rather than look into.

Hooks touch files, queues and other ranks, which no graph can hold. Without the mark torch.compile tries every line of ours and
says what it met there. With it, `torch.compile(block)` and `block.compile()`, before or after sharding, make one graph of a
block's forward, which blocks of one class share, between its hooks. Limits:

    fullgraph=True     is refused by torch where hooks are inside: compile `block.forward`, as engine.compile() does
    the whole model    breaks into a graph between every two hooks: compile blocks, which is quicker and as good
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function as one that torch.compile calls as it is, with all that it calls.

    The compiler is 80 MiB of modules and is not imported for this: while it is not there, nothing can be compiled.
    """
    marked: list[Callable[_P, _R]] = []

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not marked:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            marked.append(torch.compiler.disable(function))
        return marked[0](*args, **kwargs)

    # A code of its own: torch.compile makes eight versions of one and then warns.
    call.__code__ = call.__code__.replace()
    return functools.wraps(function)(call)
