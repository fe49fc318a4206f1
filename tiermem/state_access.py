"""State access: reads and changes one parameter's fp32 value, gradient and optimizer states on any
tier.

    full     the whole tensor in the parameter's shape, put together from all ranks: every rank calls
    local    this rank's part: flat, ceil(numel / shards) elements, with zeros after the last

                        valid
    fp32 parameter      from `shard` (or `initialize`) until the shards are closed; each step changes it
    gradient            after backward has reduced it, until the step or zero_grad
    optimizer state     once there is an optimizer; before the first step it is zero or the value that was set

All getters return fp32 tensors on the CPU. These are copies; `safe_set_*` changes the states.
Setting a parameter's fp32 value also sets its low-precision value. The next step uses a gradient
that was set, also for its norm. Gradients are the mean over ranks and, as in DeepSpeed, still
contain fp16's loss scale (`engine.loss_scale()`). Frozen parameters have no master, gradient or
states: their getters return None. Names of states are torch's (exp_avg, exp_avg_sq,
    momentum_buffer, sum).

Full forms are collective: if one rank does not call, the others raise after the policy's
`timeout_s`. The local forms are not, except `safe_set_local_fp32_param`: other ranks may hold
copies of the changed values, so every rank sets its own part.

Each call reads and writes the bytes of that parameter only. The vectorised forms change many
parameters at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from tiermem.gradients.gradient_store import ShardedGrad
from tiermem.optim.tiles import StateTiles, tiles_of
from tiermem.run.shards import Shards
from tiermem.swap.base.native import store_gradient
from tiermem.units import registry
from tiermem.units.state_layout import MASTER
from tiermem.units.unit import Shard
from tiermem.weights.unit_state import LiveUnit

# ---- setting a gradient --------------------------------------------------------------------------


def _replace_gradient(holder: _Holder, mine: torch.Tensor) -> None:
    """Replaces this rank's part of a reduced gradient at its home, between backward and step.
    Blocks; raises OSError.

    mine: flat, without padding; the mean over ranks. It is rounded to the dtype that gradients rest
        in (`Precision.grads`).

    Homes hold sums over ranks, and the given values are means. They rest undivided, and the
    gradient's factor (`Gradient.factor`) records that they are divided already. Their sums of
    squares replace those of the old gradient in the step's norm. On this rank, a parameter without
    gradient has one afterwards.
    """
    shards = holder.shards
    shard = holder.shard
    unit = holder.live.unit
    homes = shards.homes
    homes.store.flush()
    values = mine.detach().to("cpu", homes.store.dtype(unit)).contiguous()
    shards.values.write_part(homes.store.entry(unit), shard.shard_offset, values)
    sums = store_gradient(
        shards.workers, None, values, shard.shard_numel * shards.topology.shard_rank
    )
    shard.gradient.arrive(sums, homes.divisor)
    shard.gradient.confirm()
    homes.show(unit)


_NOT_NOW = (
    "there are gradients after backward, when they have been reduced, and until the step or "
    "zero_grad"
)


# ---- full forms ----------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Returns a parameter's fp32 value, from its master if it has one; None for a frozen parameter.
    Collective; blocks.

    `Shards.weight(param)` returns a frozen parameter's value. Raises ValueError when the parameter
    is not sharded, OSError when a transfer fails.
    """
    return _whole(_find(param), _fp32_part)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns a parameter's reduced gradient in fp32; before it is reduced, that of this rank.
    Collective; blocks.

    Below stage 2 gradients are reduced in backward of a step's last micro-batch, and inside no_sync
    not at all. Returns None for a frozen parameter, and for a parameter without gradient while
    others have one. Raises RuntimeError when no gradient exists (before backward, after the step),
    ValueError when the parameter is not sharded.
    """
    holder = _find(param)
    shards = holder.shards
    own = holder.shard.param.grad
    if (
        own is None
        and shards.hooks.has_left_gradients
        and any(shard.param.grad is not None for _, shard in shards.parameters())
    ):
        return None  # other ranks may have one of their own, and ask nobody
    if own is None or isinstance(own, ShardedGrad):
        return _whole(holder, _gradient_part)
    return own.detach().to("cpu", torch.float32, copy=True) / shards.homes.num_micro_batches


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Returns one of a parameter's optimizer states in fp32; None for a frozen parameter.
    Collective; blocks.

    Raises ValueError, with the names of all states, for an unknown state; RuntimeError when there
    is no optimizer yet.
    """
    return _whole(_find(param), functools.partial(_state_part, key=optim_state_key))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets a parameter's value: the master, the low-precision weight and the copies on other ranks.
    Collective; blocks.

    value: in the parameter's shape, equal on every rank. Raises ValueError for another shape.
    """
    holder = _find(param)
    _put_fp32(holder, _whole_part(holder, value))


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the gradient that the next step uses. Blocks.

    value: in the parameter's shape, equal on every rank, with the loss scale, as
        `safe_get_full_grad` returns it. Raises
    RuntimeError as that does, ValueError for another shape and for a frozen parameter.
    """
    _put_gradient(_find(param), _whole_part, value)


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Sets one of a parameter's optimizer states. Blocks.

    value: in the parameter's shape, equal on every rank. Raises as `safe_get_full_optimizer_state`,
        and ValueError for another shape and for frozen parameters.
    """
    holder = _find(param)
    _states_of(holder, optim_state_key).load(
        holder.shard, optim_state_key, _whole_part(holder, value)
    )


# ---- local forms ---------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's part of `safe_get_full_fp32_param`. Blocks. Raises RuntimeError in stage
    0, which has no parts."""
    return _padded(_find_part(param), _fp32_part)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's part of `safe_get_full_grad`. Blocks. Raises as that does, and
    RuntimeError in stage 0."""
    return _padded(_find_part(param), _gradient_part)


def safe_get_local_optimizer_state(
    param: nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """Returns this rank's part of `safe_get_full_optimizer_state`. Blocks. Raises as that does, and
    RuntimeError in stage 0."""
    return _padded(_find_part(param), functools.partial(_state_part, key=optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's part of a parameter's value; every rank sets its own part. Collective;
    blocks.

    value: flat, as `safe_get_local_fp32_param` returns it; its padding is ignored.
    """
    holder = _find_part(param)
    _put_fp32(holder, _local_part(holder, value))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's part of the gradient that the next step uses. Blocks; raises as
    `safe_set_full_grad`."""
    _put_gradient(_find_part(param), _local_part, value)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Sets this rank's part of one of a parameter's optimizer states. Blocks; raises as the full
    form does."""
    holder = _find_part(param)
    _states_of(holder, optim_state_key).load(
        holder.shard, optim_state_key, _local_part(holder, value)
    )


# ---- vectorised forms ----------------------------------------------------------------------------


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter],
    update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Replaces each parameter's gradient by `update_func(gradient, param)`; skips parameters
    without gradient.

    Gradients are full and fp32, one in memory at a time, in the order in which they rest. Each is
    read once and written once. Collective; blocks. Raises as `safe_set_full_grad`.
    """
    for holder in _in_order(param_list):
        gradient = _whole(holder, _gradient_part)
        if gradient is not None:
            value = update_func(gradient, holder.shard.param)
            _replace_gradient(holder, _whole_part(holder, value))


def safe_update_local_states_vectorized(
    param_list: Iterable[nn.Parameter],
    update_func: Callable[[dict[str, torch.Tensor], nn.Parameter, slice], None],
) -> None:
    """Calls a function that changes fp32 values and optimizer states of many parameters in place;
    visits each tile once.

    update_func(states, param, elements): `states` are flat fp32 tensors by name, "fp32_param" and
    the optimizer's own ("exp_avg", ...). `elements` is the slice of the parameter's elements, in
    row-major order, that they hold. A parameter that is cut by tiles or ranks comes in several
    pieces. Tiles are read ahead and written behind, as in a step.

    Every rank calls it for the same parameters. Blocks. Raises ValueError for frozen parameters,
    RuntimeError when there is no optimizer yet, OSError when a transfer fails.
    """
    models: dict[Shards, list[_Holder]] = {}
    for holder in _in_order(param_list):
        models.setdefault(holder.shards, []).append(holder)
    for holders in models.values():
        chosen = frozenset(holder.shard for holder in holders)
        # one entry: one optimizer steps a model
        tiles = {_states_of(holder): None for holder in holders}
        next(iter(tiles)).visit(
            chosen, lambda values, shard, elements: update_func(values, shard.param, elements)
        )


# ---- what holds a parameter ----------------------------------------------------------------------


class _Holder(NamedTuple):
    shards: Shards
    live: LiveUnit
    shard: Shard


def _find(param: nn.Parameter) -> _Holder:
    owner = registry.owner_of(param)
    if not isinstance(owner, Shards):
        made = "it was built by zero.Init and waits for" if owner is not None else "it needs"
        raise ValueError(
            f"the parameter of shape {tuple(param.shape)} is not one of a sharded model: {made} "
            "tiermem.initialize or "
            "tiermem.shard; once the engine or the shards are closed, its states are gone"
        )
    return _Holder(owner, *owner.find(param))


def _find_part(param: nn.Parameter) -> _Holder:
    holder = _find(param)
    if holder.shards.policy.stage == 0:
        raise RuntimeError(
            f"{holder.shard.name}: in stage 0 every rank holds everything, so there are no local "
            "parts; use the full form, or stage 1, 2 or 3"
        )
    return holder


def _in_order(params: Iterable[nn.Parameter]) -> list[_Holder]:
    """Returns each parameter's holder once, in the order in which they rest: unit by unit."""
    if isinstance(params, torch.Tensor):
        raise TypeError("param_list is one parameter; give a list of them")
    holders = {id(param): _find(param) for param in params}
    return sorted(
        holders.values(), key=lambda holder: (holder.live.unit.index, holder.shard.shard_offset)
    )


# ---- fp32 values and states ----------------------------------------------------------------------


def _fp32_part(holder: _Holder) -> torch.Tensor | None:
    if not holder.shard.param.requires_grad:
        return None
    tiles = tiles_of(holder.shards)
    if tiles is not None and holder.live.unit.is_trainable:
        return tiles.state(holder.shard, MASTER)
    weight = holder.shards.local_weight(holder.shard.param)
    return weight[: holder.shards.values.num_mine(holder.shard)].float()


def _put_fp32(holder: _Holder, mine: torch.Tensor) -> None:
    tiles = tiles_of(holder.shards)
    if tiles is not None and holder.live.unit.is_trainable:
        tiles.load(holder.shard, MASTER, mine)
    else:
        holder.shards.replace_mine(holder.live, holder.shard, mine)


def _state_part(holder: _Holder, key: str) -> torch.Tensor | None:
    if not holder.live.unit.is_trainable:
        return None
    return _states_of(holder, key).state(holder.shard, key)


def _states_of(holder: _Holder, key: str | None = None) -> StateTiles:
    tiles = tiles_of(holder.shards)
    name = holder.shard.name
    if not holder.live.unit.is_trainable:
        raise ValueError(
            f"{name} is frozen, or its model is for inference: it has no optimizer states"
        )
    if tiles is None:
        raise RuntimeError(
            f"{name} has no optimizer states before there is an optimizer: build it first"
        )
    if key is not None and key not in tiles.names(holder.shard):
        kept = ", ".join(tiles.names(holder.shard)) or "none"
        raise ValueError(f"{name} has no optimizer state {key!r}; those it has: {kept}")
    tiles.on_look()
    return tiles


# ---- gradients -----------------------------------------------------------------------------------


def _gradient_part(holder: _Holder) -> torch.Tensor | None:
    if not holder.live.unit.is_trainable:
        return None
    _check_phase(holder)
    return holder.shards.local_gradient(holder.shard.param)


def _put_gradient(
    holder: _Holder, part_of: Callable[[_Holder, torch.Tensor], torch.Tensor], value: torch.Tensor
) -> None:
    _check_phase(holder)
    _replace_gradient(holder, part_of(holder, value))


def _check_phase(holder: _Holder) -> None:
    """Raises RuntimeError unless reduced gradients exist now; ValueError for a frozen parameter."""
    shards = holder.shards
    shard = holder.shard
    if not holder.live.unit.is_trainable:
        raise ValueError(
            f"{shard.name} is frozen, or its model is for inference: it has no gradient"
        )
    if shards.homes.store.home is None:
        raise RuntimeError(
            f"the gradient of {shard.name} is not kept: step_in_backward uses it up as it comes. "
            "Turn that off to see it"
        )
    if shard.param.grad is not None and not isinstance(shard.param.grad, ShardedGrad):
        raise RuntimeError(
            f"the gradient of {shard.name} has not been reduced over the ranks yet: below stage 2 "
            "that happens in backward of "
            f"a step's last micro-batch, and inside no_sync not at all. {_NOT_NOW.capitalize()}"
        )
    if not any(s.gradient.is_there and s.param.grad is not None for _, s in shards.parameters()):
        raise RuntimeError(f"there is no gradient of {shard.name} now: {_NOT_NOW}")


# ---- parts of ranks ------------------------------------------------------------------------------


_Part = Callable[[_Holder], torch.Tensor | None]
"""Reads this rank's part of a value, flat and without padding; None if there is none."""


def _whole(holder: _Holder, part: _Part) -> torch.Tensor | None:
    mine = part(holder)
    return (
        None
        if mine is None
        else holder.shards.values.assemble(holder.shard, mine).view(holder.shard.shape)
    )


def _whole_part(holder: _Holder, value: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a full value. Raises ValueError for another shape."""
    if tuple(value.shape) != tuple(holder.shard.shape):
        raise ValueError(
            f"{holder.shard.name} has shape {tuple(holder.shard.shape)}; the value that was given "
            f"has {tuple(value.shape)}"
        )
    return holder.shards.values.mine(holder.shard, value.detach()).to("cpu", torch.float32)


def _local_part(holder: _Holder, value: torch.Tensor) -> torch.Tensor:
    """Returns a local value without its padding. Raises ValueError for another number of
    elements."""
    if tuple(value.shape) != (holder.shard.shard_numel,):
        raise ValueError(
            f"this rank's part of {holder.shard.name} has shape ({holder.shard.shard_numel},), "
            f"padding included; the value that was given has {tuple(value.shape)}"
        )
    return value.detach()[: holder.shards.values.num_mine(holder.shard)].to("cpu", torch.float32)


def _padded(holder: _Holder, part: _Part) -> torch.Tensor | None:
    mine = part(holder)
    return (
        None
        if mine is None
        else nn.functional.pad(mine, (0, holder.shard.shard_numel - mine.numel()))
    )
