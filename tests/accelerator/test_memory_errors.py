"""Does an error of an accelerator's memory amid a forward or backward say what to change?"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier

SAYS = "sim:0 has no memory left in"


class Greedy:
    """A hook of a block, which asks for more memory than any device has in one of the passes."""

    def __init__(self) -> None:
        self.fails_in = "no pass"
        self.fail: Callable[[torch.Tensor], object] = take_all

    def __call__(self, block: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        is_again = torch._C._current_graph_task_id() != -1
        if self.fails_in == ("forward again" if is_again else "forward"):
            self.fail(*inputs)
        if self.fails_in == "backward":
            inputs[0].register_hook(self.fail)


def take_all(like: torch.Tensor) -> None:
    torch.empty(1 << 40, device=like.device)


def build(checkpoint: bool | None = None) -> tuple[nn.Module, Greedy]:
    model = seeded(lambda: Tower(64, 256, 2, checkpoint=checkpoint))
    greedy = Greedy()
    model.layers[1].register_forward_pre_hook(greedy)
    return model, greedy


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.zeros(1, 8, dtype=torch.long, device="sim")).float().sum()


@pytest.mark.parametrize(
    ("fields", "also"),
    [
        ({}, ", shorter inputs or checkpointing of the blocks"),
        ({"optim_ratio": 0.5}, " or an optim_ratio above 0.50"),
        ({"params": Tier.DEVICE}, " or params=Tier.HOST"),
        ({"params": Tier.DEVICE, "optim": Tier.DEVICE}, ", params=Tier.HOST or optim=Tier.HOST"),
    ],
)
def test_the_error_of_a_forward_says_what_to_change(
    fields: dict[str, Any], also: str, sim: ModuleType
) -> None:
    model, greedy = build()
    policy = OffloadPolicy(
        **{"params": Tier.HOST, "optim": Tier.HOST, **fields}, persistence_numel=0
    )
    with tiermem.shard(model, policy, device="sim"):
        greedy.fails_in = "forward"
        with pytest.raises(torch.OutOfMemoryError) as caught:
            loss_of(model)
        said = str(caught.value)
        assert said.count(SAYS) == 1  # of three modules that it leaves
        assert f"{SAYS} forward: 4194304.0 MiB more were wanted, torch has reserved" in said
        assert "; the plan keeps " in said and " on DEVICE (" in said
        assert ": give a smaller micro-batch, shorter inputs" in said and also in said
        greedy.fails_in = "no pass"
        loss_of(model)


def test_the_error_of_a_forward_that_a_backward_repeats_says_it_too(sim: ModuleType) -> None:
    model, greedy = build(checkpoint=False)
    policy = OffloadPolicy(params=Tier.HOST, persistence_numel=0)
    with tiermem.shard(model, policy, device="sim"):
        loss = loss_of(model)
        greedy.fails_in = "forward again"
        with pytest.raises(torch.OutOfMemoryError, match=f"{SAYS} backward: 4194304.0 MiB more"):
            loss.backward()


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]


def await_end(shards: tiermem.Shards) -> None:
    """Until torch has let go of a backward that has failed, in a thread of its own."""
    ending = shards.hooks._ending
    assert ending is not None
    deadline = time.monotonic() + 60
    while ending() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_error_of_a_backward_alone_is_explained_in_the_log(
    sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    model, greedy = build()
    with tiermem.shard(model, OffloadPolicy(params=Tier.HOST), device="sim") as shards:
        greedy.fails_in, greedy.fail = "backward", lambda grad: 1 / 0
        with pytest.raises(ZeroDivisionError):
            loss_of(model).backward()
        await_end(shards)
        greedy.fail = take_all
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(model).backward()
        deadline = time.monotonic() + 60
        while not errors_of(caplog):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (line,) = errors_of(caplog)
    assert line.startswith(f"{SAYS} backward: more was wanted, torch has reserved")


def test_the_error_of_an_engine_s_backward_is_explained_and_not_logged(
    sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    model, greedy = build()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    }
    engine, *_ = tiermem.initialize(model=model, config=config)
    try:
        greedy.fails_in = "backward"
        loss = engine(torch.zeros(1, 8, dtype=torch.long, device="sim")).float().sum()
        with pytest.raises(torch.OutOfMemoryError, match=f"{SAYS} backward: 4194304.0 MiB more"):
            engine.backward(loss)
        await_end(engine.shards)
        time.sleep(0.1)  # for what the end calls
        assert not errors_of(caplog)
    finally:
        engine.close()
