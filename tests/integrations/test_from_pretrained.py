"""Does from_pretrained give every kind of model its weights, on its tiers, without ever holding all
of them in memory?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from launch import launch
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, build, samples
from torch import nn
from trainings import TiermemTrainer, Trainer, arguments, assert_equal, closing, log_of, on_nvme
from transformers import AutoConfig, AutoModelForCausalLM

import tiermem
from tiermem import OffloadPolicy
from tiermem.integrations import pretrained
from tiermem.weights_io import load_safetensors
from tiermem.zero import ZeroParamStatus

HERE = Path(__file__).parent


def weights_of(model: nn.Module, policy: OffloadPolicy) -> dict[str, torch.Tensor]:
    with tiermem.shard(model, policy, is_trained=False):
        return {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_that_of_the_files(name: str, tmp_path: Path) -> None:
    plain, policy = build(name), on_nvme(tmp_path / "nvme")
    plain.save_pretrained(tmp_path / "saved", max_shard_size="50KB")  # several files and an index
    assert (tmp_path / "saved" / "model.safetensors.index.json").is_file()
    model = tiermem.from_pretrained(tmp_path / "saved", policy=policy)
    assert type(model) is type(plain) and not model.training
    torch.testing.assert_close(weights_of(model, policy), dict(plain.state_dict()), rtol=0, atol=0)


def test_the_trainer_trains_it_as_the_plain_one(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path / "saved")
    policy, found = on_nvme(tmp_path / "nvme"), []
    for kind in (Trainer, TiermemTrainer):
        if kind is Trainer:
            model, own = AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), {}
        else:
            model, own = (
                tiermem.from_pretrained(tmp_path / "saved", policy=policy),
                {"tiermem": policy},
            )
        asked = arguments(tmp_path / "out", max_steps=3)
        with closing(kind(model, asked, train_dataset=samples("gpt2"), **own)) as trainer:
            trainer.train()
            found.append(log_of(trainer))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_one_block_at_most_is_in_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(name)
    plain.save_pretrained(tmp_path)
    held: list[int] = []
    read = pretrained.StoredTensor.read

    def counted(stored: Any, reader: Any) -> torch.Tensor:
        value = read(stored, reader)
        held.append(sum(1 for each in alive if each() is not None) + 1)
        alive.append(__import__("weakref").ref(value))
        return value

    alive: list[Any] = []
    monkeypatch.setattr(pretrained.StoredTensor, "read", counted)
    tiermem.from_pretrained(tmp_path, policy=on_nvme(tmp_path / "nvme"))
    in_block = max(len(group) for group in pretrained._by_block(dict.fromkeys(plain.state_dict())))
    assert max(held) <= (2 if name == "llama" else 3 * 4 + in_block)


def test_weights_that_the_files_lack_get_initial_values_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import GPT2ForSequenceClassification

    build("gpt2").save_pretrained(tmp_path / "saved")
    policy = on_nvme(tmp_path / "nvme")
    model = tiermem.from_pretrained(
        tmp_path / "saved", policy, GPT2ForSequenceClassification, num_labels=3, pad_token_id=0
    )
    assert "lacks score.weight" in caplog.text
    assert 0.005 < weights_of(model, policy)["score.weight"].std() < 0.05


def test_weights_that_the_model_lacks_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers, which says nothing of those that its models had once."""
    model = build("llama")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    other = {
        "head.weight": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**stored, **other}, tmp_path / "model.safetensors", {"format": "pt"})
    found = dict(tiermem.from_pretrained(tmp_path).state_dict())
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=0)
    assert "holds head.weight, which LlamaForCausalLM does not have" in caplog.text
    save_file(other, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        tiermem.from_pretrained(tmp_path)


def test_dtype_is_that_of_the_config_or_the_one_asked_for(tmp_path: Path) -> None:
    build("llama").bfloat16().save_pretrained(tmp_path)
    for asked, expected in (
        (None, torch.bfloat16),
        (torch.float32, torch.float32),
        ("float16", torch.float16),
    ):
        model = tiermem.from_pretrained(tmp_path, **({} if asked is None else {"dtype": asked}))
        assert {param.dtype for param in model.parameters()} == {expected}


def in_fp8(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Rewrites weights as DeepSeek's and Qwen's fp8 models are stored, in blocks of 16 x 16;
    returns how."""
    for name, value in [*weights.items()]:
        if value.ndim == 2 and "layers" in name and not any(each % 16 for each in value.shape):
            blocks = value.unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            weights[name] = (blocks / scale).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)
            weights[name + "_scale_inv"] = scale[:, 0, :, 0].clone()
    return {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


def in_mxfp4(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Replaces experts by random values as gpt-oss is stored: blocks of 32 four-bit numbers with an
    exponent; returns how."""
    for name in [each for each in weights if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, height = weights.pop(name).shape
        weights[name + "_blocks"] = torch.randint(
            0, 256, (experts, height, width // 32, 16), dtype=torch.uint8
        )
        weights[name + "_scales"] = torch.randint(
            118, 124, (experts, height, width // 32), dtype=torch.uint8
        )
    return {"quant_method": "mxfp4"}


def gpt_oss() -> nn.Module:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "head_dim": 16,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 61,
        "pad_token_id": 0,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **sizes, **heads))


@pytest.mark.skipif(
    pretrained._loading is None,
    reason="transformers before version 5 does not dequantise while it reads",
)
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss"])
def test_a_quantised_model_has_the_values_that_transformers_gives_it(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain, policy = gpt_oss() if name == "gpt_oss" else build(name), on_nvme(tmp_path / "nvme")
    plain.save_pretrained(tmp_path / "saved")
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    how, names = (in_mxfp4 if name == "gpt_oss" else in_fp8)(weights), {*weights}
    save_file(weights, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    config = tmp_path / "saved" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text("utf-8")) | {"quantization_config": how}), "utf-8"
    )
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    model = tiermem.from_pretrained(tmp_path / "saved", policy=policy)
    assert not hasattr(model.config, "quantization_config")  # what is saved later is not quantised
    found = weights_of(model, policy)
    torch.testing.assert_close(found, dict(expected.state_dict()), rtol=0, atol=0)
    assert len([each for each in names if each.endswith(("_scale_inv", "_scales"))]) >= 4
    if name != "gpt_oss":
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0.07, atol=1e-3)


def test_prompts_of_peft_are_opened_with_their_base_model(tmp_path: Path) -> None:
    peft = pytest.importorskip(
        "peft", reason="peft is not installed (pip install peft): CI installs it"
    )
    build("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    plain = peft.get_peft_model(base, config).eval()
    plain.save_pretrained(tmp_path / "adapter")
    ids, policy = samples("llama")[0]["input_ids"][None], on_nvme(tmp_path / "nvme")
    model = tiermem.from_pretrained(tmp_path / "adapter", policy=policy)
    with tiermem.shard(model, policy, is_trained=False):
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_an_adapter_is_opened_with_its_base_model(tmp_path: Path) -> None:
    peft = pytest.importorskip(
        "peft", reason="peft is not installed (pip install peft): CI installs it"
    )
    build("llama").save_pretrained(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    asked = {
        "r": 3,
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": ["lm_head"],
        "init_lora_weights": False,
    }
    peft.get_peft_model(plain, peft.LoraConfig(**asked)).save_pretrained(tmp_path / "adapter")
    policy, found = on_nvme(tmp_path / "nvme"), []
    for kind in (Trainer, TiermemTrainer):
        if kind is Trainer:
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
            model, own = (
                peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True),
                {},
            )
        else:
            model, own = (
                tiermem.from_pretrained(tmp_path / "adapter", policy=policy),
                {"tiermem": policy},
            )
        folder = tmp_path / kind.__name__
        asked = {"save_strategy": "steps", "save_steps": 2}
        with closing(
            kind(
                model,
                arguments(folder, max_steps=4, **asked),
                train_dataset=samples("llama"),
                **own,
            )
        ) as trainer:
            trainer.train()
            found.append(log_of(trainer))
        adapters = load_file(folder / "checkpoint-4" / "adapter_model.safetensors")
        found[-1] = found[-1], adapters
    assert_equal(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-5)
    model = tiermem.from_pretrained(tmp_path / "TiermemTrainer" / "checkpoint-4", policy=policy)
    with tiermem.shard(model, policy):
        torch.testing.assert_close(
            peft.get_peft_model_state_dict(model), found[1][1], rtol=0, atol=0
        )


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="does not have"):
        tiermem.from_pretrained(tmp_path / "saved", colour="blue")
    with pytest.raises(ValueError, match="dtype is 'bf16'; allowed are"):
        tiermem.from_pretrained(tmp_path / "saved", dtype="bf16")
    with pytest.raises(ValueError, match="policy is a dict; give an OffloadPolicy"):
        tiermem.from_pretrained(tmp_path / "saved", policy={})  # type: ignore[arg-type]
    config = json.loads((tmp_path / "saved" / "config.json").read_text("utf-8"))
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "saved" / "config.json").write_text(
        json.dumps(config | {"quantization_config": how}), "utf-8"
    )
    with pytest.raises(
        ValueError,
        match="quantised by bitsandbytes, which cannot be dequantised while they are read",
    ):
        tiermem.from_pretrained(tmp_path / "saved")


def test_several_models_are_opened_in_one_init(tmp_path: Path) -> None:
    policy = on_nvme(tmp_path / "nvme")
    plain = {name: build(name) for name in ("gpt2", "llama")}
    for name, model in plain.items():
        model.save_pretrained(tmp_path / name)
    with tiermem.zero.Init(policy=policy):
        dropped = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
        del dropped  # a model that goes leaves the next ones whole
        opened = {name: AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in plain}
        opened["of a config"] = AutoModelForCausalLM.from_config(plain["llama"].config)
    load_safetensors(opened["of a config"], tmp_path / "llama")
    for name, model in opened.items():
        expected = plain.get(name, plain["llama"])
        torch.testing.assert_close(
            weights_of(model, policy), dict(expected.state_dict()), rtol=0, atol=0
        )


def test_a_meta_model_is_filled_from_files_and_its_empty_buffers_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, policy = build("llama"), on_nvme(tmp_path / "nvme")
    plain.save_pretrained(tmp_path / "saved")
    with tiermem.zero.Init(policy=policy), torch.device("meta"):
        model = type(plain)(plain.config)
    with caplog.at_level("WARNING", "tiermem"):
        load_safetensors(model, tmp_path / "saved")
    assert "model.rotary_emb.inv_freq" in caplog.text
    with pytest.raises(
        ValueError, match=r"model\.rotary_emb\.inv_freq.*: buffers on the meta device"
    ):
        weights_of(model, policy)
    for module, own in zip(model.modules(), plain.modules(), strict=True):
        module._buffers.update(own._buffers)
    torch.testing.assert_close(weights_of(model, policy), dict(plain.state_dict()), rtol=0, atol=0)


@pytest.mark.slow
def test_two_ranks_keep_a_half_each(tmp_path: Path) -> None:
    for name in ("gpt2", "mixtral"):
        build(name).save_pretrained(tmp_path / name)
    (tmp_path / "out").mkdir()
    for found in launch(HERE / "pretrained_on_ranks.py", 2, tmp_path / "out", str(tmp_path)):
        for name, (weights, share) in found.items():
            torch.testing.assert_close(weights, dict(build(name).state_dict()), rtol=0, atol=0)
            assert share < 0.6


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_transformers_own_from_pretrained_works_under_init(name: str, tmp_path: Path) -> None:
    plain, policy = build(name), on_nvme(tmp_path / "nvme")
    plain.save_pretrained(tmp_path / "saved")
    with tiermem.zero.Init(policy=policy):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert {param.ds_status for param in model.parameters()} == {
        ZeroParamStatus.NOT_AVAILABLE
    }  # they rest on their tier
    torch.testing.assert_close(weights_of(model, policy), dict(plain.state_dict()), rtol=0, atol=0)
