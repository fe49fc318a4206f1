"""Does training continue from a folder that DeepSpeed's ZeRO-3 wrote: by an engine, and by the
Trainer?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from checkpoint.deepspeed_folders import SUB_GROUPS, TAG, Written, WrittenModel, write_deepspeed
from torch import nn
from trainings import TiermemTrainer, arguments, closing, on_nvme

import tiermem
from tiermem.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, as in the folder."""
    named = dict(model.named_parameters())
    return [
        {"params": [named[n] for n in names]}
        for names in ([*SUB_GROUPS[0], *SUB_GROUPS[1]], [*SUB_GROUPS[2]])
    ]


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 13, (6,), generator=generator) for _ in range(32)]
    return [{"x": each, "labels": each} for each in ids]


def assert_restored(model: nn.Module, written: Written) -> None:
    for name, param in model.named_parameters():
        states = written.states[name]
        if not param.requires_grad:
            continue
        assert torch.equal(safe_get_full_fp32_param(param), states.get("master", states["weight"]))
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(safe_get_full_optimizer_state(param, state), states[state])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_engine_opens_it_to_the_bit_and_tells_what_it_leaves_behind(
    num_ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = write_deepspeed(tmp_path / "ds", num_ranks, torch.float32)
    file = tmp_path / "ds" / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    found = torch.load(file)
    found["module"]["norm._extra_state"] = torch.ones(2)
    torch.save(found, file)
    before = sorted(tmp_path.rglob("*"))
    model = WrittenModel()
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    engine, _, _, _ = tiermem.initialize(
        model=model, optimizer=torch.optim.AdamW(groups_of(model), lr=1.0), config=config
    )
    path, client_state = engine.load_checkpoint(tmp_path / "ds")
    assert f"{tmp_path / 'ds'}: left behind: 'norm._extra_state' of the model" in caplog.messages
    assert path == str(tmp_path / "ds") and client_state == {"epoch": (2, "half")}
    assert (engine.global_steps, engine.skipped_steps, engine.get_lr()) == (4, 1, [5e-4, 1e-4])
    assert_restored(model, written)
    assert sorted(tmp_path.rglob("*")) == before  # the copy is gone
    engine.close()


def test_the_trainer_resumes_from_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "out" / "checkpoint-4"
    written = write_deepspeed(checkpoint, 2, torch.float32)
    state = {"global_step": 4, "epoch": 0.25, "log_history": [], "train_batch_size": 2}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state), "utf-8")
    model = WrittenModel()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    policy, data = on_nvme(tmp_path / "nvme"), samples()
    args = arguments(
        tmp_path / "out", max_steps=5, max_grad_norm=0.0, gradient_accumulation_steps=1
    )
    trainer = TiermemTrainer(
        model, args, train_dataset=data, optimizers=(optimizer, schedule), tiermem=policy
    )
    with closing(trainer):
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 5
        moved = {
            n: safe_get_full_fp32_param(p).clone()
            for n, p in model.named_parameters()
            if p.requires_grad
        }
    assert {
        name for name, each in moved.items() if torch.equal(each, written.states[name]["weight"])
    } == set()
    assert {
        name
        for name, each in moved.items()
        if (each - written.states[name]["weight"]).abs().max() > 0.1
    } == set()


def test_a_folder_that_cannot_be_read_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    write_deepspeed(tmp_path / "ds", 2, torch.float32, stage=2)
    before = sorted(tmp_path.rglob("*"))
    model = WrittenModel()
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    engine, _, _, _ = tiermem.initialize(
        model=model, optimizer=torch.optim.AdamW(groups_of(model)), config=config
    )
    with pytest.raises(ValueError, match=r"ZeRO stage 2; stage 3 is read"):
        engine.load_checkpoint(tmp_path / "ds")
    assert sorted(tmp_path.rglob("*")) == before
    engine.close()
