"""On a GPU: the tier of the weights changes no bit, whichever way a model comes in, and memory
follows from the units."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs import twins
from programs.models import Block
from programs.twins import train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.swap.memory.accelerator import is_accelerator, reset_peak, usage
from tiermem.units.quantised import FORMATS, pack, unpack

pytestmark = pytest.mark.gpu

WIDTH, DEPTH, SAMPLES, STEPS = 256, 6, 8, 5
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.01}
SETTINGS: dict[str, Any] = {"persistence_numel": 100, "tile_numel": 100_000, "unit_buffers": 3}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, 4 * WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 127)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def built() -> Model:
    """On the CPU, as a person builds it: tiermem takes it to the device."""
    torch.manual_seed(0)
    return Model().bfloat16()


def loss_of(model: nn.Module, step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step % 2)
    x = torch.randn(SAMPLES, WIDTH, generator=generator).bfloat16().to(device)
    y = torch.randint(0, 127, (SAMPLES,), generator=generator).to(device)
    return nn.functional.cross_entropy(model(x).float(), y)


def train(params: Tier, optim: Tier, path: Path) -> list[float]:
    model = built()
    policy = OffloadPolicy(params=params, optim=optim, paths=[path], **SETTINGS)
    with tiermem.shard(model, policy) as shards:
        assert is_accelerator(shards.device)
        assert {each.device for each in (*model.parameters(), *model.buffers())} == {shards.device}
        optimizer = tiermem.AdamW(model.parameters(), **OPTIMIZER)
        return train_steps(
            model, optimizer, range(STEPS), functools.partial(loss_of, device=shards.device)
        )


def config_of(home: str, path: Path) -> dict[str, Any]:
    place = {"device": home, "nvme_path": str(path)}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 100, "sub_group_size": 100_000}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": OPTIMIZER},
        "zero_optimization": {**zero, "offload_param": place, "offload_optimizer": place},
        "tiermem": {"strict": True},
    }


def train_engine(model: nn.Module, config: dict[str, Any], device: torch.device) -> list[float]:
    engine, _, _, _ = tiermem.initialize(model=model, config=config)
    assert engine.device == device
    losses = twins.train_engine(engine, range(STEPS), loss_of)
    engine.close()
    return losses


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_losses_equal_those_of_weights_on_the_device_to_the_bit(
    tier: Tier, accelerator: torch.device, tmp_path: Path
) -> None:
    assert train(tier, tier, tmp_path) == train(Tier.DEVICE, Tier.HOST, tmp_path)


@pytest.mark.slow
def test_states_on_the_device_are_stepped_there_as_on_the_cpu(
    accelerator: torch.device, tmp_path: Path
) -> None:
    there = train(Tier.DEVICE, Tier.DEVICE, tmp_path)
    assert there == pytest.approx(train(Tier.HOST, Tier.HOST, tmp_path), rel=1e-2)
    assert there[-1] < there[0]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_blocks_are_unpacked_there_as_on_the_cpu(
    tier: Tier, form: str, accelerator: torch.device, tmp_path: Path
) -> None:
    def losses(model: Model, params: Tier, frozen_quant_type: Any) -> list[float]:
        model.layers[1:].requires_grad_(False)
        policy = OffloadPolicy(
            params=params,
            optim=Tier.HOST,
            paths=[tmp_path],
            frozen_quant_type=frozen_quant_type,
            **SETTINGS,
        )
        with tiermem.shard(model, policy) as shards:
            assert any(live.unit.is_packed for live in shards.units) is bool(frozen_quant_type)
            optimizer = tiermem.AdamW(
                [param for param in model.parameters() if param.requires_grad], **OPTIMIZER
            )
            return train_steps(
                model, optimizer, range(STEPS), functools.partial(loss_of, device=shards.device)
            )

    twin, kind = built(), FORMATS[form]
    for param in twin.layers[1:].parameters():
        if param.dim() > 1:
            flat = param.detach().reshape(-1)
            param.data = unpack(
                pack(flat, kind), flat.numel(), torch.empty_like(flat), form=kind
            ).view(param.shape)
    assert losses(built(), tier, form) == losses(twin, Tier.DEVICE, None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_initialize_trains_as_shard_does(
    home: str, accelerator: torch.device, tmp_path: Path
) -> None:
    tier = Tier(home)
    assert train_engine(built(), config_of(home, tmp_path), accelerator) == train(
        tier, tier, tmp_path
    )


def test_a_model_built_under_init_trains_on_the_device(
    accelerator: torch.device, tmp_path: Path
) -> None:
    config = config_of("nvme", tmp_path)
    torch.manual_seed(0)
    with tiermem.zero.Init(config_dict_or_path=config):
        model = Model()
    losses = train_engine(model, config, accelerator)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_stages_without_offload_train_on_the_device(accelerator: torch.device) -> None:
    for stage in (0, 1, 2, 3):
        config = {**config_of("cpu", Path()), "zero_optimization": {"stage": stage}}
        losses = train_engine(built(), config, accelerator)
        assert losses[-1] < losses[0], stage


def test_peak_is_live_units_gradients_of_one_unit_and_activations(
    accelerator: torch.device, tmp_path: Path
) -> None:
    train(Tier.HOST, Tier.HOST, tmp_path)  # the products' workspaces are there now
    gc.collect()
    reset_peak(accelerator)
    before = usage(accelerator).allocated_bytes
    model = built()
    policy = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST, **SETTINGS)
    with tiermem.shard(model, policy) as shards:
        optimizer = tiermem.AdamW(model.parameters(), **OPTIMIZER)
        train_steps(model, optimizer, range(2), functools.partial(loss_of, device=accelerator))
        largest = max(live.unit.full_bytes for live in shards.units)
        stays = shards.plan.device_bytes
        peak = usage(accelerator).peak_allocated_bytes - before
    live_units = 3 * largest  # in use and fetched ahead
    gradients = 2 * largest  # of the unit in backward, and those being copied out
    activations = DEPTH * SAMPLES * WIDTH * 2 * 16  # what a block saves, bf16, generously
    assert peak <= stays + live_units + gradients + activations


@pytest.mark.slow
def test_nothing_synchronizes_the_whole_device(
    accelerator: torch.device,
    device_module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the whole device was waited for")

    with monkeypatch.context() as patched:
        patched.setattr(device_module, "synchronize", refuse)
        patched.setattr(torch.accelerator, "synchronize", refuse)
        train(Tier.NVME, Tier.NVME, tmp_path)
