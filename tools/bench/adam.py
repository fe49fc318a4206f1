"""`tiermem bench adam`: how fast AdamW steps in every precision, beside the memory's own speed and beside peers."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from rich.console import Console
from rich.table import Table

from tiermem.swap.native import Map, Workers, optimizer_step, store_gradient
from tiermem.swap.parts import Dither, Moment, Quantised, StepParts, StepRule, num_scales
from tiermem.tools.bench.witnesses import LineProgram
from tiermem.tools.machine import available_bytes, caption, machine_facts, num_cores
from tiermem.tools.words import check_outputs, format_bytes, stopped_by_sigterm

# ---- AdamRow: one precision in which AdamW is timed, and the bytes that a step of it must move -----------------------
#
#     weight    what the model sees            bf16, fp32
#     master    fp32, split (the 16 bits that the bf16 weight lacks), or none: the weight is the master
#     moments   fp32, bf16, 8bit               grads   fp32, bf16               rounding   of what is stored below fp32
#
# A row is the kernel alone; a *whole* step reads the gradients once more before, for their norm, and has the loss scale
# and clipping in it. Bytes are those of each array, read or written once: nothing that a cache could save.

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


# ---- Contestants of `tiermem bench adam`: whoever does a row's work, or moves its bytes, behind one face -------------
#
#     Ours        the native kernel                                  Torch       fused AdamW on the same arrays
#   Streams     tests/native/bare_stream: the bytes alone          Peer        DeepSpeedCPUAdam, in an interpreter that has it
#
# `prepare(row, numel)` makes what a row needs and says whether the contestant has it at all; `seconds()` is the fastest
# of PASSES passes, as many as the yardstick makes. Arrays lie in huge pages, an odd number of pages apart.

PASSES = 5
_PAGE_BYTES = 4096
_SCALE, _MAX_NORM = 1024.0, 1.0
_REST_S = (
    0.02  # torch's threads look for more work for some milliseconds after the last; nobody shall be timed beside them
)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PEER_SCRIPT = Path(__file__).parent / "peers" / "peer_adam.py"
_LR, _DECAY, _BETAS, _EPS = 1e-4, 0.01, (0.9, 0.999), 1e-8


class Contestant(Protocol):
    """Who is timed."""

    name: str

    def prepare(self, row: AdamRow, numel: int) -> bool:
        """Makes ready for a row; False: it has none such."""

    def seconds(self) -> float:
        """The fastest of PASSES passes over the row prepared last."""

    def release(self) -> None:
        """Lets go of the last row's arrays."""

    def close(self) -> None:
        """Ends it."""


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


class Ours:
    """The native kernel, and for a whole step the norm before it."""

    name = "tiermem"

    def __init__(self, threads: int, cores: tuple[int, ...]) -> None:
        self._workers = Workers(threads, cores)
        self.parts: StepParts | None = None
        self._row: AdamRow | None = None
        self._arrays: Arrays | None = None

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
        self.parts, self._row = StepParts(weight, master, grad, moments), row
        self._step()
        return True

    def seconds(self) -> float:
        return fastest(self._step)

    def close(self) -> None:
        self.release()
        self._workers.close()

    def release(self) -> None:
        self.parts = None
        if self._arrays is not None:
            self._arrays.close()
            self._arrays = None

    def _step(self) -> None:
        assert self.parts is not None and self._row is not None
        factor = 1.0
        if self._row.is_whole:
            norm = math.sqrt(sum(store_gradient(self._workers, None, self.parts.grad))) / _SCALE
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
        dither = Dither(1, 1, 0) if self._row.is_rounded and self._row.rounding == "stochastic" else None
        optimizer_step(self._workers, rule, self.parts, dither)


class Torch:
    """torch's fused AdamW, on our arrays where all of them have one dtype; a whole step written with it has fp32 ones of
    its own for the gradient.
    """

    name = "torch"

    def __init__(self, threads: int, ours: Ours) -> None:
        self._threads_before = torch.get_num_threads()
        if threads != self._threads_before:
            torch.set_num_threads(threads)
        self._ours = ours
        self._arrays: Arrays | None = None
        self._step: Callable[[], object] = lambda: None

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

    def seconds(self) -> float:
        return fastest(self._step)

    def close(self) -> None:
        self.release()
        if torch.get_num_threads() != self._threads_before:
            torch.set_num_threads(self._threads_before)

    def release(self) -> None:
        self._step = lambda: None
        if self._arrays is not None:
            self._arrays.close()
            self._arrays = None


class Streams:
    """The yardstick: the same arrays, read and written in the fastest way that was found, and nothing else."""

    name = "yardstick"

    def __init__(self, program: Path, threads: int) -> None:
        self._program = LineProgram([str(program)], str(program))
        self._threads = threads
        self._factor = 1.0

    def prepare(self, row: AdamRow, numel: int) -> bool:
        line = f"prepare {numel} {self._threads} {' '.join(map(str, row.streams))}"
        self._program.ask_numbers(line, 2, "seconds plain and streaming")
        self._factor = row.bytes_per_param / row.stream_bytes  # scales of 8-bit moments are no whole byte
        return True

    def seconds(self) -> float:
        return self._program.ask_numbers(f"pass {PASSES}", 1, "seconds")[0] * self._factor

    def release(self) -> None:
        self._program.ask("release")

    def close(self) -> None:
        self._program.close()


class Peer:
    """DeepSpeedCPUAdam behind peer_adam.py; its operator compiles before the first answer."""

    name = "deepspeed"

    def __init__(self, python: Path, threads: int) -> None:
        bin_folder = python.absolute().parent
        environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
        environment["OMP_NUM_THREADS"] = str(threads)
        if not Path("/dev/nvidiactl").exists():
            environment.setdefault("DS_ACCELERATOR", "cpu")  # whose builder compiles with -O3
        command = [str(python.absolute()), "-I", str(_PEER_SCRIPT)]
        self._program = LineProgram(command, "DeepSpeedCPUAdam", environment)
        self._threads = threads

    def prepare(self, row: AdamRow, numel: int) -> bool:
        kind = _peer_kind(row)
        if kind is None:
            return False
        self._program.ask_numbers(f"prepare {kind} {numel} {self._threads}", 1, "bytes")
        return True

    def seconds(self) -> float:
        return self._program.ask_numbers(f"step {PASSES}", 1, "seconds")[0]

    def release(self) -> None:
        self._program.ask("release")

    def close(self) -> None:
        self._program.close()


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


# ---- `tiermem bench adam`: how fast AdamW steps in every precision, beside the memory's own speed and beside ---------
# peers
#
#     for every row (adam.py):  prepare everybody  ->  loops x (ours, torch, peer, yardstick in turn)  ->  medians
#
# ns per parameter, GB/s by the bytes that must move, and the share of the yardstick's rate over the same arrays in the
# same run: medians of the loops' own ratios, since memory is not equally fast from one second to the next. Each loop
# counts a contestant's fastest pass of five. A whole step goes from bf16 gradients with a loss scale and clipping to
# bf16 parameters; the peers' are written with their parts.

MADE_BY = "tiermem bench adam"
_UNIT = 1024  # the yardstick takes multiples of it
_MEMORY_FRACTION = 0.8
_MOST_HELD_BYTES = {"ours": 18, "torch": 4, "yardstick": 18, "peer": 20}  # per parameter, in their largest row


@dataclasses.dataclass(frozen=True)
class AdamBenchOptions:
    """What was asked for on the command line. Raises ValueError for what cannot be measured."""

    num_params: int = 128_000_000
    loops: int = 9
    threads: int | None = None
    rows: Sequence[str] = ()
    """Parts of names: rows that hold one of them. None given: all."""
    json_file: Path | None = None
    yardstick: Path | None = None
    peer_python: Path | None = None

    def __post_init__(self) -> None:
        if self.num_params < _UNIT:
            raise ValueError(f"--params is {self.num_params}; it must be at least {_UNIT}")
        if self.loops < 1:
            raise ValueError(f"--loops is {self.loops}; it must be at least 1")
        if self.threads is not None and not 1 <= self.threads <= num_cores():
            raise ValueError(f"--threads is {self.threads}; allowed are 1 to {num_cores()}, the cores")
        if not self.chosen_rows:
            names = "; ".join(row.name for row in ROWS)
            raise ValueError(f"--row {', '.join(self.rows)} is part of no row's name; they are: {names}")

    @property
    def numel(self) -> int:
        """Parameters to step: a multiple of what the yardstick takes."""
        return self.num_params // _UNIT * _UNIT

    @property
    def chosen_rows(self) -> list[AdamRow]:
        """The rows to measure."""
        return [row for row in ROWS if not self.rows or any(part in row.name for part in self.rows)]


def bench_adam(options: AdamBenchOptions, console: Console) -> int:
    """Measures, prints and writes what was asked for; returns the exit status. Raises ValueError and OSError."""
    check_everything(options)
    start = time.monotonic()
    with stopped_by_sigterm():
        rows = measure(options, console)
    facts = machine_facts()
    _print_rows(rows, options, caption(facts), console)
    if options.json_file is not None:
        report = {
            "made_by": MADE_BY,
            "machine": facts,
            "options": {key: _plain(value) for key, value in dataclasses.asdict(options).items()},
            "seconds": time.monotonic() - start,
            "rows": rows,
        }
        options.json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def check_everything(options: AdamBenchOptions) -> None:
    """Refuses what would fail later: outputs that are not ours, missing programs, too little memory."""
    if options.json_file is not None and options.json_file.suffix != ".json":
        raise ValueError(f"--json: {options.json_file} must end in .json")
    check_outputs([options.json_file], MADE_BY)
    for option, program in (("--yardstick", options.yardstick), ("--peer-python", options.peer_python)):
        if program is not None and not (program.is_file() and os.access(program, os.X_OK)):
            raise FileNotFoundError(errno.ENOENT, f"{option}: no such program", str(program))
    present = {"ours": True, "torch": True, "yardstick": options.yardstick, "peer": options.peer_python}
    needed = options.numel * sum(held for who, held in _MOST_HELD_BYTES.items() if present[who])
    if needed > _MEMORY_FRACTION * available_bytes():
        raise ValueError(
            f"--params {options.num_params} takes up to {format_bytes(needed)} at once, {format_bytes(available_bytes())} of "
            "memory are available: ask for fewer"
        )


def measure(options: AdamBenchOptions, console: Console) -> list[dict[str, Any]]:
    """Every chosen row."""
    from tiermem.zero.topology import fair_cores, fair_threads

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
        for row in options.chosen_rows:
            with console.status(f"measuring {row.name}"):
                for contestant in contestants:
                    contestant.release()
                present = [each for each in contestants if each.prepare(row, options.numel)]
                seconds: dict[str, list[float]] = {each.name: [] for each in present}
                for _ in range(options.loops):
                    for each in present:
                        seconds[each.name].append(each.seconds())
            rows.append(row_of(row, options.numel, seconds, threads))
        return rows


def row_of(row: AdamRow, numel: int, seconds: dict[str, list[float]], threads: int) -> dict[str, Any]:
    """A row of the report from everybody's seconds per loop: medians, and of what compares two, of the loops' ratios."""
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


def _print_rows(rows: Sequence[dict[str, Any]], options: AdamBenchOptions, facts: str, console: Console) -> None:
    title = f"AdamW over {options.numel:,} parameters, {rows[0]['threads']} threads, medians of {options.loops} loops"
    table = Table(title=title, title_justify="left", caption=facts, caption_justify="left", box=None, pad_edge=False)
    names = ("weight + master / moments", "bytes", "ns", "GB/s", "of the stream", "torch ns", "DeepSpeed ns")
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right")
    for row in rows:
        share = "-" if row["stream_fraction"] is None else f"{row['stream_fraction']:.1%}"
        told = [_peer(row["peers"].get(name)) for name in ("torch", "deepspeed")]
        figures = (f"{row['bytes_per_param']:.4g}", f"{row['ns_per_param']:.4f}", f"{row['gbps']:.1f}", share, *told)
        table.add_row(row["name"], *figures)
    console.print(table)


def _peer(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else f"{figures['ns_per_param']:.4f} ({figures['speedup']:.2f}x)"


def _plain(value: Any) -> Any:
    """As JSON takes it."""
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value
