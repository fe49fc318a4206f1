"""Kinds: how the elements of a piece of a state are stored, and how many bytes they take.

    fp32 bf16 fp16 int64 ...   numbers as torch keeps them, little-endian
    split                      int16, the bits that the bf16 weight lacks of its fp32 master (zero/state_layout.py)
    8bit, 8bit-scales          a code per element, one scale byte for 64: a moment (native/tiermem.h)
    packed, packed-scales      an int8 code per element, one fp32 scale for 64: a frozen weight (zero/quantised.py)

Blocks of 64 are counted from the first element of the piece that they lie in; the last one of a piece may be shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

BLOCK = 64  # elements that share a scale
SCALES = ".scales"
"""What the name of a state ends in that holds the scales of another."""
OF_RANK = ".rank"
"""Comes behind the name of a state that is not the same on every rank, before the rank."""

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    | {
        str(dtype).removeprefix("torch."): dtype
        for dtype in (
            torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
            torch.uint64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
        )
    }
)  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

SPLIT, CODES, CODE_SCALES, PACKED, PACKED_SCALES = "split", "8bit", "8bit-scales", "packed", "packed-scales"
DTYPES = frozenset(_DTYPES)
KINDS = DTYPES | {SPLIT, CODES, CODE_SCALES, PACKED, PACKED_SCALES}
SCALED, OF_SCALES = frozenset({CODES, PACKED}), frozenset({CODE_SCALES, PACKED_SCALES})
"""Codes, whose scales are a state of their own, and those scales."""


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in a manifest. Raises ValueError for one that has none (quantised, sub-byte)."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"tensors of {dtype} cannot be saved; allowed are {', '.join(map(str, _NAMES))}") from None


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name; KeyError for a kind that is none."""
    return _DTYPES[name]


def bytes_of(kind: str, numel: int) -> int:
    """Bytes of so many elements from the first of a piece on."""
    if kind in SCALED:
        return numel
    if kind in OF_SCALES:
        return -(-numel // BLOCK) * (1 if kind == CODE_SCALES else 4)
    return numel * (2 if kind == SPLIT else _DTYPES[kind].itemsize)


def grain_of(kind: str) -> tuple[int, int]:
    """The fewest bytes that hold whole elements, and how many those are: a block's, where there are scales."""
    return bytes_of(kind, 1), BLOCK if kind in OF_SCALES else 1


def scales_of(state: str) -> str:
    """The name of the state that holds the scales of one in 8 bits."""
    base, dot, rank = state.partition(OF_RANK)
    return f"{base}{SCALES}{dot}{rank}"
