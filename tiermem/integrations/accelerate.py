"""Accelerate: `prepare` makes an Accelerator drive a sharded model.

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler,
    policy=OffloadPolicy(...))

    the model       is sharded with the policy, unless it is sharded already; it is not wrapped (DDP) and not moved
    the optimizer   becomes tiermem's of the same kind with the same groups, unless it steps the sharded model already
    everything else as accelerator.prepare

The Accelerator's own methods then work on one and on several ranks: backward, accumulate,
clip_grad_norm_, gather. `save_state` saves a durable step in `<dir>/tiermem` instead of whole
states, and `load_state` opens it; those of further models, in the order of `prepare`, lie in
`<dir>/tiermem_1` and so on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from tiermem.checkpoint.opening.loading import load
from tiermem.checkpoint.saving.saver import save, wait
from tiermem.engine.choice import take_over
from tiermem.integrations.choice import mark, shard_as_asked
from tiermem.integrations.pretrained import WEIGHTS_FILE, load_pretrained_weights
from tiermem.optim.base import NativeOptimizer
from tiermem.policy import OffloadPolicy
from tiermem.run.shards import Shards, owner_of

TAG = "tiermem"

_SAVED: dict[str, Any] = {"state": {}, "param_groups": [], "saved in": TAG}


class PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's wrapper of an optimizer whose states `save_state` leaves to a durable step."""

    def __init__(self, optimizer: NativeOptimizer, scaler: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self._is_accelerate_prepared = True
        self.is_saved = False
        """Whether a durable step has the states, as the next `state_dict` then says."""

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's states; a note in a `save_state`, whose durable step has them."""
        is_saved = self.is_saved
        self.is_saved = False
        return dict(_SAVED) if is_saved else self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores states, unless a durable step has them."""
        if "saved in" not in state_dict:
            super().load_state_dict(state_dict)


Prepared = dict[Shards, PreparedOptimizer | None]
"""Sharded models, and what steps them."""

_PREPARED: WeakKeyDictionary[Accelerator, Prepared] = WeakKeyDictionary()


def prepare(accelerator: Accelerator, *objects: Any, policy: OffloadPolicy | None = None) -> Any:
    """Prepares a model, its optimizer and any loaders and schedules, in any order, for an
    Accelerator.

    Args:
        objects: one model; at most one optimizer, of its parameters; anything else that
            `accelerator.prepare` takes.
        policy: shards a model that is not sharded yet; default: with an accelerator the fastest that the
            free memory holds, else everything in memory.

    Returns the prepared objects in the same order; one alone, not in a tuple. Collective; blocks.
    Raises ValueError unless there is one model, for several optimizers of it, and for one that
    cannot be taken over.
    """
    models = [each for each in objects if isinstance(each, nn.Module)]
    if len(models) != 1:
        raise ValueError(
            f"prepare was given {len(models)} models; give one, and prepare others with "
            "accelerator.prepare"
        )
    [model] = models
    optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
    own = set(model.parameters())
    num = sum(
        any(not own.isdisjoint(g["params"]) for g in each.param_groups) for each in optimizers
    )
    if num > 1:
        raise ValueError(
            f"prepare was given {num} optimizers; a sharded model has one: make one optimizer with "
            "several parameter groups"
        )
    optimizer = optimizers[0] if optimizers else None
    shards, native = _sharded(model, optimizer, accelerator.device, policy)
    prepared = None if native is None else PreparedOptimizer(native, accelerator.scaler)
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    accelerator._models.remove(model)  # `save_state` would gather all of its weights
    _save_with(accelerator, shards, prepared)
    found = []
    for each in objects:
        if each is optimizer and prepared is not None:
            found.append(accelerator.prepare_optimizer(prepared))
        elif isinstance(each, torch.optim.lr_scheduler.LRScheduler):
            each.optimizer = native  # type: ignore[assignment]  # it was built for the optimizer that ours replaces
            found.append(each)
        else:
            found.append(each if each is model else accelerator.prepare(each))
    # after the optimizers, whose skipped steps they follow
    schedules = torch.optim.lr_scheduler.LRScheduler
    found = [accelerator.prepare(each) if isinstance(each, schedules) else each for each in found]
    return tuple(found) if len(found) > 1 else found[0]


def _sharded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    policy: OffloadPolicy | None,
) -> tuple[Shards, NativeOptimizer | None]:
    """The sharded model and the optimizer that steps it."""
    shards = owner_of(model)
    if shards is not None:
        mark(shards)
    if shards is not None and (optimizer is None or isinstance(optimizer, NativeOptimizer)):
        return shards, optimizer
    choice = None if optimizer is None else take_over(optimizer)
    if shards is None:
        num_moments = choice.num_moments if choice else 0
        shards = shard_as_asked(model, policy, num_moments, device, choice is not None)
    return shards, None if choice is None else choice.build()


def _save_with(
    accelerator: Accelerator, shards: Shards, prepared: PreparedOptimizer | None
) -> None:
    """Makes `save_state` and `load_state` save and open durable steps. Both are collective and
    block."""
    if accelerator not in _PREPARED:
        models: Prepared = {}
        _PREPARED[accelerator] = models
        accelerator.register_save_state_pre_hook(functools.partial(_save_steps, models))
        accelerator.register_load_state_pre_hook(functools.partial(_load_steps, models))
    found = _PREPARED[accelerator]
    found[shards] = prepared or found.get(shards)


def _save_steps(models: Prepared, _: list[nn.Module], __: list[Any], output_dir: str) -> None:
    for tag, shards, prepared in _tagged(models, TAG):
        save(shards, None if prepared is None else prepared.optimizer, output_dir, tag, copy=True)
        wait(shards)
        if prepared is not None:
            prepared.is_saved = True


def _load_steps(models: Prepared, _: list[nn.Module], input_dir: str) -> None:
    folder = Path(input_dir)
    if not (folder / TAG).is_dir():  # a plain Accelerator saved it
        for name, shards, _prepared in _tagged(models, Path(WEIGHTS_FILE).stem):
            load_pretrained_weights(shards.model, folder / f"{name}.safetensors")
        return
    for tag, shards, prepared in _tagged(models, TAG):
        load(shards, None if prepared is None else prepared.optimizer, folder / tag)


def _tagged(models: Prepared, name: str) -> Iterator[tuple[str, Shards, PreparedOptimizer | None]]:
    """The models that are open, with the names that Accelerate gives: name, name_1, name_2."""
    for closed in [shards for shards in models if shards.is_closed]:
        del models[closed]
    for number, (shards, prepared) in enumerate(models.items()):
        yield f"{name}_{number}" if number else name, shards, prepared
