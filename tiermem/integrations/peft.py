"""PEFT: merges adapters into a sharded base model, one layer at a time.

    model.merge_and_unload()                           of peft alone: writes weights that rest on a tier, which is refused
    the same under GatheredParameters of all weights   needs memory for the whole model
    merge_and_unload(model)                            a layer is gathered, merged and put back: memory for one layer

    model.save_pretrained(folder)         of peft alone: takes a state dict of the whole model
    adapters_state(shards, model)         gathers what peft would write, whatever the tuner: memory for the adapters

Everything else of peft works on a sharded model as it is: see docs/peft.md.
"""

from __future__ import annotations

import importlib
import json
import warnings
from typing import Any

import torch
from torch import nn

from tiermem.weights import saved_buffers
from tiermem.zero.access import GatheredParameters
from tiermem.zero.collectives import exchange
from tiermem.zero.shards import Shards


def merge_and_unload(model: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> nn.Module:
    """Merges adapters into the base model and removes them, as the method of peft's models does.

    The optimizer's masters of the merged weights become the merged values. A weight that rests in blocks (frozen_quant_type) is
    rounded to blocks again. Also takes a model that is not sharded. Collective; blocks.

    Args:
        model: a peft.PeftModel.
        safe_merge: check each merged weight for NaN first; raises ValueError.
        adapter_names: those to merge; None: the active ones.

    Returns the base model, whose parameters keep their identity.
    """
    for layer in model.modules():
        if not (hasattr(layer, "get_base_layer") and hasattr(layer, "merge")):
            continue
        base = list(layer.get_base_layer().parameters())
        others = [param for param in layer.parameters() if all(param is not each for each in base)]
        with GatheredParameters(others), GatheredParameters(base, modifier_rank=0):
            layer.merge(safe_merge=safe_merge, adapter_names=adapter_names)
    unloaded: nn.Module = model.base_model.unload()
    return unloaded


def adapters_state(shards: Shards, model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that `save_pretrained(state_dict=...)` of a model with adapters takes: values of what peft writes.

    What that is, peft says: rank 0 gives it every name with a tensor without values. Everything trained and every saved buffer
    is added, from which a tuner may compute what it writes. The other names have tensors on the meta device.

    Collective; blocks. Raises what peft raises, on rank 0.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    saved = saved_buffers(model)
    tensors |= {name: each for name, each in model.named_buffers(remove_duplicate=False) if name in saved}
    empty = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
    asked = "" if shards.topology.rank else json.dumps(_asked(model, empty))
    chosen = set(json.loads(exchange(shards.topology, asked)[0]))
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
