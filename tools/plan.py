"""`tiermem plan`: the memory and disk space that a training needs and the seconds of its steps, without the machine.

    options -> Scenario (config, model, cluster, speed) -> planned.py -> plan_report.py, --json
                                  |                              `----> plan_report.py
                    given, tuned, measured here, or assumed: the report says which

Exit status 0: the training fits, or no limit was given. 1: it does not fit. Mistakes in options, config and model raise
ValueError and OSError.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from tiermem.tools.bench.files import measure_disks
from tiermem.tools.machine import available_bytes
from tiermem.tools.options import PlanOptions
from tiermem.tools.presets import ModelShape, shape_of
from tiermem.tools.train_options import nvme_folders, precision_of, read_config

if TYPE_CHECKING:
    from tiermem.tools.planned import Speed
    from tiermem.tools.prediction import Maths

EXIT_FITS, EXIT_TOO_SMALL = 0, 1
_PROBE_S = 1.0
_ASSUMED_DISK = (3.0e9, 2.0e9)  # bytes a second, read and write: a plain NVMe drive
_ASSUMED_KERNELS = 50e9


class DiskSpeed(NamedTuple):
    """Bytes per second of a node's paths, whether both directions go at once, and where that is from."""

    read_bytes_s: float
    write_bytes_s: float
    is_duplex: bool
    source: str


def plan(options: PlanOptions, console: Console) -> int:
    """Plans, prints, writes `--json`; returns the exit status. Blocks for a few seconds when something is measured."""
    from tiermem.tools.plan_report import advise, plan_figures, print_paper, print_plan
    from tiermem.tools.planned import Cluster, Scenario, plan_scenario

    if options.shows_paper:
        print_paper(console)
        return EXIT_FITS
    assert options.config is not None
    model = options.model
    shape = shape_of(
        options.preset, model / "config.json" if model is not None and model.is_dir() else model, "--model"
    )
    config = read_config(options.config, [], 1)
    with console.status("measuring this machine"):
        speed, sources = _speed(options, shape, config)
    cluster = Cluster(options.nodes, options.ranks, options.gpu_bytes, options.host_bytes, options.nvme_bytes)
    planned = plan_scenario(Scenario(shape, config, cluster, speed, options.seq, options.is_checkpointing))
    advice = advise(planned)
    print_plan(planned, advice, sources, console)
    options.save_json(plan_figures(planned, advice, sources))
    return EXIT_TOO_SMALL if planned.problems else EXIT_FITS


def parse_rates(text: str) -> tuple[float, float]:
    """ "3.6,7.0" (GB/s read and written, 1e9 bytes) in bytes per second. Raises ValueError."""
    parts = text.split(",")
    try:
        numbers = [float(part) * 1e9 for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) != 2 or not all(number > 0 for number in numbers):
        raise ValueError(f"--nvme-rate is {text!r}; write two rates in GB/s, read and written, such as 3.6,7.0")
    return numbers[0], numbers[1]


def tuned_speed(file: Path) -> DiskSpeed:
    """The rates that `tiermem tune` measured. Raises OSError, or ValueError for a file that holds none."""
    try:
        measured = json.loads(file.read_text(encoding="utf-8"))["tiermem"]["measured"]
        facts = measured["default" if measured["is_default_kept"] else "winner"]
        mixed, read = sum(facts["mixed_gbps"]) * 1e9, sum(facts["read_gbps"]) * 1e9
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"--rates: {file} holds no rates; it must be what `tiermem tune` wrote") from None
    source = f"disk: from {file}"
    rest = 2 / mixed - 1 / read  # of each byte read and each written at once, what is left for the one written
    if rest <= 0 or mixed >= 1.5 * read:
        return DiskSpeed(read, mixed / 2, True, source)
    return DiskSpeed(read, 1 / rest, False, source)


def _speed(options: PlanOptions, shape: ModelShape, config: Mapping[str, Any]) -> tuple[Speed, list[str]]:
    """Every rate, and a line for each on where it is from."""
    from tiermem.forecast.rates import Rates
    from tiermem.tools.planned import Speed
    from tiermem.tools.prediction import measure_kernels, measure_sums

    disk = _disk_speed(options, config)
    sources, maths, kernels = [disk.source], None, _ASSUMED_KERNELS
    if options.flops is not None:
        sources.append(f"computing: {options.flops:.3g} operations a second a rank, given by --flops")
        sources.append(f"CPU kernels: {_ASSUMED_KERNELS / 1e9:.0f} GB/s of memory traffic, assumed")
    else:
        maths, kernels = _measured(options, shape, config), measure_kernels()
        if options.ranks > 1:
            maths = maths.shared_by(options.ranks)
            kernels /= options.ranks
        shared = f", shared by {options.ranks} ranks" if options.ranks > 1 else ""
        sources.append(f"computing: a few of the model's blocks, trained for a moment on this machine{shared}")
        sources.append(f"CPU kernels: {kernels / 1e9:.0f} GB/s of memory traffic, measured{shared}")
    if options.ranks * options.nodes > 1:
        sources.append(f"between ranks: {options.network_bytes_s / 1e9:g} GB/s a rank, by --network")
    if options.near_bytes_s is not None:
        sources.append(f"between ranks of a node: {options.near_bytes_s / 1e9:g} GB/s a rank, by --near-network")
    if options.gpu_bytes is not None:
        sources.append(f"between memory and GPU: {options.link_bytes_s / 1e9:g} GB/s each way, by --link")
    rates = Rates(
        disk_read_bytes_s=disk.read_bytes_s,
        disk_write_bytes_s=disk.write_bytes_s,
        link_bytes_s=options.link_bytes_s,
        network_bytes_s=options.network_bytes_s,
        near_bytes_s=options.near_bytes_s,
        kernel_bytes_s=kernels,
        is_disk_duplex=disk.is_duplex,
    )
    if maths is None:
        return Speed(rates, options.flops), sources
    sums = measure_sums() / options.ranks
    rates = dataclasses.replace(rates, gradient_bytes_s=maths.gradient_bytes_s, sum_bytes_s=sums, use_s=maths.use_s)
    return Speed(rates, None, maths.compute), sources


def _measured(options: PlanOptions, shape: ModelShape, config: Mapping[str, Any]) -> Maths:
    """The maths of a micro-batch here. Raises ValueError when a small copy does not fit this machine's free memory."""
    from tiermem.tools.prediction import copy_bytes, measure_maths

    batch = config.get("train_micro_batch_size_per_gpu", 1)
    folders = [Path(folder) for folder in nvme_folders(config)]
    folders = folders if all(folder.is_dir() for folder in folders) else []
    precision, num_bytes = precision_of(config), available_bytes()
    copy = copy_bytes(shape, precision, bool(folders))
    if copy > num_bytes:
        raise ValueError(
            f"a small copy of the model, to measure how fast this machine computes, takes {copy} bytes and {num_bytes} are "
            "free: give --flops, the operations a second that a rank reaches"
        )
    micro = batch if isinstance(batch, int) else 1
    return measure_maths(shape, precision, micro, options.seq, options.is_checkpointing, folders)


def _disk_speed(options: PlanOptions, config: Mapping[str, Any]) -> DiskSpeed:
    """Given, tuned, measured in the config's own folders when all are here, else assumed."""
    if options.nvme_rate is not None:
        read, write = parse_rates(options.nvme_rate)
        return DiskSpeed(read, write, options.is_duplex, "disk: given by --nvme-rate")
    if options.rates is not None:
        return tuned_speed(options.rates)
    folders = [Path(folder) for folder in nvme_folders(config)]
    if folders and all(folder.is_dir() for folder in folders):
        measured = measure_disks(folders, _PROBE_S)
        read, write = measured.read_bytes_s, measured.write_bytes_s
        source = (
            f"disk: {read / 1e9:.1f} GB/s read, {write / 1e9:.1f} written, measured in {', '.join(map(str, folders))}"
        )
        return DiskSpeed(read, write, options.is_duplex, source)
    read, write = _ASSUMED_DISK
    source = (
        f"disk: {read / 1e9:g} GB/s read, {write / 1e9:g} written, assumed: give --nvme-rate, or --rates from `tune`"
    )
    return DiskSpeed(read, write, options.is_duplex, source if folders else "disk: not used")
