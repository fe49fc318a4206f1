"""EngineCheckpoints: `save_checkpoint` and `load_checkpoint` of an engine, under the reference's names.

    save_checkpoint    a tag, between steps; with durability="step" every step is made durable, too
    load_checkpoint    by the engine that saved it, right after, as well as by a new one

The model and its optimizer are checkpoint/saving/saver.py's and opening/loading.py's; here are the engine's own counters,
schedule, loss scale and place in the data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from tiermem.checkpoint.opening.loading import CustomLoad, Loaded, load
from tiermem.checkpoint.saving.saver import Beside, make_durable, save, wait
from tiermem.config import TiermemConfig
from tiermem.engine.accumulation import Accumulation
from tiermem.optim.base import NativeOptimizer
from tiermem.optim.scaling import LossScaler
from tiermem.zero.shards import Shards


class EngineCheckpoints:
    """What an engine does with checkpoints; `Engine` has the attributes."""

    config: TiermemConfig
    shards: Shards
    optimizer: NativeOptimizer | None
    lr_scheduler: LRScheduler | None
    training_dataloader: Any
    global_steps: int
    global_samples: int
    skipped_steps: int
    step_client_state: Mapping[str, Any]  # saved with every step of durability="step"; yours to set
    _scaler: LossScaler
    _accumulation: Accumulation
    _was_step_applied: bool

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        copy: bool = False,
    ) -> bool:
        """Saves weights, optimizer states and all that a run needs to go on to the bit; returns True. Collective; blocks.

        Args:
            save_dir: a folder; on the file system of the NVMe paths what rests there is synced and named, not copied.
            tag: its name in there; default: `global_step<steps>`.
            client_state: numbers, strings, lists, dicts, tensors and the like, given back by `load_checkpoint`.
            save_latest: whether `<save_dir>/latest` names it.
            exclude_frozen_parameters: leaves out what does not require gradients.
            copy: a complete copy in `<save_dir>/<tag>/`, made behind while training goes on: `wait_checkpoint`.

        Between steps alone: RuntimeError while gradients add up. Other errors: tiermem.checkpoint.save.
        """
        self._check_between_steps()
        beside = self._beside(client_state)
        return save(
            self.shards,
            self.optimizer,
            save_dir,
            tag,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
            copy=copy,
            beside=beside,
            tag_validation=self.config.checkpoint.tag_validation,
        )

    def wait_checkpoint(self) -> None:
        """Blocks until the copy that `save_checkpoint` has begun is whole. Raises what it failed with."""
        wait(self.shards)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: CustomLoad | None = None,
        *,
        allow_older: bool = False,
        newest: bool = False,
    ) -> tuple[str | None, Any]:
        """Opens what `save_checkpoint` saved, on any number of ranks, stage, tiers, tile sizes, paths and precisions.

        Args:
            load_dir: the folder given to `save_checkpoint`; or that of a tag or a run, or a manifest.
            tag: default: what `latest` names.
            load_module_strict: names that only the model or the checkpoint has are an error with both lists; else a warning.
            load_optimizer_states: False: moments stay as they are, new in a new engine.
            load_lr_scheduler_states: whether the schedule goes on from where it was.
            load_module_only: weights and buffers, and nothing else; masters are made from the weights, as they are with
                `load_from_fp32_weights` false.
            custom_load_fn: called with src= (saved weights by name, each read when it is asked for) and dst= (the model), to
                put weights in place itself; masters are made from what it leaves.
            allow_older: opens the next older tag when this one is not whole.
            newest: where there is no `latest`, opens the newest tag; else tags without it are an error that lists them.

        Returns the path that was opened and the client state; (None, None), with a warning, when no tag is given and nothing is
        saved there. On as many ranks as there were, training goes on to the bit. Gradients that have added up are dropped.

        Collective; blocks; every byte is verified. Errors: tiermem.checkpoint.load.
        """
        self._check_here()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        loaded = load(
            self.shards,
            self.optimizer,
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
            allow_older=allow_older,
            newest=newest,
            scheduler=self.lr_scheduler if load_lr_scheduler_states else None,
            loss_scaler=self._scaler,
            loader=self.training_dataloader,
        )
        if loaded is None:
            return None, None
        self._accumulation.begin_anew()
        if not load_module_only:
            self._count_from(loaded)
            if load_lr_scheduler_states and not loaded.has_states:
                self._show_rates()
        return str(loaded.path), loaded.client_state

    def _check_here(self) -> None:
        """Raises RuntimeError while the model is not on its device."""
        raise NotImplementedError

    def _end_step(self) -> None:
        """When everything that a step changes has changed. Collective with durability="step"."""
        if self.shards.policy.durability == "step":
            make_durable(self.shards, self.optimizer, self._beside(self.step_client_state))

    def _beside(self, client_state: Mapping[str, Any] | None) -> Beside:
        """What is saved beside the states."""
        names = ("global_steps", "skipped_steps", "global_samples")
        return Beside(
            self.lr_scheduler,
            self._scaler,
            self.training_dataloader,
            {name: getattr(self, name) for name in names} | {"micro_steps": self._accumulation.micro_steps},
            self.config.model_dump(mode="json", exclude_unset=True),
            dict(client_state or {}),
        )

    def _check_between_steps(self) -> None:
        """Raises RuntimeError while there are gradients, which are not saved."""
        has_gradients = any(shard.param.grad is not None for _, shard in self.shards.parameters())
        if has_gradients or self._accumulation.is_under_way:
            raise RuntimeError(
                "save_checkpoint between a backward and the step that ends it: gradients are not saved, so what is loaded "
                "would not go on as this run does. Save after step(), at the end of an accumulation"
            )

    def _count_from(self, loaded: Loaded) -> None:
        for name in ("global_steps", "global_samples", "skipped_steps"):
            setattr(self, name, int(loaded.engine.get(name, 0)))
        self._accumulation.begin_anew(int(loaded.engine.get("micro_steps", 0)))
        self._was_step_applied = False

    def _show_rates(self) -> None:
        """The groups of a new optimizer follow a schedule that goes on."""
        if self.lr_scheduler is not None and self.optimizer is not None:
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
