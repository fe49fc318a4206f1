"""Access to whole parameters: GatheredParameters, external parameters, and all units at once for
generation."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tiermem.ranks.collectives import exchange, sendable, share, total
from tiermem.ranks.topology import ranks_per_node
from tiermem.run.init_params import ParametersInInit
from tiermem.run.shards import Shards, loading, owner_of
from tiermem.swap.memory.accelerator import free_and_total, is_accelerator
from tiermem.units import registry
from tiermem.weights.unit_state import LiveUnit

# ---- external parameters -------------------------------------------------------------------------
#
# An external parameter is used outside its own module's forward:
#
#     F.linear(x, self.embed.weight)        the weight of another module
#     output, bias = self.layer(x)          a parameter that a module returned
#
# Both are noticed when they happen, because every torch call on a resting parameter passes its
# class (absent.py). The call is treated as a small module: its units are gathered before it and
# released after it, and gathered again in backward when the gradient of its result arrives. When
# the result is a view of a parameter (`weight.t()`, `weight[3:]`), the running module holds the
# unit until it ends, in forward and in backward. Only the order of units is remembered between
# passes, so a program may use other parameters in each pass.


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Registers a parameter of another module that `module` needs in its forward and backward.

    The parameter's unit is then present whenever `module` runs. This is needed only to gather the
    unit earlier, or where no torch call sees the parameter (a kernel that takes its address). Works
    before and after sharding. Not collective. Raises RuntimeError when `parameter` is not a
    Parameter or `module` is not a module.
    """
    _check(module, parameter)
    known: list[nn.Parameter] = module.__dict__.setdefault(registry.EXTERNAL, [])
    if all(each is not parameter for each in known):
        known.append(parameter)
    owner = registry.owner_of(parameter)
    if isinstance(owner, Shards):
        owner.add_need(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Removes a registration. Raises RuntimeError when `parameter` is no Parameter or is not
    registered with this module."""
    _check(module, parameter)
    known = registry.externals_of(module)
    if all(each is not parameter for each in known):
        raise RuntimeError("this parameter is not registered with this module")
    known[:] = [each for each in known if each is not parameter]
    owner = registry.owner_of(parameter)
    if isinstance(owner, Shards):
        owner.drop_need(module, parameter)


def _check(module: Any, parameter: Any) -> None:
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"the module is a {type(module).__name__}; give a torch.nn.Module")
    if not isinstance(parameter, nn.Parameter):
        what = (
            "a tensor, perhaps a view or a copy of one"
            if isinstance(parameter, torch.Tensor)
            else type(parameter)
        )
        raise RuntimeError(f"the parameter is {what}; give the torch.nn.Parameter itself")


# ---- GatheredParameters --------------------------------------------------------------------------

_Owner = ParametersInInit | Shards


class GatheredParameters:
    """A context in which parameters hold their whole values. Entering and leaving are collective
    and block.

        with tiermem.zero.GatheredParameters(model.embed.weight):                   # to read: every rank has the values
            print(model.embed.weight.norm())
        with tiermem.zero.GatheredParameters(model.parameters(), modifier_rank=0):  # to write: rank 0's values are kept
            if rank == 0:
                model.load_state_dict(...)

        owner of a parameter             where its values come from and go to
        ParametersInInit (zero.Init)     its parts, before the model is sharded
        Shards, outside forward          where it rests; memory holds one copy of the parameters asked for, not of their units
        Shards, in forward or backward   its unit; the running module holds the unit until it ends, since autograd may need it
        Shards, always present           the unit, which is in memory
        none                             an ordinary parameter: nothing happens

    With a `modifier_rank`, that rank's values replace those of all ranks when the context ends:
    where the parameter rests, and in the optimizer's master, whose elements become the new values
    where these differ (moments stay). Without one, a partitioned parameter written in place raises
    RuntimeError on every rank, because the ranks may differ by then. Writing through `.data` or
    NumPy is not noticed. An exception inside the context drops the changes of parameters that are
    not always present. In stages 0 to 2 parameters are always present: without a modifier each
    rank's writes stay, as outside.

    Args:
        params: one parameter, or any iterable of them; ordinary parameters and other objects are
            skipped.
        modifier_rank: the rank (of the group that shares the parameters) whose changes are kept;
            None: they are not changed.
        fwd_module: a module that will use the parameters in its forward; they are registered with
            it as external ones.
        enabled: False makes the context do nothing.

    A parameter that an outer context has gathered stays gathered until the outer context ends. A
    step, and opening a checkpoint, end each gather: also one that an interrupt at the end of its
    context has left. A step, a save and an export raise RuntimeError where a gather was written and
    has not ended. Raises RuntimeError on entering when this context has a modifier rank and an
    outer one holds a parameter; ValueError for a rank that does not exist.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._kept = _partitioned(params, modifier_rank) if enabled else []
        self._modifier = modifier_rank
        # with the parameter's version when it was gathered
        self._taken: list[tuple[nn.Parameter, _Owner, int]] = []
        if modifier_rank is not None:
            for _, owner in self._kept:
                world = owner.topology.world
                if type(modifier_rank) is not int or not 0 <= modifier_rank < world:
                    raise ValueError(
                        f"modifier_rank is {modifier_rank!r}; allowed are 0 to {world - 1}, and "
                        "None for nobody"
                    )
        if fwd_module is not None:
            for param, _ in self._kept:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        fresh = [(param, owner) for param, owner in self._kept if not registry.is_gathered(param)]
        if len(fresh) < len(self._kept) and self._modifier is not None:
            raise RuntimeError(
                "a parameter is gathered by a context around this one: which of the two would "
                "write it back cannot be known. "
                "Give modifier_rank to the outer context, and none to this one"
            )
        with torch._C.DisableTorchFunction():
            try:
                for param, owner in fresh:
                    # before: `_give_back` then ends half of it
                    self._taken.append((param, owner, param._version))
                    owner.take_out(param)
                    registry.set_gathered(param, True)
                    self._taken[-1] = param, owner, param._version
            except BaseException:
                self._give_back()
                raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with torch._C.DisableTorchFunction():
            try:
                if kind is None and self._modifier is not None:
                    self._write(self._modifier)
                elif kind is None:
                    self._refuse_changes()
            finally:
                self._give_back()

    def _write(self, rank: int) -> None:
        if not all(registry.is_gathered(param) for param, _, _ in self._taken):
            raise RuntimeError(
                "a step or a load in this context has ended the gather, so that what was written "
                "is dropped: write after it"
            )
        values = [
            p.detach().clone() if _is_regathered(p, owner) else p.detach()
            for p, owner, _ in self._taken
        ]
        with loading(param for param, _, _ in self._taken):
            for (param, owner, _), value in zip(self._taken, values, strict=True):
                value = sendable(owner.topology, value.contiguous())
                share(owner.topology, value, "sharing what one rank wrote", rank)
                owner.replace(param, value)

    def _refuse_changes(self) -> None:
        for owner in {id(k): k for _, k, _ in self._taken}.values():
            mine = [
                (p, version)
                for p, k, version in self._taken
                if k is owner and registry.is_gathered(p)
            ]
            changed = [p for p, version in mine if p._version != version]
            sums = sendable(
                owner.topology, torch.tensor([float(len(changed))], dtype=torch.float64)
            )
            num_changed = int(total(owner.topology, sums, "world").item())
            if num_changed:
                shapes = ", ".join(str(tuple(p.shape)) for p in changed[:3]) or "none on this rank"
                raise RuntimeError(
                    f"{num_changed} gathered parameters were written, counted over all ranks "
                    f"(shapes here: {shapes}), but nobody was named to write, so it would be lost. "
                    "Give modifier_rank, the rank whose values are to be kept"
                )

    def _give_back(self) -> None:
        while self._taken:
            param, owner, _ = self._taken[-1]
            owner.put_back(param)
            registry.set_gathered(param, False)
            self._taken.pop()


def apply_gathered(model: nn.Module, function: Callable[[nn.Module], Any]) -> None:
    """`model.apply(function)` on a partitioned model: children first, each module with its own
    parameters gathered.

    Rank 0's changes are kept. The function sees the parameters of the module that it is given, not
    those of its children. Collective; blocks. `Engine.apply` calls this. On a bare partitioned
    model torch's `apply` raises on writing.
    """
    for child in model.children():
        apply_gathered(child, function)
    with GatheredParameters(model.parameters(recurse=False), modifier_rank=0):
        function(model)


def _partitioned(params: Any, modifier_rank: int | None) -> list[tuple[nn.Parameter, _Owner]]:
    """Each partitioned parameter once, with its owner, in the given order; with a modifier those of
    all stages."""
    given = (
        params
        if isinstance(params, Iterable) and not isinstance(params, torch.Tensor)
        else [params]
    )
    found: dict[int, tuple[nn.Parameter, _Owner]] = {}
    for param in given:
        owner = registry.owner_of(param) if isinstance(param, nn.Parameter) else None
        if isinstance(owner, ParametersInInit) or (
            isinstance(owner, Shards) and (owner.policy.stage == 3 or modifier_rank is not None)
        ):
            found[id(param)] = (param, owner)
    return list(found.values())


def _is_regathered(param: nn.Parameter, owner: _Owner) -> bool:
    """Whether replacing one parameter refills the memory of others: all small parameters share one
    unit."""
    return (
        isinstance(owner, Shards)
        and not owner.find(param)[0].is_streamed
        and owner.topology.num_shards > 1
    )


# ---- all units in memory, for generation ---------------------------------------------------------

logger = logging.getLogger("tiermem")


@contextlib.contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Keeps the whole of a sharded model (or of an engine's) in memory inside the block; yields its
    argument.

        with tiermem.zero.unwrap_model_for_generation(engine) as model:
            model.generate(...)

    Without it every unit is fetched once per token. Inside the block the streamed units count as
    resident: hooks find them present and fetch nothing. Their memory is torch's own, beside the
    arena, and counts against the part of the budget that the plan leaves free (on an accelerator:
    its free memory less `kv_bytes`). Where that is too small on some rank, a warning states the
    arithmetic and units are streamed as usual.

    Collective; blocks for the gathers. A model that is not sharded is yielded as it is. Raises
    RuntimeError inside the block when weights are stepped or replaced, OSError when a read fails.
    After the block, also after an error, units are streamed.
    """
    shards = owner_of(model)
    units = [] if shards is None else shards.units
    streamed = [live for live in units if live.is_streamed and live.unit.takes_buffer]
    if shards is None or not streamed or not _has_room(shards, streamed):
        yield model
        return
    with shards.held_present():
        try:
            for live in streamed:
                shards.prefetcher.outdate(live)
                shards.values.keep_present(live)
            yield model
        finally:
            for live in streamed:
                live.end_keeping()


def _has_room(shards: Shards, streamed: Sequence[LiveUnit]) -> bool:
    """Whether every rank has room for all units; logs the arithmetic for each rank that has not."""
    needed, room, what = sum(live.unit.full_bytes for live in streamed), *_room(shards)
    answers = exchange(
        shards.topology, "" if room is None or needed <= room else f"{needed} > {room} {what}"
    )
    short = {rank: answer for rank, answer in enumerate(answers) if answer}
    for rank, answer in short.items():
        logger.warning(
            "generation fetches every unit for every token: the whole model does not fit on rank "
            "%d: %d units of %s. Raise the budget (host_bytes) to keep them",
            rank,
            len(streamed),
            answer,
        )
    return not short


def _room(shards: Shards) -> tuple[int | None, str]:
    """Bytes that may be taken beside the plan, and their description; None: there is no limit."""
    if is_accelerator(shards.device):
        cache = shards.policy.kv_bytes or 0
        left = f", {cache} of them left to the KV cache" if cache else ""
        free, _ = free_and_total(shards.device)
        return free - cache, f"bytes: what is free on {shards.device}{left}"
    budget = shards.policy.host_bytes
    ranks = ranks_per_node()
    if budget is None:
        return None, ""
    planned = shards.plan.host_bytes
    return (
        budget // ranks - planned,
        f"bytes = host_bytes {budget} // {ranks} ranks - {planned} planned",
    )
