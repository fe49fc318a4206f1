"""Speed: the rates of a plan's disks, links and kernels, and of its maths: given, tuned, measured
here, or assumed.

Each comes with a line that says where it is from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import torch

from tiermem.config import load_config
from tiermem.forecast.rates import Compute, Rates
from tiermem.swap.memory.accelerator import find_device, is_accelerator
from tiermem.swap.memory.free import free_host_bytes
from tiermem.tools.job.launcher import Job
from tiermem.tools.job.train_job import Config, micro_batch_of, nvme_folders, precision_of
from tiermem.tools.measure.files import why_unmeasured
from tiermem.tools.measure.gpu_link import kernel_passes, measure_link, measure_memory, step_passes
from tiermem.tools.measure.sustained import measure_disks
from tiermem.tools.options import PlanOptions
from tiermem.tools.plan.prediction import (
    Maths,
    copy_bytes,
    copy_s,
    measure_flops,
    measure_host_memory,
    measure_kernels,
    measure_maths,
    measure_sums,
)
from tiermem.tools.plan.seen import pace_of
from tiermem.tools.presets import ModelShape
from tiermem.tools.words import numbered, read_json

_LONGEST_COPY_S = 30.0
# bytes a second, read and write, both at once: an NVMe drive of PCIe 4.0
ASSUMED_DISK = (7.0e9, 5.0e9)
_ASSUMED_LINK = 25e9  # bytes a second each way: PCIe 4.0 with 16 lanes
_ASSUMED_FLOPS = 150e12  # operations a second that a GPU of 24 GB reaches in 16 bits


def speed_of(
    options: PlanOptions, shape: ModelShape, config: Config, is_gpu: bool
) -> tuple[Rates, Compute | float, list[str]]:
    """Every rate, the compute of a scenario, and a line for each on where it is from. is_gpu: the
    maths runs on GPUs."""
    rates, source = _disk_speed(options, config)
    compute: Compute | float
    link_bytes_s, link_source = _of_gpu(
        options,
        "--link",
        options.link_bytes_s,
        measure_link,
        "with pinned memory, both ways at once",
        _ASSUMED_LINK,
    )
    memory_bytes_s, memory_source = _of_gpu(
        options,
        "--gpu-bandwidth",
        options.gpu_memory_bytes_s,
        measure_memory,
        "in optimizer steps",
        Rates.device_memory_bytes_s,
    )
    rates = dataclasses.replace(
        rates,
        link_bytes_s=link_bytes_s,
        device_memory_bytes_s=memory_bytes_s,
        step_passes=_step_passes(options, config) if is_gpu else None,
        network_bytes_s=options.network_bytes_s,
        near_bytes_s=options.near_bytes_s,
    )
    sources = [source]
    if options.flops is not None or options.gpu_bytes is not None:
        compute = options.flops or _ASSUMED_FLOPS
        source = _named_by(options, "--flops") if options.flops else "assumed: give --flops"
        sources.append(f"computing: {compute:.3g} operations a second a rank, {source}")
        how = "assumed"
    else:
        sharing = 1 if is_gpu else options.ranks  # ranks that share a processor
        measured = _measured(options, shape, config)
        shared = f", shared by {options.ranks} ranks" if options.ranks > 1 else ""
        if isinstance(measured, Maths):
            compute, use_s, gradient_bytes_s = measured.shared_by(sharing)
            rates = dataclasses.replace(rates, gradient_bytes_s=gradient_bytes_s, use_s=use_s)
            said = "a few of the model's blocks, trained for a moment on this machine"
        else:
            compute = measured / sharing
            said = (
                f"{measured:.3g} operations a second, in products of matrices on this machine; to "
                "train a few of the model's blocks would take minutes"
            )
        sources.append(f"computing: {said}{shared}")
        how = f"measured{shared}"
        memory = measure_host_memory()
        rates = dataclasses.replace(
            rates,
            kernel_bytes_s=measure_kernels() / options.ranks,
            host_memory_bytes_s=memory / options.ranks if memory else rates.host_memory_bytes_s,
            sum_bytes_s=measure_sums() / options.ranks,
        )
    traffic = "GB/s of memory traffic"
    sources.append(f"CPU kernels: {rates.kernel_bytes_s / 1e9:.0f} {traffic}, {how}")
    if is_gpu:
        beside = f"{rates.host_memory_bytes_s / 1e9:.0f} {traffic}"
        sources.append(f"CPU kernels beside copies: {beside}, {how}")
    if options.ranks * options.nodes > 1:
        is_usual = options.network_bytes_s == PlanOptions.network_bytes_s
        said = "assumed: give --network" if is_usual else "by --network"
        sources.append(f"between ranks: {options.network_bytes_s / 1e9:g} GB/s a rank, {said}")
    if options.near_bytes_s is not None:
        sources.append(
            f"between ranks of a node: {options.near_bytes_s / 1e9:g} GB/s a rank, by "
            "--near-network"
        )
    if is_gpu:
        sources += [
            f"between memory and GPU: {link_bytes_s / 1e9:.3g} GB/s each way, {link_source}",
            f"memory of the GPU: {memory_bytes_s / 1e9:.0f} GB/s, {memory_source}",
        ]
    return rates, compute, sources


def _named_by(options: PlanOptions, option: str) -> str:
    """Where a rate is from that an option, or the card of --gpu, names."""
    return f"by {option}" if options.gpu is None else f"by {option} or --gpu {options.gpu}"


def _step_passes(options: PlanOptions, config: Config) -> float | None:
    """Those of this machine's card; of a card that is not here, those of the Triton kernel."""
    states = load_config(config).policy().precision
    return (
        step_passes(find_device(), states) if options.gpu_bytes is None else kernel_passes(states)
    )


def parse_rates(text: str) -> tuple[float, float]:
    """ "3.6,7.0" (GB/s read and written, 1e9 bytes) in bytes per second. Raises ValueError."""
    parts = text.split(",")
    try:
        numbers = [float(part) * 1e9 for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) != 2 or not all(0 < number < math.inf for number in numbers):
        raise ValueError(
            f"--nvme-rate is {text!r}; write two rates in GB/s, read and written, such as 3.6,7.0"
        )
    return numbers[0], numbers[1]


def tuned_speed(file: Path) -> tuple[Rates, str]:
    """The disk's rates that `tiermem tune` measured, past the fast cache where it was asked to, at
    the pace of the runs that have used its result; and where they are from. Raises OSError, or
    ValueError for a file that holds none."""
    try:
        measured = read_json(file)["tiermem"]["measured"]
        facts = measured["default" if measured["is_default_kept"] else "winner"]
        mixed = sum(facts["mixed_gbps"]) * 1e9
        read = sum(facts["read_gbps"]) * 1e9
        past = measured.get("sustained")
        records = measured.get("runs", [])
        # of each byte read and each written at once, what is left for the one written
        rest = 2 / mixed - 1 / read
        is_duplex = rest <= 0 or mixed >= 1.5 * read
        write = mixed / 2 if is_duplex else 1 / rest
        if past is not None:
            read = min(read, past["read_bytes_s"])
            write = min(write, past["write_bytes_s"])
        pace = pace_of(records, read, write, is_duplex)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise ValueError(
            f"--rates: {file} holds no rates; it must be what `tiermem tune` wrote"
        ) from None
    source = f"disk: from {file}"
    source += "" if past is None else f", past the fast cache ({past['sustained']})"
    source += (
        f", at {pace:.2f} of that, as seen in {numbered(len(records), 'run')}" if records else ""
    )
    return Rates(pace * read, pace * write, is_disk_duplex=is_duplex), source


def _of_gpu(
    options: PlanOptions,
    name: str,
    given: float | None,
    measure: Callable[[torch.device], float | None],
    how: str,
    assumed: float,
) -> tuple[float, str]:
    """Bytes a second of an accelerator, and where they are from: given, measured here, or
    assumed."""
    if given is not None:
        return given, _named_by(options, name)
    if (measured := measure(find_device())) is not None:
        return measured, f"measured here {how}"
    return assumed, f"assumed: give {name}"


def _measured(options: PlanOptions, shape: ModelShape, config: Config) -> Maths | float:
    """The maths of a micro-batch here; of one that would take minutes, the operations a second.
    Raises ValueError when a small copy does not fit this machine's free memory."""
    assert options.seq is not None  # the scenario has a length
    job = Job(
        options.MADE_BY,
        shape,
        config=dict(config),
        seq=options.seq,
        batch=micro_batch_of(config, 1, options.ranks * options.nodes),
        precision=precision_of(config),
        is_checkpointing=options.is_checkpointing,
        nvme_paths=list(map(str, _folders_here(config))),
    )
    num_bytes = free_host_bytes()
    copy = copy_bytes(job)
    if copy > num_bytes:
        raise ValueError(
            f"a small copy of the model, to measure how fast this machine computes, takes {copy} "
            f"bytes and {num_bytes} are "
            "free: give --flops, the operations a second that a rank reaches"
        )
    if not is_accelerator(find_device()):
        flops = measure_flops(job)
        if copy_s(job, flops) > _LONGEST_COPY_S:
            return flops
    try:
        return measure_maths(job)
    except torch.OutOfMemoryError:
        raise ValueError(
            "a small copy of the model, to measure how fast this GPU computes, does not fit it: "
            "give --checkpointing or --flops"
        ) from None


def _disk_speed(options: PlanOptions, config: Config) -> tuple[Rates, str]:
    """The disk's rates, and where they are from: given, tuned, measured in the config's own folders
    when all are here, or assumed."""
    if options.nvme_rate is not None:
        read, write = parse_rates(options.nvme_rate)
        return Rates(read, write, is_disk_duplex=options.is_duplex), "disk: given by --nvme-rate"
    if options.rates is not None:
        return tuned_speed(options.rates)
    folders = _folders_here(config)
    if options.sustained is not None and not folders:
        raise ValueError(
            "--sustained measures the folders that states rest in, and not all of them are on this "
            "machine"
        )
    why = why_unmeasured(folders)
    if folders and why is None:
        measured = measure_disks(folders, options.sustained)
        read = measured.read_bytes_s
        write = measured.write_bytes_s
        source = (
            f"disk: {read / 1e9:.1f} GB/s read, {write / 1e9:.1f} written, measured in "
            f"{', '.join(map(str, folders))}"
        )
        source += f"; {measured.sustained}" if measured.sustained else ""
    else:
        read, write = ASSUMED_DISK
        how = "both at once, assumed: give --nvme-rate, or --rates from `tune`"
        how += f" ({why})" if why else ""
        source = f"disk: {read / 1e9:g} GB/s read, {write / 1e9:g} written, {how}"
    source = source if nvme_folders(config) else "disk: not used"
    return Rates(
        read, write, is_disk_duplex=options.is_duplex or not folders or why is not None
    ), source


def _folders_here(config: Config) -> list[Path]:
    """The folders that states may rest in; empty unless all of them are on this machine."""
    folders = [Path(folder) for folder in nvme_folders(config)]
    return folders if all(folder.is_dir() for folder in folders) else []
