"""Is what the user writes to a weight honoured, wherever the weight rests, as plain PyTorch honours it?

Each way to write is tried in each place between steps. The yardstick is a plain loop over fp32 masters in which a written
element becomes the master and all others keep theirs (`Twin`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.zero import GatheredParameters

NUM_STEPS = 4
PRECISIONS = {
    "exact": Precision(),
    "split": Precision(master="split"),
    "compact": Precision(master="split", moments="bf16"),
    "tiny": Precision(master="split", moments="8bit"),
}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"params": Tier.HOST, "optim": Tier.HOST, "persistence_numel": 1 << 20},
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME, "persistence_numel": 1 << 20},
    "stage 2, states on nvme": {"stage": 2, "optim": Tier.NVME},
    "stage 0": {"stage": 0},
}


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(67, 41), nn.Tanh(), nn.Linear(41, 67)).to(dtype)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(5, 67, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = batch(step, next(model.parameters()).dtype)
    loss: torch.Tensor = (model(x) - x).float().square().mean()
    return loss


class Twin:
    """Plain PyTorch over fp32 masters: elements of a weight that are no longer their master's rounding become the master."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        self.optim = torch.optim.AdamW(self.masters, lr=1e-2, weight_decay=0.0)

    def step(self) -> None:
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                is_written = master.to(param.dtype) != param
                master.copy_(torch.where(is_written, param.float(), master))
                master.grad = None if param.grad is None else param.grad.float()
            self.optim.step()
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.copy_(master)
                param.grad = None


def zero_a_row(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[3] = 0.0


def zero_all(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.zero_()


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.0625, 0.0625)


def clamp_in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model[2].weight.clamp_(-0.0625, 0.0625)


def scale_together(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def scale_data(model: nn.Module) -> None:
    """Torch counts no version."""
    for param in model.parameters():
        param.data.mul_(0.5)


def put_other_memory(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone() * 0.5


def put_a_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def write_gathered(model: nn.Module) -> None:
    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        for param in model.parameters():
            param.data.mul_(0.5)


def perturb_and_restore(model: nn.Module) -> None:
    """As published code of FGM and SAM does it."""
    old = {param: param.data.clone() for param in model.parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.25)
    model(batch(9, next(model.parameters()).dtype))
    for param in model.parameters():
        param.data = old[param]


def swap_and_put_back(model: nn.Module) -> None:
    """As averages are evaluated: other memory is shown for a while."""
    backup = {param: param.data for param in model.parameters()}
    for param in model.parameters():
        param.data = torch.full_like(param, 0.5)
    model(batch(9, next(model.parameters()).dtype))
    for param in model.parameters():
        param.data = backup[param]


WAYS: dict[str, Callable[[nn.Module], None]] = {
    way.__name__: way
    for way in (
        zero_a_row, zero_all, clamp, clamp_in_inference_mode, scale_together, scale_data, put_other_memory, put_a_vector, load,
        write_gathered, perturb_and_restore, swap_and_put_back,
    )
}  # fmt: skip


MOMENTS = ("before the first step", "before forward", "before the step")


def trained(
    policy: OffloadPolicy | None, way: Callable[[nn.Module], None], moment: str, dtype: torch.dtype
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and weights at the end. moment: when the way is taken."""
    model = model_of(dtype)
    shards = None if policy is None else tiermem.shard(model, policy)
    optim: Any = Twin(model) if policy is None else tiermem.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(NUM_STEPS):
        if moment == "before forward" or (moment == "before the first step" and step == 0):
            way(model)
        loss = loss_of(model, step)
        loss.backward()
        if moment == "before the step":
            way(model)
        optim.step()
        if policy is not None:
            optim.zero_grad()
        losses.append(loss.item())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if shards is not None:
        shards.close()
    return losses, weights


def all_writes() -> list[Any]:
    """Every way in every place at every moment; each way in each place at one moment is not marked slow."""
    return [
        pytest.param(way, place, moment, marks=[] if (i + j + k) % len(MOMENTS) == 0 else pytest.mark.slow)
        for i, way in enumerate(WAYS)
        for j, place in enumerate(PLACES)
        for k, moment in enumerate(MOMENTS)
    ]


@pytest.mark.parametrize(("way", "place", "moment"), all_writes())
def test_a_write_is_honoured_as_by_fp32_masters(way: str, place: str, moment: str, tmp_path: Path) -> None:
    policy = OffloadPolicy(paths=[str(tmp_path)], **PLACES[place])
    for dtype in (torch.bfloat16, torch.float32):
        theirs, ours = (trained(each, WAYS[way], moment, dtype) for each in (None, policy))
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5 if dtype is torch.float32 else 1e-3)
        for name, value in theirs[1].items():
            assert torch.allclose(ours[1][name].float(), value.float(), rtol=0.02, atol=1e-4), name


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["zero_a_row", "zero_all", "clamp"])
def test_unwritten_elements_keep_their_master_to_the_bit(way: str, place: str, precision: str, tmp_path: Path) -> None:
    """A write at every step, in every format of masters. Zeroed elements become zero, never NaN."""
    model = model_of()
    policy = OffloadPolicy(paths=[str(tmp_path)], precision=PRECISIONS[precision], **PLACES[place])
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        tiles = optim.tiles_of(shards)
        for step in range(NUM_STEPS):
            loss_of(model, step).backward()
            optim.step()
            optim.zero_grad()
            for _, shard in shards.parameters():
                if shard.name != "0.weight":
                    continue
                master, weight = tiles.state(shard, "master"), shard.param.detach().clone().flatten()
                WAYS[way](model)
                new = shard.param.detach().clone().flatten()
                now = tiles.state(shard, "master")
                is_written = weight != new
                assert is_written.any() and torch.equal(now[~is_written], master[~is_written])
                is_exact = step > 0 or precision == "exact" or way != "clamp" or place.startswith("stage 2, ")
                wanted = new[is_written].float()
                assert torch.allclose(now[is_written], wanted, rtol=0.0 if is_exact and step else 2**-8, atol=1e-40)
        assert loss_of(model, 9).isfinite()


@pytest.mark.parametrize("place", PLACES)
def test_a_step_while_the_old_memory_is_held_is_refused(place: str, tmp_path: Path) -> None:
    """The step would write what the user wants to put back; what is written meanwhile is not lost."""
    model = model_of()
    with tiermem.shard(model, OffloadPolicy(paths=[str(tmp_path)], **PLACES[place])):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, 0).backward()
        backup = model[0].weight.data
        model[0].weight.data = torch.full_like(backup, 0.5)
        with pytest.raises(RuntimeError, match=r"backup = p.data.clone\(\)"):
            optim.step()
        assert (model.state_dict()["0.weight"] == 0.5).all()
        del backup
        optim.step()
        assert (model[0].weight.detach().float() - 0.5).abs().max() < 0.02


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double])
def test_another_dtype_or_device_is_refused_at_the_write(
    change: Callable[[nn.Module], object], place: str, tmp_path: Path
) -> None:
    model = model_of()
    with tiermem.shard(model, OffloadPolicy(paths=[str(tmp_path)], **PLACES[place])):
        before = loss_of(model, 0).item()
        with pytest.raises(RuntimeError, match="policy or config says the dtype"):
            change(model)
        model.bfloat16()
        assert loss_of(model, 0).item() == before


def test_parameters_are_ordinary_ones_after_closing(tmp_path: Path) -> None:
    model = model_of()
    tiermem.shard(model, OffloadPolicy(paths=[str(tmp_path)], **PLACES["host"])).close(materialize=True)
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    model.half()


# ---- written in forward ----------------------------------------------------------------------------------------------


class WritesInForward(nn.Module):
    """Sets its shift from the first batch, as ActNorm does, and keeps its rows' norms below one, as some codebooks do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.shift = nn.Parameter(torch.zeros(67))
        self.book = nn.Parameter(torch.randn(67, 67, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if not self.is_set:
                shift = x.mean(0) + 3
                if self.way == "data":
                    self.shift.data = shift
                else:
                    self.shift.copy_(shift)
                self.is_set.fill_(True)
            self.book.data.renorm_(2, 0, 1.0)
        return (x - self.shift) @ self.book


def losses_with_writes(policy: OffloadPolicy | None, way: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(67, 67), WritesInForward(way), nn.Linear(67, 67))
    shards = None if policy is None else tiermem.shard(model, policy)
    kind: Any = torch.optim.AdamW if policy is None else tiermem.AdamW
    optim = kind(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(batch(step, torch.float32)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    if shards is not None:
        shards.close()
    return losses


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("way", ["in place", "data"])
def test_a_write_in_forward_is_kept_on_every_tier(way: str, tier: Tier, overlap: Any, tmp_path: Path) -> None:
    policy = OffloadPolicy(
        params=tier, optim=tier, paths=[str(tmp_path)], persistence_numel=20, overlap=overlap, tile_numel=1024
    )
    assert losses_with_writes(policy, way) == pytest.approx(losses_with_writes(None, way), rel=1e-5)


# ---- memory that weights share ---------------------------------------------------------------------------------------


def share_whole(model: nn.Sequential) -> None:
    model[2].weight.data = model[0].weight.data.view(67, 41)


def share_a_part(model: nn.Sequential) -> None:
    model[2].bias.data = model[0].weight.data.view(-1)[11 : 11 + 67]


def share_with_a_buffer(model: nn.Sequential) -> None:
    model[1].register_buffer("seen", model[0].weight.data[:3])


@pytest.mark.parametrize("share", [share_whole, share_a_part, share_with_a_buffer])
def test_weights_that_share_memory_are_refused_with_both_names(share: Callable[[nn.Sequential], None]) -> None:
    """Torch steps such memory once for each parameter, which no tier here does."""
    model = model_of()
    share(model)
    with pytest.raises(ValueError, match=r"share memory.*one parameter for both") as refused:
        tiermem.shard(model, OffloadPolicy())
    assert "0.weight" in str(refused.value) and ("2." in str(refused.value) or "1.seen" in str(refused.value))


def test_frozen_weights_over_the_same_elements_become_one_parameter() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).requires_grad_(False)
    model[1].weight.data = model[0].weight.data
    x = torch.ones(2, 8)
    before = model(x)
    with tiermem.shard(model, OffloadPolicy(params=Tier.HOST, persistence_numel=1)):
        assert model[1].weight is model[0].weight
        assert torch.equal(model(x), before)
