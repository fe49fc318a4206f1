"""Absent parameters: what a partitioned parameter is and shows while its values are not in memory."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import nn

from tiermem.zero import registry

# ---- The attributes that a partitioned parameter shows: the documented ones, and no other ----------------------------
#
#     ds_id       its number          ds_shape, ds_numel   of the whole          ds_status   whether its values are there now
#     ds_tensor   this rank's part: flat, ceil(numel / ranks) elements. A view of the bytes where they rest in memory; on
#                 NVMe, and while zero.Init builds, NaN of that size that takes no memory
#
# They are there in stage 3, from zero.Init or `shard` on until the shards are closed. They are for looking: setting one
# does nothing. For values there are tiermem.zero.GatheredParameters and the functions of tiermem.utils.

_NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_status")


class ZeroParamType(enum.Enum):
    """What a parameter is to ZeRO."""

    NORMAL = 1  # whole on every rank
    PARTITIONED = 2  # each rank keeps a part
    REMOTE = 3  # kept by one rank alone; nothing here is


class ZeroParamStatus(enum.Enum):
    """Whether a partitioned parameter's values are there."""

    AVAILABLE = 1  # the whole is in memory
    NOT_AVAILABLE = 2  # nothing but the parts, where they rest
    INFLIGHT = 3  # on their way


def describe(param: nn.Parameter, number: int, shape: torch.Size, part: torch.Tensor, status: ZeroParamStatus) -> None:
    """Gives a parameter its attributes."""
    param.__dict__.update(ds_id=number, ds_shape=shape, ds_numel=shape.numel(), ds_tensor=part, ds_status=status)


def mark(params: Iterable[nn.Parameter], status: ZeroParamStatus) -> None:
    """Says where the values of parameters that have attributes are now."""
    for param in params:
        if "ds_status" in param.__dict__:
            param.__dict__["ds_status"] = status


def undescribe(param: nn.Parameter) -> None:
    """Takes a parameter's attributes away."""
    for name in _NAMES:
        param.__dict__.pop(name, None)


def absent_part(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Stands for a part that is not in memory."""
    nothing = torch.full((), float("nan"), dtype=dtype) if dtype.is_floating_point else torch.zeros((), dtype=dtype)
    return nothing.expand(numel)


# ---- Touch: which of torch's calls need a parameter's values, and which only ask what it is --------------------------
#
# torch hands every call that takes a parameter to the parameter's class (`__torch_function__`). Asking for a
# shape, a dtype or a gradient needs no values; everything else does.

_ASKS = {
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "layout", "is_meta", "ndim", "names",
    "is_cuda", "is_sparse", "is_quantized", "is_cpu", "itemsize", "nbytes", "size", "dim", "numel", "nelement",
    "ndimension", "stride", "is_floating_point", "is_complex", "requires_grad_", "element_size", "__hash__", "__len__",
    "is_contiguous", "retains_grad", "_backward_hooks", "_version", "output_nr", "get_device", "is_inference",
    "type", "is_signed", "__torch_function__", "is_mps", "is_xpu", "is_nested", "is_mkldnn", "is_vulkan", "is_ipu",
    "is_tensor", "is_same_size", "storage_offset", "_base", "_is_view", "is_set_to", "is_pinned", "is_shared", "is_conj",
    "is_neg", "is_sparse_csr", "is_mtia", "is_maia", "_has_symbolic_sizes_strides", "_post_accumulate_grad_hooks",
    "_grad", "grad_dtype", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "empty_like", "new_empty",
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full",
    "_has_compatible_shallow_copy_type",
}  # fmt: skip
_NOT_IN_PLACE = {"__index__", "__int__", "__invert__", "__iter__"}
_SETS = {"grad", "requires_grad", "_backward_hooks", "names", "_post_accumulate_grad_hooks", "_grad", "grad_dtype"}


def needs_values(func: Any) -> bool:
    """Whether a call reads or writes values, rather than asks about a tensor. Setting `data` counts as writing."""
    name = _attribute_of(func)
    if name is None:
        return getattr(func, "__name__", "") not in _ASKS
    return name not in (_SETS if func.__name__ in ("__set__", "__delete__") else _ASKS)


def replaces_data(func: Any) -> bool:
    """Whether a call puts another tensor in place of its first argument's values."""
    return getattr(func, "__name__", "") == "__set__" and _attribute_of(func) == "data"


def writes_in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[nn.Parameter]:
    """The parameters that a call writes: the first argument of `name_`, an `out`, the target of an assignment."""
    name = getattr(func, "__name__", "")
    is_operator = name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or is_operator
    written = [*args[:1], *(kwargs[key] for key in ("tensor", "input", "self") if key in kwargs)] if is_in_place else []
    if len(args) > 1 and args[1] is args[0]:  # a copy to itself, as torch's load_state_dict makes when we have loaded
        return []
    out = kwargs.get("out")
    written += list(out) if isinstance(out, (list, tuple)) else [out]
    return [each for each in written if isinstance(each, nn.Parameter)]


def parameters_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[nn.Parameter]:
    """Every parameter that a call is given, also in lists and tuples."""
    given = [*args, *kwargs.values()]
    given += [each for a in given if isinstance(a, (list, tuple)) for each in a]
    return [a for a in given if isinstance(a, nn.Parameter)]


def _attribute_of(func: Any) -> str | None:
    """The attribute behind a property's getter or setter; None for a function."""
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        name: str = getattr(func.__self__, "__name__", "")
        return name
    return None


# ---- Resting parameters: what a streamed parameter is while no module that holds it runs, so that every use of it ----
# is seen
#
#                      hold: the first module that needs its unit begins
#         Resting  ------------------------------------------------------->  Parameter
#                  <-------------------------------------------------------
#                      let go: the last one has ended
#
# A resting parameter is the same object with another class (as torch's lazy modules do it when they come to life), a
# Parameter whose calls come here first: `F.linear(x, self.embed.weight)` in a module that does not own the embedding,
# or `bias` that a module has returned. While a forward or a backward is at work its keeper lends it (access.py).
# Elsewhere no rank may wait for the others, so reading gives NaN, and writing in place, copying and pickling raise.
# While it is held a parameter is an ordinary one again, and torch's calls on it cost what they always do.
#
# Only plain parameters change: a subclass of Parameter keeps its class, and is never lent.


class Lender(Protocol):
    """Who looks after resting parameters."""

    @property
    def may_lend(self) -> bool:
        """Whether a forward or a backward is at work, on every rank."""

    def lend(self, params: list[nn.Parameter], func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function with the parameters' values in place."""


@runtime_checkable
class Adopter(Protocol):
    """Keeps the parameters of a model that is not sharded yet, and takes more of them."""

    def adopt(self, params: Iterable[nn.Parameter]) -> None:
        """Partitions parameters that were made after building. Collective; blocks."""


class RestingParameter(nn.Parameter):
    """A parameter whose unit has no users; see above."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if needs_values(func):
            params = [p for p in parameters_in(args, kwargs) if type(p) is RestingParameter]
            lender: Lender | None = registry.keeper_of(params[0]) if params else None
            if lender is not None and lender.may_lend:
                return lender.lend([p for p in params if registry.keeper_of(p) is lender], func, args, kwargs)
            written = (
                args[:1] if replaces_data(func) and args[0] is not args[1] else writes_in_place(func, args, kwargs)
            )
            for param in written:
                if type(param) is RestingParameter:
                    _refuse_write("setting data" if replaces_data(func) else func.__name__, param)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        """Partitions ordinary parameters, such as adapters that were added after zero.Init, beside this one.

        They keep their dtype; those that are partitioned already stay as they are. Collective; blocks. Raises RuntimeError once
        the model is sharded.
        """
        keeper = registry.keeper_of(self)
        if not isinstance(keeper, Adopter):
            raise RuntimeError(
                "convert_to_zero_parameters on a sharded model, whose parameters are planned: add modules before "
                "tiermem.initialize or tiermem.shard"
            )
        keeper.adopt(param_list)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_copy(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy(self)


def rest(params: Iterable[nn.Parameter]) -> None:
    """The unit of these has no users any more."""
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = RestingParameter


def wake(params: Iterable[nn.Parameter]) -> None:
    """The unit of these has users: they are ordinary parameters."""
    for param in params:
        if type(param) is RestingParameter:
            param.__class__ = nn.Parameter  # type: ignore[assignment]


def _refuse_copy(param: nn.Parameter) -> NoReturn:
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(param.shape)
    raise RuntimeError(
        f"a parameter of shape {shape} whose values rest elsewhere cannot be copied or pickled: what it shows is NaN. Do it "
        "under tiermem.zero.GatheredParameters(parameter), or take its value from state_dict() or Shards.weight(parameter)"
    )


def _refuse_write(what: str, param: nn.Parameter) -> NoReturn:
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(param.shape)
    raise RuntimeError(
        f"{what} writes a parameter of shape {shape} whose values rest elsewhere, so what it writes would be lost. "
        "Write under tiermem.zero.GatheredParameters(parameter, modifier_rank=0), through Shards.replace or load_state_dict, "
        "or before sharding; step with tiermem.AdamW and its like"
    )
