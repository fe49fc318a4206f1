"""Arrival: how the full layout of a unit comes from where its shard rests, and how it leaves.

    HOME       it occupies nothing
    FETCHED    this rank's bytes are on their way, or there: from NVME into a buffer, or on the way to the accelerator
    GATHERED   the full layout has its memory and the ranks' parts are on their way into it
    PRESENT    the parameters see their bytes

        one shard            HOME --fetch--> FETCHED --land--> PRESENT
        several              HOME --fetch--> FETCHED --gather--> GATHERED --land--> PRESENT       (fetch: from NVME alone)
        each of them         --drop--> HOME

`fetch` is this rank's own business and may follow time and memory. `gather` is collective: every rank calls it for the same
units in the same order, so it waits for the read there if need be. The shard goes into its place in the full layout (in the
dtype that the maths sees) and its own buffer is given back before the exchange begins. After an error the unit is to be
dropped. Nothing here decides who comes.

On an accelerator a unit of one shard is copied by a stream of its own, behind nothing but the memory that it fills; the stream
that computes waits for the copy's event. A unit remembers the last copy out of host memory until somebody writes there
(`LiveUnit.await_home`), and a buffer is given back when the copy out of it has ended.
"""

from __future__ import annotations

import time

import torch

from tiermem.swap.accelerator import current_stream, is_accelerator, new_stream, on, record
from tiermem.swap.arena import Pool
from tiermem.swap.native import NORMAL, URGENT
from tiermem.swap.store import TensorStore
from tiermem.zero.weights.attributes import ZeroParamStatus
from tiermem.zero.weights.live import LiveUnit, UnitState


class Arrival:
    """Takes units through their states; the caller has found them a slot and a stage where they need one.

    Args:
        store: where shards on NVME are read from; its recorder gets an event for every gather.
        pool: whose slots hold full layouts (CPU); None on an accelerator, where torch's allocator is asked.
        stages: whose slots hold shards on their way; None when none are needed.
        device: where the maths runs.
    """

    def __init__(self, store: TensorStore, pool: Pool | None, stages: Pool | None, device: torch.device) -> None:
        self._store = store
        self._pool = pool
        self._stages = stages
        self._device = device
        self._copy_stream = new_stream(device) if is_accelerator(device) else None

    def fetch(self, live: LiveUnit, urgent: bool) -> None:
        """HOME -> FETCHED: starts this rank's bytes on their way, into the stage or slot that the unit has been given."""
        priority = URGENT if urgent else NORMAL
        if live.entry is not None:
            into = live.stage or live.slot
            assert into is not None
            live.move = self._store.fetch(live.entry, into=into, priority=priority)
        elif live.gather is None:
            self._copy_in(live, live.shard)
        live.state = UnitState.FETCHED
        live.memory.mark(ZeroParamStatus.INFLIGHT)

    def gather(self, live: LiveUnit) -> None:
        """HOME or FETCHED -> GATHERED: starts the exchange. Collective; waits for the read alone. Raises OSError, RankLost."""
        assert live.gather is not None
        self._await_read(live)
        live.start_ns = time.monotonic_ns()
        if self._pool is not None:
            assert live.slot is not None
            live.memory.put_under(live.slot)
        else:
            live.memory.allocate()
        live.state = UnitState.GATHERED
        live.memory.mark(ZeroParamStatus.INFLIGHT)
        live.gather.put(
            live.shard if live.shard is not None else self._staged(live) if live.stage is not None else None
        )
        if self._copy_stream is not None:
            live.home_read = record(current_stream(self._device))  # a buffer is given back when the unit lands
        elif live.stage is not None:
            self._drop_stage(live)
        live.pending = live.gather.start()

    def land(self, live: LiveUnit) -> None:
        """FETCHED or GATHERED -> PRESENT: waits for the bytes and shows them. Blocks; raises OSError, RankLost."""
        self._await_read(live)
        if live.pending is not None:
            self._await_gather(live)
            if self._copy_stream is not None:
                live.filled = record(current_stream(self._device))
        elif self._pool is not None:
            assert live.slot is not None
            live.memory.put_under(live.slot)
        else:
            self._await_copy(live)
        if live.stage is not None:
            self._drop_stage(live)
        live.memory.show()
        live.state = UnitState.PRESENT

    def drop(self, live: LiveUnit) -> None:
        """Any state -> HOME; what is under way is cancelled, or waited for where it cannot be. Raises RankLost."""
        if live.move is not None:
            move, live.move = live.move, None
            move.cancel()
        try:
            if live.pending is not None:
                self._await_gather(live)
        finally:
            live.filled = None
            live.memory.leave()
            self._give_back(live)
            live.state = UnitState.HOME

    # ---- waiting -------------------------------------------------------------------------------------------------------

    def _await_read(self, live: LiveUnit) -> None:
        if live.move is not None:
            move, live.move = live.move, None
            move.wait()

    def _await_gather(self, live: LiveUnit) -> None:
        assert live.pending is not None
        pending, live.pending = live.pending, None
        wait_ns = time.monotonic_ns()
        live.memory.join()  # this rank's part may have been put on another stream
        pending.wait()
        live.memory.use()
        end_ns, name = time.monotonic_ns(), live.unit.name
        self._store.recorder.add("wait", f"gather {name}", wait_ns, end_ns)
        self._store.recorder.add("gather", name, live.start_ns, end_ns, live.unit.full_bytes)

    def _await_copy(self, live: LiveUnit) -> None:
        if live.filled is None:
            self._copy_in(live, self._staged(live))
        live.memory.use(live.filled)

    # ---- bytes ---------------------------------------------------------------------------------------------------------

    def _copy_in(self, live: LiveUnit, shard: torch.Tensor | None) -> None:
        """Starts the copy of a whole unit to the accelerator."""
        assert self._copy_stream is not None and shard is not None
        live.memory.allocate(filled_on=self._copy_stream)
        with on(self._copy_stream):
            live.memory.full.copy_(shard, non_blocking=True)
        live.filled = live.home_read = record(self._copy_stream)
        live.memory.end_filling(live.filled, self._copy_stream)

    def _staged(self, live: LiveUnit) -> torch.Tensor:
        assert live.stage is not None
        return live.stage.tensor[: live.unit.shard_bytes].view(live.unit.rests_as)

    def _drop_stage(self, live: LiveUnit) -> None:
        """Gives the buffer of a shard back, once the accelerator has read it."""
        live.await_home()
        assert self._stages is not None and live.stage is not None
        self._release_entry(live)
        self._stages.give_back(live.stage)
        live.stage = None

    def _give_back(self, live: LiveUnit) -> None:
        if live.stage is not None:
            self._drop_stage(live)
        if live.slot is not None:
            assert self._pool is not None
            if live.gather is None:
                self._release_entry(live)
            self._pool.give_back(live.slot)
            live.slot = None

    def _release_entry(self, live: LiveUnit) -> None:
        if live.entry is not None and self._store.is_present(live.entry):
            self._store.release(live.entry)
