"""Contestants of `tiermem bench adam`: whoever does a row's work, or moves its bytes, behind one face.

    Ours        the native kernel                                  Torch       fused AdamW on the same arrays
    Streams     tests/native/bare_stream: the bytes alone          Peer        DeepSpeedCPUAdam, in an interpreter that has it

`prepare(row, numel)` makes what a row needs and says whether the contestant has it at all; `seconds()` is the fastest of
PASSES passes, as many as the yardstick makes. Arrays lie in huge pages, an odd number of pages apart.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from tiermem.swap.native import Map, Workers, optimizer_step, store_gradient
from tiermem.swap.parts import Dither, Moment, Quantised, StepParts, StepRule, num_scales
from tiermem.tools.adam_rows import AdamRow
from tiermem.tools.line_program import LineProgram

PASSES = 5
_PAGE_BYTES = 4096
_SCALE, _MAX_NORM = 1024.0, 1.0
_REST_S = (
    0.02  # torch's threads look for more work for some milliseconds after the last; nobody shall be timed beside them
)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PEER_SCRIPT = Path(__file__).parent / "peer_adam.py"
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
