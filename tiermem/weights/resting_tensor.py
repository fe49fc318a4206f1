"""RestingTensor: a tensor of the user's whose values rest elsewhere. It has a shape and a dtype; a
call works on a copy.

A call that writes stores its result. A view is one of a copy: writing it raises RuntimeError. So
does adding the values to another tensor in place, as the steps of torch's optimizers do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


class RestingTensor(torch.Tensor):
    """The base class. A subclass reads and replaces the values."""

    def read(self) -> torch.Tensor:
        """A copy of the values. Blocks. Raises RuntimeError where they cannot be read, OSError when
        a transfer fails."""
        raise NotImplementedError

    def replace(self, value: torch.Tensor) -> None:
        """Replaces the values. Blocks; raises OSError."""
        raise NotImplementedError

    @property
    def what(self) -> str:
        """The tensor, in an error."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA:  # torch would give the object itself other memory
            if args[1].shape != args[0].shape:
                raise RuntimeError(
                    f"{args[0].what} of shape {tuple(args[0].shape)} is given values of shape "
                    f"{tuple(args[1].shape)}"
                )
            return args[0].copy_(args[1])
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _OF_VALUES:
                try:
                    return func(*args, **kwargs)
                except NotImplementedError:  # its result is a view
                    pass
            with torch._C._InferenceMode(
                True
            ):  # torch then refuses to write into views of the copies
                copies = dict[RestingTensor, torch.Tensor]()
                found = func(*_copied(args, copies), **_copied(kwargs, copies))
                if func is torch.Tensor.__setitem__ and args[0] in copies:
                    args[0].replace(copies[args[0]])
                return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name in ("aten::detach", "aten::alias"):
            return args[0]
        return on_copies(func, args, kwargs or {})


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_OF_VALUES = (
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.tolist,
    torch.Tensor.__reduce_ex__,
)
"""Functions that read a tensor's memory without a call that __torch_dispatch__ sees."""


def on_copies(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls an operator on copies of the values, and stores those that it writes."""
    schema = func._schema
    copies = dict[RestingTensor, torch.Tensor]()
    what = resting_in((args, kwargs))[0].what
    if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
        raise NotImplementedError(
            f"{schema.name} gives a view of {what}, whose values rest elsewhere: clone() it first"
        )
    written = written_by(func, args, kwargs)
    if schema.name != "aten::copy_" and any(
        not isinstance(each, RestingTensor) for each in tree_leaves(written)
    ):
        raise RuntimeError(
            f"{schema.name} writes into another tensor from {what}, as optimizers do that cannot "
            "step such parameters: take "
            "tiermem's optimizer, or read a copy, clone()"
        )
    found = func(*_copied(args, copies), **_copied(kwargs, copies))
    of_copies = {id(copy): each for each, copy in copies.items()}
    for each in resting_in(written):
        each.replace(copies[each])
    return tree_map(lambda each: of_copies.get(id(each), each), found)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator of torch.ops writes, as its schema says."""
    arguments = func._schema.arguments
    by_name = dict(zip((each.name for each in arguments), args, strict=False)) | dict(kwargs)
    return [by_name[each.name] for each in arguments if each.is_write and each.name in by_name]


def resting_in(values: Any) -> Sequence[Any]:
    """The RestingTensors among values."""
    return [each for each in tree_leaves(values) if isinstance(each, RestingTensor)]


def _copied(values: Any, copies: dict[RestingTensor, torch.Tensor]) -> Any:
    """The same values with copies in place of resting ones; fills `copies`."""
    for each in resting_in(values):
        if each not in copies:
            copies[each] = each.read()
    return tree_map(lambda each: copies[each] if isinstance(each, RestingTensor) else each, values)
