"""Card: what an accelerator's memory leaves to a plan, and what was placed there, in words.

card - in use - torch's part - activations, by the home of block inputs  =  room for the plan
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiermem.plans.plan import Row
from tiermem.policy import Tier
from tiermem.swap.memory.accelerator import free_and_total, is_accelerator
from tiermem.tools.plan.budget import ActivationBytes, Budget
from tiermem.tools.plan.planned import Planned
from tiermem.tools.words import format_bytes

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

    @staticmethod
    def of(planned: Planned) -> Card | None:
        """That of a plan; None: its maths runs on the CPU."""
        cluster = planned.scenario.cluster
        return None if cluster.gpu_bytes is None else Card(cluster.gpu_bytes, cluster.gpu_others)

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


def say_placement(planned: Planned) -> list[str]:
    """A sentence on `device_bytes` and one on `activations`, with the arithmetic; none without an
    accelerator."""
    if (card := Card.of(planned)) is None:
        return []
    given, policy, plan = planned.given, planned.policy, planned.plan
    activations = planned.activations
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
        f"inputs of {activations.num_recomputed} checkpointed blocks take "
        f"{format_bytes(activations.inputs_bytes)}"
    )
    if not activations.moves_inputs(policy.activations):
        rest = f", and so does all that the last {activations.num_kept} keep"
        kept = rest if activations.num_kept else ""
        return [first, f"activations: {inputs} and stay on the GPU{kept}"]
    assert policy.activations is not None
    left_bytes = card.budget(activations, None).left_bytes
    there = f"there they would leave {format_bytes(left_bytes)} for the plan"
    there = (
        there if left_bytes > 0 else f"they are {format_bytes(-left_bytes)} too large to stay there"
    )
    why = "as the config says" if given.activations is not None else there
    return [first, f"activations: {inputs} and go from the GPU to {policy.activations.name}: {why}"]
