"""What a model with PEFT adapters saves: whatever peft asks for, whatever the tuner, with memory
for the adapters alone."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import nn

from tiermem.ranks.collectives import exchange
from tiermem.run.shards import Shards
from tiermem.weights_io import saved_buffers


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has PEFT adapters, whose weights alone are saved."""
    is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return is_peft or bool(getattr(model, "_hf_peft_config_loaded", False))


def adapters_state(shards: Shards, model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that `save_pretrained(state_dict=...)` of a model with adapters takes: values
    of what peft writes.

    What that is, peft says: rank 0 gives it every name with a tensor without values. Everything
    trained and every saved buffer is added, from which a tuner may compute what it writes. The
    other names have tensors on the meta device.

    Collective; blocks. Raises what peft raises, on rank 0.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(saved_buffers(model))
    empty = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in tensors.items()
    }
    asked = [] if shards.topology.rank else _asked(model, empty)
    chosen = set(exchange(shards.topology, asked)[0])
    values: dict[int, torch.Tensor] = {}
    for name, each in tensors.items():
        if id(each) in values:
            continue
        if not isinstance(each, nn.Parameter):
            values[id(each)] = each.detach().cpu()
        elif name in chosen or each.requires_grad:
            values[id(each)] = shards.weight(each)
    return {name: values.get(id(each), empty[name]) for name, each in tensors.items()}


def _asked(model: Any, empty: dict[str, torch.Tensor]) -> list[str]:
    """The names of these tensors that peft passes on when it saves any of the adapters."""
    names = {id(each): name for name, each in empty.items()}
    state_dict_of = importlib.import_module("peft").get_peft_model_state_dict
    found: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says it again when it saves
        for adapter in model.peft_config:
            told = state_dict_of(model, state_dict=dict(empty), adapter_name=adapter)
            found |= {names[id(each)] for each in told.values() if id(each) in names}
    return sorted(found)
