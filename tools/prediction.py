"""Prediction: what a training is expected to take, said before its first step; reports.py holds it against what it took.

    maths     two small copies of the model, timed in the trainer's own process before the model is built (calibrate.py),
              where the cap leaves room for them
    disk      the rates measured at the start, summed over the file systems that the paths lie on (disk_rate.py)
    bytes     the plan and the forecast: nothing is measured
    memory    resident after the imports (measured) + the store (planned) + activations (budget.py's arithmetic)

The trainer sends it as JSON; a prediction that cannot be made says why in `not_made`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tiermem.tools.budget import ModelSizes, activation_terms
from tiermem.tools.calibrate import MOST_KERNEL_NUMEL, MOST_LAYERS, measure_compute, measure_kernels
from tiermem.tools.job import Job

if TYPE_CHECKING:
    from tiermem.engine import Engine
    from tiermem.forecast import Forecast
    from tiermem.forecast.rates import Compute

_KERNEL_ROOM_BYTES = 16  # per parameter that is stepped to measure
_LEAST_KERNEL_NUMEL = 1 << 20
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_NO_DISK = 1e12  # bytes a second: nothing is read or written

Figures = dict[str, Any]


class Maths(NamedTuple):
    """What this machine takes for the model's maths, and its rate of the optimizer's."""

    compute: Compute
    kernel_bytes_s: float


def measure_maths(job: Job, room_bytes: int | None) -> Maths | str:
    """Times the maths within `room_bytes` of memory (None: no limit); returns why not, where it cannot. Blocks."""
    try:
        copies = _copy_bytes(job)
        if room_bytes is not None and copies > room_bytes:
            return f"two small copies of the model take {copies} bytes and the cap leaves {room_bytes}"
        compute = measure_compute(job.shape, job.precision, job.batch, job.seq, job.is_checkpointing)
    except ValueError as error:
        return str(error)
    numel = MOST_KERNEL_NUMEL if room_bytes is None else min(MOST_KERNEL_NUMEL, room_bytes // (2 * _KERNEL_ROOM_BYTES))
    return Maths(compute, measure_kernels(max(_LEAST_KERNEL_NUMEL, numel)))


def predict(engine: Engine, job: Job, maths: Maths | str, disk: Figures | None, resident_bytes: int) -> Figures:
    """The figures of a step and of memory, as JSON takes them; `disk` holds rates in bytes per second."""
    if isinstance(maths, str):
        return {"not_made": maths}
    forecast = _forecast(engine, maths, disk)
    plan = engine.shards.plan
    terms = activation_terms(ModelSizes.of(job.shape), job.batch * job.seq, job.precision, job.is_checkpointing)
    activations = sum(term.num_bytes for term in terms)
    is_gpu = engine.shards.device.type == "cuda"
    return {
        **{f"{phase}_s": seconds for phase, seconds in forecast.seconds.items()},
        "nvme_read_bytes": forecast.edge_bytes("NVME -> HOST"),
        "nvme_written_bytes": forecast.edge_bytes("HOST -> NVME"),
        "resident_bytes": resident_bytes,
        "host_bytes": plan.host_bytes,
        "activation_bytes": activations,
        "disk_bytes": plan.disk_bytes,
        "peak_bytes": None if is_gpu else resident_bytes + plan.host_bytes + activations,
        "busy_s": {lane: dict(by) for lane, by in forecast.busy_s.items()},
        "rates": {"compute": maths.compute._asdict(), "kernel_bytes_s": maths.kernel_bytes_s, "disk": disk},
    }


def _forecast(engine: Engine, maths: Maths, disk: Figures | None) -> Forecast:
    """Plays a step of the model as it was divided and planned."""
    from tiermem.forecast import Rates, forecast_step, uses_of
    from tiermem.zero.ranks.topology import ranks_per_node
    from tiermem.zero.unit import divide

    shards = engine.shards
    division = divide(engine.module, shards.policy, shards.topology.num_shards)
    for unit, live in zip(division.units, shards.units, strict=True):
        unit.is_resident = live.unit.is_resident
    rates = Rates(
        disk_read_bytes_s=disk["read_bytes_s"] if disk else _NO_DISK,
        disk_write_bytes_s=disk["write_bytes_s"] if disk else _NO_DISK,
        kernel_bytes_s=maths.kernel_bytes_s,
    )
    return forecast_step(
        division,
        shards.plan,
        shards.policy,
        shards.topology,
        uses_of(engine.module, division, maths.compute),
        rates,
        shards.device.type == "cuda",
        ranks_per_node(),
        engine.gradient_accumulation_steps(),
    )


def _copy_bytes(job: Job) -> int:
    """Memory of the larger copy, with its gradients and activations. Raises ValueError for a shape without sizes."""
    sizes = ModelSizes.of(job.shape)
    numel = MOST_LAYERS * sizes.block_numel + 2 * sizes.vocabulary * sizes.hidden
    terms = activation_terms(sizes._replace(num_layers=MOST_LAYERS), job.batch * job.seq, job.precision, False)
    return numel * _ELEMENT_BYTES[job.precision] + sum(term.num_bytes for term in terms)
