"""`tiermem bench step`: optimizer steps over states on NVMe, held to what the disk can do."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import cast, get_args

from rich.console import Console
from rich.table import Table

from tiermem.precision import DTYPES, Precision
from tiermem.swap.store.checksum import Verify
from tiermem.tools.bench.stepped_model import (
    MOST_FRACTION,
    Case,
    Pipelining,
    Roofline,
    SteppedModel,
    ceiling,
    draw_tiles,
    memory_rate,
    said_resident,
    state_bytes_of,
)
from tiermem.tools.measure.files import check_memory, check_room, memory_backed, say_memory
from tiermem.tools.measure.machine import (
    WrittenOnPath,
    caption,
    endurance_lines,
    machine_facts,
    num_cores,
)
from tiermem.tools.options import StepBenchOptions
from tiermem.tools.record.reports import table
from tiermem.tools.record.run_record import Figures, IoCounts, disagreements
from tiermem.tools.words import OneOf, format_bytes, parse_bytes

# ---- tables --------------------------------------------------------------------------------------


_DIFFERENCES = {
    "preset": "smaller states",
    "resident_bytes": "resident states",
    "verify": "unverified states",
}


def print_figures(figures: Figures, console: Console) -> None:
    """Shows everything; what is wrong with the figures comes last."""
    console.print(_main_table(figures))
    if figures["compare"]:
        console.print(_compare_table(figures["compare"]))
    if len(figures["rows"]) > 1:
        console.print(_models_table(figures["rows"]))
    for line in figures["endurance"]:
        console.print(line)
    for number, row in enumerate(figures["rows"]):
        for note in row["notes"]:
            whose = f"model {number + 1}: " if len(figures["rows"]) > 1 else ""
            console.print(f"! {whose}{note}", style="bold red")


def _main_table(figures: Figures) -> Table:
    title = (
        f"optimizer step, {figures['num_params'] / 1e6:.1f} M parameters in "
        f"{figures['precision']}, states {figures['preset']} on NVMe{said_resident(figures)}"
    )
    shown = table(title, "figure", ">value")
    shown.add_row("step, median (min to max)", _spread(figures["step_s"]))
    per_param = figures["state_bytes"] / figures["num_params"]
    shown.add_row(
        "states", f"{figures['state_bytes'] / 1e9:.3f} GB, {per_param:.2f} bytes per parameter"
    )
    shown.add_row(
        "read", f"{figures['read_bytes'] / 1e9:.3f} GB at {figures['read_gbps']:.2f} GB/s"
    )
    shown.add_row(
        "written", f"{figures['written_bytes'] / 1e9:.3f} GB at {figures['written_gbps']:.2f} GB/s"
    )
    if len(figures["paths"]) > 1:
        for part in figures["paths"]:
            shown.add_row(
                f"  {part['path']}",
                f"{part['read_bytes'] / 1e9:.3f} GB read, {part['written_bytes'] / 1e9:.3f} GB "
                "written",
            )
    shown.add_row(
        "computing / waiting", f"{figures['compute_s']:.3f} s / {figures['wait_s']:.3f} s"
    )
    shown.add_row("disk idle", f"{figures['disk_idle_fraction']:.1%} of the step")
    read, written, most = (
        format_bytes(figures[key])
        for key in ("read_in_flight_bytes", "written_in_flight_bytes", "bytes_under_way")
    )
    shown.add_row("in flight, mean", f"{read} of reads, {written} of writes ({most} under way)")
    shown.add_row("cores busy", f"{figures['cpu_share']:.0%}")
    for each in figures["rooflines"]:
        shown.add_row(f"the same bytes, {each['by']}", _spread(each["seconds"]))
    shown.add_row(
        "memory traffic of Adam",
        f"{figures['memory_s']:.3f} s at {figures['memory_gbps']:.1f} GB/s",
    )
    shown.add_row(f"roofline ({figures['roofline_by']})", f"{figures['roofline_s']:.3f} s")
    shown.add_row("fraction reached", f"{figures['roofline_fraction']:.3f}")
    return shown


def _compare_table(rows: Sequence[Figures]) -> Table:
    shown = table(
        "what the pipeline is worth, steps in turn",
        "pipeline",
        ">step, median (min to max)",
        ">against both on",
    )
    for row in rows:
        shown.add_row(row["name"], _spread(row["step_s"]), f"{row['slower']:.2f} x")
    return shown


def _models_table(rows: Sequence[Figures]) -> Table:
    """Time and bytes beside each other: what is smaller, or rests in memory, is neither read nor
    written."""
    worth = " and ".join(
        name for key, name in _DIFFERENCES.items() if len({row[key] for row in rows}) > 1
    )
    shown = table(
        f"what {worth or 'nothing'} are worth, steps in turn",
        "states",
        ">resident",
        ">verified",
        ">step, median (min to max)",
        ">faster",
        ">time saved",
        ">bytes saved",
        ">fraction of its roofline",
    )
    first = rows[0]
    for row in rows:
        shown.add_row(
            row["preset"],
            f"{row['resident_fraction']:.1%}",
            "never" if row["verify"] == "resume" else row["verify"],
            _spread(row["step_s"]),
            f"{first['step_s_median'] / row['step_s_median']:.2f} x",
            f"{1 - row['step_s_median'] / first['step_s_median']:.1%}",
            f"{1 - _moved(row) / max(1, _moved(first)):.1%}",
            f"{row['roofline_fraction']:.3f}",
        )
    return shown


def _moved(row: Figures) -> int:
    return int(row["read_bytes"] + row["written_bytes"])


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


# ---- the command ---------------------------------------------------------------------------------
#
#     for each loop:   a step of each model | the yardstick | a step with the pipeline off | the yardstick | ...
#
# A model (stepped_model.py) is measured for each value of --preset, --resident and --verify; with
# --compare its pipeline is switched from step to step. The yardstick (stepped_model.py) moves the
# same bytes in between, on the same paths: a disk that others use drifts, so what is compared is
# taken in turns, and medians are reported. Bytes are those of the queues' completions, checked
# against the kernel's.

_ALL_WAYS = [Pipelining(*way) for way in itertools.product((True, False), repeat=2)]


def cases_of(options: StepBenchOptions) -> list[Case]:
    """One for each model. Raises ValueError."""
    presets = _words(
        "--preset", options.preset, "precisions with commas between, such as exact,compact"
    )
    for preset in presets:
        Precision.preset(preset)  # raises for one that does not exist
    sizes = _words(
        "--resident",
        options.resident,
        "sizes or percentages with commas between, such as 0,25%,50%",
    )
    ways = _words("--verify", options.verify, "always, sample or resume, with commas between")
    OneOf(*get_args(Verify))("--verify", ways)
    return [
        Case(
            preset,
            _resident_bytes(size, state_bytes_of(options.num_params, options.precision, preset)),
            cast(Verify, way),
        )
        for preset in presets
        for size in sizes
        for way in ways
    ]


def bench_step(options: StepBenchOptions, console: Console) -> int:
    """Measures, shows the figures, writes JSON and picture. Leaves nothing on the paths. Blocks.

    Raises OSError and ValueError; returns the exit status.
    """
    cases = cases_of(options)
    _check_room(options, cases)
    say_memory(options.paths, console)
    facts = machine_facts(options.paths)
    own = Pipelining(options.pipelines, options.pipelines)
    ways = _ALL_WAYS if options.compares else [own]  # what is reported comes first
    with contextlib.ExitStack() as open_models:
        with console.status("building the models and making their first steps"):
            models = [
                open_models.enter_context(SteppedModel(options, case, ways)) for case in cases
            ]
        _measure(options, models, console)
        rate = memory_rate()
        rows = [_figures_of(model, options, rate) for model in models]
    figures = {"machine": facts, **rows[0], "rows": rows, "compare": _comparison(models[0])}
    figures["endurance"] = _endurance(models[0], options)
    print_figures(figures, console)
    options.save_json(figures)
    if options.plot_file is not None:
        draw_tiles(
            models[0].steps[ways[0]][-1],
            models[0].tile_names,
            figures,
            caption(facts),
            options.plot_file,
            options.MADE_BY,
        )
    return 0


def _measure(options: StepBenchOptions, models: Sequence[SteppedModel], console: Console) -> None:
    """Every step is followed by a setting of the yardstick; every setting has its turn in each
    loop."""
    loads = [model.load for model in models]
    with Roofline(options.paths, loads, options.yardstick, options.engine) as roofline:
        for loop in range(options.loops):
            for way, setting in itertools.zip_longest(models[0].steps, models[0].rooflines):
                for number, model in enumerate(models):
                    with console.status(
                        f"loop {loop + 1} of {options.loops}, model {number + 1} of {len(models)}"
                    ):
                        if way is not None:
                            model.steps[way].append(model.step(way))
                        if setting is not None:
                            model.rooflines[setting].append(roofline.measure(model.load, setting))


def _figures_of(model: SteppedModel, options: StepBenchOptions, memory_bytes_s: float) -> Figures:
    """The figures of one model with the pipeline as asked."""
    steps = next(iter(model.steps.values()))
    step_s = statistics.median(step.seconds for step in steps)
    moved = IoCounts.mean([step.total for step in steps])
    kernel = IoCounts.mean([step.kernel for step in steps])
    memory_s = model.memory_bytes / memory_bytes_s
    roofline_s, roofline_by = ceiling(options.yardstick, model.rooflines, memory_s)
    figures: Figures = {
        **model.facts,
        "bytes_under_way": model.bytes_under_way,
        "step_s": [step.seconds for step in steps],
        "step_s_median": step_s,
        "read_bytes": moved.read_bytes,
        "written_bytes": moved.written_bytes,
        "read_gbps": moved.read_bytes / step_s / 1e9,
        "written_gbps": moved.written_bytes / step_s / 1e9,
        "compute_s": statistics.median(step.lane_s("compute") for step in steps),
        "wait_s": statistics.median(step.lane_s("wait") for step in steps),
        "cpu_share": statistics.median(step.cpu_s / step.seconds for step in steps) / num_cores(),
        "read_in_flight_bytes": statistics.median(step.in_flight[0] for step in steps),
        "written_in_flight_bytes": statistics.median(step.in_flight[1] for step in steps),
        "disk_idle_fraction": statistics.median(step.idle_fraction() for step in steps),
        "roofline_s": roofline_s,
        "roofline_by": roofline_by,
        "roofline_fraction": roofline_s / step_s,
        "rooflines": [{"by": s.name, "seconds": times} for s, times in model.rooflines.items()],
        "memory_gbps": memory_bytes_s / 1e9,
        "memory_s": memory_s,
        "kernel_read_bytes": kernel.read_bytes,
        "kernel_written_bytes": kernel.written_bytes,
        "paths": [
            {"path": str(path), **on_path._asdict()}
            for path, on_path in zip(options.paths, model.load, strict=True)
        ],
    }
    # the kernel counts no bytes of a folder in memory
    compared = moved if any(map(memory_backed, options.paths)) else kernel
    figures["notes"] = list(_notes(figures, moved, compared, model.expected))
    return figures


def _notes(
    figures: Figures, moved: IoCounts, kernel: IoCounts, expected: IoCounts
) -> Iterator[str]:
    """What is wrong with the figures."""
    if figures["roofline_fraction"] > MOST_FRACTION:
        yield (
            f"error of the yardstick: the step takes {figures['step_s_median']:.3f} s, less than "
            f"the roofline's {figures['roofline_s']:.3f} s ({figures['roofline_by']}); nothing is "
            "faster than the roofline. Measure again"
        )
    if moved != expected:
        yield (
            f"the queue counts {moved.read_bytes} bytes read and {moved.written_bytes} written; "
            f"{expected.read_bytes} and {expected.written_bytes} are due"
        )
    yield from disagreements(moved, kernel, "in a step the queue", 0.01, IoCounts(0, 0))


def _comparison(model: SteppedModel) -> list[Figures]:
    """What each half of the pipeline is worth: seconds with it switched so, and how much longer
    that is."""
    seconds = {way: [step.seconds for step in steps] for way, steps in model.steps.items()}
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    first = next(iter(medians.values()))
    rows = [
        {
            **way._asdict(),
            "name": way.name,
            "step_s": seconds[way],
            "step_s_median": median,
            "slower": median / first,
        }
        for way, median in medians.items()
    ]
    return rows if len(rows) > 1 else []


def _endurance(model: SteppedModel, options: StepBenchOptions) -> list[str]:
    """What the timed steps wrote to drives: neither building the models nor the yardstick is what
    training does."""
    steps = [step for several in model.steps.values() for step in several]
    written = [
        WrittenOnPath(path, sum(step.moved[index].written_bytes for step in steps))
        for index, path in enumerate(options.paths)
        if not memory_backed(path)
    ]
    return endurance_lines(
        written, len(steps), sum(step.seconds for step in steps), options.tbw_bytes
    )


def _check_room(options: StepBenchOptions, cases: Sequence[Case]) -> None:
    """Sees that memory and paths hold all models at once. Raises ValueError or OSError with the
    arithmetic."""
    size = options.num_params
    itemsize = DTYPES[options.precision].itemsize
    others = 2 * size * itemsize
    sizes = [
        (state_bytes_of(size, options.precision, case.preset), case.resident_bytes)
        for case in cases
    ]
    needed = size * itemsize + sum(
        min(resident, states) + others * options.only_states for states, resident in sizes
    )
    check_memory(
        needed,
        f"{format_bytes(needed)} of memory are needed (parameters while they are made, and what "
        "rests in memory)",
        "ask for fewer parameters or less --resident",
    )
    stores = sum(
        max(0, states - resident) + others * (not options.only_states) for states, resident in sizes
    )
    largest = max(states for states, _ in sizes)
    check_room(
        options.paths,
        [
            ("the states (--params)", stores // len(options.paths)),
            ("the yardstick", (largest + others) // len(options.paths)),
        ],
    )


def _words(option: str, text: str, wanted: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ValueError(f"{option} is {text!r}; write {wanted}")
    return words


def _resident_bytes(word: str, state_bytes: int) -> int:
    if not word.endswith("%"):
        return parse_bytes(word)
    try:
        percent = float(word[:-1])
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise ValueError(
            f"--resident: {word!r} is no percentage of the states; allowed are 0% to 100%"
        )
    # more than padding adds
    return int(state_bytes * percent / 100) if percent < 100 else 2 * state_bytes
