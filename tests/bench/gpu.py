"""`make gpu`: what to run first on a machine with an accelerator. One JSON, one table, one picture.

    environment    the device, its driver and link, torch, the machine
    registration   seconds of pinning host memory                            link.py
    copies         bytes per second over the link                            link.py
    step           AdamW's step of states on the device, and the norm of gradients, by torch operations and by Triton kernels
    tests          `pytest -m gpu`: its totals, and which failed             gpu_passes.py
    training       a small model in every place beside its twin on the CPU   small_training.py
    passes         a small training again, watched: blocking, sanitizers     gpu_passes.py
    trace          a training under the profiler: the share of copies hidden gpu_trace.py
    models         8B on each tier, beside peers, and 7B: tokens/s           gpu_models.py

A part that fails is reported with its reason and the others go on; the JSON is written after every
part, so that a run that is stopped leaves what it found. It runs on a bare machine: `python3 -m
bench.gpu` needs torch, numpy, cffi, pydantic and the native module; a part that needs more says
what. Exit status: 0 all went well, 1 a part failed or losses differ, 2 no accelerator or a wrong
option, 130 stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu_models import ModelRun, train_models
from bench.gpu_passes import (
    FIXED_WORKSPACE,
    ROOT,
    run_passes,
    run_tests,
    trace_training,
    train_everywhere,
)
from bench.gpu_report import draw_report, faults_of, print_report
from bench.gpu_trace import MADE_BY
from bench.link import measure_copies, measure_registration
from bench.small_training import Sizes, noting_failure
from tiermem.swap.base.native import choose_isa
from tiermem.swap.base.parts import Dither, Quantised, StepParts, StepRule, num_scales
from tiermem.swap.base.proc import read_word
from tiermem.swap.kernels.device_kernels import DeviceKernels
from tiermem.swap.memory import accelerator
from tiermem.swap.memory.free import free_host_bytes
from tiermem.tools.measure.machine import machine_facts
from tiermem.tools.presets import preset, read_shape
from tiermem.tools.words import (
    EXIT_INTERRUPTED,
    EXIT_USER,
    OneOf,
    check_outputs,
    message_of,
    parse_bytes,
    parse_list,
    read_json,
    save_json,
    stopped_by_sigterm,
)

EXIT_FAILED = 1
PARTS = (
    "environment",
    "registration",
    "copies",
    "step",
    "tests",
    "training",
    "passes",
    "trace",
    "models",
)
TRACED = ("host", "nvme")
"""Places that are trained under the profiler."""
_STATES = ("exact", "compact", "bf16", "tiny")
_STEPPED = {
    "exact": (torch.float32, torch.float32),
    "compact": (torch.int16, torch.bfloat16),
    "tiny": (torch.int16, None),
}
"""Masters and moments of the timed steps, beside bf16 weights and gradients; None: 8-bit blocks."""
_TRACE_SAMPLES = 64
_TRACE_WIDTH = 4
"""Times the samples and the width of the small training, with half its blocks: kernels must last as
long as the copies that they are to hide, and longer than Python takes to start them."""
_TRACED_BYTES = 32
"""Of host memory, and of the disk, for a parameter that is traced: the model, its states and
gradients, and room."""
_PASS_PART = 4
"""The passes train a model of this part of the width, half the blocks and this part of the samples:
a sanitizer is slow."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads options, measures, prints and writes; returns the exit status."""
    given = _parser().parse_args(arguments)
    try:
        with stopped_by_sigterm():
            return bench_gpu(given) if given.show is None else show(given.show, given.plot)
    except (ValueError, OSError) as error:
        print(f"{MADE_BY}: {message_of(error)}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        left = (
            f"{given.json} has the parts that ended"
            if given.json and given.json.is_file()
            else "nothing was written"
        )
        print(f"{MADE_BY}: stopped; {left}", file=sys.stderr)
        return EXIT_INTERRUPTED


def bench_gpu(given: argparse.Namespace) -> int:
    """Measures every part asked for. Raises ValueError without an accelerator, OSError for files
    that cannot be written."""
    plot = given.plot or (given.json.with_suffix(".png") if given.json else None)
    folder = (given.path or (given.json.parent if given.json is not None else Path())).resolve()
    beside = given.json or folder / "gpu.json"
    traces = {place: beside.with_suffix(f".{place}.trace.json") for place in TRACED}
    parts = parse_list("--part", given.part)
    OneOf(*PARTS)("--part", parts)
    check_outputs([given.json, plot, *(traces.values() if "trace" in parts else [])], MADE_BY)
    device = accelerator.find_device()
    if not accelerator.is_accelerator(device):
        raise ValueError(
            f"no accelerator: torch {torch.__version__} finds none on this machine. See whether "
            "the driver is loaded, torch is "
            "built for the device, and CUDA_VISIBLE_DEVICES does not hide it"
        )
    is_simulated = str(accelerator.facts_of(device)["name"]).startswith("simulated")
    report: dict[str, Any] = {
        "made_by": MADE_BY,
        "machine": machine_facts([folder]),
        "is_simulated": is_simulated,
        "fixed": FIXED_WORKSPACE,
        "failures": {},
        "is_complete": False,
    }
    measures = _measures(given, device, folder, traces, has_peers=not is_simulated)
    start = time.monotonic()
    for part in parts:
        print(f"{MADE_BY}: {part}", flush=True)
        with noting_failure(report["failures"], part):
            report[part] = measures[part]()
        report["seconds"] = time.monotonic() - start
        report["is_complete"] = part == parts[-1]
        if given.json is not None:
            save_json(given.json, report)
    return show_report(report, given.json, plot)


def show(file: Path, plot: Path | None) -> int:
    """Prints a report that was written, and draws its picture: measures nothing. Raises OSError,
    ValueError."""
    report = read_json(file)
    if not isinstance(report, dict) or report.get("made_by") != MADE_BY:
        raise ValueError(f"--show: {file} was not written by `{MADE_BY} --json`")
    plot = plot or file.with_suffix(".png")
    check_outputs([plot], MADE_BY)
    return show_report(report, file, plot)


def show_report(report: dict[str, Any], file: Path | None, plot: Path | None) -> int:
    """Prints the table, draws the picture, names the files; returns the exit status of what was
    found."""
    print_report(report)
    if plot is not None:
        reason = draw_report(report, plot)
        print(f"  {plot}" if reason is None else f"  no picture: {reason}")
    if file is not None:
        print(f"  {file}")
    return EXIT_FAILED if faults_of(report) else 0


def find_environment(device: torch.device) -> dict[str, Any]:
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


def measure_steps(device: torch.device, numel: int) -> dict[str, Any]:
    """Seconds of a step of so many elements (fewer where memory is short), in each form and
    precision, and of their gradients' norm; bytes that must move."""
    numel = min(numel, accelerator.free_and_total(device)[0] // 128)
    rule = StepRule("adamw", 1e-3, 0.999, beta1=0.9, beta2=0.999, eps=1e-8)
    forms = {"torch operations": DeviceKernels()}
    rows = list[dict[str, Any]]()
    failures = dict[str, str]()
    with contextlib.suppress(ImportError):
        if accelerator.runs_triton(device):
            from tiermem.swap.kernels import triton_step, triton_sums

            forms["Triton"] = DeviceKernels(triton_step.launch, triton_sums.launch)
    weight, grad = (
        torch.full((numel,), value, dtype=torch.bfloat16, device=device) for value in (0.5, 1e-3)
    )

    def measure(states: str, form: str, num_bytes: int, work: Callable[[], object]) -> None:
        with noting_failure(failures, f"{states}, {form}"):
            times = []
            for _ in range(6):
                torch.accelerator.synchronize(device)
                start = time.perf_counter()
                work()
                torch.accelerator.synchronize(device)
                times.append(time.perf_counter() - start)
            seconds = statistics.median(times[1:])
            rows.append(
                {
                    "states": states,
                    "form": form,
                    "numel": numel,
                    "num_bytes": num_bytes,
                    "step_s": seconds,
                }
            )

    for states, (master, moment) in _STEPPED.items():
        size = (
            [(numel, moment)]
            if moment is not None
            else [(numel, torch.uint8), (num_scales(numel), torch.uint8)]
        )
        held, *others = (
            torch.zeros(n, dtype=dtype, device=device)
            for n, dtype in [(numel, master), *size, *size]
        )
        parts = StepParts(
            weight,
            held,
            grad,
            others if moment else [Quantised(*others[:2]), Quantised(*others[2:])],
        )
        read = [grad, held, *others] if states == "exact" else [weight, grad, held, *others]
        num_bytes = sum(tensor.nbytes for tensor in (*read, weight, held, *others))
        dither = None if states == "exact" else Dither(1, 1, 0)
        for form, kernels in forms.items():
            measure(states, form, num_bytes, functools.partial(kernels.step, rule, parts, dither))
    for form, kernels in forms.items():
        measure("norm", form, grad.nbytes, functools.partial(kernels.block_sums, grad, 0))
    return {"rows": rows, "failures": failures}


def _measures(
    given: argparse.Namespace,
    device: torch.device,
    folder: Path,
    traces: dict[str, Path],
    has_peers: bool,
) -> dict[str, Callable[[], Any]]:
    """What measures each part."""
    sizes = Sizes(given.width, given.blocks, given.samples, given.steps)
    small = Sizes(
        max(32, sizes.width // _PASS_PART),
        max(2, sizes.blocks // 2),
        max(4, sizes.samples // _PASS_PART),
        sizes.steps,
    )
    traced = sizes._replace(samples=given.trace_samples or _TRACE_SAMPLES * sizes.samples)
    wide = traced._replace(width=_TRACE_WIDTH * sizes.width, blocks=max(2, sizes.blocks // 2))
    if given.trace_width:
        traced = traced._replace(width=given.trace_width)
    elif _TRACED_BYTES * 8 * wide.blocks * wide.width**2 <= min(
        free_host_bytes(), shutil.disk_usage(folder).free
    ):
        traced = wide
    shape = preset("8b") if given.model is None else read_shape(given.model)
    model = ModelRun(
        shape,
        given.model_layers,
        given.model_seq,
        given.model_batch,
        given.model_steps,
        given.model_states,
        given.model_timeout,
        given.peer_python,
    )

    def trace() -> dict[str, Any]:
        found = {}
        for place, file in traces.items():
            found[place] = {**trace_training(place, traced, folder, file), "trace": file.name}
        return found

    return {
        "environment": lambda: find_environment(device),
        "registration": lambda: measure_registration(
            device, parse_list("--register", given.register, parse_bytes)
        ),
        "copies": lambda: measure_copies(device, parse_bytes(given.most), given.seconds),
        "step": lambda: measure_steps(device, given.step_numel),
        "tests": lambda: run_tests(given.tests or [ROOT / "tests/gpu"]),
        "training": lambda: train_everywhere(sizes, folder),
        "passes": lambda: run_passes(small, folder),
        "trace": trace,
        "models": lambda: train_models(model, folder, has_peers),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=MADE_BY, description="Try tiermem on this machine's accelerator."
    )
    parser.add_argument("--json", type=Path, help="write everything here, after every part")
    parser.add_argument(
        "--plot", type=Path, help="draw the picture here [default: beside the JSON]"
    )
    parser.add_argument(
        "--show",
        type=Path,
        metavar="JSON",
        help="print and draw what --json wrote; measure nothing",
    )
    parser.add_argument(
        "--path", type=Path, help="folder for what trains on NVMe [default: the JSON's, or here]"
    )
    parser.add_argument("--part", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument(
        "--register",
        default="64MiB,1GiB,4GiB",
        help="sizes to register; too large ones are left out",
    )
    parser.add_argument("--most", default="256MiB", help="largest copy")
    parser.add_argument("--seconds", type=float, default=0.1, help="least time of each rate")
    parser.add_argument(
        "--step-numel", type=int, default=1 << 26, help="elements of the step that is timed"
    )
    parser.add_argument(
        "--tests", type=Path, nargs="+", help="files and folders of tests [default: all of a GPU]"
    )
    for name, value in (("width", 1024), ("blocks", 8), ("samples", 256), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=value, help="of the small training")
    parser.add_argument(
        "--trace-samples",
        type=int,
        help=f"of the traced training [default: {_TRACE_SAMPLES} x --samples]",
    )
    parser.add_argument(
        "--trace-width",
        type=int,
        help=f"of the traced training [default: {_TRACE_WIDTH} x --width, if memory and disk allow]",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="CONFIG",
        help="a Hugging Face config.json instead of an 8B Llama's",
    )
    parser.add_argument(
        "--model-layers", type=int, help="of the large model at most [default: all that fit]"
    )
    for name, value in (("seq", 2048), ("batch", 4), ("steps", 4)):
        parser.add_argument(
            f"--model-{name}", type=int, default=value, help="of the large model's training"
        )
    parser.add_argument(
        "--model-states", default="exact", choices=_STATES, help="precision of its states"
    )
    parser.add_argument(
        "--model-timeout", type=float, default=1800.0, help="seconds for each row, with its peers"
    )
    parser.add_argument(
        "--peer-python",
        type=Path,
        help="an interpreter that has DeepSpeed [default: this one, if it has]",
    )
    return parser


def _driver() -> str:
    """The driver's own words; empty where it is not known."""
    said = read_word("/proc/driver/nvidia/version").splitlines()
    return (
        said[0]
        if said
        else read_word("/sys/module/amdgpu/version")
        or "".join(_nvidia_smi("driver_version").values())
    )


def _link(facts: dict[str, Any]) -> dict[str, str]:
    """Speed and width of the device's PCIe link, now and at most; a link that rests may be slow
    now. Empty: not known."""
    known = (facts.get(key) for key in ("pci_domain_id", "pci_bus_id", "pci_device_id"))
    place = [number for number in known if isinstance(number, int)]
    found: dict[str, str] = {}
    if len(place) == 3:
        folder = "/sys/bus/pci/devices/{:04x}:{:02x}:{:02x}.0".format(*place)
        names = (
            "current_link_speed",
            "current_link_width",
            "max_link_speed",
            "max_link_width",
            "numa_node",
        )
        found = {name: word for name in names if (word := read_word(f"{folder}/{name}"))}
    return found | _nvidia_smi(
        "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    )


def _nvidia_smi(asked: str) -> dict[str, str]:
    """What nvidia-smi says of its first device; empty without it."""
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode == 0 and done.stdout.strip():
            first = done.stdout.strip().splitlines()[0]
            return dict(
                zip(asked.split(","), (word.strip() for word in first.split(",")), strict=False)
            )
    return {}


if __name__ == "__main__":
    sys.exit(main())
