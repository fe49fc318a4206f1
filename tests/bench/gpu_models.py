"""GpuModels: models of 8B and 7B, trained by `tiermem train` with their weights and states on each
tier.

    all on the device, host, nvme    an 8B Llama's shape, or the one that is given
    7B of 148 x 1024 tokens          Qwen2.5-7B's shape, compact, on HOST; left out where another shape is given

Beside the row of HOST, on a GPU, the same training by plain PyTorch, FSDP2 with offload to the CPU,
and DeepSpeed where it is installed: `bench peers`. Where a tier has too little room for all layers
the model has fewer, which is said.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_passes import run_process
from bench.small_training import noting_failure
from tiermem.swap.memory.accelerator import find_device, free_and_total
from tiermem.swap.memory.free import free_host_bytes
from tiermem.tools.presets import PRESETS, ModelShape, ModelSizes, llama
from tiermem.tools.words import format_bytes, read_json

HOMES = {"device": "none", "host": "cpu", "nvme": "nvme"}
"""A tier, and what `train --offload` calls it."""

MANY_TOKENS: dict[str, Any] = {
    "shape": llama(3584, 18944, 28, 28, 152064, 4),
    "seq": 1024,
    "batch": 148,
    "states": "compact",
}
"""Qwen2.5-7B's shape, as a Llama has it."""

_NEEDED = ("transformers", "rich", "typer")
_STATE_BYTES = {"exact": 18, "compact": 12, "bf16": 10, "tiny": 10}
"""Of a parameter, at most: weight, master, moments, gradient, and room for what is under way."""
_MEMORY_PART = 0.75
_DISK_PART = 0.85
"""Of what is free: the rest is for activations, the interpreter, peers and other files."""
_COUNTS_DIFFER = 3
"""The exit status of `train` when the kernel's counts of I/O are not the store's: a sandbox's
kernel counts otherwise."""


class ModelRun(NamedTuple):
    """How a large model is trained."""

    shape: ModelShape = PRESETS["8b"]
    layers: int | None = None  # at most; None: those of the shape
    seq: int = 2048
    batch: int = 4
    steps: int = 4
    states: str = "exact"
    timeout_s: float = 1800.0
    # an interpreter that has DeepSpeed; None: this one, if it has it
    peer_python: Path | None = None


def train_models(run: ModelRun, folder: Path, has_peers: bool) -> dict[str, Any]:
    """Trains on each tier, and its peers beside HOST; a row for each. Blocks for minutes. A row
    that fails is told."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return {"not_run": f"`tiermem train` needs {', '.join(missing)}, which this Python has not"}
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    runs = [("all on the device" if tier == "device" else tier, tier, run) for tier in HOMES]
    if run.shape == PRESETS["8b"]:
        runs.append(("7B of 148 x 1024 tokens", "host", run._replace(**MANY_TOKENS)))
    for name, tier, each in runs:
        with tempfile.TemporaryDirectory(dir=folder) as home, noting_failure(failures, name):
            rows += _rows_of(each, name, tier, Path(home), has_peers and name == "host")
    return {"rows": rows, "failures": failures}


def layers_that_fit(sizes: ModelSizes, num_bytes: float, state_bytes: int) -> int:
    """Of the model's layers, as many as `num_bytes` hold beside embedding and head; 0 where not
    even one fits."""
    rest = 2 * sizes.vocabulary * sizes.hidden
    return max(0, min(sizes.num_layers, int((num_bytes / state_bytes - rest) // sizes.block_numel)))


def readme_table(found: Mapping[str, Any], device: str, date: str) -> list[str]:
    """The rows that ended as the README's table has them, in Markdown."""
    lines = [
        (
            f"| on {device}, {date} | layers | forward | backward | step | tokens/s | peak GPU | "
            "peak "
            "RSS |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found.get("rows", []):
        if row.get("tokens_per_s"):
            seconds = " | ".join(
                f"{row[f'{phase}_s']:.2f}" for phase in ("forward", "backward", "step")
            )
            peaks = f"{_size(row['device_peak_bytes'])} | {_size(row['peak_rss_bytes'])}"
            lines.append(
                f"| {row['who']} | {row['layers']} | {seconds} | {row['tokens_per_s']:,.0f} | "
                f"{peaks} |"
            )
    return lines


def _rows_of(
    run: ModelRun, name: str, tier: str, home: Path, has_peers: bool
) -> list[dict[str, Any]]:
    """Our row and, if asked for, those of the peers."""
    sizes = ModelSizes.of(run.shape)
    room = _room(tier, home)
    wanted = run.layers or sizes.num_layers
    layers = min(wanted, layers_that_fit(sizes, room, _STATE_BYTES[run.states]))
    said = {
        "tier": tier,
        "layers": layers,
        "of_layers": sizes.num_layers,
        "seq": run.seq,
        "batch": run.batch,
    }
    if not layers:
        return [
            {
                **said,
                "who": f"tiermem, {name}",
                "not_run": f"{format_bytes(room)} of {tier} hold no layer of it",
            }
        ]
    if layers < wanted:
        said["why_fewer"] = f"{format_bytes(room)} of {tier} may be used"
    file = home / "run.json"
    config = home / "config.json"
    config.write_text(json.dumps(run.shape), encoding="utf-8")
    words = {
        "config": config,
        "layers": layers,
        "offload": HOMES[tier],
        "steps": run.steps,
        "seq": run.seq,
    }
    words |= {"batch": run.batch, "states": run.states, "json": file, "runs": home / "runs"}
    if tier == "nvme":
        words |= {"nvme": home, "resident": "0", "durability": "none"}
    command = [
        sys.executable,
        "-m",
        *(("bench", "peers") if has_peers else ("tiermem.tools.cli", "train")),
    ]
    command += ["--checkpointing"]
    command += [word for name, value in words.items() for word in (f"--{name}", str(value))]
    command += _peer_words(run) if has_peers else []
    done = run_process(command, run.timeout_s)
    if not file.is_file():
        ended = (
            f"did not end in {run.timeout_s:.0f} s"
            if done.status is None
            else f"ended with status {done.status}"
        )
        raise RuntimeError(f"`tiermem train` ({name}) {ended}: {done.output[-2000:]}")
    found = read_json(file)
    ours = _row({**found, "name": f"tiermem, {name}"}, said)
    if done.status not in (0, _COUNTS_DIFFER):
        ours["failed"] = f"status {done.status}: {done.last_line}"
    return [ours, *(_row(each, said) for each in found.get("peers", []))]


def _room(tier: str, home: Path) -> float:
    """Bytes of a tier that a model may use."""
    if tier == "nvme":
        return _DISK_PART * shutil.disk_usage(home).free
    return _MEMORY_PART * (
        free_host_bytes() if tier == "host" else free_and_total(find_device())[0]
    )


def _peer_words(run: ModelRun) -> list[str]:
    python = run.peer_python
    if python is None and importlib.util.find_spec("deepspeed") is not None:
        python = Path(sys.executable)
    return ["--peer-python", str(python)] if python is not None else []


def _row(run: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one training, medians without the first step."""
    card = run.get("device_memory") or {}
    row = {
        **said,
        "who": run["name"],
        "device": run.get("device"),
        "num_params": run.get("num_params"),
    }
    for phase in ("forward", "backward", "step"):
        seconds = run.get(f"{phase}_s") or []
        row[f"{phase}_s"] = statistics.median(seconds[1:] or seconds) if seconds else None
    error = run.get("error") or {}
    return {
        **row,
        "tokens_per_s": run.get("tokens_per_s"),
        "losses": run.get("losses"),
        "device_peak_bytes": card.get("peak_allocated_bytes"),
        "peak_rss_bytes": run.get("peak_rss_bytes"),
        "nvme_bytes_a_step": [run.get(f"nvme_{key}_bytes_a_step") for key in ("read", "written")],
        "outcome": run.get("outcome"),
        "error": str(error.get("message", "")).strip().split("\n")[0][:300] or None,
    }


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)
