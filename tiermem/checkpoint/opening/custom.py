"""SavedWeights: the weights of a saved step as a mapping, for whoever puts them in a model himself.

A tensor is read when it is asked for, whole, and not kept: who makes a dict of them has all in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import WEIGHT, Parameter
from tiermem.checkpoint.opening.source import Source


class SavedWeights(Mapping[str, torch.Tensor]):
    """Weights and buffers by name, other names of tied ones too, as `state_dict` has them; valid while the source is open."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._names: dict[str, Parameter] = {}
        for each in source.manifest.parameters:
            if each.role != "ordinary":
                self._names |= dict.fromkeys((each.name, *each.aliases), each)

    def __getitem__(self, name: str) -> torch.Tensor:
        param, dtype = self._names[name], kinds.dtype_of(self._names[name].dtype)
        if not param.numel:
            return torch.empty(param.shape, dtype=dtype)
        if self._source.kind(param.name, WEIGHT) == param.dtype:
            return self._source.read(param.name, WEIGHT, 0, param.numel).view(param.shape)
        return self._source.fp32(param.name, WEIGHT, 0, param.numel).to(dtype).view(param.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
