"""`tiermem bench adam`: how fast AdamW steps in every precision, beside the memory's own speed and
beside peers.

    for every row:  prepare all contestants  ->  loops x (ours, torch, peer, yardstick in turn)  ->  medians

Figures are ns per parameter, GB/s by the bytes that must move, and the share of the yardstick's
rate over the same arrays: the median of the loops' own ratios, since memory is not equally fast
from one second to the next. A loop counts the fastest of five passes. A whole step goes from bf16
gradients with a loss scale and clipping to bf16 parameters; peers' whole steps are written with
their parts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console

from tiermem.ranks.topology import fair_cores, fair_threads
from tiermem.swap.base.native import Workers, choose_isa, optimizer_step, store_gradient
from tiermem.swap.base.parts import Dither, Quantised, StepParts, StepRule, num_scales
from tiermem.tools.bench.peer_operators import MAX_NORM, SCALE, new_arrays, whole_step
from tiermem.tools.bench.witnesses import LineProgram, peer_program
from tiermem.tools.measure.files import check_memory
from tiermem.tools.measure.machine import caption, machine_facts
from tiermem.tools.options import ISAS, AdamBenchOptions
from tiermem.tools.record.reports import table
from tiermem.tools.words import format_bytes

# ---- rows: the precisions in which AdamW is timed, and the bytes that a step must move -----------
#
#     weight    what the model sees            bf16, fp32
#     master    fp32, split (the 16 bits that the bf16 weight lacks), or the weight's own precision: it is the master
#     moments   fp32, bf16, 8bit               grads   fp32, bf16               rounding   of what is stored below fp32
#
# A row is the kernel alone. A *whole* step reads the gradients once more for their norm, and
# applies loss scale and clipping. Each array counts once for a read and once for a write: no cache
# could save that.

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "split": torch.int16, "8bit": torch.uint8}


class AdamRow(NamedTuple):
    """One row of the benchmark."""

    weight: str
    master: str
    moments: str
    grads: str
    rounding: str
    kind: str = "kernel"  # or "whole"

    @property
    def name(self) -> str:
        """Such as "split + bf16, stochastic"."""
        master = (
            self.master
            if self.master in ("split", self.weight)
            else f"{self.weight} + {self.master}"
        )
        rounding = f", {self.rounding}" if self.is_rounded else ""
        return (
            f"{'whole step: ' if self.kind == 'whole' else ''}{master} / {self.moments}{rounding}"
        )

    @property
    def is_rounded(self) -> bool:
        """Whether a part of the state is stored in less than fp32, so that rounding is asked."""
        return self.moments != "fp32" or self.master == "bf16"

    @property
    def peer_kind(self) -> str | None:
        """The step that other libraries have for this row ("fp32", "bf16" or "whole"); None: they
        have none."""
        if self.kind == "whole":
            return "whole" if self.master == self.moments == "fp32" else None
        return self.weight if self.weight == self.master == self.moments == self.grads else None

    @property
    def streams(self) -> list[tuple[int, str]]:
        """The arrays that a step passes over: bytes per element, and whether each is read, written
        or both (r, w, rw)."""
        kinds = (self.weight, self.master, self.moments, self.grads)
        weight, master, moment, grad = (_DTYPES[kind].itemsize for kind in kinds)
        found = [(weight, "w" if self.master == "fp32" and self.weight != "fp32" else "rw")]
        if self.master != self.weight:
            found.append((master, "rw"))
        found += [(moment, "rw"), (moment, "rw"), (grad, "r")]
        if self.kind == "whole":
            found.append((grad, "r"))  # once more, for the norm
        return found

    @property
    def stream_bytes(self) -> int:
        """Bytes per parameter of the streams alone: what a yardstick of whole bytes moves."""
        return sum(num_bytes * len(how) for num_bytes, how in self.streams)

    @property
    def bytes_per_param(self) -> float:
        """Bytes that must move per parameter, the scales of 8-bit moments included."""
        # two moments, read and written, 64 codes to a scale
        scales = 2 * 2 / 64 if self.moments == "8bit" else 0.0
        return self.stream_bytes + scales


ROWS = (
    AdamRow("fp32", "fp32", "fp32", "fp32", "nearest"),
    AdamRow("bf16", "fp32", "fp32", "bf16", "nearest"),
    AdamRow("bf16", "split", "fp32", "bf16", "nearest"),
    AdamRow("bf16", "split", "bf16", "bf16", "stochastic"),
    AdamRow("bf16", "split", "bf16", "bf16", "nearest"),
    AdamRow("bf16", "bf16", "bf16", "bf16", "stochastic"),
    AdamRow("bf16", "bf16", "bf16", "bf16", "nearest"),
    AdamRow("bf16", "split", "8bit", "bf16", "stochastic"),
    AdamRow("bf16", "fp32", "fp32", "bf16", "nearest", "whole"),
    AdamRow("bf16", "split", "bf16", "bf16", "stochastic", "whole"),
)
"""Every row, in the order in which they are told."""


# ---- contestants: what does a row's work, or moves its bytes -------------------------------------
#
#     tiermem     the native kernel, and for a whole step the norm before it
#     torch       its fused AdamW, on our arrays where all of them have one dtype; a whole step written with it has fp32
#                 gradients of its own
#     deepspeed   DeepSpeedCPUAdam behind peer_operators.py
#     yardstick   tests/native/bare_stream: the same arrays, read and written in the fastest way found, and nothing else
#     arithmetic  the same program: our kernel over arrays that stay in the first-level cache, as many parameters
#
# The last three are programs that are asked line by line (witnesses.py). A row is limited by the
# slower of the last two.

PASSES = 5
_LR = 1e-4
_DECAY = 0.01
_BETAS = (0.9, 0.999)
_EPS = 1e-8


def _parts_of(row: AdamRow, numel: int) -> StepParts:
    """The arrays that our step and torch's work on."""
    scales = [(num_scales(numel), torch.uint8)] if row.moments == "8bit" else []
    moment = [(numel, _DTYPES[row.moments]), *scales]
    master = [] if row.master == row.weight else [(numel, _DTYPES[row.master])]
    weight, grad, *others = new_arrays(
        (numel, _DTYPES[row.weight]), (numel, _DTYPES[row.grads]), *master, *moment, *moment
    )
    weight.fill_(0.5)
    grad.fill_(1e-3)
    own_master = others.pop(0) if master else None
    if own_master is not None and row.master == "fp32":
        own_master.fill_(0.5)
    return StepParts(
        weight,
        own_master,
        grad,
        [Quantised(*others[:2]), Quantised(*others[2:])] if scales else others,
    )


def _our_step(row: AdamRow, parts: StepParts, workers: Workers) -> None:
    factor = 1.0
    if row.kind == "whole":
        norm = math.sqrt(sum(store_gradient(workers, None, parts.grad))) / SCALE
        factor = min(1.0, MAX_NORM / (norm + 1e-6)) / SCALE
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
    optimizer_step(workers, rule, parts, dither)


def _torch_step(row: AdamRow, parts: StepParts) -> Callable[[], object]:
    low = parts.weight
    grad = parts.grad
    assert low is not None
    param = torch.nn.Parameter(low if parts.master is None else parts.master)
    param.grad = new_arrays((grad.numel(), torch.float32))[0] if row.kind == "whole" else grad
    adam = torch.optim.AdamW(
        [param], lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, fused=True
    )
    exp_avg, exp_avg_sq = parts.moments
    adam.state[param] = {"step": torch.tensor(1.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    return (
        functools.partial(whole_step, adam, param, low, grad) if row.kind == "whole" else adam.step
    )


def _fastest(step: Callable[[], object]) -> float:
    """Seconds of the fastest of PASSES calls, after a moment of rest."""
    # torch's threads look for more work for some milliseconds after the last; no other is timed
    # beside them
    time.sleep(0.02)
    return min(timeit.repeat(step, number=1, repeat=PASSES))


def _asked(program: LineProgram, verb: str, factor: float = 1.0) -> float:
    return program.ask(f"{verb} {PASSES}", 1, "seconds")[0] * factor


def _timers(
    row: AdamRow, numel: int, workers: Workers, programs: Mapping[str, LineProgram]
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Makes ready the contestants that have a row; each with a function for the seconds of its
    fastest pass."""
    for program in programs.values():
        program.ask("release", 1, "a number")
    parts = _parts_of(row, numel)
    our_step = functools.partial(_our_step, row, parts, workers)
    our_step()
    yield "tiermem", functools.partial(_fastest, our_step)
    if row.peer_kind is not None:
        torch_step = _torch_step(row, parts)
        torch_step()
        yield "torch", functools.partial(_fastest, torch_step)
    if "deepspeed" in programs and row.peer_kind is not None and row.rounding == "nearest":
        programs["deepspeed"].ask(
            f"prepare {row.peer_kind} {numel} {workers.num_threads}", 1, "bytes"
        )
        yield "deepspeed", functools.partial(_asked, programs["deepspeed"], "step")
    if "yardstick" in programs:
        streams = " ".join(f"{num_bytes}{how}" for num_bytes, how in row.streams)
        line = f"prepare {numel} {workers.num_threads} {streams}"
        programs["yardstick"].ask(line, 2, "seconds plain and streaming")
        factor = row.bytes_per_param / row.stream_bytes  # scales of 8-bit moments are no whole byte
        yield "yardstick", functools.partial(_asked, programs["yardstick"], "pass", factor)
        words = (row.kind, row.weight, row.master, row.moments, row.grads, row.rounding)
        line = f"arithmetic {workers.num_threads} {' '.join(words)}"
        yield (
            "arithmetic",
            lambda: programs["yardstick"].ask(line, 1, "seconds a parameter")[0] * numel,
        )


# ---- the command ---------------------------------------------------------------------------------

_UNIT = 1024  # the yardstick takes multiples of it
# per parameter, in the largest row; ours and torch's
_HELD_BYTES = 18 + 4
_HELD_BY_YARDSTICK = 18
_HELD_BY_PEER = 20


def bench_adam(options: AdamBenchOptions, console: Console) -> int:
    """Measures, prints and writes what was asked for; returns the exit status. Raises ValueError
    and OSError."""
    chosen = chosen_rows(options)
    numel = options.num_params // _UNIT * _UNIT
    held = (
        _HELD_BYTES
        + _HELD_BY_YARDSTICK * bool(options.yardstick)
        + _HELD_BY_PEER * bool(options.peer_python)
    )
    check_memory(
        numel * held,
        f"--params {options.num_params} takes up to {format_bytes(numel * held)} at once",
        "ask for fewer",
    )
    start = time.monotonic()
    isa = choose_isa(-1 if options.isa is None else ISAS.index(options.isa))
    try:
        rows = measure(options, chosen, numel, console)
    finally:
        choose_isa()
    facts = machine_facts()
    _print_rows(
        rows,
        f"AdamW over {numel:,} parameters, {rows[0]['threads']} threads, {isa}, medians of "
        f"{options.loops} loops",
        caption(facts),
        console,
    )
    options.save_json(options.report(facts, start, rows=rows))
    return 0


def chosen_rows(options: AdamBenchOptions) -> list[AdamRow]:
    """The rows to measure. Raises ValueError when there is none."""
    rows = [
        row for row in ROWS if not options.rows or any(part in row.name for part in options.rows)
    ]
    if not rows:
        names = "; ".join(row.name for row in ROWS)
        raise ValueError(
            f"--row {', '.join(options.rows)} is part of no row's name; they are: {names}"
        )
    return rows


def measure(
    options: AdamBenchOptions, chosen: Sequence[AdamRow], numel: int, console: Console
) -> list[dict[str, Any]]:
    """Every chosen row: in each loop the contestants take turns. Blocks; raises OSError."""
    threads = options.threads or fair_threads()
    with contextlib.ExitStack() as closing:
        workers = Workers(threads, fair_cores())
        closing.callback(workers.close)
        closing.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        programs = {}
        # its operator compiles before the first answer, with -O3 without a GPU
        if options.peer_python is not None:
            command = peer_program(options.peer_python, "adam", OMP_NUM_THREADS=str(threads))
            programs["deepspeed"] = closing.enter_context(LineProgram(command, "DeepSpeedCPUAdam"))
        if options.yardstick is not None:
            program = str(options.yardstick)
            programs["yardstick"] = closing.enter_context(LineProgram([program], program))
            if options.isa is not None:
                programs["yardstick"].ask(f"isa {ISAS.index(options.isa)}", 1, "its number")
        rows = []
        for row in chosen:
            with console.status(f"measuring {row.name}"):
                rows.append(
                    row_of(
                        row,
                        numel,
                        _seconds_of(row, numel, options.loops, workers, programs),
                        threads,
                    )
                )
        return rows


def _seconds_of(
    row: AdamRow, numel: int, loops: int, workers: Workers, programs: Mapping[str, LineProgram]
) -> dict[str, list[float]]:
    """Seconds of each loop by contestant. The row's arrays are gone when it returns."""
    timers = dict(_timers(row, numel, workers, programs))
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(loops):
        for name, timer in timers.items():
            seconds[name].append(timer())
    return seconds


def row_of(
    row: AdamRow, numel: int, seconds: dict[str, list[float]], threads: int
) -> dict[str, Any]:
    """A row of the report from the seconds of each loop: medians, and the medians of the loops'
    ratios."""
    medians = {name: statistics.median(series) for name, series in seconds.items()}
    ratios = {
        name: statistics.median(
            their / our for their, our in zip(series, seconds["tiermem"], strict=True)
        )
        for name, series in seconds.items()
    }
    own = medians.pop("tiermem")
    bare = medians.pop("yardstick", None)
    cached = medians.pop("arithmetic", None)
    limits = zip(
        *(seconds[name] for name in ("yardstick", "arithmetic") if name in seconds), strict=True
    )
    of_limit = [max(limit) / our for limit, our in zip(limits, seconds["tiermem"], strict=False)]
    return {
        "name": row.name,
        **row._asdict(),
        "threads": threads,
        "num_params": numel,
        "bytes_per_param": row.bytes_per_param,
        "ns_per_param": own / numel * 1e9,
        "ns_per_param_loops": [each / numel * 1e9 for each in seconds["tiermem"]],
        "gbps": row.bytes_per_param * numel / own / 1e9,
        "stream_gbps": None if bare is None else row.bytes_per_param * numel / bare / 1e9,
        "stream_fraction": ratios.get("yardstick"),
        "arithmetic_ns_per_param": None if cached is None else cached / numel * 1e9,
        "arithmetic_fraction": ratios.get("arithmetic"),
        "limit_fraction": statistics.median(of_limit) if of_limit else None,
        "peers": {
            name: {"ns_per_param": s / numel * 1e9, "speedup": ratios[name]}
            for name, s in medians.items()
        },
    }


def _print_rows(rows: Sequence[dict[str, Any]], title: str, facts: str, console: Console) -> None:
    shares = {
        "of the stream": "stream_fraction",
        "of its maths": "arithmetic_fraction",
        "of the slower": "limit_fraction",
    }
    shown = table(
        title,
        "weight + master / moments",
        ">bytes",
        ">ns",
        ">GB/s",
        *(f">{share}" for share in shares),
        ">torch ns",
        ">DeepSpeed ns",
        caption=facts,
    )
    for row in rows:
        told = ["-" if row[key] is None else f"{row[key]:.1%}" for key in shares.values()]
        peers = [row["peers"].get(name) for name in ("torch", "deepspeed")]
        told += [
            "-" if each is None else f"{each['ns_per_param']:.4f} ({each['speedup']:.2f}x)"
            for each in peers
        ]
        shown.add_row(
            row["name"],
            f"{row['bytes_per_param']:.4g}",
            f"{row['ns_per_param']:.4f}",
            f"{row['gbps']:.1f}",
            *told,
        )
    console.print(shown)
