"""Advice: what to change in a scenario that does not fit, or that waits for its disks, each change tried by planning it.

Every candidate is one change of the config or of the command; it is planned like the scenario itself, so what is said of it
(what it needs, how long a step takes) is arithmetic and not opinion. Those that fit come first, the fastest of them first;
when none fits alone, candidates are taken together until one does.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tiermem.policy import Tier
from tiermem.tools.byte_size import format_bytes
from tiermem.tools.planned import Planned, Scenario, plan_scenario

_LEAST_GAIN = 1.03  # of a change that is only about time
_NODES = 2

Change = Callable[[Scenario], Scenario]


class Candidate(NamedTuple):
    """One change: how to make it, in words and on a scenario."""

    words: str
    change: Change


class Advice(NamedTuple):
    """A change that was planned."""

    words: str
    planned: Planned

    @property
    def fits(self) -> bool:
        """Whether nothing is too small any more."""
        return not self.planned.problems


def advise(planned: Planned, most: int = 5) -> list[Advice]:
    """What to change, the best first; empty when it fits and nothing is faster."""
    tried = [
        advice
        for candidate in _candidates(planned)
        if (advice := _try(candidate.words, candidate.change(planned.scenario)))
    ]
    if not planned.problems:
        faster = [each for each in tried if each.fits and _gain(planned, each) >= _LEAST_GAIN]
        return sorted(faster, key=lambda each: -each.planned.tokens_per_s)[:most]
    fitting = sorted((each for each in tried if each.fits), key=lambda each: -each.planned.tokens_per_s)
    if fitting:
        return fitting[:most]
    together = _together(planned)
    nearer = sorted(tried, key=lambda each: _excess(each.planned))
    return [*([together] if together else []), *(each for each in nearer if _excess(each.planned) < _excess(planned))][
        :most
    ]


def _try(words: str, scenario: Scenario) -> Advice | None:
    try:
        return Advice(words, plan_scenario(scenario, chooses=False))
    except ValueError:
        return None  # refused where it would be refused for real: no advice


def _gain(before: Planned, after: Advice) -> float:
    return after.planned.tokens_per_s / before.tokens_per_s if before.tokens_per_s else 0.0


def _excess(planned: Planned) -> float:
    """By what factor the tightest tier is too small; 1 when all fit."""
    return max((problem.needed_bytes / problem.limit_bytes for problem in planned.problems), default=1.0)


def _together(planned: Planned) -> Advice | None:
    """Candidates one after another, each kept when it brings the plan nearer, until it fits."""
    words: list[str] = []
    best = planned
    for candidate in _candidates(planned):
        advice = _try(candidate.words, candidate.change(best.scenario))
        if advice is None or _excess(advice.planned) >= _excess(best):
            continue
        words.append(candidate.words)
        best = advice.planned
        if not best.problems:
            return Advice(", and ".join(words), best)
    return None


def _candidates(planned: Planned) -> Iterator[Candidate]:
    """Every change that says something for this scenario, what costs least first."""
    scenario, policy = planned.scenario, planned.policy
    own = scenario.config.get("tiermem", {})
    if "host_bytes" in own:
        yield Candidate("leave tiermem.host_bytes to the plan", lambda s: _with(s, ("tiermem", "host_bytes"), None))
    if policy.tile_numel is not None:
        yield Candidate(
            "leave sub_group_size to the plan (smaller tiles)",
            lambda s: _with(s, ("zero_optimization", "sub_group_size"), None),
        )
    for section, home in (("offload_optimizer", policy.optim), ("offload_param", policy.params)):
        may_move = policy.stage == 3 or (policy.stage and section == "offload_optimizer")
        for device in ("cpu", "nvme", "none") if may_move else ():
            if Tier(device) is not home:
                yield Candidate(f'{section} to "{device}"', functools.partial(_offload, section=section, device=device))
    if policy.stage in (1, 2):
        yield Candidate(
            "stage 3, which partitions parameters too", lambda s: _with(s, ("zero_optimization", "stage"), 3)
        )
    if "precision" not in own:
        for preset in ("compact", "tiny"):
            change = functools.partial(_with, path=("tiermem", "precision"), value=preset)
            yield Candidate(f'tiermem.precision "{preset}" (smaller states)', change)
    if planned.plan.frozen_disk_bytes:
        yield Candidate(
            'tiermem.durability "none" (one slot on NVMe; a checkpoint is a copy)',
            lambda s: _with(s, ("tiermem", "durability"), "none"),
        )
    if not scenario.is_checkpointing:
        yield Candidate(
            "activation checkpointing (--checkpointing)", lambda s: dataclasses.replace(s, is_checkpointing=True)
        )
    if planned.batch > 1:
        yield Candidate(
            f"half the micro-batch ({planned.batch // 2}), twice the accumulation",
            lambda s: _half_batch(s, planned.batch // 2, 2 * planned.num_micro),
        )
    if policy.uses_nvme:
        yield Candidate("twice the NVMe paths", _twice_the_disks)
    yield Candidate(f"{_NODES} times the nodes", _more_nodes)


def tiling_hint(planned: Planned) -> str | None:
    """A sentence on the largest unit when its buffers are most of a tier that is too small; no plan is made of it."""
    units = [unit for unit in planned.division.units if not unit.is_resident]
    largest = max(units, key=lambda unit: unit.full_bytes, default=None)
    tight = {"DEVICE": "the GPU of a rank", "HOST": "the memory of a node"}
    names = {problem.where for problem in planned.problems}
    if largest is None:
        return None
    for tier, where in tight.items():
        passing = [
            line for line in planned.lines if line.tier == tier and "unit" in line.what and "resident" not in line.what
        ]
        num_bytes = sum(line.num_bytes for line in passing)
        if where in names and num_bytes > planned.tier_bytes(tier) / 3:
            return (
                f"units take {format_bytes(num_bytes)} of a rank's {tier}; the largest is {largest.name!r} with "
                f"{format_bytes(largest.full_bytes)}: replace its Linear by tiermem.zero.TiledLinear, whose tiles are units "
                "of their own"
            )
    return None


def _with(scenario: Scenario, path: tuple[str, ...], value: Any) -> Scenario:
    """The scenario with one key of its config set, or taken out when the value is None."""
    config: Any = copy.deepcopy(dict(scenario.config))
    place = config
    for key in path[:-1]:
        place = place.setdefault(key, {})
    if value is None:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value
    return dataclasses.replace(scenario, config=config)


def _offload(scenario: Scenario, section: str, device: str) -> Scenario:
    zero = scenario.config.get("zero_optimization", {})
    values = {**(zero.get(section) or {}), "device": device}
    if device == "nvme":
        other = zero.get("offload_optimizer" if section == "offload_param" else "offload_param") or {}
        values.setdefault("nvme_path", other.get("nvme_path", "/mnt/nvme0"))
    return _with(scenario, ("zero_optimization", section), values)


def _half_batch(scenario: Scenario, micro: int, accumulation: int) -> Scenario:
    changed = _with(scenario, ("train_micro_batch_size_per_gpu",), micro)
    changed = _with(changed, ("train_batch_size",), None)
    return _with(changed, ("gradient_accumulation_steps",), accumulation)


def _twice_the_disks(scenario: Scenario) -> Scenario:
    rates = scenario.speed.rates
    doubled = dataclasses.replace(
        rates, disk_read_bytes_s=2 * rates.disk_read_bytes_s, disk_write_bytes_s=2 * rates.disk_write_bytes_s
    )
    cluster = scenario.cluster
    nvme = cluster.nvme_bytes and 2 * cluster.nvme_bytes
    return dataclasses.replace(
        scenario,
        speed=dataclasses.replace(scenario.speed, rates=doubled),
        cluster=dataclasses.replace(cluster, nvme_bytes=nvme),
    )


def _more_nodes(scenario: Scenario) -> Scenario:
    cluster = dataclasses.replace(scenario.cluster, num_nodes=_NODES * scenario.cluster.num_nodes)
    config = dict(scenario.config)
    if "train_batch_size" in config and "train_micro_batch_size_per_gpu" not in config:
        config["train_batch_size"] = _NODES * int(config["train_batch_size"])
    return dataclasses.replace(scenario, cluster=cluster, config=config)
