"""`tiermem bench adam`: how fast AdamW steps in every precision, beside the memory's own speed and beside peers.

    for every row:  prepare all contestants  ->  loops x (ours, torch, peer, yardstick in turn)  ->  medians

Figures are ns per parameter, GB/s by the bytes that must move, and the share of the yardstick's rate over the same arrays:
the median of the loops' own ratios, since memory is not equally fast from one second to the next. A loop counts the fastest
of five passes. A whole step goes from bf16 gradients with a loss scale and clipping to bf16 parameters; peers' whole steps
are written with their parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from tiermem.swap.native import Map, Workers, optimizer_step, store_gradient
from tiermem.swap.parts import Dither, Moment, Quantised, StepParts, StepRule, num_scales
from tiermem.tools.bench.peers.runs import peer_variables
from tiermem.tools.bench.witnesses import LineProgram
from tiermem.tools.machine import available_bytes, caption, machine_facts
from tiermem.tools.options import AdamBenchOptions
from tiermem.tools.reports import table
from tiermem.tools.words import format_bytes, stopped_by_sigterm
from tiermem.zero.topology import fair_cores, fair_threads

# ---- rows: the precisions in which AdamW is timed, and the bytes that a step must move -------------------------------
#
#     weight    what the model sees            bf16, fp32
#     master    fp32, split (the 16 bits that the bf16 weight lacks), or none: the weight is the master
#     moments   fp32, bf16, 8bit               grads   fp32, bf16               rounding   of what is stored below fp32
#
# A row is the kernel alone. A *whole* step reads the gradients once more for their norm, and applies loss scale and
# clipping. Each array counts once for a read and once for a write: no cache could save that.

_BYTES = {"fp32": 4, "bf16": 2, "split": 2, "8bit": 1}
_SCALES_PER_CODE = 1 / 64


class Stream(NamedTuple):
    """An array that a step passes over: bytes per element, and whether it is read, written or both (r, w, rw)."""

    num_bytes: int
    how: str

    def __str__(self) -> str:
        return f"{self.num_bytes}{self.how}"


@dataclasses.dataclass(frozen=True)
class AdamRow:
    """One row of the benchmark."""

    weight: str
    master: str | None
    moments: str
    grads: str
    rounding: str
    is_whole: bool = False

    @property
    def name(self) -> str:
        """Such as "split + bf16, stochastic"."""
        master = self.weight if self.master is None else f"{self.weight} + fp32" if self.master == "fp32" else "split"
        rounding = f", {self.rounding}" if self.is_rounded else ""
        return f"{'whole step: ' if self.is_whole else ''}{master} / {self.moments}{rounding}"

    @property
    def is_rounded(self) -> bool:
        """Whether a part of the state is stored in less than fp32, so that rounding is asked."""
        return self.moments != "fp32" or (self.master is None and self.weight != "fp32")

    @property
    def streams(self) -> list[Stream]:
        """The arrays of a step."""
        weight, moment, grad = _BYTES[self.weight], _BYTES[self.moments], _BYTES[self.grads]
        masters = [] if self.master is None else [Stream(_BYTES[self.master], "rw")]
        weights = [Stream(weight, "w" if self.master == "fp32" else "rw")]
        norm = [Stream(grad, "r")] if self.is_whole else []
        return [*weights, *masters, Stream(moment, "rw"), Stream(moment, "rw"), Stream(grad, "r"), *norm]

    @property
    def stream_bytes(self) -> int:
        """Bytes per parameter of the streams alone: what a yardstick of whole bytes moves."""
        return sum(stream.num_bytes * len(stream.how) for stream in self.streams)

    @property
    def bytes_per_param(self) -> float:
        """Bytes that must move per parameter, the scales of 8-bit moments included."""
        scales = 2 * 2 * _SCALES_PER_CODE if self.moments == "8bit" else 0.0  # two moments, read and written
        return self.stream_bytes + scales


ROWS = (
    AdamRow("fp32", None, "fp32", "fp32", "nearest"),
    AdamRow("bf16", "fp32", "fp32", "bf16", "nearest"),
    AdamRow("bf16", "split", "fp32", "bf16", "nearest"),
    AdamRow("bf16", "split", "bf16", "bf16", "stochastic"),
    AdamRow("bf16", "split", "bf16", "bf16", "nearest"),
    AdamRow("bf16", None, "bf16", "bf16", "stochastic"),
    AdamRow("bf16", None, "bf16", "bf16", "nearest"),
    AdamRow("bf16", "split", "8bit", "bf16", "stochastic"),
    AdamRow("bf16", "fp32", "fp32", "bf16", "nearest", is_whole=True),
    AdamRow("bf16", "split", "bf16", "bf16", "stochastic", is_whole=True),
)
"""Every row, in the order in which they are told."""


# ---- Contestants: what does a row's work, or moves its bytes ---------------------------------------------------------

PASSES = 5
_PAGE_BYTES = 4096
_SCALE, _MAX_NORM = 1024.0, 1.0
_REST_S = 0.02  # torch's threads look for more work for some milliseconds after the last; no other is timed beside them
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PEER_SCRIPT = Path(__file__).parent / "peers" / "peer_adam.py"
_LR, _DECAY, _BETAS, _EPS = 1e-4, 0.01, (0.9, 0.999), 1e-8


class Arrays:
    """Memory that arrays are carved from: huge pages, resident, an odd number of pages to each."""

    def __init__(self, sizes: list[int]) -> None:
        self._map = Map(sum(map(_padded, sizes)))
        self._map.commit(0, self._map.num_bytes)
        self._bytes = self._map.tensor()
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next array, zeros."""
        array = self._bytes[self._used : self._used + numel * dtype.itemsize].view(dtype)
        self._used += _padded(numel * dtype.itemsize)
        return array

    def close(self) -> None:
        """Lets the memory go with the last array."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._map.close()


class Contestant:
    """Steps of one row in this process, and the arrays that they step."""

    name = ""

    def __init__(self) -> None:
        self._arrays: Arrays | None = None
        self._step: Callable[[], object] = lambda: None

    def prepare(self, row: AdamRow, numel: int) -> bool:
        """Makes ready for a row; False: the contestant cannot do it."""
        raise NotImplementedError

    def seconds(self) -> float:
        """The fastest of PASSES passes over the row prepared last."""
        return fastest(self._step)

    def release(self) -> None:
        """Lets go of the last row's arrays."""
        self._step = lambda: None
        if self._arrays is not None:
            self._arrays.close()
            self._arrays = None

    def close(self) -> None:
        """Ends it."""
        self.release()


class Ours(Contestant):
    """The native kernel, and for a whole step the norm before it."""

    name = "tiermem"

    def __init__(self, threads: int, cores: tuple[int, ...]) -> None:
        super().__init__()
        self._workers = Workers(threads, cores)
        self.parts: StepParts | None = None

    def prepare(self, row: AdamRow, numel: int) -> bool:
        sizes = [stream.num_bytes * numel for stream in row.streams]
        arrays = self._arrays = Arrays([*sizes, *[num_scales(numel)] * 2])
        weight = arrays.take(numel, _DTYPES[row.weight]).fill_(0.5)
        master = None
        if row.master is not None:
            master = arrays.take(numel, torch.int16 if row.master == "split" else torch.float32)
            if row.master == "fp32":
                master.fill_(0.5)
        grad = arrays.take(numel, _DTYPES[row.grads]).fill_(1e-3)
        moments: list[Moment] = []
        for _ in range(2):
            if row.moments == "8bit":
                codes, scales = arrays.take(numel, torch.uint8), arrays.take(num_scales(numel), torch.uint8)
                moments.append(Quantised(codes, scales))
            else:
                moments.append(arrays.take(numel, _DTYPES[row.moments]))
        parts = self.parts = StepParts(weight, master, grad, moments)
        self._step = lambda: self._step_once(row, parts)
        self._step()
        return True

    def release(self) -> None:
        self.parts = None
        super().release()

    def close(self) -> None:
        super().close()
        self._workers.close()

    def _step_once(self, row: AdamRow, parts: StepParts) -> None:
        factor = 1.0
        if row.is_whole:
            norm = math.sqrt(sum(store_gradient(self._workers, None, parts.grad))) / _SCALE
            factor = min(1.0, _MAX_NORM / (norm + 1e-6)) / _SCALE
        rule = StepRule(
            "adamw",
            step_size=_LR,
            decay=1.0 - _LR * _DECAY,
            grad_scale=factor,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            eps=_EPS,
        )
        dither = Dither(1, 1, 0) if row.is_rounded and row.rounding == "stochastic" else None
        optimizer_step(self._workers, rule, parts, dither)


class Torch(Contestant):
    """torch's fused AdamW, on our arrays where all of them have one dtype; a whole step written with it has fp32 ones of
    its own for the gradient.
    """

    name = "torch"

    def __init__(self, threads: int, ours: Ours) -> None:
        super().__init__()
        self._threads_before = torch.get_num_threads()
        if threads != self._threads_before:
            torch.set_num_threads(threads)
        self._ours = ours

    def prepare(self, row: AdamRow, numel: int) -> bool:
        parts = self._ours.parts
        assert parts is not None
        uniform = row.master is None and row.weight == row.moments == row.grads
        if not uniform and not (row.is_whole and row.master == row.moments == "fp32"):
            return False
        low, grad = parts.weight, parts.grad
        assert low is not None
        if row.is_whole:
            self._arrays = Arrays([4 * numel])
            grad = self._arrays.take(numel, torch.float32)
        param = torch.nn.Parameter(low if parts.master is None else parts.master)
        param.grad = grad
        adam = torch.optim.AdamW([param], lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, fused=True)
        exp_avg, exp_avg_sq = parts.moments
        adam.state[param] = {"step": torch.tensor(1.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self._step = (lambda: _whole_step(adam, param, low, parts.grad)) if row.is_whole else adam.step
        self._step()
        return True

    def close(self) -> None:
        super().close()
        if torch.get_num_threads() != self._threads_before:
            torch.set_num_threads(self._threads_before)


class Asked(Contestant):
    """A program that is asked line by line (witnesses.py)."""

    def __init__(self, program: LineProgram, threads: int, verb: str) -> None:
        super().__init__()
        self._program = program
        self._threads = threads
        self._verb = verb
        self._factor = 1.0

    def seconds(self) -> float:
        return self._program.ask_numbers(f"{self._verb} {PASSES}", 1, "seconds")[0] * self._factor

    def release(self) -> None:
        self._program.ask("release")

    def close(self) -> None:
        self._program.close()


class Streams(Asked):
    """The yardstick, tests/native/bare_stream: the same arrays, read and written in the fastest way found, and nothing else."""

    name = "yardstick"

    def __init__(self, program: Path, threads: int) -> None:
        super().__init__(LineProgram([str(program)], str(program)), threads, "pass")

    def prepare(self, row: AdamRow, numel: int) -> bool:
        line = f"prepare {numel} {self._threads} {' '.join(map(str, row.streams))}"
        self._program.ask_numbers(line, 2, "seconds plain and streaming")
        self._factor = row.bytes_per_param / row.stream_bytes  # scales of 8-bit moments are no whole byte
        return True


class Peer(Asked):
    """DeepSpeedCPUAdam behind peer_adam.py; its operator compiles before the first answer, with -O3 without a GPU."""

    name = "deepspeed"

    def __init__(self, python: Path, threads: int) -> None:
        command = [str(python.absolute()), "-I", str(_PEER_SCRIPT)]
        environment = {**os.environ, **peer_variables(python), "OMP_NUM_THREADS": str(threads)}
        program = LineProgram(command, "DeepSpeedCPUAdam", environment)
        super().__init__(program, threads, "step")

    def prepare(self, row: AdamRow, numel: int) -> bool:
        kind = _peer_kind(row)
        if kind is not None:
            self._program.ask_numbers(f"prepare {kind} {numel} {self._threads}", 1, "bytes")
        return kind is not None


def fastest(step: Callable[[], object]) -> float:
    """Seconds of the fastest of PASSES calls, after a moment of rest."""
    time.sleep(_REST_S)
    best = math.inf
    for _ in range(PASSES):
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    return best


def _peer_kind(row: AdamRow) -> str | None:
    if row.is_whole:
        return "whole" if row.master == row.moments == "fp32" else None
    if row.master is not None or row.rounding != "nearest" or row.moments != row.weight:
        return None
    return row.weight


def _whole_step(adam: torch.optim.Optimizer, param: torch.nn.Parameter, low: torch.Tensor, grad: torch.Tensor) -> None:
    """From low-precision gradients to low-precision parameters with torch's parts."""
    assert param.grad is not None
    with torch.no_grad():
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32).item() / _SCALE
        param.grad.copy_(grad)
        param.grad.mul_(min(1.0, _MAX_NORM / (norm + 1e-6)) / _SCALE)
        adam.step()
        low.copy_(param)


def _padded(num_bytes: int) -> int:
    """An odd number of pages: arrays a power of two apart would evict each other from the first-level cache."""
    return ((-(-num_bytes // _PAGE_BYTES) + 3) | 1) * _PAGE_BYTES


# ---- the command -----------------------------------------------------------------------------------------------------

_UNIT = 1024  # the yardstick takes multiples of it
_MEMORY_FRACTION = 0.8
_MOST_HELD_BYTES = {"ours": 18, "torch": 4, "yardstick": 18, "peer": 20}  # per parameter, in their largest row


def bench_adam(options: AdamBenchOptions, console: Console) -> int:
    """Measures, prints and writes what was asked for; returns the exit status. Raises ValueError and OSError."""
    chosen, numel = chosen_rows(options), options.num_params // _UNIT * _UNIT
    _check_memory(options, numel)
    start = time.monotonic()
    with stopped_by_sigterm():
        rows = measure(options, chosen, numel, console)
    facts = machine_facts()
    title = f"AdamW over {numel:,} parameters, {rows[0]['threads']} threads, medians of {options.loops} loops"
    _print_rows(rows, title, caption(facts), console)
    options.save_json(options.report(facts, start, rows=rows))
    return 0


def chosen_rows(options: AdamBenchOptions) -> list[AdamRow]:
    """The rows to measure. Raises ValueError when there is none."""
    rows = [row for row in ROWS if not options.rows or any(part in row.name for part in options.rows)]
    if not rows:
        names = "; ".join(row.name for row in ROWS)
        raise ValueError(f"--row {', '.join(options.rows)} is part of no row's name; they are: {names}")
    return rows


def _check_memory(options: AdamBenchOptions, numel: int) -> None:
    present = {"ours": True, "torch": True, "yardstick": options.yardstick, "peer": options.peer_python}
    needed = numel * sum(held for who, held in _MOST_HELD_BYTES.items() if present[who])
    if needed > _MEMORY_FRACTION * available_bytes():
        raise ValueError(
            f"--params {options.num_params} takes up to {format_bytes(needed)} at once, {format_bytes(available_bytes())} of "
            "memory are available: ask for fewer"
        )


def measure(options: AdamBenchOptions, chosen: Sequence[AdamRow], numel: int, console: Console) -> list[dict[str, Any]]:
    """Every chosen row: in each loop the contestants take turns. Blocks; raises OSError."""
    threads = options.threads or fair_threads()
    with contextlib.ExitStack() as closing:
        ours = Ours(threads, fair_cores())
        contestants: list[Contestant] = [ours, Torch(threads, ours)]
        if options.peer_python is not None:
            contestants.append(Peer(options.peer_python, threads))
        if options.yardstick is not None:
            contestants.append(Streams(options.yardstick, threads))
        for contestant in contestants:
            closing.callback(contestant.close)
        rows = []
        for row in chosen:
            with console.status(f"measuring {row.name}"):
                for contestant in contestants:
                    contestant.release()
                present = [each for each in contestants if each.prepare(row, numel)]
                seconds: dict[str, list[float]] = {each.name: [] for each in present}
                for _ in range(options.loops):
                    for each in present:
                        seconds[each.name].append(each.seconds())
            rows.append(row_of(row, numel, seconds, threads))
        return rows


def row_of(row: AdamRow, numel: int, seconds: dict[str, list[float]], threads: int) -> dict[str, Any]:
    """A row of the report from the seconds of each loop: medians, and the medians of the loops' ratios."""
    medians = {name: statistics.median(series) for name, series in seconds.items()}
    ratios = {
        name: statistics.median(their / our for their, our in zip(series, seconds["tiermem"], strict=True))
        for name, series in seconds.items()
    }
    own = medians.pop("tiermem")
    bare = medians.pop("yardstick", None)
    return {
        "name": row.name,
        "kind": "whole" if row.is_whole else "kernel",
        "weight": row.weight,
        "master": row.master or row.weight,
        "moments": row.moments,
        "grads": row.grads,
        "rounding": row.rounding,
        "threads": threads,
        "num_params": numel,
        "bytes_per_param": row.bytes_per_param,
        "ns_per_param": own / numel * 1e9,
        "ns_per_param_loops": [each / numel * 1e9 for each in seconds["tiermem"]],
        "gbps": row.bytes_per_param * numel / own / 1e9,
        "stream_gbps": None if bare is None else row.bytes_per_param * numel / bare / 1e9,
        "stream_fraction": ratios.get("yardstick"),
        "peers": {name: {"ns_per_param": s / numel * 1e9, "speedup": ratios[name]} for name, s in medians.items()},
    }


def _print_rows(rows: Sequence[dict[str, Any]], title: str, facts: str, console: Console) -> None:
    columns = ("weight + master / moments", ">bytes", ">ns", ">GB/s", ">of the stream", ">torch ns", ">DeepSpeed ns")
    shown = table(title, *columns, caption=facts)
    for row in rows:
        share = "-" if row["stream_fraction"] is None else f"{row['stream_fraction']:.1%}"
        told = [_peer(row["peers"].get(name)) for name in ("torch", "deepspeed")]
        figures = (f"{row['bytes_per_param']:.4g}", f"{row['ns_per_param']:.4f}", f"{row['gbps']:.1f}", share, *told)
        shown.add_row(row["name"], *figures)
    console.print(shown)


def _peer(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else f"{figures['ns_per_param']:.4f} ({figures['speedup']:.2f}x)"
