"""Pretrained: the plan of a model of the hub or of a folder, on this machine, before its weights are
read.

    its config, adapters -> model on the meta device -> --config, or the fastest plan that
    free memory, or a cap, holds  ->  policy -> weights streamed to where it has them
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig

from tiermem.checkpoint.format.kinds import name_of
from tiermem.engine.room import Room, compute_policy, find_room
from tiermem.forecast.choose import HOMES
from tiermem.integrations.arguments import config_beside, hidden_size_of
from tiermem.integrations.choice import Asked
from tiermem.integrations.models import class_of
from tiermem.plans.activations import PredictedActivations, activations_of
from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import Precision
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.tools.job.launcher import Job
from tiermem.tools.job.train_job import nvme_folders, with_host_bytes
from tiermem.tools.plan.budget import ActivationBytes, Budget, plan_budget
from tiermem.tools.words import format_bytes


class PlannedModel(NamedTuple):
    """How a model is to be trained."""

    job: Job
    """With the sizes of the model and of the training."""
    asked: Asked
    """What TiermemTrainer is given."""
    policy: OffloadPolicy
    budget: Budget | None
    """The arithmetic, under a cap."""
    settings: dict[str, Any]
    """For `from_pretrained`."""


def plan_pretrained(
    job: Job, name: str, args: Any, peft_config: Any, process_bytes: int
) -> PlannedModel:
    """Plans the training of a model by TRL's arguments. Allocates nothing. Collective; blocks.

    Raises ValueError, with the arithmetic, where nothing fits.
    """
    settings = {key: each for key, each in args.model_init_kwargs.items() if each is not None}
    of_hub = {key: settings[key] for key in ("revision", "trust_remote_code") if key in settings}
    config = AutoConfig.from_pretrained(name, **of_hub)
    asked: Any = job.config
    if asked and config_beside(asked, args).precision == "bf16":
        settings["dtype"] = "bfloat16"  # TRL's own default is float32
    named = settings.get("dtype", "auto")
    dtype = (config.dtype or torch.float32) if named == "auto" else getattr(torch, named)
    with torch.device("meta"):
        model: Any = class_of(config)._from_config(config, dtype=dtype)
        if peft_config is not None:
            peft = importlib.import_module("peft")
            model = peft.get_peft_model(model, copy.deepcopy(peft_config))
    text = config.get_text_config()
    computed = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else dtype
    job = dataclasses.replace(
        job,
        shape={**text.to_dict(), "use_cache": False},
        batch=args.per_device_train_batch_size,
        seq=args.max_length or text.max_position_embeddings,
        precision=name_of(computed),
        is_checkpointing=bool(
            getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing
        ),
    )
    room = find_room(model, args.device, _activations(model, job, args))
    budget = None
    if job.memory_limit_bytes is not None:
        budget = plan_budget(
            job.memory_limit_bytes,
            process_bytes,
            ActivationBytes.of(job, is_accelerator(args.device)),
        )
        room = room._replace(host_bytes=max(1, budget.left_bytes) * job.ranks_on_node)
    if asked:
        asked = asked if budget is None else with_host_bytes(asked, room.host_bytes)
        policy = config_beside(asked, args, hidden_size_of(model)).policy()
        job = dataclasses.replace(job, nvme_paths=nvme_folders(asked))
    else:
        asked = policy = _policy(job, model, args, room, budget)
        job = dataclasses.replace(job, nvme_paths=[str(each.path) for each in policy.paths])
    return PlannedModel(job, asked, policy, budget, settings)


def _activations(model: Any, job: Job, args: Any) -> PredictedActivations | None:
    """Those of a micro-batch of the longest texts."""
    model.train()
    if job.is_checkpointing:
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    tokens = torch.zeros(job.batch, job.seq, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    return activations_of(model, lambda each, given: each(**given).loss, batch, args.device)


def _policy(job: Job, model: nn.Module, args: Any, room: Room, budget: Budget | None) -> Any:
    """That of --offload and --states, or of the fastest plan."""
    offload = job.sft["offload"] or "auto"
    home = None if offload == "auto" else Tier(offload)
    policy = OffloadPolicy(
        params=home or Tier.HOST,
        optim=home or Tier.HOST,
        paths=(job.nvme_paths or [args.output_dir]) if home in (None, Tier.NVME) else (),
        precision=Precision.preset(job.sft["states"] or "exact"),
        frozen_quant_type=job.sft["frozen"],
    )
    num_micro = args.gradient_accumulation_steps
    moved = HOMES if home is None else ()
    try:
        return compute_policy(model, policy, args.device, args.world_size, room, num_micro, moved)
    except ValueError as error:
        small = f"{format_bytes(room.host_bytes)} of host memory, which are free for a plan, are"
        if budget is not None:
            small = f"--memory {format_bytes(budget.cap_bytes)} is"
        why = f" ({budget.explain()})" if budget is not None else ""
        raise ValueError(
            f"{small} too small for this training{why}: give --offload nvme, --states tiny, a "
            "smaller --max_length or more memory"
        ) from error
