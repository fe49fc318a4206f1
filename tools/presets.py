"""Presets: shapes of Llama-family models, as the dictionaries of a Hugging Face config.json. The
config.json of a diffusion model (diffusers) is a shape, too.

    151m, 419m   the shapes of this project's measurements (419m: 24 layers of 1024, vocabulary 8192)
    1.3b         24 layers of 2048          7b   Llama-2-7B
    1b, 3b, 8b, 14b, 32b, 70b   today's models of these sizes, as a Llama has them: those of docs/sizing.md

They are plain dictionaries, so that reading them does not import transformers.
"""

from __future__ import annotations

import collections
import functools
import importlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tiermem.tools.words import Mistake, closest, read_json

ModelShape = dict[str, Any]
OF_DIFFUSERS = "_class_name"
"""A key of a shape: the class of diffusers."""


def llama(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    vocabulary: int,
    key_value_heads: int | None = None,
) -> ModelShape:
    """The shape of a Llama, without the key/value cache; key_value_heads: None: each head has keys
    and values of its own."""
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads or heads,
        "use_cache": False,
    }


_SIZES = (
    "num_hidden_layers", "n_layer", "num_layers", "hidden_size", "n_embd", "vocab_size", "intermediate_size", "n_inner",
    "num_attention_heads", "n_head", "num_key_value_heads", "head_dim",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ENCODERS = frozenset(
    {"albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "roberta",
     "xlm-roberta"}
)  # fmt: skip
_OF_DEEPSPEED = frozenset(
    {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "tiermem"}
)
_NUM_BYTE_VALUES = 256

PRESETS: dict[str, ModelShape] = {
    "151m": llama(1024, 4096, 8, 16, 8192),
    "419m": llama(1024, 4096, 24, 16, 8192),
    "1.3b": llama(2048, 5504, 24, 16, 32000),
    "7b": llama(4096, 11008, 32, 32, 32000),
    "1b": {**llama(2048, 8192, 16, 32, 128256, 8), "tie_word_embeddings": True},
    "3b": {**llama(3072, 8192, 28, 24, 128256, 8), "tie_word_embeddings": True},
    "8b": llama(4096, 14336, 32, 32, 128256, 8),
    "14b": llama(5120, 13824, 48, 40, 152064, 8),
    "32b": llama(5120, 27648, 64, 40, 152064, 8),
    "70b": llama(8192, 28672, 80, 64, 128256, 8),
}


def preset(name: str) -> ModelShape:
    """A copy of a preset. Raises ValueError that names those there are."""
    if name not in PRESETS:
        raise Mistake(
            f"the preset is {name!r}; allowed are {', '.join(PRESETS)}",
            {"--preset": f"--preset {closest(name, PRESETS)}"},
        )
    return dict(PRESETS[name])


def read_shape(file: Path) -> ModelShape:
    """A Hugging Face config.json, without the key/value cache, or one of diffusers. Raises OSError,
    or ValueError that says what is wrong."""
    read = read_json(file)
    shape = read if isinstance(read, dict) else {}
    if not _OF_DEEPSPEED.isdisjoint(shape):
        raise Mistake(
            f"{file} is no Hugging Face config, but one for DeepSpeed",
            {"--model": f"--preset 419m --config {shlex.quote(str(file))}"},
        )
    if OF_DIFFUSERS in shape:
        return shape
    if "model_type" not in shape:
        raise ValueError(
            f'{file} is no Hugging Face config: it must be an object with a "model_type"'
        )
    return {**shape, "use_cache": False}


def shape_of(name: str | None, file: Path | None) -> ModelShape:
    """A preset, or the config.json that --model named. Raises ValueError, FileNotFoundError."""
    if name is not None:
        return preset(name)
    assert file is not None
    if not file.is_file():
        raise FileNotFoundError(f"--model: there is no file {file}")
    if file.suffix == ".safetensors":
        raise ValueError(
            f"--model: {file} holds weights, not the model's shape: give the config.json of the "
            "same model, or its folder"
        )
    return read_shape(file)


def check_shape(shape: ModelShape) -> None:
    """Raises ValueError for a shape that no causal language model over bytes has."""
    if OF_DIFFUSERS in shape:
        raise ValueError(
            f"{shape[OF_DIFFUSERS]} is a diffusion model: write a script (docs/diffusion.md)"
        )
    kind = shape.get("model_type")
    if kind in _ENCODERS and not shape.get("is_decoder"):
        raise ValueError(
            f"model_type is {kind!r}, an encoder; causal language models are trained, such as "
            "llama or gpt2"
        )
    check_sizes(shape)
    vocabulary = shape.get("vocab_size")
    if vocabulary is not None and vocabulary < _NUM_BYTE_VALUES:
        raise ValueError(
            f"vocab_size is {vocabulary}; bytes of text are the tokens, so at least "
            f"{_NUM_BYTE_VALUES} are due"
        )


def check_sizes(shape: ModelShape) -> None:
    """Raises ValueError for sizes that no model of transformers has."""
    if OF_DIFFUSERS in shape:
        return
    for key in _SIZES:
        value = shape.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(
                f"{key} is {value!r} in the model's config; it must be a whole number of 1 or more"
            )
    hidden = None if shape.get("head_dim") else shape.get("hidden_size", shape.get("n_embd"))
    heads = shape.get("num_attention_heads", shape.get("n_head"))
    few = shape.get("num_key_value_heads")
    for key, part, whole_key, whole in (
        ("num_attention_heads", heads, "hidden_size", hidden),
        ("num_key_value_heads", few, "num_attention_heads", heads),
    ):
        if part and whole and whole % part:
            raise ValueError(
                f"{key} is {part}, which does not divide {whole_key} {whole}: change one of them"
            )


def with_layers(shape: ModelShape, num_layers: int) -> ModelShape:
    """The same shape with another number of layers. Raises ValueError where the model has no such
    key."""
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if key in shape:
            return {**shape, key: num_layers}
    raise ValueError(
        f"--layers: a {shape.get('model_type')} config without num_hidden_layers cannot be made "
        "deeper"
    )


_LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose models are computed as a Llama's."""


class ModelSizes(NamedTuple):
    """What the formulas need of a model's shape."""

    hidden: int
    intermediate: int  # that one token goes through: of all experts that it chooses
    num_layers: int
    num_heads: int
    key_value: int  # width of keys, and of values
    vocabulary: int
    is_llama: bool = False  # its logits are a product with the head's weight, and nothing else
    num_experts: int = 1  # of one layer, fused in one weight
    num_chosen: int = 0  # by each token; 0: the layers have no experts
    counted: tuple[int, int] | None = None
    """Parameters of the largest block, and of the largest weight, where they were counted."""
    saved_places: int | None = None
    """What autograd saves per token in a block, in widths; 0: it is not known; None: a Llama's."""

    @staticmethod
    def of(shape: Mapping[str, Any]) -> ModelSizes:
        """Reads a Hugging Face config, or builds a diffusion model without memory and counts.
        Raises ValueError that names the key that a config lacks."""
        if OF_DIFFUSERS in shape:
            return _counted(json.dumps(dict(shape)))
        hidden = _key(shape, "hidden_size", "n_embd", "d_model")
        num_heads = _key(shape, "num_attention_heads", "n_head", "num_heads")
        head_dim = shape.get("head_dim") or hidden // num_heads
        width = shape.get("intermediate_size") or shape.get("n_inner") or 4 * hidden
        counts = (shape.get(key) for key in _EXPERTS)
        num_experts = next((each for each in counts if isinstance(each, int) and each), 1)
        num_chosen = shape.get("num_experts_per_tok") or 1 if num_experts > 1 else 0
        if num_chosen:
            width = shape.get("moe_intermediate_size") or width
        return ModelSizes(
            hidden=hidden,
            intermediate=width * max(1, num_chosen),
            num_layers=_key(shape, "num_hidden_layers", "n_layer", "num_layers"),
            num_heads=num_heads,
            key_value=head_dim * (shape.get("num_key_value_heads") or num_heads),
            vocabulary=_key(shape, "vocab_size"),
            is_llama=shape.get("model_type") in _LLAMAS,
            num_experts=num_experts,
            num_chosen=num_chosen,
        )

    @property
    def block_numel(self) -> int:
        """Parameters of one block."""
        if self.counted is not None:
            return self.counted[0]
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.key_value
        return attention + 3 * self.hidden * self._width + 2 * self.hidden

    @property
    def _width(self) -> int:
        """Of all experts of a layer together."""
        return self.intermediate * self.num_experts // max(1, self.num_chosen)

    @property
    def unit_numel(self) -> int:
        """Parameters of the largest unit: a block, or the embedding."""
        return max(self.block_numel, self.vocabulary * self.hidden)

    @property
    def weight_numel(self) -> int:
        """Elements of the largest weight."""
        if self.counted is not None:
            return self.counted[1]
        fused = 2 * self._width if self.num_chosen else self.intermediate
        return self.hidden * max(fused, self.vocabulary)


_SAVED_PLACES = 40
"""What autograd saves per token in a block of a diffusion transformer, in widths: 22 to 40 in ten
families (test_plan_diffusion.py)."""


@functools.cache
def _counted(shape: str) -> ModelSizes:
    """The sizes of a diffusion model, whose config is given as JSON."""
    diffusion = importlib.import_module("tiermem.integrations.diffusion")
    model, blocks = diffusion.build_meta(json.loads(shape))
    weights = [param for block in blocks for param in block.parameters() if param.dim() == 2]
    widths = collections.Counter(param.shape[1] for param in weights)
    return ModelSizes(
        hidden=max(widths, key=widths.__getitem__, default=1),
        intermediate=0,
        num_layers=len(blocks),
        num_heads=0,
        key_value=0,
        vocabulary=0,
        counted=(
            max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0),
            max(param.numel() for param in model.parameters()),
        ),
        # of convolutions no formula tells it
        saved_places=0 if "block_out_channels" in shape else _SAVED_PLACES,
    )


def _key(shape: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(shape.get(name), int):
            return int(shape[name])
    raise ValueError(
        f"the model's config has no {names[0]}, which the arithmetic of activations needs"
    )
