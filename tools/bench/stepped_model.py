"""SteppedModel: parameters, gradients and optimizer states on NVMe, stepped again and again; its
roofline."""

from __future__ import annotations

import math
import statistics
import time
import timeit
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tiermem.engine.sharding import shard
from tiermem.optim import AdamW
from tiermem.policy import IoSettings, OffloadPolicy, Tier
from tiermem.precision import DTYPES, Precision
from tiermem.swap.base.native import READ, WRITE, latency_edges
from tiermem.swap.base.ranges import round_up
from tiermem.swap.disk.passes import Passes
from tiermem.swap.store.checksum import Verify
from tiermem.tools.bench.witnesses import BareLoop
from tiermem.tools.measure.files import BenchFiles
from tiermem.tools.options import StepBenchOptions
from tiermem.tools.record.plots import draw_bands, new_figure, save_figure
from tiermem.tools.record.run_record import (
    Figures,
    IoCounts,
    Span,
    busy_fraction,
    in_order,
    kernel_counts,
    rows_of,
    within,
)
from tiermem.units.state_layout import StateLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ---- the model -----------------------------------------------------------------------------------
#
# The model is blocks of parameters without a forward. Gradients are given once and stay: every step
# reads, computes and writes the same bytes, which `expected` says by arithmetic, per element of a
# tile:
#
#     parameters in       fp32                    bf16
#     preset              exact   compact  tiny   exact   compact  bf16   tiny
#     states              8       4        2.03   12      6        4      4.03   read and written, unless the tile is resident
#     parameters          4       4        4      0       2        2      2      read, unless only states rest on NVMe
#                         4       4        4      2       2        2      2      written, the same
#     gradients           4       4        4      2       2        2      2      read, the same

_BLOCK_PARAMS = 4  # tensors in a block
_NUM_MOMENTS = 2  # AdamW's


class Case(NamedTuple):
    """What makes a model different from the others."""

    preset: str  # of the states, as in `tiermem.precision.PRESETS`
    resident_bytes: int  # of the states, kept in memory
    verify: Verify  # which reads are compared with checksums; "resume": none, and no sums are taken


class Pipelining(NamedTuple):
    """Which half of the pipeline is on, by the names of the policy."""

    pipeline_read: bool = True
    pipeline_write: bool = True

    @property
    def name(self) -> str:
        """As a table says it."""
        if self.pipeline_read:
            return "both on" if self.pipeline_write else "only reads ahead"
        return "only writes behind" if self.pipeline_write else "both off"


class TimedStep(NamedTuple):
    """What one step took and moved."""

    start_ns: int
    end_ns: int
    moved: tuple[IoCounts, ...]  # on each path, by the queues' completions
    kernel: IoCounts  # of the whole process, as the kernel counts
    spans: list[Span]
    cpu_s: float = 0.0  # of all threads
    in_flight: tuple[float, float] = (0.0, 0.0)  # bytes of reads and of writes, their means

    @property
    def seconds(self) -> float:
        """Wall clock."""
        return (self.end_ns - self.start_ns) * 1e-9

    @property
    def total(self) -> IoCounts:
        """Bytes on all paths."""
        return IoCounts.total(self.moved)

    def lane_s(self, lane: str) -> float:
        """Seconds that events of a lane took together."""
        return sum(span.end_ns - span.start_ns for span in self.spans if span.lane == lane) * 1e-9

    def idle_fraction(self) -> float:
        """The part of the step in which no tile was on its way, in or out."""
        moved = [span for span in self.spans if span.lane in ("read", "write")]
        return 1.0 - busy_fraction(moved, self.start_ns, self.end_ns)


class SteppedModel(AbstractContextManager["SteppedModel"]):
    """A sharded model with its optimizer and gradients, and what is measured of it. A context
    manager.

    Its first two steps have been made: the first writes states that were never read, the second
    shows a step's bytes. Raises OSError when a path has too little room or fails. Leaves nothing on
    the paths when it ends.
    """

    def __init__(self, options: StepBenchOptions, case: Case, ways: Sequence[Pipelining]) -> None:
        others = Tier.HOST if options.only_states else Tier.NVME
        policy = OffloadPolicy(
            params=others,
            optim=Tier.NVME,
            grads=others,
            precision=Precision.preset(case.preset),
            num_moments=_NUM_MOMENTS,
            paths=tuple(options.paths),
            resident_bytes=case.resident_bytes,
            **ways[0]._asdict(),
            persistence_numel=0,
            prefetch_numel=0,  # no forward comes: what is read for it would be counted
            overlap="none",  # a step's time is that of all its tiles
            io=IoSettings(options.engine),
            durability="none",  # nothing is saved
            verify=case.verify,
        )
        model = _blocks(options.num_params, DTYPES[options.precision])
        self._shards = shard(model, policy)
        try:
            self._optimizer = AdamW(model.parameters(), lr=1e-4)
            self._give_gradients()
            self._optimizer.step()
            self.load = self.step(ways[0]).moved  # of a step, on each path
            tiles = self._optimizer.tiles_of(self._shards).tiles
        except BaseException:
            self._shards.close()
            raise
        self.steps: dict[Pipelining, list[TimedStep]] = {way: [] for way in ways}
        settings = SETTINGS if options.yardstick is None else (*SETTINGS, ADDING)
        self.rooflines: dict[BareSetting, list[float]] = {setting: [] for setting in settings}
        self.tile_names = [f"tile {tile.entry}" for tile in tiles]
        state_bytes = sum(tile.state_bytes for tile in tiles)
        resident_bytes = sum(tile.state_bytes for tile in tiles if tile.state_home is Tier.HOST)
        self.facts = {
            "num_params": sum(p.numel() for p in model.parameters()),
            "precision": options.precision,
            "preset": case.preset,
            "verify": case.verify,
            "state_bytes": state_bytes,
            "resident_bytes": resident_bytes,
            "resident_fraction": resident_bytes / state_bytes,
            "engine": self._shards.store.stats().engine,
        }
        params = sum(tile.slice_bytes for tile in tiles)
        grads = sum(tile.grad_bytes for tile in tiles)
        read_params = sum(tile.slice_bytes for tile in tiles if tile.layout.reads_weight)
        # read and written in memory, in one pass
        self.memory_bytes = 2 * state_bytes + params + read_params + grads
        streamed = state_bytes - resident_bytes
        self.expected = IoCounts(streamed, streamed)
        if not options.only_states:
            self.expected = IoCounts(streamed + read_params + grads, streamed + params)

    def __exit__(self, *_: object) -> None:
        self._shards.close()

    @property
    def bytes_under_way(self) -> int:
        """Most bytes of strips that a step has under way by now."""
        return self._shards.store.stats().bytes_under_way

    def step(self, pipelining: Pipelining) -> TimedStep:
        """Makes one step with the pipeline switched so. Blocks; raises OSError."""
        recorder = self._shards.store.recorder
        self._shards.switch_pipeline(*pipelining)
        recorder.forget()
        before = self._counts()
        flown = self._latencies()
        kernel_before = kernel_counts()
        start_cpu_s = time.process_time()
        start_ns = time.monotonic_ns()
        self._optimizer.step()
        end_ns = time.monotonic_ns()
        cpu_s = time.process_time() - start_cpu_s
        kernel = kernel_counts().since(kernel_before)
        moved = tuple(now.since(then) for now, then in zip(self._counts(), before, strict=True))
        read, written = (
            mean_in_flight(each, num_bytes, (end_ns - start_ns) * 1e-9)
            for each, num_bytes in zip(
                self._latencies() - flown, IoCounts.total(moved), strict=True
            )
        )
        spans = [Span(*event) for event in recorder.events]
        return TimedStep(start_ns, end_ns, moved, kernel, spans, cpu_s, (read, written))

    def _give_gradients(self) -> None:
        for live in self._shards.units:
            for part in live.unit.shards:
                part.param.grad = torch.full(part.shape, 1e-3, dtype=live.unit.dtype)
            self._shards.homes.receive(live.unit)
            self._shards.homes.show(live.unit)
        self._shards.homes.store.flush()

    def _latencies(self) -> npt.NDArray[np.int64]:
        """Blocks by bucket of latency: those that were read, then those that were written."""
        queues = self._shards.store.queues
        return np.array([queues.latencies(kind) for kind in (READ, WRITE)], dtype=np.int64)

    def _counts(self) -> list[IoCounts]:
        return [IoCounts(p.read_bytes, p.written_bytes) for p in self._shards.store.stats().paths]


def mean_in_flight(counts: npt.NDArray[np.int64], num_bytes: int, seconds: float) -> float:
    """The mean of the bytes that the kernel had, by Little's law.

    Args:
        counts: blocks of the time, by bucket of latency.
        num_bytes: of these blocks.
        seconds: of the time.
    """
    edges_us = latency_edges()
    latency_s = float(counts @ ((edges_us[:-1] + edges_us[1:]) / 2)) * 1e-6
    return num_bytes / max(1, int(counts.sum())) * latency_s / seconds


def state_bytes_of(num_params: int, precision: str, preset: str) -> int:
    """Bytes of optimizer states, about, before there is a model."""
    layout = StateLayout(DTYPES[precision], Precision.preset(preset), _NUM_MOMENTS)
    return sum(part.num_bytes(num_params) for part in layout.parts)


def _blocks(num_params: int, dtype: torch.dtype) -> nn.Module:
    """Nothing but parameters, in units of at most 16 M elements."""
    count = math.ceil(num_params / (1 << 24))
    values = torch.full((num_params // count // _BLOCK_PARAMS,), 0.01, dtype=dtype)
    blocks = (
        nn.ParameterList(nn.Parameter(values.clone()) for _ in range(_BLOCK_PARAMS))
        for _ in range(count)
    )
    return nn.ModuleDict({"layers": nn.ModuleList(blocks)})


# ---- the roofline: the shortest time in which this machine could make the step -------------------
#
#   disk     a bare loop (tests/native/bare_loop, built by `make yardsticks`) reads and writes as many bytes on each path, all
#              at the same time, in files that lie beside the store. Several settings take turns
#              between the steps; the best median counts. Without the program the queue moves the
#              bytes (swap/disk/passes.py), which is said.
#     memory   what Adam reads and writes in memory, at the rate of a vector loop over memory of its own
#
# No step can be faster, but a disk varies by some hundredths between the two: a fraction above `MOST_FRACTION`
# says that the yardstick is wrong.

MOST_FRACTION = 1.05
_FILE_UNIT = 4 << 20
_STREAM_NUMEL = 1 << 24


class BareSetting(NamedTuple):
    """How the yardstick keeps the disk busy."""

    block_bytes: int
    depth: int  # each way
    mode: str = "spread"  # or "through": it adds to what it reads, and writes from the same memory

    @property
    def name(self) -> str:
        """As a table says it."""
        added = ", added to" * (self.mode == "through")
        return f"{self.block_bytes / 2**20:g} MiB x {self.depth} each way{added}"


SETTINGS = (
    # few bytes, which a processor's cache keeps: the fastest on some machines
    BareSetting(1 << 18, 8),
    BareSetting(1 << 19, 8),
    BareSetting(1 << 20, 16),
    BareSetting(4 << 20, 8),
)
ADDING = BareSetting(1 << 19, 8, "through")
"""No roofline: one thread touches all bytes. It tells what touching costs: where cores are far from
the disk's memory, no cache serves both."""


class Roofline(AbstractContextManager["Roofline"]):
    """What moves the bytes of a step without its arithmetic. A context manager.

    Args:
        paths: those of the store.
        loads: of each model that is stepped, its bytes on each path; the files are made large
            enough for all.
        yardstick: tests/native/bare_loop, built; None: the queue.
        engine: of the queue.

    Raises OSError when a path has too little room, or the yardstick cannot be started.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        loads: Sequence[Sequence[IoCounts]],
        yardstick: Path | None,
        engine: str,
    ) -> None:
        self._engine = engine
        largest = max((max(moved) for load in loads for moved in load), default=0)
        self._file_bytes = round_up(max(largest, _FILE_UNIT), _FILE_UNIT)
        self._loops: list[BareLoop] = []
        with ExitStack() as opened:
            self._files = opened.enter_context(BenchFiles(paths, [self._file_bytes]))
            for index in range(len(paths)):
                if yardstick is not None:
                    self._loops.append(BareLoop(yardstick, Path(self._files.name(index))))
                    opened.callback(self._loops[-1].close)
                with self._passes(index, IoSettings(engine)) as passes:
                    # first writes to preallocated blocks are slower: not what a step does
                    passes.run("write")
            self._opened = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def measure(self, load: Sequence[IoCounts], setting: BareSetting) -> float:
        """Seconds in which a step's bytes are read and written, on all paths at once. Blocks;
        raises OSError."""
        busy = [index for index, moved in enumerate(load) if any(moved)]
        with ThreadPoolExecutor(len(load)) as threads:
            return max(
                threads.map(lambda index: self._move(index, load[index], setting), busy),
                default=0.0,
            )

    def _move(self, index: int, moved: IoCounts, setting: BareSetting) -> float:
        if self._loops:
            mode = setting.mode if all(moved) else "read" if moved.read_bytes else "write"
            sizes = (setting.block_bytes, setting.depth, *filter(None, moved))
            return self._loops[index].run(mode, *sizes).seconds
        both = min(moved)
        parts = {
            "mixed": both,
            "read": moved.read_bytes - both,
            "write": moved.written_bytes - both,
        }
        with self._passes(
            index, IoSettings(self._engine, setting.block_bytes, 2 * setting.depth)
        ) as passes:
            return sum(
                passes.run(mode, num_bytes).seconds
                for mode, num_bytes in parts.items()
                if num_bytes
            )

    def _passes(self, index: int, io: IoSettings) -> Passes:
        return Passes(self._files.descriptor(index), self._file_bytes, io)


def ceiling(
    yardstick: Path | None, series: Mapping[BareSetting, Sequence[float]], memory_s: float
) -> tuple[float, str]:
    """The shortest time of a step in seconds, and what sets it: the best median of the disk's
    settings, or the memory."""
    medians = {s.name: statistics.median(times) for s, times in series.items() if s != ADDING}
    best = min(medians, key=medians.__getitem__)
    seconds = medians[best]
    if memory_s > seconds:
        return memory_s, "memory traffic of Adam"
    by = "bare loop" if yardstick is not None else "by the queue without arithmetic"
    return seconds, f"{by}, {best}"


def memory_rate() -> float:
    """Bytes per second that memory takes when one vector is added to another in place, all threads;
    the best of a few."""
    a = torch.zeros(_STREAM_NUMEL)
    b = torch.ones(_STREAM_NUMEL)
    return 3 * a.nbytes / min(timeit.repeat(lambda: a.add_(b), number=1, repeat=5))


# ---- the picture of one step ---------------------------------------------------------------------
#
#     GB/s                    rates of reads and writes over time
#     read, compute, write    one bar per tile, from its first block to its last; bars of concurrent tiles lie below each
#                             other. The colour is the tile's position in the model, so that it can
#                             be found in each lane
#
# Below the whole step the picture magnifies a part of it. It is drawn from the spans of one step.

_LANES = ("read", "compute", "write")
_PREFIX = "gradients of "  # of a tile whose other bytes were read before the step
_MAGNIFIED_TILES = 24


def draw_tiles(
    step: TimedStep,
    tile_names: Sequence[str],
    figures: Figures,
    caption: str,
    file: Path,
    made_by: str,
) -> None:
    """Draws and saves the picture of one step. Raises OSError; needs matplotlib.

    Args:
        step: its spans.
        tile_names: of the model's tiles, in order.
        figures: of the benchmark, for the title.
        caption: machine and date.
    """
    spans = [span for span in step.spans if span.lane in _LANES]
    order = {name: number for number, name in enumerate(tile_names)}
    stretches = _stretches(step, spans)
    figure, axes = new_figure(
        13, 1.2 + 4.2 * len(stretches), (1.0, 2.6) * len(stretches), is_shared=False
    )
    for number, stretch in enumerate(stretches):
        rates, lanes = axes[2 * number : 2 * number + 2]
        part = within(spans, *stretch)
        _draw_rates(rates, part, stretch, step)
        _draw_lanes(lanes, part, stretch, step, order)
        rates.set_title(
            "a part of it, magnified" if number else "the whole step", fontsize=9, loc="left"
        )
    axes[-1].set_xlabel(f"time since the step began (ms)\n\n{caption}", fontsize=8, color="dimgray")
    figure.suptitle(_title(step, figures), fontsize=12)
    save_figure(figure, file, made_by)


def said_resident(figures: Figures) -> str:
    """What a title says of the states that rest in memory."""
    part = figures["resident_fraction"]
    return f", {part:.0%} of the states resident" if part else ""


def _title(step: TimedStep, figures: Figures) -> str:
    return (
        f"one optimizer step of {figures['num_params'] / 1e6:.0f} M parameters in "
        f"{figures['precision']}{said_resident(figures)}: {step.seconds:.3f} s\nmedian of "
        f"{len(figures['step_s'])}: {figures['step_s_median']:.3f} s; roofline "
        f"{figures['roofline_s']:.3f} s ({figures['roofline_by']}); fraction reached "
        f"{figures['roofline_fraction']:.2f}; disk idle {step.idle_fraction():.1%}"
    )


def _stretches(step: TimedStep, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """The whole step, and, when that is dense, a part from its middle with a few tiles."""
    whole = (step.start_ns, step.end_ns)
    computed = in_order(span for span in spans if span.lane == "compute")
    if len(computed) < 2 * _MAGNIFIED_TILES:
        return [whole]
    first = len(computed) // 2
    return [whole, (computed[first].start_ns, computed[first + _MAGNIFIED_TILES].end_ns)]


def _draw_rates(ax: Axes, spans: Sequence[Span], stretch: tuple[int, int], step: TimedStep) -> None:
    """Read and written GB/s: a transfer's bytes are spread evenly over its time."""
    edges = np.linspace(*stretch, 201)
    times = ((edges[:-1] + edges[1:]) / 2 - step.start_ns) / 1e6
    for lane, colour in (("read", "#2a788e"), ("write", "#e07b39")):
        moved = np.zeros(len(edges))  # bytes until each edge
        for span in step.spans:
            if span.lane == lane and span.end_ns > span.start_ns:
                moved += np.interp(edges, (span.start_ns, span.end_ns), (0, span.num_bytes))
        rates = np.diff(moved) / np.diff(edges)
        carried = sum(span.num_bytes for span in spans if span.lane == lane) / 1e9
        ax.plot(times, rates, color=colour, linewidth=1.2, label=f"{lane}, {carried:.2f} GB")
        ax.fill_between(times, rates, color=colour, alpha=0.15)
    ax.set_ylabel("GB/s", fontsize=9)
    ax.set_ylim(bottom=0)
    ax.set_xlim(*((edge - step.start_ns) / 1e6 for edge in stretch))
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False)
    ax.tick_params(labelbottom=False)
    ax.grid(alpha=0.25)


def _draw_lanes(
    ax: Axes,
    spans: Sequence[Span],
    stretch: tuple[int, int],
    step: TimedStep,
    order: Mapping[str, int],
) -> None:
    """Each lane's bars, rows of tiles that were on their way together below each other."""
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    numbers = [
        order[name] for span in spans if (name := span.name.removeprefix(_PREFIX)) in order
    ] or [0]
    scale = matplotlib.cm.ScalarMappable(
        matplotlib.colors.Normalize(min(numbers), max(numbers)), colours
    )
    bands = []
    for lane in _LANES:
        members = in_order(span for span in spans if span.lane == lane)
        rows = rows_of(members) or [[]]
        height = 2.0 if lane == "compute" else max(2.0, len(rows))
        bands.append((f"{lane}\n{busy_fraction(members, *stretch):.0%} busy", rows, height))
    draw_bands(
        ax,
        bands,
        stretch,
        step.start_ns,
        lambda span: scale.to_rgba(np.array(order.get(span.name.removeprefix(_PREFIX), 0))),
    )
    bar = ax.figure.colorbar(scale, ax=ax, pad=0.01, aspect=18)
    bar.set_label("tile", fontsize=8)
    bar.ax.tick_params(labelsize=7)
