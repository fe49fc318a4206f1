"""On a GPU: the tier of the weights changes no bit, and the memory taken follows from the units.

Needs a CUDA device; skipped with that reason where there is none.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, DEPTH, STEPS = 512, 6, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 127)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(params: Tier, optim: Tier, path: Path) -> tuple[list[float], int, int]:
    """Losses, peak bytes allocated on the GPU, and bytes of the largest unit."""
    torch.manual_seed(0)
    model = Model().bfloat16().cuda()
    torch.cuda.empty_cache()
    policy = OffloadPolicy(params=params, optim=optim, paths=[path], tile_numel=100_000, unit_buffers=3)
    losses = []
    with tiermem.shard(model, policy) as shards:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        torch.cuda.reset_peak_memory_stats()
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, WIDTH, generator=generator).bfloat16().cuda()
            y = torch.randint(0, 127, (8,), generator=generator).cuda()
            loss = nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        peak = torch.cuda.max_memory_allocated()
        largest = max(live.unit.full_bytes for live in shards.units)
    return losses, peak, largest


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_losses_equal_those_of_weights_on_the_gpu_to_the_bit(tier: Tier, tmp_path: Path) -> None:
    on_gpu, _, _ = train(Tier.DEVICE, Tier.HOST, tmp_path)
    away, _, _ = train(tier, tier, tmp_path)
    assert away == on_gpu


def test_peak_is_live_units_gradients_of_one_unit_and_activations(tmp_path: Path) -> None:
    _, peak, largest = train(Tier.HOST, Tier.HOST, tmp_path)
    live_units = 3 * largest  # in use and fetched ahead
    gradients = 2 * largest  # of the unit in backward, and those being copied out
    activations = DEPTH * 8 * WIDTH * 2 * 16  # what a block saves, bf16, generously
    cublas = 64 << 20  # its workspace
    assert peak <= live_units + gradients + activations + cublas


def test_nothing_synchronizes_the_whole_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch.cuda.synchronize was called")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    train(Tier.NVME, Tier.NVME, tmp_path)


def test_optimizer_states_on_the_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="optim=DEVICE on a GPU"):
        tiermem.shard(Model().cuda(), OffloadPolicy(params=Tier.HOST))
