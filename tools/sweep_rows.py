"""Rows: what came of each setting of a sweep, as the benchmark's JSON and CSV have it, and the best of each mode."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tiermem.tools.counts import IoCounts
from tiermem.tools.knee import find_knee
from tiermem.tools.sweep import Measured
from tiermem.tools.sweep_job import Outcome


def row_of(measured: Measured, quantiles: Callable[[list[int]], list[float]]) -> dict[str, Any]:
    """The row as JSON takes it; `quantiles` gives p50 and p99 in microseconds of counts per bucket."""
    row, rates = _empty_row(measured), measured.gbps()
    if not rates:
        return row
    outcomes = [outcome for loop in measured.outcomes for outcome in loop]
    moved = sum(o.read_bytes + o.written_bytes for o in outcomes)
    p50, p99 = quantiles([sum(counts) for counts in zip(*(o.latencies for o in outcomes), strict=True)])
    row |= {
        "gbps_median": statistics.median(rates),
        "gbps_min": min(rates),
        "gbps_max": max(rates),
        "p50_us": p50,
        "p99_us": p99,
        "cpu_s_per_gb": sum(o.user_s + o.system_s for o in outcomes) / moved * 1e9,
        "idle_fraction": statistics.fmean(o.idle_fraction for o in outcomes),
        "first_gbps": rates[0] if measured.setting.mode in ("read", "random") else None,
        "user_us_per_block": sum(o.user_s for o in outcomes) / max(1, sum(o.num_blocks for o in outcomes)) * 1e6,
        "engine_used": outcomes[0].engine,
        "loops_gbps": rates,
    }
    return row | _shares(outcomes) | _sustained(outcomes[0], row)


def add_witness(
    row: dict[str, Any],
    fio: float | None,
    yardstick: Sequence[float],
    peer: Sequence[float],
    bare_user_us: float | None,
) -> None:
    """Enters what witnesses reached, in GB/s, and what part of it is ours: yardstick and peer loop by loop.

    A part is the median of the loops' own: a disk that moves from one loop to the next moves both of a pair.
    """
    row |= {"fio_gbps": fio, "yardstick_gbps": _median(yardstick), "peer_gbps": _median(peer)}
    if row["gbps_median"] is None:
        return
    row["fraction"] = _paired(row["loops_gbps"], yardstick)
    row["peer_fraction"] = _paired(row["loops_gbps"], peer)
    if row["mode"] == "random" and bare_user_us is not None:
        row["user_us_beyond_bare"] = row["user_us_per_block"] - bare_user_us


def _median(rates: Sequence[float]) -> float | None:
    return statistics.median(rates) if rates else None


def _paired(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The median ratio of loops that both have measured."""
    return _median([mine / other for mine, other in zip(ours, theirs, strict=False)])


def best_of(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The row with the highest median of each mode."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        rate = row["gbps_median"]
        if rate is not None and (row["mode"] not in best or rate > best[row["mode"]]["gbps_median"]):
            best[row["mode"]] = row
    return best


def byte_counts(measured: Sequence[Measured]) -> tuple[IoCounts, IoCounts]:
    """Bytes moved past the page cache, as the passes count them and as the kernel does."""
    ours, kernel = IoCounts(0, 0), IoCounts(0, 0)
    direct = [each for each in measured if each.is_direct]
    for outcome in (outcome for each in direct for outcomes in each.outcomes for outcome in outcomes):
        ours = IoCounts(ours.read_bytes + outcome.read_bytes, ours.written_bytes + outcome.written_bytes)
        kernel = IoCounts(
            kernel.read_bytes + outcome.kernel_read_bytes, kernel.written_bytes + outcome.kernel_written_bytes
        )
    return ours, kernel


def _empty_row(measured: Measured) -> dict[str, Any]:
    """Every key, and what is known without a measurement."""
    setting = measured.setting
    return {
        "mode": setting.mode,
        "engine": setting.engine,
        "block_bytes": setting.block_bytes,
        "depth": setting.depth,
        "ranks": setting.ranks,
        "path": setting.path,
        **dict.fromkeys(("gbps_median", "gbps_min", "gbps_max", "p50_us", "p99_us", "cpu_s_per_gb", "idle_fraction")),
        **dict.fromkeys(("first_gbps", "fio_gbps", "yardstick_gbps", "fraction", "peer_gbps", "peer_fraction")),
        "user_us_per_block": None,
        "engine_used": None,
        "is_direct": measured.is_direct,
        "error": measured.error,
    }


def _shares(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What tensors through the store reach of the sequential pass beside them: medians of each kind."""
    if not outcomes[0].shares:
        return {}
    found: dict[str, Any] = {}
    for number, (what, _, beside) in enumerate(outcomes[0].shares):
        found[f"{what}_gbps"] = statistics.median(o.shares[number][1] for o in outcomes)
        if beside:
            sequential = statistics.median(o.shares[number][2] for o in outcomes)
            found[f"{what}_share"] = found[f"{what}_gbps"] / sequential
    return found


def _sustained(outcome: Outcome, row: dict[str, Any]) -> dict[str, Any]:
    """The series of a sustained write, its spread as the row's, and where it drops."""
    if len(outcome.series) < 2:
        return {}
    points = [
        {"written_bytes": after[0], "gbps": (after[0] - before[0]) / (after[1] - before[1]) / 1e9}
        for before, after in itertools.pairwise(outcome.series)
    ]
    rates = [point["gbps"] for point in points]
    knee = find_knee(rates)
    return {
        "gbps_median": statistics.median(rates),
        "gbps_min": min(rates),
        "gbps_max": max(rates),
        "gbps_overall": row["gbps_median"],
        "series": points,
        "knee_bytes": points[knee.num_before - 1]["written_bytes"] if knee else None,
        "gbps_before_knee": knee.before if knee else None,
        "gbps_after_knee": knee.after if knee else None,
    }
