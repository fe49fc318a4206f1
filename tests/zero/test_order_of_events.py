"""What is read, gathered, stepped and written, and in which order?"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded, train_steps

import tiermem
from tiermem import OffloadPolicy, Shards, Tier

FORWARD = ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
# what forward left in the buffers is not read again, nor is the embedding: its gradient needs
# indices alone
BACKWARD = {
    2: ["layers.2", "layers.1", "layers.0"],
    3: ["layers.1", "layers.0"],
    4: ["layers.0"],
    6: [],
}


def policy(folder: Path, **fields: Any) -> OffloadPolicy:
    """With overlap "none", so that a step's events come before the next forward's."""
    settings = {
        "params": Tier.NVME,
        "optim": Tier.HOST,
        "paths": [folder],
        "persistence_numel": 100,
    }
    return OffloadPolicy(**(settings | {"overlap": "none"} | fields))


def events(shards: Shards, *lanes: str) -> list[str]:
    """The names of events on lanes since the last call, in the order in which they started."""
    found = sorted(shards.store.recorder.events, key=lambda event: event.start_ns)
    shards.store.recorder.forget()
    return [event.name for event in found if event.lane in lanes]


def units(names: list[str]) -> list[str]:
    return [name.split("/")[-1] for name in names]


@pytest.mark.parametrize("unit_buffers", BACKWARD)
def test_units_are_read_in_the_order_of_use_and_none_twice(
    unit_buffers: int, tmp_path: Path
) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, unit_buffers=unit_buffers)) as shards:
        optim = tiermem.AdamW(model.parameters())
        events(shards)
        for step in range(3):
            loss_of(model, step).backward()
            # not what tiles read
            read = [name for name in events(shards, "read") if name.startswith("param/")]
            assert units(read) == FORWARD + BACKWARD[unit_buffers]
            optim.step()  # and begins to read for the next forward
            optim.zero_grad()


def test_the_step_begins_to_read_for_the_next_forward(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, unit_buffers=3)) as shards:
        optim = tiermem.AdamW(model.parameters())
        loss_of(model, 0).backward()
        optim.step()
        coming = [live.unit.name for live in shards.units if live.move is not None]
        assert coming == FORWARD[:3]


def test_an_evaluation_begins_to_read_for_the_next(tmp_path: Path) -> None:
    model = seeded(Tower).eval()
    with tiermem.shard(model, policy(tmp_path, unit_buffers=3)) as shards:
        for _ in range(2):
            with torch.no_grad():
                loss_of(model, 0)
            coming = [live.unit.name for live in shards.units if live.move is not None]
            assert coming == FORWARD[:3]


def test_a_second_micro_batch_begins_to_read_before_its_first_module_runs(tmp_path: Path) -> None:
    model = seeded(Tower)
    coming: list[str] = []
    with tiermem.shard(model, policy(tmp_path, unit_buffers=3)) as shards:
        see = model.register_forward_pre_hook(  # behind ours
            lambda *_: coming.extend(
                live.unit.name for live in shards.units if live.move is not None
            )
        )
        loss_of(model, 0).backward()
        assert coming == FORWARD[:3]
        coming.clear()
        loss_of(model, 1).backward()
        assert coming == FORWARD[:1]  # backward has left the others in their buffers
        see.remove()


def test_a_micro_batch_that_ends_no_step_begins_to_read_for_the_next(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 100,
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 3},
            "offload_optimizer": {"device": "cpu"},
        },
    }
    engine = tiermem.initialize(model=seeded(Tower), config=config)[0]
    with contextlib.closing(engine):
        for micro in range(4):
            engine.backward(loss_of(engine, micro))
            engine.step()
            coming = [live.unit.name for live in engine.shards.units if live.move is not None]
            # backward has left two in their buffers
            assert coming == (FORWARD[:3] if micro % 2 else FORWARD[:1])


def test_gradients_are_received_as_backward_goes(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path)) as shards:
        loss_of(model, 0).backward()
        assert events(shards, "reduce") == [*FORWARD[:0:-1], "embed", "persistent"]


def test_gradients_on_nvme_are_written_behind_backward(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, grads=Tier.NVME)) as shards:
        loss_of(model, 0).backward()
        shards.homes.store.flush()
        written = events(shards, "write")
        assert [n for n in written if n.startswith("grad")] == [
            f"grad {name}" for name in [*FORWARD[:0:-1], "embed", "persistent"]
        ]


@pytest.mark.parametrize("step_number", [0, 1])
def test_a_tile_is_read_stepped_and_written_once(step_number: int, tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, optim=Tier.NVME)) as shards:
        optim = tiermem.AdamW(model.parameters())
        for step in range(step_number + 1):
            events(shards)
            loss_of(model, step).backward()  # the first tiles are read before it ends
            optim.step()
            optim.zero_grad()
        shards.store.flush()
        expected = sorted(
            f"tile state/{live.unit.index}/{live.unit.name}/0" for live in shards.units
        )
        found = [
            (e.lane, e.name) for e in shards.store.recorder.events if e.name.startswith("tile")
        ]
        # its parameters; and before its first step a tile has no states
        in_memory = "tile state/6/persistent/0"
        assert in_memory in expected
        for lane in ("read", "compute", "write"):  # tiles may come and end in any order
            names = [name for each, name in found if each == lane]
            left_out = [in_memory] if lane == "read" and not step_number else []
            assert sorted(names + left_out) == expected


def test_evaluation_reads_each_unit_once_and_does_not_upset_training(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, unit_buffers=2)) as shards:
        loss_of(model, 0).backward()
        with torch.no_grad():
            for _ in range(2):
                shards.prefetcher.empty()
                events(shards)
                model.eval()
                loss_of(model, 1)
                # then what the next begins with
                assert units(events(shards, "read"))[: len(FORWARD)] == FORWARD
        model.train()
        shards.prefetcher.empty()
        events(shards)
        loss_of(model, 2).backward()
        assert units(events(shards, "read")) == FORWARD + BACKWARD[2]


@pytest.mark.parametrize("unit_buffers", [1, 2, 3])
def test_an_order_that_changes_costs_only_time(unit_buffers: int, tmp_path: Path) -> None:
    model = seeded(models.Wandering)
    plain = copy.deepcopy(model)
    with tiermem.shard(model, policy(tmp_path, optim=Tier.NVME, unit_buffers=unit_buffers)):
        losses = [
            train_steps(each, tiermem.AdamW(each.parameters(), lr=1e-2), range(8))
            for each in (model, plain)
        ]
        assert losses[0] == losses[1]
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_unit_nested_in_another_needs_a_buffer_of_its_own(tmp_path: Path) -> None:
    """Modules with parameters of their own inside each other: too few buffers are refused with what
    to raise."""

    class Nested(torch.nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((200,), 0.5))
            self.inner = torch.nn.ModuleList([Nested(depth - 1)] if depth else [])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for inner in self.inner:
                x = inner(x)
            return x * self.weight

    few = policy(tmp_path, unit_buffers=2, unit_numel=250)
    with (
        tiermem.shard(Nested(4), few) as shards,
        pytest.raises(RuntimeError, match=r"Raise unit_buffers .* to 3"),
    ):
        shards.model(torch.ones(200))
    enough = policy(tmp_path, unit_buffers=5, unit_numel=250)
    with tiermem.shard(Nested(4), enough) as shards:
        assert shards.model(torch.ones(200)).sum().item() == 200 * 0.5**5
