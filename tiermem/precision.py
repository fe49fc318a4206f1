"""Precision: in which format each part of a parameter's state is kept, and how it is rounded to it.

    master    fp32     kept beside a parameter of lower precision; an fp32 parameter is its own, whatever is asked
              split    the same fp32 number, to the bit, as the bf16 weight and the 16 bits that it lacks
              bf16, fp16    the weight itself is the master, so this must be the parameter's dtype
    moments   fp32, bf16, fp16, or 8bit: codes that share a scale byte, 64 at a time. What is below 6e-8 is 0 in fp16, as most
              of Adam's second moments are, and its steps explode: fp16 is for Lion and SGD
    grads     what gradients are accumulated and kept in from backward to step; None: the parameter's dtype
    rounding  of every part of the state below fp32 that a step stores. Nearest rounding stalls: with beta2 = 0.999 a bf16 v
              never moves, since 0.1 % of it is less than half of its last bit. Stochastic rounding
              does not, on average

    bytes of state per element of a bf16 parameter, Adam, each way
    exact 12 = 4 + 4 + 4 · compact 6 = 2 + 2 + 2 · bf16 4 = 2 + 2 · tiny 4.03 = 2 + 1 + 1 + 2/64

Random numbers come from a counter keyed by seed, step, the parameter's full name and the element's
number in it: the same whatever the ranks, tiles and threads. optimizers/ says which of these parts
a rule has, units/state_layout.py where they lie.

The file also holds `check_fields`, which compares the fields of Precision and of OffloadPolicy with
their annotations.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import math
import numbers
import types
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch

Master = Literal["fp32", "split", "bf16", "fp16"]
Moments = Literal["fp32", "bf16", "fp16", "8bit"]
Rounding = Literal["stochastic", "nearest"]
Mark = TypeVar("Mark")

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
"""The torch dtype of each name that has one."""


class Range(NamedTuple):
    """An annotation of a field: the numbers that it may hold."""

    said: str
    """Which numbers these are, as the end of the sentence of an error."""
    low: float
    high: float = math.inf
    is_whole: bool = False
    """Whether the field holds an int; a float without a fraction becomes one."""

    def holds(self, given: Any) -> bool:
        """Whether a value is one of these numbers; a bool is none."""
        is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
        return is_number and self.low <= given <= self.high and not (self.is_whole and given % 1)


def check_fields(value: object, context: str = "") -> None:
    """Raises ValueError for a field of a dataclass that is none of its Literal's words or its
    enumeration's members, outside its Range, or not of its class.

    A field whose annotation has None as well may hold None. The message begins with `context`.
    """
    for name, (allowed, words, classes) in _allowed(type(value)).items():  # type: ignore[arg-type]  # classes are hashable
        given = getattr(value, name)
        if isinstance(given, classes) or given in words:
            continue
        if allowed and allowed.holds(given):
            if allowed.is_whole and type(given) is not int:
                object.__setattr__(value, name, int(given))
            continue
        shown = (str(word) if isinstance(word, enum.Enum) else repr(word) for word in words)
        kinds = (f"{each.__name__}(...)" for each in classes)
        said = allowed.said if allowed else f"allowed are {', '.join((*shown, *kinds))}"
        raise ValueError(f"{context}{name} is {given!r}; {said}")


@functools.cache
def _allowed(cls: type) -> dict[str, tuple[Range | None, list[Any], tuple[type, ...]]]:
    """For each field that has a Range, words or dataclasses: these. None is a word where the
    annotation has it, so are True and False."""
    allowed = {}
    ranges = dict(marks_of(cls, Range))
    for name, parts in parts_of(cls).items():
        literals = [part for part in parts if typing.get_origin(part) is Literal]
        words = [word for literal in literals for word in typing.get_args(literal)]
        for part in parts:
            words += list(part) if isinstance(part, enum.EnumMeta) else ()
        words += [True, False] if bool in parts else ()
        classes: tuple[type, ...] = tuple(filter(dataclasses.is_dataclass, parts))
        classes = () if str in parts else classes  # what is given in several forms
        limit = ranges.get(name)
        if limit and int in parts and float not in parts:
            limit = limit._replace(is_whole=True)
        if limit or words or classes:
            allowed[name] = limit, [None, *words] if type(None) in parts else words, classes
    return allowed


@functools.cache
def marks_of(cls: type, kind: type[Mark]) -> list[tuple[str, Mark]]:
    """The annotations of one kind that fields of a dataclass have, each with its field; those of
    `X` in `X | None` too."""
    return [
        (name, mark)
        for name, hint in typing.get_type_hints(cls, include_extras=True).items()
        for part in (hint, *typing.get_args(hint))
        for mark in getattr(part, "__metadata__", ())
        if isinstance(mark, kind)
    ]


@functools.cache
def parts_of(cls: type) -> dict[str, tuple[Any, ...]]:
    """For each field the members of its union, or its only type, without annotations."""
    unions = (typing.Union, types.UnionType)
    return {
        name: typing.get_args(hint) if typing.get_origin(hint) in unions else (hint,)
        for name, hint in typing.get_type_hints(cls).items()
    }


def check_is_dtype(given: object) -> None:
    """Raises ValueError for what is neither a dtype of torch nor None."""
    if not isinstance(given, torch.dtype | None):
        raise ValueError(f"dtype is {given!r}; give one of torch's, such as torch.bfloat16")


@dataclasses.dataclass(frozen=True)
class Precision:
    """The formats of master, moments and gradients, and how a step rounds to them.

    master: of the value that is stepped; "split" is the 16 bits that a bf16 weight lacks. moments:
        "8bit" is codes of 8 bits, 64 of which share a scale.
    grads: what gradients are kept in between backward and step; None: the parameter's dtype.
    rounding: to formats below fp32, "stochastic" or "nearest".

    Raises ValueError for a value that is not allowed; whether it goes with a parameter's dtype is
    asked by `check_dtype`.
    """

    master: Master = "fp32"
    moments: Moments = "fp32"
    grads: Literal["fp32", "bf16", "fp16"] | None = None
    rounding: Rounding = "stochastic"
    seed: Annotated[
        int, Range("allowed are whole numbers from 0 to 2^64 - 1", 0, (1 << 64) - 1, is_whole=True)
    ] = 0
    """Of stochastic rounding."""

    def __post_init__(self) -> None:
        check_fields(self, "precision: ")

    @classmethod
    def preset(cls, name: str) -> Precision:
        """The precision of one of PRESETS. Raises ValueError for another name."""
        if name not in PRESETS:
            raise ValueError(f"precision: preset is {name!r}; allowed are {', '.join(PRESETS)}")
        return PRESETS[name]

    def master_of(self, dtype: torch.dtype) -> Literal["fp32", "split"] | None:
        """The format of the master kept beside a parameter of this dtype; None: the parameter is
        its own."""
        if dtype == torch.float32 or self.master in ("bf16", "fp16"):
            return None
        return "split" if self.master == "split" else "fp32"

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What the gradients of a parameter of this dtype are kept in until the step."""
        return dtype if self.grads is None else DTYPES[self.grads]

    def check_dtype(self, dtype: torch.dtype, name: str) -> None:
        """Raises ValueError when a parameter of this dtype cannot be kept so."""
        if dtype not in DTYPES.values():
            names = ", ".join(str(allowed) for allowed in DTYPES.values())
            raise ValueError(
                f"parameter {name!r} is {dtype}; an optimizer steps {names}: convert it, or freeze "
                "it"
            )
        if dtype == torch.float32:
            return
        if self.master == "split" and dtype != torch.bfloat16:
            raise ValueError(
                f"precision: master is 'split' and parameter {name!r} is {dtype}; a split master "
                "is the 16 bits that an fp32 number lacks beside its upper 16, which are a bf16 "
                "number, and fp16 has another exponent. Train in bfloat16, or set master='fp32'"
            )
        if self.master in ("bf16", "fp16") and DTYPES[self.master] != dtype:
            raise ValueError(
                f"precision: master is {self.master!r} and parameter {name!r} is {dtype}; with a "
                "master below fp32 the weight itself is the master, so both are of one dtype. "
                "Change the parameter's, or set master='fp32'"
            )

    def key(self, name: str) -> int:
        """What stochastic rounding of a parameter is keyed by: seed and full name, mixed into 64
        bits."""
        text = name.encode(errors="surrogatepass")
        seed = self.seed.to_bytes(8, "little")
        digest = hashlib.blake2b(text, digest_size=8, key=seed)
        return int.from_bytes(digest.digest(), "little")

    @property
    def is_stochastic(self) -> bool:
        """Whether low-precision parts of the state are rounded stochastically."""
        return self.rounding == "stochastic"


PRESETS: Mapping[str, Precision] = MappingProxyType(
    {
        "exact": Precision(),
        "compact": Precision(master="split", moments="bf16"),
        "bf16": Precision(master="bf16", moments="bf16", grads="bf16", rounding="nearest"),
        "tiny": Precision(master="split", moments="8bit"),
    }
)
"""Precisions by name; `bf16` is the reference system's own."""
