"""Programs with adapters of the peft library, which has to be installed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from programs import models
from programs.faces import Face, Found, Program, Sharded, fit
from programs.twins import loss_of
from tiermem.integrations.peft import merge_and_unload
from tiermem.units.quantised import NF4, pack, unpack
from tiermem.zero import GatheredParameters


def adapted(**fields: Any) -> Any:
    """A small Llama with adapters whose products are not zero, so that every weight matters from
    the first step on."""
    model = peft.get_peft_model(
        models.llama(), peft.LoraConfig(**({"r": 3, "target_modules": ["q_proj"]} | fields))
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.02)
    return model


NUM_STEPS = 10
HOMES = ["host", "nvme"]
"""The homes of weights and states under which every program runs on ranks; in one process also
"device"."""


def train(face: Face, model: Any) -> Found:
    return fit(face, model, loss_of, num_steps=NUM_STEPS)


def lora(face: Face) -> Found:
    return train(face, adapted(target_modules=["q_proj", "v_proj", "down_proj"]))


def lora_with_trained_head(face: Face) -> Found:
    return train(face, adapted(target_modules="all-linear", modules_to_save=["lm_head"]))


def lora_on_a_bf16_base(face: Face) -> Found:
    model = adapted().bfloat16()
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.float()
    return train(face, model)


def dora(face: Face) -> Found:
    """Its magnitude is a norm of the frozen weight, which is used outside of the Linear's own
    forward."""
    return train(face, adapted(use_dora=True))


def adapter_switched_off(face: Face) -> Found:
    """The frozen base serves as its own reference, as in preference training."""
    model = face.shard(adapted())
    optim = face.adamw([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(3):
        with model.disable_adapter():
            before = loss_of(model, face.sample(step)).detach()
        loss = (loss_of(model, face.sample(step)) - before).square() + loss_of(
            model, face.sample(step)
        )
        loss.backward()
        face.step(optim)
        losses.append(loss.item())
    return {"losses": losses, "weights": face.weights(model)}


def two_adapters_in_turn(face: Face) -> Found:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    model.requires_grad_(False)
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name)
    model = face.shard(model)
    optim = face.adamw([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(4):
        model.set_adapter(["default", "second"][step % 2])
        # peft freezes what is not active, and a plan is made once
        for name, param in model.named_parameters():
            param.requires_grad_("lora_" in name)
        loss = loss_of(model, face.sample(step))
        loss.backward()
        face.step(optim)
        losses.append(loss.item())
    return {"losses": losses, "weights": face.weights(model)}


def adapters_switched(face: Face) -> Found:
    """Both train from the start; peft freezes the one that is not active."""
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    both = [param for name, param in model.named_parameters() if "lora_" in name]
    for param in both:
        param.requires_grad_(True)
    model = face.shard(model)
    optim, losses = face.adamw(both), []
    for step in range(NUM_STEPS):
        model.set_adapter(["default", "second"][step // 2 % 2])
        loss = loss_of(model, face.sample(step))
        loss.backward()
        face.step(optim)
        losses.append(loss.item())
    model.base_model.set_adapter(["default", "second"])
    return {"losses": [*losses, loss_of(model, 77).item()], "weights": face.weights(model)}


def adapters_added_after_sharding(face: Face) -> Found:
    """To a model, and a second one to the adapted model; they are ordinary parameters, which start
    as rank 0's."""
    base = face.shard(models.llama().requires_grad_(False))
    torch.manual_seed(11 + face.rank * isinstance(face, Sharded))
    model: Any = peft.get_peft_model(
        base, peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"])
    )
    found = [train_all(face, model, range(NUM_STEPS))]
    torch.manual_seed(12 + face.rank * isinstance(face, Sharded))
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    model.set_adapter("second")
    found.append(train_all(face, model, range(NUM_STEPS, NUM_STEPS + 3)))
    model.delete_adapter("default")
    with model.disable_adapter():
        found.append([loss_of(model, 77).item()])
    return {
        "losses": found,
        "weights": face.weights(model),
        "kept": peft.get_peft_model_state_dict(model, None, "second"),
    }


def train_all(face: Face, model: Any, steps: range) -> list[float]:
    optim, losses = face.adamw([p for p in model.parameters() if p.requires_grad]), []
    for step in steps:
        loss = loss_of(model, face.sample(step))
        loss.backward()
        face.step(optim)
        losses.append(loss.item())
    return losses


def qlora(face: Face) -> Found:
    return on_nf4(face, adapted(target_modules="all-linear"))


def dora_on_nf4(face: Face) -> Found:
    return on_nf4(face, adapted(target_modules="all-linear", use_dora=True).bfloat16())


def on_nf4(face: Face, model: Any) -> Found:
    """The plain model holds what the blocks do: packing these values again gives the same."""
    for param in model.parameters():
        flat = param.detach().reshape(-1)
        if not param.requires_grad and param.dim() > 1:
            param.data = unpack(
                pack(flat, NF4), flat.numel(), torch.empty_like(flat), form=NF4
            ).view(param.shape)
    model = face.shard(model, frozen_quant_type="nf4")
    if isinstance(face, Sharded):
        assert any(live.unit.is_packed for live in face.shards_of(model).units)
    return {"losses": train_all(face, model, range(NUM_STEPS)), "weights": face.weights(model)}


def adapters_saved(face: Face) -> Found:
    """Every rank gathers, rank 0 writes; the file holds the adapters alone."""
    model = adapted(target_modules=["q_proj", "v_proj"])
    found = train(face, model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, is_main_process=face.rank == 0)
        file = Path(folder) / "adapter_model.safetensors"
        return found | {"file": safetensors.torch.load_file(file) if face.rank == 0 else {}}


def adapters_put_back(face: Face) -> Found:
    """What was taken out of a model is put into it again after more training, and it does as it
    did."""
    model = adapted()
    found = train(face, model)
    kept = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
    before = loss_of(model, 77).item()
    with GatheredParameters(trained(model), modifier_rank=0), torch.no_grad():
        for param in trained(model):
            param.mul_(2.0)
    between = loss_of(model, 77).item()
    peft.set_peft_model_state_dict(model, kept)
    return found | {"kept": kept, "losses after": [before, between, loss_of(model, 77).item()]}


def adapters_merged(face: Face) -> Found:
    """Into the frozen base and out of it again, with the weights gathered."""
    model = adapted()
    found = train(face, model)
    losses = [loss_of(model, 77).item()]
    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.merge_adapter()
    losses.append(loss_of(model, 77).item())
    merged = face.weights(model)
    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.unmerge_adapter()
    losses.append(loss_of(model, 77).item())
    assert any(isinstance(module, LoraLayer) for module in model.modules())
    return found | {"losses after": losses, "merged": merged}


def merged_and_unloaded(face: Face) -> Found:
    """The adapters go into the base, a layer at a time, and the model is an ordinary one; it may
    get new ones."""
    found = {}
    for name, fields in {
        "lora": {"modules_to_save": ["lm_head"]},
        "dora": {"use_dora": True},
    }.items():
        model = adapted(target_modules=["q_proj", "down_proj"], **fields)
        found[name] = train(face, model)
        base = merge_and_unload(model)
        assert not any(isinstance(module, LoraLayer) for module in base.modules())
        found[f"{name}, merged"] = [loss_of(base, 77).item(), face.weights(base)]
    return found


def merged_by_peft_itself(face: Face) -> Found:
    model = adapted(target_modules=["q_proj", "down_proj"])
    found = train(face, model)
    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        base = model.merge_and_unload(safe_merge=True)
    return found | {"loss": loss_of(base, 77).item(), "merged": face.weights(base)}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        lora,
        lora_with_trained_head,
        lora_on_a_bf16_base,
        dora,
        adapter_switched_off,
        two_adapters_in_turn,
        adapters_saved,
        adapters_put_back,
        adapters_merged,
        adapters_switched,
        qlora,
        dora_on_nf4,
        adapters_added_after_sharding,
        merged_and_unloaded,
        merged_by_peft_itself,
    )
}
