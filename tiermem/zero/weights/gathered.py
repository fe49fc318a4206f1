"""GatheredParameters: the whole values of partitioned parameters, for as long as a context lasts.

    with tiermem.zero.GatheredParameters(model.embed.weight):                        # to look: every rank has the values
        print(model.embed.weight.norm())
    with tiermem.zero.GatheredParameters(model.parameters(), modifier_rank=0):       # to change: rank 0's values count
        if rank == 0:
            model.load_state_dict(...)

    keeper of a parameter            where its values come from, and where they go
    Nursery (zero.Init)              its parts, before the model is sharded
    Shards, outside forward          its home; memory holds one copy of what was asked for, whatever the size of its unit
    Shards, in forward or backward   its unit, which the running module holds until it ends (external.py): autograd may need it
    Shards, always present           it is there already
    nobody                           it is an ordinary parameter, and nothing happens

With a `modifier_rank` that rank's values replace everybody's when the context ends: in the parameter's home, and in the
optimizer's master, which becomes exactly the new value (moments stay). Without one a parameter that was written in place
raises on every rank, because the ranks may differ by then; writing through `.data` or NumPy is not noticed. An
exception inside drops what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from tiermem.zero import registry
from tiermem.zero.building.nursery import Nursery
from tiermem.zero.ranks.collectives import share, total
from tiermem.zero.ranks.topology import Topology
from tiermem.zero.shards import Shards
from tiermem.zero.weights.external import register_external_parameter

_Keeper = Nursery | Shards


class GatheredParameters:
    """A context in which parameters hold their whole values; see above. Collective and blocking at both ends.

    Args:
        params: one parameter, or any iterable of them; what is not a partitioned parameter is passed over.
        modifier_rank: the rank (of the group that shares the parameters) whose changes are kept; None: nobody changes them.
        fwd_module: a module that will use the parameters in its forward; they are registered with it as external ones.
        enabled: False makes the context do nothing.

    What a context around this one has gathered is there already, and that one ends it. Raises RuntimeError on entering when
    such a parameter is to be changed by this one, ValueError for a modifier rank that does not exist.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._kept = _partitioned(params) if enabled else []
        self._modifier = modifier_rank
        self._taken: list[tuple[nn.Parameter, _Keeper, int]] = []  # with the version that each had when it came
        if modifier_rank is not None:
            for _, keeper in self._kept:
                _check_rank(modifier_rank, keeper.topology)
        if fwd_module is not None:
            for param, _ in self._kept:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        fresh = [(param, keeper) for param, keeper in self._kept if not registry.is_gathered(param)]
        if len(fresh) < len(self._kept) and self._modifier is not None:
            raise RuntimeError(
                "a parameter is gathered by a context around this one: which of the two would write it back cannot be known. "
                "Give modifier_rank to the outer context, and none to this one"
            )
        with torch._C.DisableTorchFunction():
            try:
                for param, keeper in fresh:
                    keeper.take_out(param)
                    registry.set_gathered(param, True)
                    self._taken.append((param, keeper, param._version))
            except BaseException:
                self._give_back()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with torch._C.DisableTorchFunction():
            try:
                if error is None and self._modifier is not None:
                    self._write(self._modifier)
                elif error is None:
                    self._refuse_changes()
            finally:
                self._give_back()

    def _write(self, rank: int) -> None:
        values = [p.detach().clone() if _is_regathered(p, keeper) else p.detach() for p, keeper, _ in self._taken]
        for (param, keeper, _), value in zip(self._taken, values, strict=True):
            value = value.contiguous()
            share(keeper.topology, value, "sharing what one rank wrote", rank)
            keeper.replace(param, value)

    def _refuse_changes(self) -> None:
        for keeper in {id(k): k for _, k, _ in self._taken}.values():
            changed = [p for p, k, version in self._taken if k is keeper and p._version != version]
            sums = torch.tensor([float(len(changed))], dtype=torch.float64, device=_device_of(keeper))
            num_changed = int(total(keeper.topology, sums, "world").item())
            if num_changed:
                shapes = ", ".join(str(tuple(p.shape)) for p in changed[:3]) or "none on this rank"
                raise RuntimeError(
                    f"{num_changed} gathered parameters were written, counted over all ranks (shapes here: {shapes}), but "
                    "nobody was named to write, so it would be lost. Give modifier_rank, the rank whose values are to be kept"
                )

    def _give_back(self) -> None:
        while self._taken:
            param, keeper, _ = self._taken.pop()
            registry.set_gathered(param, False)
            keeper.put_back(param)


def apply_gathered(model: nn.Module, function: Callable[[nn.Module], Any]) -> None:
    """`model.apply(function)` on a partitioned model: children first, each module with its own parameters gathered.

    What rank 0 writes is kept. The function sees the parameters of the module that it is given, not those of its children.
    Collective; blocks. (`Engine.apply` does this; on a bare model torch's `apply` sees NaN, and writing raises.)
    """
    for child in model.children():
        apply_gathered(child, function)
    with GatheredParameters(model.parameters(recurse=False), modifier_rank=0):
        function(model)


def _partitioned(params: Any) -> list[tuple[nn.Parameter, _Keeper]]:
    """Each partitioned parameter once, with its keeper, in the order given."""
    given = params if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
    found: dict[int, tuple[nn.Parameter, _Keeper]] = {}
    for param in given:
        keeper = registry.keeper_of(param) if isinstance(param, nn.Parameter) else None
        if isinstance(keeper, Nursery) or (isinstance(keeper, Shards) and keeper.policy.stage == 3):
            found[id(param)] = (param, keeper)
    return list(found.values())


def _is_regathered(param: nn.Parameter, keeper: _Keeper) -> bool:
    """Whether a parameter's memory is filled again when another one of its unit is replaced: small ones are all one unit."""
    return isinstance(keeper, Shards) and keeper.find(param)[0].unit.is_resident and keeper.topology.num_shards > 1


def _check_rank(rank: int, topology: Topology) -> None:
    if type(rank) is not int or not 0 <= rank < topology.world:
        raise ValueError(f"modifier_rank is {rank!r}; allowed are 0 to {topology.world - 1}, and None for nobody")


def _device_of(keeper: _Keeper) -> torch.device:
    return keeper.device if isinstance(keeper, Shards) else torch.device("cpu")
