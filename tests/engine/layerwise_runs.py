"""Runs of `Engine.train_batch`, for test_layerwise.py and its ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from programs.models import logits_of
from programs.twins import batch
from torch import nn
from torch.nn import functional as F

import tiermem

LAYERS: Literal["layers"] = "layers"
NUM_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes of one step on NVMe; the kernel counted the same."""

    read: int
    written: int
    largest_unit: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass
class Run:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    num_skipped: int
    of_last_step: Moved


def cross_entropy(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_of(output).flatten(0, 1).float(), labels.flatten())


def micro_batches(step: int, num: int, first: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of different lengths."""
    return [
        batch(100 * step + first + micro, length=9 + (first + micro) % 3) for micro in range(num)
    ]


@contextlib.contextmanager
def engine_of(
    model: nn.Module,
    order: str,
    num_micro: int,
    device: str,
    folder: Path,
    keys: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> Iterator[tiermem.Engine]:
    """An engine all of whose states rest on one tier."""
    place = {
        "device": device,
        **({"nvme_path": tempfile.mkdtemp(dir=folder)} if device == "nvme" else {}),
    }
    keys = dict(keys or {})
    of_params = {**place, **keys.pop("zero_optimization", {}).get("offload_param", {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": num_micro,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 50,
            "offload_param": of_params,
            "offload_optimizer": place,
        },
        "tiermem": {
            "accumulation": order,
            **({"grads": device} if device == "nvme" else {}),
            **(own or {}),
        },
        **keys,
    }
    engine = tiermem.initialize(model=model, config=config, device="cpu")[0]
    torch.set_num_threads(1)
    try:
        yield engine
    finally:
        engine.close()


def train(
    model: nn.Module,
    order: str,
    num_micro: int,
    device: str,
    folder: Path,
    keys: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
    rank: int = 0,
) -> Run:
    """Four steps, and what they have left; the third has ended when the fourth begins. rank:
    chooses the data."""
    with engine_of(model, order, num_micro, device, folder, keys, own) as engine:
        store, losses, norms = engine.shards.store, [], []
        for step in range(NUM_STEPS):
            if step == NUM_STEPS - 1:
                engine.shards.steps.finish()
                store.flush()
                before, kernel_before = store.stats(), kernel_bytes()
            losses.append(
                float(
                    engine.train_batch(
                        micro_batches(step, num_micro, rank * num_micro), cross_entropy
                    )
                )
            )
            norms.append(engine.get_global_grad_norm())
        engine.shards.steps.finish()
        store.flush()
        after, kernel_after = store.stats(), kernel_bytes()
        read = after.nvme_read_bytes - before.nvme_read_bytes
        written = after.nvme_written_bytes - before.nvme_written_bytes
        assert kernel_after[1] - kernel_before[1] >= written
        largest = max(live.unit.shard_bytes for live in engine.shards.units)
        tiles = engine.optimizer.tiles_of(engine.shards)
        states = {
            f"{shard.name}.{name}": tiles.state(shard, name)
            for live, shard in engine.shards.parameters()
            if live.unit.is_trainable and shard.num_steps
            for name in ("exp_avg", "exp_avg_sq")
        }
        return Run(
            losses,
            norms,
            engine.module_state_dict(),
            states,
            engine.skipped_steps,
            Moved(read, written, largest),
        )


def kernel_bytes() -> tuple[int, int]:
    """Bytes that this process has read from and written to disks, as the kernel counts them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])
