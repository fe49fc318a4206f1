"""Do adapters of the peft library train sharded as they do in plain PyTorch? Skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import zoo
from faces import Face, Found, Plain, Sharded, compare, fit, run
from program_list import HOMES, policy_of

peft = pytest.importorskip("peft")


def lora(face: Face) -> Found:
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    return fit(face, peft.get_peft_model(zoo.llama(), config), zoo.loss_of)


def lora_with_trained_head(face: Face) -> Found:
    config = peft.LoraConfig(r=3, target_modules="all-linear", modules_to_save=["lm_head"])
    return fit(face, peft.get_peft_model(zoo.llama(), config), zoo.loss_of)


def adapter_switched_off(face: Face) -> Found:
    """The frozen base serves as its own reference, as in preference training."""
    model = face.shard(peft.get_peft_model(zoo.llama(), peft.LoraConfig(r=3, target_modules=["q_proj"])))
    optim = face.adamw([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(3):
        with model.disable_adapter():
            before = zoo.loss_of(model, face.sample(step)).detach()
        loss = (zoo.loss_of(model, face.sample(step)) - before).square() + zoo.loss_of(model, face.sample(step))
        loss.backward()
        face.step(optim)
        losses.append(loss.item())
    return {"losses": losses, "weights": face.weights(model)}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    "program", [lora, lora_with_trained_head, adapter_switched_off], ids=lambda each: each.__name__
)
def test_peft_adapters_train_as_in_plain_pytorch(program: object, home: str, tmp_path: Path) -> None:
    assert callable(program)
    assert compare(run(program, Sharded(policy_of(home, tmp_path))), run(program, Plain())) == []
