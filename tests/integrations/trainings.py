"""Trainings: the same script with the plain Trainer and with TiermemTrainer, and what its log
says."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tiny_models import build, samples
from tqdm import tqdm
from transformers import CLIPModel, Trainer, TrainingArguments

from tiermem import OffloadPolicy, Tier
from tiermem.integrations.huggingface import TiermemTrainer

tqdm.monitor_interval = 0  # else transformers' progress bars start a thread that stays
IS_4 = transformers.__version__.startswith("4.")
# before version 5 losses are rounded to four digits before they are logged
TOLERANCE = 1e-4 if IS_4 else 1e-6


class Contrastive(Trainer):
    """A user's trainer: the loss of CLIP's text and image features, without the model's own
    forward."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        text, image = (
            # transformers before version 5 returns the tensor itself
            getattr(each, "pooler_output", each)
            for each in (
                model.get_text_features(input_ids=inputs["input_ids"]),
                model.get_image_features(pixel_values=inputs["pixel_values"]),
            )
        )
        loss = torch.nn.functional.cross_entropy(text @ image.T, torch.arange(len(text)))
        return (loss, {}) if return_outputs else loss


class TiermemContrastive(TiermemTrainer.mixin, Contrastive):
    """The same, sharded."""


class ContrastiveForward(Trainer):
    """The same loss through the model's forward, which DDP needs: it knows of no other method."""

    def __init__(self, model: CLIPModel, *args: Any, **kwargs: Any) -> None:
        own = ContrastiveModel(model.config)
        own.load_state_dict(model.state_dict())
        super().__init__(own, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs)


class ContrastiveModel(CLIPModel):  # type: ignore[misc]
    """CLIP whose forward is the loss of ContrastiveForward."""

    def forward(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        loss: torch.Tensor = Contrastive.compute_loss(
            None,
            self,
            {"input_ids": input_ids, "pixel_values": pixel_values},  # type: ignore[arg-type]
        )
        return loss


def kinds_of(name: str, num_ranks: int = 1) -> tuple[type[Trainer], type[Trainer]]:
    """The plain trainer of a model, and the sharded one. CLIP's calls get_text_features and
    get_image_features."""
    if name != "clip":
        return Trainer, TiermemTrainer
    return Contrastive if num_ranks == 1 else ContrastiveForward, TiermemContrastive


def saves_of(name: str, every: int = 5) -> dict[str, Any]:
    """Arguments that save and evaluate every so many steps; CLIP's trainer has no loss of an
    evaluation."""
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": every}
    return saves if name == "clip" else {**saves, "eval_strategy": "steps", "eval_steps": every}


class Log(NamedTuple):
    """What a training logs: losses, norms and rates of all steps, and losses of evaluations."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    eval_losses: list[float]


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    asked = {
        "max_steps": 10,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        **given,
    }
    return TrainingArguments(output_dir=str(folder), **asked)


def trainer_of(
    kind: type[Trainer], name: str, folder: Path, given: dict[str, Any], **kwargs: Any
) -> Any:
    data = {"train_dataset": samples(name), "eval_dataset": samples(name, 8)}
    return kind(
        kwargs.pop("model", None) or build(name), arguments(folder, **given), **{**data, **kwargs}
    )


@contextlib.contextmanager
def closing(trainer: Any) -> Any:
    try:
        yield trainer
    finally:
        if hasattr(trainer, "close"):
            trainer.close()


def train(kind: type[Trainer], name: str, folder: Path, resume: Any = None, **given: Any) -> Log:
    """Trains and returns the log. `given` are arguments of the Trainer for its own names, else of
    TrainingArguments."""
    own = {
        key: given.pop(key)
        for key in [*given]
        if key in ("tiermem", "optimizers", "model", "callbacks")
    }
    with closing(trainer_of(kind, name, folder, given, **own)) as trainer:
        trainer.train(resume_from_checkpoint=resume)
        return log_of(trainer)


def log_of(trainer: Any) -> Log:
    steps = [each for each in trainer.state.log_history if "loss" in each]
    evals = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    # transformers before version 5 logs no norm where nothing is clipped
    return Log(
        *([each.get(key, 0.0) for each in steps] for key in ("loss", "grad_norm", "learning_rate")),
        evals,
    )


def assert_equal(found: Log, expected: Log, tolerance: float = TOLERANCE) -> None:
    """Losses, norms and rates are equal, by default to one in a million."""
    for name, mine, theirs in zip(Log._fields, found, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(mine),
            torch.tensor(theirs),
            rtol=tolerance,
            atol=tolerance,
            msg=f"{name}: {mine} {theirs}",
        )


def on_nvme(folder: Path, **fields: Any) -> OffloadPolicy:
    folder.mkdir(exist_ok=True)
    return OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=[folder], persistence_numel=50, **fields
    )


__all__ = [
    "TiermemTrainer",
    "Trainer",
    "arguments",
    "assert_equal",
    "closing",
    "kinds_of",
    "log_of",
    "on_nvme",
    "saves_of",
    "train",
    "trainer_of",
]
