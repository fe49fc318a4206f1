"""Folders laid out as DeepSpeed 0.19 lays out a ZeRO-3 checkpoint, made by hand: odd sizes, tied,
frozen, several sub-groups.

The classes that it pickles along stand in modules of its names while the files are written, and
nowhere when they are read.
"""

from __future__ import annotations

import contextlib
import enum
import math
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

TAG = "global_step3"
SUB_GROUPS: tuple[dict[str, tuple[int, ...]], ...] = (
    {"embed.weight": (13, 7), "hidden.weight": (11, 7)},
    {"back.weight": (7, 11)},
    {"scale": (1,), "norm.weight": (7,), "hidden.bias": (11,)},
)
States = Mapping[str, Mapping[str, torch.Tensor]]
FROZEN = {"frozen.weight": (7, 7), "frozen.bias": (7,)}


class WrittenModel(nn.Module):
    """The model of these states. Its parameters stand in another order than in the folder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.hidden = nn.Linear(7, 11)
        self.back = nn.Linear(11, 7, bias=False)
        self.norm = nn.LayerNorm(7, bias=False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.hidden(self.frozen(self.embed(x))))
        logits = self.head(self.norm(self.back(hidden) * self.scale))
        return {
            "loss": nn.functional.cross_entropy(logits.view(-1, 13), labels.view(-1)),
            "logits": logits,
        }


class Written(NamedTuple):
    """What lies in a folder, whole: name -> state -> value."""

    folder: Path
    states: States
    buffers: Mapping[str, torch.Tensor]


def write_deepspeed(
    folder: Path, num_ranks: int, dtype: torch.dtype, is_dynamic: bool = False, stage: int = 3
) -> Written:
    """Writes a checkpoint of so many ranks, three steps old."""
    torch.manual_seed(num_ranks)
    shapes = {name: shape for group in SUB_GROUPS for name, shape in group.items()}
    states: dict[str, dict[str, torch.Tensor]] = {
        name: {state: torch.randn(shape) for state in ("master", "exp_avg", "exp_avg_sq")}
        for name, shape in shapes.items()
    }
    for kept in states.values():
        kept["weight"] = kept["master"].to(dtype)
        if dtype == torch.float32:
            del kept["master"]
    for name, shape in FROZEN.items():
        states[name] = {"weight": torch.randn(shape).to(dtype)}
    buffers = {"seen": torch.arange(3), "mean": torch.randn(5)}
    (folder / TAG).mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    for rank in range(num_ranks):
        base = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save(
            _model_states(states, buffers, dtype, rank, num_ranks),
            folder / TAG / f"{base}_model_states.pt",
        )
        prefix = "" if dtype == torch.float32 else "bf16_"
        with their_classes() as classes:
            optim = _optim_states(states, rank, num_ranks, classes, is_dynamic, stage)
            torch.save(optim, folder / TAG / f"{prefix}{base}_optim_states.pt")
    return Written(folder, states, buffers)


def _model_states(
    states: States,
    buffers: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    rank: int,
    num_ranks: int,
) -> dict[str, Any]:
    names = [*buffers, *states, "head.weight"]
    return {
        "module": {name: buffers.get(name, torch.empty(0, dtype=dtype)) for name in names},
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": [{n: torch.Size(s) for n, s in group.items()} for group in SUB_GROUPS],
        "frozen_param_shapes": {name: torch.Size(shape) for name, shape in FROZEN.items()},
        "shared_params": {"head.weight": "embed.weight"} if rank == 0 else {},
        "frozen_param_fragments": {
            name: _part(states[name]["weight"], rank, num_ranks) for name in FROZEN
        },
        "lr_scheduler": {"last_epoch": 3, "base_lrs": [2e-3, 1e-3]},
        "skipped_steps": 1,
        "global_steps": 4,
        "global_samples": 24,
        "dp_world_size": num_ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 3}},
        "ds_version": "0.19.8",
        "epoch": (2, "half"),
    }


def _optim_states(
    states: States, rank: int, num_ranks: int, classes: Any, is_dynamic: bool, stage: int
) -> dict[str, Any]:
    def flat(group: Mapping[str, Any], state: str) -> torch.Tensor:
        return torch.cat(
            [_part(states[n].get(state, states[n]["weight"]), rank, num_ranks) for n in group]
        )

    kept = {
        i: {
            "step": torch.tensor(3.0),
            **{state: flat(group, state) for state in ("exp_avg", "exp_avg_sq")},
        }
        for i, group in enumerate(SUB_GROUPS)
    }
    groups = [
        {"lr": 5e-4, "betas": (0.9, 0.95), "params": [0, 1]},
        {"lr": 1e-4, "betas": (0.9, 0.95), "params": [2]},
    ]
    inner = {
        "zero_stage": classes.ZeroStageEnum(stage),
        "loss_scaler": classes.DynamicLossScaler() if is_dynamic else classes.LossScaler(),
        "dynamic_loss_scale": is_dynamic,
        "overflow": False,
        "partition_count": num_ranks,
        "optimizer_state_dict": {"state": kept, "param_groups": groups},
        "fp32_flat_groups": [flat(group, "master") for group in SUB_GROUPS],
    }
    return {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"}


def _part(value: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """ceil(numel / ranks) elements, the last ones padded with what must never be read."""
    size = math.ceil(value.numel() / num_ranks)
    padded = torch.full((size * num_ranks,), float("nan"), dtype=value.dtype)
    padded[: value.numel()] = value.reshape(-1)
    return padded[rank * size : (rank + 1) * size].clone()


@contextlib.contextmanager
def their_classes() -> Iterator[Any]:
    """Classes that pickle under DeepSpeed's names, gone afterwards."""
    config, scaler = "deepspeed.runtime.zero.config", "deepspeed.runtime.fp16.loss_scaler"
    names = {".".join(full.split(".")[: i + 1]) for full in (config, scaler) for i in range(4)}
    modules = {name: types.ModuleType(name) for name in names}
    stage = enum.Enum(
        "ZeroStageEnum", {"optimizer_states": 1, "gradients": 2, "weights": 3}, module=config
    )  # type: ignore[misc]
    static = type("LossScaler", (), {"__module__": scaler, "__init__": _static})
    dynamic = type("DynamicLossScaler", (), {"__module__": scaler, "__init__": _dynamic})
    vars(modules[config])["ZeroStageEnum"] = stage
    vars(modules[scaler]).update(LossScaler=static, DynamicLossScaler=dynamic)
    sys.modules.update(modules)
    try:
        yield types.SimpleNamespace(
            ZeroStageEnum=stage, LossScaler=static, DynamicLossScaler=dynamic
        )
    finally:
        for name in modules:
            del sys.modules[name]


def _static(self: Any) -> None:
    vars(self).update(cur_scale=1.0, dynamic=False)


def _dynamic(self: Any) -> None:
    vars(self).update(
        cur_scale=512.0,
        dynamic=True,
        cur_iter=40,
        last_overflow_iter=29,
        cur_hysteresis=2,
        dtype=torch.half,
    )
