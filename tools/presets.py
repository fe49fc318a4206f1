"""Presets: shapes of Llama-family models, as the dictionaries a Hugging Face config.json holds.

    151m, 419m   the shapes this project measures itself with (419m: 24 layers of 1024, vocabulary 8192)
    1.3b         24 layers of 2048          3b   OpenLLaMA-3B          7b   Llama-2-7B

Plain dictionaries: reading them costs no import of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ModelShape = dict[str, Any]


def _llama(hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int) -> ModelShape:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "use_cache": False,
    }


PRESETS: dict[str, ModelShape] = {
    "151m": _llama(1024, 4096, 8, 16, 8192),
    "419m": _llama(1024, 4096, 24, 16, 8192),
    "1.3b": _llama(2048, 5504, 24, 16, 32000),
    "3b": _llama(3200, 8640, 26, 32, 32000),
    "7b": _llama(4096, 11008, 32, 32, 32000),
}


def preset(name: str) -> ModelShape:
    """A copy of a preset. Raises ValueError that names those there are."""
    if name not in PRESETS:
        raise ValueError(f"the preset is {name!r}; allowed are {', '.join(PRESETS)}")
    return dict(PRESETS[name])


def read_shape(file: Path) -> ModelShape:
    """A Hugging Face config.json, without the key/value cache. Raises OSError, or ValueError that says what is wrong."""
    try:
        shape = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(shape, dict) or "model_type" not in shape:
        raise ValueError(f'{file} is no Hugging Face config: it must be an object with a "model_type"')
    return {**shape, "use_cache": False}


def with_layers(shape: ModelShape, num_layers: int) -> ModelShape:
    """The same shape with another number of layers. Raises ValueError where the model has no such key."""
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if key in shape:
            return {**shape, key: num_layers}
    raise ValueError(f"--layers: a {shape.get('model_type')} config without num_hidden_layers cannot be made deeper")
