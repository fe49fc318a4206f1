"""The report of `tiermem plan`: tables, the same figures as JSON, and advice about changes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tiermem.forecast.forecast import PHASES
from tiermem.forecast.rates import PAPER_BATCH, PAPER_GPUS, PAPER_MODELS, PAPER_SEQ
from tiermem.policy import Tier
from tiermem.tools.planned import Planned, Scenario, plan_scenario
from tiermem.tools.reports import table
from tiermem.tools.words import format_bytes

# ---- tables, and the same figures as JSON ----------------------------------------------------------------------------

_TIERS = ("DEVICE", "HOST", "NVME")
_LANES = {"maths": "computing", "disk": "disk", "disk read": "disk", "disk write": "disk", "kernels": "CPU kernels"}


def print_plan(planned: Planned, advice: Sequence[Advice], sources: Sequence[str], console: Console) -> None:
    """Tiers, edges, phases, whether it fits, and what to change."""
    cluster = planned.scenario.cluster
    ranks = f"{cluster.num_ranks} rank{'s' * (cluster.num_ranks > 1)}"
    where = "GPUs" if cluster.gpu_bytes is not None else "CPUs"
    console.print(
        f"{planned.num_params:,} parameters on {ranks}: {cluster.num_nodes} x {cluster.ranks_per_node}, maths on {where}; "
        f"{planned.batch} x {planned.scenario.seq} tokens, {planned.num_micro} micro-batches a step"
    )
    console.print(_tier_table(planned))
    console.print(_edge_table(planned))
    console.print(_phase_table(planned))
    for source in sources:
        console.print(f"  {source}")
    frozen_bytes = planned.plan.frozen_disk_bytes
    if frozen_bytes:
        why = planned.plan.why_disk(planned.policy)
        console.print(f"  {format_bytes(frozen_bytes)} of a rank's NVMe are for checkpoints. {why}")
    if planned.choice is not None:
        console.print(f"  {planned.choice}")
    _print_verdict(planned, advice, console)


def plan_figures(planned: Planned, advice: Sequence[Advice], sources: Sequence[str]) -> dict[str, Any]:
    """What `--json` writes."""
    cluster = planned.scenario.cluster
    return {
        "num_params": planned.num_params,
        "num_nodes": cluster.num_nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "lines": [line._asdict() for line in planned.lines],
        "rank_bytes": {tier: planned.tier_bytes(tier) for tier in _TIERS},
        "node_bytes": {tier: planned.tier_bytes(tier) * cluster.ranks_per_node for tier in _TIERS},
        "moved_bytes": {edge: dict(by) for edge, by in planned.forecast.moved_bytes.items()},
        "seconds": dict(planned.forecast.seconds),
        "busy_s": {lane: dict(by) for lane, by in planned.forecast.busy_s.items()},
        "tokens_per_s": planned.tokens_per_s,
        "choice": str(planned.choice) if planned.choice is not None else None,
        "sources": list(sources),
        "frozen_disk_bytes": planned.plan.frozen_disk_bytes,
        "fits": not planned.problems,
        "problems": [problem._asdict() for problem in planned.problems],
        "advice": [
            {"change": each.words, "fits": each.fits, "seconds": dict(each.planned.forecast.seconds)} for each in advice
        ],
    }


def print_paper(console: Console) -> None:
    """Prints the table of memory of the ZeRO-Infinity paper, by its own formulas (tiermem.forecast.rates)."""
    title = (
        f"memory that large models need, as arXiv 2104.07857 counts it ({PAPER_BATCH} sequences of {PAPER_SEQ} tokens on a "
        f"node of {PAPER_GPUS} GPUs; TB and GB are powers of 2)"
    )
    sizes = (
        ">states TB",
        ">activations TB/node",
        ">checkpoints TB/node",
        ">state work GB/GPU",
        ">activation work GB/GPU",
    )
    shown = table(title, "parameters", ">layers", ">hidden", ">heads", *sizes)
    for model in PAPER_MODELS:
        of_a_node = model.activation_bytes(PAPER_BATCH, PAPER_SEQ), model.checkpoint_bytes(PAPER_BATCH, PAPER_SEQ)
        of_a_gpu = model.state_working_bytes, model.activation_working_bytes(PAPER_BATCH // PAPER_GPUS, PAPER_SEQ)
        shown.add_row(
            f"{model.num_params / 1e12:.2f} T",
            str(model.num_layers),
            f"{model.hidden // 1024}K",
            str(model.num_heads),
            *(_half_up(num_bytes / (1 << 40)) for num_bytes in (model.state_bytes, *of_a_node)),
            *(_half_up(num_bytes / (1 << 30)) for num_bytes in of_a_gpu),
        )
    console.print(shown)


def _half_up(number: float) -> str:
    """Two digits, 5 rounded up, as the paper has them."""
    return f"{math.floor(number * 100 + 0.5) / 100:.2f}"


def _tier_table(planned: Planned) -> Table:
    cluster = planned.scenario.cluster
    shown = table("bytes at rest and passing, per rank", "what", "tier", ">size", "why")
    limits = {"DEVICE": cluster.gpu_bytes, "HOST": cluster.host_bytes, "NVME": cluster.nvme_bytes}
    for tier in _TIERS:
        lines = [line for line in planned.lines if line.tier == tier and line.num_bytes]
        for line in lines:
            shown.add_row(line.what, tier, format_bytes(line.num_bytes), line.why)
        if not lines:
            continue
        total = planned.tier_bytes(tier)
        per_node = "" if tier == "DEVICE" else f"; {format_bytes(total * cluster.ranks_per_node)} per node"
        limit = limits[tier]
        given = f", of {format_bytes(limit)} given" if limit is not None else ""
        shown.add_row(f"= {tier}", tier, format_bytes(total), f"per rank{per_node}{given}", style="bold")
        shown.add_section()
    return shown


def _edge_table(planned: Planned) -> Table:
    shown = table("bytes per step, per rank", "edge", *(f">{phase}" for phase in PHASES), ">together")
    for edge, by_phase in planned.forecast.moved_bytes.items():
        sizes = [format_bytes(by_phase.get(phase, 0)) if by_phase.get(phase) else "" for phase in PHASES]
        shown.add_row(edge, *sizes, format_bytes(planned.forecast.edge_bytes(edge)))
    return shown


def _phase_table(planned: Planned) -> Table:
    forecast = planned.forecast
    shown = table("predicted time", "phase", ">seconds", "bound by", ">busy")
    for phase in PHASES:
        lane = forecast.bound_of(phase)
        busy = forecast.busy_s.get(lane, {}).get(phase, 0.0)
        shown.add_row(phase, f"{forecast.seconds[phase]:.3f}", _LANES.get(lane, lane), f"{busy:.3f} s")
    shown.add_row("together", f"{forecast.total_s:.3f}", "", f"{planned.tokens_per_s:.1f} tokens/s", style="bold")
    return shown


def _print_verdict(planned: Planned, advice: Sequence[Advice], console: Console) -> None:
    for problem in planned.problems:
        console.print(
            f"does not fit: {problem.where} has {format_bytes(problem.limit_bytes)} and {format_bytes(problem.needed_bytes)} "
            "are needed",
            style="bold",
        )
    if not planned.problems:
        console.print(
            "it fits" if _has_limit(planned) else "no limit was given: --gpu-memory, --host-memory, --nvme-size"
        )
    hint = tiling_hint(planned)
    if advice or hint:
        console.print("what to change:" if planned.problems else "what would be faster:")
    for number, each in enumerate(advice, start=1):
        says = "fits" if each.fits else f"still too large ({', '.join(p.where for p in each.planned.problems)})"
        total = each.planned.forecast.total_s
        console.print(
            f"  {number}. {each.words}: {says}, {total:.3f} s a step, {each.planned.tokens_per_s:.1f} tokens/s"
        )
    if hint:
        console.print(f"  also: {hint}")


def _has_limit(planned: Planned) -> bool:
    cluster = planned.scenario.cluster
    return any(limit is not None for limit in (cluster.gpu_bytes, cluster.host_bytes, cluster.nvme_bytes))


# ---- advice ----------------------------------------------------------------------------------------------------------
#
# Every candidate is one change of the config or of the command. It is planned and forecast like the scenario itself, which
# gives its bytes and seconds. Candidates that fit come first, the fastest of them first. If no candidate fits alone, candidates
# are combined until one combination fits.

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
    units = [unit for unit in planned.plan.division.units if not unit.is_resident]
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
