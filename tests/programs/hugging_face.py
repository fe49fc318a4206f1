"""Programs: real models of the transformers library in tiny sizes, two steps each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from programs.faces import Face, Found, Program
from programs.layers import noise
from programs.models import VOCAB
from programs.twins import batch

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
Inputs = Callable[[int], dict[str, Any]]


def tokens(seed: int) -> dict[str, Any]:
    inputs, _ = batch(seed)
    return {"input_ids": inputs, "labels": inputs.contiguous()}


def pixels(seed: int) -> dict[str, Any]:
    return {"pixel_values": noise(seed, 2, 3, 8, 8), "labels": torch.tensor([seed % 3, 1])}


def two_steps(face: Face, model: nn.Module, inputs: Inputs) -> Found:
    model = face.shard(model.train())
    optim = face.adamw(model.parameters())
    losses = []
    for step in range(2):
        torch.manual_seed(face.sample(step))  # of dropout
        output = model(**inputs(face.sample(step)))
        loss = output.loss if "loss" in output else output.last_hidden_state.square().mean()
        loss.backward()
        face.step(optim)
        losses.append(loss.item())
    return {"losses": losses, "weights": face.weights(model)}


def gpt2_with_tied_embeddings(face: Face) -> Found:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return two_steps(face, model, tokens)


def t5(face: Face) -> Found:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return two_steps(face, T5ForConditionalGeneration(config), tokens)


def bart(face: Face) -> Found:
    from transformers import BartConfig, BartForConditionalGeneration

    layers = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 2), ("ffn_dim", 64))
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(vocab_size=VOCAB, d_model=32, max_position_embeddings=32, **layers, **heads)
    return two_steps(face, BartForConditionalGeneration(config), tokens)


def mixtral(face: Face) -> Found:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        pad_token_id=0,
        **_SIZES,
    )
    return two_steps(face, MixtralForCausalLM(config), tokens)


def vit(face: Face) -> Found:
    from transformers import ViTConfig, ViTForImageClassification

    return two_steps(
        face,
        ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **_SIZES)),
        pixels,
    )


def bert_with_its_pooler_unused(face: Face) -> Found:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(vocab_size=VOCAB, max_position_embeddings=16, **_SIZES))

    def inputs(seed: int) -> dict[str, Any]:
        return {"input_ids": batch(seed)[0]}

    return two_steps(face, model, inputs)


PROGRAMS: dict[str, Program] = {
    each.__name__: each
    for each in (
        gpt2_with_tied_embeddings,
        t5,
        bart,
        mixtral,
        vit,
        bert_with_its_pooler_unused,
    )
}
