"""Arguments: a DeepSpeed-style config beside transformers' TrainingArguments.

    "auto"          takes the value of the training arguments (the table below)
    a value         must be that of the training arguments, where the table names one
    not set         the training arguments'

The Trainer counts micro-batches, clips and logs. The config says what is sharded, where it rests,
in which precision, and, in sections of their own, the optimizer and the schedule.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tiermem.config.load import Given, load_config, named_in_errors, read_raw, resolve_auto
from tiermem.config.root import TiermemConfig
from tiermem.keys import is_auto
from tiermem.section import ConfigError, Problem


def values_of(args: Any, num_steps: int | None) -> dict[str, Any]:
    """The value of each key that training arguments have too. num_steps: optimizer steps of the
    training, where known."""
    micro = args.per_device_train_batch_size
    accumulation = args.gradient_accumulation_steps
    found = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": args.world_size * micro * accumulation,
        "gradient_clipping": args.max_grad_norm,
        "bf16.enabled": args.bf16,
        "bfloat16.enabled": args.bf16,
        "fp16.enabled": args.fp16,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_max_lr": args.learning_rate,
    }
    if num_steps is not None:
        found["scheduler.params.warmup_num_steps"] = args.get_warmup_steps(num_steps)
        found["scheduler.params.total_num_steps"] = num_steps
    return found


def config_beside(
    asked: Given,
    args: Any,
    hidden_size: int | None = None,
    num_steps: int | None = None,
) -> TiermemConfig:
    """Reads a config, with the training arguments' values for "auto". `asked` does not change.

    hidden_size: of the model; for three sizes of ZeRO that are "auto".

    Raises ConfigError (a ValueError) that lists every wrong key, every value that contradicts the
    training arguments, and what the Trainer cannot do with a config: fp16 and torch_autocast.
    Raises OSError when a file cannot be read.
    """
    raw, source = read_raw(asked)
    raw = copy.deepcopy(raw)
    values = values_of(args, num_steps) | {"scheduler.params.warmup_min_lr": 0.0}
    problems = [*_fill(raw, values)]
    # a section that is left out, too: so does Accelerate in DeepSpeed's config
    section = raw.setdefault("bfloat16" if "bfloat16" in raw else "bf16", {})
    if args.bf16 and not problems and isinstance(section, dict):
        section.setdefault("enabled", True)
    with named_in_errors(source):
        config = load_config(raw)
    for key, is_on, instead in (
        ("fp16.enabled", config.fp16.enabled or args.fp16, 'use "bf16", or tiermem.initialize'),
        (
            "torch_autocast.enabled",
            config.torch_autocast.enabled,
            "use TrainingArguments(bf16=True) and an OffloadPolicy",
        ),
    ):
        if is_on:
            problems.append(
                Problem(key, f"true, which TiermemTrainer does not do with a config; {instead}")
            )
    if problems:
        raise ConfigError(problems, source)
    return config if hidden_size is None else resolve_auto(config, hidden_size)


def hidden_size_of(model: Any) -> int | None:
    """The hidden size that a model's config names, else None; the largest where there are
    several."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = getattr(config, "hidden_sizes", None) or [getattr(config, "hidden_size", None)]
    return max((size for size in sizes if isinstance(size, int)), default=None)


def _fill(raw: dict[str, Any], values: Mapping[str, Any]) -> Iterator[Problem]:
    """Sets values that are "auto"; yields those that contradict the training arguments."""
    for path, value in values.items():
        *sections, key = path.split(".")
        holder: Any = raw
        for section in sections:
            holder = holder.get(section) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or key not in holder:
            continue
        if is_auto(holder[key]):
            holder[key] = value
        elif path != "scheduler.params.warmup_min_lr" and not _is_same(holder[key], value):
            yield Problem(
                path,
                f"{holder[key]!r}, but TrainingArguments say {value!r}: give both the same, or "
                '"auto"',
            )


def _is_same(given: Any, value: Any) -> bool:
    if isinstance(value, list):
        return (
            isinstance(given, list | tuple)
            and len(given) == len(value)
            and all(map(_is_same, given, value))
        )
    if isinstance(value, bool) or not isinstance(given, int | float):
        return bool(given == value)
    return math.isclose(given, value)
