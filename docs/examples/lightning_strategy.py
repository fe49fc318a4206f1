"""Lightning's Trainer

One argument of the Trainer changes. The LightningModule, its optimizer and its schedule stay.

    pip install lightning         beside tiermem (docs/start.md)
    python lightning_strategy.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from tiermem import OffloadPolicy, Tier
from tiermem.integrations.lightning import TiermemStrategy


class NextByte(LightningModule):
    """A small model of the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        width = 64
        self.embed = nn.Embedding(256, width)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        )
        self.head = nn.Linear(width, 256)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        logits = self.head(self.layers(self.embed(batch[:, :-1])))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        if self.global_step % 10 == 0:
            print(f"step {self.global_step}: loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)  # the strategy makes tiermem's of it


text = torch.tensor(list(b"Bytes rest in a tier, and are fetched before they are used. " * 50))
loader = DataLoader(text[:2048].view(-1, 32), batch_size=4)

# Parameters of up to 100,000 elements stay in memory; all of this tiny model are smaller, so here
# that is 1000.
policy = OffloadPolicy(
    params=Tier.NVME, optim=Tier.NVME, paths=["."], host_bytes=512 << 20, persistence_numel=1000
)
strategy = TiermemStrategy(policy)
trainer = Trainer(
    strategy=strategy,
    devices=1,
    max_steps=31,
    max_epochs=2,
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(NextByte(), loader)
trainer.save_checkpoint("last.ckpt")
strategy.close()
