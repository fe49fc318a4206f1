"""Secondary: a second copy of a unit's gathered parameters, kept among ranks that are near each other (hpZ).

    forward    gathers from the shards of all ranks, over every node    and each rank keeps its part of what came
    backward   gathers from those parts, within `Topology.within`       no byte leaves the node

Of every parameter a rank keeps a num_within-th of its full layout, contiguous, so that it is gathered straight into place, too.
It holds the very bits that forward computed with. It is outdated when weights change at home; until then every gather of
the unit is served from it, those of further micro-batches included. Costs num_across shards of memory per unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from tiermem.swap.extents import round_up
from tiermem.zero.ranks.collectives import Pending, start
from tiermem.zero.ranks.topology import Topology
from tiermem.zero.unit import ALIGN, UNIT_ALIGN, Unit


def secondary_numel(unit: Unit, num_across: int) -> int:
    """Elements of a rank's part of a unit's second copy."""
    return round_up(sum(round_up(s.shard_numel * num_across, ALIGN) for s in unit.shards), UNIT_ALIGN)


class NearGather:
    """The gather of one unit with a second copy: from all ranks, and then from near ones until the weights change.

    Args:
        second: this rank's part of the copy.
        far: gathers from all ranks.
        full: the unit's full layout.
    """

    def __init__(self, second: Secondary, far: Far, full: torch.Tensor) -> None:
        self._second = second
        self._far = far
        self._full = full

    @property
    def needs_shard(self) -> bool:
        """Whether the next gather begins at the shard; else it need not be read."""
        return not self._second.is_filled

    def put(self, shard: torch.Tensor | None) -> None:
        """Takes this rank's flat shard layout, when it is needed."""
        if not self._second.is_filled:
            self._far.put(shard)

    def start(self) -> Pending:
        """Starts the exchange, after `put`. Collective; does not block. Raises RankLost."""
        if self._second.is_filled:
            return self._second.gather(self._full)
        return _Kept(self._far.start(), self._second, self._full)

    def outdate(self) -> None:
        """The weights are about to change at home."""
        self._second.is_filled = False


class Far(Protocol):
    """A gather from all ranks."""

    def put(self, shard: torch.Tensor | None) -> None:
        """Takes this rank's flat shard layout."""

    def start(self) -> Pending:
        """Starts the exchange."""


class _Kept(Pending):
    """A gather from all ranks, of which this rank's part is kept when it has ended."""

    def __init__(self, pending: Pending, second: Secondary, full: torch.Tensor) -> None:
        self._pending: Pending | None = pending
        self._second = second
        self._full = full

    def wait(self) -> None:
        """Blocks until the full layout is filled (on a GPU: in stream order). Raises RankLost; safe to repeat."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            self._second.keep(self._full)


class All(Pending):
    """Several collectives under way."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        """Blocks until all have ended (on a GPU: orders the current stream after them). Raises RankLost; safe to repeat."""
        for each in self._pending:
            each.wait()


class Secondary:
    """This rank's part of one unit's second copy.

    Args:
        topology: with `within` and `across`.
        unit: whose parameters these are.
        flat: `secondary_numel` elements in the dtype of the full layout; belongs to this object.
    """

    def __init__(self, topology: Topology, unit: Unit, flat: torch.Tensor) -> None:
        assert topology.across is not None
        self.is_filled = False
        self._topology = topology
        self._unit = unit
        self._parts: list[torch.Tensor] = []  # one per parameter
        offset = 0
        for shard in unit.shards:
            numel = shard.shard_numel * topology.across.size
            self._parts.append(flat[offset : offset + numel])
            offset += round_up(numel, ALIGN)

    def keep(self, full: torch.Tensor) -> None:
        """Copies this rank's part out of a full layout that has just been gathered."""
        assert self._topology.within is not None
        for mine, whole in zip(self._parts, self._wholes(full), strict=True):
            mine.copy_(whole.view(self._topology.within.size, -1)[self._topology.within.rank])
        self.is_filled = True

    def gather(self, full: torch.Tensor) -> Pending:
        """Starts filling the full layout from the parts of the near ranks. Collective; does not block."""
        assert self.is_filled
        what = f"gathering {self._unit.name}"
        pairs = [pair for pair in zip(self._wholes(full), self._parts, strict=True) if pair[0].numel()]
        return All([start(self._topology, what, dist.all_gather_into_tensor, *pair, among="within") for pair in pairs])

    def _wholes(self, full: torch.Tensor) -> list[torch.Tensor]:
        num_shards = self._topology.num_shards
        return [full[s.full_offset : s.full_offset + s.shard_numel * num_shards] for s in self._unit.shards]
