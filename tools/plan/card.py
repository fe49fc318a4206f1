"""Card: what an accelerator's memory leaves to a plan, and what a run's config leaves open, chosen
and explained.

card - in use - torch's part - activations, by the home of block inputs  =  room for the plan
rates or none, room  ->  forecast's choice, or the plan's rule  ->  config, and a sentence for each choice
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem.config import load_config, resolve_auto
from tiermem.config.io import STATES_PER_TILE
from tiermem.forecast import Placement, Rates, choose
from tiermem.forecast.choose import Tried
from tiermem.forecast.rates import Compute
from tiermem.plans.budget import make_plan
from tiermem.plans.plan import Plan, Row
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.topology import Topology, plan_topology
from tiermem.swap.memory.accelerator import free_and_total, is_accelerator
from tiermem.tools.job.launcher import Job
from tiermem.tools.job.train_job import Config, with_key
from tiermem.tools.plan.planned import (
    ActivationBytes,
    Budget,
    budget_of,
    fits_budget,
    meta_model,
)
from tiermem.tools.presets import ModelSizes
from tiermem.tools.words import format_bytes
from tiermem.units.unit import divide

_TORCHS_PART = 0.05
_CONTEXT_BYTES = 512 << 20  # of a driver's context and its kernels, where it cannot be measured


class Card(NamedTuple):
    """An accelerator's memory."""

    total_bytes: int
    others: tuple[Row, ...]
    """What neither a plan nor activations may take."""

    @staticmethod
    def here(device: torch.device) -> Card | None:
        """The device as it is now; None: the CPU."""
        if not is_accelerator(device):
            return None
        free, total = free_and_total(device)
        return Card(
            total,
            (
                Row("in use", Tier.DEVICE, total - free, "by the context and others, now"),
                _gaps(total),
            ),
        )

    @staticmethod
    def elsewhere(total_bytes: int) -> Card:
        """A card that is not in this machine."""
        context = Row(
            "context", Tier.DEVICE, min(_CONTEXT_BYTES, total_bytes), "of the driver, assumed"
        )
        return Card(total_bytes, (context, _gaps(total_bytes)))

    @property
    def room_bytes(self) -> int:
        """What a plan and activations may take together."""
        return max(1, self.total_bytes - sum(row.num_bytes for row in self.others))

    def budget(self, activations: ActivationBytes, home: Tier | None) -> Budget:
        """The arithmetic: what is left for a plan with the inputs of checkpointed blocks in a
        home."""
        return Budget(self.total_bytes, (*self.others, *activations.rows(home)), "the plan")


def _gaps(total_bytes: int) -> Row:
    part = int(_TORCHS_PART * total_bytes)
    return Row(
        "torch",
        Tier.DEVICE,
        part,
        f"{_TORCHS_PART:.0%}: libraries' workspaces, gaps between torch's blocks",
    )


def say_placement(
    given: OffloadPolicy,
    policy: OffloadPolicy,
    plan: Plan,
    card: Card,
    activations: ActivationBytes,
) -> list[str]:
    """A sentence on `device_bytes` and one on `activations`, with the arithmetic.

    given: the policy before the choice; policy, plan: after it.
    """
    units = plan.division.units
    budget = card.budget(activations, policy.activations)
    stay = f"{sum(unit.is_resident for unit in units)} of {len(units)} units stay on the GPU"
    takes = f"the plan takes {format_bytes(plan.device_bytes)}: {stay}"
    if given.device_bytes is not None:
        first = (
            f"device_bytes: {format_bytes(given.device_bytes)}, as the config says; {takes}; "
            f"{budget.explain()}"
        )
    elif policy.device_bytes is None:
        why = (
            "no more units stay, which is faster"
            if plan.device_bytes <= budget.left_bytes
            else "no plan fits"
        )
        first = f"device_bytes: not set, since {why}: {budget.explain()}; {takes}"
    else:
        first = f"device_bytes: {budget.explain()}; {takes}"
    if not activations.is_checkpointing:
        return [first, "activations: they stay on the GPU, since no block is recomputed"]
    inputs = (
        f"inputs of {activations.sizes.num_layers} checkpointed blocks take "
        f"{format_bytes(activations.inputs_bytes)}"
    )
    if not activations.moves_inputs(policy.activations):
        return [first, f"activations: {inputs} and stay on the GPU"]
    assert policy.activations is not None
    left_bytes = card.budget(activations, None).left_bytes
    there = f"there they would leave {format_bytes(left_bytes)} for the plan"
    there = (
        there if left_bytes > 0 else f"they are {format_bytes(-left_bytes)} too large to stay there"
    )
    why = "as the config says" if given.activations is not None else there
    return [first, f"activations: {inputs} and go from the GPU to {policy.activations.name}: {why}"]


# ---- recomputation: the activations of blocks are kept, or computed again in backward ------------
#
# Where nobody says which, both are planned and forecast. Recomputing takes the forward's time once
# more, and leaves what autograd would keep to weights and states. The bits are the same.

NO_OTHER_WAY = (
    "checkpointing: blocks are recomputed in backward, since what they would keep "
    "leaves no room for a plan"
)


def recomputes(kept: Tried | None, again: Tried | None) -> tuple[bool, str | None]:
    """Whether blocks are to be recomputed in backward, and a sentence that says why; None: there is
    nothing to compare.

    kept, again: the plan without and with it; None: none fits.
    """
    if kept is None or again is None:
        return kept is None and again is not None, NO_OTHER_WAY if again is not None else None
    said = f"{again.total_s:.3g} s a step are predicted with that, {kept.total_s:.3g} s without"
    if again.total_s < kept.total_s:
        return (
            True,
            f"checkpointing: blocks are recomputed in backward: {said} (--no-checkpointing)",
        )
    return False, f"checkpointing: no block is recomputed in backward: {said} (--checkpointing)"


def settle_by_cap(job: Job, resident_bytes: int, is_gpu: bool) -> Job:
    """The job, recomputing blocks where it leaves that open and what forward keeps does not fit
    under its cap otherwise."""
    if (
        job.is_checkpointing is not None
        or job.memory_limit_bytes is None
        or "host_bytes" in job.config.get("tiermem", {})
    ):
        return job
    if fits_budget(job, budget_of(job, job.memory_limit_bytes, resident_bytes, is_gpu), is_gpu):
        return job
    return dataclasses.replace(job, is_checkpointing=True)


# ---- the choice of open settings -----------------------------------------------------------------
#
#     measured rates -> forecast/forecast.py, on the meta device -> config, and lines that give the
#     choice and the reason
#   policy field      grads          tile_numel      tile_buffers                    unit_buffers               host_param_numel
#     key               tiermem.grads  sub_group_size  offload_optimizer.buffer_count  offload_param.buffer_count  max_in_cpu
#   activations, activation_bytes, device_bytes, host_bytes, streamed_ratio: keys of the section
#   "tiermem" with the same names
#
# So the config alone is enough to repeat a run. If the rule's plan is the fastest, no key is set.

_SIZES = {"tile_numel", "tile_buffers", "unit_buffers"}
_PLACES = {
    "grads": ("tiermem", "grads"),
    "tile_numel": ("zero_optimization", "sub_group_size"),
    "tile_buffers": ("zero_optimization", "offload_optimizer", "buffer_count"),
    "unit_buffers": ("zero_optimization", "offload_param", "buffer_count"),
    "host_param_numel": ("zero_optimization", "offload_param", "max_in_cpu"),
    **{
        name: ("tiermem", name)
        for name in (
            "activations",
            "activation_bytes",
            "device_bytes",
            "host_bytes",
            "streamed_ratio",
        )
    },
}


class Chosen(NamedTuple):
    """The config of a run with what it leaves open settled."""

    config: Config
    how: str | None
    """How it was chosen; None: by the plan's rule alone."""
    placement: list[str]
    """What `say_placement` says."""
    tried: Tried | None
    """The plan and a step of it; None: nothing was predicted."""


class CardRoom(NamedTuple):
    """Memory that a choice may divide between the plan and activations."""

    card: Card | None
    """None: the CPU."""
    host_bytes: int | None
    """What the caps of a node's ranks leave for the plan beside activations as the config has them;
    None: the config names the plan's own."""
    num_ranks: int = 1
    ranks_on_node: int = 1


def choose_config(
    config: Config,
    shape: Mapping[str, Any],
    speed: tuple[Compute, Rates] | None,
    activations: ActivationBytes,
    room: CardRoom,
) -> Chosen:
    """Settles what the config of a run leaves open.

    speed: None where nothing was measured: the plan's rule chooses. Raises ValueError for a config
        that cannot be, and, with
    the arithmetic, where a card has no room for the smallest plan beside activations and the config
    names no `device_bytes`.
    """
    loaded = resolve_auto(load_config(config), ModelSizes.of(shape).hidden)
    policy = loaded.policy()
    card = room.card
    if card is None and (policy.host_bytes is None or speed is None):
        return Chosen(config, None, [], None)
    model = meta_model(shape, loaded.precision)
    ranks = (room.num_ranks, room.ranks_on_node)
    topology = plan_topology(room.num_ranks, policy, room.ranks_on_node)
    device_bytes = None if card is None else card.room_bytes
    placements = activations.placements(policy, device_bytes, room.host_bytes, room.ranks_on_node)
    how: str | None = None
    tried: Tried | None = None
    try:
        num_micro = loaded.batch(room.num_ranks).accumulation
        compute, rates = speed or (Compute(0.0, 0.0), Rates(1.0, 1.0))
        choice = choose(
            model,
            policy,
            rates,
            compute,
            *ranks,
            card is not None,
            num_micro,
            placements,
            searches=speed is not None,
        )
        chosen = choice.policy
        plan = choice.chosen.plan
        if speed is not None:
            tried = choice.chosen
            how = " ".join([str(choice), *(f"{reason}." for reason in choice.reasons)])
    except ValueError:
        if card is not None and policy.device_bytes is None:
            _check_room(model, policy, placements, topology, room, activations)
        # nothing fits for another reason: building the model says why
        return Chosen(config, None, [], None)
    said = [] if card is None else say_placement(policy, chosen, plan, card, activations)
    return Chosen(with_choice(config, settled(policy, chosen)), how, said, tried)


def settled(given: OffloadPolicy, chosen: OffloadPolicy) -> dict[str, Any]:
    """The fields that a choice has settled: what `with_choice` takes."""
    values = {name: getattr(chosen, name) for name in _PLACES}
    return {name: value for name, value in values.items() if value != getattr(given, name)}


def with_choice(config: Config, fields: Mapping[str, Any]) -> Config:
    """The config with chosen fields of the policy as keys of its own."""
    for name, value in fields.items():
        if isinstance(value, Tier):
            value = "device" if value is Tier.DEVICE else value.value
        config = with_key(
            config, _PLACES[name], value * STATES_PER_TILE if name == "tile_buffers" else value
        )
    if fields.keys() & _SIZES:
        config = with_key(config, ("tiermem", "sizes_are_least"), False)
    return config


def _check_room(
    model: nn.Module,
    policy: OffloadPolicy,
    placements: Sequence[Placement],
    topology: Topology,
    room: CardRoom,
    activations: ActivationBytes,
) -> None:
    """Raises ValueError, with the arithmetic, where a card has no room for any plan."""
    roomy = max(placements, key=lambda placement: placement.device_bytes or 0)
    changed = dataclasses.replace(policy, **roomy.fields(policy) | {"host_bytes": None})
    try:
        make_plan(
            divide(model, changed, topology.num_shards), changed, topology, True, room.ranks_on_node
        )
    except ValueError as error:
        assert room.card is not None
        budget = room.card.budget(activations, roomy.activations)
        raise ValueError(
            f"the accelerator has too little memory: {budget.explain()}; {error}"
        ) from error
