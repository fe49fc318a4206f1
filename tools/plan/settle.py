"""Settle: what a run's options and config leave open, chosen as `tiermem plan` chooses it.

job -> scenario of this machine -> recomputation, budget under the cap
measured rates or none          -> forecast's choice, or the plan's rule -> config, and a
                                   sentence for each choice
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from tiermem.config import load_config
from tiermem.config.io import STATES_PER_TILE
from tiermem.forecast import Rates
from tiermem.forecast.cards import assumed_speed
from tiermem.forecast.choose import HOMES
from tiermem.forecast.rates import Compute
from tiermem.policy import Tier
from tiermem.section import KEY_OF
from tiermem.swap.memory.accelerator import find_device
from tiermem.swap.memory.free import free_host_bytes
from tiermem.tools.job.launcher import Job
from tiermem.tools.job.train_job import Config, own_folders, with_key
from tiermem.tools.memory_limit import FREE_PART
from tiermem.tools.plan.budget import Budget, least_cap, plan_budget, rows_of_process
from tiermem.tools.plan.planned import (
    LIMITS,
    Card,
    Cluster,
    Planned,
    Scenario,
    of_every_rank,
    plan_scenario,
)
from tiermem.tools.words import Mistake, format_bytes

NO_OTHER_WAY = (
    "checkpointing: blocks are recomputed in backward, since what they would keep "
    "leaves no room for a plan"
)


def scenario_of_job(
    job: Job,
    process_bytes: int,
    measured: tuple[Compute, Rates] | None = None,
    is_open: bool = False,
) -> Scenario:
    """A job on this machine: under its cap, or in the memory that is free where homes are to be
    chosen. Collective; blocks.

    process_bytes: of a rank's process with everything imported. measured: the maths, as the job
        says, and the rates; None: assumed ones. is_open: which blocks are recomputed may be chosen,
        whatever the job says.
    """
    device = find_device()
    cards = filter(None, of_every_rank(Card.here(device)))
    card = min(cards, key=lambda each: each.room_bytes, default=Card(0, ()))
    is_even = job.num_ranks % job.ranks_on_node == 0
    per_node = job.ranks_on_node if is_even else 1
    cluster = Cluster(
        job.num_ranks // per_node, per_node, card.total_bytes or None, gpu_others=card.others
    )
    moved = load_config(job.config).moved
    if (cap_bytes := cap_of(job)) is not None:
        others = rows_of_process(cap_bytes, process_bytes)
        cluster = cluster._replace(host_bytes=cap_bytes * per_node, host_others=others)
    else:  # the imports are not in what is free
        free_bytes = min(of_every_rank(free_host_bytes()))
        cluster = cluster._replace(free_bytes=free_bytes)
        if moved:
            planned_bytes = int(FREE_PART * free_bytes)
            cluster = cluster._replace(host_bytes=planned_bytes, host_others=())
    compute, rates = measured or assumed_speed(device)
    return Scenario(
        job.shape,
        job.config,
        cluster,
        rates,
        compute,
        job.seq,
        None if is_open else job.is_checkpointing,
        moved,
        True,
        was_recomputing=bool(job.is_checkpointing),
    )


def cap_of(job: Job) -> int | None:
    """The cap that a job's plan keeps to; None: it has none, or its config names `host_bytes`."""
    return None if "host_bytes" in job.config.get("tiermem", {}) else job.memory_limit_bytes


def settle_by_room(job: Job, process_bytes: int) -> tuple[Job, Budget | None]:
    """The job, recomputing blocks where it leaves that open and memory has no room otherwise, and
    the arithmetic under its cap. Collective; blocks.

    Raises Mistake when the cap is too small for the job's plan, with the arithmetic and the
    smallest cap that is not.
    """
    scenario = scenario_of_job(job, process_bytes)
    planned = plan_scenario(scenario, chooses=False)
    activations = planned.activations
    if activations.is_checkpointing > bool(job.is_checkpointing):
        job = dataclasses.replace(job, is_checkpointing=True)
    if (cap_bytes := cap_of(job)) is None:
        return job, None
    budget = plan_budget(cap_bytes, process_bytes, activations, planned.policy.activations)
    for problem in planned.problems:
        if problem.where == LIMITS[Tier.HOST]:
            needed_bytes = problem.needed_bytes // scenario.cluster.ranks_per_node
            least_bytes = least_cap(cap_bytes, needed_bytes + _IMPORTS_DIFFER_BYTES)
            steps = -(-least_bytes // _CAP_STEP_BYTES)
            least = f"--memory {steps * _CAP_STEP_BYTES >> 20}MiB"
            smaller = f"{'' if job.is_checkpointing else '--checkpointing or '}a shorter --seq"
            raise Mistake(
                f"--memory {format_bytes(cap_bytes)} is too small for this model, and {least} is "
                f"the smallest that works, or a smaller one with {smaller} ({budget.explain()})",
                {"--memory": least},
            )
    return job, budget


_CAP_STEP_BYTES = 10 << 20
_IMPORTS_DIFFER_BYTES = 1 << 20
"""What is resident after the same imports, from one process to the next."""


# ---- the choice of open settings -----------------------------------------------------------------
#
#     measured rates -> forecast/forecast.py, on the meta device -> config, and lines that give the
#     choice and the reason
#     field of the policy -> the key that sets it (section.py)
#
# So the config alone is enough to repeat a run. If the rule's plan is the fastest, no key is set.

_SECTIONS = ("offload_param", "offload_optimizer")
_SIZES = {"tile_numel", "tile_buffers", "unit_buffers"}
_CHOSEN = (
    *HOMES,
    "optim_ratio",
    "grads",
    "tile_numel",
    "tile_buffers",
    "unit_buffers",
    "host_param_numel",
    "activations",
    "activation_bytes",
    "device_bytes",
    "host_bytes",
    "streamed_ratio",
)
"""Fields of the policy that a choice may settle."""


class Chosen(NamedTuple):
    """The config of a run with what it leaves open settled."""

    config: Config
    how: str | None
    """How it was chosen; None: by the plan's rule alone."""
    placement: list[str]
    """What `say_placement` says."""
    planned: Planned | None
    """None: nothing fits."""


def choose_config(scenario: Scenario, searches: bool = True) -> Chosen:
    """Settles what the config of a run leaves open, as `tiermem plan` does.

    searches: False where nothing was measured: the plan's rule chooses, but for homes. Raises
        ValueError for a config that cannot be, and, with the arithmetic, where a card has no room
        for the smallest plan beside activations and the config names no `device_bytes`.
    """
    searches = searches or bool(scenario.moved)
    planned = plan_scenario(scenario, searches)
    config, choice, cluster = dict(scenario.config), planned.choice, scenario.cluster
    if choice is None:
        if planned.given.device_bytes is None:
            _check_room(planned)
        # nothing fits for another reason: building the model says why
        return Chosen(config, None, [], None)
    how = None
    if searches and (cluster.gpu_bytes or planned.given.host_bytes or cluster.host_bytes):
        how = " ".join([str(choice), *(f"{reason}." for reason in choice.reasons)])
    said = say_placement(planned)
    if scenario.moved:
        num = cluster.ranks_per_node
        taken = format_bytes(num * planned.plan.host_bytes)
        room = format_bytes(cluster.host_bytes or planned.given.host_bytes or 0)
        disk = format_bytes(num * planned.plan.disk_bytes)
        homes = f"homes: the fastest of {choice.num_tried} plans"
        said = [f"{homes}; {taken} of {room} host memory, {disk} of disk", *said]
    return Chosen(with_choice(config, settled(planned)), how, said, planned)


def _check_room(planned: Planned) -> None:
    card = planned.scenario.cluster.card
    for problem in planned.problems:
        if card is not None and problem.where == LIMITS[Tier.DEVICE]:
            budget = card.budget(planned.activations, planned.policy.activations)
            raise ValueError(
                f"the accelerator has too little memory: {budget.explain()}; and the smallest plan "
                f"needs {format_bytes(planned.plan.device_bytes)}: "
                f"{planned.plan.listed(Tier.DEVICE)}"
            )


def say_placement(planned: Planned) -> list[str]:
    """A sentence on `device_bytes` and one on `activations`, with the arithmetic; none without an
    accelerator."""
    if (card := planned.scenario.cluster.card) is None:
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


def settled(planned: Planned) -> dict[str, Any]:
    """The fields that a choice has settled: what `with_choice` takes."""
    policy = planned.policy
    return {
        name: getattr(policy, name)
        for name in _CHOSEN
        if name in planned.scenario.moved or getattr(policy, name) != getattr(planned.given, name)
    }


def with_choice(config: Config, fields: Mapping[str, Any]) -> Config:
    """The config with chosen fields of the policy as keys of its own."""
    for name, value in fields.items():
        if isinstance(value, Tier):
            value = "device" if value is Tier.DEVICE and name not in HOMES else value.value
        if name == "tile_buffers":
            value *= STATES_PER_TILE
        config = with_key(config, KEY_OF[name].split("."), value)
    for name, section in zip(HOMES, _SECTIONS, strict=True):
        if fields.get(name) is Tier.NVME:
            config = _with_folders(config, section)
    if fields.keys() & _SIZES:
        config = with_key(config, ("tiermem", "sizes_are_least"), False)
    return config


def _with_folders(config: Config, section: str) -> Config:
    """The config with folders in a section of homes: those of the other one, where it has none."""
    zero = config["zero_optimization"]
    named = [zero[each]["nvme_path"] for each in _SECTIONS if "nvme_path" in zero.get(each, {})]
    if not named or own_folders(config):
        return config
    folders = zero[section].get("nvme_path", named[0])
    return with_key(config, ("zero_optimization", section, "nvme_path"), folders)
