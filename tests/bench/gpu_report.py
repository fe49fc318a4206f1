"""GpuReport: what `bench gpu` found, as a table, as a picture, and as the faults that decide its
exit status."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu_models import readme_table
from bench.gpu_trace import LANES, MADE_BY, WAYS, Span, read_trace, split
from bench.link import DIRECTIONS
from bench.small_training import MOST_APART
from tiermem.tools.measure.machine import caption
from tiermem.tools.record.plots import new_figure, save_figure
from tiermem.tools.record.run_record import PHASES
from tiermem.tools.words import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = tuple[str, str]
"""What, and its figure."""

SIMULATED = "the device is simulated: no figure here is a GPU's"


def print_report(report: Mapping[str, Any]) -> None:
    """One table of plain text: part, what, figure. After it the rows of models as the README has
    them, and the verdict."""
    parts = {
        part: list(rows_of(report[part])) for part, rows_of in _ROWS_OF.items() if part in report
    }
    for part, words in report["failures"].items():
        parts.setdefault(part, []).append(("failed", _last_of(words)))
    widths = (
        max(map(len, parts), default=0),
        max((len(what) for rows in parts.values() for what, _ in rows), default=0),
    )
    for part, rows in parts.items():
        for number, (what, figure) in enumerate(rows):
            print(f"{'' if number else part:<{widths[0]}}  {what:<{widths[1]}}  {figure}")
    print(caption(report["machine"]))
    if (
        any(row.get("tokens_per_s") for row in report.get("models", {}).get("rows", []))
        and not report["is_simulated"]
    ):
        print(
            "\n".join(
                [
                    "for the README:",
                    *readme_table(report["models"], device_of(report), _date_of(report)),
                ]
            )
        )
    if report["is_simulated"]:
        print(SIMULATED)
    if not report["is_complete"]:
        print("the run was stopped before all parts had ended")
    faults = faults_of(report)
    print(f"{MADE_BY}: " + ("all went well" if not faults else "; ".join(faults)))


def faults_of(report: Mapping[str, Any]) -> list[str]:
    """What makes the exit status 1, each in a few words."""
    faults = [f"{part} failed" for part in report["failures"]]
    tests = report.get("tests", {})
    training = report.get("training", {})
    if tests.get("num_failed"):
        faults.append(f"{tests['num_failed']} tests failed")
    faults += [f"the step {each} failed" for each in report.get("step", {}).get("failures", {})]
    faults += [f"training in {place!r} failed" for place in training.get("failures", {})]
    if not training.get("is_equal_to_the_bit", True):
        faults.append("losses of places that compute alike differ")
    apart = training.get("apart", {}).items()
    faults += [
        f"losses in {place!r} are {part:.2%} apart"
        for place, part in apart
        if not part <= MOST_APART
    ]
    for name, found in report.get("passes", {}).items():
        if "not_run" in found or found["is_advice"]:
            continue
        if found["num_errors"]:
            faults.append(f"{name}: {found['num_errors']} errors")
        elif not found["is_equal"]:
            faults.append(f"{name}: its losses differ, so streams race")
    models = report.get("models", {})
    faults += [f"the model ({name}) failed" for name in models.get("failures", {})]
    return faults + [f"{row['who']} failed" for row in models.get("rows", []) if "failed" in row]


def device_of(report: Mapping[str, Any]) -> str:
    """The device's name, where it was looked at."""
    found: Mapping[str, Any] = report.get("environment", {})
    return str(found["facts"]["name"]) if found else "an accelerator"


def _date_of(report: Mapping[str, Any]) -> str:
    return str(report["machine"]["date"])[:10]


def _last_of(words: str) -> str:
    return words.strip().splitlines()[-1][:200]


# ---- the table -----------------------------------------------------------------------------------


def _environment_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    others = f", one of {found['num_devices']}" if found["num_devices"] > 1 else ""
    memory = f"{format_bytes(found['total_bytes'])}, {format_bytes(found['free_bytes'])} free"
    yield "device", f"{found['facts']['name']} ({found['device']}{others}), {memory}"
    runtimes = ", ".join(f"{key} {value}" for key, value in found["runtimes"].items())
    yield "torch", found["torch"] + (f" ({runtimes})" if runtimes else "")
    yield "driver", found["driver"] or "unknown"
    yield "link", ", ".join(f"{key} {value}" for key, value in found["link"].items()) or "unknown"


def _registration_rows(registrations: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for row in registrations:
        size = format_bytes(row["num_bytes"])
        if "left_out" in row:
            yield size, f"left out: {row['left_out']}"
            continue
        figure = "refused by the driver"
        if row["is_pinned"]:
            times = (
                f"{row['register_s'] * 1e3:.2f} ms; taken back in {row['unregister_s'] * 1e3:.2f}"
            )
            figure = f"{row['s_per_gib']:.3f} s/GiB ({times})"
        yield f"{size}, {'touched' if row['is_touched'] else 'fresh'}", figure


def _copy_rows(copies: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for size, of_size in itertools.groupby(copies, key=lambda rate: rate["num_bytes"]):
        rates = list(of_size)
        said = []
        for direction in DIRECTIONS:
            pair = [
                f"{rate['bytes_s'] / 1e9:.2f}" for rate in rates if rate["direction"] == direction
            ]
            said.append(f"{direction} {' / '.join(pair)}")
        is_pinned = any(rate["is_pinned"] for rate in rates)
        note = "pinned / pageable" if is_pinned else "refused to pin / pageable"
        yield format_bytes(size), f"{', '.join(said)} GB/s ({note})"


def _step_rows(steps: Mapping[str, Any]) -> Iterator[Row]:
    for row in steps["rows"]:
        ns = row["step_s"] / row["numel"] * 1e9
        rate = row["num_bytes"] / row["step_s"] / 1e9
        yield (
            f"{row['states']}, {row['form']}",
            f"{ns:.4f} ns an element, {rate:.1f} GB/s by the bytes that must move",
        )
    for each, words in steps["failures"].items():
        yield each, f"failed: {_last_of(words)}"


def _test_rows(tests: Mapping[str, Any]) -> Iterator[Row]:
    if "not_run" in tests:
        yield "pytest -m gpu", f"not run: {tests['not_run']}"
        return
    totals = (
        f"{tests['num_passed']} passed, {tests['num_failed']} failed, {tests['num_skipped']} "
        "skipped"
    )
    yield "pytest -m gpu", totals
    for each in tests["failed"]:
        yield (
            "failed",
            f"{each['test']}: {each['message'].splitlines()[0] if each['message'] else ''}",
        )


def _training_rows(training: Mapping[str, Any]) -> Iterator[Row]:
    for place, run in training["runs"].items():
        times = " / ".join(f"{run[f'{phase}_s'] * 1e3:.1f}" for phase in PHASES)
        losses = f"loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}"
        memory = f"host {format_bytes(run['host_peak_bytes'])}"
        if "peak_allocated_bytes" in run:
            device = format_bytes(run["peak_allocated_bytes"])
            memory += f", device {device} ({format_bytes(run['peak_reserved_bytes'])} reserved)"
        yield (
            f"{place} on {run['device']}",
            f"{times} ms forward / backward / step, {losses}, peak {memory}",
        )
    for place, words in training.get("failures", {}).items():
        yield f"{place} failed", _last_of(words)
    if "is_equal_to_the_bit" in training:
        said = "equal to the bit" if training["is_equal_to_the_bit"] else "DIFFERENT"
        apart = ", ".join(f"{place} {part:.3%} apart" for place, part in training["apart"].items())
        yield "losses", f"of weights, host and nvme {said}; from host: {apart}"
    for words in training.get("warnings", []):
        yield "torch warns", words[:200]


def _pass_rows(passes: Mapping[str, Any]) -> Iterator[Row]:
    for name, found in passes.items():
        if "not_run" in found:
            yield name, f"not run: {found['not_run']}"
            continue
        said = (
            "losses equal to the bit"
            if found["is_equal"]
            else f"losses DIFFER or are missing ({found['why']})"
        )
        said += f", {found['num_errors']} errors" if found["num_errors"] else ""
        yield (
            name,
            said
            + (" (advice, no failure)" if found["is_advice"] and not found["is_equal"] else ""),
        )


def _trace_rows(traces: Mapping[str, Any]) -> Iterator[Row]:
    for place, run in traces.items():
        hidden = run["hidden"]
        if hidden["both"]["share"] is None:
            yield place, "left out: the profiler names no copies of this device"
            continue
        for way in (*WAYS, "both"):
            found = hidden[way]
            if found["share"] is not None:
                size = (
                    f"{found['num_copies']} copies, {format_bytes(found['num_bytes'])}, "
                    f"{found['copy_s'] * 1e3:.1f} ms"
                )
                most = f"{found['most_share']:.0%} at most"
                yield (
                    f"{place}, {way}",
                    f"{found['share']:.1%} of copy time under kernels ({most}; {size})",
                )
        yield f"{place}, trace", f"{run['trace']} (opens in ui.perfetto.dev)"


def _model_rows(models: Mapping[str, Any]) -> Iterator[Row]:
    if "not_run" in models:
        yield "not run", models["not_run"]
        return
    for row in models["rows"]:
        fewer = f" ({row['why_fewer']})" if "why_fewer" in row else ""
        size = (
            f"{row['layers']} of {row['of_layers']} layers{fewer}, {row['batch']} x "
            f"{row['seq']} tokens"
        )
        if "not_run" in row or not row["tokens_per_s"]:
            yield row["who"], f"{size}: {row.get('not_run') or row['error'] or row['outcome']}"
            continue
        times = " / ".join(f"{row[f'{phase}_s']:.3f}" for phase in PHASES)
        card = row["device_peak_bytes"]
        memory = f"host {format_bytes(row['peak_rss_bytes'])}" + (
            f", device {format_bytes(card)}" if card else ""
        )
        yield (
            row["who"],
            (
                f"{row['tokens_per_s']:,.1f} tokens/s ({times} s), peak {memory}, on "
                f"{row['device']}; "
                f"{size}"
            ),
        )
    for name, words in models["failures"].items():
        yield f"{name} failed", _last_of(words)


_ROWS_OF: dict[str, Callable[[Any], Iterator[Row]]] = {
    "environment": _environment_rows,
    "registration": _registration_rows,
    "copies": _copy_rows,
    "step": _step_rows,
    "tests": _test_rows,
    "training": _training_rows,
    "passes": _pass_rows,
    "trace": _trace_rows,
    "models": _model_rows,
}


# ---- the picture ---------------------------------------------------------------------------------
#
#     the link's rates by size      a step's kernels and copies, from a trace       tokens a second of models
#
# A panel without figures is left out.

_LANE_COLOURS = dict(zip(LANES, ("#54a24b", "#4c78a8", "#f58518"), strict=True))
_GREY = "#888888"
_WINDOW_PART = 3
"""Of a trace the last such part is drawn: whole steps would be thin lines."""


def draw_report(report: Mapping[str, Any], file: Path) -> str | None:
    """Draws the picture of a report; returns why there is none, or None. Raises OSError."""
    if importlib.util.find_spec("matplotlib") is None:
        return (
            "matplotlib is not installed (pip install matplotlib); --show draws it from the "
            "JSON elsewhere"
        )
    panels: list[tuple[float, Callable[[Axes], None]]] = []
    if report.get("copies"):
        panels.append((3.0, lambda ax: _draw_copies(ax, report["copies"])))
    for place, run in report.get("trace", {}).items():
        lanes = split(read_trace(file.parent / run["trace"]))
        if any(lanes.values()):
            trace = functools.partial(_draw_trace, place=place, run=run, lanes=lanes)
            panels.append((1.8, trace))
    rows = [row for row in report.get("models", {}).get("rows", []) if row.get("tokens_per_s")]
    if rows:
        panels.append((0.6 + 0.4 * len(rows), lambda ax: _draw_models(ax, rows)))
    if not panels:
        return "nothing was measured that could be drawn"
    heights = [height for height, _ in panels]
    figure, axes = new_figure(9.5, 1.2 + 1.35 * sum(heights), heights, is_shared=False)
    for ax, (_, draw) in zip(axes, panels, strict=True):
        draw(ax)
    title = f"{MADE_BY}: {device_of(report)}, {_date_of(report)}"
    figure.suptitle(
        f"{title}\n{SIMULATED.upper()}" if report["is_simulated"] else title, fontsize=12
    )
    save_figure(figure, file, MADE_BY)
    return None


def _draw_copies(ax: Axes, copies: Sequence[Mapping[str, Any]]) -> None:
    for direction, colour in zip(DIRECTIONS, ("#4c78a8", "#f58518", "#b279a2"), strict=True):
        for is_pinned, line in ((True, "-"), (False, ":")):
            rates = [
                each
                for each in copies
                if (each["direction"], each["is_pinned"]) == (direction, is_pinned)
            ]
            sizes = [each["num_bytes"] / (1 << 20) for each in rates]
            label = f"{direction}, {'pinned' if is_pinned else 'pageable'}"
            ax.plot(
                sizes,
                [each["bytes_s"] / 1e9 for each in rates],
                line,
                marker="o",
                color=colour,
                label=label,
            )
    ax.set_xscale("log", base=2)
    ax.set_ylim(0, None)
    ax.set(xlabel="MiB in one copy", ylabel="GB/s")
    ax.set_title("the link", fontsize=9, loc="left")
    ax.legend(fontsize=8, ncols=3, frameon=False)
    ax.grid(alpha=0.25)


def _draw_trace(
    ax: Axes, place: str, run: Mapping[str, Any], lanes: Mapping[str, Sequence[Span]]
) -> None:
    first = min(spans[0][0] for spans in lanes.values() if spans)
    last = max(end for spans in lanes.values() for _, end in spans)
    start = last - (last - first) / _WINDOW_PART
    for number, (lane, spans) in enumerate(lanes.items()):
        bars = [
            ((max(a, start) - start) / 1e3, (b - max(a, start)) / 1e3)
            for a, b in spans
            if b > start
        ]
        ax.broken_barh(bars, (number + 0.1, 0.8), facecolors=_LANE_COLOURS[lane])
    ax.set_yticks([each + 0.5 for each in range(len(lanes))], list(lanes), fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(0, (last - start) / 1e3)
    share = run["hidden"]["both"]["share"]
    hidden = "" if share is None else f": {share:.0%} of copy time lies under kernels"
    ax.set_title(f"training on {place}, the end of its trace{hidden}", fontsize=9, loc="left")
    ax.set_xlabel("ms")
    ax.grid(axis="x", alpha=0.25)


def _draw_models(ax: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    names = [
        f"{row['who']}\n{row['layers']} of {row['of_layers']} layers, {row['device']}"
        for row in rows
    ]
    speeds = [row["tokens_per_s"] for row in rows]
    ours = [_LANE_COLOURS["kernels"] if row["who"].startswith("tiermem") else _GREY for row in rows]
    places = range(len(rows))
    ax.barh(places, speeds, color=ours)
    ax.set_yticks(places, names, fontsize=8)
    ax.invert_yaxis()
    for place, speed in zip(places, speeds, strict=True):
        ax.text(speed, place, f" {speed:,.0f}", va="center", fontsize=8)
    ax.margins(x=0.15)
    ax.set_xlabel("tokens/s")
    ax.set_title("a model of an 8B's shape, by tier and by other means", fontsize=9, loc="left")
