"""Uses a store at random for as long as it takes, against a model that knows what each tensor holds
without holding it.

`python use_at_random.py ENGINE NUM_TENSORS LARGEST HOST_BYTES SEED PATH [PATH ...]`, in a process
of its own so that the kernel's peak of its memory says something. Every tensor is a window of one
buffer of noise, so that the model is two numbers for each:

    noise     [..........................................................]
    tensor          [shift, shift + num_bytes)           another shift after a change: no byte of the old remains

Sizes are as many of every order of magnitude, 1 byte to LARGEST. Ends by saying, as JSON, what was
done and the peaks; fails on the first byte that differs.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tiermem.swap.base.native import IoSettings
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.memory.arena import BudgetError
from tiermem.swap.store.move import Move
from tiermem.swap.store.store import TensorStore

_MAX_SHIFT = 8 << 20
_LIVE_TIMES_LARGEST = 24  # bytes of tensors alive, in largest ones
_SMALL_BYTES = 64 << 10  # what rests on HOST is no larger, and there are few
_MAX_ON_HOST = 8


class Window(NamedTuple):
    """What a tensor holds."""

    shift: int
    num_bytes: int


class RandomUser:
    """Puts, looks at, changes, gives up and drops tensors until enough have been put, and looks at
    all that are left."""

    def __init__(self, store: TensorStore, largest: int, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._store = store
        self._random = random.Random(seed)
        self._largest = largest
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randint(
            0, 256, (largest + _MAX_SHIFT,), dtype=torch.uint8, generator=generator
        )
        self._model: dict[str, Window] = {}
        self._on_host: list[str] = []
        self._in_memory: dict[str, None] = {}  # fetched and not given up, in order
        self._live_bytes = 0

    def run(self, num_tensors: int) -> None:
        """Everything, to the last tensor dropped."""
        weights = {
            self._look: 6,
            self._change: 5,
            self._prefetch: 5,
            self._give_up: 5,
            self._cancel: 1,
            self._drop: 2,
        }
        while self.done["put"] < num_tensors:
            self._put(str(self.done["put"]))
            for act in self._random.choices(
                list(weights), list(weights.values()), k=self._random.randrange(4)
            ):
                if self._model:
                    act(self._any_name())
            if self._random.random() < 0.01:
                self._store.flush()
        while self._model:
            name = self._any_name()
            self._look(name)
            self._drop(name)

    def _put(self, name: str) -> None:
        window = self._new_window(int(math.exp(self._random.uniform(0, math.log(self._largest)))))
        while (
            self._model
            and self._live_bytes + window.num_bytes > _LIVE_TIMES_LARGEST * self._largest
        ):
            leaving = self._any_name()
            self._look(leaving)
            self._drop(leaving)
        is_small = window.num_bytes <= _SMALL_BYTES and len(self._on_host) < _MAX_ON_HOST
        home = Tier.HOST if is_small and self._random.random() < 0.2 else Tier.NVME
        self._with_room(lambda: self._store.put(name, self._bytes_of(window), home))
        self._model[name] = window
        self._on_host += [name] if home is Tier.HOST else []
        self._live_bytes += window.num_bytes
        self.done["put"] += 1

    def _look(self, name: str) -> None:
        tensor = self._fetch(name).wait()
        window = self._model[name]
        if not torch.equal(tensor, self._bytes_of(window)):
            wrong = (tensor != self._bytes_of(window)).nonzero().flatten()
            raise AssertionError(
                f"{name}: {len(wrong)} of {len(tensor)} bytes differ, from {int(wrong[0])} on"
            )
        self.done["looked"] += 1

    def _change(self, name: str) -> None:
        tensor = self._fetch(name).wait()
        self._model[name] = self._new_window(len(tensor))
        tensor.copy_(self._bytes_of(self._model[name]))
        self._release(name, dirty=True)
        self.done["changed"] += 1

    def _prefetch(self, name: str) -> None:
        self._fetch(name)

    def _give_up(self, name: str) -> None:
        if self._store.is_present(name):
            self._release(name, dirty=self._random.random() < 0.3)

    def _cancel(self, name: str) -> None:
        move = self._fetch(name)
        move.cancel()
        if not self._store.is_present(name):  # the bytes had not arrived
            assert move.was_cancelled
            del self._in_memory[name]
        self.done["cancelled"] += 1

    def _drop(self, name: str) -> None:
        self._store.drop(name)
        self._live_bytes -= self._model.pop(name).num_bytes
        self._in_memory.pop(name, None)
        if name in self._on_host:
            self._on_host.remove(name)
        self.done["dropped"] += 1

    def _fetch(self, name: str) -> Move:
        move = self._with_room(lambda: self._store.fetch(name))
        self._in_memory[name] = None
        return move

    def _release(self, name: str, dirty: bool = False) -> None:
        self._store.release(name, dirty)
        self._in_memory.pop(name, None)

    def _with_room(self, act: Callable[[], Move]) -> Move:
        """Does it; where the budget refuses, after giving up what was fetched, then what rests on
        HOST."""
        try:
            return act()
        except BudgetError:
            self.done["refused"] += 1
        for name in list(self._in_memory):
            self._store.fetch(name).wait()  # it may be under way
            self._release(name)
        try:
            return act()
        except BudgetError:  # small ones lie in the way of a large one
            for name in list(self._on_host):
                self._drop(name)
        return act()

    def _any_name(self) -> str:
        return self._random.choice(list(self._model))

    def _new_window(self, num_bytes: int) -> Window:
        return Window(self._random.randrange(_MAX_SHIFT), num_bytes)

    def _bytes_of(self, window: Window) -> torch.Tensor:
        return self._noise[window.shift : window.shift + window.num_bytes]


def main(
    engine: str, num_tensors: int, largest: int, host_bytes: int, seed: int, paths: list[Path]
) -> None:
    """Uses a store on those paths and says what was done."""
    known = [NvmePath(path, weight=1.0) for path in paths]
    disk_bytes = (_LIVE_TIMES_LARGEST + 4) * largest
    with TensorStore(known, host_bytes, IoSettings(engine), disk_bytes) as store:
        user = RandomUser(store, largest, seed)
        before = _status_bytes("VmRSS")
        user.run(num_tensors)
        stats = store.stats()
        assert stats.nvme_bytes == store.arena.carved_bytes == 0, "everything was dropped"
    told = {
        f"num_{what}": user.done[what]
        for what in ("put", "looked", "changed", "cancelled", "dropped", "refused")
    }
    told |= {
        "rss_before_bytes": before,
        "peak_rss_bytes": _status_bytes("VmHWM"),
        "host_peak_bytes": stats.host_peak_bytes,
    }
    told |= {"read_bytes": stats.nvme_read_bytes, "written_bytes": stats.nvme_written_bytes}
    print(json.dumps(told))


def _status_bytes(key: str) -> int:
    """A line of /proc/self/status, which the kernel counts for this program alone (ru_maxrss is
    inherited)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) << 10


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]), [Path(path) for path in sys.argv[6:]])  # type: ignore[call-arg, arg-type]
