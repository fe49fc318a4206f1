"""Does a correct program compute on the device what it computes on the CPU, to the bit, under every
schedule?"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from programs.unsharded import Program, assert_same, mlp, train, transformer
from torch import nn

from accelerator.device import SCHEDULES

PROGRAMS = {
    "mlp": Program(mlp),
    "transformer": Program(transformer),
    "autocast": Program(transformer, torch.bfloat16),
    "checkpointed": Program(functools.partial(transformer, False)),
    "checkpointed, reentrant": Program(functools.partial(transformer, True)),
    "checkpointed, autocast": Program(functools.partial(transformer, False), torch.bfloat16),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_equals_the_cpu_under_every_schedule(sim: ModuleType, name: str) -> None:
    assert_equal_under(SCHEDULES if name == "transformer" else SCHEDULES[:5], name, sim)


@pytest.mark.slow
def test_the_one_with_most_operations_equals_the_cpu_under_the_other_schedules(
    sim: ModuleType,
) -> None:
    assert_equal_under(SCHEDULES[5:], "checkpointed, autocast", sim)


def assert_equal_under(schedules: list[str], name: str, sim: ModuleType) -> None:
    expected = train(PROGRAMS[name], "cpu")
    assert len(set(expected.losses)) == len(expected.losses)
    for schedule in schedules:
        sim.set_schedule(schedule)
        assert_same(train(PROGRAMS[name], "sim"), expected)
    assert sim.undeferred() == {}


def test_training_on_the_second_device(sim: ModuleType) -> None:
    sim.set_schedule("random:4")
    assert_same(train(PROGRAMS["transformer"], "sim:1"), train(PROGRAMS["transformer"], "cpu"))


def test_float16_with_a_gradient_scaler_equals_the_cpu(sim: ModuleType) -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8).to(device)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**14, growth_interval=2)
        found = []
        for step in range(6):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
            with torch.autocast(device, torch.float16):
                # which overflows once
                loss = model(x).float().square().mean() * (1e6 if step == 2 else 1)
            optim.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
            found += [loss.item(), scaler.get_scale()]
        return found

    sim.set_schedule("late")
    expected = losses("cpu")
    scale = 2.0**14
    # the overflow halves it
    assert expected[1::2] == [scale, 2 * scale, scale, scale, 2 * scale, 2 * scale]
    assert losses("sim") == expected


def test_autocast_chooses_as_on_a_gpu(sim: ModuleType) -> None:
    x = torch.ones(4, 4, device="sim")
    with torch.autocast("sim", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert nn.functional.layer_norm((x @ x), (4,)).dtype == torch.float32
        assert (x @ x).softmax(-1).dtype == torch.float32
        assert (
            nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3).dtype == torch.bfloat16
        )
    with torch.autocast("sim"):
        assert (x @ x).dtype == torch.float16
