"""EMA: an exponential moving average of a model's weights, which rests on a tier.

    update      weight ──► a piece in memory ──┐
                average at rest ──► buffer ──► average + (weight - average) (1 - decay) ──► average at rest
    applied     the weights are set aside on the tier, and the model shows its averages until the block ends

Of a sharded parameter, and of a DTensor, each rank averages its own part: no rank sends anything.
On NVMe the next piece is read, and the one before is written, while one is averaged, so that memory
holds a few pieces of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem.optim.local import as_placed, local_of, part_of
from tiermem.policy import NvmePath, check_model
from tiermem.precision import check_is_dtype
from tiermem.ranks.topology import paths_of_rank
from tiermem.run.shards import Shards, loading
from tiermem.swap.base.grad_mode import without_grad
from tiermem.swap.base.ranges import ALIGNMENT, round_up
from tiermem.swap.base.tier import Tier, check_tier
from tiermem.swap.disk.paths import AnyPath
from tiermem.swap.memory.arena import Pool, Slot
from tiermem.swap.program.program import Program
from tiermem.swap.program.table import TileWork
from tiermem.swap.store.checksum import Range
from tiermem.swap.store.store import TensorStore
from tiermem.units import registry

_PIECE_NUMEL = 1 << 20
_NUM_BUFFERS = 4


class _Piece(NamedTuple):
    """Elements of this rank's part of a parameter, in an entry of the store."""

    name: str
    param: nn.Parameter
    entry: str
    dtype: torch.dtype
    start: int
    numel: int

    @property
    def elements(self) -> slice:
        """The elements, in this rank's part."""
        return slice(self.start, self.start + self.numel)


_Act = Callable[[_Piece, torch.Tensor], object]
"""Works on a piece: the second argument is its values in the store, which it may change."""


class EMA:
    """Averages of the parameters of a model that are trained, as
    `torch.optim.swa_utils.AveragedModel` computes them.

        ema = tiermem.EMA(model, decay=0.999)
        for batch in batches:
            ...; optim.step(); ema.update()
        with ema.applied():
            evaluate(model)

    The first `update` copies the weights, as torch's does. Frozen parameters and buffers have no
    average: inside `applied` they are the model's own.

    Args:
        model: sharded, plain, or with DTensors. A parameter must be trained (requires_grad) when
            this is called, or never.
        decay: of the average, between 0 and 1.
        home: HOST or NVME. Default: where the policy of a sharded model keeps optimizer states
            (DEVICE: HOST), else HOST.
        paths: for NVME; default: those of the model's policy.
        dtype: of the averages. None: that of each parameter, as torch's. A bf16 average does not
            move by a thousandth, so the default is fp32.

    Memory: 4 bytes an element at home, and inside `applied` the parameters' own bytes more; at home
        NVME also 16 MiB of HOST.
    This is beside the budget of the model's policy. The averages end with `close`, or with this
    object.

    Raises ValueError for a decay out of range, a home without path, and a model without parameters
    to train; OSError.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        home: Tier | None = None,
        paths: AnyPath | Sequence[AnyPath] = (),
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        check_model(model)
        check_is_dtype(dtype)
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay is {decay}; allowed are 0 to 1")
        self._model = model
        self.decay = decay
        self.num_updates = 0
        self._params = {
            name: param for name, param in model.named_parameters() if param.requires_grad
        }
        if not self._params:
            raise ValueError(
                "no parameter of the model is trained (requires_grad), so there is nothing to "
                "average"
            )
        self._dtypes = {name: dtype or param.dtype for name, param in self._params.items()}
        self._home, own_paths = _home_of(self._params.values(), home, paths)
        self._is_applied = False
        self._is_torn = False  # a change of the averages has not ended
        self._store, self._program = self._open(own_paths)

    def update(self) -> None:
        """Takes the current weights into the averages. Call it after each step. Blocks; not
        collective.

        Raises RuntimeError inside `applied`, and for a parameter that is trained now and was frozen
        before; OSError.
        """
        self._check_whole()
        late = [
            name
            for name, p in self._model.named_parameters()
            if p.requires_grad and name not in self._params
        ]
        if late:
            raise RuntimeError(
                f"{', '.join(late[:5])} {'are' if len(late) > 1 else 'is'} trained and was frozen "
                "when these averages began: "
                "make a new EMA, or freeze after making it"
            )
        is_first = self.num_updates == 0

        def act(piece: _Piece, average: torch.Tensor) -> None:
            weight = _read(piece.param, piece.elements).to(average.dtype)
            average.copy_(weight) if is_first else average.lerp_(weight, 1 - self.decay)

        self._is_torn = not is_first  # a first update begins anew
        self._run(self._pieces("average"), act)
        self.num_updates += 1
        self._is_torn = False

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A block in which the model has the averages as its weights; afterwards it has its own
        again, to the bit.

        Inside, stepping, replacing and saving weights of a sharded model raises RuntimeError.
        Collective; blocks. Raises OSError; after one while the block begins, the weights are put
        back. After an interrupt in that a sharded model is torn.
        """
        self._check_whole()
        if not self.num_updates:
            raise RuntimeError("there is no average before the first update")
        for shards in self._owners():
            shards.drop_head_start()
        self._drop_aside()  # an interrupt has left it
        self._reserve("aside")
        with contextlib.ExitStack() as ending:
            for shards in self._owners():
                ending.enter_context(shards.held_present())
            ending.callback(self._drop_aside)
            self._run(
                self._pieces("aside"),
                lambda piece, kept: kept.copy_(_read(piece.param, piece.elements)),
            )
            ending.callback(self._put_back)
            self._run(self._pieces("average"), _write, changes=False)
            self._refresh()
            self._is_applied = True
            yield

    def copy_to(self) -> None:
        """Makes the averages the model's weights for good; masters of a sharded model become
        exactly these values.

        Collective; blocks; raises OSError.
        """
        self._check_whole()
        with loading(self._params.values()):
            for name, param in self._params.items():
                value = self._whole(name)
                owner = registry.owner_of(param)
                if isinstance(owner, Shards):
                    owner.replace(param, value)
                else:
                    local_of(param).copy_(part_of(value, param))

    def state_dict(self) -> dict[str, Any]:
        """The decay, the number of updates, and every average: whole, on the CPU; a DTensor for a
        DTensor.

        All averages are in memory at once. Collective; blocks; raises OSError.
        """
        self._check_untorn()
        averages = {name: self._whole(name) for name in self._params}
        return {"decay": self.decay, "num_updates": self.num_updates, "averages": averages}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`. Collective; blocks. Raises ValueError for one of another
        model, OSError."""
        self._check_may_change()
        averages = state_dict["averages"]
        wrong = self._params.keys() ^ averages.keys()
        wrong |= {
            name
            for name in averages.keys() - wrong
            if averages[name].shape != self._params[name].shape
        }
        if wrong:
            raise ValueError(
                f"these averages are of another model: {', '.join(sorted(wrong)[:5])} differ in "
                "name or shape"
            )
        decay = float(state_dict["decay"])
        num_updates = int(state_dict["num_updates"])
        self._is_torn = True
        for name, param in self._params.items():
            self._fill(name, _mine(param, averages[name]))
        self.decay = decay
        self.num_updates = num_updates
        self._is_torn = False

    def close(self) -> None:
        """Frees the averages' memory and files. Blocks; raises the first error of a write."""
        self._store.close()

    # ---- where they rest -------------------------------------------------------------------------

    def _open(self, paths: tuple[NvmePath, ...]) -> tuple[TensorStore, Program[_Piece]]:
        pieces = [*self._pieces("average"), *self._pieces("aside")]
        sizes = [round_up(piece.numel * piece.dtype.itemsize, ALIGNMENT) for piece in pieces]
        buffer_bytes = max(sizes, default=ALIGNMENT)
        is_on_disk = self._home is Tier.NVME
        host_bytes = _NUM_BUFFERS * buffer_bytes if is_on_disk else sum(sizes)
        store = TensorStore(paths if is_on_disk else (), max(host_bytes, 1))
        try:
            self._store = store
            self._reserve("average")
            pool = Pool(store.arena, buffer_bytes, _NUM_BUFFERS, "averages") if is_on_disk else None
        except BaseException:
            store.close()
            raise
        return store, Program(store, pool, None)

    def _reserve(self, kind: str) -> None:
        """Takes room for every entry of a kind, or for none. Raises OSError."""
        with contextlib.ExitStack() as undoing:
            for entry, (numel, dtype) in self._entries(kind).items():
                self._store.reserve(entry, (numel,), dtype, self._home)
                undoing.callback(self._store.drop, entry)
            undoing.pop_all()

    def _entries(self, kind: str) -> dict[str, tuple[int, torch.dtype]]:
        """The number of elements and the dtype of each entry of a kind: "average", or "aside" for
        weights set aside."""
        dtypes = (
            self._dtypes
            if kind == "average"
            else {name: param.dtype for name, param in self._params.items()}
        )
        numels = {name: _num_mine(param) for name, param in self._params.items()}
        return {f"{kind}/{name}": (numel, dtypes[name]) for name, numel in numels.items() if numel}

    def _pieces(self, kind: str, only: str | None = None) -> list[_Piece]:
        """Every piece of a kind, or of one parameter."""
        found = []
        for name, param in self._params.items() if only is None else [(only, self._params[only])]:
            numel = _num_mine(param)
            dtype = self._dtypes[name] if kind == "average" else param.dtype
            step = _PIECE_NUMEL if _is_flat(param) else max(1, numel)
            found += [
                _Piece(name, param, f"{kind}/{name}", dtype, start, min(step, numel - start))
                for start in range(0, numel, step)
            ]
        return found

    @without_grad
    def _run(self, pieces: Sequence[_Piece], act: _Act, changes: bool = True) -> None:
        self._program.run(pieces, _PiecePass(self._store, act, changes))

    # ---- values ----------------------------------------------------------------------------------

    def _fill(self, name: str, mine: torch.Tensor) -> None:
        """Sets this rank's part of a parameter's average."""
        self._run(
            self._pieces("average", name),
            lambda piece, average: average.copy_(mine[piece.elements]),
        )

    def _whole(self, name: str) -> torch.Tensor:
        """A parameter's average: whole, of a DTensor placed as it. Collective."""
        param = self._params[name]
        owner = registry.owner_of(param)
        local = torch.empty(_num_mine(param), dtype=self._dtypes[name])
        own = self._pieces("average", name)
        self._run(own, lambda piece, average: local[piece.elements].copy_(average), changes=False)
        if isinstance(owner, Shards):
            return owner.values.assemble(owner.find(param)[1], local).view(param.shape)
        return as_placed(local.view(local_of(param).shape), param)

    def _put_back(self) -> None:
        with contextlib.ExitStack() as marks:
            for owner in self._owners():
                marks.enter_context(owner.steps.loading(self._params_of(owner)))
            self._is_applied = False
            self._run(self._pieces("aside"), _write, changes=False)
            self._refresh()

    def _drop_aside(self) -> None:
        for entry in self._entries("aside"):
            if entry in self._store:
                self._store.drop(entry)

    def _refresh(self) -> None:
        for owner in self._owners():
            for live in dict.fromkeys(owner.find(each)[0] for each in self._params_of(owner)):
                owner.refresh(live.unit.shards[0].param)

    def _params_of(self, owner: Shards) -> list[nn.Parameter]:
        return [each for each in self._params.values() if registry.owner_of(each) is owner]

    def _owners(self) -> list[Shards]:
        owners = (registry.owner_of(param) for param in self._params.values())
        return list(dict.fromkeys(owner for owner in owners if isinstance(owner, Shards)))

    def _check_whole(self) -> None:
        """Raises RuntimeError where averages are torn, or weights may not change."""
        self._check_untorn()
        self._check_may_change()

    def _check_untorn(self) -> None:
        if self._is_torn:
            raise RuntimeError(
                "an update or a load of these averages ended half-way, so that they are torn: "
                "load_state_dict, or make a new EMA"
            )

    def _check_may_change(self) -> None:
        if self._is_applied:
            raise RuntimeError("the model shows its averages: leave the block of EMA.applied first")
        for shards in self._owners():
            shards.check_may_change()


@dataclasses.dataclass(frozen=True)
class _PiecePass(TileWork[_Piece]):
    """One pass over pieces, which swap/program/program.py runs."""

    store: TensorStore
    act: _Act
    changes: bool

    def name(self, tile: _Piece) -> str:
        """The entry of a piece."""
        return tile.entry

    def early_reads(self, tile: _Piece, slot: Slot | None) -> list[Range]:
        """All of a piece."""
        assert slot is not None
        size = tile.dtype.itemsize
        return [
            (tile.entry, tile.start * size, slot.tensor[: round_up(tile.numel * size, ALIGNMENT)])
        ]

    def writes(self, tile: _Piece, slot: Slot | None) -> list[Range]:
        """The same, if it was changed."""
        return self.early_reads(tile, slot) if self.changes else []

    def compute(self, tile: _Piece, slot: Slot | None) -> None:
        """Does the work on a piece, in its buffer or where it rests."""
        values = self.store.view(tile.entry) if slot is None else slot.tensor.view(tile.dtype)
        self.act(tile, values[tile.elements if slot is None else slice(tile.numel)])


# ---- this rank's part of a parameter -------------------------------------------------------------


def _home_of(
    params: Any, home: Tier | None, paths: AnyPath | Sequence[AnyPath]
) -> tuple[Tier, tuple[NvmePath, ...]]:
    """The tier and the paths of averages. Raises ValueError for what is neither HOST nor NVME, and
    for NVME without a path."""
    owner = next((o for o in map(registry.owner_of, params) if isinstance(o, Shards)), None)
    if home is None:
        home = Tier.NVME if owner is not None and owner.policy.optim is Tier.NVME else Tier.HOST
    check_tier("home", home, (Tier.HOST, Tier.NVME))
    found = paths_of_rank(paths) or (() if owner is None else paths_of_rank(owner.policy.paths))
    if home is Tier.NVME and not found:
        raise ValueError("home is NVME and no path is given: set paths=['/mnt/nvme0', ...]")
    return home, found


def _num_mine(param: nn.Parameter) -> int:
    owner = registry.owner_of(param)
    return (
        owner.values.num_mine(owner.find(param)[1])
        if isinstance(owner, Shards)
        else local_of(param).numel()
    )


def _is_flat(param: nn.Parameter) -> bool:
    """Whether elements can be written piece by piece."""
    return isinstance(registry.owner_of(param), Shards) or local_of(param).is_contiguous()


def _mine(param: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    owner = registry.owner_of(param)
    if isinstance(owner, Shards):
        return owner.values.mine(owner.find(param)[1], whole)
    return part_of(whole, param).reshape(-1)


def _read(param: nn.Parameter, elements: slice) -> torch.Tensor:
    """A copy of elements of a parameter, on the CPU. Blocks."""
    owner = registry.owner_of(param)
    if isinstance(owner, Shards):
        live, shard = owner.find(param)
        first = shard.shard_offset
        return owner.values.elements(live, slice(first + elements.start, first + elements.stop))
    return local_of(param).reshape(-1)[elements].to("cpu", copy=True)


def _write(piece: _Piece, values: torch.Tensor) -> None:
    """Overwrites elements of a parameter where they rest; `Shards.refresh` shows them. Blocks."""
    owner = registry.owner_of(piece.param)
    values = values.to(piece.param.dtype)
    if isinstance(owner, Shards):
        live, shard = owner.find(piece.param)
        owner.values.put_elements(live, shard.shard_offset + piece.start, values)
    elif _is_flat(piece.param):
        local_of(piece.param).view(-1)[piece.elements].copy_(values)
    else:
        local = local_of(piece.param)
        local.copy_(values.view(local.shape))
