"""Absent parameters: the attributes and the class of a partitioned parameter while its values are
not in memory."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tiermem.units import registry
from tiermem.units.unit import InPlaceOf
from tiermem.weights.resting_tensor import written_by

# ---- the attributes of a partitioned parameter ---------------------------------------------------
#
#     ds_id       its number          ds_shape, ds_numel   of the whole          ds_status   whether the values are in memory
#     ds_tensor   this rank's part: flat, ceil(numel / ranks) elements. A view of the bytes where they rest in memory.
#                 On NVMe, and while zero.Init builds: NaN of that size, which takes no memory
#
# A parameter has them in stage 3, from zero.Init or `shard` until the shards are closed. They are
# read-only by convention: setting one changes nothing else. To read or write values use
# tiermem.zero.GatheredParameters or the functions of tiermem.utils.

_NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_status")


class ZeroParamType(enum.Enum):
    """How ZeRO keeps a parameter."""

    NORMAL = 1
    """Whole on every rank."""
    PARTITIONED = 2
    """Each rank keeps a part."""
    REMOTE = 3
    """Kept by one other rank alone; this rank holds no part."""


class ZeroParamStatus(enum.Enum):
    """Whether a partitioned parameter's values are in memory."""

    AVAILABLE = 1
    """The whole parameter is in memory."""
    NOT_AVAILABLE = 2
    """Only the parts exist, where they rest."""
    INFLIGHT = 3
    """The gather is under way."""


def describe(
    param: nn.Parameter, number: int, shape: torch.Size, part: torch.Tensor, status: ZeroParamStatus
) -> None:
    """Sets a parameter's `ds_` attributes."""
    param.__dict__.update(
        ds_id=number, ds_shape=shape, ds_numel=shape.numel(), ds_tensor=part, ds_status=status
    )


def mark(params: Iterable[nn.Parameter], status: ZeroParamStatus) -> None:
    """Sets `ds_status` on the parameters that have it."""
    for param in params:
        if "ds_status" in param.__dict__:
            param.__dict__["ds_status"] = status


def undescribe(param: nn.Parameter) -> None:
    """Removes a parameter's `ds_` attributes."""
    for name in _NAMES:
        param.__dict__.pop(name, None)


def absent_part(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Returns a placeholder for values that are not in memory: NaN (zero for integers), one element
    big. Writing it raises."""
    nothing = torch.full(
        (), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device
    )
    torch._C._set_throw_on_mutable_data_ptr(nothing)
    return nothing.expand(shape)


# ---- which calls need a parameter's values -------------------------------------------------------
#
# torch passes every call that takes a parameter to the parameter's class (`__torch_function__`). A
# call that asks for a shape, a dtype or a gradient needs no values. Every other call does.

_ASKS = {
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "layout", "is_meta", "ndim", "names",
    "is_cuda", "is_sparse", "is_quantized", "is_cpu", "itemsize", "nbytes", "size", "dim", "numel", "nelement",
    "ndimension", "stride", "is_floating_point", "is_complex", "requires_grad_", "element_size", "__hash__", "__len__",
    "is_contiguous", "retains_grad", "_backward_hooks", "_version", "output_nr", "get_device", "is_inference",
    "is_signed", "__torch_function__", "is_mps", "is_xpu", "is_nested", "is_mkldnn", "is_vulkan", "is_ipu",
    "is_tensor", "is_same_size", "storage_offset", "_base", "_is_view", "is_set_to", "is_pinned", "is_shared", "is_conj",
    "is_neg", "is_sparse_csr", "is_mtia", "is_maia", "_has_symbolic_sizes_strides", "_post_accumulate_grad_hooks",
    "_grad", "grad_dtype", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "empty_like", "new_empty",
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full",
    "_has_compatible_shallow_copy_type", "backward",
}  # fmt: skip
_NOT_IN_PLACE = {"__index__", "__int__", "__invert__", "__iter__"}
_SETS = {
    "grad",
    "requires_grad",
    "_backward_hooks",
    "names",
    "_post_accumulate_grad_hooks",
    "_grad",
    "grad_dtype",
}
# of a parameter that is not first they need the shape
_LIKE = {"to", "type_as", "view_as", "expand_as", "reshape_as"}
# the same object when nothing changes
_CASTS = {"to", "type", "float", "half", "bfloat16", "double", "cpu", "cuda"}
_ADDRESSES = {"data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack__"}
_OF_LEAVES = {"requires_grad_", "retain_grad", "register_hook"}


def needs_values(func: Any) -> bool:
    """Whether a call reads or writes values. A call that asks about a tensor does neither; setting
    `data` is a write."""
    name = _attribute_of(func)
    if name is None:
        return getattr(func, "__name__", "") not in _ASKS
    return name not in (_SETS if func.__name__ in ("__set__", "__delete__") else _ASKS)


def replaces_data(func: Any) -> bool:
    """Whether a call puts another tensor in place of its first argument's values."""
    return getattr(func, "__name__", "") == "__set__" and _attribute_of(func) == "data"


def writes_in_place(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that a call writes: the first argument of `name_`, an `out`, or the target of an
    assignment.

    An operator of torch.ops has a schema, which says it.
    """
    if isinstance(func, torch._ops.OpOverload):
        written = written_by(func, args, kwargs)
        return [each for each in _flat(written) if isinstance(each, torch.Tensor)]
    name = getattr(func, "__name__", "")
    is_operator = name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE
    is_in_place = (
        (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or is_operator
    )
    written = (
        [*args[:1], *(kwargs[key] for key in ("tensor", "input", "self") if key in kwargs)]
        if is_in_place
        else []
    )
    return [each for each in _flat([*written, kwargs.get("out")]) if isinstance(each, torch.Tensor)]


def parameters_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[nn.Parameter]:
    """Every parameter among a call's arguments, also in lists and tuples."""
    return [each for each in _flat([*args, *kwargs.values()]) if isinstance(each, nn.Parameter)]


def _flat(given: Iterable[Any]) -> list[Any]:
    """Values, and those in lists and tuples among them."""
    return [
        each
        for value in given
        for each in (value if isinstance(value, (list, tuple)) else (value,))
    ]


def _attribute_of(func: Any) -> str | None:
    """The name of the attribute whose getter or setter `func` is; None for a function."""
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        name: str = getattr(func.__self__, "__name__", "")
        return name
    return None


# ---- resting parameters --------------------------------------------------------------------------


class Owner(Protocol):
    """Keeps resting parameters and can bring their values into memory for one call. Shards is
    one."""

    @property
    def may_lend(self) -> bool:
        """Whether a forward or a backward is under way, on every rank."""

    def lend(self, params: list[nn.Parameter], func: Any, args: Any, kwargs: Any) -> Any:
        """Calls `func` while the parameters hold their values, or raises RuntimeError where that is
        not possible."""

    def take_out(self, param: nn.Parameter) -> None:
        """Gives a parameter its own copy of its values until `put_back`; it is an ordinary
        parameter meanwhile."""

    def put_back(self, param: nn.Parameter) -> None:
        """Ends a `take_out`."""


@runtime_checkable
class OwnerInInit(Owner, Protocol):
    """Keeps the parameters of a model that is not sharded yet, and takes more of them.
    ParametersInInit is one."""

    def admit_new(self, params: Iterable[nn.Parameter]) -> None:
        """Partitions parameters that were made after building. Collective; blocks."""

    def whole(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of a parameter's values. Collective; blocks."""

    def write(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Replaces a parameter's values by those that rank 0 gives. Collective; blocks."""


class RestingParameter(nn.Parameter):
    """A streamed parameter while no running module holds its unit.

                             wake: the first module that needs its unit begins
                Resting  ------------------------------------------------------->  Parameter
                         <-------------------------------------------------------
                             rest: the last of these modules has ended

    A resting parameter is the same object with this class (torch's lazy modules change their class
    in the same way). Each torch call on it comes here first. Examples are `F.linear(x,
    self.embed.weight)` in a module that does not own the embedding, and a `bias` that a module has
    returned. During a forward or backward the owner lends the values to the call (access.py). At
    other times the owner lends a copy if the model is on one rank (`copies`). On several ranks
    reading raises RuntimeError then, because a rank that calls alone would wait for the others.
    Writing in place, copying and pickling always raise RuntimeError. docs/absent.md has a table.
    While a module holds the unit the parameter is an ordinary one, and torch's calls cost nothing
    extra.

    Only plain parameters change class: a subclass of Parameter keeps its own and is never lent.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's part, as `describe` says. A step under way, which changes it, is finished
        first."""
        steps = getattr(registry.owner_of(self), "steps", None)  # of a sharded model
        if steps is not None:
            steps.finish()
        if "ds_tensor" not in self.__dict__:
            raise AttributeError("ds_tensor: this parameter is not partitioned")
        part: torch.Tensor = self.__dict__["ds_tensor"]
        return part

    @ds_tensor.setter
    def ds_tensor(self, part: torch.Tensor) -> None:
        self.__dict__["ds_tensor"] = part

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        """Torch hands it to no class, so it would be lost."""
        _refuse_write("set_", self)

    def convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        """Partitions ordinary parameters, such as adapters that were added after zero.Init, beside
        this one.

        They keep their dtype; parameters that are partitioned already stay as they are. Collective;
        blocks. Raises RuntimeError once the model is sharded.
        """
        owner = registry.owner_of(self)
        if not isinstance(owner, OwnerInInit):
            raise RuntimeError(
                "convert_to_zero_parameters on a sharded model, whose parameters are planned: add "
                "modules before tiermem.initialize or tiermem.shard"
            )
        owner.admit_new(param_list)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Before the model is sharded: an ordinary parameter with the values. Collective then;
        blocks."""
        owner = registry.owner_of(self)
        if not isinstance(owner, OwnerInInit):
            self.__reduce_ex__(4)
        with torch._C.DisableTorchFunctionSubclass():
            value = owner.whole(self).to(self.device, self.dtype, copy=True)
            copied = memo[id(self)] = nn.Parameter(value, self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(
            self,
            "{} cannot be copied or pickled. Do it under "
            "tiermem.zero.GatheredParameters(parameter), or take its value from "
            "state_dict() or Shards.weight(parameter)",
        )


class PresentParameter(nn.Parameter):
    """A parameter of a sharded model while it is in memory. Torch's calls on it cost nothing extra.

    `p.data = x` raises RuntimeError at once for another dtype, shape or device: `model.half()` does
    that. What x holds is taken over when the module ends, or before the next step or save
    (`Shards.take_writes`); forward uses x until then. Who takes `p.data` may write it, and torch
    keeps no trace: the values are compared with their masters at that time.
    """

    @property
    def data(self) -> torch.Tensor:
        """The values, as a tensor without a graph."""
        note_data = getattr(registry.owner_of(self), "note_data", None)  # of a sharded model
        values = cast(torch.Tensor, _DATA.__get__(self))
        if note_data is not None:
            note_data(self, values)
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if registry.owner_of(self) is not None:
            check_like(values, self)
        _DATA.__set__(self, values)

    def copy_(self, values: torch.Tensor, non_blocking: bool = False) -> PresentParameter:
        """Writes values, as torch does; a copy to itself, with which `load_state_dict` ends after
        our hook, is no write."""
        if values is not self:
            super().copy_(values, non_blocking)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(
            self.detach().clone(memory_format=torch.preserve_format), self.requires_grad
        )
        memo[id(self)] = copied
        return copied


_DATA: Any = torch._C.TensorBase.data
"""torch's own attribute."""
set_data: Callable[[nn.Parameter, torch.Tensor], None] = _DATA.__set__
"""Gives a parameter other memory, whatever its class, without the checks of `PresentParameter`."""


def check_like(given: torch.Tensor, shown: torch.Tensor) -> None:
    """Raises RuntimeError if a parameter of a sharded model was given values of another dtype,
    shape or device."""
    had = shown.dtype, shown.device, tuple(shown.shape)
    has = given.dtype, given.device, tuple(given.shape)
    if has != had:
        raise RuntimeError(
            f"a parameter of a sharded model was {had[0]} on {had[1]} of shape {had[2]} and is "
            f"given values that are {has[0]} on {has[1]} of shape {has[2]}. The policy or config "
            "says the dtype, tiermem.shard(device=...) the device; resize a model before it is "
            "sharded, or close its shards with materialize=True first"
        )


class RestingView(torch.Tensor):
    """A view of resting parameters that was made outside a forward, such as `p.data`, `p.detach()`
    and `p[3:]`.

    It holds no values. Every call on it makes the view again, from the values that the parameters
    have then. So a view that is kept costs no memory and is never out of date. Writing through it
    raises RuntimeError while a parameter rests.

    Args:
        like: has its shape, dtype, device and requires_grad.
        params: the parameters that it shows a part of.
        make: makes the view while these parameters hold their values.
    """

    def __new__(
        cls, like: torch.Tensor, params: Sequence[nn.Parameter], make: Callable[[], torch.Tensor]
    ) -> RestingView:
        nothing = absent_part(like.shape, like.dtype, like.device)
        return torch.Tensor._make_subclass(cls, nothing, like.requires_grad)

    def __init__(
        self, like: torch.Tensor, params: Sequence[nn.Parameter], make: Callable[[], torch.Tensor]
    ) -> None:
        self.params = params
        self.make = make
        self.node: Any = None  # its `grad_fn`, where no values were needed for it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a torch function that was given resting parameters or views of them."""
    first: Any = args[0] if args else None
    name = _attribute_of(func) or getattr(func, "__name__", "")
    is_first = isinstance(first, (RestingParameter, RestingView))
    if isinstance(first, RestingView) and name in _OF_LEAVES:
        refuse(
            first.params[0],
            name + " changes a view of {}, which is made again at every use. Take a clone() of it",
        )
    if isinstance(first, RestingView) and name == "grad_fn":
        return first.node
    with torch._C.DisableTorchFunctionSubclass():
        if not needs_values(func) or (name in _LIKE and not is_first):
            return func(*args, **kwargs)
        if (
            name == "equal"
            and len({each.shape for each in args if isinstance(each, torch.Tensor)}) == 2
        ):
            return False
    params: list[nn.Parameter] = [
        p for p in _under([*args, *kwargs.values()]) if type(p) is RestingParameter
    ]
    if not params:
        return _call_lent(func, (), *args, **kwargs)
    sets_data = replaces_data(func)
    if name in ("copy_", "data") and len(args) > 1 and args[1] is first:
        # load_state_dict, after our hook has loaded; to()
        return first if name == "copy_" else None
    if sets_data and type(first) is RestingParameter:
        keeper = registry.owner_of(first)
        # before the model is sharded, values are what they are set to
        if isinstance(keeper, OwnerInInit):
            value = args[1].detach().clone()
            with torch._C.DisableTorchFunctionSubclass():
                keeper.write(first, value)
                become(first, absent_part(value.shape, value.dtype, first.device))
            return None
    written = _under(args[:1] if sets_data else writes_in_place(func, args, kwargs))
    if sets_data and isinstance(args[1], RestingView) and set(args[1].params) <= set(written):
        return None  # `p.data.data -= x` ends so: a view of the parameter is given what it shows
    resting = [param for param in written if type(param) is RestingParameter]
    owners = [(param, registry.owner_of(param)) for param in resting]
    keepers = {param: owner for param, owner in owners if isinstance(owner, OwnerInInit)}
    if keepers and len(keepers) == len(resting) and not sets_data:
        return _write_in_init(keepers, func, args, kwargs)
    for param in resting:
        _refuse_write("setting data" if sets_data else func.__name__, param)
    owner: Owner | None = registry.owner_of(params[0])
    with torch._C.DisableTorchFunctionSubclass():
        if owner is None:
            return func(*args, **kwargs)
        if is_first and name in _CASTS:
            probe = torch.empty((0,) * first.ndim, dtype=first.dtype, device=first.device)
            cast = func(probe, *args[1:], **kwargs)
            if cast is probe or not isinstance(cast, torch.Tensor):
                return first if cast is probe else cast
        if name in _ADDRESSES:
            instead = (
                "tiermem.zero.GatheredParameters(parameter), or register_external_parameter "
                "for a kernel in forward"
            )
            refuse(params[0], f"{name} asks for the memory of {{}}, and it has none. Use {instead}")
        # need no values yet: state_dict() detaches every parameter, and hooks on gradients ask a
        # view of the whole for its `grad_fn`
        is_whole = name in ("view_as", "expand_as") and args[-1] is first
        if name in ("data", "detach") or (is_whole and type(first) is RestingParameter):
            like = func(*args, **kwargs)
            make = functools.partial(_call_lent, func, params, *args, **kwargs)
            view = RestingView(like, params, make)
            view.node = like.grad_fn
            return view
    mine = [param for param in params if registry.owner_of(param) is owner]
    return owner.lend(mine, functools.partial(_call_lent, func, mine), args, kwargs)


def _write_in_init(
    keepers: Mapping[RestingParameter, OwnerInInit], func: Any, args: Any, kwargs: Any
) -> Any:
    """Calls a function that writes parameters of a model that is not sharded yet: what it writes
    counts."""
    with contextlib.ExitStack() as ending:
        for param, keeper in keepers.items():
            keeper.take_out(param)
            ending.callback(keeper.put_back, param)
        output = _call_lent(func, (), *args, **kwargs)
        for param, keeper in keepers.items():
            keeper.write(param, param.detach())
    return args[0] if args and isinstance(output, torch.Tensor) else output


def _call_lent(func: Any, lent: Sequence[nn.Parameter], *args: Any, **kwargs: Any) -> Any:
    """Calls a function while parameters hold values that they were lent; views of them are made
    again.

    Raises RuntimeError if it wrote the lent values. Names show most writes before; this shows those
    of `inplace=True`.
    """
    made: list[torch.Tensor] = []

    def make(view: RestingView) -> torch.Tensor:
        value = view.make()
        made.append(value if view.requires_grad else value.detach())
        # Reentrant checkpointing detaches each argument, and passes the gradient of such a leaf to
        # the argument.
        if view.requires_grad and view.grad_fn is None and not value.requires_grad:
            made[-1] = cast(Any, InPlaceOf).apply(view, value)
        return made[-1]

    if any(isinstance(each, RestingView) for each in _flat([*args, *kwargs.values()])):
        args, kwargs = tree_map_only(RestingView, make, (args, kwargs))
    # it would name our class
    if func is torch.Tensor.__repr__ and isinstance(args[0], nn.Parameter):
        args = (nn.Parameter(args[0].detach(), args[0].requires_grad),)
    watched = [*lent, *made] if lent else []
    before = [each._version for each in watched]
    output = func(*args, **kwargs)
    if [each._version for each in watched] != before:
        _refuse_write(getattr(func, "__name__", "this call"), lent[0])
    return output


def _under(values: Iterable[Any]) -> list[nn.Parameter]:
    """The parameters among values and under the views among them, each once."""
    found: dict[int, nn.Parameter] = {}
    for value in _flat(values):
        for each in value.params if isinstance(value, RestingView) else (value,):
            if isinstance(each, nn.Parameter):
                found[id(each)] = each
    return list(found.values())


# ---- outside a forward ---------------------------------------------------------------------------


@contextlib.contextmanager
def copies(owner: Owner, params: Sequence[nn.Parameter]) -> Iterator[None]:
    """A block in which parameters hold copies of their values, in torch's own memory. Blocks."""
    try:
        with torch._C._InferenceMode(False), torch._C.DisableTorchFunctionSubclass():
            for param in params:
                owner.take_out(param)
        yield
    finally:
        with torch._C._InferenceMode(False), torch._C.DisableTorchFunctionSubclass():
            for param in params:
                owner.put_back(param)


def refuse_read(param: nn.Parameter, num_ranks: int) -> NoReturn:
    """Raises RuntimeError for a read that one rank alone may have asked for."""
    refuse(
        param,
        f"{{}} is read outside forward and backward. Its parts are on {num_ranks} ranks, which "
        "would wait for each other. Read it under tiermem.zero.GatheredParameters(parameter), or "
        "take Shards.weight(parameter), on every rank; before the model is sharded, code that "
        "every rank runs may read inside tiermem.zero.Init",
    )


def without_loans(
    output: Any, params: Sequence[nn.Parameter], make: Callable[[], Any], may_borrow: bool = False
) -> Any:
    """The result of `make`, without views of the values that parameters hold now: they become views
    that are made again.

    NumPy arrays become read-only copies.

    may_borrow: views that record a graph stay as they are, since torch refuses to write them.
    """
    if type(output) in (tuple, list):
        return type(output)(
            without_loans(each, params, lambda i=i: make()[i], may_borrow)  # type: ignore[misc]
            for i, each in enumerate(output)
        )
    if isinstance(output, np.ndarray):
        output = output.copy()
        output.flags.writeable = False
    if not isinstance(output, torch.Tensor) or isinstance(output, (nn.Parameter, RestingView)):
        return output
    if output.layout is not torch.strided or (may_borrow and output.requires_grad):
        return output
    is_view = any(
        output.untyped_storage()._cdata == param.untyped_storage()._cdata for param in params
    )
    return RestingView(output, params, make) if is_view else output


# ---- the two classes of a parameter --------------------------------------------------------------


def rest(params: Iterable[nn.Parameter]) -> None:
    """Makes ordinary parameters resting ones: their unit has no users any more."""
    for param in params:
        if type(param) is nn.Parameter or type(param) is PresentParameter:
            param.__class__ = RestingParameter


def wake(params: Iterable[nn.Parameter]) -> None:
    """Makes resting parameters present ones: their unit has users, or always will."""
    for param in params:
        if type(param) is RestingParameter or type(param) is nn.Parameter:
            param.__class__ = PresentParameter


def part_with(params: Iterable[nn.Parameter]) -> None:
    """Makes parameters ordinary ones for good."""
    for param in params:
        if type(param) is RestingParameter or type(param) is PresentParameter:
            param.__class__ = nn.Parameter  # type: ignore[assignment]


def refuse(param: nn.Parameter, sentences: str) -> NoReturn:
    """Raises RuntimeError about a resting parameter, which the sentences call {}."""
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(param.shape)
    raise RuntimeError(
        sentences.format(f"a parameter of shape {shape} whose values rest elsewhere")
    )


def _refuse_write(what: str, param: nn.Parameter) -> NoReturn:
    refuse(
        param,
        what + " writes {}, so what it writes would be lost. "
        "Write under tiermem.zero.GatheredParameters(parameter, modifier_rank=0), through "
        "Shards.replace or load_state_dict, "
        "or before sharding; step with tiermem.AdamW and its like. The policy or config says the "
        "dtype, and "
        "tiermem.shard(device=...) the device, which half() and to() would set",
    )


def become(param: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a parameter or a buffer another value, possibly on another device; it stays the same
    object.

    torch assigns `data` only within a device (or from CPU to CUDA). Otherwise the tensors behind
    two objects are swapped. This is torch.utils.swap_tensors without its check for weak references:
    ours refer to the Python object and stay right.
    """
    if param.device == value.device:
        param.data = value
    else:
        torch._C._swap_tensor_impl(param, nn.Parameter(value, param.requires_grad))
