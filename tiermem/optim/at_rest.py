"""RestingTiles: optimizer states cut into tiles, which rest on a tier of a store.

    a state of a parameter    [ tile | tile |   tile   ]    a piece in each tile that holds elements of the parameter

`state` and `load` read and write one state of one parameter, wherever its tiles rest. Both are
exact in every precision: fp32 values that came from a smaller format convert back to the same bits.
`export` and `restore` are entries of a state dict.

Subclasses say where weights are: in a sharded model (tiles.py), or in ordinary tensors
(resting.py). They also step the tiles.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from tiermem.optim.ordinary import STEP, State, has_moments_of, num_steps_of, value_of
from tiermem.optim.tile import PIECE_NUMEL, StateTile, tile_runs
from tiermem.optimizers.base import Group, Rule
from tiermem.policy import OffloadPolicy, Tier
from tiermem.swap.base.native import Workers, narrow_part, widen_part
from tiermem.swap.store.store import TensorStore
from tiermem.swap.store.stream import Parts
from tiermem.units.state_layout import MASTER, StatePart, StatePieces, is_positive, keeps_sums
from tiermem.units.unit import Shard, ShardRange
from tiermem.weights.values import Values

T = TypeVar("T", bound=StateTile)

FindRule = Callable[[nn.Parameter], tuple[Group, Rule] | None]
"""Returns a parameter's group and rule, or None if the optimizer does not hold the parameter."""


class RestingTiles(abc.ABC, Generic[T]):
    """The tiles of some units.

    Args:
        store: has the states.
        at_rest: reads and writes parts of them.
        workers: threads of the kernels.
        policy: gives the precision; says whether states on NVMe have checksums, and whether saved
            masters are taken.
        shard_rank: of this rank among those that hold parts of the parameters.
        find_rule: the group and the rule of each parameter.
        half_loaded: the parameters whose states have begun to be replaced; until all are, no step
            goes on.
    """

    def __init__(
        self,
        store: TensorStore,
        at_rest: Parts | Values,
        workers: Workers,
        policy: OffloadPolicy,
        shard_rank: int,
        find_rule: FindRule,
        half_loaded: set[Hashable],
    ) -> None:
        self._store = store
        self._at_rest = at_rest
        self._workers = workers
        self._policy = policy
        self._shard_rank = shard_rank
        self._find_rule = find_rule
        self.half_loaded = half_loaded
        self.tiles: list[T] = []
        # of each parameter, in the order of elements
        self._pieces: dict[Shard, list[tuple[T, ShardRange]]] = {}

    # ---- what a subclass knows -------------------------------------------------------------------

    @abc.abstractmethod
    def check_whole(self) -> None:
        """Raises RuntimeError when the states are of two different steps. Blocks."""

    @abc.abstractmethod
    def take_writes(self, shard: Shard) -> None:
        """Takes over what the user has written to a weight. Blocks; raises OSError."""

    @abc.abstractmethod
    def whole(self, shard: Shard, mine: torch.Tensor) -> torch.Tensor:
        """A state as its parameter's owner sees it, from this rank's part. Collective where ranks
        hold parts."""

    @abc.abstractmethod
    def mine(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a state, flat and without padding. whole: as `value_of` gives it."""

    @abc.abstractmethod
    def _start(self, tiles: Sequence[T]) -> None:
        """Makes and writes the first states of tiles. Blocks; raises OSError."""

    @abc.abstractmethod
    def _weight_in(self, tile: T, elements: ShardRange) -> torch.Tensor:
        """A copy of elements of a weight in a tile, on the CPU. Blocks; raises OSError."""

    @abc.abstractmethod
    def _put_weight(self, tile: T, elements: ShardRange, weight: torch.Tensor) -> None:
        """Makes elements of a weight in a tile those of a master that is loaded. Blocks; raises
        OSError."""

    def _first_master(self, tile: T, elements: ShardRange) -> torch.Tensor:
        """The masters of elements that a tile will have when it is started, in fp32."""
        return self._weight_in(tile, elements).float()

    # ---- states of one parameter -----------------------------------------------------------------

    def names(self, shard: Shard) -> tuple[str, ...]:
        """The names of a parameter's moments, as in torch; none for a parameter that the optimizer
        does not hold."""
        found = self._find_rule(shard.param)
        return () if found is None else found[1].moments

    def keeps_master(self, shard: Shard) -> bool:
        """Whether a parameter has a master beside it."""
        return self._policy.precision.master_of(shard.param.dtype) is not None

    def pieces(self, shard: Shard) -> list[tuple[T, ShardRange]]:
        """The tiles that hold a parameter, with its elements in each, in the order of its
        elements. Elements of a large tile come in several pieces."""
        return list(self._pieces.get(shard, ()))

    def is_started(self, shard: Shard) -> bool:
        """Whether a parameter has states, which a step or a load has made."""
        return any(tile.is_started for tile, _ in self.pieces(shard))

    def state(self, shard: Shard, name: str) -> torch.Tensor:
        """A copy of this rank's part of one state of a parameter: fp32, flat, without padding.
        Blocks; raises OSError.

        `name` is MASTER, which every parameter has, or one of its moments. Takes twice the memory
        of that part.
        """
        self.take_writes(shard)
        return self.read(shard, name)

    def read(self, shard: Shard, name: str) -> torch.Tensor:
        """`state`, without taking over what the user has written."""
        pieces = [self.piece(tile, elements, name) for tile, elements in self.pieces(shard)]
        return torch.cat(pieces) if pieces else torch.empty(0)

    @abc.abstractmethod
    def load(self, shard: Shard, name: str, values: torch.Tensor) -> None:
        """Restores a state from fp32 values of the form that `state` returns, exactly. Blocks.

        After loading moments the caller sets the number of steps that they have seen
        (`Shard.set_steps`). Raises ValueError for another number of values, OSError when a transfer
        fails.
        """

    def put(self, shard: Shard, name: str, values: torch.Tensor) -> None:
        """`load` on this rank alone: the caller has dropped reads ahead, and makes what is present
        show a new weight."""
        pieces = self.pieces(shard)
        due = _num_elements(pieces)
        if values.shape != (due,):
            raise ValueError(
                f"{name} of {shard.name}: {tuple(values.shape)} values were given; this rank's "
                f"part has ({due},)"
            )
        unstarted = [tile for tile, _ in pieces if not tile.is_started]
        if unstarted:
            self._start(unstarted)
        done = 0
        for tile, elements in pieces:
            self._write_piece(
                tile, elements, name, values[done : done + elements.numel].to(torch.float32)
            )
            done += elements.numel
        shard.note_loaded(name != MASTER, name == MASTER and self.keeps_master(shard))

    def piece(self, tile: T, elements: ShardRange, name: str) -> torch.Tensor:
        """A copy of one state of elements of a tile, in fp32; before the tile's first step, the
        state's first value. Blocks."""
        part = self._part_of(tile, elements.shard, name)
        if not tile.is_started and name == MASTER:
            return self._first_master(tile, elements)
        if not tile.is_started:
            return torch.zeros(elements.numel)
        if part is None:
            return self._weight_in(tile, elements).float()
        weight = self._weight_in(tile, elements) if part.kind == "split" else None
        ranges = tile.bytes_of(part, elements)
        bytes_of = (slice(each.offset, each.offset + each.num_bytes) for each in ranges)
        data = torch.cat(
            [self._at_rest.read_part(tile.entry, torch.uint8, each) for each in bytes_of]
        )
        return widen_part(self._workers, part.view(data, elements.numel), weight, is_positive(name))

    def _write_piece(self, tile: T, elements: ShardRange, name: str, values: torch.Tensor) -> None:
        part = self._part_of(tile, elements.shard, name)
        weight = values.to(tile.dtype)
        if part is not None:
            ranges = tile.bytes_of(part, elements)
            data = torch.empty(sum(each.num_bytes for each in ranges), dtype=torch.uint8)
            narrow_part(
                self._workers, values, part.view(data, elements.numel), weight if part.kind == "split" else None,
                is_positive(name),
            )  # fmt: skip
            for each, piece in zip(
                ranges, data.split([each.num_bytes for each in ranges]), strict=True
            ):
                self._at_rest.write_part(tile.entry, each.offset, piece)
        if name == MASTER:
            self._put_weight(tile, elements, weight)

    def _part_of(self, tile: T, shard: Shard, name: str) -> StatePart | None:
        """The part of a tile that holds a state; None: the parameter itself. Raises ValueError for
        an unknown state, and for one without room."""
        if name == MASTER:
            return tile.layout.master
        names = self.names(shard)
        if name not in names:
            raise ValueError(
                f"{shard.name} has no state {name!r}; it has {', '.join([MASTER, *names])}"
            )
        number = names.index(name)
        if number >= tile.layout.num_moments:
            raise ValueError(
                f"{shard.name} has room for {tile.layout.num_moments} moments and now keeps "
                f"{', '.join(names)}: build the optimizer with the options that its groups have now"
            )
        return tile.layout.moment(number)

    # ---- as `optimizer.state` and state dicts have them ------------------------------------------

    def read_state(self, shard: Shard, name: str) -> torch.Tensor:
        """A copy of a moment, fp32. Blocks; raises OSError, and RuntimeError where ranks hold
        parts."""
        self.check_whole()
        return self.state(shard, name).view(shard.shape)

    def write_state(self, shard: Shard, name: str, value: torch.Tensor | None) -> None:
        """Replaces a moment; None: by zeros. Every rank gives the whole value. Blocks; raises
        OSError."""
        zeros = torch.zeros(_num_elements(self.pieces(shard)))
        self.load(shard, name, zeros if value is None else self.mine(shard, value))

    def export(self, shard: Shard, rule: Rule) -> State:
        """The entry of a parameter: its step, moments and master, fp32, as `whole` gives them.
        Collective where ranks hold parts; blocks; raises OSError."""
        self.check_whole()
        found: State = {STEP: torch.tensor(float(shard.num_steps))}
        moments = rule.moments if shard.num_steps or shard.has_moments else ()
        for name in (*moments, MASTER) if self.keeps_master(shard) else moments:
            found[name] = self.whole(shard, self.state(shard, name))
        return found

    def restore(self, shard: Shard, given: Mapping[str, Any], rule: Rule) -> None:
        """Puts an entry where a parameter's states rest; an empty one: the parameter has no steps.
        Collective where ranks hold parts; blocks.

        Without `master` in the entry, the master is made from the weight. Raises ValueError for a
        state that is missing or has another shape, OSError when a transfer fails.
        """
        self.take_writes(shard)
        has_moments = has_moments_of(given, rule)
        takes_master = MASTER in given and self._policy.loads_masters
        masters = [MASTER] if self.keeps_master(shard) else []
        for name in (*rule.moments, *masters) if has_moments else masters:
            if name != MASTER or takes_master:
                mine = self.mine(shard, value_of(given, name, shard.param, shard.name))
            else:
                weights = [self._weight_in(*piece).float() for piece in self.pieces(shard)]
                mine = torch.cat([*weights, torch.empty(0)])
            self.load(shard, name, mine)
        shard.set_steps(num_steps_of(given, rule), has_moments, MASTER in given)
        self.half_loaded.discard(shard)

    # ---- tiles -----------------------------------------------------------------------------------

    def _set(self, tiles: Sequence[T]) -> None:
        """Makes these the tiles, which are in the order of units and elements."""
        self.tiles = list(tiles)
        self._pieces.clear()
        for tile in self.tiles:
            for part in tile.ranges:
                # where strips end, so that no piece with a checksum is cut
                cut = part.cut(PIECE_NUMEL, tile.slice_of(part).start)
                self._pieces.setdefault(part.shard, []).extend((tile, piece) for piece in cut)

    def _reserve(self, tiles: Sequence[T], crosses_link: bool = False) -> None:
        """Takes room for the states of tiles; plain SGD of fp32 parameters has none. Raises
        OSError."""
        for tile in tiles:
            if tile.state_bytes:
                self._store.reserve(
                    tile.entry,
                    (tile.state_bytes,),
                    torch.uint8,
                    tile.state_home,
                    crosses_link=crosses_link,
                )

    def _protect(self, tiles: Sequence[T]) -> None:
        """Sets up checksums for states on NVMe, if the policy asks for them."""
        for tile in tiles if keeps_sums(self._policy) else ():
            if tile.state_bytes and tile.state_home is Tier.NVME:
                pieces = StatePieces(tile_runs(tile, self._shard_rank, self.names)).pieces
                self._store.sums.protect(tile.entry, pieces)


def _num_elements(pieces: Sequence[tuple[StateTile, ShardRange]]) -> int:
    return sum(elements.numel for _, elements in pieces)
