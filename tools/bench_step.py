"""bench step: optimizer steps over states on NVMe, held to what the disk can do.

A model of blocks is sharded with parameters, gradients and states on NVMe; gradients are given once, then the step is repeated
and timed. The roofline is the time that a bare loop (tests/native/bare_mixed, built by `make native-test`) needs for the same
reads and writes at once, measured between the steps on the same disk; without that program the queue itself moves the bytes,
which is said. Bytes are those of the queue's completions, checked against /proc/self/io.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from tiermem.optim.adam import AdamW
from tiermem.policy import IoSettings, OffloadPolicy, Tier
from tiermem.swap.native import READ, WRITE, Map, Op, Queue
from tiermem.swap.record import Event
from tiermem.zero.shards import Shards, shard

_WIDTH = 2048
_BLOCK_NUMEL = 4 * _WIDTH * _WIDTH
_PIECE_BYTES = 4 << 20
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class _Blocks(nn.Module):
    """Nothing but parameters, in units of 16 M elements."""

    def __init__(self, num_params: int, dtype: torch.dtype) -> None:
        super().__init__()
        count = max(1, round(num_params / _BLOCK_NUMEL))
        self.layers = nn.ModuleList(_Block(dtype) for _ in range(count))


class _Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((_WIDTH, _WIDTH), 0.01, dtype=dtype)) for _ in range(4))


def measure_steps(
    path: Path,
    num_params: int,
    precision: str,
    loops: int,
    resident_bytes: int,
    pipeline: bool,
    yardstick: Path | None,
    engine: str = "auto",
) -> dict[str, Any]:
    """Measures and returns the figures; leaves nothing on the path. Blocks; raises OSError and ValueError."""
    if precision not in _DTYPES:
        raise ValueError(f"precision is {precision!r}; allowed are {', '.join(_DTYPES)}")
    if loops < 1:
        raise ValueError(f"loops is {loops}; it must be at least 1")
    dtype = _DTYPES[precision]
    policy = OffloadPolicy(
        params=Tier.NVME,
        optim=Tier.NVME,
        grads=Tier.NVME,
        paths=[path],
        resident_bytes=resident_bytes,
        pipeline_read=pipeline,
        pipeline_write=pipeline,
        io=IoSettings(engine=engine),
    )
    model = _Blocks(num_params, dtype)
    with shard(model, policy) as shards:
        optimizer = AdamW(model.parameters(), lr=1e-4)
        for live in shards.units:
            for part in live.unit.shards:
                part.param.grad = torch.full(part.shape, 1e-3, dtype=dtype)
            shards.homes.receive(live.unit)
            shards.homes.show(live.unit)
        shards.homes.settle()
        optimizer.step()  # writes states that were never read: not what is measured
        steps, rooflines = [], []
        before, kernel_before = _counts(shards), _kernel_counts()
        for _ in range(loops):
            start = time.monotonic()
            optimizer.step()
            shards.residency.empty()  # ends what was fetched ahead for a forward that does not come
            steps.append(time.monotonic() - start)
        after, kernel_after = _counts(shards), _kernel_counts()
        read, written = ((b - a) // loops for a, b in zip(before, after, strict=True))
        rooflines = _measure_roofline(path, read, written, loops, yardstick)
        events = list(shards.store.recorder.events)
    step_s, roofline_s = statistics.median(steps), statistics.median(rooflines)
    return {
        "num_params": sum(p.numel() for p in model.parameters()),
        "step_s": steps,
        "step_s_median": step_s,
        "read_bytes": read,
        "written_bytes": written,
        "read_gbps": read / step_s / 1e9,
        "written_gbps": written / step_s / 1e9,
        "compute_s": _lane(events, "compute") / (loops + 1),
        "wait_s": _lane(events, "wait") / (loops + 1),
        "roofline_s": roofline_s,
        "roofline_by": "bare loop" if yardstick else "the queue, without arithmetic",
        "roofline_fraction": roofline_s / step_s,
        "kernel_read_bytes": (kernel_after[0] - kernel_before[0]) // loops,
        "kernel_written_bytes": (kernel_after[1] - kernel_before[1]) // loops,
        "engine": shards.store.stats().engine,
    }


def print_step(figures: dict[str, Any], json_file: Path | None, console: Console) -> None:
    """Shows the figures as a table and writes them as JSON when asked."""
    table = Table(title=f"optimizer step, {figures['num_params'] / 1e6:.0f} M parameters on NVMe")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("step, median (min to max)", _spread(figures["step_s"]))
    table.add_row("read", f"{figures['read_bytes'] / 1e9:.2f} GB at {figures['read_gbps']:.2f} GB/s")
    table.add_row("written", f"{figures['written_bytes'] / 1e9:.2f} GB at {figures['written_gbps']:.2f} GB/s")
    table.add_row("computing / waiting", f"{figures['compute_s']:.3f} s / {figures['wait_s']:.3f} s")
    table.add_row(f"roofline ({figures['roofline_by']})", f"{figures['roofline_s']:.3f} s")
    table.add_row("fraction reached", f"{figures['roofline_fraction']:.2f}")
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


def _measure_roofline(path: Path, read: int, written: int, loops: int, yardstick: Path | None) -> list[float]:
    size = -(-max(read, written) // _PIECE_BYTES) * _PIECE_BYTES
    file = path / f".tiermem-roofline-{os.getpid()}"
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        _move(fd, 0, size)  # first writes to preallocated blocks are slower: not measured
        if yardstick is None:
            return [_move(fd, read, written) for _ in range(loops)]
        command = [str(yardstick), str(file), str(_down(read)), str(_down(written)), str(loops)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [float(line) for line in done.stdout.split()]
    finally:
        os.close(fd)
        file.unlink()


def _move(fd: int, read: int, written: int) -> float:
    """Seconds in which the queue reads and writes a file at once, 64 MiB in flight each way."""
    memory = Map(_PIECE_BYTES * 32)
    memory.commit(0, memory.num_bytes)
    queue = Queue(regions=[(memory.address, memory.num_bytes)], path_of=lambda fd: "the roofline's file")
    tags: list[int] = []
    start = time.monotonic()
    for offset in range(0, max(read, written), _PIECE_BYTES):
        place = (offset // _PIECE_BYTES) % 16
        wanted = ((READ, read, place), (WRITE, written, 16 + place))
        ops = [
            Op(k, fd, memory.address + p * _PIECE_BYTES, _PIECE_BYTES, offset) for k, end, p in wanted if offset < end
        ]
        tags.append(queue.submit(ops))
        if len(tags) >= 16:
            _answered(queue, tags.pop(0))
    while tags:
        _answered(queue, tags.pop(0))
    seconds = time.monotonic() - start
    queue.close()
    memory.close()
    return seconds


def _answered(queue: Queue, tag: int) -> None:
    answer = queue.wait(tag)
    assert answer is not None
    queue.raise_for(answer)


def _counts(shards: Shards) -> tuple[int, int]:
    stats = shards.store.stats()
    return stats.nvme_read_bytes, stats.nvme_written_bytes


def _kernel_counts() -> tuple[int, int]:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def _lane(events: list[Event], lane: str) -> float:
    return sum(e.end_ns - e.start_ns for e in events if e.lane == lane) * 1e-9


def _down(num_bytes: int) -> int:
    return num_bytes // 4096 * 4096


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"
