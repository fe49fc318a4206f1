"""GpuModels: a model of an 8B Llama's shape, trained by `tiermem train` with its weights and states on HOST and on NVMe.

Beside it, on a GPU, the same training by plain PyTorch, FSDP2 with offload to the CPU, and DeepSpeed where it is installed:
`train --peers`. Where HOST or the disk has too little room for all layers the model has fewer, which is said.
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

from tiermem.tools.bench.gpu_passes import run_process
from tiermem.tools.bench.small_training import noting_failure
from tiermem.tools.machine import available_bytes
from tiermem.tools.presets import ModelShape, ModelSizes, llama, read_shape
from tiermem.tools.words import format_bytes, read_json

HOMES = {"host": "cpu", "nvme": "nvme"}
"""A tier, and what `train --offload` calls it."""

_SHAPE_8B: ModelShape = {**llama(4096, 14336, 32, 32, 128256), "num_key_value_heads": 8}
_NEEDED = ("transformers", "rich", "typer")
_STATE_BYTES = {"exact": 18, "compact": 12, "bf16": 10, "tiny": 10}
"""Of a parameter, at most: weight, master, moments, gradient, and room for what is under way."""
_HOST_PART, _DISK_PART = 0.75, 0.85
"""Of what is free: the rest is for the interpreter, peers and other files."""
_COUNTS_DIFFER = 3
"""The exit status of `train` when the kernel's counts of I/O are not the store's: a sandbox's kernel counts otherwise."""


class ModelRun(NamedTuple):
    """How the large model is trained."""

    config: Path | None = None  # another model: a Hugging Face config.json
    layers: int | None = None  # at most; None: those of the shape
    seq: int = 2048
    batch: int = 4
    steps: int = 4
    states: str = "exact"
    timeout_s: float = 1800.0
    peer_python: Path | None = None  # an interpreter that has DeepSpeed; None: this one, if it has it

    def shape(self) -> ModelShape:
        """The shape with all its layers. Raises OSError, ValueError."""
        return dict(_SHAPE_8B) if self.config is None else read_shape(self.config)


def train_models(run: ModelRun, folder: Path, has_peers: bool) -> dict[str, Any]:
    """Trains on each tier, and its peers beside HOST; a row for each. Blocks for minutes. A tier that fails is told."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return {"not_run": f"`tiermem train` needs {', '.join(missing)}, which this Python has not"}
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for tier, offload in HOMES.items():
        with tempfile.TemporaryDirectory(dir=folder) as home, noting_failure(failures, tier):
            rows += _rows_of(run, tier, offload, Path(home), has_peers and tier == "host")
    return {"rows": rows, "is_8b": run.config is None, "failures": failures}


def layers_that_fit(sizes: ModelSizes, num_bytes: float, state_bytes: int) -> int:
    """Of the model's layers, as many as `num_bytes` hold beside embedding and head; 0 where not even one fits."""
    rest = 2 * sizes.vocabulary * sizes.hidden
    return max(0, min(sizes.num_layers, int((num_bytes / state_bytes - rest) // sizes.block_numel)))


def readme_table(found: Mapping[str, Any], device: str, date: str) -> list[str]:
    """The rows that ended as the README's table has them, in Markdown."""
    lines = [
        f"| on {device}, {date} | layers | forward | backward | step | tokens/s | peak GPU | peak RSS |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found.get("rows", []):
        if row.get("tokens_per_s"):
            seconds = " | ".join(f"{row[f'{phase}_s']:.2f}" for phase in ("forward", "backward", "step"))
            peaks = f"{_size(row['device_peak_bytes'])} | {_size(row['peak_rss_bytes'])}"
            lines.append(f"| {row['who']} | {row['layers']} | {seconds} | {row['tokens_per_s']:,.0f} | {peaks} |")
    return lines


def _rows_of(run: ModelRun, tier: str, offload: str, home: Path, has_peers: bool) -> list[dict[str, Any]]:
    """Our row and, if asked for, those of the peers."""
    shape = run.shape()
    sizes = ModelSizes.of(shape)
    room = _HOST_PART * available_bytes() if tier == "host" else _DISK_PART * shutil.disk_usage(home).free
    fitting = layers_that_fit(sizes, room, _STATE_BYTES[run.states])
    layers = min(fitting, run.layers or sizes.num_layers)
    said = {"tier": tier, "layers": layers, "of_layers": sizes.num_layers, "seq": run.seq, "batch": run.batch}
    if not layers:
        return [{**said, "who": f"tiermem, {tier}", "not_run": f"{format_bytes(room)} of {tier} hold no layer of it"}]
    if layers < (run.layers or sizes.num_layers):
        said["why_fewer"] = f"{format_bytes(room)} of {tier} may be used"
    file, config = home / "run.json", home / "config.json"
    config.write_text(json.dumps(shape), encoding="utf-8")
    words = {"config": config, "layers": layers, "offload": offload, "steps": run.steps, "seq": run.seq}
    words |= {"batch": run.batch, "states": run.states, "json": file, "runs": home / "runs"}
    if tier == "nvme":
        words |= {"nvme": home, "resident": "0", "durability": "none"}
    command = [sys.executable, "-m", "tiermem.tools.cli", "train", "--checkpointing"]
    command += [word for name, value in words.items() for word in (f"--{name}", str(value))]
    command += _peer_words(run) if has_peers else []
    done = run_process(command, run.timeout_s)
    if not file.is_file():
        ended = f"did not end in {run.timeout_s:.0f} s" if done.status is None else f"ended with status {done.status}"
        raise RuntimeError(f"`tiermem train` on {tier} {ended}: {done.output[-2000:]}")
    found = read_json(file)
    ours = _row({**found, "name": f"tiermem, {tier}"}, said)
    if done.status not in (0, _COUNTS_DIFFER):
        ours["failed"] = f"status {done.status}: {done.last_line}"
    return [ours, *(_row(each, said) for each in found.get("peers", []))]


def _peer_words(run: ModelRun) -> list[str]:
    python = run.peer_python
    if python is None and importlib.util.find_spec("deepspeed") is not None:
        python = Path(sys.executable)
    return ["--peers", *(["--peer-python", str(python)] if python is not None else [])]


def _row(run: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one training, medians without the first step."""
    card = run.get("device_memory") or {}
    row = {**said, "who": run["name"], "device": run.get("device"), "num_params": run.get("num_params")}
    for phase in ("forward", "backward", "step"):
        seconds = run.get(f"{phase}_s") or []
        row[f"{phase}_s"] = statistics.median(seconds[1:] or seconds) if seconds else None
    error = run.get("error") or {}
    return {
        **row,
        "tokens_per_s": run.get("tokens_per_s"),
        "losses": run.get("losses"),
        "device_peak_bytes": card.get("peak_allocated_bytes"),
        "device_reserved_bytes": card.get("peak_reserved_bytes"),
        "peak_rss_bytes": run.get("peak_rss_bytes"),
        "nvme_bytes_a_step": [run.get(f"nvme_{key}_bytes_a_step") for key in ("read", "written")],
        "outcome": run.get("outcome"),
        "error": str(error.get("message", "")).strip().split("\n")[0][:300] or None,
        "versions": run.get("versions"),
    }


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)
