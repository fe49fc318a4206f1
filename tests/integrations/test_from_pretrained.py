"""Does from_pretrained give every kind of model its weights, on its tiers, without ever holding all of them in memory?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from launch import launch
from tiny_models import MODELS, build, samples
from torch import nn
from trainings import TiermemTrainer, Trainer, arguments, assert_equal, closing, log_of, on_nvme
from transformers import AutoModelForCausalLM

import tiermem
from tiermem import OffloadPolicy
from tiermem.integrations import pretrained
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
            model, own = tiermem.from_pretrained(tmp_path / "saved", policy=policy), {"tiermem": policy}
        asked = arguments(tmp_path / "out", max_steps=3)
        with closing(kind(model, asked, train_dataset=samples("gpt2"), **own)) as trainer:
            trainer.train()
            found.append(log_of(trainer))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_one_block_at_most_is_in_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build(name)
    plain.save_pretrained(tmp_path)
    held: list[int] = []
    read = pretrained.Stored.read

    def counted(stored: Any, reader: Any) -> torch.Tensor:
        value = read(stored, reader)
        held.append(sum(1 for each in alive if each() is not None) + 1)
        alive.append(__import__("weakref").ref(value))
        return value

    alive: list[Any] = []
    monkeypatch.setattr(pretrained.Stored, "read", counted)
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


def test_dtype_is_that_of_the_config_or_the_one_asked_for(tmp_path: Path) -> None:
    build("llama").bfloat16().save_pretrained(tmp_path)
    for asked, expected in ((None, torch.bfloat16), (torch.float32, torch.float32), ("float16", torch.float16)):
        model = tiermem.from_pretrained(tmp_path, **({} if asked is None else {"dtype": asked}))
        assert {param.dtype for param in model.parameters()} == {expected}


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="does not have"):
        tiermem.from_pretrained(tmp_path / "saved", colour="blue")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}", "utf-8")
    with pytest.raises(ValueError, match="holds an adapter"):
        tiermem.from_pretrained(tmp_path / "adapter")


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
