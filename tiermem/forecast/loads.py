"""Loads: the units, tiles and collectives of a step, in seconds of maths and in bytes."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from tiermem.forecast.rates import Compute
from tiermem.optim.tile import TileRoute, routes_of_tiles, stepped_ranges
from tiermem.plans.plan import Plan
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.topology import Topology
from tiermem.swap.base.native import NORM_BLOCK
from tiermem.swap.base.parts import Dither, StepParts, StepRule
from tiermem.swap.kernels.torch_step import block_sums_in_torch, memory_traffic, step_in_torch
from tiermem.units.experts import (
    MOST_SHARE,
    Fused,
    expected_share,
    fused_experts,
    used_numel,
)
from tiermem.units.quantised import INT8
from tiermem.units.state_layout import StateLayout, planned_layout
from tiermem.units.unit import Division, Unit, ranges_in, reads_weights_again
from tiermem.wires.gather import spans_of
from tiermem.wires.packed import gathers_packed
from tiermem.wires.reduce import Bucket

# ---- modules and their units ---------------------------------------------------------------------


class Use(NamedTuple):
    """One module in a forward and a backward: the units that it needs and the seconds of its
    maths."""

    name: str
    """The module's."""
    units: tuple[int, ...]
    """Indices of the units that it needs, streamed or resident."""
    forward_s: float
    """Seconds of maths in forward."""
    backward_s: float
    """Seconds of maths in backward."""
    reads_again: bool = True
    """Whether its backward needs the units, too."""
    block: str = ""
    """The name of the block that it is in, a child of an outermost ModuleList; empty outside of
    blocks."""
    parts: Mapping[int, float] = types.MappingProxyType({})
    """The part of a unit that is fetched where its experts come by rows, by index."""


class _Counted(NamedTuple):
    """A use, with the elements of its matrices instead of seconds."""

    use: Use
    numel: int
    units: list[Unit]


class CountedUses:
    """The uses of one forward, in the order in which modules are defined. The model may be on the
    meta device.

    `weights/prefetcher.py` also takes that order as its first guess. A module's maths is computed
    from the elements of its parameters of two dimensions or more; embeddings do not count, because
    they only look up. Of fused experts those count that a token chooses; of others all, so their
    time is an upper bound.

    only_blocks: nothing counts outside of lists of blocks.
    """

    def __init__(self, model: nn.Module, division: Division, only_blocks: bool) -> None:
        self._fused = fused = fused_experts(model)
        names = {module: name for name, module in model.named_modules()}
        blocks = _blocks_of(model)
        self._uses: list[_Counted] = []
        counted: set[nn.Parameter] = set()
        for module, needed in division.triggers.items():
            units = [division.units[index] for index in needed]
            matrices = _matrices(module) & {shard.param for unit in units for shard in unit.shards}
            counted |= matrices
            counts = not only_blocks or module in blocks
            numel = sum(used_numel(param, fused) for param in matrices) if counts else 0
            use = Use(
                names[module],
                tuple(needed),
                0.0,
                0.0,
                reads_weights_again(module),
                blocks.get(module, ""),
            )
            self._uses.append(_Counted(use, numel, units))
        self._left = sum(
            used_numel(param, fused)
            for param in _left(blocks if only_blocks else model.modules()) - counted
        )

    def timed(self, compute: Compute) -> list[Use]:
        """With the seconds of their maths."""
        uses = [
            use._replace(
                forward_s=numel * compute.forward_s,
                backward_s=numel * compute.backward_s,
                parts={
                    unit.index: _fetched_part(unit, self._fused, compute.num_tokens)
                    for unit in units
                },
            )
            for use, numel, units in self._uses
        ]
        if (left := self._left) or not uses:
            seconds = left * compute.forward_s, left * compute.backward_s
            uses.append(Use("what is always present", (), *seconds))
        last = uses[-1]
        uses[-1] = last._replace(
            forward_s=last.forward_s + (compute.rest_forward_s or 0.0),
            backward_s=last.backward_s + (compute.rest_backward_s or 0.0),
        )
        return uses


def uses_of(model: nn.Module, division: Division, compute: Compute) -> list[Use]:
    """Returns the uses of one forward; see CountedUses."""
    return CountedUses(model, division, compute.rest_forward_s is not None).timed(compute)


def _fetched_part(unit: Unit, fused: Mapping[nn.Parameter, Fused], num_tokens: int | None) -> float:
    """The part of a unit that so many tokens are expected to fetch."""
    rows = [shard for shard in unit.shards if shard.num_rows]
    if not rows or num_tokens is None:
        return 1.0
    share = expected_share(num_tokens, fused[rows[0].param].num_chosen, rows[0].num_rows)
    skipped = (1.0 - share) * sum(shard.numel for shard in rows)
    return 1.0 if share > MOST_SHARE else 1.0 - skipped / unit.full_numel


def _blocks_of(model: nn.Module) -> dict[nn.Module, str]:
    """Returns the name of the block of each module in a list of blocks."""
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():  # outer lists come first
        if isinstance(module, nn.ModuleList):
            for child_name, child in module.named_children():
                for inner in child.modules():
                    found.setdefault(inner, f"{name}.{child_name}")
    return found


def _matrices(module: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters of a module and its children with two dimensions or more, without
    embeddings."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    looked_up = {param for each in embeddings for param in each.parameters(recurse=False)}
    return {param for param in module.parameters() if param.dim() > 1} - looked_up


def _left(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Returns the matrices that these modules own directly, without embeddings."""
    owned = (
        module.parameters(recurse=False)
        for module in modules
        if not isinstance(module, nn.Embedding)
    )
    return {param for params in owned for param in params if param.dim() > 1}


# ---- tiles of optimizer states -------------------------------------------------------------------

_MOST_TILES = 500
"""Cut one by one; of more, larger ones are counted: the same bytes, dealt out in larger pieces."""


class TileLoad(NamedTuple):
    """Bytes that tiles of one unit, stepped in one place, move in a step after the first step.

    read      states on NVMe, its weights on NVMe if a step needs them, its gradients on NVMe
    written   states on NVMe, its weights on NVMe
    memory    bytes that the CPU's kernel moves in memory: states both ways, weights written and, if needed, read, gradients
              once; none for a tile that an accelerator steps
    device    the same bytes, of a tile that an accelerator steps in its own memory
    torch     the bytes of that memory that its step's torch operations read and write
    down, up  gradients and weights on their way to an accelerator that steps the tile, and weights on their way back; states
              too, both ways, of a tile that is sent there
    brought   gradients and weights that rest on an accelerator, of a tile that the CPU steps; the weights go down again
    """

    unit: int
    read_bytes: int
    # of read_bytes: states and weights, which exist before backward, so a head start may read them
    lasting_bytes: int
    written_bytes: int
    memory_bytes: int
    device_bytes: int = 0
    torch_bytes: int = 0
    down_bytes: int = 0
    up_bytes: int = 0
    brought_bytes: int = 0
    num_tiles: int = 1

    def without_gradients(self) -> TileLoad:
        """The load where memory still has the gradients that go to NVMe."""
        return self._replace(read_bytes=self.lasting_bytes)


def tile_loads(plan: Plan, policy: OffloadPolicy, shard_rank: int) -> list[TileLoad]:
    """Returns the loads of a step, in the order of units: for each what the CPU steps, and what an
    accelerator does."""
    tile_numel = plan.tile_numel
    units = plan.division.units
    num_tiles = sum(-(-unit.shard_numel // tile_numel) for unit in units if unit.is_trainable)
    times = max(1, -(-num_tiles // _MOST_TILES))  # each as large as a tile is
    cut: dict[int, list[tuple[int, int]]] = {}  # by layout
    pieces: list[tuple[int, int, int]] = []
    for unit, alike in zip(units, plan.division.layouts, strict=True):
        if unit.is_trainable:
            if alike not in cut:
                layout = planned_layout(unit, policy)
                ranges = stepped_ranges(unit, times * tile_numel, shard_rank)
                cut[alike] = [(numel, layout.total_bytes(numel)) for _, numel, _ in ranges]
            pieces += [(unit.index, numel, size) for numel, size in cut[alike]]
    _, numels, sizes = zip(*pieces, strict=True) if pieces else ((), (), ())
    routes = routes_of_tiles(sizes, numels, plan)
    counts = collections.Counter(zip(pieces, routes, strict=True))
    of_kind: dict[Hashable, TileLoad] = {}
    found = collections.defaultdict[tuple[int, bool], list[TileLoad]](list)
    for ((index, numel, size), route), count in counts.items():
        unit = units[index]
        home = plan.unit_homes.get(index)
        kind = plan.division.layouts[index], unit.is_resident, home, numel, route
        if kind not in of_kind:
            load = _load(unit, numel, route, size, plan, policy)
            of_kind[kind] = load._replace(num_tiles=max(1, round(numel / tile_numel)))
        load = of_kind[kind]
        sums = TileLoad(index, *(count * each for each in load[1:]))
        found[index, bool(load.device_bytes)].append(sums)
    return [
        TileLoad(index, *map(sum, zip(*(load[1:] for load in loads), strict=True)))
        for (index, _), loads in sorted(found.items())
    ]


def still_buffered(plan: Plan, uses: Sequence[Use], is_gpu: bool) -> set[int]:
    """The units, by index, whose gradients the buffers of gradients still have when the last
    backward has ended."""
    if plan.grads is not Tier.NVME or is_gpu:
        return set()
    used = dict.fromkeys(index for use in uses for index in use.units)
    trained = [unit.index for unit in plan.division.units if unit.is_trainable]
    at_last = [index for index in reversed(used) if index in trained] + [
        each for each in trained if each not in used
    ]
    return set(at_last[-plan.gradients.num :])


def _load(
    unit: Unit,
    numel: int,
    route: TileRoute,
    size: int,
    plan: Plan,
    policy: OffloadPolicy,
) -> TileLoad:
    is_there = route.engine is Tier.DEVICE
    moved = size if route.states is Tier.NVME else 0
    weights = numel * unit.dtype.itemsize
    home = plan.unit_homes.get(unit.index)
    layout = planned_layout(unit, policy)
    grad_dtype = policy.precision.grad_dtype(unit.dtype)
    grads = numel * grad_dtype.itemsize
    is_on_nvme = home is Tier.NVME and not unit.is_resident
    read_weights = weights if layout.reads_weight else 0
    lasting = moved + (read_weights if is_on_nvme else 0)
    stepped = 2 * size + weights + read_weights + grads
    rests_there = Tier.DEVICE in (home, plan.states if unit.is_resident else None)
    is_far = plan.brings_weights and home is Tier.DEVICE and not is_there
    up = weights if is_there and not rests_there else 0
    down = up + (grads if is_there and plan.grads is not Tier.DEVICE else 0) + weights * is_far
    if is_there and route.states is not Tier.DEVICE:
        up += size
        down += size - (weights - read_weights) * is_on_nvme
    torch_bytes = torch_traffic(layout, grad_dtype) if is_there else 0
    return TileLoad(
        unit.index,
        lasting + (grads if plan.grads is Tier.NVME else 0),
        lasting,
        moved + (weights if is_on_nvme else 0),
        0 if is_there else stepped,
        stepped if is_there else 0,
        int(torch_bytes * numel),
        down,
        up,
        (grads if plan.brings_gradients and not is_there else 0) + weights * is_far,
    )


# with 0, 1, 2 and 3 moments: a plan does not know the rule
_RULES = ("sgd", "lion", "adamw", "adamw")


@functools.cache
def torch_traffic(layout: StateLayout, grads: torch.dtype) -> float:
    """Bytes of memory that a step on an accelerator moves for an element, as its torch operations
    are written."""
    numel = NORM_BLOCK
    states = layout.views(torch.zeros(layout.total_bytes(numel), dtype=torch.uint8), numel)
    weight, grad = (torch.zeros(numel, dtype=dtype) for dtype in (layout.dtype, grads))
    rule = StepRule(_RULES[layout.num_moments], 0.0, 0.0)
    parts = StepParts(weight, states.master, grad, states.moments)
    dither = Dither(0, 0, 0) if layout.precision.is_stochastic else None
    return memory_traffic(lambda: step_in_torch(rule, parts, dither)) / numel


@functools.cache
def gradient_traffic(dtype: torch.dtype, passes: float | None = None) -> float:
    """Bytes of memory that an accelerator moves for an element of a gradient that stays there: a
    copy, and its norm.

    passes: of the norm over the gradient; None: as its torch operations make.
    """
    if passes is not None:
        return (2 + passes) * dtype.itemsize
    grad = torch.zeros(NORM_BLOCK, dtype=dtype)
    return 2 * dtype.itemsize + memory_traffic(lambda: block_sums_in_torch(grad, 0)) / NORM_BLOCK


# ---- collectives ---------------------------------------------------------------------------------
#
#     gathers     a unit's parameters in the dtype of the maths; as 8-bit blocks (qwZ); across nodes and then within nodes
#                 (two stages); within a node only, if there is a secondary copy (hpZ)
#     updates     new weights of a resident unit, span by span
#     reductions  a unit's gradients, bucket by bucket: to their owners, then among copies of a part (MiCS); as 8-bit blocks
#                 within a node and then across nodes (qgZ); or by an all-reduce
#
# Padding between parameters is not sent. The few bytes by which ranks compare flags and add norms
# are left out.


class Send(NamedTuple):
    """One call of a collective."""

    among: str
    """The ranks: "world", "shard", "replica", "across" or "within" (ranks/topology.py)."""
    payload_bytes: int
    """The larger side of the call, as `ranks/failures.py` counts it: the output of an all-gather,
    the input of a reduction."""
    crossing_bytes: int
    """Bytes that this rank receives; it sends the same number. All of the payload but its own part;
    twice that in an all-reduce."""


def gathers(
    unit: Unit, policy: OffloadPolicy, topology: Topology, is_second: bool = False
) -> list[Send]:
    """Returns the calls of one gather. is_second: it gathers from the secondary copy of hpZ."""
    num_shards = topology.num_shards
    if num_shards == 1:
        return []
    numel = sum(shard.shard_numel for shard in unit.shards)
    whole_bytes = numel * num_shards * unit.travels_as.itemsize
    if is_second and topology.within is not None:
        return [_send("within", whole_bytes, topology)]
    if gathers_packed(unit, policy, num_shards):
        return [_send("shard", unit.packed_bytes * num_shards, topology)]
    return _plain(whole_bytes, topology)


def updates(unit: Unit, policy: OffloadPolicy, topology: Topology) -> list[Send]:
    """Returns the calls that send new weights of a resident unit to every rank."""
    num_shards = topology.num_shards
    if num_shards == 1:
        return []
    sends: list[Send] = []
    for span in spans_of(unit, num_shards, policy.allgather_bucket_numel):
        numel = sum(part.numel for part in ranges_in(unit, span))
        sends += _plain(numel * num_shards * unit.travels_as.itemsize, topology)
    return sends


def reductions(bucket: Bucket, topology: Topology) -> list[Send]:
    """Returns the calls that reduce one bucket."""
    if topology.world == 1:
        return []
    if topology.num_shards == 1:
        return [_send("world", bucket.num_bytes, topology, 2)]
    sends = (
        _packed(bucket, topology)
        if topology.packs_reductions
        else [_send("shard", bucket.num_bytes, topology)]
    )
    if topology.num_replicas > 1:
        sends.append(_send("replica", bucket.num_bytes // bucket.num_columns, topology, 2))
    return sends


def _plain(whole_bytes: int, topology: Topology) -> list[Send]:
    """An all-gather; in two stages, first across nodes and then within nodes."""
    if topology.gathers_in_stages and topology.across is not None:
        from_nodes = whole_bytes // topology.num_shards * topology.across.size
        return [_send("across", from_nodes, topology), _send("within", whole_bytes, topology)]
    return [_send("shard", whole_bytes, topology)]


def _packed(bucket: Bucket, topology: Topology) -> list[Send]:
    """A reduction of 8-bit blocks; on several nodes first within each node, then the node's sums
    across nodes."""
    if topology.across is None or topology.within is None:
        return [
            _send("shard", topology.num_shards * INT8.packed_bytes(bucket.column_numel), topology)
        ]
    num_across = topology.across.size
    num_within = topology.within.size
    return [
        _send("within", num_within * INT8.packed_bytes(num_across * bucket.column_numel), topology),
        _send("across", num_across * INT8.packed_bytes(bucket.column_numel), topology),
    ]


def _send(among: str, payload_bytes: int, topology: Topology, num_passes: int = 1) -> Send:
    """A call in which every rank's part goes to every other rank; two passes add up first, and then
    return the sums."""
    peers = {"across": topology.across, "within": topology.within}.get(among)
    sizes = {
        "world": topology.world,
        "shard": topology.num_shards,
        "replica": topology.num_replicas,
    }
    num_ranks = peers.size if peers is not None else sizes[among]
    return Send(among, payload_bytes, num_passes * payload_bytes * (num_ranks - 1) // num_ranks)
