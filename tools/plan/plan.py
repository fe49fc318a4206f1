"""`tiermem plan`: the memory and disk space that a training needs and the seconds of its steps,
without the machine.

    options -> Scenario (config, model, cluster, speed) -> planned.py -> tables, --json, advice
    about changes
                                  |
                    given, tuned, measured here, or assumed: the report says which

Exit status 0: the training fits, or no limit was given. 1: it does not fit. Mistakes in options,
config and model raise ValueError and OSError.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tiermem.config import load_config
from tiermem.forecast.cards import CARDS
from tiermem.forecast.choose import HOMES
from tiermem.forecast.phases import PHASES
from tiermem.integrations.diffusion import component_folder, is_unet
from tiermem.plans.budget import why_disk
from tiermem.policy import Tier
from tiermem.swap.memory.accelerator import find_device
from tiermem.swap.memory.free import free_host_bytes
from tiermem.tools.job.train_job import (
    Config,
    make_config,
    read_config,
    recomputes_blocks,
    with_key,
)
from tiermem.tools.measure.machine import wear_a_day
from tiermem.tools.memory_limit import FREE_PART
from tiermem.tools.options import MADE_OF, PlanOptions, TrainOptions
from tiermem.tools.plan.paper import ESTIMATED, print_estimates, print_paper
from tiermem.tools.plan.planned import LIMITS, WEAR, Card, Cluster, Planned, Scenario, plan_scenario
from tiermem.tools.plan.prediction import limits_of, settle_compute
from tiermem.tools.plan.settle import say_placement, settled, with_choice
from tiermem.tools.plan.speed import ASSUMED_DISK, speed_of
from tiermem.tools.presets import OF_DIFFUSERS, ModelShape, check_sizes, preset, shape_of
from tiermem.tools.record.reports import table
from tiermem.tools.words import Mistake, format_bytes, numbered
from tiermem.units.experts import expected_share

EXIT_FITS = 0
EXIT_TOO_SMALL = 1
_SEQ = 2048
_DISK_THERE = Path("/mnt/nvme0")


def plan(options: PlanOptions, console: Console) -> int:
    """Plans, prints, writes `--json`; returns the exit status. Blocks for a few seconds when
    something is measured."""
    if options.shows_paper:
        print_paper(console)
        name = options.preset or str(options.model or ESTIMATED)
        shape = preset(ESTIMATED) if name == ESTIMATED else _shape(options)
        print_estimates(name, shape, (options.ranks, options.nodes), console)
        return EXIT_FITS
    _config(options)  # a mistake is all that is said
    if not console.is_terminal:  # where no spinner is seen
        print("measuring and planning", file=sys.stderr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the model's libraries
        with console.status("measuring and planning"):
            scenario, sources = scenario_of(options)
            planned = plan_scenario(scenario)
        _print_verdict(planned, console)
        with console.status("planning what would be faster"):
            advice = advise(planned)
    _print_advice(planned, advice, console)
    _print_plan(planned, sources, console)
    options.save_json(plan_figures(planned, advice, sources))
    return EXIT_TOO_SMALL if planned.problems else EXIT_FITS


def scenario_of(options: PlanOptions) -> tuple[Scenario, list[str]]:
    """What the options describe, and a line on each rate. Measures what is of this machine and not
    given: blocks for that."""
    options, sources = with_card(options)
    config = _config(options)
    moved = load_config(config).moved
    if moved and options.gpu_bytes is None and options.host_bytes is None:
        free = int(FREE_PART * free_host_bytes())
        options = dataclasses.replace(options, host_bytes=free)
        sources.append(f"host memory: {format_bytes(free)}, nine tenths of what is free here")
    is_checkpointing = recomputes_blocks(options.is_checkpointing, config)
    shape = _shape(options)
    if is_unet(shape):
        options, shape = _with_latents(options, shape)
    if OF_DIFFUSERS in shape and options.seq is None:
        raise Mistake(
            "--seq is missing: the tokens of a picture or clip, 4608 of Flux at 1024 px",
            {"--seq": "--seq 4608"},
        )
    seq = options.seq or _SEQ
    options = dataclasses.replace(options, seq=seq, is_checkpointing=is_checkpointing)
    is_timed_here = options.flops is None and options.gpu_bytes is None
    if OF_DIFFUSERS in shape and is_timed_here:
        raise Mistake(
            "a diffusion model is not timed here: name the card that it is for",
            {"--gpu-memory": "--gpu-memory 24GiB"},
        )
    if is_timed_here:  # in the dtype that is best here
        config, _ = settle_compute(config, shape)
    card = (
        Card.here(find_device()) if options.gpu_bytes is None else Card.elsewhere(options.gpu_bytes)
    )
    rates, compute, more = speed_of(options, shape, config, card is not None)
    cluster = Cluster(
        options.nodes,
        options.ranks,
        None if card is None else card.total_bytes,
        options.host_bytes,
        options.nvme_bytes,
        () if card is None else card.others,
        options.pinned_bytes,
        options.written_bytes_day,
    )
    scenario = Scenario(
        shape,
        config,
        cluster,
        rates,
        compute,
        seq,
        is_checkpointing,
        moved,
        options.config is not None,
        options.lora,
        bool(is_checkpointing),
    )
    return scenario, [*sources, *more]


def with_card(options: PlanOptions) -> tuple[PlanOptions, list[str]]:
    """The options with what a named card says of those that are not given, and a line on it."""
    if options.gpu is None:
        return options, []
    card = CARDS[options.gpu]
    facts: dict[str, Any] = {
        "gpu_bytes": card.memory_gib << 30,
        "flops": card.part * card.flops,
        "link_bytes_s": card.link_bytes_s,
        "gpu_memory_bytes_s": card.memory_bytes_s,
    }
    open_ones = {name: value for name, value in facts.items() if getattr(options, name) is None}
    said = (
        f"GPU: {options.gpu}: {card.memory_gib} GiB, {card.memory_bytes_s / 1e9:.0f} GB/s, link "
        f"{card.link_bytes_s / 1e9:.3g} GB/s each way, {card.part:.0%} of {card.flops / 1e12:.0f} "
        f"TFLOPS ({card.source})"
    )
    return dataclasses.replace(options, **open_ones), [said]


def _shape(options: PlanOptions) -> ModelShape:
    model = options.model
    if model is not None and model.is_dir():
        model = component_folder(model) / "config.json"
    shape = shape_of(options.preset, model)
    check_sizes(shape)
    return shape


def _config(options: PlanOptions) -> Config:
    """The config given, or one made of the options as `train` makes it; the disk of a GPU's machine
    is not one of this."""
    if options.config is None:
        folder = Path() if options.gpu_bytes is None else _DISK_THERE
        folders = [] if options.nvme_bytes == 0 and options.offload != "nvme" else [folder]
        given = {name: getattr(options, name) for name in MADE_OF}
        config = make_config(TrainOptions(**given), folders)
        config = with_key(config, ("tiermem", "frozen_quant_type"), options.frozen)
        return config | {"gradient_accumulation_steps": options.accumulation or 1}
    config = read_config(options.config, 1)
    if "model_type" in config:
        raise Mistake(
            f"{options.config} is a model's config, and --config takes a DeepSpeed-style one",
            {"--config": shlex.join(["--model", str(options.config)]), "--preset": ""},
        )
    return config


# ---- tables, and the same figures as JSON --------------------------------------------------------

_LANES = {
    "maths": "compute",
    "disk read": "disk",
    "disk write": "disk",
    "link up": "link",
    "link down": "link",
}


def _with_latents(options: PlanOptions, shape: ModelShape) -> tuple[PlanOptions, ModelShape]:
    """A UNet with latents of as many places as --seq says, or its config. Raises ValueError where
    they are no square."""
    side = int(shape["sample_size"]) if options.seq is None else math.isqrt(options.seq)
    if options.seq is not None and side * side != options.seq:
        raise Mistake(
            "--seq of a UNet is the number of places of its latents, a square: 16384 at 1024 px",
            {"--seq": f"--seq {side * side}"},
        )
    return dataclasses.replace(options, seq=side * side), {**shape, "sample_size": side}


def _print_plan(planned: Planned, sources: Sequence[str], console: Console) -> None:
    """The arithmetic."""
    cluster = planned.scenario.cluster
    ranks = numbered(cluster.num_ranks, "rank")
    where = "GPUs" if cluster.gpu_bytes is not None else "CPUs"
    num_micro = planned.batch.accumulation
    console.print(
        f"{planned.num_params:,} parameters on {ranks}: {cluster.num_nodes} x "
        f"{cluster.ranks_per_node}, maths on {where}; {planned.batch.micro} x "
        f"{planned.scenario.seq} tokens, {numbered(num_micro, 'micro-batch')} a step"
    )
    console.print(_tier_table(planned))
    console.print(_edge_table(planned))
    console.print(_phase_table(planned))
    for source in sources:
        console.print(f"  {source}")
    durable_bytes = planned.plan.durable_disk_bytes
    if durable_bytes:
        why = why_disk(planned.plan, planned.policy)
        console.print(
            f"  {format_bytes(durable_bytes)} of a rank's NVMe are for checkpoints. {why}"
        )
    if planned.choice is not None:
        console.print(f"  {planned.choice}")
    for sentence in _said(planned):
        console.print(f"  {sentence}")
    fields = settled(planned)
    fields |= {
        name: f"{size >> 20}MiB"
        for name, size in fields.items()
        if name.endswith("_bytes") and size >= 1 << 20
    }
    keys = with_choice({}, fields)
    if planned.scenario.is_configured and keys and not planned.problems:
        console.print(f"  for a run to keep to this plan, set in the config: {json.dumps(keys)}")
    if planned.activations.sizes.saved_places == 0 and planned.activations.picture is None:
        console.print(
            "  activations are not counted, since no formula tells those of convolutions: give "
            "--gpu-memory less what they take"
        )


def plan_figures(
    planned: Planned, advice: Sequence[Advice], sources: Sequence[str]
) -> dict[str, Any]:
    """What `--json` writes."""
    cluster = planned.scenario.cluster
    forecast = planned.forecast
    policy = planned.policy
    home = policy.activations
    return {
        "num_params": planned.num_params,
        "num_nodes": cluster.num_nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "lines": [{**row._asdict(), "tier": row.tier.name} for row in planned.lines],
        "rank_bytes": {tier.name: planned.tier_bytes(tier) for tier in Tier},
        "node_bytes": {
            tier.name: planned.tier_bytes(tier) * cluster.ranks_per_node for tier in Tier
        },
        "moved_bytes": {edge: dict(by) for edge, by in forecast.moved_bytes.items()},
        "seconds": dict(forecast.seconds),
        **limits_of(forecast),
        "tokens_per_s": planned.tokens_per_s,
        "choice": str(planned.choice) if planned.choice is not None else None,
        "activations": home.name if home is not None else None,
        "device_budget_bytes": policy.device_bytes,
        "streamed_ratio": policy.streamed_ratio,
        "placement": _said(planned),
        "is_checkpointing": planned.activations.is_checkpointing,
        "num_kept": planned.activations.num_kept,
        "pinned_bytes": planned.pinned_bytes,
        "sources": list(sources),
        "nvme_written_bytes_a_day": planned.written_bytes_day,
        "frozen_disk_bytes": planned.plan.durable_disk_bytes,
        "fits": not planned.problems,
        "problems": [problem._asdict() for problem in planned.problems],
        "advice": [
            {
                "change": each.words,
                "fits": each.fits,
                "seconds": dict(each.planned.forecast.seconds),
            }
            for each in advice
        ],
    }


def _said(planned: Planned) -> list[str]:
    """What was chosen for a GPU, and whether blocks are recomputed, and why."""
    said = list(planned.choice.reasons) if planned.choice is not None else []
    sizes = planned.activations.sizes
    if sizes.num_chosen:
        num_tokens = planned.activations.num_tokens
        share = expected_share(num_tokens, sizes.num_chosen, sizes.num_experts)
        said.append(
            f"experts: each token chooses {sizes.num_chosen} of {sizes.num_experts}, so "
            f"{num_tokens} tokens are expected to use {share * sizes.num_experts:.1f} of a layer. "
            "Where tokens use at most half, one rank fetches the rows of those alone, unless they "
            "rest in blocks"
        )
    return [*say_placement(planned), *said]


def _gib(num_bytes: float) -> str:
    """A size in GiB, a small one as it is read best."""
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 100 << 20 else format_bytes(num_bytes)


def _tier_table(planned: Planned) -> Table:
    cluster = planned.scenario.cluster
    shown = table("bytes at rest and passing, per rank", "what", "tier", ">size", "why")
    for tier, limit in cluster.limits.items():
        rows = [row for row in planned.lines if row.tier is tier and row.num_bytes]
        if not rows:
            continue
        for row in rows:
            shown.add_row(row.what, tier.name, _gib(row.num_bytes), row.why)
        total = planned.tier_bytes(tier)
        per_node = (
            "" if tier is Tier.DEVICE else f"; {_gib(total * cluster.ranks_per_node)} per node"
        )
        given = f", of {_gib(limit)} given" if limit is not None else ""
        if tier is Tier.HOST and planned.pinned_bytes:
            given += f"; {_gib(planned.pinned_bytes)} of a rank's pinned, as its driver must allow"
        shown.add_row(
            f"= {tier.name}",
            tier.name,
            _gib(total),
            f"per rank{per_node}{given}",
            style="bold",
        )
        shown.add_section()
    return shown


def _edge_table(planned: Planned) -> Table:
    shown = table(
        "bytes per step, per rank", "edge", *(f">{phase}" for phase in PHASES), ">together"
    )
    for edge, by_phase in planned.forecast.moved_bytes.items():
        sizes = [_gib(by_phase.get(phase, 0)) if by_phase.get(phase) else "" for phase in PHASES]
        shown.add_row(edge, *sizes, _gib(planned.forecast.edge_bytes(edge)))
    return shown


def _phase_table(planned: Planned) -> Table:
    forecast = planned.forecast
    shown = table("predicted time", "phase", ">seconds", "bound by", ">busy")
    for phase in PHASES:
        lane = forecast.bound_of(phase)
        busy = forecast.busy_s.get(lane, {}).get(phase, 0.0)
        shown.add_row(
            phase, f"{forecast.seconds[phase]:.3f}", _LANES.get(lane, lane), f"{busy:.3f} s"
        )
    shown.add_row(
        "together",
        f"{forecast.total_s:.3f}",
        "",
        f"{planned.tokens_per_s:.1f} tokens/s",
        style="bold",
    )
    return shown


def _print_verdict(planned: Planned, console: Console) -> None:
    """Whether it fits, how fast, and what limits."""
    for problem in planned.problems:
        sizes = (problem.limit_bytes, problem.needed_bytes)
        is_wear = problem.where == WEAR
        limit, needed = (f"{size / 1e9:,.0f} GB" if is_wear else _gib(size) for size in sizes)
        console.print(
            f"does not fit: {problem.where} has {limit} and {needed} are needed", style="bold"
        )
    forecast = planned.forecast
    if not planned.problems:
        has_limit = any(limit is not None for limit in planned.scenario.cluster.limits.values())
        console.print(
            f"{'it fits' if has_limit else 'no limit was given'}: {planned.tokens_per_s:,.1f} "
            f"tokens/s, {forecast.total_s:.3g} s a step, limited by {forecast.limited_by}",
            style="bold",
        )
    said = "no disk is written"
    if planned.written_bytes:
        said = (
            f"{wear_a_day(planned.written_bytes_day)}; {planned.written_bytes / 1e9:,.4g} GB a step"
        )
    console.print(f"  {said}")


def _print_advice(planned: Planned, advice: Sequence[Advice], console: Console) -> None:
    """What to change."""
    hint = tiling_hint(planned)
    if advice or hint:
        console.print("what to change or buy:" if planned.problems else "what would be faster:")
    for number, each in enumerate(advice, start=1):
        says = (
            "fits"
            if each.fits
            else f"still too large ({', '.join(p.where for p in each.planned.problems)})"
        )
        total = each.planned.forecast.total_s
        console.print(
            f"  {number}. {each.words}: {says}, {total:.3f} s a step, "
            f"{each.planned.tokens_per_s:.1f} tokens/s"
        )
    if hint:
        console.print(f"  also: {hint}")


# ---- advice --------------------------------------------------------------------------------------
#
# Every candidate is one change of the config or of the command. It is planned and forecast like the
# scenario itself, which gives its bytes and seconds. Candidates that fit come first, the fastest of
# them first; where none fits, those that come nearer.

_DRIVE = "an NVMe drive of {:g} GB/s read, {:g} written".format(*(r / 1e9 for r in ASSUMED_DISK))
_LEAST_GAIN = 1.03  # of a change that is only about time
_NODES = 2


class Candidate(NamedTuple):
    """One change: how to make it, in words and on a scenario."""

    words: str
    change: Callable[[Scenario], Scenario]
    buys_drive: bool = False


class Advice(NamedTuple):
    """A change that was planned."""

    words: str
    planned: Planned

    @property
    def fits(self) -> bool:
        """Whether nothing is too small any more."""
        return not self.planned.problems


def advise(planned: Planned, most: int = 5) -> list[Advice]:
    """What to change or buy, the best first; empty when it fits and nothing is faster."""
    tried = [advice for each in _candidates(planned) if (advice := _try(each, planned))]
    enough = 0.0 if planned.problems else _LEAST_GAIN * planned.tokens_per_s or math.inf
    fitting = [each for each in tried if each.fits and each.planned.tokens_per_s >= enough]
    if fitting or not planned.problems:
        return sorted(fitting, key=lambda each: -each.planned.tokens_per_s)[:most]
    nearer = sorted(tried, key=lambda each: each.planned.excess)
    return [each for each in nearer if each.planned.excess < planned.excess][:most]


def _try(candidate: Candidate, now: Planned) -> Advice | None:
    """A change, with what it leaves open chosen again where homes may move."""
    scenario = candidate.change(now.scenario)
    try:
        planned = plan_scenario(scenario, bool(scenario.moved), now)
    except ValueError:
        return None  # refused where it would be refused for real: no advice
    if candidate.buys_drive and not planned.policy.uses_nvme:
        return None
    return Advice(candidate.words, planned)


def _candidates(planned: Planned) -> Iterator[Candidate]:
    """Every change that says something for this scenario, what costs least first."""
    scenario = planned.scenario
    policy = planned.policy
    own = scenario.config.get("tiermem", {})
    is_configured = scenario.is_configured
    for name in ("host_bytes", "device_bytes", "disk_bytes"):
        if name in own:
            yield _key(f"leave tiermem.{name} to the plan", None, "tiermem", name)
    if policy.tile_numel is not None:
        yield _key(
            "leave sub_group_size to the plan (smaller tiles)",
            None,
            "zero_optimization",
            "sub_group_size",
        )
    if policy.stage == 3 and not scenario.moved:
        words = "leave homes of states and weights to the plan"
        how = '"device": "auto"' if is_configured else "--offload auto"
        yield Candidate(f"{words} ({how})", _with_open_homes)
        if not policy.paths:
            yield Candidate(
                f"{words}, with {_DRIVE} ({how})",
                lambda s: _with_open_homes(_with_a_drive(s)),
                True,
            )
    if policy.stage in (1, 2):
        yield _key("stage 3, which partitions parameters too", 3, "zero_optimization", "stage")
    if "precision" not in own:
        for preset in ("compact", "tiny"):
            words = f'tiermem.precision "{preset}"' if is_configured else f"--states {preset}"
            yield _key(f"{words} (smaller states)", preset, "tiermem", "precision")
    if planned.plan.durable_disk_bytes:
        words = 'tiermem.durability "none"' if is_configured else "train --durability none"
        words += " (one slot on NVMe; a checkpoint is a copy)"
        yield _key(words, "none", "tiermem", "durability")
    if scenario.is_checkpointing is False:
        yield Candidate(
            "activation checkpointing (--checkpointing)",
            lambda s: s._replace(is_checkpointing=True),
        )
    micro = planned.batch.micro
    accumulation = planned.batch.accumulation
    for parts in sorted({2, micro}) if micro > 1 else ():
        words = "half the micro-batch" if parts == 2 else "a smaller micro-batch"
        yield Candidate(
            f"{words} ({micro // parts}), {parts} times the accumulation",
            functools.partial(_with_batch, micro=micro // parts, accumulation=parts * accumulation),
        )
    if planned.problems and micro == 1 and planned.activations.picture is None:
        seq = scenario.seq // 2
        yield Candidate(f"--seq {seq}", lambda s: s._replace(seq=seq))
    for problem in planned.problems:
        if problem.where == WEAR:
            more = accumulation << math.ceil(math.log2(problem.needed_bytes / problem.limit_bytes))
            yield Candidate(
                f"accumulation {more}, a larger batch for as many writes",
                functools.partial(_with_batch, micro=micro, accumulation=more),
            )
    if policy.uses_nvme:
        yield Candidate("twice the NVMe paths", _twice_the_disks)
    if scenario.moved:
        for field, words in (("gpu_bytes", "GPU's memory"), ("host_bytes", "host memory")):
            if (size := getattr(scenario.cluster, field)) is not None:
                change = functools.partial(_with_cluster, **{field: 2 * size})
                yield Candidate(f"twice the {words}, {format_bytes(2 * size)}", change)
        if not policy.paths:
            yield Candidate(_DRIVE, _with_a_drive, True)
    if scenario.cluster.num_ranks > 1:
        yield Candidate(f"{_NODES} times the nodes", _more_nodes)


def tiling_hint(planned: Planned) -> str | None:
    """A sentence on the largest unit when its buffers are most of a tier that is too small; no plan
    is made of it."""
    units = [unit for unit in planned.plan.division.units if not unit.is_resident]
    largest = max(units, key=lambda unit: unit.full_bytes, default=None)
    if largest is None or OF_DIFFUSERS in planned.scenario.shape:
        return None
    names = {problem.where for problem in planned.problems}
    for tier in (Tier.DEVICE, Tier.HOST):
        num_bytes = sum(
            row.num_bytes
            for row in planned.lines
            if row.tier is tier and "unit" in row.what and "resident" not in row.what
        )
        if LIMITS[tier] in names and num_bytes > planned.tier_bytes(tier) / 3:
            return (
                f"units take {format_bytes(num_bytes)} of a rank's {tier.name}; the largest is "
                f"{largest.name!r} with {format_bytes(largest.full_bytes)}: replace its Linear by "
                "tiermem.zero.TiledLinear, whose tiles are units of their own"
            )
    return None


def _key(words: str, value: Any, *path: str) -> Candidate:
    """A change of one key of the config; None takes it out."""
    return Candidate(words, lambda scenario: _with(scenario, value, *path))


def _with(scenario: Scenario, value: Any, *path: str) -> Scenario:
    return scenario._replace(config=with_key(scenario.config, path, value))


def _on_nvme(scenario: Scenario, section: str) -> Scenario:
    given = scenario.config.get("zero_optimization", {}).get(section) or {}
    values = {"nvme_path": str(_DISK_THERE), **given, "device": "nvme"}
    return _with(scenario, values, "zero_optimization", section)


def _with_batch(scenario: Scenario, micro: int, accumulation: int) -> Scenario:
    changed = _with(scenario, micro, "train_micro_batch_size_per_gpu")
    return _with(
        _with(changed, None, "train_batch_size"), accumulation, "gradient_accumulation_steps"
    )


def _with_cluster(scenario: Scenario, **changed: Any) -> Scenario:
    return scenario._replace(cluster=scenario.cluster._replace(**changed))


def _with_open_homes(scenario: Scenario) -> Scenario:
    return scenario._replace(moved=HOMES)


def _with_a_drive(scenario: Scenario) -> Scenario:
    """One as plans of other machines assume, without a limit of its size."""
    read, write = ASSUMED_DISK
    rates = dataclasses.replace(
        scenario.rates, disk_read_bytes_s=read, disk_write_bytes_s=write, is_disk_duplex=True
    )
    changed = _with_cluster(scenario, nvme_bytes=None)._replace(rates=rates)
    return _on_nvme(_on_nvme(changed, "offload_param"), "offload_optimizer")


def _twice_the_disks(scenario: Scenario) -> Scenario:
    rates = scenario.rates
    size = scenario.cluster.nvme_bytes
    doubled = dataclasses.replace(
        rates,
        disk_read_bytes_s=2 * rates.disk_read_bytes_s,
        disk_write_bytes_s=2 * rates.disk_write_bytes_s,
    )
    return _with_cluster(scenario, nvme_bytes=size and 2 * size)._replace(rates=doubled)


def _more_nodes(scenario: Scenario) -> Scenario:
    config = dict(scenario.config)
    if "train_batch_size" in config and "train_micro_batch_size_per_gpu" not in config:
        config["train_batch_size"] = _NODES * int(config["train_batch_size"])
    more = _with_cluster(scenario, num_nodes=_NODES * scenario.cluster.num_nodes)
    return more._replace(config=config)
