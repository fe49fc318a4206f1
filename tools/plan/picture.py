"""Picture: the memory and the maths of a UNet on one picture, whose widths no formula tells. They are
found by a run on tensors without values."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tiermem.integrations.diffusion import build_meta, is_unet, unet_activations


class Picture(NamedTuple):
    """What one picture takes of a UNet."""

    num_places: int
    """Of its latents."""
    kept_bytes: int
    """At the end of the forward, in 16 bits."""
    working_bytes: int
    """At most, beside those."""
    mean_tokens: int
    """By how many tokens a weight is multiplied, on average."""

    @staticmethod
    def of(shape: Mapping[str, Any], is_checkpointing: bool) -> Picture | None:
        """Takes seconds, once for a shape; None: the model is no UNet that could be run so."""
        return _picture(json.dumps(dict(shape)), is_checkpointing) if is_unet(shape) else None


@functools.cache
def _picture(shape: str, is_checkpointing: bool) -> Picture | None:
    config = json.loads(shape)
    model = build_meta(config)[0]
    found = unet_activations(model, is_checkpointing)
    if found is None:
        return None
    numel = sum(param.numel() for param in model.parameters() if param.dim() > 1)
    return Picture(
        num_places=config["sample_size"] ** 2,
        kept_bytes=found.kept_bytes,
        working_bytes=found.peak_bytes - found.kept_bytes,
        mean_tokens=found.forward_flops // (2 * numel),
    )
