"""Fields: strict readers of JSON files, and Python values as JSON without pickle."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from tiermem.checkpoint.format.kinds import DTYPES, dtype_of, name_of
from tiermem.swap.native import crc32c_of

# ---- CRC-32C of a file's text; those of states, and how two are combined: swap/checksum.py ---------------------------


def crc32c(data: bytes | memoryview) -> int:
    """The CRC-32C of bytes (iSCSI's: RFC 3720, B.4)."""
    view = np.frombuffer(data, np.uint8)
    return int(crc32c_of(np.array([view.ctypes.data], np.uint64), np.array([len(data)], np.uint64))[0])


# ---- Fields: strict readers of what a JSON file says, so that a hostile one is an error and nothing else -------------
#
#     text(data, source)    bytes -> one JSON object: UTF-8, no NaN, no key twice
#     Fields(...)           its keys, each read once, as one type, within bounds; what is left over is an error
#
# Every error is a ManifestError that names the file and the field. Nothing is executed. Time is linear in a file's
# bytes, and what is made of it takes at most 26 bytes for each; usually it is 5.

LARGEST = (1 << 63) - 1
MOST_TEXT = 4096  # characters of a name or a path
MOST_BYTES = 1 << 28  # of a file that says what is where: enough for 20 TB of states, at 12 bytes for each MiB
_TRAILER = re.compile(rb',"crc32c":"([0-9a-f]{8})"\}\n\Z')
_TRAILER_BYTES = len(b',"crc32c":"00000000"}\n')


class ManifestError(ValueError):
    """A file of a checkpoint is not what it should be; names the file and the field."""


def seal(content: Mapping[str, Any]) -> bytes:
    """A JSON file: one object of one line, whose last field is the CRC-32C of all bytes before it."""
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + b',"crc32c":"%08x"}\n' % crc32c(body)


def unseal(data: bytes, source: str) -> dict[str, Any]:
    """The object in a sealed file, without its CRC. Raises ManifestError for anything else."""
    if len(data) > MOST_BYTES:
        raise ManifestError(f"{source}: has {len(data)} bytes; {MOST_BYTES} are allowed")
    match = _TRAILER.search(data, max(0, len(data) - _TRAILER_BYTES))
    if match is None:
        raise ManifestError(
            f"{source}: its {len(data)} bytes do not end as a checkpoint's file does: cut, or no such file"
        )
    said, found = int(match[1], 16), crc32c(memoryview(data)[: match.start()])
    if found != said:
        raise ManifestError(f"{source}: crc32c is {found:08x} and the file says {said:08x}: it is damaged")
    content = text(data, source)
    del content["crc32c"]
    return content


def text(data: bytes, source: str) -> dict[str, Any]:
    """The JSON object of a file. Raises ManifestError."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_once, parse_float=_finite, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{source}: is not JSON that a checkpoint holds: {error}") from None
    if not isinstance(value, dict):
        raise ManifestError(f"{source}: holds {_kind(value)} where an object is due")
    return value


class Fields:
    """The keys of one JSON object.

    Args:
        value: what the file has in this place; anything but an object is an error.
        where: the file and the field, for errors.
    """

    def __init__(self, value: Any, where: str) -> None:
        self._where = where
        if not isinstance(value, dict):
            raise ManifestError(f"{where}: is {_kind(value)}; an object is due")
        self._left = dict(value)

    def integer(self, name: str, most: int = LARGEST, least: int = 0) -> int:
        """A whole number within bounds."""
        value = self.any(name)
        if type(value) is not int or not least <= value <= most:
            self.refuse(name, value, f"a whole number of {least} to {most}")
        return int(value)

    def text(self, name: str, most: int = MOST_TEXT, allowed: frozenset[str] | None = None, least: int = 1) -> str:
        """A string of at most so many characters, without NUL and half surrogate pairs; one of `allowed`."""
        value = self.any(name)
        if not _is_text(value, least, most):
            self.refuse(name, value, f"a string of {least} to {most} characters, without NUL, that UTF-8 can hold,")
        if allowed is not None and value not in allowed:
            self.refuse(name, value, f"one of {', '.join(sorted(allowed))}")
        return str(value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.any(name)
        if type(value) is not bool:
            self.refuse(name, value, "true or false")
        return bool(value)

    def digest(self, name: str) -> int:
        """A CRC-32C as 8 hexadecimal digits."""
        value = self.text(name, 8)
        if not re.fullmatch("[0-9a-f]{8}", value):
            self.refuse(name, value, "8 hexadecimal digits")
        return int(value, 16)

    def items(self, name: str) -> Iterator[tuple[str, Any]]:
        """(where, value) of every item of a list."""
        value = self.any(name)
        if not isinstance(value, list):
            self.refuse(name, value, "a list")
        return ((f"{self._where}: {name}[{i}]", item) for i, item in enumerate(value))

    def integers(self, name: str, most: int = LARGEST) -> tuple[int, ...]:
        """A list of whole numbers of 0 to `most`."""
        value = self.any(name)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= most for item in value):
            self.refuse(name, value, f"a list of whole numbers of 0 to {most}")
        return tuple(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, none of them twice."""
        value = self.any(name)
        if not isinstance(value, list) or not all(_is_text(each, 1, MOST_TEXT) for each in value):
            self.refuse(name, value, f"a list of strings of 1 to {MOST_TEXT} characters, without NUL, in UTF-8,")
        seen: set[str] = set()
        for each in value:
            if each in seen:
                raise ManifestError(f"{self._where}: {name}: {each!r} is listed twice")
            seen.add(each)
        return tuple(value)

    def names(self) -> list[str]:
        """The names that have not been read."""
        return list(self._left)

    def any(self, name: str) -> Any:
        """Whatever is there."""
        if name not in self._left:
            raise ManifestError(f"{self._where}: {name} is missing")
        return self._left.pop(name)

    def done(self) -> None:
        """Raises ManifestError when there are fields that nobody has read."""
        if self._left:
            raise ManifestError(f"{self._where}: {', '.join(map(repr, list(self._left)[:4]))}: no such field")

    def refuse(self, name: str, value: Any, due: str) -> NoReturn:
        """Raises ManifestError for a field."""
        raise ManifestError(f"{self._where}: {name} is {_kind(value)}; {due} is due")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is no finite number")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _is_text(value: Any, least: int, most: int) -> bool:
    """Whether it is a string that can be written again: JSON may smuggle half a surrogate pair in."""
    if not isinstance(value, str) or not least <= len(value) <= most or "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _kind(value: Any) -> str:
    """A value as an error shows it: itself if short, else its type."""
    try:
        shown = repr(value) if isinstance(value, (int, float, str, type(None))) else ""
    except ValueError:  # more digits than Python shows
        shown = ""
    names = {dict: "an object", list: "a list", str: "a string", int: "a number"}
    return shown if 0 < len(shown) <= 80 else names.get(type(value), type(value).__name__)


# ---- Plain: Python values as JSON and back, without pickle: what a client state, a scheduler or a generator's --------
# state is made of
#
#     None, bool, int, float, str, list, dict of strings          as JSON has them
#     tuple, set, bytes, dict with other keys, inf and nan        {"$": "tuple", "value": [...]}, ... ($ names the type)
#   torch.Tensor, numpy arrays and scalars, torch.dtype, Size   {"$": "tensor", "dtype": "float32", "shape": [2], "value": ...}
#
# Everything else is refused with its place in the value (`client_state['args']`), rather than pickled: what is opened
# must never execute anything. A decoded value equals what was encoded; dicts keep their order; an OrderedDict comes
# back as a dict.

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
