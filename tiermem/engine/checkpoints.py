"""EngineCheckpoints: `load_checkpoint` of an engine, under the reference's name and with its arguments.

The model and its optimizer are checkpoint/loading.py's; here are the engine's own counters, schedule and loss scale. A checkpoint
may be opened by the engine that saved it, right after, as well as by a new one.
"""

from __future__ import annotations

import os
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from tiermem.checkpoint.loading import CustomLoad, Loaded, load
from tiermem.engine.accumulation import Accumulation
from tiermem.optim.base import NativeOptimizer
from tiermem.optim.scaling import LossScaler
from tiermem.zero.shards import Shards


class EngineCheckpoints:
    """What an engine does with checkpoints; `Engine` has the attributes."""

    shards: Shards
    optimizer: NativeOptimizer | None
    lr_scheduler: LRScheduler | None
    training_dataloader: Any
    global_steps: int
    global_samples: int
    skipped_steps: int
    _scaler: LossScaler
    _accumulation: Accumulation
    _was_step_applied: bool

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
    ) -> tuple[str | None, Any]:
        """Opens what `save_checkpoint` saved, on any number of ranks, stage, tiers, tile sizes, paths and precisions.

        Args:
            load_dir: the folder given to `save_checkpoint`; or that of a tag or a run, or a manifest.
            tag: default: what `latest` names.
            load_module_strict: names that only the model or the checkpoint has are an error with both lists; else a warning.
            load_optimizer_states: False: masters are made from the weights; moments stay as they are, new in a new engine.
            load_lr_scheduler_states: whether the schedule goes on from where it was.
            load_module_only: weights and buffers, and nothing else.
            custom_load_fn: called with src= (saved weights by name, each read when it is asked for) and dst= (the model), to
                put weights in place itself; masters are made from what it leaves.
            allow_older: opens the next older tag when this one is not whole.

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
