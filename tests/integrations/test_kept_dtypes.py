"""Does a tensor have the dtype that transformers gives it, and its bits: kept in fp32, or in files
of several dtypes?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file
from trainings import on_nvme

import tiermem
from tiermem.integrations.pretrained import save_pretrained_weights

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
LLAMA = SMALL | {"intermediate_size": 64, "num_key_value_heads": 4}
EXPERTS = LLAMA | {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
GROUPS = EXPERTS | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
RWKV = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "rescale_every": 0}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0}


class Case(NamedTuple):
    kind: str
    config: str
    fields: dict[str, Any]
    dtype: torch.dtype
    num_kept: int  # tensors in fp32, at least


CASES = {
    "deepseek v3": Case("DeepseekV3ForCausalLM", "DeepseekV3Config", GROUPS | LATENT, torch.bfloat16, 1),
    "ernie": Case("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", LLAMA | ERNIE, torch.bfloat16, 4),
    "glm4": Case("Glm4MoeForCausalLM", "Glm4MoeConfig", GROUPS | {"head_dim": 8}, torch.bfloat16, 1),
    "dots1": Case("Dots1ForCausalLM", "Dots1Config", GROUPS, torch.bfloat16, 1),
    "gpt oss": Case(
        "GptOssForCausalLM", "GptOssConfig", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        torch.float16, 5,
    ),
    "t5": Case("T5ForConditionalGeneration", "T5Config", T5, torch.float16, 4),
    "mt5": Case("MT5ForConditionalGeneration", "MT5Config", T5, torch.float16, 4),
    "umt5": Case("UMT5ForConditionalGeneration", "UMT5Config", T5, torch.float16, 4),
    "rwkv": Case("RwkvForCausalLM", "RwkvConfig", RWKV, torch.float16, 4),
    "llama, norms in fp32 in its files": Case("LlamaForCausalLM", "LlamaConfig", LLAMA, torch.bfloat16, 0),
    "llama, no dtype in its config": Case("LlamaForCausalLM", "LlamaConfig", LLAMA, torch.bfloat16, 0),
}  # fmt: skip


def saved(case: Case, name: str, folder: Path) -> Path:
    """A model whose kept tensors have values that no 16-bit type has."""
    kind = getattr(transformers, case.kind)
    torch.manual_seed(0)
    model = kind(getattr(transformers, case.config)(**case.fields))
    plan = model._get_dtype_plan(case.dtype)
    for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        is_kept = any(word in tensor_name for word in plan) or (
            "llama" in name and "norm" in tensor_name
        )
        if is_kept and tensor.is_floating_point():
            tensor.data = 1 + torch.rand(tensor.shape) / 100
        elif tensor.is_floating_point() and "inv_freq" not in tensor_name:
            tensor.data = tensor.data.to(case.dtype)
    model.config.dtype = case.dtype
    model.save_pretrained(folder)
    if "llama" in name:
        file = folder / "model.safetensors"
        values = {
            key: each.float() if "norm" in key else each for key, each in load_file(file).items()
        }
        save_file(values, file, {"format": "pt"})
    if "no dtype" in name:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({key: each for key, each in config.items() if "dtype" not in key})
        )
    return folder


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_dtypes_and_bits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case, folder = CASES[name], saved(CASES[name], name, tmp_path / "model")
    kind, policy = getattr(transformers, case.kind), on_nvme(tmp_path / "nvme")
    (tmp_path / "nvme").mkdir(exist_ok=True)
    plain = kind.from_pretrained(folder, dtype="auto")
    plain.save_pretrained(tmp_path / "plain")
    expected = plain.state_dict()
    assert sum(each.dtype == torch.float32 for each in expected.values()) >= case.num_kept
    with tiermem.shard(tiermem.from_pretrained(folder, policy=policy), policy) as shards:
        found = shards.model.state_dict()
        save_pretrained_weights(shards, tmp_path)
    assert {key: each.dtype for key, each in found.items()} == {
        key: each.dtype for key, each in expected.items()
    }
    assert [key for key, each in expected.items() if not torch.equal(each, found[key])] == []
    files = (
        load_file(tmp_path / "plain" / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert {key: each.dtype for key, each in files[1].items()} == {
        key: each.dtype for key, each in files[0].items()
    }
    assert all(torch.equal(each, files[1][key]) for key, each in files[0].items())
