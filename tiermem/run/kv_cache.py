"""KV cache: the bytes of keys and values that a generation keeps, by a model's config, for
`OffloadPolicy.kv_bytes`.

transformers keeps the keys and values of every layer where the maths runs, for every token so far.
They grow with the text and are no part of a model's weights, so a plan must leave room for them.
"""

from __future__ import annotations

from typing import Any

import torch

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


def kv_cache_bytes(
    config: Any, num_sequences: int, num_tokens: int, dtype: torch.dtype | None = None
) -> int:
    """Returns the most bytes that the KV cache of transformers takes while it generates text.

    That is layers x heads of keys x (width of a key + width of a value) x sequences x tokens x
    bytes of an element, and one layer more, because a cache grows by making a layer's tensors anew.
    A model that forgets (sliding windows) takes less.

    Args:
        config: of a decoder: a transformers config, or anything with its attributes.
        num_sequences: that grow at once: prompts x beams.
        num_tokens: of the longest sequence in the end, its prompt included.
        dtype: of the maths. Default: the config's, else fp32.

    Raises ValueError for a config without the sizes, and for numbers below 1.
    """
    for name, number in (("num_sequences", num_sequences), ("num_tokens", num_tokens)):
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 1")
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    num_layers = _first(text, _LAYERS)
    num_heads = _first(text, _HEADS)
    head_dim = getattr(text, "head_dim", None) or _first(text, _HIDDEN) // num_heads
    of_key, of_value = (
        getattr(text, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim")
    )
    kv_heads = (
        1
        if getattr(text, "multi_query", False)
        else getattr(text, "num_key_value_heads", None) or num_heads
    )
    dtype = dtype or getattr(text, "dtype", None) or torch.float32
    layer = kv_heads * (of_key + of_value) * num_sequences * num_tokens * dtype.itemsize
    return (num_layers + 1) * layer


def _first(config: Any, names: tuple[str, ...]) -> int:
    """The first of these attributes that a config has."""
    found = (getattr(config, name, None) for name in names)
    value = next((each for each in found if each is not None), None)
    if value is None:
        raise ValueError(
            f"the model's config has no {names[0]}: give kv_bytes as a number of bytes"
        )
    return int(value)
