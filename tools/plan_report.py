"""The report of `tiermem plan`: tables for a person, and the same figures as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tiermem.forecast.forecast import PHASES
from tiermem.forecast.infinity import PAPER_BATCH, PAPER_GPUS, PAPER_MODELS, PAPER_SEQ
from tiermem.tools.byte_size import format_bytes
from tiermem.tools.plan_advice import Advice, tiling_hint
from tiermem.tools.planned import Planned

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
        console.print(f"  {source}", highlight=False)
    frozen_bytes = planned.plan.frozen_disk_bytes
    if frozen_bytes:
        why = planned.plan.why_disk(planned.policy)
        console.print(f"  {format_bytes(frozen_bytes)} of a rank's NVMe are for checkpoints. {why}", highlight=False)
    if planned.choice is not None:
        console.print(f"  {planned.choice}", highlight=False)
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
    """Prints the table of memory of the ZeRO-Infinity paper, by its own formulas (tiermem.forecast.infinity)."""
    title = (
        f"memory that large models need, as arXiv 2104.07857 counts it ({PAPER_BATCH} sequences of {PAPER_SEQ} tokens on a "
        f"node of {PAPER_GPUS} GPUs; TB and GB are powers of 2)"
    )
    table = _table(
        title, "parameters", "layers", "hidden", "heads", "states TB", "activations TB/node", "checkpoints TB/node",
        "state work GB/GPU", "activation work GB/GPU",
    )  # fmt: skip
    for model in PAPER_MODELS:
        of_a_node = model.activation_bytes(PAPER_BATCH, PAPER_SEQ), model.checkpoint_bytes(PAPER_BATCH, PAPER_SEQ)
        of_a_gpu = model.state_working_bytes, model.activation_working_bytes(PAPER_BATCH // PAPER_GPUS, PAPER_SEQ)
        table.add_row(
            f"{model.num_params / 1e12:.2f} T",
            str(model.num_layers),
            f"{model.hidden // 1024}K",
            str(model.num_heads),
            *(_half_up(num_bytes / (1 << 40)) for num_bytes in (model.state_bytes, *of_a_node)),
            *(_half_up(num_bytes / (1 << 30)) for num_bytes in of_a_gpu),
        )
    console.print(table)


def _half_up(number: float) -> str:
    """Two digits, 5 rounded up, as the paper has them."""
    return f"{math.floor(number * 100 + 0.5) / 100:.2f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 or name in ("tier", "why", "bound by") else "right")
    return table


def _tier_table(planned: Planned) -> Table:
    cluster = planned.scenario.cluster
    table = _table("bytes at rest and passing, per rank", "what", "tier", "size", "why")
    limits = {"DEVICE": cluster.gpu_bytes, "HOST": cluster.host_bytes, "NVME": cluster.nvme_bytes}
    for tier in _TIERS:
        lines = [line for line in planned.lines if line.tier == tier and line.num_bytes]
        for line in lines:
            table.add_row(line.what, tier, format_bytes(line.num_bytes), line.why)
        if not lines:
            continue
        total = planned.tier_bytes(tier)
        per_node = "" if tier == "DEVICE" else f"; {format_bytes(total * cluster.ranks_per_node)} per node"
        limit = limits[tier]
        given = f", of {format_bytes(limit)} given" if limit is not None else ""
        table.add_row(f"= {tier}", tier, format_bytes(total), f"per rank{per_node}{given}", style="bold")
        table.add_section()
    return table


def _edge_table(planned: Planned) -> Table:
    table = _table("bytes per step, per rank", "edge", *PHASES, "together")
    for edge, by_phase in planned.forecast.moved_bytes.items():
        sizes = [format_bytes(by_phase.get(phase, 0)) if by_phase.get(phase) else "" for phase in PHASES]
        table.add_row(edge, *sizes, format_bytes(planned.forecast.edge_bytes(edge)))
    return table


def _phase_table(planned: Planned) -> Table:
    forecast = planned.forecast
    table = _table("predicted time", "phase", "seconds", "bound by", "busy")
    for phase in PHASES:
        lane = forecast.bound_of(phase)
        busy = forecast.busy_s.get(lane, {}).get(phase, 0.0)
        table.add_row(phase, f"{forecast.seconds[phase]:.3f}", _LANES.get(lane, lane), f"{busy:.3f} s")
    table.add_row("together", f"{forecast.total_s:.3f}", "", f"{planned.tokens_per_s:.1f} tokens/s", style="bold")
    return table


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
