"""Restore: a saved step put where a model's states rest, on any number of ranks, tiers, tiles and precisions.

    fit     names and shapes, both lists told before anything is changed      fitting.py
    put     this rank's part of every weight and state                        filling.py      every rank by itself
    agree   whether that has gone well everywhere                             exchange
    show    counts of steps, buffers, and what is held present                                all ranks together

A rank reads its own elements and the blocks around them, tile by tile: no parameter is ever whole in memory. The next tiles
are read while one is filled and others are written, all within the buffers that the optimizer's tiles have. When a rank
fails, all raise; then the model is a mixture of old and new, which no step touches until another restore has gone well.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import MASTER, WEIGHT
from tiermem.checkpoint.opening.filling import Filling, Wants, shown
from tiermem.checkpoint.opening.fitting import Fitted
from tiermem.checkpoint.opening.source import CHUNK_NUMEL, Elements, Source
from tiermem.checkpoint.opening.verified import LEAST_AREA_BYTES
from tiermem.checkpoint.together import everywhere
from tiermem.swap.arena import PAGE_BYTES, Slot
from tiermem.zero.ranks.topology import Topology
from tiermem.zero.shards import Shards
from tiermem.zero.unit import Shard
from tiermem.zero.weights.live import LiveUnit
from tiermem.zero.weights.values import initial_master

_LENT_OF = 4  # buffers of tiles, one is lent to what is read ahead

logger = logging.getLogger("tiermem")


def restore(shards: Shards, source: Source, fitted: Fitted, wants: Wants) -> None:
    """Puts weights, buffers and states in place. Collective; blocks.

    Raises DamagedState and OSError where reading fails, RuntimeError on the other ranks.
    """
    shards.is_torn = False  # what a restore has left that failed is overwritten
    shards.check_may_change()
    shards.residency.empty()
    filling = Filling(source, fitted.params, shards.workers, wants)
    try:
        everywhere(shards.topology, "restoring its part", lambda: _put(shards, source, fitted, wants, filling))
        _show(shards, source, fitted, wants, filling)
    except BaseException:
        shards.is_torn = True
        raise
    if filling.conversions and shards.topology.rank == 0:
        logger.info("restored in other formats than were saved: %s", shown(filling.conversions))


def _put(shards: Shards, source: Source, fitted: Fitted, wants: Wants, filling: Filling) -> None:
    """This rank's part."""
    shards.drop_head_start()
    untiled = [
        (live, shard)
        for live, shard in shards.parameters()
        if wants.weights and shard in fitted.params and not (shards.states is not None and live.unit.is_trainable)
    ]
    with _reading_ahead(shards, source):
        source.follow(_in_order(shards, source, fitted, filling, untiled))
        if shards.states is not None:
            keeps = not (wants.weights and wants.states) or not fitted.is_complete
            shards.states.fill(filling.fill, keeps)
        for live, shard in untiled:
            _put_weight(shards, live, shard, fitted.params[shard], filling)
        for tensor, name in fitted.buffers if wants.weights else ():
            _put_buffer(tensor, name, source, shards.topology)


@contextlib.contextmanager
def _reading_ahead(shards: Shards, source: Source) -> Iterator[None]:
    """Lends the source a part of the buffers that tiles pass through, where they are large enough: nothing more is taken."""
    pool, slots = shards.tile_pool, list[Slot]()
    try:
        for _ in range(pool.count // _LENT_OF if pool is not None and pool.slot_bytes >= LEAST_AREA_BYTES else 0):
            assert pool is not None
            slot = pool.take()
            assert slot is not None  # nothing passes through the buffers now
            slots.append(slot)
        with source.lent([slot.tensor[: slot.num_bytes // PAGE_BYTES * PAGE_BYTES] for slot in slots]):
            yield
    finally:
        for slot in slots:
            assert pool is not None
            pool.give_back(slot)


def _in_order(
    shards: Shards, source: Source, fitted: Fitted, filling: Filling, untiled: Sequence[tuple[LiveUnit, Shard]]
) -> Iterator[Elements]:
    """What is read, in order: tiles, then the weights of what has none."""
    rank = shards.topology.shard_rank
    for tile in shards.states.tiles if shards.states is not None else ():
        yield from filling.reads(tile, rank)
    for live, shard in untiled:
        name, first, numel = fitted.params[shard], shard.shard_numel * rank, shards.values.num_mine(shard)
        state = WEIGHT if source.kind(name, WEIGHT) == kinds.name_of(live.unit.dtype) else MASTER
        for start in range(0, numel, CHUNK_NUMEL):
            yield Elements(name, state, first + start, min(CHUNK_NUMEL, numel - start))


def _put_weight(shards: Shards, live: LiveUnit, shard: Shard, name: str, filling: Filling) -> None:
    """The weight of a parameter that has no tiles, in pieces; with the fp32 value that its master will start from."""
    first, numel = shard.shard_numel * shards.topology.shard_rank, shards.values.num_mine(shard)
    if initial_master(live.unit) in shards.store:
        shards.values.put_initial_master(live.unit, shard, filling.weight(name, first, numel, torch.float32))
    for start in range(0, numel, CHUNK_NUMEL):
        values = filling.weight(name, first + start, min(CHUNK_NUMEL, numel - start), live.unit.dtype)
        shards.values.put_elements(live, shard.shard_offset + start, values)


def _put_buffer(tensor: torch.Tensor, name: str, source: Source, topology: Topology) -> None:
    """A buffer: this rank's own where ranks had different ones and are as many as they were, else rank 0's."""
    own = f"{WEIGHT}.rank{topology.rank}"
    state = own if own in source.states(name) and source.manifest.world == topology.world else WEIGHT
    if tensor.numel():
        saved = source.read(name, state, 0, tensor.numel()).view(tensor.shape)
        with torch.no_grad():
            tensor.copy_(saved)


def _show(shards: Shards, source: Source, fitted: Fitted, wants: Wants, filling: Filling) -> None:
    """Counts, and what ranks hold present of one another's parts. Collective."""
    for live in shards.units:
        shards.refresh(live.unit.shards[0].param)
        for shard in live.unit.shards if live.unit.is_trainable else ():
            if shard in fitted.params:
                _count(shards, source, fitted.params[shard], live, shard, filling, wants)


def _count(
    shards: Shards, source: Source, name: str, live: LiveUnit, shard: Shard, filling: Filling, wants: Wants
) -> None:
    if wants.states:
        shard.num_steps = source.parameters[name].num_steps
        shard.has_moments = shard.num_steps == 0 and shard in filling.has_moments
    keeps_master = shards.policy.precision.master_of(live.unit.dtype) is not None
    is_wider = source.kind(name, MASTER) is not None or source.kind(name, WEIGHT) == "fp32"  # than the weight here
    shard.has_master = wants.masters and shard.num_steps == 0 and keeps_master and is_wider
