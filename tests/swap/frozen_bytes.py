"""What tests of freezes look at: bytes on the disk as an outsider finds them, and bytes as the
store gives them."""

from __future__ import annotations

import torch

from tiermem.swap.store.entry import Freeze
from tiermem.swap.store.store import TensorStore


def on_disk(freeze: Freeze, name: str, num_bytes: int, start: int = 0) -> bytes:
    """What an outsider finds in the files."""
    found = b""
    for path_index, offset, length in freeze.ranges(name, start, num_bytes):
        with freeze.files[path_index].open("rb") as file:
            file.seek(offset)
            found += file.read(length)
    return found


def write(store: TensorStore, name: str, offset: int, data: torch.Tensor) -> None:
    slot = store.arena.take(data.numel())
    try:
        store.write([(name, offset, slot.tensor.copy_(data))], name).wait()
    finally:
        store.arena.give_back(slot)


def content(store: TensorStore, name: str) -> bytes:
    data = store.fetch(name).wait().numpy().tobytes()
    store.release(name)
    return data
