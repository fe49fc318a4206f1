"""TensorPass: tensors of 4 MiB through the TensorStore, in random order: what floor 1 makes of the disk's rate.

    put      each tensor is copied into the store's memory and written                   beside a sequential write
    fetch    each is fetched, looked at by nobody, released                              beside a sequential read
    change   each is fetched and released as changed, so that it is written back         beside a mixed pass

The order is drawn anew for each. The store's budget holds as many tensors as keep its queue full, and a few more.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence

import numpy as np
import torch

from tiermem.swap.move import Move
from tiermem.swap.queues import Queues
from tiermem.swap.settings import IoSettings
from tiermem.swap.store import TensorStore
from tiermem.swap.tier import Tier

TENSOR_BYTES = 4 << 20
_SPARE_TENSORS = 4


class TensorPass:
    """A store on some folders and tensors for it. A context manager: the store's files go with it.

    Raises OSError when the engine cannot run, or a folder is not usable.
    """

    def __init__(self, folders: Sequence[str], num_bytes: int, io: IoSettings, seed: int) -> None:
        self.num_bytes = max(1, num_bytes // TENSOR_BYTES) * TENSOR_BYTES
        self._names = [f"tensor {number}" for number in range(self.num_bytes // TENSOR_BYTES)]
        self._generator = np.random.default_rng(seed)
        self._window = -(-io.depth * io.block_bytes // TENSOR_BYTES) * len(folders) + _SPARE_TENSORS
        self._store = TensorStore(folders, host_bytes=2 * self._window * TENSOR_BYTES, io=io)
        try:
            self._store.reserve_disk(self.num_bytes)
            values = self._generator.integers(0, 256, TENSOR_BYTES, dtype=np.uint8)
            self._tensor = torch.from_numpy(values)
            self._put_all()  # first writes to preallocated blocks are slower, and memory is registered when it is known
            self.settle()
        except BaseException:
            self._store.close()
            raise

    def __enter__(self) -> TensorPass:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    @property
    def queues(self) -> Queues:
        """The store's queues, for their counters."""
        return self._store.queues

    def settle(self) -> None:
        """Ends every write-back."""
        self._store.settle()

    def put(self) -> float:
        """Puts every tensor anew; GB/s, the last write included."""
        for name in self._names:
            self._store.drop(name)
        start = time.monotonic()
        self._put_all()
        self._store.settle()
        return self._rate(start)

    def fetch(self) -> float:
        """Fetches every tensor; GB/s."""
        start = time.monotonic()
        self._visit(dirty=False)
        return self._rate(start)

    def change(self) -> float:
        """Fetches every tensor and writes it back; GB/s, both directions together."""
        start = time.monotonic()
        self._visit(dirty=True)
        self._store.settle()
        return 2 * self._rate(start)

    def _put_all(self) -> None:
        for name in self._in_random_order():
            self._store.put(name, self._tensor, Tier.NVME)

    def _visit(self, dirty: bool) -> None:
        under_way: collections.deque[tuple[str, Move]] = collections.deque()
        for name in self._in_random_order():
            if len(under_way) == self._window:
                self._leave(*under_way.popleft(), dirty)
            under_way.append((name, self._store.fetch(name)))
        while under_way:
            self._leave(*under_way.popleft(), dirty)

    def _leave(self, name: str, move: Move, dirty: bool) -> None:
        move.wait()
        self._store.release(name, dirty)

    def _in_random_order(self) -> list[str]:
        return [self._names[index] for index in self._generator.permutation(len(self._names))]

    def _rate(self, start: float) -> float:
        return self.num_bytes / (time.monotonic() - start) / 1e9
