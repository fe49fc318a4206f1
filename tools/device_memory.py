"""DeviceMemory: what a run takes of its accelerator's memory, as figures and as words.

    allocated   bytes of tensors                     reserved   what torch has from the driver for them, its cache included
    free        what could still be allocated        total      the whole card

The figures travel as `device_memory` in messages and in run.json; a run on the CPU has no such key, and prints no such line.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiermem.tools.byte_size import format_bytes
from tiermem.tools.job import Job

if TYPE_CHECKING:
    import torch

Figures = dict[str, Any]


class OutOfDeviceMemory(RuntimeError):
    """The accelerator's memory does not hold what the run needs; the message says what to change."""


def device_fields(device: torch.device | None = None) -> dict[str, Figures]:
    """`device_memory` and its figures, for a message; empty on the CPU. None: the device that this process computes on."""
    from tiermem.swap.accelerator import find_device, free_and_total, is_accelerator, usage

    device = device or find_device()
    if not is_accelerator(device):
        return {}
    free, total = free_and_total(device)
    return {
        "device_memory": {**usage(device)._asdict(), "free_bytes": free, "total_bytes": total, "device": str(device)}
    }


def forget_peak() -> None:
    """Gives back what a measurement has cached on the accelerator, so that peaks are those of what comes now."""
    from tiermem.swap.accelerator import find_device, is_accelerator, reset_peak

    device = find_device()
    if is_accelerator(device):
        gc.collect()
        reset_peak(device)


def describe_device(figures: Mapping[str, Any]) -> str:
    """Now, at the peak, and the card: on one line."""
    now, reserved, peak, peak_reserved, total = (
        format_bytes(figures[f"{key}_bytes"])
        for key in ("allocated", "reserved", "peak_allocated", "peak_reserved", "total")
    )
    return f"{figures['device']} {now} ({reserved} reserved) of {total}, peak {peak} ({peak_reserved})"


def planned_bytes(plan: Sequence[Sequence[Any]]) -> int:
    """Bytes that a plan's rows (what, tier, bytes, why) have on DEVICE."""
    return sum(num_bytes for _, tier, num_bytes, _ in plan if tier == "DEVICE")


def out_of_memory_in(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The device's refusal that an error is, or was raised because of; None for any other error."""
    import torch

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def explain_out_of_memory(
    refusal: BaseException, figures: Mapping[str, Any], plan: Sequence[Sequence[Any]] | None, phase: str, job: Job
) -> str:
    """One sentence: what was asked for and when, what is reserved, what the plan has on DEVICE, what to change."""
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(refusal))
    wanted = f"{asked[1]} more were wanted" if asked else "more was wanted"
    reserved, allocated, total, free = (
        format_bytes(figures[f"{key}_bytes"]) for key in ("reserved", "allocated", "total", "free")
    )
    rests = "" if plan is None else f"; the plan keeps {format_bytes(planned_bytes(plan))} on DEVICE{_rows(plan)}"
    return (
        f"{figures['device']} has no memory left in {phase}: {wanted}, torch has reserved {reserved} of {total} ({allocated} "
        f"in tensors) and {free} are free{rests}: {_remedy(job, is_made=plan is not None)}"
    )


def _rows(plan: Sequence[Sequence[Any]]) -> str:
    rows = [f"{what} {format_bytes(num_bytes)}" for what, tier, num_bytes, _ in plan if tier == "DEVICE"]
    return f" ({', '.join(rows)})" if rows else ""


def _remedy(job: Job, is_made: bool) -> str:
    """What would take less: of activations too, once the model is made."""
    smaller = [f"a --batch below {job.batch}"] if is_made and job.batch > 1 else []
    smaller += [f"a --seq below {job.seq}"] if is_made else ["a smaller model"]
    smaller += ["--checkpointing"] if is_made and not job.is_checkpointing else []
    zero = job.config.get("zero_optimization") or {}
    offloads = [zero.get(f"offload_{what}") or {} for what in ("param", "optimizer")]
    if not all(section.get("device") in ("cpu", "nvme") for section in offloads):
        smaller += ["--offload cpu"]
    return f"give {', '.join(smaller[:-1])}{' or ' * (len(smaller) > 1)}{smaller[-1]}"
