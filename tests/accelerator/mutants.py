"""Mutants: the mistakes that the parity tests must see. Each takes one wait, event, stream, pin or copy out of the library.

    MUTANTS[name] = Mutant(where the line is, the line, what it becomes, the program and the homes that see it)

`applied` rebuilds one function from its source with the line changed, for as long as a test lasts.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tiermem.optim.sharded import ShardedModel
from tiermem.optim.tile_step import TilePass
from tiermem.swap.accelerator import PageLock
from tiermem.swap.arena import Arena
from tiermem.zero import hooks, shards
from tiermem.zero.gradient_store import GradientStore
from tiermem.zero.hooks import Hooks
from tiermem.zero.unit_state import LiveUnit, UnitMemory
from tiermem.zero.values import Values


class Mutant(NamedTuple):
    owner: Any  # a class or a module
    function: str
    line: str
    becomes: str
    program: str
    home: str


MUTANTS = {
    "a wait for the copy is removed": Mutant(
        UnitMemory, "use", "stream.wait_event(self._filled)", "pass", "plain", "host"
    ),
    "the copy does not wait for the memory that it fills": Mutant(
        UnitMemory, "allocate", "stream.wait_stream(self._owner)", "pass", "plain", "host"
    ),
    "memory is freed while compute uses it": Mutant(
        UnitMemory, "free", "self._owner.wait_event(self._ends[number])", "pass", "plain", "host"
    ),
    "memory is allocated on the caller's stream": Mutant(
        UnitMemory, "allocate", "with on(self._owner):", "if True:", "on_side_streams", "host"
    ),
    "the stream of a second use is forgotten": Mutant(
        LiveUnit, "use", "self.memory.use()", "pass", "on_side_streams", "host"
    ),
    "gradients of another stream are not waited for": Mutant(
        Hooks, "answer", "live.memory.join()", "pass", "two_streams_one_backward", "host"
    ),
    "the stream that gradients are accumulated on is not noted": Mutant(
        hooks, "_note_gradient", "live.memory.note_gradient()", "pass", "two_streams_one_backward", "host"
    ),
    "a home is overwritten while it is read, by a step": Mutant(
        TilePass, "_params", "tile.live.await_home()", "pass", "evaluated_between", "host"
    ),
    "a home is overwritten while it is read, by load_state_dict": Mutant(
        Values, "put_elements", "live.await_home()", "pass", "loaded_while_copies_are_pending", "host"
    ),
    "a home's last event does not hold its writer": Mutant(
        LiveUnit, "await_home", "self._home_read.synchronize()", "pass", "loaded_while_copies_are_pending", "host"
    ),
    "the last event of a copy is forgotten": Mutant(
        LiveUnit, "copy", "self._home_read = copied", "pass", "loaded_while_copies_are_pending", "host"
    ),
    "a buffer is given back while it is copied": Mutant(
        LiveUnit, "give_stage_back", "self.await_home()", "pass", "plain", "nvme"
    ),
    "the copy's event is recorded on another stream": Mutant(
        LiveUnit, "copy", "= record(copies)", "= record(current_stream(self._passage.device))", "plain", "host"
    ),
    "the copy runs on another stream than its event": Mutant(
        LiveUnit, "copy", "with on(copies):", "if True:", "plain", "host"
    ),
    "a gradient is read before it is there": Mutant(
        GradientStore, "_put", "source = part[: max(0, num_valid - start)].to(share.device)",
        "source = part[: max(0, num_valid - start)]; "
        "source = torch.empty_like(source, device='cpu').pin_memory().copy_(source, non_blocking=True)", "plain", "host",
    ),
    "a gradient is added before it has come": Mutant(
        GradientStore, "_at_home", "self._stream.wait_stream(current_stream(self._stream.device))", "pass", "plain", "device"
    ),
    "a gradient is let go while it is added": Mutant(
        GradientStore, "_at_home", "data.record_stream(self._stream)", "pass", "plain", "device"
    ),
    "a step does not wait for the last gradients": Mutant(
        GradientStore, "join", "current_stream(self._stream.device).wait_stream(self._stream)", "pass",
        "two_streams_one_backward", "device",
    ),
    "resident weights are not brought from the step": Mutant(
        ShardedModel, "_regather", "self._shards.values.regather(live.unit, live.shard, live.memory)", "pass", "plain",
        "states on host",
    ),
    "memory is unregistered while it is copied": Mutant(
        shards, "release", "live.await_home()", "pass", "plain", "host"
    ),
    "a copy spans two registrations": Mutant(
        PageLock, "__init__", "in _chunks(slots)", "in [(a + i, 4096) for a, n in slots for i in range(0, n, 4096)]",
        "inference", "host",
    ),
    "nothing is pinned": Mutant(Arena, "pin", "if slots:", "if False:", "pageable_copies", "host"),
}  # fmt: skip


ON_RANKS = {
    "a gather is not waited for": Mutant(LiveUnit, "_await_gather", "gathering.pending.wait()", "pass", "", ""),
    "a gather does not wait for the memory that it fills": Mutant(
        UnitMemory, "allocate", "stream.wait_stream(self._owner)", "pass", "", ""
    ),
    "a home is overwritten while a gather reads it": Mutant(
        LiveUnit, "gather", "self._home_read = record(current_stream(self._passage.device))", "pass", "", ""
    ),
}
"""Those of several ranks (parity_on_ranks.py)."""


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The library with one line changed. Raises AssertionError when the line is not there exactly once."""
    original: Callable[..., Any] = inspect.getattr_static(mutant.owner, mutant.function)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(mutant.line) == 1, f"{mutant.function} has {source.count(mutant.line)} of {mutant.line!r}"
    made: dict[str, Any] = {}
    code = compile(source.replace(mutant.line, mutant.becomes), f"<mutant of {mutant.function}>", "exec")
    exec(code, vars(sys.modules[original.__module__]), made)
    setattr(mutant.owner, mutant.function, made[mutant.function])
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.function, original)
