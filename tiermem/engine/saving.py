"""Saving: a sharded model's weights, whole, in one file, one parameter in memory at a time.

    rank 0    writes `<file>.partial`, makes its room first, syncs it and renames it over the file
    others    take part in the gathers

A name that ends in `.safetensors` is that format, any other torch's own; see weight_files.py. Weights have the dtype in which
they are trained. Read back: weights.py, `load_state_dict`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from tiermem.weight_files import SafetensorsFile, TorchFile, WeightEntry, WeightFile
from tiermem.zero.ranks.collectives import exchange
from tiermem.zero.shards import Shards


class _Entry(NamedTuple):
    """One tensor of a state dict and all its names."""

    names: list[str]
    tensor: torch.Tensor  # the parameter or buffer
    dtype: torch.dtype

    def in_file(self) -> WeightEntry:
        return WeightEntry(self.names, tuple(self.tensor.shape), self.dtype)


def save_weights(shards: Shards, path: Path, exclude_frozen: bool = False) -> None:
    """Writes parameters and persistent buffers to one file. Collective; blocks.

    What failed on rank 0 is raised there, and on the others as an OSError that says so; then no file is changed.
    """
    entries = _entries(shards, exclude_frozen)
    writer = _Attempt(path, entries) if shards.topology.rank == 0 else None
    for entry in entries:
        value = _value(shards, entry)
        if writer is not None:
            writer.put(entry, value)
    error = writer.end() if writer is not None else None
    said = exchange(shards.topology, "" if error is None else str(error))[0]
    if error is not None:
        raise error
    if said:
        raise OSError(f"rank 0 could not write {path}: {said}")


def consolidated(shards: Shards, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """Parameters and persistent buffers, whole, on rank 0's CPU; None on the others. Collective; blocks."""
    found: dict[str, torch.Tensor] = {}
    for entry in _entries(shards, exclude_frozen):
        value = _value(shards, entry)
        if shards.topology.rank == 0:
            found.update(dict.fromkeys(entry.names, value))
    return found if shards.topology.rank == 0 else None


def _entries(shards: Shards, exclude_frozen: bool) -> list[_Entry]:
    """What a state dict holds, tied names together, in the order of the model."""
    found: dict[int, _Entry] = {}
    for prefix, module in shards.model.named_modules(remove_duplicate=False):
        prefix = f"{prefix}." if prefix else ""
        for name, param in module._parameters.items():
            if param is not None and (param.requires_grad or not exclude_frozen):
                entry = found.setdefault(id(param), _Entry([], param, _dtype_of(shards, param)))
                entry.names.append(prefix + name)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), _Entry([], buffer, buffer.dtype)).names.append(prefix + name)
    return list(found.values())


def _dtype_of(shards: Shards, param: nn.Parameter) -> torch.dtype:
    return shards.find(param)[0].unit.dtype


def _value(shards: Shards, entry: _Entry) -> torch.Tensor:
    if isinstance(entry.tensor, nn.Parameter):
        return shards.weight(entry.tensor)
    return entry.tensor.detach().to("cpu", copy=True)


class _Attempt:
    """Rank 0's side: writes until something fails, then only remembers that, so that the other ranks are not left alone."""

    def __init__(self, path: Path, entries: Sequence[_Entry]) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._file: WeightFile | None = None
        self._error: Exception | None = None
        kind = SafetensorsFile if path.suffix == ".safetensors" else TorchFile
        self._try(lambda: self._open(kind, [entry.in_file() for entry in entries]))

    def put(self, entry: _Entry, value: torch.Tensor) -> None:
        """Adds the next entry."""
        if self._file is not None:
            file = self._file
            self._try(lambda: file.put(entry.in_file(), 0, value.contiguous().view(-1)))

    def end(self) -> Exception | None:
        """Puts the file in its place, or takes it away; returns what went wrong."""
        if self._file is not None:
            self._try(self._file.close)
        if self._error is None:
            self._try(self._put_in_place)
        if self._error is not None:
            with contextlib.suppress(OSError):  # the first error is told, and the other ranks wait to hear of it
                self._partial.unlink(missing_ok=True)
        return self._error

    def _open(self, kind: Callable[[Path, Sequence[WeightEntry]], WeightFile], entries: Sequence[WeightEntry]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = kind(self._partial, entries)

    def _put_in_place(self) -> None:
        with open(self._partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._partial, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _try(self, act: Callable[[], None]) -> None:
        if self._error is None:
            try:
                act()
            except Exception as error:  # raised by `save_weights`, once the others know
                self._error = error
