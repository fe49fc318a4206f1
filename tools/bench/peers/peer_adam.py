"""A peer's AdamW behind a protocol of lines, to be run by the interpreter that has it; imports nothing of ours.

    python -I peer_adam.py           prepare KIND NUMEL THREADS -> the bytes it holds
                                     step PASSES -> seconds of the fastest pass
                                     release -> 0
                                     quit

KIND     fp32     DeepSpeedCPUAdam on fp32 parameters, gradients and moments
         bf16     the same in bf16 throughout
         whole    from bf16 gradients, with scale and clipping, to bf16 parameters, written with its parts: norm by torch,
                  cast to fp32, unscale and clip, DeepSpeedCPUAdam on fp32 masters, cast to bf16

Arrays lie in huge pages, an odd number of pages apart, as those of the other contestants. The operator compiles at
first use, before the first command is answered: DS_ACCELERATOR=cpu builds it with -O3.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_PAGE_BYTES = 4096
_SCALE, _MAX_NORM = 1024.0, 1.0


def main() -> int:
    """Obeys commands on stdin until `quit`, and answers each with a line; 1 after an error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what DeepSpeed prints on stdout is no answer
    peer = Peer()
    for line in sys.stdin:
        words = line.split()
        if words == ["quit"]:
            return 0
        try:
            answers.write(f"{peer.obey(*words)}\n")
        except Exception as error:  # whatever it is, the benchmark shall hear of it
            answers.write(f"error {type(error).__name__}: {' '.join(str(error).split())}\n")
            return 1
    return 0


class Peer:
    """The arrays of one kind, kept between passes."""

    def __init__(self) -> None:
        import torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

        self._torch: Any = torch
        self._adam: Any = DeepSpeedCPUAdam
        self._step: Callable[[], None] = lambda: None
        self._memory: Any = None
        self._used = 0

    def obey(self, command: str, *words: str) -> str:
        """Does one command and returns the answer. Raises ValueError for another."""
        if command == "prepare":
            kind, numel, threads = words
            return str(self.prepare(kind, int(numel), int(threads)))
        if command == "release":
            self._step, self._memory = lambda: None, None
            return "0"
        if command == "step":
            return f"{self.step(int(words[0])):.9f}"
        raise ValueError(f"{command} is not a command; prepare, step, release and quit are")

    def prepare(self, kind: str, numel: int, threads: int) -> int:
        """Makes the arrays and steps them once; returns their bytes."""
        torch = self._torch
        torch.set_num_threads(threads)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "whole": torch.float32}[kind]
        each = _padded(numel * dtype.itemsize)
        extra = 2 * _padded(2 * numel) if kind == "whole" else 0
        self._map(4 * each + extra)
        param, grad, exp_avg, exp_avg_sq = (self._array(numel, dtype) for _ in range(4))
        with torch.no_grad():
            grad.fill_(1e-3)
            param.fill_(0.5)
        param = torch.nn.Parameter(param)
        keeps_fp32 = dtype == torch.float32
        adam = self._adam([param], lr=1e-4, weight_decay=0.01, adamw_mode=True, fp32_optimizer_states=keeps_fp32)
        adam.state[param].update({"step": 0, "exp_avg": exp_avg.zero_(), "exp_avg_sq": exp_avg_sq.zero_()})
        param.grad = grad
        if kind == "whole":
            low, low_grad = (self._array(numel, torch.bfloat16) for _ in range(2))
            low_grad.fill_(1e-3)
            self._step = lambda: self._whole(adam, param, low, low_grad)
        else:
            self._step = adam.step
        self._step()
        return 4 * each + extra

    def step(self, num_passes: int) -> float:
        """Seconds of the fastest of several steps."""
        best = math.inf
        for _ in range(num_passes):
            start = time.perf_counter()
            self._step()
            best = min(best, time.perf_counter() - start)
        return best

    def _whole(self, adam: Any, param: Any, low: Any, low_grad: Any) -> None:
        torch = self._torch
        with torch.no_grad():
            norm = torch.linalg.vector_norm(low_grad, dtype=torch.float32).item() / _SCALE
            param.grad.copy_(low_grad)
            param.grad.mul_(min(1.0, _MAX_NORM / (norm + 1e-6)) / _SCALE)
            adam.step()
            low.copy_(param)

    def _map(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0

    def _array(self, numel: int, dtype: Any) -> Any:
        array = self._torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=self._used)
        self._used += _padded(numel * dtype.itemsize)
        return array.zero_()


def _padded(num_bytes: int) -> int:
    """An odd number of pages: arrays a power of two apart would evict each other from the first-level cache."""
    return ((-(-num_bytes // _PAGE_BYTES) + 3) | 1) * _PAGE_BYTES


if __name__ == "__main__":
    sys.exit(main())
