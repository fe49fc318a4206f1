"""Prediction: what a training is expected to take, said before its first step; reports.py holds it against what it took.

    maths     a small copy of the model, trained for a moment in the trainer's own process before the model is built
              (calibrate.py), where the cap leaves room for it
    disk      the rates measured at the start, summed over the file systems that the paths lie on (disk_rate.py)
    bytes     the plan and the forecast: nothing is measured
    memory    resident after the imports (measured) + the store (planned) + activations (budget.py's arithmetic); of an
              accelerator: what the plan keeps there, units present at once, activations

The trainer sends it as JSON; a prediction that cannot be made says why in `not_made`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiermem.tools.budget import ModelSizes
from tiermem.tools.calibrate import MOST_KERNEL_NUMEL, Maths, copy_bytes, measure_kernels, measure_maths, measure_sums
from tiermem.tools.job import Job

if TYPE_CHECKING:
    from tiermem.engine import Engine
    from tiermem.forecast import Rates

_KERNEL_ROOM_BYTES = 16  # per parameter that is stepped to measure
_LEAST_KERNEL_NUMEL = 1 << 20
_NO_DISK = 1e12  # bytes a second: nothing is read or written

Figures = dict[str, Any]


class Measured(NamedTuple):
    """What this machine takes for the model's maths, and its rates of the optimizer's and of checksums."""

    maths: Maths
    kernel_bytes_s: float
    sum_bytes_s: float


def measure(job: Job, room_bytes: int | None) -> Measured | str:
    """Times the maths within `room_bytes` of memory (None: no limit); returns why not, where it cannot. Blocks."""
    import torch

    folders = [Path(path) for path in job.nvme_paths]
    try:
        copy = copy_bytes(job.shape, job.precision, bool(folders))
        if room_bytes is not None and copy > room_bytes:
            return f"a small copy of the model takes {copy} bytes and the cap leaves {room_bytes}"
        maths = measure_maths(job.shape, job.precision, job.batch, job.seq, job.is_checkpointing, folders)
    except ValueError as error:
        return str(error)
    except torch.OutOfMemoryError:
        return "a small copy of the model does not fit the accelerator's memory"
    numel = MOST_KERNEL_NUMEL if room_bytes is None else min(MOST_KERNEL_NUMEL, room_bytes // (2 * _KERNEL_ROOM_BYTES))
    return Measured(maths, measure_kernels(max(_LEAST_KERNEL_NUMEL, numel)), measure_sums())


def predict(engine: Engine, job: Job, measured: Measured | str, disk: Figures | None, resident_bytes: int) -> Figures:
    """The figures of a step and of memory, as JSON takes them; `disk` holds rates in bytes per second."""
    if isinstance(measured, str):
        return {"not_made": measured}
    from tiermem.forecast import forecast_shards
    from tiermem.swap.accelerator import is_accelerator
    from tiermem.tools.planned import activation_lines, passing_lines

    rates = rates_of(measured, disk)
    forecast = forecast_shards(engine.shards, measured.maths.compute, rates, engine.gradient_accumulation_steps())
    plan = engine.shards.plan
    is_gpu = is_accelerator(engine.shards.device)
    sizes, num_tokens = ModelSizes.of(job.shape), job.batch * job.seq
    beside = activation_lines(sizes, num_tokens, job.precision, job.is_checkpointing, is_gpu)
    activations = sum(line.num_bytes for line in beside)
    units = passing_lines([live.unit for live in engine.shards.units], engine.shards.policy)
    on_device = plan.device_bytes + activations + sum(line.num_bytes for line in units)
    return {
        **{f"{phase}_s": seconds for phase, seconds in forecast.seconds.items()},
        "nvme_read_bytes": forecast.edge_bytes("NVME -> HOST"),
        "nvme_written_bytes": forecast.edge_bytes("HOST -> NVME"),
        "resident_bytes": resident_bytes,
        "host_bytes": plan.host_bytes,
        "activation_bytes": activations,
        "disk_bytes": plan.disk_bytes - (0 if _freezes(engine, job) else plan.frozen_disk_bytes),
        "peak_bytes": None if is_gpu else resident_bytes + plan.host_bytes + activations,
        "device_bytes": on_device if is_gpu else None,
        "busy_s": {lane: dict(by) for lane, by in forecast.busy_s.items()},
        "rates": {"compute": measured.maths.compute._asdict(), **dataclasses.asdict(rates), "disk": disk},
    }


def rates_of(measured: Measured, disk: Figures | None) -> Rates:
    """Everything measured, as the forecast takes it."""
    from tiermem.forecast import Rates

    return Rates(
        disk_read_bytes_s=disk["read_bytes_s"] if disk else _NO_DISK,
        disk_write_bytes_s=disk["write_bytes_s"] if disk else _NO_DISK,
        kernel_bytes_s=measured.kernel_bytes_s,
        gradient_bytes_s=measured.maths.gradient_bytes_s,
        sum_bytes_s=measured.sum_bytes_s,
        use_s=measured.maths.use_s,
    )


def _freezes(engine: Engine, job: Job) -> bool:
    """Whether steps write beside what a checkpoint holds; it takes its room with the first step after one."""
    return job.save_every is not None or engine.shards.policy.durability == "step"
