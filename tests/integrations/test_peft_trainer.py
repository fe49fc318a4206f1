"""Does TiermemTrainer train adapters beside a base in nf4 blocks as the plain Trainer does, also
when it is resumed?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")
pytest.importorskip("accelerate")

import peft
import torch
from tiny_models import build
from trainings import TiermemTrainer, Trainer, assert_equal, on_nvme, train

from tiermem.units.quantised import NF4, pack, unpack


def adapted() -> Any:
    """A tiny Llama with LoRA, whose base holds values of blocks: packed again they are the same."""
    torch.manual_seed(5)
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))
    for param in model.parameters():
        flat = param.detach().reshape(-1)
        if not param.requires_grad and param.dim() > 1:
            param.data = unpack(
                pack(flat, NF4), flat.numel(), torch.empty_like(flat), form=NF4
            ).view(param.shape)
    return model


@pytest.mark.slow
def test_losses_equal_the_plain_trainers_also_when_resumed(tmp_path: Path) -> None:
    policy = on_nvme(tmp_path / "nvme", frozen_quant_type="nf4")
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
    expected = train(Trainer, "llama", tmp_path / "plain", model=adapted(), **saves)
    ours = tmp_path / "ours"
    assert_equal(
        train(TiermemTrainer, "llama", ours, model=adapted(), tiermem=policy, **saves), expected
    )
    saved = [file.read_text("utf-8") for file in (ours / "checkpoint-5").rglob("manifest-*.json")]
    assert any('"at_rest":"nf4"' in each.replace(" ", "") for each in saved)
    resumed = train(
        TiermemTrainer,
        "llama",
        ours,
        str(ours / "checkpoint-5"),
        model=adapted(),
        tiermem=policy,
        **saves,
    )
    assert_equal(resumed, expected)
