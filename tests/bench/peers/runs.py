"""Peers: the same model, data, seed, threads, warm-up and cap, trained by other means, each in its
own process.

    plain       PyTorch with everything in memory, in this interpreter
    fsdp2       FSDP2 with everything offloaded to the CPU, in this interpreter; on machines with a GPU
    deepspeed   ZeRO-3 with offload, in the interpreter that --peer-python names, over a small sweep of its settings

A peer that dies at the cap, or cannot do what is asked, is a result. What its runs leave on disk
lies in folders made here and is removed after each peer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tiermem.tools.bench.witnesses import has_gpu, peer_command
from tiermem.tools.corpus import Corpus
from tiermem.tools.job.launcher import CHANNEL_FD, Job
from tiermem.tools.presets import ModelSizes

_SCRIPTS = Path(__file__).parent
_BUILD_PATIENCE_S = 600.0
"""A compiler of another user that holds the extensions' lock would be waited for without end."""


class Setting(NamedTuple):
    """One way to run a peer; `values` reach its script."""

    name: str
    values: dict[str, Any]
    is_like_ours: bool = True  # states rest on the same tier as ours
    is_default: bool = False  # the peer's own defaults: a row of its own beside the best

    def describe(self) -> str:
        """The setting on one line."""
        return f"{self.name}: {json.dumps(self.values)}" if self.values else self.name


@dataclasses.dataclass(frozen=True)
class Peer:
    """One other means to train: its interpreter and its settings."""

    name: str
    python: Path
    settings: Sequence[Setting]
    swap_folders: Sequence[Path] = ()

    def prepare(self, job: Job, home: Path, console: Console) -> None:
        """Writes the tokens, makes the swap folders, compiles what is compiled at first use. Raises
        RuntimeError."""
        _save_tokens(job, home / "tokens.npy")
        for folder in self.swap_folders:
            folder.mkdir(parents=True)
        if self.name != "deepspeed":
            return
        console.print("deepspeed: building its extensions, not measured")
        command = [*peer_command(self.python, self.name), str(_SCRIPTS / "peer_deepspeed.py")]
        try:
            built = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_BUILD_PATIENCE_S
            )
        except subprocess.TimeoutExpired:
            console.print(f"deepspeed: its extensions did not build in {_BUILD_PATIENCE_S:.0f} s")
            return
        (home / "extensions.log").write_text(built.stdout + built.stderr, encoding="utf-8")
        if built.returncode:
            last = (built.stderr.strip() or built.stdout.strip() or "no output").splitlines()[-1]
            console.print(f"deepspeed: its extensions did not build: {last}")

    def command(self, job: Job, setting: Setting, place: Path) -> list[str]:
        """The command line of one run, whose job is `place`/job.json."""
        script = [
            str(_SCRIPTS / "peer_main.py"),
            self.name,
            str(place / "job.json"),
            str(place.parent / "tokens.npy"),
        ]
        values = ["--setting", json.dumps(setting.values)]
        return [*peer_command(self.python, self.name), *script, *values, "--channel", CHANNEL_FD]

    def clean(self, home: Path) -> None:
        """Removes the tokens and the swap folders."""
        (home / "tokens.npy").unlink(missing_ok=True)
        for folder in self.swap_folders:
            shutil.rmtree(folder, ignore_errors=True)


def list_peers(job: Job, peer_python: Path | None) -> list[Peer]:
    """The peers for a job: plain PyTorch, FSDP2 where there is a GPU, and DeepSpeed when its
    interpreter is named.

    Raises ValueError for a job that a peer cannot be given, FileNotFoundError for an interpreter
    that is not there.
    """
    if job.precision == "fp16":
        raise ValueError(
            "`peers` compares bf16 and fp32; the loss scales of fp16 take different paths"
        )
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        value = job.config.get(key, 1)
        if not isinstance(value, int) or (key == "train_batch_size" and key in job.config):
            raise ValueError(
                "`peers` needs train_micro_batch_size_per_gpu and a number of accumulation steps, "
                f"not {key}"
            )
    peers = [Peer("plain", Path(sys.executable), [Setting("in-memory", {})])]
    if has_gpu():
        peers.append(
            Peer(
                "fsdp2",
                Path(sys.executable),
                [Setting("all-on-cpu", {}, is_like_ours=not job.nvme_paths)],
            )
        )
    if peer_python is not None:
        if not os.access(peer_python, os.X_OK):
            raise FileNotFoundError(f"--peer-python: {peer_python} is no program")
        if job.checkpoint is not None:
            raise ValueError(
                "--peer-python: DeepSpeed is compared on models from a seed, not on --model"
            )
        roots = [Path(path) for path in job.nvme_paths] or [Path(job.events_file or ".").parent]
        swap = roots[0].absolute() / f"tiermem-peer-{os.getpid()}"
        uses_nvme = bool(job.nvme_paths)
        python = peer_python.absolute()
        peers.append(
            Peer(
                "deepspeed",
                python,
                deepspeed_settings(job, swap, uses_nvme),
                [swap] if uses_nvme else [],
            )
        )
    return peers


def deepspeed_settings(job: Job, swap: Path, uses_nvme: bool) -> list[Setting]:
    """The sweep: everything on the CPU; with NVMe also the optimizer there, pipelined or not, and
    all of it there.

    Everything on the CPU runs with DeepSpeed's defaults and with `_LARGE` settings; under a memory
    cap also with `_SMALL` ones. The buffer sizes of NVMe are those that a search by hand found to
    work for models of this size: fewer or smaller ones stop with an assertion ("Not enough
    buffers"). The optimizer on NVMe also runs with DeepSpeed's defaults, however that ends.
    """
    sizes = ModelSizes.of(job.shape)
    largest = max(sizes.vocabulary * sizes.hidden, sizes.hidden * sizes.intermediate)
    cpu = {"device": "cpu", "pin_memory": has_gpu()}
    nvme = {"device": "nvme", "nvme_path": str(swap)}
    buffers = {"buffer_count": 100, "buffer_size": max(10_000_000, largest), "max_in_cpu": 0}
    piped = {"buffer_count": 16, "pipeline_read": True, "pipeline_write": True}
    if not uses_nvme:
        small = (
            [Setting("all-on-cpu-small", _zero(cpu, cpu, _SMALL))]
            if job.memory_limit_bytes is not None
            else []
        )
        return [
            Setting("all-on-cpu", _zero(cpu, cpu, {}), is_default=True),
            Setting("all-on-cpu-large", _zero(cpu, cpu, _LARGE)),
            *small,
        ]
    resting = {"device": "none"}
    untouched = {"zero_optimization": {"stage": 3, "offload_optimizer": nvme}}
    return [
        Setting("all-on-nvme", _zero({**nvme, **buffers}, {**nvme, **piped}, _SMALL)),
        Setting("optimizer-on-nvme", _zero(resting, {**nvme, **piped}, _SMALL)),
        Setting(
            "optimizer-on-nvme-unpipelined", _zero(resting, {**nvme, "buffer_count": 16}, _SMALL)
        ),
        Setting("all-on-cpu-small", _zero(cpu, cpu, _SMALL), is_like_ours=False),
        Setting("optimizer-on-nvme-defaults", untouched, is_default=True),
    ]


_SMALL = {
    "sub_group_size": 20_000_000,
    "stage3_prefetch_bucket_size": 20_000_000,
    "stage3_max_live_parameters": 40_000_000,
    "reduce_bucket_size": 20_000_000,
}
"""Buckets for little memory."""
_LARGE = {
    "overlap_comm": True,
    "stage3_prefetch_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 3_000_000_000,
    "stage3_max_reuse_distance": 3_000_000_000,
}
"""Settings for a GPU with room: more is prefetched and kept than by default."""


def _zero(
    param: dict[str, Any], optimizer: dict[str, Any], buckets: dict[str, Any]
) -> dict[str, Any]:
    """DeepSpeed's section for ZeRO-3; a key that `buckets` leaves out has DeepSpeed's default."""
    return {
        "zero_optimization": {
            "stage": 3,
            **buckets,
            "offload_param": param,
            "offload_optimizer": optimizer,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 16,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def _save_tokens(job: Job, file: Path) -> None:
    """The very batches that our trainer draws, as [micro-batches, batch, seq] bytes."""
    import numpy

    corpus = Corpus([Path(path) for path in job.data], job.seq, job.seed)
    num_batches = job.steps * int(job.config.get("gradient_accumulation_steps", 1))
    windows = [
        numpy.frombuffer(corpus.window(i), dtype=numpy.uint8)
        for i in range(num_batches * job.batch)
    ]
    numpy.save(file, numpy.stack(windows).reshape(num_batches, job.batch, job.seq))
