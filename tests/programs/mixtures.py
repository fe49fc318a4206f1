"""Mixtures: tiny models of transformers with fused experts, and how few of these tokens use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from programs.models import VOCAB

NUM_EXPERTS = 16
NUM_CHOSEN = 2
WIDTH = 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": NUM_CHOSEN,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def mixtral(**sizes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_local_experts=NUM_EXPERTS, **SIZES | sizes))


def qwen3_moe(**sizes: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    given = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": WIDTH, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | given | sizes))


def gpt_oss(**sizes: Any) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(num_local_experts=NUM_EXPERTS, head_dim=8, **SIZES | sizes)
    return GptOssForCausalLM(config)


def deepseek_v3(**sizes: Any) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    given = {"n_routed_experts": NUM_EXPERTS, "moe_intermediate_size": WIDTH, "n_group": 4}
    given |= {"topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
    given |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    given |= {"num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES | given | sizes))


def olmoe(**sizes: Any) -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return OlmoeForCausalLM(OlmoeConfig(num_experts=NUM_EXPERTS, **SIZES | sizes))


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    each.__name__: each for each in (mixtral, qwen3_moe, gpt_oss, deepseek_v3, olmoe)
}


def tokens_of(step: int, length: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(step))


def experts_in(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with fused experts, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "has_gate")}


class Choices:
    """Notes which experts the tokens of a model choose, by module and call."""

    def __init__(self, model: nn.Module) -> None:
        self.of: dict[str, list[set[int]]] = {}
        for name, module in experts_in(model).items():
            self.of[name] = []
            module.register_forward_pre_hook(functools.partial(self._note, name))

    def _note(self, name: str, module: nn.Module, args: Any) -> None:
        self.of[name].append(set(args[1].unique().tolist()))

    def used(self, name: str) -> set[int]:
        """All that any call has used."""
        return set().union(*self.of[name])
