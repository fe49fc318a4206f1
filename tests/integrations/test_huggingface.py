"""Does TiermemTrainer train as transformers' Trainer does: to the same losses, with its callbacks,
from its checkpoints?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
from launch import launch
from packaging.version import Version
from safetensors.torch import load_file
from tiny_models import MODELS, build, samples
from torch import nn
from trainings import (
    IS_4,
    TOLERANCE,
    TiermemTrainer,
    Trainer,
    arguments,
    assert_equal,
    closing,
    kinds_of,
    log_of,
    on_nvme,
    saves_of,
    train,
    trainer_of,
)
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

import tiermem
from tiermem import OffloadPolicy
from tiermem.engine import room
from tiermem.integrations.arguments import config_beside
from tiermem.run.shards import owner_of

HERE = Path(__file__).parent


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "name",
    [
        each if each in ("gpt2", "llama", "t5") else pytest.param(each, marks=pytest.mark.slow)
        for each in MODELS
    ],
)
def test_losses_equal_the_plain_trainers_also_when_resumed(name: str, tmp_path: Path) -> None:
    plain, sharded = kinds_of(name)
    saves = saves_of(name)
    expected = train(plain, name, tmp_path / "plain", **saves)
    ours = tmp_path / "ours"
    assert_equal(train(sharded, name, ours, tiermem=on_nvme(tmp_path / "nvme"), **saves), expected)
    assert_equal(
        train(sharded, name, ours, str(ours / "checkpoint-5"), tiermem=OffloadPolicy(), **saves),
        expected,
    )
    assert_equal(
        train(sharded, name, ours, str(tmp_path / "plain" / "checkpoint-5"), **saves), expected
    )
    files, theirs = (
        {each.name for each in (tmp_path / kind / "checkpoint-5").iterdir()}
        for kind in ("ours", "plain")
    )
    assert theirs - files == {"optimizer.pt"}
    assert all(
        each.startswith(("tiermem", "manifest-", "part-", "data-")) for each in files - theirs
    )
    mine, other = (
        load_file(tmp_path / kind / "checkpoint-10" / "model.safetensors")
        for kind in ("ours", "plain")
    )
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)  # a step of Adam is 1e-3


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("max_grad_norm", "is_early"), [(1e3, True), (1e-3, False)])
def test_a_trainer_that_clips_begins_steps_under_backward(
    max_grad_norm: float, is_early: bool, tmp_path: Path
) -> None:
    """By itself, and to the same bits; clipped at every step it begins none."""
    logs, counts = [], []
    for overlap in ("none", None):
        nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
        zero = {
            "stage": 3,
            "offload_param": nvme,
            "offload_optimizer": nvme,
            "stage3_param_persistence_threshold": 50,
        }
        config = {"zero_optimization": zero, "tiermem": {"overlap": overlap} if overlap else {}}
        given = {"max_grad_norm": max_grad_norm}
        with closing(
            trainer_of(TiermemTrainer, "llama", tmp_path, given, tiermem=config)
        ) as trainer:
            trainer.train()
            steps = owner_of(trainer.model).steps
            counts.append((steps.num_early, steps.num_redone))
            logs.append(log_of(trainer))
    assert logs[0] == logs[1]
    assert counts == [(0, 0), (8 if is_early else 0, 0)]


@pytest.mark.slow
@pytest.mark.skipif(
    Version(accelerate.__version__) < Version("1.14"), reason="accelerate before 1.14 is refused"
)
@pytest.mark.parametrize(
    "names",
    [
        ("gpt2",),
        pytest.param(("llama", "mixtral", "t5", "vit", "whisper", "clip"), marks=pytest.mark.slow),
    ],
)
def test_losses_and_tokens_equal_those_of_two_ranks_under_ddp(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    for folder in ("out", "work"):
        (tmp_path / folder).mkdir()
    ranks = launch(
        HERE / "trainings_on_ranks.py", 2, tmp_path / "out", str(tmp_path / "work"), *names
    )
    for found, (plain, tokens) in ranks:
        assert torch.equal(tokens, plain)
        for name in names:
            expected, runs = found[name, "fp32"]
            for log in runs.values():
                # a sum's last bit grows over ten steps of Adam
                assert_equal(log, expected, max(TOLERANCE, 1e-5))
        for expected, runs in [found[name, "bf16"] for name in names if name != "clip"]:
            # The last bit of an fp32 weight may change the last bit of its bf16 value.
            assert runs["on NVMe"].losses == pytest.approx(expected.losses, rel=2**-8)
            assert runs["resumed"] == runs["on NVMe"]


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch_are_taken_over(name: str, tmp_path: Path) -> None:
    kind, settings = OPTIMIZERS[name]
    found = []
    for trainer in (Trainer, TiermemTrainer):
        model = build("gpt2")
        optimizers = (kind(model.parameters(), lr=1e-3, **settings), None)
        found.append(
            train(trainer, "gpt2", tmp_path, model=model, optimizers=optimizers, max_steps=4)
        )
    assert_equal(found[1], found[0])


def test_a_schedule_finds_what_it_keeps_in_the_groups(tmp_path: Path) -> None:
    found = []
    for trainer in (Trainer, TiermemTrainer):
        model = build("gpt2")
        optim = torch.optim.AdamW([{"params": model.parameters(), "name": "all"}], lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optim, 1e-2, total_steps=8)
        given = {"model": model, "optimizers": (optim, schedule), "max_steps": 4}
        found.append(train(trainer, "gpt2", tmp_path, **given))
        assert optim.param_groups[0]["name"] == "all"
    assert_equal(found[1], found[0])


@pytest.mark.parametrize(
    ("name", "settings"),
    [("cosine_with_min_lr", {"min_lr": 1e-3}), ("polynomial", {"lr_end": 2e-3})],
)
def test_a_schedule_finds_the_optimizers_defaults(
    name: str, settings: dict[str, float], tmp_path: Path
) -> None:
    given = {"lr_scheduler_type": name, "lr_scheduler_kwargs": settings, "learning_rate": 1e-2}
    found = [
        train(trainer, "gpt2", tmp_path, max_steps=4, **given)
        for trainer in (Trainer, TiermemTrainer)
    ]
    assert_equal(found[1], found[0])


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [tiermem.Lion, tiermem.Muon])
def test_own_optimizers_train_and_resume(kind: Any, tmp_path: Path) -> None:
    def run(folder: Path, resume: str | None = None) -> Any:
        model = build("gpt2")
        groups = [
            {"params": [p for p in model.parameters() if p.ndim == 2]},
            {"params": [p for p in model.parameters() if p.ndim != 2]},
        ]
        if kind is tiermem.Muon:
            groups[1]["use_muon"] = False  # type: ignore[assignment]
        return train(
            TiermemTrainer,
            "gpt2",
            folder,
            resume,
            model=model,
            optimizers=(kind(groups, lr=1e-3), None),
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
        )

    whole = run(tmp_path)
    assert whole.losses[-1] < whole.losses[0]
    assert run(tmp_path, str(tmp_path / "checkpoint-2")) == whole


class Beginnings(TrainerCallback):  # type: ignore[misc]
    """The steps at which trainings began."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found.append(state.global_step)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("limit", "left"), [(None, ""), (2, '{"global_step": 4, "ep')])
def test_resumes_from_the_newest_checkpoint_that_was_saved_whole(
    limit: int | None, left: str, tmp_path: Path
) -> None:
    """A kill within a save leaves a checkpoint whose last file is empty, or a part."""
    began = Beginnings()

    def run(resume: bool) -> Any:
        return train(
            TiermemTrainer,
            "gpt2",
            tmp_path / "out",
            resume,
            tiermem=on_nvme(tmp_path / "nvme"),
            callbacks=[began],
            max_steps=4,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=limit,
        )

    with pytest.raises(ValueError, match="no whole checkpoint: begin without"):
        run(resume=True)
    whole = run(resume=False)
    (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").write_text(left)
    assert run(resume=True) == whole
    assert began.found == [0, 3]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("limit", [1, 2])
def test_the_last_checkpoint_stays_until_the_next_is_whole(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that ends before its last file leaves the checkpoint before it, also in a run that has
    gone on from that one."""
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": limit}

    def run(place: str, ends_at: int | None = None, **more: Any) -> Any:
        def write(state: TrainerState, file: str) -> None:
            if state.global_step == ends_at:
                raise OSError("the end")
            written(state, file)

        monkeypatch.setattr(TrainerState, "save_to_json", write)
        nvme = on_nvme(tmp_path / f"{place} nvme")
        return train(TiermemTrainer, "gpt2", tmp_path / place, tiermem=nvme, **given, **more)

    written = TrainerState.save_to_json
    whole = run("whole")
    for number in (2, 3):
        with pytest.raises(OSError, match="the end"):
            run("ended", number, resume=number == 3)
        left = [each.parent.name for each in (tmp_path / "ended").glob("*/trainer_state.json")]
        assert f"checkpoint-{number - 1}" in left
    assert run("ended", resume=True) == whole
    for place in ("whole", "ended"):
        assert len([*(tmp_path / place).glob("checkpoint-*")]) == limit
    assert len([*(tmp_path / "whole nvme").rglob("manifest-*")]) == limit


class Own(Trainer):
    """A user's trainer with groups and an optimizer of its own."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(
            [{"params": [p], "lr": 1e-2} for p in self.model.parameters()]
        )
        return self.optimizer


class OwnSharded(TiermemTrainer.mixin, Own):
    """The same, sharded."""


def test_a_users_trainer_takes_the_mixin(tmp_path: Path) -> None:
    found = [train(kind, "gpt2", tmp_path, max_steps=4) for kind in (Own, OwnSharded)]
    assert_equal(found[1], found[0])


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "given",
    [
        {"bf16": True},
        {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0},
        {"num_train_epochs": 1, "max_steps": -1, "gradient_accumulation_steps": 3},
        {"gradient_checkpointing" if IS_4 else "activation_checkpointing": True},
        {"neftune_noise_alpha": 0.1},
    ],
    ids=str,
)
def test_arguments_of_the_trainer_act_as_in_the_plain_one(
    given: dict[str, Any], tmp_path: Path
) -> None:
    found = [
        train(kind, "llama", tmp_path, **{"max_steps": 4, **given})
        for kind in (Trainer, TiermemTrainer)
    ]
    assert_equal(found[1], found[0])


class Unfreezes(TrainerCallback):
    """Unfreezes the blocks after two steps."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step == 2:
            model.transformer.h.requires_grad_(True)


LAYERS: dict[str, dict[str, Any]] = {
    "fewer in the last step": {
        "gradient_accumulation_steps": 6,
        "num_train_epochs": 1,
        "max_steps": -1,
    },
    "labels taken out": {"label_smoothing_factor": 0.1},
    "autocast": {"bf16": True},
    "on nvme, saved": {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
    },
}


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", LAYERS)
def test_micro_batches_go_through_each_block_together(way: str, name: str, tmp_path: Path) -> None:
    """Losses, norms and weights have the bits of micro-batch after micro-batch, and weights are
    read fewer times.

    Without dropout, for which each micro-batch but the first draws numbers of its own.
    """
    given = {"max_steps": 4, "gradient_accumulation_steps": 4, **LAYERS[way]}
    found, read, weights = [], [], []
    for accumulation in ("batches", "layers"):
        nvme = on_nvme(
            tmp_path / f"{accumulation}-nvme",
            accumulation=accumulation,
            unit_buffers=2,
            overlap="none",
        )
        trainer = trainer_of(TiermemTrainer, name, tmp_path / accumulation, given, tiermem=nvme)
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        with closing(trainer):
            trainer.train()
            found.append(log_of(trainer))
            weights.append(dict(trainer.model.state_dict()))
            read.append(trainer.shards.store.stats().nvme_read_bytes)
    assert found[1] == found[0] and found[0].losses
    assert all(torch.equal(value, weights[0][key]) for key, value in weights[1].items())
    assert read[1] < read[0]


def test_a_training_step_of_another_class_is_refused_with_layers(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().training_step(*args, **kwargs)

    class Mine(TiermemTrainer.mixin, Own):  # type: ignore[misc,name-defined]
        pass

    with pytest.raises(ValueError, match="Mine has a training_step of its own"):
        train(
            Mine,
            "llama",
            tmp_path,
            tiermem=on_nvme(tmp_path / "nvme", accumulation="layers"),
            max_steps=1,
        )


@pytest.mark.slow
def test_a_callback_unfreezes_blocks(tmp_path: Path) -> None:
    found = []
    for kind, callbacks in (
        (Trainer, [Unfreezes()]),
        (TiermemTrainer, [Unfreezes()]),
        (Trainer, []),
    ):
        model, policy = build("gpt2"), on_nvme(tmp_path / "nvme")
        model.transformer.h.requires_grad_(False)
        own: dict[str, Any] = {"tiermem": policy} if kind is TiermemTrainer else {}
        blocks = list(model.transformer.h.parameters())
        rest = [param for param in model.parameters() if all(param is not each for each in blocks)]
        own["optimizers"] = (
            torch.optim.AdamW([{"params": rest}, {"params": blocks, "lr": 5e-4}], lr=1e-3),
            None,
        )
        found.append(
            train(kind, "gpt2", tmp_path, model=model, callbacks=callbacks, max_steps=5, **own)
        )
    assert_equal(found[1], found[0])
    # the blocks were trained
    assert found[2].losses[-1] != pytest.approx(found[0].losses[-1], rel=1e-4)


class Worse(TrainerCallback):
    """Makes the evaluations after the first worse, so that the first stays the best."""

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any
    ) -> None:
        metrics["eval_loss"] = float(state.global_step)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, None])
def test_the_best_model_is_loaded_and_training_stops_early(
    limit: int | None, tmp_path: Path
) -> None:
    asked = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    asked |= {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "save_total_limit": limit,
    }
    weights, steps = [], []
    for kind in (Trainer, TiermemTrainer):
        callbacks = [Worse(), EarlyStoppingCallback(2)]
        with closing(
            trainer_of(kind, "gpt2", tmp_path / kind.__name__, asked, callbacks=callbacks)
        ) as trainer:
            trainer.train()
            steps.append(trainer.state.global_step)
            weights.append(
                {name: each.clone() for name, each in trainer.model.state_dict().items()}
            )
            assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert steps == [6, 6]
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)
    left = [
        sorted(each.name for each in (tmp_path / kind).glob("checkpoint-*"))
        for kind in ("Trainer", "TiermemTrainer")
    ]
    assert left[0] == left[1]
    train(
        TiermemTrainer,
        "gpt2",
        tmp_path / "again",
        str(tmp_path / "TiermemTrainer" / "checkpoint-2"),
        max_steps=3,
    )


@pytest.mark.slow
def test_save_total_limit_keeps_checkpoints_in_the_files_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest ones, whatever the clock says."""

    def write(state: TrainerState, file: str) -> None:
        written(state, file)
        os.utime(file, (1e9 - state.global_step,) * 2)

    written = TrainerState.save_to_json
    monkeypatch.setattr(TrainerState, "save_to_json", write)
    policy = on_nvme(tmp_path / "nvme")
    asked = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    (tmp_path / "out" / "checkpoint-best").mkdir(parents=True)  # the user's own
    whole = train(TiermemTrainer, "gpt2", tmp_path / "out", tiermem=policy, **asked)
    left = sorted(each.name for each in (tmp_path / "out").glob("checkpoint-*"))
    assert left == ["checkpoint-10", "checkpoint-8", "checkpoint-best"]
    assert not list((tmp_path / "out").rglob("data-*"))  # nothing is copied
    again = train(
        TiermemTrainer,
        "gpt2",
        tmp_path / "out",
        str(tmp_path / "out" / "checkpoint-8"),
        tiermem=policy,
        **asked,
    )
    assert again == whole


def test_no_checkpoint_makes_a_state_dict_of_the_model(tmp_path: Path) -> None:
    model = build("gpt2")
    counted: list[int] = []
    model.register_state_dict_pre_hook(lambda *_: counted.append(1))
    train(
        TiermemTrainer,
        "gpt2",
        tmp_path,
        model=model,
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
    )
    assert not counted


def test_what_is_saved_opens_as_a_pretrained_model(tmp_path: Path) -> None:
    with closing(
        trainer_of(
            TiermemTrainer, "llama", tmp_path, {"max_steps": 2}, tiermem=on_nvme(tmp_path / "nvme")
        )
    ) as trainer:
        trainer.train()
        trainer.save_model()
        weights = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(dict(opened.state_dict()), weights, rtol=0, atol=0)


def test_generation_in_an_evaluation_gives_the_plain_models_tokens(tmp_path: Path) -> None:
    class Sharded(TiermemTrainer.mixin, Seq2SeqTrainer):
        pass

    found = []
    for kind in (Seq2SeqTrainer, Sharded):
        asked = Seq2SeqTrainingArguments(
            str(tmp_path),
            predict_with_generate=True,
            generation_max_length=6,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        with closing(kind(build("t5"), asked, eval_dataset=samples("t5", 8))) as trainer:
            found.append(trainer.predict(samples("t5", 8)).predictions)
    assert (found[0] == found[1]).all()


def test_evaluation_before_and_after_training_gives_the_plain_losses(tmp_path: Path) -> None:
    found = []
    for kind in (Trainer, TiermemTrainer):
        with closing(trainer_of(kind, "gpt2", tmp_path, {"max_steps": 3})) as trainer:
            around = [trainer.evaluate()["eval_loss"]]
            trainer.train()
            found.append(
                log_of(trainer)._replace(eval_losses=[*around, trainer.evaluate()["eval_loss"]])
            )
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_an_evaluation_that_would_cast_the_model_is_refused(name: str, tmp_path: Path) -> None:
    given = {name: True, "max_steps": 2, **saves_of("gpt2", 1), "save_strategy": "no"}
    expected = train(Trainer, "gpt2", tmp_path, **given)
    with closing(trainer_of(TiermemTrainer, "gpt2", tmp_path, given)) as trainer:
        trainer.train()
        assert_equal(log_of(trainer), expected)
        for evaluate in (trainer.evaluate, lambda: trainer.predict(samples("gpt2", 8))):
            with pytest.raises(ValueError, match=rf"set trainer\.args\.{name} = False"):
                evaluate()
        setattr(trainer.args, name, False)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.eval_losses[-1])


def test_a_second_trainer_says_how_the_first_keeps_the_weights(tmp_path: Path) -> None:
    def second() -> TiermemTrainer:
        return trainer_of(TiermemTrainer, "gpt2", tmp_path, {"max_steps": 1}, model=first.model)

    with closing(trainer_of(TiermemTrainer, "gpt2", tmp_path, {"max_steps": 1})) as first:
        first.train()
        with pytest.raises(ValueError, match=r"call close\(materialize=True\) of the trainer"):
            second().train()
        first.close(materialize=True)
    with closing(second()) as trainer:
        trainer.train()


def test_another_optimizer_than_the_saved_one_is_told_of_the_weights_alone(tmp_path: Path) -> None:
    saves = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    train(TiermemTrainer, "gpt2", tmp_path, **saves)
    with pytest.raises(ValueError, match=r"saved by AdamW, .* SGD: .* so does from_pretrained of"):
        train(TiermemTrainer, "gpt2", tmp_path, True, optim="sgd", **{**saves, "max_steps": 2})
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    train(TiermemTrainer, "gpt2", tmp_path, model=opened, optim="sgd", max_steps=1)


@pytest.mark.slow
def test_each_call_of_model_init_is_sharded_anew(tmp_path: Path) -> None:
    trainer = TiermemTrainer(
        None,
        arguments(tmp_path, max_steps=2),
        train_dataset=samples("gpt2"),
        model_init=lambda: build("gpt2"),
    )
    with closing(trainer):
        trainer.train()
        first = log_of(trainer)
        trainer.train()
        assert log_of(trainer) == first


@pytest.mark.parametrize("given", [{"torch_compile": True}, {"optim": "adafactor"}], ids=str)
def test_arguments_that_cannot_be_met_are_refused(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers before version 5 sets it for torch_compile
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    with pytest.raises(ValueError, match=r"leave .* out|cannot step states"):
        train(TiermemTrainer, "gpt2", tmp_path, **given)


@pytest.mark.parametrize("given", ["nvme", None, tiermem.Tier.NVME], ids=str)
def test_a_tiermem_of_no_allowed_kind_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'tiermem is .*; allowed are "auto", an OffloadPolicy'):
        train(TiermemTrainer, "gpt2", tmp_path, tiermem=given)


def test_an_accelerate_that_would_wrap_the_model_is_refused_on_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerate, "__version__", "1.13.0")
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(
        ValueError, match=r"several ranks with accelerate 1\.13\.0, which wraps every model in DDP"
    ):
        train(TiermemTrainer, "gpt2", tmp_path)


def test_materialized_weights_stay_with_the_model(tmp_path: Path) -> None:
    trainer = trainer_of(
        TiermemTrainer, "gpt2", tmp_path, {"max_steps": 2}, tiermem=on_nvme(tmp_path / "nvme")
    )
    trainer.train()
    weights = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    trainer.close(materialize=True)
    torch.testing.assert_close(dict(trainer.model.state_dict()), weights, rtol=0, atol=0)
    # else Accelerate would leave out DDP when another Trainer takes the model
    assert not hasattr(trainer.model, "_is_accelerate_prepared")


def test_a_trainer_that_gave_its_weights_up_uses_them_no_more(tmp_path: Path) -> None:
    """Neither does another trainer of its model."""
    nvme = on_nvme(tmp_path / "nvme")
    trainer = trainer_of(TiermemTrainer, "llama", tmp_path, {"max_steps": 1}, tiermem=nvme)
    trainer.train()
    trainer.close()
    again = trainer_of(
        TiermemTrainer, "llama", tmp_path, {"max_steps": 1}, tiermem=nvme, model=trainer.model
    )
    for call in (trainer.evaluate, trainer.train, trainer.save_model, again.train):
        with pytest.raises(ValueError, match=r"are gone: .* give it materialize=True"):
            call()


# ---- configs -------------------------------------------------------------------------------------

ON_NVME = {"device": "nvme", "pin_memory": True}
SHARDED = {
    "stage": 3,
    "offload_optimizer": ON_NVME,
    "offload_param": ON_NVME,
    "stage3_param_persistence_threshold": "auto",
}
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
WARMUP = {
    "warmup_min_lr": "auto",
    "warmup_max_lr": "auto",
    "warmup_num_steps": "auto",
    "total_num_steps": "auto",
}


def config_in(folder: Path, **sections: Any) -> dict[str, Any]:
    return {**AUTO, "zero_optimization": SHARDED, "tiermem": {"paths": [str(folder)]}, **sections}


def test_a_config_with_auto_trains_as_the_plain_trainer(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    unread = {
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor"},
    }
    # as LLaMA-Factory's examples/deepspeed
    file.write_text(json.dumps(config_in(tmp_path, **unread)), "utf-8")
    found = [train(Trainer, "llama", tmp_path, max_steps=4)]
    found.append(train(TiermemTrainer, "llama", tmp_path, tiermem=str(file), max_steps=4))
    assert_equal(found[1], found[0])


def test_a_config_s_file_and_folders_are_those_of_the_trainer_s_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvme").mkdir()
    config = config_in(Path("nvme"), scheduler={"type": "WarmupDecayLR", "params": WARMUP})
    (tmp_path / "ds.json").write_text(json.dumps(config), "utf-8")
    monkeypatch.chdir(tmp_path)
    args = arguments(tmp_path / "out", max_steps=1, warmup_steps=1)
    trainer = TiermemTrainer(
        build("gpt2"), args, train_dataset=samples("gpt2", 8), tiermem="ds.json"
    )
    monkeypatch.chdir("/")
    with closing(trainer):
        trainer.train()
        assert len([*(tmp_path / "nvme").iterdir()]) == 1


def test_optimizer_and_schedule_of_a_config_are_used(tmp_path: Path) -> None:
    config = config_in(
        tmp_path, optimizer=ADAMW, scheduler={"type": "WarmupDecayLR", "params": WARMUP}
    )
    asked = {"max_steps": 6, "warmup_steps": 3, "learning_rate": 2e-3}
    found = train(TiermemTrainer, "llama", tmp_path, tiermem=config, **asked)
    engine, _, _, scheduler = tiermem.initialize(
        model=nn.Linear(2, 2),
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 3, "total_num_steps": 6},
            },
        },
    )
    rates = []
    for _ in range(6):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.step()
    engine.close()
    assert found.rates == pytest.approx(rates)


def test_auto_warmup_is_that_of_arguments_without_one(tmp_path: Path) -> None:
    warmup = {key: "auto" for key in WARMUP if key != "total_num_steps"}
    config = config_in(tmp_path, scheduler={"type": "WarmupLR", "params": warmup})
    found = train(TiermemTrainer, "gpt2", tmp_path, tiermem=config, max_steps=3)
    assert found.rates == [0.0, 0.0, 1e-3]


def in_bf16(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """The inputs of a twin, as a DeepSpeed config gives them."""
    floats = {
        key: each.bfloat16()
        for key, each in kwargs.items()
        if isinstance(each, torch.Tensor) and each.is_floating_point()
    }
    return args, {**kwargs, **floats}


@pytest.mark.sampled(4)
@pytest.mark.skipif(IS_4, reason="before version 5 autocast stays on beside a config's bf16")
@pytest.mark.parametrize(
    "name",
    [
        each if each in ("llama", "clip") else pytest.param(each, marks=pytest.mark.slow)
        for each in MODELS
    ],
)
def test_bf16_of_a_config_equals_a_bf16_model_with_fp32_masters(name: str, tmp_path: Path) -> None:
    plain, sharded = kinds_of(name)
    model = build(name)
    for param in model.parameters():
        param.data = param.data.bfloat16()  # buffers stay in fp32
    model.register_forward_pre_hook(in_bf16, with_kwargs=True)
    optimizers = (tiermem.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), None)
    asked: dict[str, Any] = {"max_grad_norm": 0.0, "max_steps": 4}
    expected = train(plain, name, tmp_path, model=model, optimizers=optimizers, **asked)
    asked |= {
        "tiermem": config_in(tmp_path),
        "bf16": True,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    found = train(sharded, name, tmp_path / "ours", **asked)
    resumed = train(
        sharded, name, tmp_path / "ours", str(tmp_path / "ours" / "checkpoint-2"), **asked
    )
    del optimizers
    assert found.losses == expected.losses
    assert resumed == found


@pytest.mark.parametrize("section", [{}, {"bf16": {}}, {"bfloat16": {"enabled": "auto"}}], ids=str)
def test_a_config_without_a_precision_has_that_of_the_arguments(
    section: dict[str, Any], tmp_path: Path
) -> None:
    """As Accelerate fills DeepSpeed's config."""
    assert config_beside(section, arguments(tmp_path)).precision == "fp32"
    assert config_beside(section, arguments(tmp_path, bf16=True)).precision == "bf16"
    with pytest.raises(tiermem.config.ConfigError, match=r"fp16\.enabled: true, which"):
        config_beside(section, arguments(tmp_path, fp16=True))


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_a_precision_that_contradicts_the_arguments_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(tiermem.config.ConfigError, match=rf"{name}\.enabled: True, but"):
        config_beside({name: {"enabled": True}}, arguments(tmp_path))
    with pytest.raises(tiermem.config.ConfigError, match=r"fp16\.enabled: True, but"):
        config_beside({"fp16": {"enabled": True}}, arguments(tmp_path, bf16=True))


def test_values_that_contradict_the_training_arguments_are_listed(tmp_path: Path) -> None:
    config = config_in(
        tmp_path, gradient_accumulation_steps=7, gradient_clipping=2.0, fp16={"enabled": True}
    )
    with pytest.raises(tiermem.config.ConfigError) as said:
        train(TiermemTrainer, "gpt2", tmp_path, tiermem=config)
    paths = {each.path for each in said.value.problems}
    assert paths == {"gradient_accumulation_steps", "gradient_clipping", "fp16.enabled"}


# ---- memory="auto" -------------------------------------------------------------------------------


def test_auto_chooses_the_fastest_places_that_fit(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(40)))
    needed = 16 * sum(param.numel() for param in model.parameters())

    def places(host_bytes: int) -> tuple[str, str]:
        found = room.Room(host_bytes, 0)
        usual = OffloadPolicy(paths=tmp_path / "states")
        policy = room.compute_policy(model, usual, torch.device("cpu"), 1, found)
        return policy.params.name, policy.optim.name

    assert places(2 * needed) == ("HOST", "HOST")
    assert places(needed * 3 // 4)[1] == "NVME"
    assert places(needed // 4) == ("NVME", "NVME")
    with pytest.raises(ValueError, match="no plan fits"):
        places(needed // 1000)
