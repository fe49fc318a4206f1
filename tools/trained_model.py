"""TrainedModel: what the trainer trains, a Hugging Face model of the job's shape, built where its weights are to rest.

    seed -> zero.Init -> AutoModelForCausalLM of a shape -> activation checkpointing, if the job says so

transformers is imported when it is first asked for, and typed as Any: it is typed in parts only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tiermem.tools.job import Job
from tiermem.tools.train_config import Config

if TYPE_CHECKING:
    from torch import nn


def build_model(job: Job, config: Config) -> nn.Module:
    """The job's model with weights from its seed, built under `zero.Init`: each module goes to its home as it stands."""
    import torch

    import tiermem

    torch.manual_seed(job.seed)
    with tiermem.zero.Init(config_dict_or_path=config):
        model: nn.Module = transformers().AutoModelForCausalLM.from_config(hf_config(job.shape))
    model.train()
    if job.is_checkpointing:
        enable_checkpointing(model)
    return model


def hf_config(shape: dict[str, Any]) -> Any:
    """The transformers config of a shape. Raises ValueError for a model type that transformers does not know."""
    return transformers().AutoConfig.for_model(**shape)


def enable_checkpointing(model: Any) -> None:
    """Activation checkpointing of a Hugging Face model, by the name its version has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


def transformers() -> Any:
    """The package, imported. Raises ImportError where it is not installed."""
    return importlib.import_module("transformers")
