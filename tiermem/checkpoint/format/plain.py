"""Plain: Python values as JSON and back, without pickle: what a client state, a scheduler or a generator's state is made of.

    None, bool, int, float, str, list, dict of strings          as JSON has them
    tuple, set, bytes, dict with other keys, inf and nan        {"$": "tuple", "value": [...]}, ... ($ names the type)
    torch.Tensor, numpy arrays and scalars, torch.dtype, Size   {"$": "tensor", "dtype": "float32", "shape": [2], "value": ...}

Everything else is refused with its place in the value (`client_state['args']`), rather than pickled: what is opened must
never execute anything. A decoded value equals what was encoded; dicts keep their order; an OrderedDict comes back as a dict.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tiermem.checkpoint.format.fields import Fields, ManifestError
from tiermem.checkpoint.format.kinds import DTYPES, dtype_of, name_of

Json = Any
"""What json.loads returns: None, bool, int, float, str, and lists and dicts of those."""

_TYPE = "$"
_MOST_DEPTH = 100


def encode(value: Any, where: str, depth: int = 0) -> Json:
    """A value as JSON. `where` names it in errors: TypeError for what has no place, naming it and its type."""
    if value is None or type(value) in (bool, int, str):
        return value
    if depth > _MOST_DEPTH:
        raise TypeError(f"{where} is nested deeper than {_MOST_DEPTH}: lists and dicts of that depth cannot be saved")
    if type(value) is float:
        return value if math.isfinite(value) else {_TYPE: "float", "value": str(value)}
    if type(value) is list:
        return [encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if type(value) in (dict, OrderedDict):
        return _encode_dict(value, where, depth)
    for kind, write in _WRITERS:
        if isinstance(value, kind) and (kind not in _EXACTLY or type(value) is kind):
            return write(value, where, depth)
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: a checkpoint holds numbers, "
        "strings, lists, tuples, sets, dicts, bytes, tensors and arrays, and nothing is pickled. Save what it is made of"
    )


def check(value: Json, where: str) -> Json:
    """The same JSON value, once it is known that `decode` can make something of it. Raises ManifestError."""
    decode(value, where)
    return value


def decode(value: Json, where: str, depth: int = 0) -> Any:
    """The value that was encoded. Raises ManifestError, naming the place, for JSON that `encode` never writes."""
    if depth > 2 * _MOST_DEPTH:
        raise ManifestError(f"{where[:200]}: is nested deeper than {_MOST_DEPTH}")
    if isinstance(value, list):
        return [decode(item, f"{where}[{i}]" if depth < 3 else where, depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if _TYPE not in value:
        return {
            key: decode(item, f"{where}[{key!r:.80}]" if depth < 3 else where, depth + 1) for key, item in value.items()
        }
    fields = Fields(value, where[:200])
    found = _READERS[fields.text(_TYPE, 20, frozenset(_READERS))](fields, where, depth + 1)
    fields.done()
    return found


def _encode_dict(value: dict[Any, Any], where: str, depth: int) -> Json:
    if all(type(key) is str for key in value) and _TYPE not in value:
        return {key: encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    pairs = [
        [encode(key, f"a key of {where}", depth + 1), encode(item, f"{where}[{key!r}]", depth + 1)]
        for key, item in value.items()
    ]
    return {_TYPE: "dict", "value": pairs}


def _encode_items(name: str) -> Callable[[Any, str, int], Json]:
    return lambda value, where, depth: {
        _TYPE: name, "value": [encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    }  # fmt: skip


def _encode_tensor(value: torch.Tensor, where: str, depth: int) -> Json:
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        raise TypeError(f"{where} is a tensor of {value.layout} on {value.device}; dense ones with values can be saved")
    try:
        name = name_of(value.dtype)
    except ValueError as error:
        raise TypeError(f"{where}: {error}") from None
    flat = value.detach().cpu().contiguous().view(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {_TYPE: "tensor", "dtype": name, "shape": list(value.shape), "value": _base64(raw)}


def _encode_array(value: np.ndarray[Any, Any] | np.generic, where: str, depth: int) -> Json:
    array = np.asarray(value)
    if array.dtype.str[1:] not in _ARRAYS:
        raise TypeError(f"{where} is an array of {array.dtype}; those of numbers and bools can be saved")
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    kind = "ndarray" if isinstance(value, np.ndarray) else "scalar"
    return {_TYPE: kind, "dtype": array.dtype.str[1:], "shape": list(array.shape), "value": _base64(little.tobytes())}


_ARRAYS = frozenset(["b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8", "c8", "c16"])
_EXACTLY = (tuple, set, frozenset, torch.Tensor, torch.nn.Parameter)  # a subclass is more than these
_WRITERS: tuple[tuple[type, Callable[[Any, str, int], Json]], ...] = (
    (torch.Size, _encode_items("size")),
    (tuple, _encode_items("tuple")),
    (set, _encode_items("set")),
    (frozenset, _encode_items("frozenset")),
    (torch.Tensor, _encode_tensor),
    (torch.nn.Parameter, _encode_tensor),
    (bytes, lambda value, where, depth: {_TYPE: "bytes", "value": _base64(value)}),
    (np.generic, _encode_array),
    (np.ndarray, _encode_array),
    (torch.dtype, lambda value, where, depth: {_TYPE: "dtype", "value": name_of(value)}),
    (complex, lambda value, where, depth: {_TYPE: "complex", "value": [str(value.real), str(value.imag)]}),
)


def _decode_float(fields: Fields, where: str, depth: int) -> float:
    return float(fields.text("value", 4, frozenset({"inf", "-inf", "nan"})))


def _decode_complex(fields: Fields, where: str, depth: int) -> complex:
    given = fields.any("value")
    try:
        real, imag = (float(each[:40]) for each in given)
    except (ValueError, TypeError):
        raise ManifestError(f"{where[:200]}: is no complex number") from None
    return complex(real, imag)


def _decode_dict(fields: Fields, where: str, depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for place, pair in fields.items("value"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ManifestError(f"{place[:200]}: a key and a value are due")
        found[_hashable(decode(pair[0], place, depth), place)] = decode(pair[1], place, depth)
    return found


def _decode_items(make: Callable[[list[Any]], Any]) -> Callable[[Fields, str, int], Any]:
    return lambda fields, where, depth: make([decode(item, place, depth) for place, item in fields.items("value")])


def _decode_set(make: Callable[[list[Any]], Any]) -> Callable[[Fields, str, int], Any]:
    return _decode_items(lambda items: make([_hashable(item, "an item of a set") for item in items]))


def _decode_size(fields: Fields, where: str, depth: int) -> torch.Size:
    return torch.Size(fields.integers("value"))


def _decode_tensor(fields: Fields, where: str, depth: int) -> torch.Tensor:
    dtype, shape = dtype_of(fields.text("dtype", allowed=DTYPES)), fields.integers("shape")
    raw = _raw(fields, math.prod(shape) * dtype.itemsize, shape)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(dtype).view(shape)


def _decode_array(fields: Fields, where: str, depth: int) -> Any:
    dtype = np.dtype("<" + fields.text("dtype", allowed=_ARRAYS))
    shape = fields.integers("shape")
    raw = _raw(fields, math.prod(shape) * dtype.itemsize, shape)
    return np.frombuffer(raw, dtype).reshape(shape).astype(dtype.newbyteorder("="))  # a copy: writable


def _decode_scalar(fields: Fields, where: str, depth: int) -> Any:
    array = _decode_array(fields, where, depth)
    if array.shape != ():
        raise ManifestError(f"{where[:200]}: a scalar has no dimensions")
    return array[()]


_READERS: dict[str, Callable[[Fields, str, int], Any]] = {
    "float": _decode_float,
    "complex": _decode_complex,
    "dict": _decode_dict,
    "tuple": _decode_items(tuple),
    "set": _decode_set(set),
    "frozenset": _decode_set(frozenset),
    "size": _decode_size,
    "bytes": lambda fields, where, depth: _raw(fields, None, ()),
    "dtype": lambda fields, where, depth: dtype_of(fields.text("value", allowed=DTYPES)),
    "tensor": _decode_tensor,
    "ndarray": _decode_array,
    "scalar": _decode_scalar,
}


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _raw(fields: Fields, due: int | None, shape: tuple[int, ...]) -> bytes:
    """The bytes of a field in base64; so many, where that is known."""
    if len(shape) > 32 or math.prod(max(size, 1) for size in shape) > 1 << 48:
        fields.refuse("shape", list(shape)[:33], f"at most 32 dimensions and {1 << 48} elements")
    given = fields.any("value")
    if not isinstance(given, str):
        fields.refuse("value", given, "a string in base64")
    try:
        raw = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        fields.refuse("value", given, "a string in base64")
    if due is not None and len(raw) != due:
        fields.refuse("value", len(raw), f"{due} bytes, in base64,")
    return raw


def _hashable(value: Any, where: str) -> Any:
    try:
        hash(value)
    except TypeError:
        raise ManifestError(f"{where[:200]}: a {type(value).__name__} is no key") from None
    return value
