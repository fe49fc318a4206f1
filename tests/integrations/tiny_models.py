"""Tiny models: transformers' models in tiny sizes, built from configs with one seed, and a data set
for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

VOCAB = 61
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

Sample = dict[str, Any]


class Samples(Dataset[Sample]):
    """Samples made from their number."""

    def __init__(self, make: Callable[[torch.Generator], Sample], num_samples: int = 64) -> None:
        self._make, self._num_samples = make, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> Sample:
        return self._make(torch.Generator().manual_seed(number))


def tokens(generator: torch.Generator, length: int = 12) -> torch.Tensor:
    return torch.randint(1, VOCAB, (length,), generator=generator)


def language(generator: torch.Generator) -> Sample:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def pair(generator: torch.Generator) -> Sample:
    return {"input_ids": tokens(generator), "labels": tokens(generator, 7)}


def pixels(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(3, 8, 8, generator=generator)


def picture(generator: torch.Generator) -> Sample:
    return {
        "pixel_values": pixels(generator),
        "labels": torch.randint(0, 3, (), generator=generator),
    }


def captioned(generator: torch.Generator) -> Sample:
    return {"input_ids": tokens(generator), "pixel_values": pixels(generator)}


def speech(generator: torch.Generator) -> Sample:
    return {
        "input_features": torch.randn(8, 16, generator=generator),
        "labels": tokens(generator, 7),
    }


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **sizes))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, pad_token_id=0, max_position_embeddings=32, **_SIZES)
    )


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, pad_token_id=0, **experts, **_SIZES))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **_SIZES))


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 1), ("ffn_dim", 64))
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 8}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = WhisperConfig(
        vocab_size=VOCAB,
        d_model=32,
        num_mel_bins=8,
        max_target_positions=16,
        **layers,
        **heads,
        **ids,
    )
    return WhisperForConditionalGeneration(config)


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 16,
        "bos_token_id": 0,
        "eos_token_id": 2,
        **_SIZES,
    }
    vision = {"image_size": 8, "patch_size": 4, **_SIZES}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Sample]]] = {
    "gpt2": (gpt2, language),
    "llama": (llama, language),
    "mixtral": (mixtral, language),
    "t5": (t5, pair),
    "vit": (vit, picture),
    "whisper": (whisper, speech),
    "clip": (clip, captioned),
}


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name][0]()


def samples(name: str, num_samples: int = 64) -> Samples:
    return Samples(MODELS[name][1], num_samples)
