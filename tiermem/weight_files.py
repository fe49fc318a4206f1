"""Weight files: files of whole tensors that are filled piece by piece, as large as they will be from the start.

    SafetensorsFile    header first, then every tensor's bytes, in order and without holes
    TorchFile          torch.save's layout without values, which are then written into their places

A tied tensor is there once, under its first name; safetensors name the others in their metadata, torch's format gives each name
the same storage. `torch.load(weights_only=True)` reads the latter, weights.py and others the former. No values are kept here.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from tiermem.swap import durable
from tiermem.swap.direct import check_room, take_room
from tiermem.weights import dtype_code

MOST_AROUND_BYTES = 4096
"""More than torch's formats take around one tensor: its name, its header, padding, its part of the pickle."""


class WeightEntry(NamedTuple):
    """One tensor of a file, and all its names."""

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFile(Protocol):
    """A file that is being filled."""

    def put(self, entry: WeightEntry, start: int, values: torch.Tensor) -> None:
        """Writes elements [start, start + numel) of an entry: a flat CPU tensor of its dtype. Raises OSError."""
        ...

    def close(self) -> None:
        """Closes the file, which is not synced."""
        ...


class SafetensorsFile:
    """A new safetensors file. Raises OSError when it cannot be made or the disk has no room for all of it."""

    def __init__(self, path: Path, entries: Sequence[WeightEntry]) -> None:
        ties = {alias: entry.names[0] for entry in entries for alias in entry.names[1:]}
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **ties}}
        place = 0
        self._places: dict[str, int] = {}
        for entry in entries:
            self._places[entry.names[0]] = place
            offsets = [place, place := place + entry.num_bytes]
            header[entry.names[0]] = {
                "dtype": dtype_code(entry.dtype), "shape": list(entry.shape), "data_offsets": offsets,
            }  # fmt: skip
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self._path = path
        with contextlib.ExitStack() as opened:
            with durable.named(path):
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            opened.callback(os.close, self._fd)
            take_room(self._fd, 0, self._base + place, path)
            self._write(memoryview(len(text).to_bytes(8, "little") + text), 0)
            self._closing = opened.pop_all()

    def put(self, entry: WeightEntry, start: int, values: torch.Tensor) -> None:
        raw = values.contiguous().view(-1).view(torch.uint8).numpy().data
        self._write(raw, self._base + self._places[entry.names[0]] + start * entry.dtype.itemsize)

    def close(self) -> None:
        self._closing.close()

    def _write(self, data: memoryview, offset: int) -> None:
        with durable.named(self._path):
            while data:
                done = os.pwrite(self._fd, data, offset)
                data, offset = data[done:], offset + done


class TorchFile:
    """A new file in torch's format. It is mapped while it is filled. Raises OSError as SafetensorsFile."""

    def __init__(self, path: Path, entries: Sequence[WeightEntry]) -> None:
        layout: dict[str, torch.Tensor] = {}
        for entry in entries:
            empty = torch.empty(entry.shape, dtype=entry.dtype)  # no page of it is ever touched
            layout.update(dict.fromkeys(entry.names, empty))
        num_bytes = sum(entry.num_bytes for entry in entries)
        check_room(path.parent, num_bytes + MOST_AROUND_BYTES * (len(layout) + 1))  # torch tells less well
        with torch.serialization.skip_data():
            torch.save(layout, path)
        del layout
        with durable.named(path), open(path, "r+b") as file:
            take_room(file.fileno(), 0, os.path.getsize(path), path)  # else a full disk would be a SIGBUS
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            self._tensors: dict[str, torch.Tensor] = torch.load(path, mmap=True, weights_only=True)

    def put(self, entry: WeightEntry, start: int, values: torch.Tensor) -> None:
        self._tensors[entry.names[0]].view(-1)[start : start + values.numel()].copy_(values)

    def close(self) -> None:
        self._tensors.clear()
