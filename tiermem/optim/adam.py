"""AdamW and Adam: torch optimizers for sharded and ordinary parameters alike.

    sharded    states rest where the model's policy says and are stepped tile by tile (tiles.py)
    ordinary   states are tensors in `optimizer.state`, under torch's own keys (`step`, `exp_avg`, `exp_avg_sq`), plus an fp32
               `master` for parameters in bf16 or fp16

Both run the same native kernel: one pass over memory for unscaling, clipping, the step and the low-precision copy.
`param_groups` are real, so that torch's schedulers work.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tiermem.optim.tiles import StateTiles
from tiermem.swap.native import Workers, optimizer_step
from tiermem.swap.parts import StepParts, StepRule
from tiermem.zero import registry
from tiermem.zero.residency import LiveUnit
from tiermem.zero.shards import Shards
from tiermem.zero.topology import fair_threads
from tiermem.zero.unit import Shard


class NonFiniteGradients(RuntimeError):
    """The gradients hold NaN or infinity and the policy says that this is an error. No state was touched."""


class _NativeAdam(torch.optim.Optimizer):
    """What AdamW and Adam share; see those."""

    is_decoupled = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        _check_range("lr", float(lr), 0.0, math.inf)
        _check_range("betas[0]", betas[0], 0.0, 1.0)
        _check_range("betas[1]", betas[1], 0.0, 1.0)
        _check_range("eps", eps, 0.0, math.inf)
        _check_range("weight_decay", weight_decay, 0.0, math.inf)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self.was_skipped = False  # the last step found gradients that are not finite
        self.grad_norm = 0.0  # of the last step, before clipping, over sharded parameters
        self._groups: dict[int, dict[str, Any]] = {}
        self._tiles: dict[Shards, StateTiles] = {}
        self._workers: Workers | None = None  # for ordinary parameters
        for group in self.param_groups:
            for param in group["params"]:
                keeper = registry.keeper_of(param)
                if isinstance(keeper, Shards) and keeper not in self._tiles:
                    self._attach(keeper)

    def tiles_of(self, shards: Shards) -> StateTiles:
        """The states of a sharded model."""
        return self._tiles[shards]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, scale: float = 1.0, max_norm: float = 0.0) -> Any:
        """Steps every parameter that has a gradient; collective over the ranks of sharded models.

        Args:
            closure: computes the loss again, as in torch.
            scale: the loss scale; gradients are divided by it in the same pass.
            max_norm: clips the global norm of sharded parameters' gradients to this; 0: does not.

        Gradients that hold NaN or infinity leave every sharded state untouched (`was_skipped` is then True), or raise
        NonFiniteGradients, as the policy says. Blocks; raises OSError when a transfer failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._groups = {id(p): group for group in self.param_groups for p in group["params"]}
        self._check_keepers()
        self.was_skipped = False
        for shards, tiles in self._tiles.items():
            self._step_sharded(shards, tiles, scale, max_norm)
        if not self.was_skipped:
            self._step_ordinary(scale)
        return loss

    def _check_keepers(self) -> None:
        """Raises rather than pass over parameters that would never be stepped."""
        for group in self.param_groups:
            for param in group["params"]:
                keeper = registry.keeper_of(param)
                if isinstance(keeper, Shards) and keeper not in self._tiles:
                    raise RuntimeError("the model was sharded after this optimizer was built: build it after")
        for shards in self._tiles:
            for live, shard in shards.parameters():
                if not live.unit.is_trainable and shard.param.grad is not None:
                    raise RuntimeError(
                        f"{shard.name} was frozen when the model was sharded (or all were, for inference), so it has no "
                        "states: set requires_grad before sharding"
                    )

    # ---- sharded -----------------------------------------------------------------------------------------------------------

    def _attach(self, shards: Shards) -> None:
        tiles = self._tiles[shards] = StateTiles(shards)
        if shards.policy.step_in_backward:
            shards.homes.consume = lambda unit, grads: self._step_unit(shards, tiles, shards.units[unit.index], grads)
        else:
            shards.hooks.on_last_read = tiles.begin

    def _step_sharded(self, shards: Shards, tiles: StateTiles, scale: float, max_norm: float) -> None:
        trainable = [live for live in shards.units if live.unit.is_trainable]
        with shards.store.recorder.span("step", "step"):
            shards.homes.drop_what_was_zeroed([live.unit for live in trainable])
            if shards.policy.step_in_backward:
                self._regather(shards, trainable)
                return
            for live in trainable:
                shards.homes.receive(live.unit)
                shards.homes.show(live.unit)
            shards.residency.empty()
            shards.homes.settle()
            self.grad_norm = shards.homes.norm() / scale
            if not math.isfinite(self.grad_norm):
                self._refuse(shards)
                return
            clip = min(1.0, max_norm / (self.grad_norm + 1e-6)) if max_norm else 1.0
            factor = clip / scale / shards.topology.world
            stepped = [s for live in trainable for s in live.unit.shards if s.has_gradient]
            for shard in stepped:
                shard.num_steps += 1
            tiles.step(lambda shard: self._rule_of(shard, factor))
            self._regather(shards, trainable)
            shards.residency.prefetch_first()

    def _step_unit(self, shards: Shards, tiles: StateTiles, live: LiveUnit, grads: torch.Tensor) -> None:
        """Inside backward: steps a unit with gradients that are not kept."""
        self._groups = self._groups or {id(p): group for group in self.param_groups for p in group["params"]}
        sums = shards.homes.sums_of_squares(live.unit.shards)
        if not all(math.isfinite(s) for s in sums):
            raise NonFiniteGradients(f"the gradients of unit {live.unit.name!r} hold NaN or infinity")
        for shard in live.unit.shards:
            shard.num_steps += int(shard.has_gradient)
        shards.residency.outdate(live)
        tiles.step_unit(live, grads, lambda shard: self._rule_of(shard, 1.0 / shards.topology.world))
        for shard in live.unit.shards:
            shard.has_gradient = False

    def _rule_of(self, shard: Shard, factor: float) -> StepRule | None:
        group = self._groups.get(id(shard.param))
        if group is None or not shard.has_gradient:
            return None
        return self._rule(group, shard.num_steps, factor * shard.grad_factor)

    def _refuse(self, shards: Shards) -> None:
        if shards.policy.on_nonfinite == "raise":
            raise NonFiniteGradients(
                f"the global norm of the gradients is {self.grad_norm}: they hold NaN or infinity. No state was touched; "
                'set on_nonfinite="skip" to go on without such steps'
            )
        self.was_skipped = True

    def _regather(self, shards: Shards, trainable: list[LiveUnit]) -> None:
        for live in trainable:
            if live.unit.is_resident and live.shard is not None and live.shard is not live.memory.full:
                shards.regather(live.unit, live.shard, live.memory)

    # ---- ordinary ----------------------------------------------------------------------------------------------------------

    def _step_ordinary(self, scale: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and not isinstance(registry.keeper_of(param), Shards):
                    self._step_parameter(param, group, scale)

    def _step_parameter(self, param: nn.Parameter, group: dict[str, Any], scale: float) -> None:
        assert param.grad is not None
        if param.device.type != "cpu" or not param.is_contiguous():
            raise ValueError(
                f"ordinary parameters are stepped on the CPU and contiguous; given one on {param.device} with strides "
                f"{param.stride()}. Shard the model, or give such parameters to torch's own optimizer"
            )
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
            if param.dtype != torch.float32:
                state["master"] = param.detach().float()
        state["step"] += 1
        if self._workers is None:
            self._workers = Workers(fair_threads())
            weakref.finalize(self, self._workers.close)
        moments = (state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
        master = state["master"].view(-1) if "master" in state else None
        parts = StepParts(param.detach().view(-1), master, param.grad.contiguous().view(-1), moments)
        optimizer_step(self._workers, self._rule(group, int(state["step"]), 1.0 / scale), parts)

    def _rule(self, group: dict[str, Any], num_steps: int, factor: float) -> StepRule:
        lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
        return StepRule(
            "adamw" if self.is_decoupled else "adam",
            step_size=lr / (1.0 - beta1**num_steps),
            decay=1.0 - lr * decay if self.is_decoupled else decay,
            grad_scale=factor,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            inv_sqrt_bias2=1.0 / math.sqrt(1.0 - beta2**num_steps),
        )


class AdamW(_NativeAdam):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019), fp32 masters and moments.

    Args:
        params: parameters or groups, sharded or ordinary (those on the CPU and contiguous).
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.

    Raises ValueError for values out of range and for an empty list. Owns the states of ordinary parameters; those of sharded
    ones belong to the model's store and go when it is closed.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


class Adam(_NativeAdam):
    """Adam with weight decay as an L2 term of the gradient (Kingma & Ba 2015); otherwise as AdamW."""

    is_decoupled = False


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or (name.startswith("betas") and value == high):
        raise ValueError(f"{name} is {value}; allowed are {low} to {high}" + (" (excluded)" if "betas" in name else ""))
