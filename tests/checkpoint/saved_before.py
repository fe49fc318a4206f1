"""Checkpoints that an older tiermem wrote: the runs that wrote them, and the runs that open them
again.

    run(...)       trains two steps, saves the same step in place and as a copy, and goes on for two steps
    go_on(...)     opens one of the two and goes on for the same two steps

`python saved_before.py write <folder>` writes a new archive with the tiermem that is installed
(fixtures/README.md).

The figures must be the same to the bit on every machine. So the model multiplies and adds element
by element, which IEEE 754 rounds alike everywhere, and nothing is summed but two ranks' gradients
and the loss, for which `math.fsum` rounds once. Every step draws its data from torch's generator,
so a checkpoint that loses the generator's state shows.
"""

from __future__ import annotations

import hashlib
import lzma
import math
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch import as_rank, launch_ranks

import tiermem
from tiermem.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

PRESETS = ("fp32", "exact", "compact", "bf16", "tiny")
WORLDS = (1, 2)
PLACES = ("in_place", "copied")
CLIENT_STATE = {"epoch": 7, "name": "of 47ff4ce"}
STATES = ("exp_avg", "exp_avg_sq")
NUM_STEPS = 2  # before the checkpoint, and after it
SHAPE = (7, 19)


class Affine(nn.Module):
    """Multiplies and adds element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(SHAPE) + 0.5)
        self.shift = nn.Parameter(torch.rand(SHAPE) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale + self.shift).relu() + x


class Elements(nn.Module):
    """Three blocks, the last with the first one's weight, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Affine() for _ in range(3))
        self.blocks[2].scale = self.blocks[0].scale
        self.frozen = nn.Parameter(torch.rand(SHAPE), requires_grad=False)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.calls += 1
        return x * self.frozen


def start(nvme: Path, preset: str, seed: int) -> tiermem.Engine:
    """An engine of stage 3 with everything on NVMe."""
    offload = {"device": "nvme", "nvme_path": str(nvme)}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 3},
        },
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 4096,
            "offload_optimizer": offload,
            "offload_param": offload,
        },
        "tiermem": {"strict": True},
    }
    if preset != "fp32":
        config |= {"bf16": {"enabled": True}, "tiermem": {"precision": preset, "strict": True}}
    torch.manual_seed(seed)
    engine, *_ = tiermem.initialize(model=Elements(), config=config)
    torch.manual_seed(100 + seed + rank_of())
    return engine


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def step(engine: tiermem.Engine) -> str:
    """One step; this rank's loss, to the bit."""
    dtype = next(engine.module.parameters()).dtype
    inputs, targets = (torch.randint(-8, 9, SHAPE).to(dtype) / 4 for _ in range(2))
    outputs = engine(inputs)
    engine.backward((outputs.float() * targets.float()).sum())
    engine.step()
    return math.fsum((outputs.detach().double() * targets.double()).flatten().tolist()).hex()


def steps(engine: tiermem.Engine) -> list[str]:
    return [step(engine) for _ in range(NUM_STEPS)]


def states(engine: tiermem.Engine) -> dict[str, torch.Tensor]:
    """Weights and buffers as they are, masters and moments in fp32, by name. Collective."""
    found = {f"{name}.weight": value.clone() for name, value in engine.module.state_dict().items()}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            values = [
                safe_get_full_fp32_param(param),
                *(safe_get_full_optimizer_state(param, each) for each in STATES),
            ]
            for state, value in zip(("master", *STATES), values, strict=True):
                assert value is not None
                found[f"{name}.{state}"] = value.clone()
    return found


def digest(found: dict[str, torch.Tensor]) -> str:
    """A hash of the names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name, value in sorted(found.items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        total.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def counters(engine: tiermem.Engine) -> list[Any]:
    assert engine.lr_scheduler is not None
    return [
        engine.global_steps,
        engine.global_samples,
        engine.skipped_steps,
        engine.micro_steps,
        engine.get_lr(),
    ]


def facts(engine: tiermem.Engine) -> dict[str, Any]:
    return {"states": states(engine), "counters": counters(engine)}


def run(place: Path, preset: str) -> dict[str, Any]:
    """Trains, saves in place (`<place>/in_place`, where the states rest) and as a copy, goes on.
    What must be found again."""
    nvme = place / "in_place"
    nvme.mkdir(parents=True, exist_ok=True)
    engine = start(nvme, preset, seed=0)
    steps(engine)
    saved = facts(engine)
    engine.save_checkpoint(nvme, "tag", CLIENT_STATE)
    engine.save_checkpoint(place / "copied", "tag", CLIENT_STATE, copy=True)
    engine.wait_checkpoint()
    found = {
        "saved": saved,
        "losses": steps(engine),
        "after": digest(states(engine)),
        "end": counters(engine),
    }
    engine.close()
    return found


def go_on(saved: Path, preset: str, nvme: Path) -> dict[str, Any]:
    """Opens what `run` saved, in an engine of other weights, and goes on: the same facts, and what
    was given back."""
    nvme.mkdir(parents=True, exist_ok=True)
    engine = start(nvme, preset, seed=3)
    path, client_state = engine.load_checkpoint(saved)
    opened = facts(engine)
    found = {
        "saved": opened,
        "losses": steps(engine),
        "after": digest(states(engine)),
        "end": counters(engine),
    }
    engine.close()
    return found | {"path": path, "client_state": client_state}


def write_archive(folder: Path) -> Path:
    """Writes the checkpoints of every number of ranks and precision, and what is to be found in
    them, as one archive."""
    for world in WORLDS:
        launch_ranks(Path(__file__), world, str(folder), "run")
    archive = folder / "checkpoints.tar.xz"
    with (
        lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for world in WORLDS:
            tar.add(folder / str(world), str(world))
    return archive


def main(folder: Path, what: str, *words: str) -> None:
    """As one rank: `run` under <folder>/<world>, or `open` what lies under the folder given, with
    its own files in <folder>."""
    world = dist.get_world_size()
    found: dict[str, Any] = {}
    for preset in PRESETS:
        if what == "run":
            found[preset] = run(folder / str(world) / preset, preset)
            continue
        for place in PLACES:
            saved = Path(words[0]) / str(world) / preset / place
            found[f"{preset} {place}"] = go_on(saved, preset, folder / "nvme")
    if what == "run":
        torch.save(found, folder / str(world) / f"{rank_of()}.pt")
    else:
        torch.save(found, folder / f"{rank_of()}.pt")


if __name__ == "__main__":
    if sys.argv[1] == "write":
        target = Path(sys.argv[2])
        target.mkdir(parents=True)
        print(write_archive(target))
    else:
        with as_rank() as (_, out, given):
            torch.set_num_threads(1)
            main(out.parent, *given)
