"""Loads: what a step reads, writes and sends: units fetched, tiles of states, payloads of collectives."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from torch import nn

from tiermem.forecast.rates import Compute
from tiermem.optim.tile import rests_on_host, stepped_ranges
from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import DTYPES
from tiermem.zero.gather import cut_span, spans_of
from tiermem.zero.plan import Plan, keeps_secondary, planned_layout
from tiermem.zero.prefetcher import reads_weights_again
from tiermem.zero.quantised import packed_bytes
from tiermem.zero.reduce import Bucket, cut, scatters
from tiermem.zero.topology import Topology
from tiermem.zero.unit import Division, Unit

# ---- Uses: the modules that a forward runs one after another, with the units each needs and how long its maths -------
# takes
#
# Taken from a division (zero/unit.py), in the order in which modules are defined: the first guess that `zero/prefetcher.py`
# makes too. A module's maths is counted by its parameters that multiply: those of two dimensions or more, outside
# embeddings, which only look up. A mixture of experts counts every expert, so its time is an upper bound.


class Use(NamedTuple):
    """One module's part in a forward and a backward."""

    name: str
    units: tuple[int, ...]  # indices of the units it needs, streamed or not
    forward_s: float
    backward_s: float
    reads_again: bool = True  # whether its backward needs the units as well


def uses_of(model: nn.Module, division: Division, compute: Compute) -> list[Use]:
    """The uses of one forward. The model may be on the meta device."""
    names = {module: name for name, module in model.named_modules()}
    in_list = {
        m for each in model.modules() if isinstance(each, nn.ModuleList) for m in each.modules() if m is not each
    }
    has_rest = compute.rest_forward_s is not None
    uses: list[Use] = []
    counted: set[nn.Parameter] = set()
    for module, units in division.triggers.items():
        matrices = _matrices(module) & {shard.param for unit in units for shard in unit.shards}
        counted |= matrices
        numel = 0 if has_rest and module not in in_list else sum(param.numel() for param in matrices)
        forward_s, backward_s = numel * compute.forward_s, numel * compute.backward_s
        indices = tuple(unit.index for unit in units)
        uses.append(Use(names[module], indices, forward_s, backward_s, reads_weights_again(module)))
    left = sum(param.numel() for param in _left(in_list if has_rest else set(model.modules())) - counted)
    if left or not uses:
        uses.append(Use("what is always present", (), left * compute.forward_s, left * compute.backward_s))
    last, rest = uses[-1], (compute.rest_forward_s or 0.0, compute.rest_backward_s or 0.0)
    uses[-1] = last._replace(forward_s=last.forward_s + rest[0], backward_s=last.backward_s + rest[1])
    return uses


def _matrices(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that a module and those below it multiply by: of two dimensions, not those of its embeddings."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    looked_up = {param for each in embeddings for param in each.parameters(recurse=False)}
    return {param for param in module.parameters() if param.dim() > 1} - looked_up


def _left(modules: set[nn.Module]) -> set[nn.Parameter]:
    """Matrices that these modules own themselves."""
    owned = (module.parameters(recurse=False) for module in modules if not isinstance(module, nn.Embedding))
    return {param for params in owned for param in params if param.dim() > 1}


# ---- Fetches: which units are read at which use, by the rules of `zero/prefetcher.py` played without ----------
# memory
#
# A pass is a sequence of uses; at each, the units it needs come if they are not present, then those expected next, as
# far as buffers allow. Who leaves is the idle unit whose next use lies farthest ahead. Since nothing depends on time,
# the fetches of a whole step are known before it runs, and so are its bytes.
#
#     use        0   1   2   3 | 3   2   1   0 | step
#     fetched        3         |     0         | 0 1 2 for the next forward            4 units, 3 buffers


@dataclasses.dataclass(frozen=True)
class Buffers:
    """What bounds how many units are present and fetched ahead; elements, and None for no bound."""

    num_slots: int
    max_ahead_numel: int | None = None
    max_live_numel: int | None = None
    max_reuse_numel: int | None = None
    num_stages: int = 0
    """Shards on their way to a gather."""


class Start(NamedTuple):
    """A unit begins a part of its way: its shard's read into a stage, the gather, or, where nothing is gathered, all of it."""

    unit: int
    what: Literal["read", "gather", "fetch"]


class Fetching:
    """Plays the coming and leaving of streamed units.

    A unit that is read before it is gathered waits for its read when the gather begins: so of those only the next is gathered
    ahead, and the others are read ahead, into stages.

    Args:
        numels: elements of each streamed unit by index; others are passed over.
        buffers: how many can be present.
        reads: those whose way begins with a read.
        gathered: those that are gathered.
    """

    _MOST_AHEAD = 8  # units looked at (prefetcher.py)

    def __init__(
        self,
        numels: dict[int, int],
        buffers: Buffers,
        reads: Collection[int] = (),
        gathered: Collection[int] = (),
    ) -> None:
        self._numels = numels
        self._buffers = buffers
        self._reads = set(reads)
        self._all_reads = frozenset(reads)
        self._gathered = frozenset(gathered)
        self._present: set[int] = set()  # has a buffer
        self._landed: set[int] = set()  # and has been used
        self._staged: set[int] = set()
        self._users: set[int] = set()
        self._sequence: list[int] = []
        self._place = 0
        self._starts: list[Start] = []

    def begin(self, uses: Iterable[Sequence[int]]) -> list[Start]:
        """Begins a pass whose uses need these units; returns what begins ahead of the first, unless a step has begun it."""
        self._sequence = _without_repeats(unit for units in uses for unit in units if unit in self._numels)
        self._place = 0
        self._look_ahead(None)
        return self._taken()

    def use(self, units: Sequence[int]) -> list[Start]:
        """The next use; returns what begins, because it needs it or ahead of those that will, in order.

        Raises ValueError when it needs more than there are buffers.
        """
        self._users = set()
        for unit in units:
            if unit not in self._numels:
                continue
            self._users.add(unit)
            self._advance(unit)
            if not self._bring(unit, is_urgent=True):
                raise ValueError(f"a module needs more than the {self._buffers.num_slots} units that have a buffer")
            self._landed.add(unit)
            self._look_ahead(unit)
        users, self._users = self._users, set()
        for unit in users:
            if self._buffers.max_reuse_numel is not None and self._between(unit) > self._buffers.max_reuse_numel:
                self.outdate(unit)
        return self._taken()

    def expects_reads(self) -> bool:
        """Whether something is left to be read in this pass."""
        return any(self._is_home(unit) and unit in self._reads for unit in self._sequence[self._place :])

    def outdate(self, unit: int) -> None:
        """A unit leaves, as when its weights change at home."""
        self._present.discard(unit)
        self._landed.discard(unit)
        self._staged.discard(unit)

    def kept_near(self, unit: int) -> None:
        """Until the step a unit is gathered without its shard, from a second copy."""
        self._reads.discard(unit)

    def step(self) -> list[Start]:
        """An optimizer step: all leave, and what the pass begins with is fetched; returns what begins."""
        for each in (self._present, self._landed, self._staged):
            each.clear()
        self._reads = set(self._all_reads)
        self._place = 0
        self._look_ahead(None)
        return self._taken()

    def _taken(self) -> list[Start]:
        starts, self._starts = self._starts, []
        return starts

    def _advance(self, unit: int) -> None:
        if self._place and self._sequence[self._place - 1] == unit:
            return
        if unit in self._sequence[self._place :]:
            self._place = self._sequence.index(unit, self._place) + 1

    def _look_ahead(self, current: int | None) -> None:
        may_wait = current is not None  # for one read: that of the next unit
        for unit in self._ahead(current):
            is_read = unit in self._gathered and unit in self._reads and unit not in self._landed
            if (is_read and not may_wait) or not self._bring(unit, is_urgent=False):
                break
            may_wait = may_wait and not is_read
        for unit in self._ahead(current):
            is_due = self._is_home(unit) and unit in self._gathered and unit in self._reads
            if is_due and not self._stage(unit, is_urgent=False):
                break

    def _ahead(self, current: int | None) -> Iterator[int]:
        seen = set() if current is None else {current}
        ahead, most = 0, self._buffers.max_ahead_numel
        for unit in self._sequence[self._place :]:
            if unit in seen:
                continue
            seen.add(unit)
            ahead += self._numels[unit]
            if (most is not None and ahead > most) or len(seen) > self._MOST_AHEAD:
                return
            yield unit

    def _bring(self, unit: int, is_urgent: bool) -> bool:
        """Begins the way of a unit that has no buffer; False when there is none and it is not urgent."""
        if unit in self._present:
            return True
        if not self._take(unit, is_urgent):
            return False
        if unit not in self._gathered:
            self._starts.append(Start(unit, "fetch"))
            return True
        if unit in self._reads and unit not in self._staged:
            self._stage(unit, is_urgent=True)
        self._staged.discard(unit)
        self._starts.append(Start(unit, "gather"))
        return True

    def _stage(self, unit: int, is_urgent: bool) -> bool:
        """Begins the read of a shard that will be gathered, if need be in place of one whose use lies farther ahead."""
        if len(self._staged) >= self._buffers.num_stages:
            mine = -1.0 if is_urgent else self._distance(unit)
            farthest = max(sorted(self._staged - self._users), key=self._distance, default=None)
            if farthest is None or self._distance(farthest) <= mine:
                return False
            self._staged.discard(farthest)
        self._staged.add(unit)
        self._starts.append(Start(unit, "read"))
        return True

    def _is_home(self, unit: int) -> bool:
        return unit not in self._present and unit not in self._staged

    def _take(self, unit: int, is_urgent: bool) -> bool:
        """Finds a unit room, if need be that of others whose next use lies farther ahead."""
        mine = -1.0 if is_urgent else self._distance(unit)
        while not self._has_room(unit):
            idle = sorted(self._present - self._users)
            farthest = max(idle, key=self._distance, default=None)
            if farthest is None or self._distance(farthest) <= mine:
                if is_urgent and len(self._present) < self._buffers.num_slots:
                    break  # more elements than allowed, but all are in use
                return False
            self.outdate(farthest)
        self._present.add(unit)
        return True

    def _has_room(self, unit: int) -> bool:
        live = sum(self._numels[each] for each in self._present) + self._numels[unit]
        return len(self._present) < self._buffers.num_slots and live <= (self._buffers.max_live_numel or math.inf)

    def _distance(self, unit: int) -> float:
        try:
            return self._sequence.index(unit, self._place) - self._place
        except ValueError:
            return math.inf

    def _between(self, unit: int) -> float:
        between = 0
        for each in self._sequence[self._place :]:
            if each == unit:
                return between
            between += self._numels[each]
        return math.inf


def _without_repeats(units: Iterable[int]) -> list[int]:
    found: list[int] = []
    for unit in units:
        if not found or found[-1] != unit:
            found.append(unit)
    return found


# ---- TileLoad: what a tile of optimizer states moves in a step, once its states have been written --------------------
#
# The tiles are those of `optim/tile.py`, the bytes those that `optim/tile.py` reads and writes:
#
#     read      states that rest on NVMe · its weights there, when a step needs them · its gradients there
#     written   states that rest on NVMe · its weights there
#     memory    what the kernel streams: states and weights both ways, gradients once

MOST_TILES = 20_000  # played one by one; of more, neighbours are taken together


class TileLoad(NamedTuple):
    """Bytes of one tile, or of neighbours taken together."""

    unit: int
    read_bytes: int
    lasting_bytes: int  # of those read, what rests from step to step: a head start may read it
    written_bytes: int
    memory_bytes: int
    num_tiles: int = 1


def tile_loads(
    units: Sequence[Unit], plan: Plan, policy: OffloadPolicy, shard_rank: int, most_tiles: int = MOST_TILES
) -> list[TileLoad]:
    """The loads of a step in the order in which tiles are stepped; of more than `most_tiles`, neighbours of a unit together."""
    cut: dict[Hashable, list[tuple[int, int]]] = {}  # of units that lie alike: a Transformer's blocks are cut once
    pieces: list[tuple[Unit, int, int]] = []
    for unit in units:
        if unit.is_trainable:
            alike = (unit.dtype, unit.shard_numel, *((s.numel, s.shard_numel, s.shard_offset) for s in unit.shards))
            if alike not in cut:
                cut[alike] = _cut(unit, plan.tile_numel, policy, shard_rank)
            pieces += [(unit, numel, size) for numel, size in cut[alike]]
    sizes = [size for _, _, size in pieces]
    stays = rests_on_host(sizes, plan.resident_bytes) if policy.optim is Tier.NVME else [True] * len(sizes)
    made: dict[tuple[int, int, bool], TileLoad] = {}
    loads = []
    for (unit, numel, size), at_home in zip(pieces, stays, strict=True):
        key = (unit.index, numel, at_home)
        if key not in made:
            made[key] = _load(unit, numel, 0 if at_home else size, size, plan, policy)
        loads.append(made[key])
    return _together(loads, -(-len(loads) // most_tiles))


def _cut(unit: Unit, tile_numel: int, policy: OffloadPolicy, shard_rank: int) -> list[tuple[int, int]]:
    """(elements, bytes of states) of a unit's tiles."""
    layout = planned_layout(unit, policy)
    numels = [numel for _, numel, _ in stepped_ranges(unit, tile_numel, shard_rank)]
    bytes_of = {numel: layout.total_bytes(numel) for numel in set(numels)}
    return [(numel, bytes_of[numel]) for numel in numels]


def _load(unit: Unit, numel: int, moved: int, size: int, plan: Plan, policy: OffloadPolicy) -> TileLoad:
    weights, grads = numel * unit.dtype.itemsize, numel * policy.precision.grad_dtype(unit.dtype).itemsize
    is_on_nvme = plan.unit_homes.get(unit.index) is Tier.NVME and not unit.is_resident
    reads_weight = is_on_nvme and planned_layout(unit, policy).reads_weight
    lasting = moved + (weights if reads_weight else 0)
    return TileLoad(
        unit.index,
        lasting + (grads if plan.grads is Tier.NVME else 0),
        lasting,
        moved + (weights if is_on_nvme else 0),
        2 * size + weights + (weights if planned_layout(unit, policy).reads_weight else 0) + grads,
    )


def _together(loads: list[TileLoad], num: int) -> list[TileLoad]:
    if num <= 1:
        return loads
    found: list[TileLoad] = []
    for _, of_unit in itertools.groupby(loads, key=lambda load: load.unit):
        alike = list(of_unit)
        groups = (alike[i : i + num] for i in range(0, len(alike), num))
        found += [TileLoad(*(group[0].unit, *map(sum, list(zip(*group, strict=True))[1:]))) for group in groups]
    return found


# ---- Wires: what a rank hands to collectives for a unit, to the byte, and what of that crosses to or from it ---------
#
#     gathers     a unit's parameters, in the dtype that the maths sees; as 8-bit blocks (qwZ); across nodes and then within
#                 them (two stages); within a node alone, once a second copy is there (hpZ)
#     updates     new weights of a unit that stays present, span by span
#     reductions  a unit's gradients, bucket by bucket: to their owners, then among copies of a part (MiCS); as 8-bit blocks
#                 within a node and then across (qgZ); or an all-reduce
#
# The payload of a call is what `zero/failures.py` counts: the larger side, what an all-gather fills, what a
# reduction takes. Of it crosses all but a rank's own part; in an all-reduce twice that, there and back. Padding between
# parameters is not sent. The few bytes by which ranks compare flags and add up norms are left out.


class Send(NamedTuple):
    """One call of a collective."""

    among: str
    """Which ranks: "world", "shard", "replica", "across" or "within" (zero/topology.py)."""
    payload_bytes: int
    crossing_bytes: int
    """Of the payload, what this rank receives, and as much that it sends."""


def gathers(unit: Unit, policy: OffloadPolicy, topology: Topology, is_second: bool = False) -> list[Send]:
    """The calls of one gather; `is_second`: from the second copy that hpZ keeps."""
    num_shards = topology.num_shards
    if num_shards == 1:
        return []
    numel = sum(shard.shard_numel for shard in unit.shards)
    whole_bytes = numel * num_shards * unit.full_dtype.itemsize
    if is_second and topology.within is not None:
        return [_to_all("within", whole_bytes, topology)]
    if unit.is_packed or (policy.quantised_gather and unit.dtype.is_floating_point):
        return [_to_all("shard", packed_bytes(unit.packed_numel) * num_shards, topology)]
    if policy.gather_way == "all_reduce":
        return [_added_up("shard", unit.full_bytes, topology)]
    return _plain(whole_bytes, topology)


def updates(unit: Unit, policy: OffloadPolicy, topology: Topology) -> list[Send]:
    """The calls by which new weights of a unit that stays present reach every rank."""
    num_shards = topology.num_shards
    if num_shards == 1:
        return []
    sends: list[Send] = []
    for span in spans_of(unit, num_shards, policy.allgather_bucket_numel):
        if policy.allgather_partitions:
            numel = sum(part.numel for part in cut_span(unit, span))
            sends += _plain(numel * num_shards * unit.full_dtype.itemsize, topology)
        else:
            span_bytes = (span.stop - span.start) * unit.dtype.itemsize
            sends.append(_to_all("shard", span_bytes * num_shards, topology))
    return sends


def buckets_of(unit: Unit, policy: OffloadPolicy, topology: Topology) -> list[Bucket]:
    """The buckets that a unit's gradients are reduced in."""
    return cut(unit, topology.num_shards, policy.reduce_bucket_numel, policy.contiguous_gradients)


def reductions(bucket: Bucket, policy: OffloadPolicy, topology: Topology) -> list[Send]:
    """The calls that reduce one bucket."""
    if topology.world == 1:
        return []
    itemsize = bucket.dtype.itemsize if policy.reduce_dtype is None else DTYPES[policy.reduce_dtype].itemsize
    column_bytes = bucket.column_numel * itemsize
    if not scatters(topology.num_shards, policy):
        return [_added_up("world", column_bytes * bucket.num_columns, topology)]
    if topology.packs_reductions:
        sends = _packed(bucket, topology)
    else:
        sends = [_to_all("shard", column_bytes * bucket.num_columns, topology)]
    if topology.num_replicas > 1:
        sends.append(_added_up("replica", column_bytes, topology))
    return sends


def keeps_second(policy: OffloadPolicy, topology: Topology) -> bool:
    """Whether gathers but the first after a step come from a second copy near by (hpZ)."""
    return keeps_secondary(policy, topology.num_shards) and topology.within is not None


def _plain(whole_bytes: int, topology: Topology) -> list[Send]:
    """Every rank's part of something to all; where that is done in two stages, across nodes first."""
    if topology.gathers_in_stages and topology.across is not None:
        from_nodes = whole_bytes // topology.num_shards * topology.across.size
        return [_to_all("across", from_nodes, topology), _to_all("within", whole_bytes, topology)]
    return [_to_all("shard", whole_bytes, topology)]


def _packed(bucket: Bucket, topology: Topology) -> list[Send]:
    """Blocks for every rank; over several nodes for the near ones first, and of their sums one for each node."""
    if topology.across is None or topology.within is None:
        return [_to_all("shard", topology.num_shards * packed_bytes(bucket.column_numel), topology)]
    num_across, num_within = topology.across.size, topology.within.size
    return [
        _to_all("within", num_within * packed_bytes(num_across * bucket.column_numel), topology),
        _to_all("across", num_across * packed_bytes(bucket.column_numel), topology),
    ]


def _to_all(among: str, payload_bytes: int, topology: Topology) -> Send:
    """Every rank's part goes to every other."""
    num_ranks = _size(among, topology)
    return Send(among, payload_bytes, payload_bytes * (num_ranks - 1) // num_ranks)


def _added_up(among: str, payload_bytes: int, topology: Topology) -> Send:
    num_ranks = _size(among, topology)
    return Send(among, payload_bytes, 2 * payload_bytes * (num_ranks - 1) // num_ranks)


def _size(among: str, topology: Topology) -> int:
    peers = {"across": topology.across, "within": topology.within}.get(among)
    sizes = {"world": topology.world, "shard": topology.num_shards, "replica": topology.num_replicas}
    return peers.size if peers is not None else sizes[among]
