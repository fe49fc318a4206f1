"""Two of Lightning's demo modules, trained by its Trainer plainly or with TiermemStrategy.

lightning_trainings.py OUT NVME     on each rank: trains and resumes both with TiermemStrategy; writes OUT/<rank>.pt
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import as_rank
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tiermem import OffloadPolicy, Tier
from tiermem.integrations.lightning import TiermemStrategy

NUM_STEPS = 6
VOCAB = 53


def loader_of(data: Any, batch: int) -> DataLoader[Any]:
    """A loader of which every rank takes its share of each batch. An epoch has three batches."""
    sampler: Any = DistributedSampler(data, shuffle=False) if dist.is_initialized() else None
    return DataLoader(data, batch_size=batch, sampler=sampler)


class Boring(BoringModel):
    """The demo, with as many samples in a batch as are asked for."""

    def __init__(self, batch: int = 2) -> None:
        super().__init__()
        self.batch = batch

    def train_dataloader(self) -> DataLoader[Any]:
        torch.manual_seed(1)
        return loader_of(RandomDataset(32, 6), self.batch)


class Words(LightningTransformer):
    """The demo, with random words, without dropout, under AdamW; its layers are built in
    configure_model."""

    def __init__(self, batch: int = 2) -> None:
        LightningModule.__init__(self)
        self.batch = batch
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = Transformer(VOCAB, ninp=24, nhid=40, nlayers=1, dropout=0.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=1e-2, eps=1e-4
        )  # the keys' bias has gradients of rounding alone
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=NUM_STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def prepare_data(self) -> None:
        """Downloads nothing."""

    def train_dataloader(self) -> DataLoader[Any]:
        words = torch.randint(0, VOCAB, (6, 8), generator=torch.Generator().manual_seed(1))
        return loader_of(TensorDataset(words[:, :-1], words[:, 1:]), self.batch)


class Finetuning(BackboneFinetuning):
    """Lightning's callback, which also unfreezes the backbone in a run that is resumed later
    (Lightning's leaves it frozen)."""

    def finetune_function(
        self, module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        super().finetune_function(module, epoch, optimizer)
        if epoch > self.unfreeze_backbone_at_epoch:
            self.make_trainable(module.backbone)


class Tuned(Boring):
    """The demo behind a backbone, for callbacks that freeze the backbone and unfreeze it at an
    epoch."""

    def __init__(self, batch: int = 2) -> None:
        super().__init__(batch)
        self.backbone = nn.Sequential(nn.Linear(32, 20), nn.Tanh(), nn.Linear(20, 32))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [param for param in self.parameters() if param.requires_grad], lr=1e-2
        )

    def configure_callbacks(self) -> list[Callback]:
        return [Finetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3, verbose=False)]


MODULES = {"boring": Boring, "words": Words, "tuned": Tuned}


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.seen.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone())))


def built(name: str, batch: int) -> LightningModule:
    torch.manual_seed(0)
    return MODULES[name](batch)


def fit(
    name: str,
    folder: Path,
    strategy: Any = "auto",
    num_devices: int = 1,
    num_steps: int = NUM_STEPS,
    resume: Path | None = None,
    save: Path | None = None,
    module: LightningModule | None = None,
    is_tested: bool = False,
) -> dict[str, Any]:
    """Trains a demo, with `is_tested` after a test, and returns its losses and weights; `save`:
    where its checkpoint goes when it ends."""
    warnings.filterwarnings("ignore", module="lightning")
    losses, module = Losses(), module or built(name, 2 // num_devices)
    trainer = Trainer(
        accelerator="cpu", devices=num_devices, strategy=strategy, max_steps=num_steps, max_epochs=9, callbacks=[losses],
        gradient_clip_val=0.5, enable_checkpointing=False, logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, limit_val_batches=0, default_root_dir=folder,
    )  # fmt: skip
    if is_tested:
        trainer.test(module, verbose=False)
    trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return {"losses": losses.seen, "weights": weights, "module": module, "trainer": trainer}


def strategy_of(nvme: Path, **options: Any) -> TiermemStrategy:
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=[nvme], persistence_numel=30, timeout_s=60
    )
    return TiermemStrategy(policy, **options)


def with_and_without_break(
    name: str, folder: Path, make_strategy: Callable[[], Any] = lambda: "auto", num_devices: int = 1
) -> dict[str, Any]:
    """Trains without a break, and with one: half the steps, a checkpoint, a new module and Trainer,
    the other half.

    The halves are not the whole: when an epoch is resumed at its end, Lightning steps its schedule
    once less.
    """
    found: dict[str, Any] = {}
    saved = folder / f"{name}.ckpt"
    for word, num_steps, resume, save in (
        ("whole", NUM_STEPS, None, None),
        ("first", NUM_STEPS // 2, None, saved),
        ("second", NUM_STEPS, saved, None),
    ):
        strategy = make_strategy()
        run = fit(name, folder, strategy, num_devices, num_steps, resume, save)
        found[word] = copy.deepcopy({"losses": run["losses"], "weights": run["weights"]})
        if isinstance(strategy, TiermemStrategy):
            strategy.close()
    return found


if __name__ == "__main__":
    with as_rank() as (_, out, (nvme,)):
        torch.set_num_threads(1)
        environment, folder = TorchElasticEnvironment(), out.parent
        make = functools.partial(strategy_of, Path(nvme), cluster_environment=environment)
        torch.save({name: with_and_without_break(name, folder, make, 2) for name in MODULES}, out)
