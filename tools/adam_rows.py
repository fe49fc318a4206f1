"""AdamRow: one precision in which AdamW is timed, and the bytes that a step of it must move.

    weight    what the model sees            bf16, fp32
    master    fp32, split (the 16 bits that the bf16 weight lacks), or none: the weight is the master
    moments   fp32, bf16, 8bit               grads   fp32, bf16               rounding   of what is stored below fp32

A row is the kernel alone; a *whole* step reads the gradients once more before, for their norm, and has the loss scale and
clipping in it. Bytes are those of each array, read or written once: nothing that a cache could save.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

_BYTES = {"fp32": 4, "bf16": 2, "split": 2, "8bit": 1}
_SCALES_PER_CODE = 1 / 64


class Stream(NamedTuple):
    """An array that a step passes over: bytes per element, and whether it is read, written or both (r, w, rw)."""

    num_bytes: int
    how: str

    def __str__(self) -> str:
        return f"{self.num_bytes}{self.how}"


@dataclasses.dataclass(frozen=True)
class AdamRow:
    """One row of the benchmark."""

    weight: str
    master: str | None
    moments: str
    grads: str
    rounding: str
    is_whole: bool = False

    @property
    def name(self) -> str:
        """Such as "split + bf16, stochastic"."""
        master = self.weight if self.master is None else f"{self.weight} + fp32" if self.master == "fp32" else "split"
        rounding = f", {self.rounding}" if self.is_rounded else ""
        return f"{'whole step: ' if self.is_whole else ''}{master} / {self.moments}{rounding}"

    @property
    def is_rounded(self) -> bool:
        """Whether a part of the state is stored in less than fp32, so that rounding is asked."""
        return self.moments != "fp32" or (self.master is None and self.weight != "fp32")

    @property
    def streams(self) -> list[Stream]:
        """The arrays of a step."""
        weight, moment, grad = _BYTES[self.weight], _BYTES[self.moments], _BYTES[self.grads]
        masters = [] if self.master is None else [Stream(_BYTES[self.master], "rw")]
        weights = [Stream(weight, "w" if self.master == "fp32" else "rw")]
        norm = [Stream(grad, "r")] if self.is_whole else []
        return [*weights, *masters, Stream(moment, "rw"), Stream(moment, "rw"), Stream(grad, "r"), *norm]

    @property
    def stream_bytes(self) -> int:
        """Bytes per parameter of the streams alone: what a yardstick of whole bytes moves."""
        return sum(stream.num_bytes * len(stream.how) for stream in self.streams)

    @property
    def bytes_per_param(self) -> float:
        """Bytes that must move per parameter, the scales of 8-bit moments included."""
        scales = 2 * 2 * _SCALES_PER_CODE if self.moments == "8bit" else 0.0  # two moments, read and written
        return self.stream_bytes + scales


ROWS = (
    AdamRow("fp32", None, "fp32", "fp32", "nearest"),
    AdamRow("bf16", "fp32", "fp32", "bf16", "nearest"),
    AdamRow("bf16", "split", "fp32", "bf16", "nearest"),
    AdamRow("bf16", "split", "bf16", "bf16", "stochastic"),
    AdamRow("bf16", "split", "bf16", "bf16", "nearest"),
    AdamRow("bf16", None, "bf16", "bf16", "stochastic"),
    AdamRow("bf16", None, "bf16", "bf16", "nearest"),
    AdamRow("bf16", "split", "8bit", "bf16", "stochastic"),
    AdamRow("bf16", "fp32", "fp32", "bf16", "nearest", is_whole=True),
    AdamRow("bf16", "split", "bf16", "bf16", "stochastic", is_whole=True),
)
"""Every row, in the order in which they are told."""
