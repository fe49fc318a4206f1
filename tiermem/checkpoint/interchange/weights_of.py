"""The weights of an opened step, as others want them: whole tensors in one dtype, read in pieces of 16 MiB.

    as stored    the weight, to the bit; one kept in 8 bits, in the dtype it stands for
    masters      the fp32 value that the optimizer steps, where there is one beside the weight; else the weight, widened
    a dtype      floats in it: the weight where that is what is stored, else the master, rounded to nearest

Tensors that are no floats stay as they are. Ordinary parameters, which only the optimizer knows, are not weights of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import MASTER, WEIGHT, Parameter
from tiermem.checkpoint.opening.source import CHUNK_NUMEL, Source


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight or buffer. Its source must be open while it is read."""

    source: Source
    parameter: Parameter
    dtype: torch.dtype  # in which it is handed out

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, its own first."""
        return (self.parameter.name, *self.parameter.aliases)

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, flat values), in order. Each blocks; raises DamagedState, OSError."""
        for start in range(0, self.parameter.numel, CHUNK_NUMEL):
            yield start, self.read(start, min(CHUNK_NUMEL, self.parameter.numel - start))

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel), flat. Blocks; raises DamagedState, OSError."""
        name, stored = self.parameter.name, kinds.dtype_of(self.parameter.dtype)
        if not numel:
            return torch.empty(0, dtype=self.dtype)
        if self.dtype != stored:
            if stored == torch.float64:
                return self.source.read(name, WEIGHT, start, numel).to(self.dtype)
            return self.source.fp32(name, MASTER, start, numel).to(self.dtype)
        if self.source.kind(name, WEIGHT) not in kinds.DTYPES:
            return self.source.fp32(name, WEIGHT, start, numel).to(self.dtype)
        return self.source.read(name, WEIGHT, start, numel)


def weights_of(source: Source, dtype: torch.dtype | None = None, exclude_frozen: bool = False) -> list[Weight]:
    """The weights and buffers, in the order of the model.

    dtype: of floats; None: as stored. fp32 means masters. Raises ValueError for one that floats are not exported in.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"weights cannot be exported as {dtype}; floating-point dtypes are allowed")
    found = []
    for each in source.manifest.parameters:
        if each.role == "ordinary" or (exclude_frozen and each.role == "parameter" and not each.is_trainable):
            continue
        stored = kinds.dtype_of(each.dtype)
        found.append(Weight(source, each, dtype if dtype is not None and stored.is_floating_point else stored))
    return found
