"""Does a model train as in plain PyTorch when it is called otherwise than through its own forward?

CLIP         get_text_features and get_image_features, with a contrastive loss of one's own
an auto-encoder          encode and decode
a language model         its body, and one's own cross-entropy
a LightningModule        sharded whole, driven by its training_step
a bare container         the review's six lines
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import models
from programs.models import VOCAB
from programs.twins import batch, train_steps
from torch import nn
from torch.nn import functional as F

import tiermem
from tiermem import OffloadPolicy, Tier

Loss = Callable[[nn.Module, int], torch.Tensor]


def noise(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def clip() -> tuple[nn.Module, Loss]:
    from transformers import CLIPConfig, CLIPModel

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = {"vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": 1, **sizes}
    config = CLIPConfig(
        text_config=text,
        vision_config={"image_size": 8, "patch_size": 4, **sizes},
        projection_dim=16,
    )

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        texts = model.get_text_features(input_ids=batch(step, 4)[0])
        images = model.get_image_features(pixel_values=noise(step, 4, 3, 8, 8))
        texts, images = (
            each if torch.is_tensor(each) else each.pooler_output for each in (texts, images)
        )
        return F.cross_entropy(F.normalize(texts) @ F.normalize(images).T * 5.0, torch.arange(4))

    return CLIPModel(config), loss_of


class AutoEncoder(nn.Module):
    """The shape of a diffusion model's VAE: two towers of blocks, each behind a method of its
    own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self._tower(3, 8), self._tower(4, 8)
        self.to_latent, self.from_latent = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 3, padding=1)

    @staticmethod
    def _tower(channels: int, width: int) -> nn.Module:
        blocks = [
            nn.Sequential(nn.GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in "ab"
        ]
        return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), *blocks)

    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_variance = self.to_latent(self.encoder(images)).chunk(2, dim=1)
        return mean, log_variance

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.from_latent(self.decoder(latents))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(images)[0])


def auto_encoder() -> tuple[nn.Module, Loss]:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        images = noise(step, 2, 3, 8, 8)
        mean, log_variance = model.encode(images)
        made = model.decode(mean + noise(100 + step, *mean.shape) * (0.5 * log_variance).exp())
        return (
            F.mse_loss(made, images)
            + 0.01 * (mean.square() + log_variance.exp() - log_variance).mean()
        )

    return AutoEncoder(), loss_of


def llama() -> tuple[nn.Module, Loss]:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        inputs, targets = batch(step)
        hidden = model.model(input_ids=inputs).last_hidden_state
        return F.cross_entropy(model.lm_head(hidden).flatten(0, 1), targets.flatten())

    return models.llama(num_hidden_layers=2), loss_of


class Classifier(nn.Module):
    """What a LightningModule is to the library: a root without a forward, whose methods call what
    it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh())
        self.heads = nn.ModuleDict({"a": nn.Linear(33, 3), "b": nn.Linear(33, 5)})

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        name = "ab"[index % 2]  # every other step leaves a head out
        return F.cross_entropy(self.heads[name](self.body(x)), torch.arange(len(x)) % 3)


def lightning() -> tuple[nn.Module, Loss]:
    return Classifier(), lambda model, step: model.training_step(noise(step, 6, 7), step)


def container() -> tuple[nn.Module, Loss]:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return model["a"](noise(0, 4, 8)).square().mean() * 10**-step

    return nn.ModuleDict({"a": nn.Linear(8, 8)}), loss_of


@pytest.mark.sampled(16)
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("persistence_numel", [None, 0])
@pytest.mark.parametrize("build", [clip, auto_encoder, llama, lightning, container])
def test_a_model_called_otherwise_trains_as_in_torch(
    build: Callable[[], tuple[nn.Module, Loss]],
    persistence_numel: int | None,
    tier: Tier,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, loss_of = build()
    plain = copy.deepcopy(model)
    kept = {} if persistence_numel is None else {"persistence_numel": persistence_numel}
    with tiermem.shard(model, OffloadPolicy(params=tier, optim=tier, paths=[tmp_path], **kept)):
        losses = []
        for each, optimizer in ((model, tiermem.AdamW), (plain, torch.optim.AdamW)):
            optim = optimizer(each.parameters(), lr=1e-3, eps=1e-4)
            losses.append(train_steps(each, optim, range(5), loss_of))
        weights = model.state_dict()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6, abs=1e-6)
    assert all(
        (weights[name] - value).abs().max() < 1e-6 for name, value in plain.state_dict().items()
    )
