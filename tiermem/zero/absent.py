"""Absent parameters: the attributes and the class of a partitioned parameter while its values are not in memory."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import nn

from tiermem.zero import registry

# ---- the attributes of a partitioned parameter -----------------------------------------------------------------------
#
#     ds_id       its number          ds_shape, ds_numel   of the whole          ds_status   whether the values are in memory
#     ds_tensor   this rank's part: flat, ceil(numel / ranks) elements. A view of the bytes where they rest in memory.
#                 On NVMe, and while zero.Init builds: NaN of that size, which takes no memory
#
# A parameter has them in stage 3, from zero.Init or `shard` until the shards are closed. They are read-only by
# convention: setting one changes nothing else. To read or write values use tiermem.zero.GatheredParameters or the
# functions of tiermem.utils.

_NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_status")


class ZeroParamType(enum.Enum):
    """How ZeRO keeps a parameter."""

    NORMAL = 1  # whole on every rank
    PARTITIONED = 2  # each rank keeps a part
    REMOTE = 3  # kept by one other rank alone; this rank holds no part


class ZeroParamStatus(enum.Enum):
    """Whether a partitioned parameter's values are in memory."""

    AVAILABLE = 1  # the whole parameter is in memory
    NOT_AVAILABLE = 2  # only the parts exist, where they rest
    INFLIGHT = 3  # the gather is under way


def describe(param: nn.Parameter, number: int, shape: torch.Size, part: torch.Tensor, status: ZeroParamStatus) -> None:
    """Sets a parameter's `ds_` attributes."""
    param.__dict__.update(ds_id=number, ds_shape=shape, ds_numel=shape.numel(), ds_tensor=part, ds_status=status)


def mark(params: Iterable[nn.Parameter], status: ZeroParamStatus) -> None:
    """Sets `ds_status` on the parameters that have it."""
    for param in params:
        if "ds_status" in param.__dict__:
            param.__dict__["ds_status"] = status


def undescribe(param: nn.Parameter) -> None:
    """Removes a parameter's `ds_` attributes."""
    for name in _NAMES:
        param.__dict__.pop(name, None)


def absent_part(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a placeholder of `numel` elements for a part that is not in memory: NaN (zero for integers), one element big."""
    nothing = torch.full((), float("nan"), dtype=dtype) if dtype.is_floating_point else torch.zeros((), dtype=dtype)
    return nothing.expand(numel)


# ---- which calls need a parameter's values ---------------------------------------------------------------------------
#
# torch passes every call that takes a parameter to the parameter's class (`__torch_function__`). A call that asks for a
# shape, a dtype or a gradient needs no values. Every other call does.

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
    """Whether a call reads or writes values. A call that asks about a tensor does neither; setting `data` is a write."""
    name = _attribute_of(func)
    if name is None:
        return getattr(func, "__name__", "") not in _ASKS
    return name not in (_SETS if func.__name__ in ("__set__", "__delete__") else _ASKS)


def replaces_data(func: Any) -> bool:
    """Whether a call puts another tensor in place of its first argument's values."""
    return getattr(func, "__name__", "") == "__set__" and _attribute_of(func) == "data"


def writes_in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[nn.Parameter]:
    """The parameters that a call writes: the first argument of `name_`, an `out`, or the target of an assignment."""
    name = getattr(func, "__name__", "")
    is_operator = name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or is_operator
    written = [*args[:1], *(kwargs[key] for key in ("tensor", "input", "self") if key in kwargs)] if is_in_place else []
    if len(args) > 1 and args[1] is args[0]:  # torch's load_state_dict, after our hook has loaded
        return []
    out = kwargs.get("out")
    written += list(out) if isinstance(out, (list, tuple)) else [out]
    return [each for each in written if isinstance(each, nn.Parameter)]


def parameters_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[nn.Parameter]:
    """Every parameter among a call's arguments, also in lists and tuples."""
    given = [*args, *kwargs.values()]
    given += [each for a in given if isinstance(a, (list, tuple)) for each in a]
    return [a for a in given if isinstance(a, nn.Parameter)]


def _attribute_of(func: Any) -> str | None:
    """The name of the attribute whose getter or setter `func` is; None for a function."""
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        name: str = getattr(func.__self__, "__name__", "")
        return name
    return None


# ---- resting parameters ----------------------------------------------------------------------------------------------


class Owner(Protocol):
    """Keeps resting parameters and can bring their values into memory for one call. Shards is one."""

    @property
    def may_lend(self) -> bool:
        """Whether a forward or a backward is under way, on every rank."""

    def lend(self, params: list[nn.Parameter], func: Any, args: Any, kwargs: Any) -> Any:
        """Calls `func` while the parameters hold their values."""


@runtime_checkable
class OwnerInInit(Protocol):
    """Keeps the parameters of a model that is not sharded yet, and takes more of them. ParametersInInit is one."""

    def admit_new(self, params: Iterable[nn.Parameter]) -> None:
        """Partitions parameters that were made after building. Collective; blocks."""


class RestingParameter(nn.Parameter):
    """A streamed parameter while no running module holds its unit.

                             wake: the first module that needs its unit begins
                Resting  ------------------------------------------------------->  Parameter
                         <-------------------------------------------------------
                             rest: the last of these modules has ended

    A resting parameter is the same object with this class (torch's lazy modules change their class in the same way). Each
    torch call on it comes here first. Examples are `F.linear(x, self.embed.weight)` in a module that does not own the
    embedding, and a `bias` that a module has returned. During a forward or backward the owner lends the values to the call
    (access.py). At other times no rank may wait for the others: reading gives NaN; writing in place, copying and pickling
    raise RuntimeError. While a module holds the unit the parameter is an ordinary one, and torch's calls cost nothing extra.

    Only plain parameters change class: a subclass of Parameter keeps its own and is never lent.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if needs_values(func):
            params = [p for p in parameters_in(args, kwargs) if type(p) is RestingParameter]
            owner: Owner | None = registry.owner_of(params[0]) if params else None
            if owner is not None and owner.may_lend:
                return owner.lend([p for p in params if registry.owner_of(p) is owner], func, args, kwargs)
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

        They keep their dtype; parameters that are partitioned already stay as they are. Collective; blocks. Raises
        RuntimeError once the model is sharded.
        """
        owner = registry.owner_of(self)
        if not isinstance(owner, OwnerInInit):
            raise RuntimeError(
                "convert_to_zero_parameters on a sharded model, whose parameters are planned: add modules before "
                "tiermem.initialize or tiermem.shard"
            )
        owner.admit_new(param_list)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_copy(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy(self)


def rest(params: Iterable[nn.Parameter]) -> None:
    """Makes plain parameters resting ones: their unit has no users any more."""
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = RestingParameter


def wake(params: Iterable[nn.Parameter]) -> None:
    """Makes resting parameters ordinary ones: their unit has users."""
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
