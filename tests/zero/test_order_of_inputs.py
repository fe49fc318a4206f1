"""Does the helper thread of inputs on NVMe wait for an older transfer before it uses its buffer or
its place again?

The store is one whose transfers end when they are waited for, and not before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiermem.run.activations import _DiskRoom, _Extent, _Passing
from tiermem.swap.store.move import Move


class _Waited(Move):
    """A transfer that notes when it is waited for."""

    def __init__(self, log: list[str], what: str) -> None:
        self._log = log
        self._what = what

    def wait(self) -> None:
        self._end()

    def outcome(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._what:
            self._log.append(f"{self._what} has ended")
            self._what = ""


class _Store:
    def __init__(self) -> None:
        self.log: list[str] = []

    def write(self, pieces: list[Any], name: str) -> Move:
        return self._begin(f"write {name}")

    def read(self, pieces: list[Any], name: str) -> Move:
        return self._begin(f"read {name}")

    def _begin(self, what: str) -> Move:
        self.log.append(what)
        return _Waited(self.log, what)


class _Slot:
    def __init__(self) -> None:
        self.tensor = torch.zeros(1 << 20, dtype=torch.uint8)


class _Pool:
    def __init__(self, count: int) -> None:
        self.count = count

    def take(self) -> _Slot:
        return _Slot()


@pytest.mark.parametrize(
    ("num_buffers", "acts", "expected"),
    [
        (1, ["send a", "send b"], ["write a", "write a has ended", "write b"]),
        (2, ["send a", "send a"], ["write a", "write a has ended", "write a"]),
        (2, ["send a", "bring a"], ["write a", "write a has ended", "read a", "read a has ended"]),
        (2, ["send a", "send b"], ["write a", "write b"]),
    ],
    ids=["one buffer", "one place", "read after write", "apart"],
)
def test_a_transfer_waits_for_the_last_one_of_its_buffer_and_its_place(
    num_buffers: int, acts: list[str], expected: list[str]
) -> None:
    store = _Store()
    room = _DiskRoom(torch.device("cpu"), store, _Pool(num_buffers))  # type: ignore[arg-type]
    homes = {name: _Extent(name, 4096) for name in "ab"}
    for act in acts:
        passing = _Passing(torch.zeros(1024))
        (room.send if act.startswith("send") else room.bring)(passing, homes[act[-1]])
        assert passing.work is not None
        passing.work.result()
    assert store.log == expected
    room.close()
