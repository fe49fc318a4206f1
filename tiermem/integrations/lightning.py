"""TiermemStrategy: Lightning's Trainer over a sharded LightningModule.

    from tiermem.integrations.lightning import TiermemStrategy

    strategy = TiermemStrategy(OffloadPolicy(...))
    trainer = Trainer(strategy=strategy, ...)                the rest of a script stays

    when the Trainer                 the strategy
    starts processes, joins ranks    does what DDPStrategy does; one process alone joins no group
    calls configure_model            builds modules under zero.Init: never whole in memory
    sets up                          shards the whole module, and replaces the optimizer by tiermem's of the same kind
    saves a checkpoint               saves a durable step in a folder of that name, and Lightning's own values beside it
    loads a checkpoint               opens that folder, or a file that another strategy saved
    ends                             leaves the module sharded, for the next `fit`, `test` or `predict`, until `close`

Losses, clipping, accumulation, schedules, precision, callbacks and logs are Lightning's. Nothing is
patched: every row is a method of DDPStrategy that is overridden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from tiermem.checkpoint.opening.loading import load
from tiermem.checkpoint.saving.saver import save, wait
from tiermem.engine.choice import take_over
from tiermem.integrations.choice import shard_as_asked
from tiermem.optim.base import NativeOptimizer
from tiermem.policy import OffloadPolicy
from tiermem.run.init import Init
from tiermem.run.shards import Shards, owner_of

TAG = "tiermem"
OWN_FILE = "lightning.ckpt"

# without types, because Lightning may not be installed where types are checked
_Base: Any = DDPStrategy

_OPTIONS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
    *("precision_plugin", "process_group_backend", "timeout", "start_method"),
)
"""Arguments of DDPStrategy that act here: DDP wraps nothing."""


class TiermemStrategy(_Base):  # type: ignore[misc]
    """Shards a LightningModule for Lightning's Trainer, and saves and opens its checkpoints.

    Args:
        policy: where parameters, gradients and states rest; default: with an accelerator the fastest
            that the free memory holds, else everything in memory.
        options: those of DDPStrategy about processes: accelerator, parallel_devices,
            cluster_environment, checkpoint_io, precision_plugin, process_group_backend, timeout,
            start_method. Others raise TypeError.

    `configure_optimizers` gives one optimizer, tiermem's or torch's of the same name; others, and
    several, raise ValueError. Its groups and schedules are kept.
    """

    strategy_name = "tiermem"

    model: Any
    optimizers: Any
    """As DDPStrategy has them: the module, and the list of optimizers."""

    def __init__(self, policy: OffloadPolicy | None = None, **options: Any) -> None:
        unread = sorted({*options}.difference(_OPTIONS))
        if unread:
            raise TypeError(
                f"{', '.join(unread)} given; allowed are policy, an OffloadPolicy that says what is "
                f"sharded and where it rests, and {', '.join(_OPTIONS)}"
            )
        super().__init__(**options)
        self._policy = policy
        # the folder of this strategy that `load_checkpoint` has opened last
        self._opened: Path | None = None

    @property
    def shards(self) -> Shards | None:
        """The sharded module; None before the Trainer sets it up, and after `close`."""
        return None if self.lightning_module is None else owner_of(self.lightning_module)

    def close(self, materialize: bool = False) -> None:
        """Ends the sharding: closes the store and removes its files.

        With materialize the module keeps its weights as ordinary tensors (collective; takes the
        whole model's memory). Without it the weights are gone. Blocks. A second call does nothing.
        """
        shards = self.shards
        if shards is not None:
            shards.close(materialize)

    # ---- start -----------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Chooses what starts the other processes; alone nothing, which would leave a launcher's
        variables to this process."""
        if self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        """Joins the other ranks; alone it makes no group."""
        self.set_world_ranks()
        if self.world_size > 1:
            super().setup_distributed()

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Inside, tensors have the dtype of the Trainer's precision. They go to the device when the
        module is sharded."""
        with self.precision_plugin.tensor_init_context():
            yield

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Inside, modules are built under zero.Init: `configure_model` runs here."""
        with Init(policy=self._policy):
            yield

    def setup(self, trainer: Any) -> None:
        """Shards the module, unless it is sharded, and sets up its optimizer. Collective;
        blocks. Raises ValueError for a Trainer with sync_batchnorm."""
        if self._layer_sync is not None:
            raise ValueError(
                "Trainer(sync_batchnorm=True), but TiermemStrategy replaces no modules: leave it "
                "out, and each rank's batch norms see its own samples"
            )
        self.accelerator.setup(trainer)
        if self.shards is None:
            self.model = self.precision_plugin.convert_module(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        elif self.shards is None:
            self._shard_for_passes()
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Any) -> None:
        """Replaces the optimizer that `configure_optimizers` gives by tiermem's. Collective;
        blocks. Raises ValueError."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers gives {len(self.optimizers)} optimizers; a sharded module "
                "has one: make one optimizer with several parameter groups"
            )
        choice = take_over(self.optimizers[0])
        if self.shards is None:
            module: nn.Module = self.lightning_module
            shard_as_asked(module, self._policy, choice.num_moments, self.root_device, True)
        elif self.shards.states is not None:
            raise ValueError(
                "this module was trained already, and its optimizer's states rest beside it: call "
                "strategy.close(materialize=True) before another fit"
            )
        assert self.shards is not None
        self.shards.enable_training()
        native = choice.build()
        for config in self.lr_scheduler_configs:
            for schedule in (config.scheduler, *getattr(config.scheduler, "_schedulers", ())):
                schedule.optimizer = native  # it was built for the optimizer that ours replaces
        self.optimizers = [native]

    def model_to_device(self) -> None:
        """Does nothing: the module goes to the device when it is sharded, as far as its policy
        says."""

    def _shard_for_passes(self) -> None:
        """Shards the module as a frozen one: a `fit` that follows takes room for gradients and
        states."""
        module: nn.Module = self.lightning_module
        asked = self._policy or OffloadPolicy()
        trained = [param for param in module.parameters() if param.requires_grad]
        for param in trained:
            param.requires_grad_(False)
        try:
            shard_as_asked(module, asked, asked.num_moments, self.root_device, True)
        finally:
            for param in trained:
                param.requires_grad_(True)

    def teardown(self) -> None:
        """Ends what the Trainer began, and leaves the module sharded."""
        self.precision_plugin.teardown()
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- checkpoints -----------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: a durable step has the weights."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing: a durable step has the states."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Saves a durable step and Lightning's own values in a folder. Collective; blocks until all
        is on the disk."""
        folder = Path(self.broadcast(str(filepath)))
        shards = self.shards
        assert shards is not None
        save(
            shards,
            self._native() if "optimizer_states" in checkpoint else None,
            folder,
            TAG,
            copy=True,
        )
        wait(shards)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(
                checkpoint, folder / OWN_FILE, storage_options=storage_options
            )
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Lightning's own values of a folder that this strategy saved, or all of another strategy's
        file. Blocks."""
        folder = Path(checkpoint_path)
        self._opened = folder if (folder / TAG).is_dir() else None
        path = checkpoint_path if self._opened is None else folder / OWN_FILE
        found: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        return found

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: weights and states go where the sharded module keeps them."""
        return True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Opens the weights of the durable step, or loads another strategy's weights. Collective;
        blocks."""
        shards = self.shards
        assert shards is not None
        if self._opened is None:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            load(shards, None, self._opened / TAG)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Opens the durable step whole, or loads the states of another strategy's file. Collective;
        blocks.

        Lightning calls it after callbacks have changed what is trained and the optimizer's groups.
        """
        native = self._native()
        shards = self.shards
        module = self.lightning_module
        if native is None:
            return
        for callback in module.trainer.callbacks:
            if isinstance(callback, BaseFinetuning):
                # ran before the callback's own state was restored
                callback.on_fit_start(module.trainer, module)
        if self._opened is None:
            native.load_state_dict(checkpoint["optimizer_states"][0])
        else:
            assert shards is not None
            load(shards, native, self._opened / TAG)

    def _native(self) -> NativeOptimizer | None:
        found = self.optimizers[0] if self.optimizers else None
        inner = getattr(found, "_optimizer", found)
        return inner if isinstance(inner, NativeOptimizer) else None
