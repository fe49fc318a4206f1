"""The DeepSpeed-style config that `tiermem train`'s options stand for, or the one a user brings.

Options and a config file are two ways to say one thing: what the file decides cannot be given as an option as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Config = dict[str, Any]

PRECISIONS = ("bf16", "fp32", "fp16")
OFFLOADS = ("none", "cpu", "nvme")
STATES = ("exact", "compact", "bf16", "tiny")  # the presets of tiermem/precision.py, which imports torch
DURABILITIES = ("checkpoint", "step", "none")
CLIPPING = 1.0
DEFAULT_LR = 1e-4
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def make_config(
    offload: str,
    precision: str,
    lr: float,
    batch: int,
    nvme_paths: Sequence[Path],
    resident_bytes: int | None = None,
    states: str | None = None,
    durability: str | None = None,
    keep: int | None = None,
) -> Config:
    """AdamW with clipping; parameters and optimizer states at home on `offload`. Raises ValueError."""
    if offload not in OFFLOADS:
        raise ValueError(f"--offload is {offload!r}; allowed are {', '.join(OFFLOADS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"--precision is {precision!r}; allowed are {', '.join(PRECISIONS)}")
    if states is not None and states not in STATES:
        raise ValueError(f"--states is {states!r}; allowed are {', '.join(STATES)}")
    if durability is not None and durability not in DURABILITIES:
        raise ValueError(f"--durability is {durability!r}; allowed are {', '.join(DURABILITIES)}")
    if resident_bytes and offload != "nvme":
        raise ValueError(f"--resident keeps a part of what rests on NVMe in memory; with --offload {offload} all is")
    target: Config = {"device": offload}
    if offload == "nvme":
        target["nvme_path"] = [str(path) for path in nvme_paths]
    config: Config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}},
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": 3, "offload_param": dict(target), "offload_optimizer": dict(target)},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    own = {"resident_bytes": resident_bytes, "precision": states, "durability": durability, "keep": keep}
    own = {key: value for key, value in own.items() if value is not None}
    return {**config, "tiermem": own} if own else config


def read_config(file: Path, given_options: Sequence[str], batch: int) -> Config:
    """A user's config file; `given_options` are those given that it decides.

    Raises OSError, or ValueError: not JSON, or two sources for one thing.
    """
    if given_options:
        raise ValueError(f"{', '.join(given_options)}: --deepspeed-config decides this; change {file} instead")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object")
    if not any(key in config for key in _BATCH_KEYS):
        config["train_micro_batch_size_per_gpu"] = batch
    return config


def nvme_folders(config: Mapping[str, Any]) -> list[str]:
    """Folders that states may rest in, in every form that a config has for them; each once. For a config not yet checked."""
    zero = config.get("zero_optimization")
    sections = [zero.get(name) for name in ("offload_param", "offload_optimizer")] if isinstance(zero, dict) else []
    in_use = [each for each in sections if isinstance(each, dict) and each.get("device") == "nvme"]
    own = own_folders(config)
    if own and in_use:
        return own
    return list(dict.fromkeys(folder for each in in_use for folder in _folders(each.get("nvme_path"))))


def own_folders(config: Mapping[str, Any]) -> list[str]:
    """The folders of `tiermem.paths`."""
    own = config.get("tiermem")
    return _folders(own.get("paths")) if isinstance(own, dict) else []


def with_host_bytes(config: Config, host_bytes: int) -> Config:
    """The config with a budget of host memory, unless it names one itself."""
    own = {"host_bytes": host_bytes, **config.get("tiermem", {})}
    return {**config, "tiermem": own}


def precision_of(config: Mapping[str, Any]) -> str:
    """What the model computes in."""
    for name, aliases in (("bf16", ("bf16", "bfloat16")), ("fp16", ("fp16",))):
        if any(config.get(alias, {}).get("enabled") for alias in aliases):
            return name
    return "fp32"


def _folders(paths: object) -> list[str]:
    several = paths if isinstance(paths, list) else [paths]
    found = [each.get("path") if isinstance(each, dict) else each for each in several]
    return [each for each in found if isinstance(each, str)]
