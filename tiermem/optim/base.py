"""NativeOptimizer: the base class of all optimizers here; a torch optimizer for sharded and
ordinary parameters."""

from __future__ import annotations

import dataclasses
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tiermem.optim import ordinary
from tiermem.optim.local import local_of, sum_over_ranks
from tiermem.optim.resting import RestingStates, check_policy
from tiermem.optim.rules import LossScaler
from tiermem.optim.sharded import (
    NonFiniteGradients,
    ShardedModel,
    check_room,
    clip_factor,
    enable_training_of,
)
from tiermem.optim.shown import AtRest, ShownStates
from tiermem.optim.tiles import StateTiles
from tiermem.optimizers.base import (
    IMPLEMENTATION,
    AnyStep,
    Group,
    OptimizerFace,
    Params,
    Rule,
    check_implementation,
)
from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import Precision
from tiermem.ranks.topology import fair_cores, fair_threads
from tiermem.run.shards import Shards
from tiermem.swap.base.grad_mode import call_with_grad, without_grad
from tiermem.swap.base.native import Workers, store_gradient
from tiermem.units import registry
from tiermem.units.state_layout import MASTER
from tiermem.units.written import Mark, mark_of

# ---- state dicts ---------------------------------------------------------------------------------
#
#   {"state": {0: {"step": tensor(3.), "exp_avg": fp32, "exp_avg_sq": fp32 [, "master": fp32]}, 1:
#   ...}, "param_groups": [...]}
#
# torch's optimizers can load these dicts, and the reverse. Every state is fp32 and has the
# parameter's shape. `master` exists if a parameter of lower precision has a master beside it; torch
# ignores it. Without `master` in a dict, the master is made from the parameter; for a sharded model
# also if its policy's `loads_masters` is False.
#
# The state of a DTensor is a DTensor of the same placements, so that torch.distributed.checkpoint
# saves and opens it.
#
# The states of a sharded model are gathered whole, one parameter at a time. Every rank makes the
# dict and holds all of it in host memory (12 bytes per parameter of a bf16 model under AdamW),
# beside the largest state of one parameter.


@dataclasses.dataclass(frozen=True)
class Sealed:
    """Wraps an entry, so that torch's `load_state_dict` does not cast its fp32 states to the
    parameter's dtype."""

    entry: Mapping[str, Any]


# ---- the optimizer -------------------------------------------------------------------------------

_VALUES = "safe_get_full_fp32_param and the like of tiermem.utils give a parameter's values"
_DECLINED = dict.fromkeys(
    ("fp16_groups", "bit16_groups", "fp32_partitioned_groups_flat", "parameter_offload"), _VALUES
)
_DECLINED |= dict.fromkeys(
    ("step_subgroup", "rollback_subgroup"), "tiermem.step_in_backward steps units in backward"
)


class NativeOptimizer(OptimizerFace):
    """Base class of the optimizers. Beside it a subclass has the face of an optimizer
    (optimizers/), which gives the rule of each parameter and checks its groups' values.

        sharded    states rest where the model's policy says, in its precision, and are stepped tile by tile (sharded.py)
        ordinary   states are tensors in `optimizer.state`, under torch's keys (ordinary.py); with a policy whose `optim` is
                   HOST or NVME they rest there (resting.py)

    `optimizer.state` shows all of them; what the user clears, zeroes or assigns there counts
    (shown.py).

    All run the same native kernels: one pass over memory for unscaling, clipping, the step and the
    low-precision copy. `param_groups` are torch's, so torch's schedulers work.

    Args:
        params: parameters, named parameters, or groups.
        precision: of ordinary parameters' states: a Precision or a preset's name; default: fp32
            states. Sharded parameters follow their model's policy.
        policy: where ordinary parameters' states rest, and with how much memory; `precision` is
            then the policy's.
        defaults: default values of the groups, and torch's implementation options that the subclass
            has (IMPLEMENTATION).
    """

    def __init__(
        self,
        params: Params,
        precision: Precision | str | None,
        policy: OffloadPolicy | None = None,
        **defaults: Any,
    ) -> None:
        precision = Precision.preset(precision) if isinstance(precision, str) else precision
        if policy is not None:
            check_policy(policy)
        if policy is not None and precision not in (None, policy.precision):
            raise ValueError(
                f"precision is {precision} and the policy says {policy.precision}: leave precision "
                "out"
            )
        self._begin(precision if policy is None else policy.precision, policy)
        super().__init__(params, defaults)
        self._is_built = True
        if policy is not None and not any(True for _ in self.named_ordinary()):
            raise ValueError(
                "a policy was given, and every parameter belongs to a sharded model, whose own "
                "policy says where its states rest: leave it out"
            )
        self._attach_all()

    def _begin(self, precision: Precision | None, policy: OffloadPolicy | None = None) -> None:
        self.was_skipped = False  # whether the last step found gradients that are not finite
        # of the last step, before clipping: of a sharded model, else of ordinary parameters
        self.grad_norm = 0.0
        self.loss_scaler: LossScaler | None = None
        self._precision = precision  # of ordinary parameters; None: default
        self._policy = policy  # of ordinary parameters' states; None: they are tensors in `state`
        self._resting: list[RestingStates] = []
        self._is_built = False  # whether __init__ has added all its groups
        self._groups: dict[int, dict[str, Any]] = {}  # by id(parameter)
        self._noted: list[dict[str, Any]] = []  # the groups that it is of
        self._sharded: dict[Shards, ShardedModel] = {}
        self._workers: Workers | None = None  # threads for ordinary parameters
        # of ordinary weights when their masters were last made theirs
        self._marks: dict[nn.Parameter, Mark] = {}
        # of ordinary weights, where the user drops their states
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        self._shown = ShownStates()

    def __getattr__(self, name: str) -> Any:
        instead = f": {_DECLINED[name]}" if name in _DECLINED else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch. Raises ValueError for values out of range and for parameters
        that cannot be stepped."""
        merged = {**self.defaults, **param_group}
        check_implementation(merged)
        self.check_group(merged)
        super().add_param_group(param_group)
        try:
            self._check_ordinary(self.param_groups[-1])
            if self._is_built:
                self._attach_all()
        except BaseException:
            self.param_groups.pop()
            raise

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because gradients were not finite, under the
        reference's name."""
        return self.was_skipped

    @property
    def lost_states(self) -> bool:
        """Whether a sharded model that it steps was closed, which freed its states."""
        return any(shards.is_closed for shards in self._sharded)

    @property
    def optimizer(self) -> NativeOptimizer:
        """This optimizer. The reference wraps an optimizer, and tools access it under this name."""
        return self

    @property
    def loss_scale(self) -> float:
        """The factor of the losses that gave these gradients; 1 without an engine."""
        return self.loss_scaler.scale if self.loss_scaler is not None else 1.0

    cur_scale = loss_scale

    def scale_losses_with(self, scaler: LossScaler) -> None:
        """Sets the loss scale of the engine that steps this optimizer, which `loss_scale` then
        returns."""
        self.loss_scaler = scaler

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every parameter group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.param_groups[0]["lr"])

    def tiles_of(self, shards: Shards) -> StateTiles:
        """The states of a sharded model, as tiles."""
        return self._sharded[shards].tiles

    @without_grad
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scale: float = 1.0,
        max_norm: float = 0.0,
        num_undivided: int = 1,
    ) -> Any:
        """Steps every parameter that has a gradient. Blocks; collective over the ranks of sharded
        models.

        Args:
            closure: computes the loss again, as in torch.
            scale: the loss scale; gradients are divided by it in the same pass.
            max_norm: maximum of the global norm, separately for each sharded model and for all
                ordinary parameters together; 0: no clipping.
            num_undivided: divisor of ordinary parameters' gradients, which sum this many
                micro-batches. Sharded models divide their gradients themselves.

        If gradients of a sharded model hold NaN or infinity, its policy decides: its states stay
        unchanged and `was_skipped` is True, NonFiniteGradients is raised, or the gradients are
        applied. After a skip, ordinary parameters are not stepped. If gradients of ordinary
        parameters hold NaN or infinity, ordinary parameters are skipped if scale, num_undivided or
        max_norm is given; else they are stepped as in torch. Raises OSError when a transfer fails.
        """
        self._opt_called = True  # torch's schedules look for it
        loss = None
        if closure is not None:
            loss = call_with_grad(True, closure)
        self._note_groups()
        ordinary = self._check_owners()
        self.follow_state()
        self.was_skipped = False
        for shards in self._sharded:
            self._step_sharded(shards, scale, max_norm)
        if not self.was_skipped:
            self._step_ordinary(ordinary, scale * num_undivided, max_norm)
        self.show_state(has_followed=True)
        for shards in self._sharded:
            shards.after_step(self)
        return loss

    # A schedule would wrap it, to set _opt_called, and warn where it was built for another optimizer.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's optimizers do."""
        # setting the `grad` of resting parameters takes less time so
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states in torch's format, on the CPU; see the top of this file. Collective for
        sharded models; blocks."""
        self.follow_state()
        self._drop_hooks()  # an interrupt has left them
        self.register_state_dict_post_hook(self._fill, prepend=True)
        try:
            return super().state_dict()
        finally:
            self._drop_hooks()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a dict of this class, or of torch's optimizer of the same name. Collective for
        sharded models; blocks.

        Raises ValueError for a dict of another optimizer, before anything changes.
        """
        # Sealing runs after the user's pre-hooks and opening before the user's post-hooks: both see
        # plain dicts, as in torch.
        self._drop_hooks()  # an interrupt has left them
        self.register_load_state_dict_pre_hook(self._seal)
        self.register_load_state_dict_post_hook(self._open, prepend=True)
        begun = [
            (shard, tiles)
            for shard, tiles in self._at_rest()
            if shard not in tiles.half_loaded and self._find_rule(shard.param) is not None
        ]
        for shard, tiles in begun:
            tiles.half_loaded.add(shard)
        try:
            super().load_state_dict(state_dict)
        except (ValueError, TypeError, KeyError):
            for shard, tiles in begun:
                tiles.half_loaded.discard(shard)
            raise
        finally:
            self._drop_hooks()

    def follow_state(self) -> None:
        """Takes over what the user has made of `state` (shown.py). Blocks; raises ValueError for
        another shape, OSError."""
        # looking resting parameters up takes less time so
        with torch._C.DisableTorchFunctionSubclass():
            for shard, home in self._shown.changed(self.state, self._at_rest()):
                if found := self._find_rule(shard.param):
                    self._shown.follow(self.state, shard, home, found[1])

    def show_state(self, has_followed: bool = False) -> None:
        """Makes `state` show states that rest elsewhere as they are. has_followed: it is as
        `follow_state` has left it."""
        with torch._C.DisableTorchFunctionSubclass():
            groups = [group for group in self.param_groups if group["params"]]
            self._shown.use_moments(
                [self.rule_of(group, group["params"][0]).moments for group in groups]
            )
            for shard, home in self._shown.outdated(self.state, self._at_rest(), has_followed):
                if found := self._find_rule(shard.param):
                    self._shown.show(self.state, shard, home, found[1])
            self._shown.note(self.state)

    def _at_rest(self) -> Iterator[AtRest]:
        """The parameters whose states rest elsewhere."""
        for shards, model in self._sharded.items():
            yield from (
                (shard, model.tiles)
                for live, shard in shards.parameters()
                if live.unit.is_trainable
            )
        for states in self._resting:
            yield from ((shard, states) for shard in states.shards.values())

    def close(self) -> None:
        """Frees the states of sharded models, and those that rest where a policy says; `step` then
        raises RuntimeError.

        Weights stay. Another optimizer may follow, whose masters begin as the weights. Collective
        for sharded models; blocks. Without it states are freed with the optimizer, those of a
        sharded model with the model. Raises the first error of a write that no step has raised.
        """
        while self._sharded:
            shards, model = self._sharded.popitem()
            for _, shard in shards.parameters():
                self.state.pop(shard.param, None)
            model.close()
        for states in self._resting:
            states.close()

    def restore_ordinary(self, entries: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """`restore` of ordinary parameters."""
        self.restore(entries, "the entries")

    def restore(self, entries: Mapping[nn.Parameter, Mapping[str, Any]], where: str) -> None:
        """Restores states of parameters from entries of a state dict; an empty entry means no
        steps. where: what holds them. Collective for sharded models; blocks."""
        self._note_groups()
        names = {param: name for name, param in self.named()}
        for param, given in entries.items():
            rule = self.rule_of(self._groups[id(param)], param)
            ordinary.check_entry(given, rule, param, names[param])
        self._restore_all({param: (names[param], entry) for param, entry in entries.items()}, where)

    def whole_state(self, param: torch.Tensor) -> ordinary.State:
        """What `state` shows of an ordinary parameter, and the master that rests elsewhere, fp32.
        Blocks; raises OSError."""
        shown: ordinary.State = self.state.get(param, {})
        if not shown or not isinstance(param, nn.Parameter):
            return shown
        tiles = self._home_of(param)
        if tiles is None or not tiles.keeps_master(shard := tiles.shards[param]):
            return shown
        return {**shown, MASTER: tiles.state(shard, MASTER).view(param.shape)}

    def __getstate__(self) -> dict[str, Any]:
        if self._sharded:
            raise RuntimeError(
                "this optimizer steps a sharded model, whose states rest in its store: use "
                "state_dict()"
            )
        if self._resting:
            raise RuntimeError(
                "the states of this optimizer rest where its policy says: use state_dict()"
            )
        return {**super().__getstate__(), "precision": self._precision}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # unpickled or copied; torch also calls this with a loaded dict, which has no defaults
        if "defaults" in state:
            self._begin(state["precision"])
            state = {name: value for name, value in state.items() if name != "precision"}
        super().__setstate__(state)
        for param in () if self._is_built else self.state:
            self._keep_master(param)
        self._is_built = True

    def _fill(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Adds the entry of every parameter that has states to a dict, under the parameter's
        number."""
        found: dict[int, ordinary.State] = {}
        at_rest = {shard.param: (shard, tiles) for shard, tiles in self._at_rest()}
        numbers = [group["params"] for group in state_dict["param_groups"]]
        for group, own in zip(self.param_groups, numbers, strict=True):
            for number, param in zip(own, group["params"], strict=True):
                rule = self.rule_of(group, param)
                if param in at_rest:
                    shard, tiles = at_rest[param]
                    if shard.num_steps or shard.has_moments or shard.has_master:
                        found[number] = tiles.export(shard, rule)
                elif self.state.get(param):
                    self._take_over(str(number), param)
                    found[number] = ordinary.export_state(
                        self._threads(), param, self.state[param], rule
                    )
        state_dict["state"] = found

    def _seal(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The same dict, with each entry wrapped in Sealed. Raises ValueError, before torch changes
        anything, for an entry that cannot be restored. Torch compares the sizes of groups
        itself."""
        self._note_groups()
        names = {param: name for name, param in self.named()}
        for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=False):
            group = {**self.defaults, **saved}
            for number, param in zip(saved["params"], own["params"], strict=False):
                if given := state_dict["state"].get(number):
                    rule = self.rule_of(group, param)
                    ordinary.check_entry(given, rule, param, names[param])
        sealed = {number: Sealed(entry) for number, entry in state_dict["state"].items()}
        return {**state_dict, "state": sealed}

    def _drop_hooks(self) -> None:
        """Removes the hooks of `state_dict` and `load_state_dict`."""
        of_torch: tuple[dict[int, Any], ...] = (
            self._optimizer_state_dict_post_hooks,
            self._optimizer_load_state_dict_pre_hooks,
            self._optimizer_load_state_dict_post_hooks,
        )
        for hooks in of_torch:
            for number in [
                number
                for number, hook in hooks.items()
                if hook in (self._fill, self._seal, self._open)
            ]:
                del hooks[number]

    def _open(self, _: torch.optim.Optimizer) -> None:
        """Restores the entries that torch has put into `state`, after torch has set the groups."""
        for group, loaded in zip(self._noted, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        # the same dicts, which may be another optimizer's, too: a schedule of it sets their rates
        self.param_groups = list(self._noted)
        for group in self.param_groups:
            nothing = {
                name: value for name, (value, _) in IMPLEMENTATION.items() if name in self.defaults
            }
            # torch's implementation options do not apply here
            group.update({**self.defaults, **group, **nothing})
            self.check_group(group)
        self._attach_all()
        sealed = dict(self.state)
        self.state.clear()
        entries = {
            param: (name, sealed[param].entry if param in sealed else {})
            for name, param in self.named()
        }
        self._restore_all(entries, "the state dict")

    def _restore_all(
        self, entries: Mapping[nn.Parameter, tuple[str, Mapping[str, Any]]], where: str
    ) -> None:
        """Restores states of parameters, each given by name and entry; an empty one: no steps."""
        for shards in self._sharded:
            params = (shard.param for _, shard in shards.parameters())
            enable_training_of(shards, [p for p in params if p in entries and entries[p][1]], where)
        ordinary_ones = {param for _, param in self.named_ordinary()}
        self._rest(
            [(name, p) for p, (name, given) in entries.items() if given and p in ordinary_ones]
        )
        at_rest = {shard.param: (shard, tiles) for shard, tiles in self._at_rest()}
        for shard, tiles in self._at_rest():
            if shard.param in entries:
                tiles.half_loaded.add(shard)
        closed = [shards for shards in self._sharded if shards.is_closed]
        freed = {shard.param for shards in closed for _, shard in shards.parameters()}
        for param, (name, given) in entries.items():
            rule = self.rule_of(self._groups[id(param)], param)
            if param in freed and not given:
                continue  # there is nothing to restore
            if param in at_rest:
                shard, tiles = at_rest[param]
                tiles.restore(shard, given, rule)
            elif param in ordinary_ones:
                self.state.pop(param, None)
                self._marks.pop(param, None)
                self._masters.pop(param, None)
                if given:
                    self.state[param] = ordinary.restore_state(
                        self._threads(), param, given, rule, self._ordinary_precision, name
                    )
                    self._keep_master(param)
        self.show_state()

    def _check_owners(self) -> list[tuple[str, nn.Parameter]]:
        """Returns `named_ordinary`. Raises RuntimeError for a parameter that this optimizer holds
        and would never step."""
        owners = [(name, param, registry.owner_of(param)) for name, param in self.named()]
        if any(isinstance(owner, Shards) and owner not in self._sharded for _, _, owner in owners):
            raise RuntimeError(
                "the model was sharded after this optimizer was built, or the optimizer was "
                "closed: build it after"
            )
        for shards in self._sharded:
            shards.enable_training()
            for live, shard in shards.parameters():
                if not live.unit.is_trainable and shard.param.grad is not None:
                    raise RuntimeError(
                        f"{shard.name} has a gradient and no states: it is frozen, or the model "
                        "was sharded for inference. Set requires_grad before the forward"
                    )
        return [(name, param) for name, param, owner in owners if not isinstance(owner, Shards)]

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter with its name if torch was given names, else with its number in state
        dicts."""
        number = 0
        for group in self.param_groups:
            names = group.get("param_names") or [
                str(i) for i in range(number, number + len(group["params"]))
            ]
            number += len(group["params"])
            yield from zip(names, group["params"], strict=True)

    def named_ordinary(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that belong to no sharded model, as `named` yields them."""
        return (
            (name, param)
            for name, param in self.named()
            if not isinstance(registry.owner_of(param), Shards)
        )

    # ---- sharded ---------------------------------------------------------------------------------

    def _attach_all(self) -> None:
        """Makes the states of sharded models whose parameters are here. Raises ValueError when the
        plan lacks room."""
        self._note_groups()
        owners = {param: registry.owner_of(param) for _, param in self.named()}
        for param, owner in owners.items():
            if isinstance(owner, Shards):
                check_room(owner, self.rule_of(self._groups[id(param)], param), type(self).__name__)
        for owner in owners.values():
            if not isinstance(owner, Shards) or owner in self._sharded:
                continue
            if self._precision is not None and self._precision != owner.policy.precision:
                raise ValueError(
                    f"precision is {self._precision} and the sharded model's policy says "
                    f"{owner.policy.precision}; its states are planned when it is sharded: set "
                    "OffloadPolicy(precision=...) and leave this one out"
                )
            self._sharded[owner] = ShardedModel(owner, self._find_rule, lambda: self.loss_scale)
            self._sharded[owner].tiles.on_look = self.follow_state
        self._rest([(name, param) for name, param in self.named_ordinary() if param.requires_grad])

    def _note_groups(self) -> None:
        self._noted = list(self.param_groups)
        self._groups = {id(p): group for group in self._noted for p in group["params"]}

    def _find_rule(self, param: nn.Parameter) -> tuple[Group, Rule] | None:
        if len(self._noted) != len(self.param_groups) or any(
            map(operator.is_not, self._noted, self.param_groups)
        ):
            self._note_groups()  # `param_groups` was set
        group = self._groups.get(id(param))
        return None if group is None else (group, self.rule_of(group, param))

    def _step_sharded(self, shards: Shards, scale: float, max_norm: float) -> None:
        model = self._sharded[shards]
        norm = model.step(scale, max_norm)
        if norm is None:
            return
        self.grad_norm = norm
        if not model.is_refused(norm):
            return
        if shards.policy.on_nonfinite == "raise":
            raise NonFiniteGradients(
                f"the global norm of the gradients is {self.grad_norm}: they hold NaN or infinity. "
                'No state was touched; set on_nonfinite="skip" to go on without such steps'
            )
        self.was_skipped = True

    # ---- ordinary --------------------------------------------------------------------------------

    def _rest(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Takes room on the policy's tier for states of ordinary parameters that have none yet."""
        if self._policy is None or self._policy.optim is Tier.DEVICE:
            return
        new = {param: name for name, param in named if self._home_of(param) is None}
        if new:
            taken = sum(states.host_bytes for states in self._resting)
            self._resting.append(
                RestingStates(self._policy, new, self._find_rule, self._threads(), taken)
            )

    def _home_of(self, param: nn.Parameter) -> RestingStates | None:
        """Where a parameter's states rest; None: in `state`, or nowhere yet."""
        return next((states for states in self._resting if param in states.shards), None)

    def _check_ordinary(self, group: Group) -> None:
        own = {id(param) for param in group["params"]}
        for name, param in self.named_ordinary():
            if id(param) in own and param.requires_grad:
                ordinary.check_parameter(param, self._ordinary_precision, name)
                ordinary.check_rule(param, self.rule_of({**self.defaults, **group}, param), name)

    @property
    def _ordinary_precision(self) -> Precision:
        return self._precision or Precision()

    def _threads(self) -> Workers:
        if self._workers is None:
            self._workers = Workers(fair_threads(), fair_cores())
            weakref.finalize(self, self._workers.close)
        return self._workers

    def _step_ordinary(
        self, named: list[tuple[str, nn.Parameter]], scale: float, max_norm: float
    ) -> None:
        due = [(name, param) for name, param in named if param.grad is not None]
        self._rest(due)
        grads = {
            p: ordinary.check_gradient(p, name, self._home_of(p) is not None) for name, p in due
        }
        factor = 1.0 / scale
        if due and (scale != 1.0 or max_norm):
            norm = self._ordinary_norm(grads) / scale
            if not self._sharded:
                self.grad_norm = norm
            if not math.isfinite(norm):
                self.was_skipped = True
                return
            factor *= clip_factor(norm, max_norm)
        for states in self._resting:
            states.step(
                {
                    param: self._scalars(param, shard.num_steps + 1, factor)
                    for param, shard in states.shards.items()
                    if param in grads
                }
            )
        for name, param in due:
            if self._home_of(param) is None:
                self._step_parameter(name, param, factor)

    def _ordinary_norm(self, grads: Mapping[nn.Parameter, torch.Tensor]) -> float:
        """The norm of all gradients together. Sums of squares of fixed blocks are added in a fixed
        order.

        Collective where parameters are DTensors.
        """
        sums = {
            param: sum(store_gradient(self._threads(), None, grad.contiguous().view(-1).cpu()))
            for param, grad in grads.items()
        }
        total = sum_over_ranks(sums)
        return math.sqrt(total) if math.isfinite(total) else math.inf

    def _scalars(self, param: nn.Parameter, num_steps: int, factor: float) -> AnyStep:
        group = self._groups[id(param)]
        return self.rule_of(group, param).scalars(group, num_steps, factor, param.shape)

    def _step_parameter(self, name: str, param: nn.Parameter, factor: float) -> None:
        rule = self.rule_of(self._groups[id(param)], param)
        precision = self._ordinary_precision
        state = self.state[param]
        if not state:
            ordinary.check_parameter(param, precision, name)
            state.update(ordinary.new_state(param, rule, precision))
            if param in self._masters:
                del state[MASTER]
        state[ordinary.STEP] += 1
        step = self._scalars(param, int(state[ordinary.STEP]), factor)
        self._take_over(name, param)
        ordinary.step_parameter(self._threads(), param, state, rule, step, precision, name)
        self._marks[param] = mark_of(local_of(param))

    def _take_over(self, name: str, param: nn.Parameter) -> None:
        """Makes the master in `state` that of a weight which the user has written since the last
        step."""
        mark = mark_of(local_of(param))
        state = self.state[param]
        if (kept := self._masters.pop(param, None)) is not None:
            state.setdefault(MASTER, kept)
        if self._marks.get(param) != mark:
            ordinary.adopt_weight(param, state, self._ordinary_precision, name)
            self._marks[param] = mark
        self._keep_master(param)

    def _keep_master(self, param: torch.Tensor) -> None:
        """Keeps the master in `state`, which the user may drop with the moments."""
        if MASTER in self.state[param]:
            self._masters[param] = self.state[param][MASTER]
