"""PEFT: merges adapters into a sharded base model, one layer at a time.

    model.merge_and_unload()                           of peft alone: writes weights that rest on a tier, which is refused
    the same under GatheredParameters of all weights   needs memory for the whole model
    merge_and_unload(model)                            a layer is gathered, merged and put back: memory for one layer

    model.save_pretrained(folder)         of peft alone: takes a state dict of the whole model
    adapters_state(shards, model)         of engine/adapters.py gathers what peft would write, whatever the tuner

Everything else of peft works on a sharded model as it is: see docs/peft.md.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tiermem.run.access import GatheredParameters


def merge_and_unload(
    model: Any, safe_merge: bool = False, adapter_names: list[str] | None = None
) -> nn.Module:
    """Merges adapters into the base model and removes them, as the method of peft's models does.

    The optimizer's masters of the merged weights become the merged values. A weight that rests in
    blocks (frozen_quant_type) is rounded to blocks again. Also takes a model that is not sharded.
    Collective; blocks.

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
