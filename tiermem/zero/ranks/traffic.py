"""Traffic: what this rank has handed to collectives, call by call. Tests and reports count payloads with it."""

from __future__ import annotations

import collections
from typing import NamedTuple

_NUM_COMPARED = 100


class Payload(NamedTuple):
    """One call of a collective."""

    op: str
    """Its name in torch.distributed, such as "all_gather_into_tensor"."""
    what: str
    """What it was for, such as "gathering layers.3"."""
    num_bytes: int
    """Bytes of the larger side: what an all-gather fills, what a reduce-scatter takes, what an all-reduce adds up."""
    among: str = "world"
    """Which ranks took part: "world" (all), "shard", "replica", "across" or "within" (mesh.py)."""


class Traffic:
    """The newest payloads; the oldest are forgotten, so that memory stays bounded.

    Args:
        max_calls: how many are kept.
    """

    def __init__(self, max_calls: int = 50_000) -> None:
        self.payloads: collections.deque[Payload] = collections.deque(maxlen=max_calls)
        self._num_calls = 0  # ever
        self._newest: collections.deque[tuple[int, str, str]] = collections.deque(maxlen=_NUM_COMPARED)

    def add(self, op: str, what: str, num_bytes: int, among: str = "world") -> None:
        """Notes one call."""
        self.payloads.append(Payload(op, what, num_bytes, among))
        self._num_calls += 1
        self._newest.append((self._num_calls, op, what))

    def newest(self) -> dict[int, str]:
        """The newest calls by number, counted from 1 since the beginning: on all ranks the same (watch.py)."""
        return {number: f"{what} ({op})" for number, op, what in list(self._newest)}

    def bytes_of(self, what: str) -> int:
        """Bytes of all payloads whose purpose begins with `what`."""
        return sum(payload.num_bytes for payload in self.payloads if payload.what.startswith(what))
