"""Fields: strict readers of JSON files, and Python values as JSON without pickle."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import gc
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, cast

import numpy as np
import pydantic
import torch
from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    TypeAdapter,
)
from pydantic_core import PydanticSerializationError, core_schema
from typing_extensions import dataclass_transform

from tiermem.checkpoint.format.kinds import DTYPES, dtype_of, name_of
from tiermem.swap.base.native import crc32c_of
from tiermem.weights_io import once

# ---- the CRC-32C of a file's text (for states: swap/store/checksum.py) ---------------------------


def crc32c(data: bytes | memoryview) -> int:
    """The CRC-32C (Castagnoli) of bytes, as in RFC 3720, B.4."""
    view = np.frombuffer(data, np.uint8)
    return int(
        crc32c_of(np.array([view.ctypes.data], np.uint64), np.array([len(data)], np.uint64))[0]
    )


# ---- strict readers of JSON files ----------------------------------------------------------------
#
#     text(data, source)    bytes -> one JSON object: UTF-8, no NaN, no key twice
#     Whole, Name, ...      the types of fields, for pydantic: `num_bytes: Annotated[Whole, Field(alias="bytes")]`
#     record                a class of such fields; `read` and `write` convert it; an unknown key is an error
#
# Files may be hostile. Every error is a ManifestError that names the file and the field. Nothing in
# a file is executed. Time is linear in a file's bytes. The result takes at most 26 bytes of memory
# for each byte of the file, usually 5: lists stop at their first error (FailFast), and an object
# with more keys than fields is refused before its fields are read.

T = TypeVar("T")

Json = Any
"""A value of json.loads: None, bool, int, float, str, or a list or dict of them."""

LARGEST = (1 << 63) - 1
MOST_TEXT = 4096  # characters of a name or a path
MOST_BYTES = 1 << 28  # of a manifest or part: enough for 20 TB of states, at 12 bytes for each MiB
_TRAILER = re.compile(rb',"crc32c":"([0-9a-f]{8})"\}\n\Z')
_TRAILER_BYTES = len(b',"crc32c":"00000000"}\n')


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disables Python's garbage collector. A checkpoint takes an object or more for each state, and
    no cycle. They would trigger collections of the whole heap, which take longer than all the
    rest."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ManifestError(ValueError):
    """A file of a checkpoint is invalid or damaged. The text names the file and the field."""


def seal(content: Mapping[str, Any], record: Any = None) -> bytes:
    """The bytes of a JSON file: one object on one line, whose last field is the CRC-32C of all
    bytes before it.

    record: its fields follow `content`, which is not empty then.
    """
    fields = b""
    if record is not None:
        try:  # without a Python object for each value
            fields = (
                b","
                + _adapter(cast(Hashable, type(record))).dump_json(
                    record, by_alias=True, warnings=False
                )[1:-1]
            )
        # half a surrogate pair, which JSON holds only as an escape
        except PydanticSerializationError:
            content = {**content, **write(record)}
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[:-1] + fields
    return body + b',"crc32c":"%08x"}\n' % crc32c(body)


def unseal(data: bytes, source: str) -> dict[str, Any]:
    """The object of a sealed file, without its CRC. Raises ManifestError for a file that is cut,
    damaged or not sealed."""
    if len(data) > MOST_BYTES:
        raise ManifestError(f"{source}: has {len(data)} bytes; {MOST_BYTES} are allowed")
    match = _TRAILER.search(data, max(0, len(data) - _TRAILER_BYTES))
    if match is None:
        raise ManifestError(
            f"{source}: its {len(data)} bytes do not end as a checkpoint's file does: it was cut, "
            "or is another file"
        )
    said = int(match[1], 16)
    found = crc32c(memoryview(data)[: match.start()])
    if found != said:
        raise ManifestError(
            f"{source}: crc32c is {found:08x} and the file says {said:08x}: it is damaged"
        )
    content = text(data, source)
    del content["crc32c"]
    return content


def text(data: bytes, source: str) -> dict[str, Any]:
    """The JSON object of a file. Raises ManifestError."""
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=once, parse_float=_finite, parse_constant=_refuse
        )
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{source}: is not JSON that a checkpoint holds: {error}") from None
    if not isinstance(value, dict):
        raise ManifestError(f"{source}: holds {_kind(value)} where an object is due")
    return value


@dataclass_transform(frozen_default=True)
def record(kind: type[T]) -> type[T]:
    """Makes a class of fields a frozen dataclass for `read` and `write`; its JSON has no other
    keys."""
    return pydantic.with_config(extra="forbid")(
        dataclasses.dataclass(frozen=True, slots=True)(kind)
    )


def read(kind: type[T], value: Json, source: str) -> T:
    """A record from JSON, or a value of another type that pydantic knows. Raises ManifestError (a
    ValueError).

    A key that is none of a record's fields is an error.
    """
    adapter: TypeAdapter[T] = _adapter(cast(Hashable, kind))
    try:
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise ManifestError(f"{source}: {_said(error.errors(include_url=False)[0])}") from None


def write(value: Any) -> dict[str, Json]:
    """A record as JSON."""
    found: dict[str, Json] = _adapter(cast(Hashable, type(value))).dump_python(
        value, by_alias=True, warnings=False
    )
    return found


def whole(most: int = LARGEST, least: int = 0) -> Any:
    """The bounds of a whole number."""
    return Field(strict=True, ge=least, le=most)


def string(most: int = MOST_TEXT) -> Any:
    """The bounds of a string: 1 to `most` characters, without NUL and half surrogate pairs, which
    UTF-8 cannot hold."""
    return Field(strict=True, min_length=1, max_length=most, pattern=r"^[^\x00]*$")


def one_of(allowed: Collection[str]) -> GetPydanticSchema:
    """One of these strings. It runs no Python code per value."""
    return GetPydanticSchema(lambda *_: core_schema.literal_schema(sorted(allowed)))


def _few_keys(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MOST_KEYS:
        raise ValueError(f"{len(value)} keys are more than any such object has")
    return value


def _different(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise ValueError(f"{twice!r} is listed twice")
    return names


def _crc(value: Any) -> int:
    is_crc = isinstance(value, str) and re.fullmatch("[0-9a-f]{8}", value) is not None
    return int(_checked(value, is_crc, "a string of 8 hexadecimal digits"), 16)


def _plain(value: Json) -> Json:
    decode(value, "value")
    return value


_MOST_KEYS = 32  # more than any record has
Whole = Annotated[int, whole()]
Name = Annotated[str, string()]
Names = Annotated[tuple[Name, ...], FailFast(), AfterValidator(_different)]
"""Different strings."""
Digest = Annotated[int, BeforeValidator(_crc), PlainSerializer(lambda crc: f"{crc:08x}")]
"""A CRC-32C; 8 hexadecimal digits in the file."""
Plain = Annotated[Json, AfterValidator(_plain)]
"""A value that `decode` accepts; it stays encoded."""
Records = Annotated[tuple[Annotated[T, BeforeValidator(_few_keys)], ...], FailFast()]
"""A list of records."""


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(
        Annotated[kind, BeforeValidator(_few_keys)] if dataclasses.is_dataclass(kind) else kind
    )


def _said(detail: Any) -> str:
    """An error of pydantic: the field, its value and the allowed values."""
    where = ""
    for each in detail["loc"]:
        where += f"[{each}]" if isinstance(each, int) else f"{': ' if where else ''}{each:.80}"
    if (found := _SAID.get(detail["type"])) is not None:
        return f"{where}{found}"
    if detail["type"] == "value_error":
        return f"{where}: {detail['ctx']['error']}"
    return f"{where} is {_kind(detail['input'])}; {detail['msg'].replace('Input', 'it', 1)}"


_SAID = {
    "missing": " is missing",
    "unexpected_keyword_argument": ": no such field",
    "string_pattern_mismatch": ": NUL is not allowed in a string",
}


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is no finite number")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _kind(value: Any) -> str:
    """A value as an error shows it: itself if it is short, else its type."""
    try:
        shown = repr(value) if isinstance(value, (int, float, str, type(None))) else ""
    except ValueError:  # more digits than Python shows
        shown = ""
    names = {dict: "an object", list: "a list", str: "a string", int: "a number"}
    return shown if 0 < len(shown) <= 80 else names.get(type(value), type(value).__name__)


# ---- Python values as JSON, without pickle -------------------------------------------------------
#
# For client states, schedulers and generators:
#
#     None, bool, int, float, str, list, dict of strings          as JSON
#     tuple, set, bytes, dict with other keys, inf and nan        {"$": "tuple", "value": [...]}, ... ($ names the type)
#     Counter, which torch's MultiStepLR saves                    {"$": "counter", "value": [[key, count], ...]}
#     torch.Tensor, numpy arrays and scalars, torch.dtype, Size   {"$": "tensor", "dtype": "fp32", "shape": [2], "value": ...}
#
# `encode` refuses any other type instead of pickling it, because opening a checkpoint must never
# execute code. A decoded value equals the encoded one. Dicts keep their order; an OrderedDict comes
# back as a dict.

_TYPE = "$"
_MOST_DEPTH = 100
_MOST_ALIKE = 100


def encode(value: Any, where: str, depth: int = 0) -> Json:
    """A value as JSON. Raises TypeError for a type that cannot be saved; it names the type and
    `where` the value is."""
    if (
        value is None
        or type(value) in (bool, int, str)
        or (type(value) is float and math.isfinite(value))
    ):
        return value
    if depth > _MOST_DEPTH:
        raise TypeError(
            f"{where} is nested deeper than {_MOST_DEPTH}: lists and dicts of that depth cannot be "
            "saved"
        )
    if type(value) is list:
        return _encode_items(value, where, depth)
    if (
        type(value) in (dict, OrderedDict)
        and all(type(key) is str for key in value)
        and _TYPE not in value
    ):
        return {key: encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    for name, codec in _CODECS.items():
        if type(value) in codec.kinds or (codec.takes_more and isinstance(value, codec.kinds)):
            said = codec.write(value, where, depth)
            return {_TYPE: name, **(said if codec.is_array else {"value": said})}
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: "
        "a checkpoint holds numbers, strings, lists, tuples, sets, dicts, bytes, tensors and "
        "arrays, and nothing is pickled. Save what it is made of"
    )


def decode(value: Json, where: str, depth: int = 0) -> Any:
    """The Python value of encoded JSON. Raises ManifestError, naming the place, for JSON that
    `encode` never writes."""
    if depth > 2 * _MOST_DEPTH:
        raise ManifestError(f"{where[:200]}: is nested deeper than {_MOST_DEPTH}")
    if isinstance(value, list):
        return [
            decode(item, f"{where}[{i}]" if depth < 3 else where, depth + 1)
            for i, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    if _TYPE not in value:
        return {
            key: decode(item, f"{where}[{key!r:.80}]" if depth < 3 else where, depth + 1)
            for key, item in value.items()
        }
    try:
        codec = _CODECS[kind := _among(value[_TYPE], _CODECS)]
        due = ("dtype", "shape", "value") if codec.is_array else ("value",)
        _checked(
            value, value.keys() == {_TYPE, *due}, f"{', '.join(due)} of a {kind}, and nothing else,"
        )
        return codec.read(value if codec.is_array else value["value"], where, depth)
    except ManifestError:
        raise
    except (ValueError, TypeError) as error:
        raise ManifestError(f"{where[:200]}: {str(error)[:300]}") from None


def _encode_items(value: Iterable[Any], where: str, depth: int) -> Json:
    return [encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]


def _encode_dict(value: Mapping[Any, Any], where: str, depth: int) -> Json:
    return [
        [encode(key, f"a key of {where}", depth + 1), encode(item, f"{where}[{key!r}]", depth + 1)]
        for key, item in value.items()
    ]


def _encode_tensor(value: torch.Tensor, where: str, depth: int) -> Json:
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        raise TypeError(
            f"{where} is a tensor of {value.layout} on {value.device}; dense ones with values can "
            "be saved"
        )
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
        raise TypeError(
            f"{where} is an array of {array.dtype}; those of numbers and bools can be saved"
        )
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    return {
        "dtype": array.dtype.str[1:],
        "shape": list(array.shape),
        "value": _base64(little.tobytes()),
    }


# Readers raise ValueError or TypeError for JSON that is never written; `decode` names the place.


def _decode_items(value: Json, where: str, depth: int) -> Any:
    return decode(_checked(value, isinstance(value, list), "a list"), where, depth)


def _decode_dict(value: Json, where: str, depth: int) -> dict[Any, Any]:
    pairs = _decode_items(value, where, depth - 1)
    for pair in pairs:
        _checked(pair, isinstance(pair, list) and len(pair) == 2, "a list of a key and a value")
    return dict(zip(_spread([key for key, _ in pairs]), [item for _, item in pairs], strict=True))


def _spread(keys: list[Any]) -> list[Any]:
    """Keys of a dict or a set. Raises ValueError where so many have one hash that time would grow
    with their square."""
    most = max(Counter(map(hash, keys)).values(), default=0)
    return cast(
        list[Any], _checked(keys, most <= _MOST_ALIKE, f"at most {_MOST_ALIKE} keys with one hash")
    )


def _decode_complex(value: Json, where: str, depth: int) -> complex:
    real, imag = (float(each[:40]) for each in value)
    return complex(real, imag)


def _decode_tensor(value: Json, where: str, depth: int) -> torch.Tensor:
    dtype = dtype_of(_among(value["dtype"], DTYPES))
    shape, raw = _shape_and_bytes(value, dtype.itemsize)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(dtype).view(shape)


def _decode_array(value: Json, where: str, depth: int) -> Any:
    dtype = np.dtype("<" + _among(value["dtype"], _ARRAYS))
    shape, raw = _shape_and_bytes(value, dtype.itemsize)
    # a copy: writable
    return np.frombuffer(raw, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _decode_scalar(value: Json, where: str, depth: int) -> Any:
    array = _decode_array(value, where, depth)
    return _checked(array, array.shape == (), "a value without dimensions")[()]


def _decode_bytes(value: Json, *_: Any) -> bytes:
    return base64.b64decode(
        _checked(value, isinstance(value, str), "a string in base64"), validate=True
    )


def _shape_and_bytes(value: Json, itemsize: int) -> tuple[tuple[int, ...], bytes]:
    shape = _sizes(value["shape"])
    raw = _decode_bytes(value["value"])
    is_small = len(shape) <= 32 and math.prod(max(size, 1) for size in shape) <= 1 << 48
    _checked(value["shape"], is_small, f"at most 32 dimensions and {1 << 48} elements")
    _checked(
        len(raw),
        len(raw) == math.prod(shape) * itemsize,
        f"{math.prod(shape) * itemsize} bytes, in base64,",
    )
    return shape, raw


def _sizes(value: Json) -> tuple[int, ...]:
    fits = isinstance(value, list) and all(type(n) is int and 0 <= n <= LARGEST for n in value)
    return tuple(_checked(value, fits, f"a list of whole numbers of 0 to {LARGEST}"))


def _among(value: Json, allowed: Collection[str]) -> str:
    is_one = isinstance(value, str) and value in allowed
    return str(_checked(value, is_one, f"one of {', '.join(sorted(allowed))}"))


def _checked(value: Any, fits: bool, due: str) -> Any:
    if not fits:
        raise ValueError(f"{_kind(value)} is there; {due} is due")
    return value


class _Codec(NamedTuple):
    """How values of a type are written and read: as {"value": ...}, or with a dtype and a shape if
    `is_array`."""

    kinds: tuple[type, ...]
    write: Callable[[Any, str, int], Json]
    read: Callable[[Json, str, int], Any]
    takes_more: bool = True  # also accepts subclasses, which hold nothing more
    is_array: bool = False


_ARRAYS = frozenset(
    [
        "b1",
        *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)),
        "f2",
        "f4",
        "f8",
        "c8",
        "c16",
    ]
)
_NOT_FINITE = ("inf", "-inf", "nan")
_CODECS: dict[str, _Codec] = {
    "float": _Codec(
        (float,), lambda v, *_: str(v), lambda v, *_: float(_among(v, _NOT_FINITE)), False
    ),
    "dict": _Codec((dict, OrderedDict), _encode_dict, _decode_dict, False),
    "counter": _Codec(
        (Counter,), _encode_dict, lambda *given: Counter(_decode_dict(*given)), False
    ),
    "size": _Codec((torch.Size,), _encode_items, lambda value, *_: torch.Size(_sizes(value))),
    "tuple": _Codec((tuple,), _encode_items, lambda *given: tuple(_decode_items(*given)), False),
    "set": _Codec((set,), _encode_items, lambda *given: set(_spread(_decode_items(*given))), False),
    "frozenset": _Codec(
        (frozenset,), _encode_items, lambda *given: frozenset(_spread(_decode_items(*given))), False
    ),
    "tensor": _Codec(
        (torch.Tensor, torch.nn.Parameter), _encode_tensor, _decode_tensor, False, True
    ),
    "bytes": _Codec((bytes,), lambda value, *_: _base64(value), _decode_bytes),
    "scalar": _Codec((np.generic,), _encode_array, _decode_scalar, is_array=True),
    "ndarray": _Codec((np.ndarray,), _encode_array, _decode_array, is_array=True),
    "dtype": _Codec(
        (torch.dtype,), lambda v, *_: name_of(v), lambda v, *_: dtype_of(_among(v, DTYPES))
    ),
    "complex": _Codec(
        (complex,), lambda value, *_: [str(value.real), str(value.imag)], _decode_complex
    ),
}
"""Codecs by the name in "$". The first codec that accepts a value writes it."""


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
