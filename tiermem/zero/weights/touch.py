"""Touch: which of torch's calls need a parameter's values, and which only ask what it is.

torch hands every call that a parameter is given to over to whoever asked for it (`__torch_function__`). Asking for a shape, a
dtype or a gradient needs no values; everything else does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

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
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or _is_operator(name)
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


def _is_operator(name: str) -> bool:
    return (
        name.startswith("__i")
        and name.endswith("__")
        and name not in ("__index__", "__int__", "__invert__", "__iter__")
    )
