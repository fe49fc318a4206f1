"""State access: reading and changing one parameter's fp32 value, gradient and optimizer states, wherever they rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from tiermem.optim.tiles import StateTiles, tiles_of
from tiermem.policy import Tier
from tiermem.swap.native import store_gradient
from tiermem.zero import registry
from tiermem.zero.gradient_store import ShardedGrad
from tiermem.zero.shards import Shards
from tiermem.zero.state_layout import MASTER
from tiermem.zero.unit import Shard
from tiermem.zero.unit_state import LiveUnit

# ---- Putting a gradient: other values in place of a reduced gradient that rests at home, between backward and --------
# step
#
# The values are the gradient itself, the mean over ranks; at home lie sums. So the values rest as they are, and the
# factor that every gradient carries to the step (`Gradient.factor`) says that they have been divided. The norm of the
# step is made of them: their sums of squares take the place of those that were measured when the gradient came.


def put_gradient(shards: Shards, live: LiveUnit, shard: Shard, mine: torch.Tensor) -> None:
    """Puts this rank's part of a gradient, flat and without padding, where it rests. Blocks; raises OSError.

    It is rounded to what gradients rest in (`Precision.grads`). A parameter that had no gradient has one then, on this rank.
    """
    homes, workers = shards.homes, shards.workers
    homes.settle()
    values = mine.detach().to("cpu", homes.dtype(live.unit)).contiguous()
    flat, first = homes.flat(live.unit), shard.shard_numel * shards.topology.shard_rank
    if homes.home is Tier.DEVICE:
        assert flat is not None
        flat[shard.shard_offset : shard.shard_offset + values.numel()].copy_(values)
        sums = store_gradient(workers, None, values, first)
    elif flat is not None:
        home = flat[shard.shard_offset : shard.shard_offset + values.numel()]
        sums = store_gradient(workers, home, values, first)
    else:
        sums = store_gradient(workers, None, values, first)
        offset = shard.shard_offset * values.element_size()
        shards.values.write_part(homes.entry(live.unit), offset, values.view(torch.uint8))
    shard.gradient.arrive(sums, homes.divisor)
    shard.gradient.confirm()
    homes.show(live.unit)


# ---- State access: looking at, and changing, one parameter's fp32 value, gradient and optimizer states, wherever -----
# they rest
#
#     full     the whole tensor, in the parameter's shape: put together from all ranks, so every rank calls
#     local    this rank's part, flat, ceil(numel / shards) elements with zeros behind the last: asks nobody
#
#                         valid
#     fp32 parameter      from `shard` (or `initialize`) until the shards are closed; changes with each step
#     gradient            after backward, when it has been reduced, until the step or zero_grad
#     optimizer state     as soon as there is an optimizer: zero, or what was put, before the first step
#
# All are fp32 tensors on the CPU, copies: changing them changes nothing, the `safe_set_*` do. A parameter's own value
# follows its fp32 value; a gradient that was put is what the step sees, in its norm too. Gradients are the mean over
# ranks and, as in the reference, still carry fp16's loss scale (`engine.loss_scale()`). Frozen parameters have no
# master, gradient or states: None. Names of states are torch's (exp_avg, exp_avg_sq, momentum_buffer, sum).
#
# A full form is collective: if a rank stays away the others raise after the policy's `timeout_s`. Of the local forms
# `safe_set_local_fp32_param` is too, since other ranks may hold what it changes: every rank sets its own part.
#
# Only the bytes of the one parameter are read and written. Whoever changes many at once uses a vectorised form.

_NOT_NOW = "there are gradients after backward, when they have been reduced, and until the step or zero_grad"


# ---- full ----------------------------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """A parameter's value in fp32: its master, where it has one; None of a frozen one. Collective; blocks.

    The value of a frozen one is `Shards.weight(param)`. Raises ValueError when the parameter is not sharded, OSError when a
    transfer failed.
    """
    place = _find(param)
    return _assemble(place, _fp32_part(place)) if param.requires_grad else None


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """A parameter's reduced gradient in fp32; None when it has none while others have, or is frozen. Collective; blocks.

    Raises RuntimeError outside the time between backward and step, ValueError when the parameter is not sharded.
    """
    place = _find(param)
    mine = _gradient_part(place)
    return None if mine is None else _assemble(place, mine)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """One of a parameter's optimizer states in fp32; None of a frozen one. Collective; blocks.

    Raises ValueError for a state that is not kept, naming those that are; RuntimeError when there is no optimizer yet.
    """
    place = _find(param)
    mine = _state_part(place, optim_state_key)
    return None if mine is None else _assemble(place, mine)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Changes a parameter's value: master, low-precision copy, and what other ranks hold of it. Collective; blocks.

    value: in the parameter's shape, the same on every rank. Raises ValueError for another shape.
    """
    place = _find(param)
    _put_fp32(place, _whole_part(place, value))


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Changes the gradient that the next step uses. Blocks.

    value: in the parameter's shape, the same on every rank; as `safe_get_full_grad` returns it. Raises as that does.
    """
    place = _find(param)
    _check_phase(place)
    put_gradient(place.shards, place.live, place.shard, _whole_part(place, value))


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Changes one of a parameter's optimizer states. Blocks.

    value: in the parameter's shape, the same on every rank. Raises as `safe_get_full_optimizer_state`, and ValueError for
    another shape and for frozen parameters.
    """
    place = _find(param)
    _states_of(place, optim_state_key).load(place.shard, optim_state_key, _whole_part(place, value))


# ---- local ---------------------------------------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of `safe_get_full_fp32_param`. Blocks. Raises RuntimeError below stage 1, where there are no parts."""
    place = _find_part(param)
    return _padded(place, _fp32_part(place)) if param.requires_grad else None


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of `safe_get_full_grad`. Blocks; raises as that does."""
    place = _find_part(param)
    mine = _gradient_part(place)
    return None if mine is None else _padded(place, mine)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of `safe_get_full_optimizer_state`. Blocks; raises as that does."""
    place = _find_part(param)
    mine = _state_part(place, optim_state_key)
    return None if mine is None else _padded(place, mine)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Changes this rank's part of a parameter's value; every rank sets its own. Collective; blocks.

    value: flat, as `safe_get_local_fp32_param` returns it; what it says of the padding is not kept.
    """
    place = _find_part(param)
    _put_fp32(place, _local_part(place, value))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Changes this rank's part of the gradient that the next step uses. Blocks; raises as `safe_set_full_grad`."""
    place = _find_part(param)
    _check_phase(place)
    put_gradient(place.shards, place.live, place.shard, _local_part(place, value))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Changes this rank's part of one of a parameter's optimizer states. Blocks; raises as the full form does."""
    place = _find_part(param)
    _states_of(place, optim_state_key).load(place.shard, optim_state_key, _local_part(place, value))


# ---- many at once --------------------------------------------------------------------------------------------------------


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Puts `update_func(gradient, param)` in place of each parameter's gradient; those without one are passed over.

    Gradients are full and fp32, one in memory at a time, taken in the order in which they rest; each is read once and
    written once. Collective; blocks. Raises as `safe_set_full_grad`.
    """
    for place in _in_order(param_list):
        mine = _gradient_part(place)
        if mine is not None:
            value = update_func(_assemble(place, mine), place.shard.param)
            put_gradient(place.shards, place.live, place.shard, _whole_part(place, value))


def safe_update_local_states_vectorized(
    param_list: Iterable[nn.Parameter],
    update_func: Callable[[dict[str, torch.Tensor], nn.Parameter, slice], None],
) -> None:
    """Lets a function change fp32 values and optimizer states of many parameters in place; visits each tile once.

    update_func(states, param, elements): `states` are flat fp32 tensors by name, "fp32_param" and the optimizer's own
    ("exp_avg", ...); `elements` says which of the parameter's elements they are, in row-major order. A parameter that is cut by
    tiles or ranks comes in several pieces. Tiles are read ahead and written behind, as in a step.

    Every rank calls it for the same parameters. Blocks. Raises ValueError for frozen parameters, RuntimeError when there
    is no optimizer yet, OSError when a transfer failed.
    """
    models: dict[Shards, list[_Place]] = {}
    for place in _in_order(param_list):
        models.setdefault(place.shards, []).append(place)
    for places in models.values():
        chosen = frozenset(place.shard for place in places)
        tiles = {_states_of(place): None for place in places}  # one optimizer steps a model
        next(iter(tiles)).visit(chosen, lambda values, shard, elements: update_func(values, shard.param, elements))


# ---- where a parameter is --------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    shards: Shards
    live: LiveUnit
    shard: Shard


def _find(param: nn.Parameter) -> _Place:
    keeper = registry.keeper_of(param)
    if not isinstance(keeper, Shards):
        made = "it was built by zero.Init and waits for" if keeper is not None else "it needs"
        raise ValueError(
            f"the parameter of shape {tuple(param.shape)} is not one of a sharded model: {made} tiermem.initialize or "
            "tiermem.shard; once the engine or the shards are closed, its states are gone"
        )
    return _Place(keeper, *keeper.find(param))


def _find_part(param: nn.Parameter) -> _Place:
    place = _find(param)
    if place.shards.policy.stage == 0:
        raise RuntimeError(
            f"{place.shard.name}: in stage 0 every rank holds everything, so there are no local parts; use the full form, or "
            "stage 1, 2 or 3"
        )
    return place


def _in_order(params: Iterable[nn.Parameter]) -> list[_Place]:
    """Each parameter once, as they lie: unit by unit."""
    if isinstance(params, torch.Tensor):
        raise TypeError("param_list is one parameter; give a list of them")
    places = {id(param): _find(param) for param in params}
    return sorted(places.values(), key=lambda place: (place.live.unit.index, place.shard.shard_offset))


# ---- fp32 values and states ------------------------------------------------------------------------------------------------


def _fp32_part(place: _Place) -> torch.Tensor:
    tiles = tiles_of(place.shards)
    if tiles is not None and place.live.unit.is_trainable:
        return tiles.state(place.shard, MASTER)
    weight = place.shards.local_weight(place.shard.param)
    return weight[: place.shards.values.num_mine(place.shard)].float()


def _put_fp32(place: _Place, mine: torch.Tensor) -> None:
    tiles = tiles_of(place.shards)
    if tiles is not None and place.live.unit.is_trainable:
        tiles.load(place.shard, MASTER, mine)
    else:
        place.shards.replace_mine(place.live, place.shard, mine)


def _state_part(place: _Place, key: str) -> torch.Tensor | None:
    if not place.live.unit.is_trainable:
        return None
    return _states_of(place, key).state(place.shard, key)


def _states_of(place: _Place, key: str | None = None) -> StateTiles:
    tiles, name = tiles_of(place.shards), place.shard.name
    if not place.live.unit.is_trainable:
        raise ValueError(f"{name} is frozen, or its model is for inference: it has no optimizer states")
    if tiles is None:
        raise RuntimeError(f"{name} has no optimizer states before there is an optimizer: build it first")
    if key is not None and key not in tiles.names(place.shard):
        kept = ", ".join(tiles.names(place.shard)) or "none"
        raise ValueError(f"{name} has no optimizer state {key!r}; those it has: {kept}")
    return tiles


# ---- gradients -------------------------------------------------------------------------------------------------------------


def _gradient_part(place: _Place) -> torch.Tensor | None:
    if not place.live.unit.is_trainable:
        return None
    _check_phase(place)
    return place.shards.local_gradient(place.shard.param)


def _check_phase(place: _Place) -> None:
    """Raises RuntimeError unless this is between backward and step."""
    shards, shard = place.shards, place.shard
    if not place.live.unit.is_trainable:
        raise ValueError(f"{shard.name} is frozen, or its model is for inference: it has no gradient")
    if shards.homes.home is None:
        raise RuntimeError(
            f"the gradient of {shard.name} is not kept: step_in_backward uses it up as it comes. Turn that off to see it"
        )
    if shard.param.grad is not None and not isinstance(shard.param.grad, ShardedGrad):
        raise RuntimeError(
            f"the gradient of {shard.name} has not been reduced over the ranks yet: below stage 2 that happens in backward of "
            f"a step's last micro-batch, and inside no_sync not at all. {_NOT_NOW.capitalize()}"
        )
    if not any(_has_gradient(other) for other in [shard, *(s for _, s in shards.parameters())]):
        raise RuntimeError(f"there is no gradient of {shard.name} now: {_NOT_NOW}")


def _has_gradient(shard: Shard) -> bool:
    return shard.gradient.is_there and shard.param.grad is not None


# ---- parts -----------------------------------------------------------------------------------------------------------------


def _assemble(place: _Place, mine: torch.Tensor) -> torch.Tensor:
    return place.shards.values.assemble(place.shard, mine).view(place.shard.shape)


def _whole_part(place: _Place, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a full value. Raises ValueError for another shape."""
    if tuple(value.shape) != tuple(place.shard.shape):
        raise ValueError(
            f"{place.shard.name} has shape {tuple(place.shard.shape)}; the value that was given has {tuple(value.shape)}"
        )
    return place.shards.values.mine(place.shard, value.detach()).to("cpu", torch.float32)


def _local_part(place: _Place, value: torch.Tensor) -> torch.Tensor:
    """A local value without its padding. Raises ValueError for another number of elements."""
    if tuple(value.shape) != (place.shard.shard_numel,):
        raise ValueError(
            f"this rank's part of {place.shard.name} has shape ({place.shard.shard_numel},), padding included; the value "
            f"that was given has {tuple(value.shape)}"
        )
    return value.detach()[: place.shards.values.num_mine(place.shard)].to("cpu", torch.float32)


def _padded(place: _Place, mine: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(mine, (0, place.shard.shard_numel - mine.numel()))
