"""Fields: strict readers of JSON files, and Python values as JSON without pickle."""

from __future__ import annotations

import base64
import binascii
import functools
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar, get_type_hints

import numpy as np
import torch

from tiermem.checkpoint.format.kinds import DTYPES, dtype_of, name_of
from tiermem.swap.native import crc32c_of

# ---- the CRC-32C of a file's text (for states: swap/checksum.py) -----------------------------------------------------


def crc32c(data: bytes | memoryview) -> int:
    """The CRC-32C (Castagnoli) of bytes, as in RFC 3720, B.4."""
    view = np.frombuffer(data, np.uint8)
    return int(crc32c_of(np.array([view.ctypes.data], np.uint64), np.array([len(data)], np.uint64))[0])


# ---- strict readers of JSON files ------------------------------------------------------------------------------------
#
#     text(data, source)    bytes -> one JSON object: UTF-8, no NaN, no key twice
#     Fields(...)           the keys of an object; each is read once, and an unread key is an error
#     Rule                  how the value of a field is checked, read and written
#     read, write           a record whose annotations hold the rules: `num_bytes: Annotated[int, whole(), "bytes"]`
#
# Files may be hostile. Every error is a ManifestError that names the file and the field. Nothing in a file is executed.
# Time is linear in a file's bytes. The result takes at most 26 bytes of memory for each byte of the file, usually 5.

T = TypeVar("T")

Json = Any
"""A value of json.loads: None, bool, int, float, str, or a list or dict of them."""

LARGEST = (1 << 63) - 1
MOST_TEXT = 4096  # characters of a name or a path
MOST_BYTES = 1 << 28  # of a manifest or part: enough for 20 TB of states, at 12 bytes for each MiB
_TRAILER = re.compile(rb',"crc32c":"([0-9a-f]{8})"\}\n\Z')
_TRAILER_BYTES = len(b',"crc32c":"00000000"}\n')


class ManifestError(ValueError):
    """A file of a checkpoint is invalid or damaged. The text names the file and the field."""


def seal(content: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON file: one object on one line, whose last field is the CRC-32C of all bytes before it."""
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + b',"crc32c":"%08x"}\n' % crc32c(body)


def unseal(data: bytes, source: str) -> dict[str, Any]:
    """The object of a sealed file, without its CRC. Raises ManifestError for a file that is cut, damaged or not sealed."""
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
    """The keys of one JSON object. Raises ManifestError if the value is not an object.

    Args:
        value: the value in the file.
        where: the file and the field, for errors.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise ManifestError(f"{where}: is {_kind(value)}; an object is due")
        self._left = dict(value)

    def any(self, name: str) -> Any:
        """Any value. Raises ManifestError if the field is missing."""
        if name not in self._left:
            raise ManifestError(f"{self.where}: {name} is missing")
        return self._left.pop(name)

    def items(self, name: str) -> Iterator[tuple[str, Any]]:
        """(where, value) of every item of a list."""
        value = self.any(name)
        if not isinstance(value, list):
            self.refuse(name, value, "a list")
        return ((f"{self.where}: {name}[{i}]", item) for i, item in enumerate(value))

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of different strings."""
        value = self.any(name)
        if not isinstance(value, list) or not all(_is_text(each, MOST_TEXT) for each in value):
            self.refuse(name, value, f"a list of strings of 1 to {MOST_TEXT} characters, without NUL, in UTF-8,")
        seen: set[str] = set()
        for each in value:
            if each in seen:
                raise ManifestError(f"{self.where}: {name}: {each!r} is listed twice")
            seen.add(each)
        return tuple(value)

    def names(self) -> list[str]:
        """The names of fields that have not been read."""
        return list(self._left)

    def done(self) -> None:
        """Raises ManifestError when a field has not been read."""
        if self._left:
            raise ManifestError(f"{self.where}: {', '.join(map(repr, list(self._left)[:4]))}: no such field")

    def refuse(self, name: str, value: Any, due: str) -> NoReturn:
        """Raises ManifestError for a field."""
        raise ManifestError(f"{self.where}: {name} is {_kind(value)}; {due} is due")


class Rule(NamedTuple):
    """How a field is read, and how its value is written. Reading may raise ManifestError."""

    read: Callable[[Fields, str], Any]
    write: Callable[[Any], Json] = lambda value: value


def rule(fits: Callable[[Any], Any], due: str, make: Callable[[Any], Any] | None = None) -> Rule:
    """A rule for values that `fits` accepts. `due` describes them in errors; `make` converts an accepted value."""

    def read(fields: Fields, name: str) -> Any:
        value = fields.any(name)
        if not fits(value):
            fields.refuse(name, value, due)
        return value if make is None else make(value)

    return Rule(read)


def whole(most: int = LARGEST, least: int = 0) -> Rule:
    """A whole number within bounds."""
    return rule(lambda value: type(value) is int and least <= value <= most, f"a whole number of {least} to {most}")


def wholes(most: int = LARGEST) -> Rule:
    """A list of whole numbers of 0 to `most`."""
    due = f"a list of whole numbers of 0 to {most}"
    return rule(lambda value: are_whole(value, most), due, tuple)


def are_whole(value: Any, most: int = LARGEST) -> bool:
    """Whether a value is a list of whole numbers of 0 to `most`. It runs no Python code per number."""
    is_list = isinstance(value, list)
    return is_list and (not value or ({*map(type, value)} == {int} and min(value) >= 0 and max(value) <= most))


def string(most: int = MOST_TEXT) -> Rule:
    """A string of 1 to `most` characters, without NUL and half surrogate pairs."""
    due = f"a string of 1 to {most} characters, without NUL, that UTF-8 can hold,"
    return rule(lambda value: _is_text(value, most), due)


def one_of(allowed: Collection[str]) -> Rule:
    """One of these strings."""
    return rule(lambda value: isinstance(value, str) and value in allowed, f"one of {', '.join(sorted(allowed))}")


def records(kind: type[Any]) -> Rule:
    """A list of records."""
    return Rule(
        lambda fields, name: tuple(read(kind, Fields(value, where)) for where, value in fields.items(name)),
        lambda found: [write(each) for each in found],
    )


FLAG = rule(lambda value: type(value) is bool, "true or false")
NAMES = Rule(Fields.texts)
DIGEST = Rule(
    rule(
        lambda v: isinstance(v, str) and re.fullmatch("[0-9a-f]{8}", v), "8 hexadecimal digits", lambda v: int(v, 16)
    ).read,
    "{:08x}".format,
)
"""A CRC-32C."""


def read(kind: type[T], fields: Fields) -> T:
    """Reads a record. Raises ManifestError, also for fields that the record does not have."""
    found = kind(**{attribute: rule.read(fields, name) for attribute, name, rule in _keys(kind)})  # type: ignore[arg-type]
    fields.done()
    return found


def write(record: Any) -> dict[str, Json]:
    """A record as JSON."""
    return {name: rule.write(getattr(record, attribute)) for attribute, name, rule in _keys(type(record))}  # type: ignore[arg-type]


@functools.cache
def _keys(kind: Any) -> list[tuple[str, str, Rule]]:
    """(attribute, name in the file, rule) of each attribute of a record. The name follows the rule if it differs."""
    hints = get_type_hints(kind, include_extras=True)
    return [(name, (*hint.__metadata__, name)[1], hint.__metadata__[0]) for name, hint in hints.items()]


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


def _is_text(value: Any, most: int) -> bool:
    """Whether a value is a string that UTF-8 can hold. JSON escapes can encode half a surrogate pair, which UTF-8 cannot."""
    if not isinstance(value, str) or not 0 < len(value) <= most or "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _kind(value: Any) -> str:
    """A value as an error shows it: itself if it is short, else its type."""
    try:
        shown = repr(value) if isinstance(value, (int, float, str, type(None))) else ""
    except ValueError:  # more digits than Python shows
        shown = ""
    names = {dict: "an object", list: "a list", str: "a string", int: "a number"}
    return shown if 0 < len(shown) <= 80 else names.get(type(value), type(value).__name__)


# ---- Python values as JSON, without pickle ---------------------------------------------------------------------------
#
# For client states, schedulers and generators:
#
#     None, bool, int, float, str, list, dict of strings          as JSON
#     tuple, set, bytes, dict with other keys, inf and nan        {"$": "tuple", "value": [...]}, ... ($ names the type)
#     torch.Tensor, numpy arrays and scalars, torch.dtype, Size   {"$": "tensor", "dtype": "fp32", "shape": [2], "value": ...}
#
# `encode` refuses any other type instead of pickling it, because opening a checkpoint must never execute code. A decoded
# value equals the encoded one. Dicts keep their order; an OrderedDict comes back as a dict.

_TYPE = "$"
_MOST_DEPTH = 100


def encode(value: Any, where: str, depth: int = 0) -> Json:
    """A value as JSON. Raises TypeError for a type that cannot be saved; it names the type and `where` the value is."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if depth > _MOST_DEPTH:
        raise TypeError(f"{where} is nested deeper than {_MOST_DEPTH}: lists and dicts of that depth cannot be saved")
    if type(value) is list:
        return _encode_items(value, where, depth)
    if type(value) in (dict, OrderedDict) and all(type(key) is str for key in value) and _TYPE not in value:
        return {key: encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    for name, codec in _CODECS.items():
        if type(value) in codec.kinds or (codec.takes_more and isinstance(value, codec.kinds)):
            said = codec.write(value, where, depth)
            return {_TYPE: name, **(said if isinstance(said, dict) else {"value": said})}
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: a checkpoint holds numbers, "
        "strings, lists, tuples, sets, dicts, bytes, tensors and arrays, and nothing is pickled. Save what it is made of"
    )


def decode(value: Json, where: str, depth: int = 0) -> Any:
    """The Python value of encoded JSON. Raises ManifestError, naming the place, for JSON that `encode` never writes."""
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
    found = _CODECS[one_of(_CODECS).read(fields, _TYPE)].read(fields, where, depth + 1)
    fields.done()
    return found


def _read_plain(fields: Fields, name: str) -> Json:
    value = fields.any(name)
    decode(value, f"{fields.where}: {name}")
    return value


PLAIN = Rule(_read_plain)
"""A value that `decode` accepts; it stays encoded."""


def _encode_items(value: Iterable[Any], where: str, depth: int) -> Json:
    return [encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]


def _encode_dict(value: Mapping[Any, Any], where: str, depth: int) -> Json:
    return [
        [encode(key, f"a key of {where}", depth + 1), encode(item, f"{where}[{key!r}]", depth + 1)]
        for key, item in value.items()
    ]


def _encode_tensor(value: torch.Tensor, where: str, depth: int) -> Json:
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        raise TypeError(f"{where} is a tensor of {value.layout} on {value.device}; dense ones with values can be saved")
    try:
        name = name_of(value.dtype)
    except ValueError as error:
        raise TypeError(f"{where}: {error}") from None
    flat = value.detach().cpu().contiguous().view(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {"dtype": name, "shape": list(value.shape), "value": _base64(raw)}


def _encode_array(value: np.ndarray[Any, Any] | np.generic, where: str, depth: int) -> Json:
    array = np.asarray(value)
    if array.dtype.str[1:] not in _ARRAYS:
        raise TypeError(f"{where} is an array of {array.dtype}; those of numbers and bools can be saved")
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    return {"dtype": array.dtype.str[1:], "shape": list(array.shape), "value": _base64(little.tobytes())}


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


def _decode_items(fields: Fields, where: str, depth: int) -> list[Any]:
    return [decode(item, place, depth) for place, item in fields.items("value")]


def _decode_keys(fields: Fields, where: str, depth: int) -> list[Any]:
    return [_hashable(item, "an item of a set") for item in _decode_items(fields, where, depth)]


def _decode_tensor(fields: Fields, where: str, depth: int) -> torch.Tensor:
    dtype, shape = dtype_of(_DTYPE.read(fields, "dtype")), _SHAPE.read(fields, "shape")
    raw = _raw(fields, math.prod(shape) * dtype.itemsize, shape)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(dtype).view(shape)


def _decode_array(fields: Fields, where: str, depth: int) -> Any:
    dtype = np.dtype("<" + one_of(_ARRAYS).read(fields, "dtype"))
    shape = _SHAPE.read(fields, "shape")
    raw = _raw(fields, math.prod(shape) * dtype.itemsize, shape)
    return np.frombuffer(raw, dtype).reshape(shape).astype(dtype.newbyteorder("="))  # a copy: writable


def _decode_scalar(fields: Fields, where: str, depth: int) -> Any:
    array = _decode_array(fields, where, depth)
    if array.shape != ():
        raise ManifestError(f"{where[:200]}: a scalar has no dimensions")
    return array[()]


class _Codec(NamedTuple):
    """How values of a type are written, as {"value": ...} or with more fields, and how they are read."""

    kinds: tuple[type, ...]
    write: Callable[[Any, str, int], Json]
    read: Callable[[Fields, str, int], Any]
    takes_more: bool = True  # also accepts subclasses, which hold nothing more


_ARRAYS = frozenset(["b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8", "c8", "c16"])
_DTYPE, _SHAPE = one_of(DTYPES), wholes()
_NOT_FINITE = one_of(("inf", "-inf", "nan"))
_CODECS: dict[str, _Codec] = {
    "float": _Codec((float,), lambda v, *_: str(v), lambda fields, *_: float(_NOT_FINITE.read(fields, "value")), False),
    "dict": _Codec((dict, OrderedDict), _encode_dict, _decode_dict, False),
    "size": _Codec((torch.Size,), _encode_items, lambda fields, *_: torch.Size(_SHAPE.read(fields, "value"))),
    "tuple": _Codec((tuple,), _encode_items, lambda *given: tuple(_decode_items(*given)), False),
    "set": _Codec((set,), _encode_items, lambda *given: set(_decode_keys(*given)), False),
    "frozenset": _Codec((frozenset,), _encode_items, lambda *given: frozenset(_decode_keys(*given)), False),
    "tensor": _Codec((torch.Tensor, torch.nn.Parameter), _encode_tensor, _decode_tensor, False),
    "bytes": _Codec((bytes,), lambda value, *_: _base64(value), lambda fields, *_: _raw(fields, None, ())),
    "scalar": _Codec((np.generic,), _encode_array, _decode_scalar),
    "ndarray": _Codec((np.ndarray,), _encode_array, _decode_array),
    "dtype": _Codec(
        (torch.dtype,), lambda value, *_: name_of(value), lambda fields, *_: dtype_of(_DTYPE.read(fields, "value"))
    ),
    "complex": _Codec((complex,), lambda value, *_: [str(value.real), str(value.imag)], _decode_complex),
}
"""Codecs by the name in "$". The first codec that accepts a value writes it."""


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _raw(fields: Fields, due: int | None, shape: tuple[int, ...]) -> bytes:
    """The bytes of a base64 field. Raises ManifestError unless there are `due` bytes; None accepts any number."""
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
