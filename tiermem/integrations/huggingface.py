"""TiermemTrainer: transformers' Trainer over a sharded model.

    from tiermem.integrations.huggingface import TiermemTrainer as Trainer

    trainer = Trainer(model, args, train_dataset=data, tiermem=OffloadPolicy(...))     the rest of a script stays
    class Mine(TiermemTrainer.mixin, SFTTrainer): ...                                  other trainers that inherit from Trainer

    when the Trainer                     the mixin
    makes an accelerator                 refuses FSDP, DeepSpeed and torch.compile, and turns DataParallel off
    moves the model to its device        does nothing: sharding places the parameters
    creates its optimizer, wraps         shards the model, builds tiermem's optimizer of the same kind with the same groups, and
                                         prepares both so that Accelerate neither wraps (DDP) nor
                                         moves them
    gets the micro-batches of a step     with accumulation "layers" runs them block by block, and gives their losses one by one
    saves a checkpoint                   streams model.safetensors and saves a durable step instead of optimizer.pt
    logs                                 adds the store's figures: GB/s, seconds of waiting, what limited
    loads a checkpoint, the best model   opens the durable step, or streams safetensors; optimizer.pt of a plain Trainer too

Nothing is patched: every row is a method that the mixin overrides. Losses, clipping, schedules,
logs, callbacks, evaluation and generation are the Trainer's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs
from packaging.version import Version
from torch import nn
from transformers import Trainer

from tiermem.checkpoint.format.finding import tags_of
from tiermem.checkpoint.format.manifest import POINTER_FILE
from tiermem.checkpoint.interchange.from_deepspeed import is_deepspeed
from tiermem.checkpoint.interchange.write import in_own_format
from tiermem.checkpoint.opening.loading import load
from tiermem.checkpoint.saving.saver import Beside, save, saver_of, wait
from tiermem.config.load import is_json
from tiermem.config.root import TiermemConfig
from tiermem.engine.adapters import adapters_state, has_adapters
from tiermem.engine.choice import OptimizerChoice, choose_optimizer, take_over
from tiermem.engine.engine import cast_model
from tiermem.engine.room import compute_policy, find_room
from tiermem.engine.sharding import shard_for_passes
from tiermem.forecast.choose import HOMES
from tiermem.integrations.arguments import config_beside, hidden_size_of
from tiermem.integrations.choice import (
    AUTO,
    Asked,
    mark,
    with_moments,
)
from tiermem.integrations.pretrained import load_pretrained_weights, save_pretrained_weights
from tiermem.optim.base import NativeOptimizer
from tiermem.plans.activations import PredictedActivations, activations_of
from tiermem.policy import OffloadPolicy
from tiermem.precision import DTYPES
from tiermem.run.layerwise import LayerwisePasses
from tiermem.run.move_to_home import check_values
from tiermem.run.shards import Shards, owner_of
from tiermem.schedule import build_scheduler
from tiermem.swap.disk.queue import Meter
from tiermem.swap.memory.accelerator import generators, set_generators

logger = logging.getLogger("tiermem")

OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"
STATE_FILE = "trainer_state.json"
"""The file that the Trainer writes last into a checkpoint."""
_MOST_SEEN = 64  # examples that are looked at before the plan

_Base: Any = (
    # the classes after the mixin are the Trainer; without types, because many of its fields may be
    # None
    object
)


class TiermemMixin(_Base):  # type: ignore[misc]
    """The part of TiermemTrainer that any class inheriting from Trainer takes: put it before that
    class.

    Args:
        tiermem: an OffloadPolicy; a DeepSpeed-style config, as a dict or the path of a JSON file;
            or "auto": the fastest places whose plan fits the free memory, with the states that do
            not fit in `args.output_dir`.

    The model is sharded when training or evaluation starts, and stays sharded until `close`. The
    optimizer is tiermem's of the same kind as the one that the Trainer would use; others raise
    ValueError.
    """

    optimizer: Any
    lr_scheduler: Any
    _created_lr_scheduler: Any
    """As the Trainer has them: the caller's, or those that `create_optimizer` and
    `create_scheduler` make."""

    def __init__(self, *args: Any, tiermem: Asked = AUTO, **kwargs: Any) -> None:
        self._asked = tiermem
        self._config: TiermemConfig | None = None
        self._shards: Shards | None = None
        self._meter: Meter | None = None  # of the sharded model's store
        self._is_owner = False  # whether this trainer has sharded the model, and closes it
        self._passes: LayerwisePasses | None = None  # of accumulation "layers"
        self._micros: list[Any] = []  # the micro-batches of the step
        # of those that `training_step` has not been called for
        self._losses: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    @property
    def shards(self) -> Shards | None:
        """The sharded model; None before training or evaluation starts, and after `close`."""
        return self._shards

    def close(self, materialize: bool = False) -> None:
        """Ends the sharding that this trainer began: closes the store and removes its files, unless
        they hold a checkpoint.

        With materialize the model keeps its weights as ordinary tensors (collective; takes the
        whole model's memory). Without it the weights are gone. Blocks. A second call does nothing.
        """
        shards = self._shards
        self._shards = None
        self._meter = None
        self._passes = None
        if shards is not None and self._is_owner:
            shards.close(materialize)

    # ---- start -----------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the accelerator.

        Raises ValueError for arguments that ask for another way of sharding, or for compiling; for
        a `tiermem` of no allowed kind; on several ranks, for an Accelerate that would wrap the
        model in DDP.
        """
        for name in ("fsdp", "deepspeed", "torch_compile"):
            if getattr(self.args, name, None):
                raise ValueError(
                    f"TrainingArguments({name}={getattr(self.args, name)!r}) with TiermemTrainer, "
                    "which shards the model "
                    f"itself: leave {name} out, or use transformers' own Trainer"
                )
        if self.args.world_size > 1 and Version(accelerate.__version__) < Version("1.14"):
            raise ValueError(
                f"TiermemTrainer on several ranks with accelerate {accelerate.__version__}, which "
                "wraps every model in DDP: "
                'pip install -U "accelerate>=1.14"'
            )
        if self.args.n_gpu > 1:
            # as transformers does for models on several devices: no DataParallel
            self.args._n_gpu = 1
        asked = self._asked
        if not isinstance(asked, OffloadPolicy) and asked != AUTO:
            # a file is read again when the schedule is made
            if isinstance(asked, (str, os.PathLike)) and not is_json(asked):
                asked = os.path.abspath(asked)
                is_known = os.path.isfile(asked)
            else:
                is_known = isinstance(asked, (str, Mapping))
            if not is_known:
                raise ValueError(
                    f'tiermem is {self._asked!r}; allowed are "auto", an OffloadPolicy, a '
                    "DeepSpeed-style config as a dict or JSON text, and the path of a JSON file "
                    "that exists"
                )
            self._asked = asked
            self._config = config_beside(self._asked, self.args, hidden_size_of(self.model))
        super().create_accelerator_and_postprocess()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Turns off autocast's cache, which keeps a copy of every weight; with a config, autocast
        itself."""
        args: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        if self._config is not None:
            args["mixed_precision"] = "no"  # the config's precision is that of the model
        return {
            **args,
            "kwargs_handlers": [*args["kwargs_handlers"], AutocastKwargs(cache_enabled=False)],
        }

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the model goes to the device when it is sharded, as far as its policy
        says."""

    def _prepare_input(self, data: Any) -> Any:
        """Casts floating-point inputs to the config's precision, as transformers does with
        DeepSpeed; models are in it."""
        found = super()._prepare_input(data)
        is_cast = self._config is not None and self._config.precision != "fp32"
        if is_cast and isinstance(found, torch.Tensor) and found.is_floating_point():
            return found.to(DTYPES[self._config.precision])  # type: ignore[union-attr]
        return found

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Creates the optimizer as the class after the mixin does, then takes it over. Collective;
        blocks."""
        if self._native() is None and not self._has_section("optimizer"):
            super().create_optimizer(*args, **kwargs)
        return self._take_over()

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Creates the config's schedule if there is one, else as the class after the mixin does."""
        if self.lr_scheduler is None and self._has_section("scheduler"):
            assert not isinstance(self._asked, OffloadPolicy)
            section = config_beside(self._asked, self.args, num_steps=num_training_steps).scheduler
            assert section is not None
            self.lr_scheduler = build_scheduler(section.type, section.params, self.optimizer)
            self._created_lr_scheduler = True
            return self.lr_scheduler
        return super().create_scheduler(num_training_steps, *args, **kwargs)

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """Shards the model if it is not sharded; wraps nothing. Collective; blocks."""
        if model is not self.model:
            return model
        if training or (
            self.train_dataset is not None and any(p.requires_grad for p in model.parameters())
        ):
            if self.optimizer is None:
                self.create_optimizer()  # evaluation before training
            self.optimizer = self.accelerator.prepare(self._take_over(), device_placement=[False])
        else:
            self._shard(is_trained=False, num_moments=0)
        prepared: nn.Module = self.accelerator.prepare_model(
            model, device_placement=False, evaluation_mode=True
        )
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as the class after the mixin does. Collective; blocks.

        Raises ValueError where the Trainer would cast the model: by these arguments, outside of
        training.
        """
        for name in ("bf16_full_eval", "fp16_full_eval"):
            if getattr(self.args, name) and not self.is_in_train:
                raise ValueError(
                    f"TrainingArguments({name}=True) casts the model in an evaluation outside of "
                    f"training, and a sharded one cannot be cast: set trainer.args.{name} = False"
                )
        return super().evaluation_loop(*args, **kwargs)

    def _native(self) -> NativeOptimizer | None:
        """Tiermem's optimizer of the sharded model, without Accelerate's wrapper."""
        inner = unwrapped(self.optimizer)
        return (
            inner
            if isinstance(inner, NativeOptimizer) and owner_of(self.model) is not None
            else None
        )

    def _take_over(self) -> torch.optim.Optimizer:
        """Shards the model for the trainer's optimizer, and replaces the optimizer by tiermem's of
        the same kind."""
        if self._native() is None:
            owner = owner_of(self.model)
            if owner is not None and self._shards is None and owner.states is not None:
                raise ValueError(
                    "this model was trained already, and its optimizer's states rest beside it: "
                    "call close(materialize=True) of the trainer before, which keeps the weights"
                )
            choice = self._choice()
            self._shard(is_trained=True, num_moments=choice.num_moments)
            self.optimizer = choice.build()
            if self.lr_scheduler is not None:
                # it was built for the optimizer that ours replaces
                self.lr_scheduler.optimizer = self.optimizer
        self._shards = owner_of(self.model)
        if self._shards is not None and self._meter is None:
            self._meter = Meter(self._shards.store.recorder, self._shards.store.stats)
        found: torch.optim.Optimizer = self.optimizer
        return found

    def _choice(self) -> OptimizerChoice:
        if self._config is None or not self._has_section("optimizer"):
            return take_over(unwrapped(self.optimizer))
        if self.optimizer is not None:
            raise ValueError(
                "the config has an optimizer and the Trainer was given one: leave one of them out"
            )
        choice = choose_optimizer(self._config, self.model, None, None)
        assert choice is not None
        return choice

    def _has_section(self, name: str) -> bool:
        return self._config is not None and getattr(self._config, name) is not None

    def _shard(self, is_trained: bool, num_moments: int) -> None:
        found = owner_of(self.model)
        # the trainer has made a new model (model_init)
        if self._shards is not None and found is not self._shards:
            self.close()
        if found is None:
            policy = self._policy(num_moments)
            if self._config is not None:
                cast_model(self.model, self._config, self.args.device)
            found = shard_for_passes(self.model, policy, None, self.args.device, is_trained)
            self._is_owner = True
            if policy.accumulation == "layers" and is_trained:
                self._passes = LayerwisePasses(found, self._call_forward)
        mark(found)
        self._shards = found

    def _policy(self, num_moments: int) -> OffloadPolicy:
        keep = self.args.save_total_limit if self._keeps_newest() else None
        moved: Collection[str] = ()
        if self._config is not None:
            policy = self._config.policy()
            moved = self._config.moved
        elif isinstance(self._asked, OffloadPolicy):
            policy = self._asked
        else:
            policy = OffloadPolicy(paths=[self.args.output_dir])
            moved = HOMES
        policy = with_moments(policy, num_moments, keep)
        if not moved:
            return policy
        device = self.args.device
        room = find_room(self.model, device, self._predict_activations())
        num_micro = self.args.gradient_accumulation_steps
        return compute_policy(
            self.model, policy, device, self.args.world_size, room, num_micro, moved
        )

    def _predict_activations(self) -> PredictedActivations | None:
        """The activations of a batch of the longest of the data set's first examples; None where
        the data set has no length, or the model no loss of its own. Random numbers are as
        before."""
        data = self.train_dataset
        size = self.args.per_device_train_batch_size
        if data is None or not hasattr(data, "__len__"):
            return None
        device = self.args.device
        states = generators(device)
        was_training = self.model.training
        try:
            examples = [data[number] for number in range(min(_MOST_SEEN, len(data)))]
            longest = max(examples, key=lambda example: len(example["input_ids"]))
            # a collator may draw from a generator of its own
            collate = self._get_collator_with_removed_columns(copy.deepcopy(self.data_collator))
            batch = collate([longest] * size)
            self.model.train()
            if self.args.gradient_checkpointing:
                self.model.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
            return activations_of(self.model, self._loss_of, batch, self.args.device)
        except Exception:  # of the data set's, the collator's and the model's own code
            return None
        finally:
            self.model.train(was_training)
            set_generators(device, states)

    def _loss_of(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self._call_forward(model, **batch).loss
        return loss

    # ---- accumulation "layers" -------------------------------------------------------------------

    def _call_forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.accelerator.autocast():
            return function(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps the micro-batches of a step for `training_step`."""
        found = super().get_batch_samples(*args, **kwargs)
        self._micros = list(found[0]) if self._passes is not None else []
        self._losses = []
        return found

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """As the class after the mixin; with accumulation "layers" the first call of a step
        computes all gradients.

        Collective; blocks. Raises NoChainError where the model is no chain of blocks, ValueError
        for a trainer whose class has a `training_step` of its own.
        """
        if self._passes is None:
            found: torch.Tensor = super().training_step(model, inputs, num_items_in_batch, **kwargs)
            return found
        if not self._losses:
            if super().training_step.__func__ is not Trainer.training_step:
                raise ValueError(
                    f"{type(self).__name__} has a training_step of its own, and accumulation is "
                    '"layers", which computes the '
                    'losses of a step\'s micro-batches together: set it to "batches"'
                )
            model.train()
            given = [
                (model, self._prepare_inputs(each), num_items_in_batch) for each in self._micros
            ]
            with self._passes.step([functools.partial(self._loss, *each) for each in given]):
                self._passes.forward()
                self._losses = self._passes.backward(self.accelerator.backward)
        return self._losses.pop(0)

    def _loss(self, model: nn.Module, inputs: Any, num_items: Any) -> torch.Tensor:
        """The loss of a micro-batch, whose gradients add up to those of the step."""
        with self.compute_loss_context_manager():  # a copy, because a loss may take its labels out
            loss: torch.Tensor = self.compute_loss(
                model, copy.copy(inputs), num_items_in_batch=num_items
            )
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = (
                self.model_accepts_loss_kwargs and num_items is not None
            ) or self.compute_loss_func is not None
        return loss if is_scaled else loss / len(self._micros)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, and adds to what is logged of training what the store did since the log before
        (`Figures`)."""
        if self._meter is not None and "loss" in logs:
            for name, figure in self._meter.look().as_logged().items():
                logs[f"tiermem_{name}"] = figure  # type: ignore[assignment]
        super().log(logs, *args, **kwargs)

    # ---- saving ----------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes model.safetensors, one parameter in memory at a time, and the files that the
        Trainer writes beside it.

        With adapters (PEFT) it writes what peft asks for: all adapters, and resized embeddings.
        Collective; blocks; raises OSError on every rank when rank 0 cannot write the weights,
        ValueError after a `close` without materialize.
        """
        if self._shards is None:
            check_values(self.model)
            super().save_model(output_dir, _internal_call)
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        is_adapted = has_adapters(self.model)
        state = adapters_state(self._shards, self.model) if is_adapted else {}
        if self.args.should_save:
            self._save(folder, state_dict=state)
        if not is_adapted:  # in place of the empty file of weights
            save_pretrained_weights(self._shards, Path(folder))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves as the class after the mixin does. Where the newest alone are kept, older ones stay
        until the new one is whole: a kill leaves one that training can go on from. Collective;
        blocks."""
        if self._shards is None or not self._keeps_newest():
            super()._save_checkpoint(model, trial)
            return
        limit = self.args.save_total_limit
        try:
            with saver_of(self._shards).commits.older_kept():
                self.args.save_total_limit = sys.maxsize  # the Trainer removes none
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            remove_older(Path(self._get_output_dir(trial=trial)), limit)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves a durable step into the checkpoint's folder, and scheduler.pt. Collective; blocks
        until it is complete."""
        assert self._shards is not None
        folder = Path(output_dir)
        beside = Beside(engine={"global_steps": self.state.global_step})
        save(
            self._shards,
            self._native(),
            folder.parent,
            folder.name,
            copy=not self._keeps_newest(),
            beside=beside,
        )
        wait(self._shards)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_FILE)

    def _keeps_newest(self) -> bool:
        """Whether the Trainer keeps the newest checkpoints alone, as the store's own files do.
        Otherwise each is a copy."""
        limit = self.args.save_total_limit
        return limit is not None and limit > 0 and self.args.metric_for_best_model is None

    # ---- loading ---------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as the class after the mixin does. True, or the word on a command line, stands
        for the newest checkpoint that was saved whole: a kill leaves a part of the one after it.
        Collective; blocks."""
        if str(resume_from_checkpoint).lower() == "true":
            resume_from_checkpoint = _newest_whole(Path(self.args.output_dir))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Loads weights, unless the folder has a durable step or DeepSpeed's: that is opened when
        the optimizer exists."""
        if (Path(resume_from_checkpoint) / POINTER_FILE).is_file() or is_deepspeed(
            Path(resume_from_checkpoint)
        ):
            return
        if has_adapters(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_weights(self.model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint. Collective; blocks."""
        if has_adapters(self.model):
            super()._load_best_model()
        else:
            load_weights(self.model, Path(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Opens the durable step of a checkpoint, DeepSpeed's, or the optimizer.pt of a plain
        Trainer. Collective; blocks."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        optimizer = self._native()
        assert self._shards is not None and optimizer is not None
        if (folder / POINTER_FILE).is_file():
            load(self._shards, optimizer, folder)
        elif is_deepspeed(folder):
            # DeepSpeed's state fits its schedules
            own = self.lr_scheduler if self._has_section("scheduler") else None
            with in_own_format(self._shards.topology, folder, None) as (copy, tag):
                load(self._shards, optimizer, copy, tag, scheduler=own)
            if own is None and not (folder / SCHEDULER_FILE).is_file():
                logger.warning("%s holds no %s: the schedule begins anew", folder, SCHEDULER_FILE)
        elif (folder / OPTIMIZER_FILE).is_file():
            optimizer.load_state_dict(_read(folder / OPTIMIZER_FILE))
        else:
            logger.warning("%s holds no optimizer states: they begin anew", folder)
        if (folder / SCHEDULER_FILE).is_file():
            self.lr_scheduler.load_state_dict(_read(folder / SCHEDULER_FILE))


class TiermemTrainer(TiermemMixin, Trainer):
    """transformers' Trainer over a sharded model: see TiermemMixin for the argument `tiermem`."""

    mixin = TiermemMixin
    """Put it before another class that inherits from Trainer: `class Mine(TiermemTrainer.mixin,
    SFTTrainer)`."""


def _newest_whole(folder: Path) -> str:
    """The checkpoint of the most steps whose last file, the Trainer's state, was written whole.
    Raises ValueError where there is none."""
    found = {}
    for file in folder.glob(f"checkpoint-*/{STATE_FILE}"):
        with contextlib.suppress(ValueError):  # killed while it was written
            found[json.loads(file.read_text("utf-8"))["global_step"]] = str(file.parent)
    if not found:
        raise ValueError(f"{folder} has no whole checkpoint: begin without resume_from_checkpoint")
    return found[max(found)]


# ---- models and optimizers -----------------------------------------------------------------------


def unwrapped(optimizer: Any) -> Any:
    """An optimizer without Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def remove_older(folder: Path, limit: int) -> None:
    """Removes all but the newest whole checkpoints, in the order of their saves: saving changes the
    times of the folders, and a clock may have been set back. Folders that the Trainer has not named
    stay."""
    numbers = {tag: number for number, tag in enumerate(reversed(tags_of(folder)))}
    found = [each for each in folder.glob("checkpoint-*") if each.name[11:].isdecimal()]
    states = sorted(
        (each / STATE_FILE for each in found if (each / STATE_FILE).is_file()),
        key=lambda file: (numbers.get(file.parent.name, -1), os.path.getmtime(file)),
    )
    kept = [each.parent for each in states[-limit:]]
    for each in found:
        if each not in kept:
            shutil.rmtree(each, ignore_errors=True)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Fills a model from a folder with safetensors, or with pytorch_model.bin. Collective for
    sharded models; blocks.

    Raises ValueError for names or shapes that do not match, OSError for missing files.
    """
    file = folder / "pytorch_model.bin"
    if file.is_file() and not list(folder.glob("*.safetensors")):
        model.load_state_dict(_read(file))
    else:
        load_pretrained_weights(model, folder)


def _read(file: str | os.PathLike[str]) -> Any:
    """The content of a torch file, memory-mapped."""
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
