"""`tiermem check`: tests and measures this machine, or reports the outcome of every key of a
config."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.text import Text

from tiermem.config import ConfigError, load_config
from tiermem.swap.base.native import choose_isa
from tiermem.swap.base.proc import read_word
from tiermem.swap.disk.direct import open_unnamed, probe_path, take_room
from tiermem.swap.memory.accelerator import facts_of, find_device, free_and_total, is_accelerator
from tiermem.tools.measure.files import (
    BLOCK_BYTES,
    DEPTH,
    measure_disk,
    memory_backed,
    why_unmeasured,
)
from tiermem.tools.measure.machine import cpu_model, memory_bytes, num_cores, try_engines
from tiermem.tools.memory_limit import open_limit
from tiermem.tools.options import CheckOptions
from tiermem.tools.record.reports import table
from tiermem.tools.words import format_bytes, numbered
from tiermem.units.compute import measure_products

# ---- tiermem check --config ds.json --------------------------------------------------------------
#
# The rows are those of the config's own report (docs/keys.md explains the words). Keys that are not
# in the file are counted, and listed with --all. The command starts no process and reads no folder.

EXIT_REFUSED = 2
_STYLES = {"honoured": "green", "computed": "yellow", "inert": "yellow", "default": "dim"}


def check(options: CheckOptions, console: Console) -> int:
    """The report on this machine, or on a config; returns the exit status. Raises ValueError and
    OSError."""
    if options.config is not None:
        return check_config(options, options.config, console)
    return check_machine(options, console)


def check_config(options: CheckOptions, file: Path, console: Console) -> int:
    """Prints the report and returns 0, or the problems and returns 2. Raises OSError when the file
    cannot be read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = load_config(file)
        except ConfigError as error:
            refused = table(f"{file}: refused", "key", "why")
            refused.columns[0].style = "bold red"
            problems = {each.path or "the config": each.message for each in error.problems}
            options.save_json({"config": file, "is_accepted": False, "problems": problems})
            for problem in error.problems:
                refused.add_row(problem.path or "the config", problem.message)
            console.print(refused)
            return EXIT_REFUSED
    shown = table(f"{file}: accepted", "key", "value", "here", "note")
    rows = config.report()
    told = [row for row in rows if options.shows_all or row.is_set or row.key in config.auto_keys]
    keys = [
        {"key": row.key, "value": str(row.value), "here": row.how, "note": row.note} for row in told
    ]
    said: dict[str, list[str]] = {"deprecated": [], "notes": []}
    for warning in caught:
        is_deprecated = issubclass(warning.category, DeprecationWarning)
        said["deprecated" if is_deprecated else "notes"].append(str(warning.message))
    options.save_json({"config": file, "is_accepted": True, "keys": keys, **said})
    for row in told:
        shown.add_row(row.key, str(row.value), Text(row.how, style=_STYLES[row.how]), row.note)
    console.print(shown)
    left_out = len(rows) - len(told)
    if left_out:
        console.print(
            f"{numbered(left_out, 'key')} not set: at defaults or planned (--all lists them)"
        )
    for kind, texts in said.items():
        for text in texts:
            console.print(f"{kind.removesuffix('s')}: {text}", style="yellow")
    return 0


# ---- tiermem check -------------------------------------------------------------------------------
#
# It checks folders and their disks, one after the other. A measurement uses an unnamed file, which
# ends with it. No file is left or changed.

_TRIED_CAP_BYTES = 256 << 20
_FILE_BYTES = 1 << 30
_LEAST_FILE_BYTES = 64 << 20
_USEFUL_MEMLOCK_BYTES = 64 << 20


class Finding(NamedTuple):
    """One line of the report; `advice` is empty when nothing needs mending."""

    what: str
    found: str
    advice: str = ""


def check_machine(options: CheckOptions, console: Console) -> int:
    """Prints the report and returns 0. Blocks for the measurements; raises OSError when a folder is
    not usable."""
    paths = options.paths or [Path()]
    shown = table("tiermem check", "", "found", "to mend")
    shown.columns[0].style = "bold"
    shown.columns[2].style = "yellow"
    findings = [finding for path in paths for finding in find_path(path)]
    findings += [*find_system(), *find_gpu()]
    for path in paths:
        with console.status(f"measuring the disk of {path} for {options.seconds:.0f} s"):
            findings.append(find_rate(path, options.seconds))
    for finding in findings:
        shown.add_row(*finding)
    console.print(shown)
    options.save_json({"findings": [finding._asdict() for finding in findings]})
    return 0


def find_path(path: Path) -> Iterator[Finding]:
    """The folder's file system, room, direct I/O and alignment. Raises OSError for a folder that is
    not usable."""
    facts = probe_path(path)
    kind = memory_backed(path)
    where = f", in memory ({kind})" if kind else ""
    advice = "name a folder on a disk: what rests here takes memory" if kind else ""
    yield Finding(
        "path",
        f"{path.resolve()} ({facts.file_system}){where}, {format_bytes(facts.free_bytes)} free",
        advice,
    )
    if not facts.is_direct:
        yield Finding(
            "direct I/O",
            "refused: reads and writes would go through the page cache",
            "use ext4, xfs or btrfs",
        )
        return
    alignment = direct_alignment(path)
    yield Finding(
        "direct I/O",
        f"O_DIRECT taken, smallest offset and length tried that works: {alignment} bytes",
    )


def find_system() -> Iterator[Finding]:
    """Limits and settings of the kernel, the engines that can run, the instruction set and threads
    of the optimizer."""
    size = format_bytes(memory_bytes())
    yield Finding(
        "machine", f"{cpu_model()}, {num_cores()} cores, {size}, Linux {platform.release()}"
    )
    with open_limit(_TRIED_CAP_BYTES) as limit:
        advice = (
            "delegate the memory controller, or run under a user's systemd"
            if limit.kind == "watch"
            else ""
        )
        yield Finding("memory limit", limit.why, advice)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    is_low = soft != resource.RLIM_INFINITY and soft < _USEFUL_MEMLOCK_BYTES
    yield Finding(
        "memlock",
        shown,
        "ulimit -l unlimited lets the kernel keep buffers registered" if is_low else "",
    )
    most = read_word("/proc/sys/fs/aio-max-nr")
    used = read_word("/proc/sys/fs/aio-nr")
    yield Finding(
        "Linux AIO", f"aio-max-nr {most}, in use {used}" if most else "not in this kernel"
    )
    disabled = read_word("/proc/sys/kernel/io_uring_disabled")
    if disabled not in ("", "0"):
        yield Finding(
            "io_uring", f"io_uring_disabled is {disabled}", "sysctl kernel.io_uring_disabled=0"
        )
    pages = "/sys/kernel/mm/transparent_hugepage/enabled"
    chosen = read_word(pages) or "not in this kernel"
    is_off = "[never]" in chosen
    advice = f"echo madvise > {pages}: big buffers then read 10 to 20 % faster" if is_off else ""
    yield Finding("huge pages", f"transparent_hugepage: {chosen}", advice)
    for name, (can_run, line) in try_engines().items():
        yield Finding(f"engine {name}", line if can_run else f"cannot run: {line}")
    yield Finding("kernels", f"{choose_isa()}, {torch.get_num_threads()} threads")
    yield find_products()


def find_products() -> Finding:
    """The rates of matrix products on one thread, per type."""
    each = [measure_products([(1024, 1024)], dtype) for dtype in (torch.bfloat16, torch.float16)]
    shown = [
        f"{name} {of.rest_flops / 1e9:.1f}" for name, of in zip(("bf16", "fp16"), each, strict=True)
    ]
    advice = (
        "`tiermem train --precision auto` multiplies bf16 weights in fp32; in a config: "
        '"tiermem": {"compute_dtype": "measured"}'
    )
    found = (
        f"fp32 {max(of.fp32_flops for of in each) / 1e9:.1f}, {', '.join(shown)} GFLOP/s a thread"
    )
    return Finding("products", found, advice if each[0].is_slow else "")


def find_gpu() -> Iterator[Finding]:
    """GPUs and whether memory can be pinned for them."""
    device = find_device()
    if not is_accelerator(device):
        yield Finding(
            "GPU",
            f"none that torch {torch.__version__} can use: the maths runs on the CPU, nothing is "
            "pinned",
        )
        return
    for index in range(torch.accelerator.device_count()):
        each = torch.device(device.type, index)
        free, total = map(format_bytes, free_and_total(each))
        yield Finding(
            f"GPU {index}",
            f"{facts_of(each)['name']} ({each.type}), {total}, of which {free} are free",
        )
    try:
        torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
    except RuntimeError as error:
        yield Finding("pinning", f"refused: {error}".splitlines()[0], "raise the memlock limit")
    else:
        yield Finding("pinning", "works")


def find_rate(path: Path, seconds: float) -> Finding:
    """The disk's rates through the queue."""
    free_bytes = probe_path(path).free_bytes
    file_bytes = min(
        _FILE_BYTES, max(_LEAST_FILE_BYTES, free_bytes // 2 // BLOCK_BYTES * BLOCK_BYTES)
    )
    if (why := why_unmeasured([path], file_bytes)) is not None:
        return Finding("disk", f"not measured: {why}")
    rate = measure_disk(path, seconds, file_bytes)
    how = (
        f"blocks of {format_bytes(BLOCK_BYTES)}, {DEPTH} in flight, {rate.engine}, file of "
        f"{format_bytes(file_bytes)}"
    )
    how += "" if rate.is_direct else ", through the page cache"
    figures = f"read {rate.read_bytes_s / 1e9:.2f} GB/s, write {rate.write_bytes_s / 1e9:.2f} GB/s"
    return Finding("disk", f"{path.resolve()}: {figures} ({how})")


def direct_alignment(path: Path) -> int:
    """The smallest of 512, 1024, 2048 and 4096 that direct reads at odd multiples of it accept; 0
    if none."""
    own, why_buffered = open_unnamed(path)
    with own as fd:
        take_room(fd, 0, 1 << 16, path)
        with mmap.mmap(-1, 1 << 13) as memory, memoryview(memory) as buffer:
            for size in () if why_buffered else (512, 1024, 2048, 4096):
                try:
                    os.preadv(fd, [buffer[:size]], size)
                except OSError:
                    continue
                return size
    return 0
