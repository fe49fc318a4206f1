"""`tiermem bench gpu`, `make gpu`: what to run first on a machine with an accelerator. One JSON file, one table."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import mmap
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from tiermem.swap import accelerator
from tiermem.swap.accelerator import PageLock, is_accelerator, new_stream, on
from tiermem.swap.arena import HUGE_BYTES, Arena
from tiermem.swap.native import choose_isa
from tiermem.swap.ranges import ByteRange, round_up
from tiermem.tools.bench.small_training import MOST_APART, PLACES, Sizes, compare, train_in
from tiermem.tools.machine import available_bytes, caption, machine_facts, read_word
from tiermem.tools.words import (
    EXIT_INTERRUPTED,
    EXIT_USER,
    OneOf,
    check_outputs,
    format_bytes,
    parse_bytes,
    parse_list,
    save_json,
    stopped_by_sigterm,
)

# ---- the link: what registering host memory costs, and how fast copies are -------------------------------------------
#
#     registration   fresh memory (its pages come with the registration) and touched memory, in huge pages where there are any
#     copies         pinned memory, as the arena carves it, and pageable memory; to the device, to the host, both at once
#
# One Python thread issues the copies, as in training, so that small ones show what issuing costs. A tool: it waits for
# streams.

_COPY_SIZES = tuple(1 << shift for shift in range(16, 30, 2))  # 64 KiB to 256 MiB
DIRECTIONS = ("to device", "to host", "both")


Copy = tuple[torch.Stream, torch.Tensor, torch.Tensor]
"""(stream, to, from)"""


def measure_registration(device: torch.device, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Registers fresh and touched memory of each size, those too large for this machine left out. Blocks."""
    most = available_bytes() // 2
    rows = [_registration(device, size, touched) for size in sizes if size <= most for touched in (False, True)]
    left_out = f"{format_bytes(2 * most)} are free"
    return rows + [{"num_bytes": size, "left_out": left_out} for size in sizes if size > most]


def measure_copies(device: torch.device, most: int, least_s: float) -> list[dict[str, Any]]:
    """Copies each size up to `most` bytes for `least_s` seconds or more, each way. Blocks; takes four times `most` of memory.

    A rate is in bytes per second; of both directions it is the sum.
    """
    sizes = [size for size in _COPY_SIZES if size <= most]
    if not sizes:
        raise ValueError(f"--most is {most} bytes; the smallest copy is {format_bytes(_COPY_SIZES[0])}")
    streams = new_stream(device), new_stream(device)
    rates = []
    with _pinned(device, sizes[-1]) as (pinned, is_pinned):
        pageable = [torch.ones(sizes[-1], dtype=torch.uint8) for _ in range(2)]
        there = [torch.ones(sizes[-1], dtype=torch.uint8, device=device) for _ in range(2)]
        torch.accelerator.synchronize(device)
        for size in sizes:
            for here, is_fast in ((pinned, is_pinned), (pageable, False)):
                up = streams[0], there[0][:size], here[0][:size]
                down = streams[1], here[1][:size], there[1][:size]
                for direction, copies in zip(DIRECTIONS, ([up], [down], [up, down]), strict=True):
                    rate = _rate(copies, size, least_s)
                    rates.append({"num_bytes": size, "direction": direction, "is_pinned": is_fast, "bytes_s": rate})
    return rates


def measure_link(device: torch.device, num_bytes: int = 16 << 20, least_s: float = 0.05) -> float | None:
    """Bytes per second each way of an accelerator's link, while pinned memory is copied both ways at once, as training does.

    None for the CPU. Blocks for about `least_s` seconds or more; takes `num_bytes` of memory twice on either side.
    """
    if not is_accelerator(device):
        return None
    with _pinned(device, num_bytes) as (here, _):
        there = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        torch.accelerator.synchronize(device)
        copies = [(new_stream(device), there[0], here[0]), (new_stream(device), here[1], there[1])]
        return _rate(copies, num_bytes, least_s) / 2


def _registration(device: torch.device, num_bytes: int, is_touched: bool) -> dict[str, Any]:
    """Seconds to register and to give back a piece of host memory; medians of three."""
    times, is_pinned = [], True
    for _ in range(3):
        memory = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = round_up(whole.data_ptr(), HUGE_BYTES) - whole.data_ptr()
        piece = whole[start : start + num_bytes]
        if is_touched:
            piece.fill_(1)
        begin = time.monotonic()
        lock = PageLock(device, [ByteRange(piece.data_ptr(), num_bytes)])
        middle = time.monotonic()
        is_pinned = is_pinned and lock.num_bytes == num_bytes
        lock.close()
        times.append((middle - begin, time.monotonic() - middle))
        del whole, piece
        memory.close()
    register_s, unregister_s = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "num_bytes": num_bytes,
        "is_touched": is_touched,
        "is_pinned": is_pinned,
        "register_s": register_s,
        "unregister_s": unregister_s,
        "s_per_gib": register_s * (1 << 30) / num_bytes,
    }


@contextlib.contextmanager
def _pinned(device: torch.device, num_bytes: int) -> Iterator[tuple[list[torch.Tensor], bool]]:
    """Two slots of a link slab, and whether the driver took them."""
    arena = Arena(2 * num_bytes, link_bytes=2 * num_bytes)
    try:
        slots = [arena.take(num_bytes, "a slot to copy from", crosses_link=True).tensor for _ in range(2)]
        for slot in slots:
            slot.fill_(1)
        arena.pin(device)
        yield slots, arena.is_pinned
        torch.accelerator.synchronize(device)
    finally:
        arena.close()


def _rate(copies: Sequence[Copy], num_bytes: int, least_s: float) -> float:
    """Bytes per second of copies issued in turn."""
    _time_copies(copies, 1)
    count = 1
    while (seconds := _time_copies(copies, count)) < least_s:
        count = max(2 * count, min(100 * count, int(1.2 * count * least_s / max(seconds, 1e-7))))
    return count * len(copies) * num_bytes / seconds


def _time_copies(copies: Sequence[Copy], count: int) -> float:
    start = time.monotonic()
    if len(copies) == 1:
        ((stream, to, source),) = copies
        with on(stream):
            for _ in range(count):
                to.copy_(source, non_blocking=True)
    else:
        for _ in range(count):
            for stream, to, source in copies:
                with on(stream):
                    to.copy_(source, non_blocking=True)
    for stream, _, _ in copies:
        stream.synchronize()
    return time.monotonic() - start


# ---- the command -----------------------------------------------------------------------------------------------------
#
#     environment    the device, its driver and link, torch, the machine
#     registration   seconds of pinning host memory                            gpu.py
#     copies         bytes per second over the link                            gpu.py
#     tests          `pytest -m gpu`: its totals, and which failed
#     training       a small model in every place beside its twin on the CPU   small_training.py
#
# A part that fails is reported with its reason and the others go on. It runs on a bare machine: `python3 -m
# tiermem.tools.bench.gpu` needs torch, numpy, cffi, pydantic and the native module; without pytest the tests are said
# not to have run. Exit status: 0 all went well, 1 a part failed or losses differ, 2 no accelerator or a wrong option,
# 130 stopped.

MADE_BY = "tiermem bench gpu"
EXIT_FAILED = 1
PARTS = ("environment", "registration", "copies", "tests", "training")
_TESTS_TIMEOUT_S = 900
_ROOT = Path(__file__).resolve().parents[2]

Row = tuple[str, str]
"""What, and its figure."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads options, measures, prints and writes; returns the exit status."""
    given = _parser().parse_args(arguments)
    try:
        with stopped_by_sigterm():
            return bench_gpu(given)
    except (ValueError, OSError) as error:
        print(f"{MADE_BY}: {error}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        print(f"{MADE_BY}: stopped; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED


def bench_gpu(given: argparse.Namespace) -> int:
    """Measures every part asked for. Raises ValueError without an accelerator, OSError for files that cannot be written."""
    check_outputs([given.json], MADE_BY)
    parts = parse_list("--part", given.part)
    OneOf(*PARTS)("--part", parts)
    device = accelerator.find_device()
    if not accelerator.is_accelerator(device):
        raise ValueError(
            f"no accelerator: torch {torch.__version__} finds none on this machine. See whether the driver is loaded, torch is "
            "built for the device, and CUDA_VISIBLE_DEVICES does not hide it"
        )
    folder = given.path or (given.json.parent if given.json is not None else Path())
    measures: dict[str, Callable[[], Any]] = {
        "environment": lambda: find_environment(device),
        "registration": lambda: measure_registration(device, [parse_bytes(size) for size in given.register.split(",")]),
        "copies": lambda: measure_copies(device, parse_bytes(given.most), given.seconds),
        "tests": lambda: run_tests(given.tests or [_ROOT / "tests/gpu", _ROOT / "tests/swap/test_torch_step.py"]),
        "training": lambda: _training(given, folder),
    }
    report: dict[str, Any] = {"made_by": MADE_BY, "machine": machine_facts([folder]), "failures": {}}
    start = time.monotonic()
    for part in parts:
        print(f"{MADE_BY}: {part}", flush=True)
        with _noting_failure(report["failures"], part):
            report[part] = measures[part]()
    report["seconds"] = time.monotonic() - start
    status = EXIT_FAILED if _faults(report) else 0
    print_report(report)
    if given.json is not None:
        save_json(given.json, report)
        print(f"  {given.json}")
    return status


def find_environment(device: Any) -> dict[str, Any]:
    """The device and what it hangs on, as far as torch, /proc, /sys and nvidia-smi tell."""
    facts = accelerator.facts_of(device)
    free, total = accelerator.free_and_total(device)
    runtimes = {key: getattr(torch.version, key, None) for key in ("cuda", "hip", "xpu")}
    return {
        "device": str(device),
        "num_devices": torch.accelerator.device_count(),
        "facts": facts,
        "free_bytes": free,
        "total_bytes": total,
        "torch": torch.__version__,
        "runtimes": {key: str(value) for key, value in runtimes.items() if value},
        "driver": _driver(),
        "link": _link(facts),
        "huge_pages": read_word("/sys/kernel/mm/transparent_hugepage/enabled"),
        "native_kernels": str(choose_isa()),
        "num_threads": torch.get_num_threads(),
    }


def run_tests(paths: Sequence[Path]) -> dict[str, Any]:
    """`pytest -m gpu` over paths, in a process of its own: totals, and the tests that failed. Blocks for some minutes."""
    if importlib.util.find_spec("pytest") is None:
        return {"not_run": "pytest is not installed"}
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        return {"not_run": f"there is no {', '.join(missing)}: an installed tiermem has no tests, a checkout does"}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "tests.xml"
        words = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={file}", *map(str, paths)]
        try:
            done = subprocess.run(
                [sys.executable, *words], cwd=_ROOT, capture_output=True, text=True, timeout=_TESTS_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"pytest -m gpu did not end in {_TESTS_TIMEOUT_S} s") from None
        if not file.exists():
            raise RuntimeError(f"pytest ended with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return {
            **_totals(ElementTree.parse(file).getroot()),
            "exit_code": done.returncode,
            "output": done.stdout[-8000:],
        }


def print_report(report: dict[str, Any]) -> None:
    """One table of plain text: part, what, figure."""
    parts = {part: list(rows_of(report[part])) for part, rows_of in _ROWS_OF.items() if part in report}
    for part, words in report["failures"].items():
        parts.setdefault(part, []).append(("failed", words.strip().splitlines()[-1][:200]))
    widths = max(map(len, parts), default=0), max((len(what) for rows in parts.values() for what, _ in rows), default=0)
    for part, rows in parts.items():
        for number, (what, figure) in enumerate(rows):
            print(f"{'' if number else part:<{widths[0]}}  {what:<{widths[1]}}  {figure}")
    print(caption(report["machine"]))
    faults = _faults(report)
    print(f"{MADE_BY}: " + ("all went well" if not faults else "; ".join(faults)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=MADE_BY, description="Try tiermem on this machine's accelerator.")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--path", type=Path, help="folder for the training on NVMe [default: the JSON's, or here]")
    parser.add_argument("--part", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--register", default="64MiB,1GiB,4GiB", help="sizes to register; too large ones are left out")
    parser.add_argument("--most", default="256MiB", help="largest copy")
    parser.add_argument("--seconds", type=float, default=0.1, help="least time of each rate")
    parser.add_argument("--tests", type=Path, nargs="+", help="files and folders of tests [default: all of a GPU]")
    for name, value in (("width", 1024), ("blocks", 8), ("samples", 256), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=value, help="of the small training")
    return parser


@contextlib.contextmanager
def _noting_failure(failures: dict[str, str], part: str) -> Iterator[None]:
    """Inside, an error is kept with its traceback, and what comes after goes on."""
    try:
        yield
    except Exception as error:
        failures[part] = "".join(traceback.format_exception(error))
        print(failures[part], file=sys.stderr)


def _training(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    sizes = Sizes(given.width, given.blocks, given.samples, given.steps)
    runs: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for place in PLACES:
        with tempfile.TemporaryDirectory(dir=folder) as home, _noting_failure(failures, place):
            runs[place] = train_in(place, sizes, Path(home))
    if failures:
        return {"runs": runs, "failures": failures, "passed": False}
    return {"runs": runs, **compare(runs)}


def _totals(root: ElementTree.Element) -> dict[str, Any]:
    """Of a JUnit file: how many passed, failed and were skipped, and which failed with their first lines."""
    cases = list(root.iter("testcase"))
    faults = {case: [each for each in case if each.tag in ("failure", "error")] for case in cases}
    failed = [
        {"test": f"{case.get('classname')}::{case.get('name')}", "message": (found[0].get("message") or "")[:500]}
        for case, found in faults.items()
        if found
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    return {"num_passed": passed, "num_failed": len(failed), "num_skipped": skipped, "failed": failed}


def _driver() -> str:
    """The driver's own words; empty where it is not known."""
    said = read_word("/proc/driver/nvidia/version").splitlines()
    return (
        said[0] if said else read_word("/sys/module/amdgpu/version") or "".join(_nvidia_smi("driver_version").values())
    )


def _link(facts: dict[str, Any]) -> dict[str, str]:
    """Speed and width of the device's PCIe link, now and at most; a link that rests may be slow now. Empty: not known."""
    known = (facts.get(key) for key in ("pci_domain_id", "pci_bus_id", "pci_device_id"))
    place = [number for number in known if isinstance(number, int)]
    found: dict[str, str] = {}
    if len(place) == 3:
        folder = "/sys/bus/pci/devices/{:04x}:{:02x}:{:02x}.0".format(*place)
        names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width", "numa_node")
        found = {name: word for name in names if (word := read_word(f"{folder}/{name}"))}
    return found | _nvidia_smi("pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max")


def _nvidia_smi(asked: str) -> dict[str, str]:
    """What nvidia-smi says of its first device; empty without it."""
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode == 0 and done.stdout.strip():
            first = done.stdout.strip().splitlines()[0]
            return dict(zip(asked.split(","), (word.strip() for word in first.split(",")), strict=False))
    return {}


def _faults(report: dict[str, Any]) -> list[str]:
    """What makes the exit status 1, each in a few words."""
    faults = [f"{part} failed" for part in report["failures"]]
    tests, training = report.get("tests", {}), report.get("training", {})
    if tests.get("num_failed"):
        faults.append(f"{tests['num_failed']} tests failed")
    faults += [f"training in {place!r} failed" for place in training.get("failures", {})]
    if not training.get("is_equal_to_the_bit", True):
        faults.append("losses of places that compute alike differ")
    apart = training.get("apart", {}).items()
    faults += [f"losses in {place!r} are {part:.2%} apart" for place, part in apart if not part <= MOST_APART]
    return faults


def _environment_rows(found: dict[str, Any]) -> Iterator[Row]:
    others = f", one of {found['num_devices']}" if found["num_devices"] > 1 else ""
    memory = f"{format_bytes(found['total_bytes'])}, {format_bytes(found['free_bytes'])} free"
    yield "device", f"{found['facts']['name']} ({found['device']}{others}), {memory}"
    runtimes = ", ".join(f"{key} {value}" for key, value in found["runtimes"].items())
    yield "torch", found["torch"] + (f" ({runtimes})" if runtimes else "")
    yield "driver", found["driver"] or "unknown"
    yield "link", ", ".join(f"{key} {value}" for key, value in found["link"].items()) or "unknown"


def _registration_rows(registrations: Sequence[dict[str, Any]]) -> Iterator[Row]:
    for row in registrations:
        size = format_bytes(row["num_bytes"])
        if "left_out" in row:
            yield size, f"left out: {row['left_out']}"
            continue
        figure = "refused by the driver"
        if row["is_pinned"]:
            times = f"{row['register_s'] * 1e3:.2f} ms; taken back in {row['unregister_s'] * 1e3:.2f}"
            figure = f"{row['s_per_gib']:.3f} s/GiB ({times})"
        yield f"{size}, {'touched' if row['is_touched'] else 'fresh'}", figure


def _copy_rows(copies: Sequence[dict[str, Any]]) -> Iterator[Row]:
    for size, of_size in itertools.groupby(copies, key=lambda rate: rate["num_bytes"]):
        rates = list(of_size)
        said = []
        for direction in DIRECTIONS:
            pair = [f"{rate['bytes_s'] / 1e9:.2f}" for rate in rates if rate["direction"] == direction]
            said.append(f"{direction} {' / '.join(pair)}")
        is_pinned = any(rate["is_pinned"] for rate in rates)
        note = "pinned / pageable" if is_pinned else "refused to pin / pageable"
        yield format_bytes(size), f"{', '.join(said)} GB/s ({note})"


def _test_rows(tests: dict[str, Any]) -> Iterator[Row]:
    if "not_run" in tests:
        yield "pytest -m gpu", f"not run: {tests['not_run']}"
        return
    totals = f"{tests['num_passed']} passed, {tests['num_failed']} failed, {tests['num_skipped']} skipped"
    yield "pytest -m gpu", totals
    for each in tests["failed"]:
        yield "failed", f"{each['test']}: {each['message'].splitlines()[0] if each['message'] else ''}"


def _training_rows(training: dict[str, Any]) -> Iterator[Row]:
    for place, run in training["runs"].items():
        times = " / ".join(f"{run[f'{phase}_s'] * 1e3:.1f}" for phase in ("forward", "backward", "step"))
        losses = f"loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}"
        memory = f"host {format_bytes(run['host_peak_bytes'])}"
        if "peak_allocated_bytes" in run:
            device = format_bytes(run["peak_allocated_bytes"])
            memory += f", device {device} ({format_bytes(run['peak_reserved_bytes'])} reserved)"
        yield f"{place} on {run['device']}", f"{times} ms forward / backward / step, {losses}, peak {memory}"
    for place, words in training.get("failures", {}).items():
        yield f"{place} failed", words.strip().splitlines()[-1][:200]
    if "is_equal_to_the_bit" in training:
        said = "equal to the bit" if training["is_equal_to_the_bit"] else "DIFFERENT"
        apart = ", ".join(f"{place} {part:.3%} apart" for place, part in training["apart"].items())
        yield "losses", f"of weights, host and nvme {said}; from host: {apart}"


_ROWS_OF: dict[str, Callable[[Any], Iterator[Row]]] = {
    "environment": _environment_rows,
    "registration": _registration_rows,
    "copies": _copy_rows,
    "tests": _test_rows,
    "training": _training_rows,
}

if __name__ == "__main__":
    sys.exit(main())
