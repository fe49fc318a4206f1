"""Kinds: how the elements of a piece of a state are stored, and how many bytes they take.

    fp32 bf16 fp16 int64 ...   numbers in torch's layout, little-endian
    split                      int16: the 16 bits of an fp32 master that its bf16 weight does not hold (units/state_layout.py)
    8bit, 8bit-scales          a moment: one byte per element, one scale byte per 64 elements (native/tiermem.h)
    packed, packed-scales      a frozen weight: one int8 per element, one fp32 scale per 64 elements (units/quantised.py)
    nf4, packed-scales         a frozen weight: two elements per byte, one fp32 scale per 64 elements (the same)

Blocks of 64 elements start at the first element of a piece. The last block of a piece may be
shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

BLOCK = 64  # elements that share a scale
SCALES = ".scales"
"""The name of a state that holds scales is the name of the scaled state and this suffix."""
OF_RANK = ".rank"
"""Stands between the name of a state and a rank, for a state that differs between ranks."""

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

SPLIT = "split"
CODES = "8bit"
CODE_SCALES = "8bit-scales"
PACKED = "packed"
NF4 = "nf4"
PACKED_SCALES = "packed-scales"
AT_REST: Mapping[str, str] = MappingProxyType({"int8": PACKED, "nf4": NF4})
"""The kind of the codes of each form in which a frozen parameter may rest."""
DTYPES = frozenset(_DTYPES)
_GRAINS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {name: (dtype.itemsize, 1) for name, dtype in _DTYPES.items()}
    | {
        SPLIT: (2, 1),
        CODES: (1, 1),
        CODE_SCALES: (1, BLOCK),
        PACKED: (1, 1),
        NF4: (1, 2),
        PACKED_SCALES: (4, BLOCK),
    }
)
KINDS = frozenset(_GRAINS)
SCALED = frozenset({CODES, PACKED, NF4})
OF_SCALES = frozenset({CODE_SCALES, PACKED_SCALES})
"""Kinds of codes, whose scales are a state of their own; and the kinds of those scales."""


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in a manifest. Raises ValueError for a dtype without a name (quantised,
    sub-byte)."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(
            f"tensors of {dtype} cannot be saved; allowed are {', '.join(map(str, _NAMES))}"
        ) from None


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name. Raises KeyError for a kind that is not a dtype."""
    return _DTYPES[name]


def bytes_of(kind: str, numel: int) -> int:
    """Bytes of the first `numel` elements of a piece."""
    grain_bytes, grain_numel = _GRAINS[kind]
    return -(-numel // grain_numel) * grain_bytes


def grain_of(kind: str) -> tuple[int, int]:
    """The smallest unit of a kind: (bytes, elements): one scale and its block, one byte of 4-bit
    codes, or one element."""
    return _GRAINS[kind]


def scales_of(state: str) -> str:
    """The name of the state that holds the scales of a quantised state."""
    base, dot, rank = state.partition(OF_RANK)
    return f"{base}{SCALES}{dot}{rank}"
