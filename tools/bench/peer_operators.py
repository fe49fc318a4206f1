"""DeepSpeed's operators behind a protocol of lines, to be run by the interpreter that has them;
imports nothing of ours.

adam.py uses the whole step, too.

    python -I peer_operators.py aio FILE       read BLOCK DEPTH BYTES, write the same -> seconds user_s system_s
    python -I peer_operators.py adam           prepare KIND NUMEL THREADS -> the bytes it holds
                                               step PASSES -> seconds of the fastest pass
                                               release -> 0
                                               quit ends both

An operator compiles at first use, before the first command is answered: DS_ACCELERATOR=cpu builds
it with -O3.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch


def main() -> int:
    """Obeys commands on stdin until `quit`, and answers each with a line; 1 after an error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what DeepSpeed prints on stdout is no answer
    operator: PeerAdam | Aio | None = None
    for line in sys.stdin:
        words = line.split()
        if words == ["quit"]:
            return 0
        try:
            operator = operator or {"adam": PeerAdam, "aio": Aio}[sys.argv[1]](*sys.argv[2:])
            answers.write(f"{operator.obey(*words)}\n")
        except Exception as error:  # whatever it is, the benchmark shall hear of it
            answers.write(f"error {type(error).__name__}: {' '.join(str(error).split())}\n")
            return 1
    return 0


# ---- aio_handle: reads and writes the same file by its means -------------------------------------
#
# One thread, blocks submitted together, into page-locked memory of its own making, as its users set
# it. A pass is one call where memory allows, as its own benchmark does it.

_MOST_BYTES = 1 << 30  # of one call, and of locked memory


class Aio:
    """The operator, and locked memory that is kept between passes."""

    def __init__(self, file: str) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found, unused-ignore]

        self._operator: Any = AsyncIOBuilder().load(verbose=False)
        self._file = file
        self._buffer: Any = None

    def obey(self, command: str, *numbers: str) -> str:
        """Moves the first bytes of the file and returns "seconds user_s system_s". Raises
        ValueError, OSError."""
        if command not in ("read", "write"):
            raise ValueError(
                f"{command} is not something that aio_handle does; it reads and writes"
            )
        block_bytes, depth, num_bytes = map(int, numbers)
        handle = self._operator.aio_handle(block_bytes, depth, False, True, 1)
        move = handle.sync_pread if command == "read" else handle.sync_pwrite
        buffer = self._locked(handle, min(num_bytes, _MOST_BYTES))
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.monotonic()
        for offset in range(0, num_bytes, _MOST_BYTES):
            part = buffer[: min(_MOST_BYTES, num_bytes - offset)]
            if move(part, self._file, offset) != 1:
                raise OSError(
                    f"aio_handle did not {command} {part.numel()} bytes at offset {offset}"
                )
        seconds = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        return (
            f"{seconds:.9f} {after.ru_utime - before.ru_utime:.6f} "
            f"{after.ru_stime - before.ru_stime:.6f}"
        )

    def _locked(self, handle: Any, num_bytes: int) -> Any:
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._buffer = handle.new_cpu_locked_tensor(
                num_bytes, torch.empty(0, dtype=torch.uint8)
            )
            self._buffer.fill_(1)
        return self._buffer


# ---- DeepSpeedCPUAdam ----------------------------------------------------------------------------
#
# KIND     fp32     on fp32 parameters, gradients and moments
#          bf16     the same in bf16 throughout
#          whole    from bf16 gradients, with scale and clipping, to bf16 parameters, written with its parts: norm by torch,
#                   cast to fp32, unscale and clip, DeepSpeedCPUAdam on fp32 masters, cast to bf16
#
# Arrays lie in huge pages, an odd number of pages apart, as those of the other contestants.

_PAGE_BYTES = 4096
SCALE = 1024.0
MAX_NORM = 1.0


class PeerAdam:
    """The arrays of one kind, kept between passes."""

    def __init__(self) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

        self._adam: Any = DeepSpeedCPUAdam
        self._step: Callable[[], object] = lambda: None

    def obey(self, command: str, *words: str) -> str:
        """Does one command and returns the answer. Raises ValueError for another."""
        if command == "prepare":
            kind, numel, threads = words
            return str(self._prepare(kind, int(numel), int(threads)))
        if command == "release":
            self._step = lambda: None
            return "0"
        if command == "step":
            return f"{min(timeit.repeat(self._step, number=1, repeat=int(words[0]))):.9f}"
        raise ValueError(f"{command} is not a command; prepare, step, release and quit are")

    def _prepare(self, kind: str, numel: int, threads: int) -> int:
        """Makes the arrays and steps them once; returns their bytes."""
        torch.set_num_threads(threads)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "whole": torch.float32}[kind]
        whole = [(numel, torch.bfloat16)] * 2 if kind == "whole" else []
        made = new_arrays(*[(numel, dtype)] * 4, *whole)
        param, grad, exp_avg, exp_avg_sq, *low = made
        with torch.no_grad():
            grad.fill_(1e-3)
            param.fill_(0.5)
        param = torch.nn.Parameter(param)
        keeps_fp32 = dtype == torch.float32
        adam = self._adam(
            [param], lr=1e-4, weight_decay=0.01, adamw_mode=True, fp32_optimizer_states=keeps_fp32
        )
        adam.state[param].update({"step": 0, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})
        param.grad = grad
        if low:
            low[1].fill_(1e-3)
            self._step = lambda: whole_step(adam, param, *low)
        else:
            self._step = adam.step
        self._step()
        return sum(_padded(array.nbytes) for array in made)


def whole_step(adam: Any, param: Any, low: torch.Tensor, low_grad: torch.Tensor) -> None:
    """From low-precision gradients to low-precision parameters with torch's parts; `param` has
    gradients of its own."""
    with torch.no_grad():
        norm = torch.linalg.vector_norm(low_grad, dtype=torch.float32).item() / SCALE
        param.grad.copy_(low_grad)
        param.grad.mul_(min(1.0, MAX_NORM / (norm + 1e-6)) / SCALE)
        adam.step()
        low.copy_(param)


def new_arrays(*wanted: tuple[int, torch.dtype]) -> list[torch.Tensor]:
    """Zeros of (numel, dtype) in one map of huge pages, resident. It goes with the last of them."""
    sizes = [_padded(numel * dtype.itemsize) for numel, dtype in wanted]
    memory = mmap.mmap(-1, sum(sizes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    arrays = [
        torch.frombuffer(memory, dtype=dtype, count=numel, offset=start)
        for (numel, dtype), start in zip(wanted, starts, strict=True)
    ]
    return [array.zero_() for array in arrays]


def _padded(num_bytes: int) -> int:
    """An odd number of pages: arrays a power of two apart would evict each other from the
    first-level cache."""
    return ((-(-num_bytes // _PAGE_BYTES) + 3) | 1) * _PAGE_BYTES


if __name__ == "__main__":
    sys.exit(main())
