"""When a model's states are frozen between steps: does training go on to the same bits, in the disk
that was planned?"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import models
from programs.twins import seeded, train_steps
from torch import nn

import tiermem
import tiermem.checkpoint
from tiermem import OffloadPolicy, Tier
from tiermem.checkpoint.opening.source import Source
from tiermem.swap.store.entry import Freeze
from tiermem.swap.store.store import TensorStore
from tiermem.swap.store.stream import FileReader

NUM_STEPS = 4


def policy_of(path: Path, **fields: object) -> OffloadPolicy:
    tiles = {"tile_numel": 1000, "persistence_numel": 50, "grads": Tier.NVME, "master_from": "init"}
    return OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, paths=[path], **(tiles | fields))  # type: ignore[arg-type]


def digests(freeze: Freeze, sizes: dict[str, int]) -> dict[str, str]:
    """What lies in the frozen bytes of each entry, read from the files."""
    found = {}
    for name in freeze.parts:
        told = hashlib.sha256()
        for path_index, offset, num_bytes in freeze.ranges(name, 0, sizes[name]):
            with FileReader(freeze.files[path_index]) as reader:
                told.update(reader.read(offset, num_bytes).numpy().tobytes())
        found[name] = told.hexdigest()
    return found


def sizes_of(store: TensorStore) -> dict[str, int]:
    return {entry.name: entry.num_bytes for entry in store._entries.values()}


def train(policy: OffloadPolicy, num_held: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a few steps, with a freeze before each; so many are held at a time."""
    held: deque[tuple[Freeze, dict[str, int], dict[str, str]]] = deque()
    losses: list[float] = []
    with tiermem.shard(seeded(models.tied_tower).bfloat16(), policy) as shards:
        optim = tiermem.AdamW(shards.model.parameters())
        for step in range(NUM_STEPS):
            if num_held:
                shards.check_whole()  # no step is under way
                freeze, sizes = shards.store.freeze(), sizes_of(shards.store)
                held.append((freeze, sizes, digests(freeze, sizes)))
            if len(held) > num_held:
                shards.store.thaw(held.popleft()[0])
            losses += train_steps(shards.model, optim, [step])
            for freeze, sizes, before in held:
                assert digests(freeze, sizes) == before
        assert not any(name.startswith("grad/") for freeze, _, _ in held for name in freeze.parts)
        shards.store.flush()
        used, plan = shards.store.stats().nvme_bytes, shards.plan
        live = plan.disk_bytes - plan.durable_disk_bytes
        initial = sum(row.num_bytes for row in plan.rows if row.what == "initial masters")
        assert used == live - initial + (
            plan.durable_disk_bytes // (policy.num_slots - 1) * num_held if num_held else 0
        )
        weights = {name: shards.weight(param) for name, param in shards.model.named_parameters()}
    return losses, weights


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("durability", "keep", "num_held"), [("checkpoint", 1, 1), ("checkpoint", 2, 2), ("step", 1, 2)]
)
def test_steps_between_freezes_change_no_bit_and_no_frozen_byte(
    tmp_path: Path, durability: str, keep: int, num_held: int
) -> None:
    plain, expected = train(policy_of(tmp_path, durability="none"), 0)
    losses, weights = train(policy_of(tmp_path, durability="checkpoint", keep=keep), num_held=keep)
    assert losses == plain
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert list(tmp_path.iterdir()) == []


def test_room_for_every_slot_is_taken_at_the_start_or_refused_with_the_arithmetic(
    tmp_path: Path,
) -> None:
    with tiermem.shard(seeded(models.tied_tower), policy_of(tmp_path)) as shards:
        plan = shards.plan
        (file,) = tmp_path.glob("tiermem-*/segment.bin")
        assert file.stat().st_blocks * 512 >= plan.disk_bytes > plan.durable_disk_bytes > 0
    less = plan.disk_bytes - plan.durable_disk_bytes
    tight = dataclasses.replace(policy_of(tmp_path), disk_bytes=plan.disk_bytes - 4096)
    with pytest.raises(
        OSError, match=rf"2 slots .durability='checkpoint', keep=1.*durability='none' {less} bytes"
    ) as told:
        tiermem.shard(seeded(models.tied_tower), tight)
    assert told.value.errno == errno.ENOSPC
    tiermem.shard(seeded(models.tied_tower), dataclasses.replace(tight, durability="none")).close()
    assert list(tmp_path.iterdir()) == []


# ---- frozen parameters ---------------------------------------------------------------------------


def adapted() -> nn.Module:
    """Wide frozen layers with small ones beside them that are trained."""
    layers = []
    for _ in range(3):
        layers += [
            nn.Linear(256, 256, bias=False).requires_grad_(False),
            nn.Linear(256, 4, bias=False),
        ]
        layers += [nn.Linear(4, 256, bias=False)]
    return nn.Sequential(*layers)


BASE_BYTES = 3 * 256 * 256 * 2


def adapted_policy(path: Path, **fields: object) -> OffloadPolicy:
    return policy_of(path, unit_numel=1 << 16, persistence_numel=0, master_from="param", **fields)


def step(shards: tiermem.Shards, optim: tiermem.AdamW) -> None:
    shards.model(torch.ones(2, 256, dtype=torch.bfloat16)).square().mean().backward()
    optim.step()
    optim.zero_grad()


@pytest.mark.parametrize(
    ("durability", "keep"), [("checkpoint", 1), ("checkpoint", 3), ("step", 1)]
)
def test_frozen_parameters_take_one_slot_for_all_durable_steps(
    tmp_path: Path, durability: str, keep: int
) -> None:
    with tiermem.shard(
        seeded(adapted).bfloat16(), adapted_policy(tmp_path, durability=durability, keep=keep)
    ) as shards:
        optim = tiermem.AdamW([p for p in shards.model.parameters() if p.requires_grad])
        plan, policy = shards.plan, shards.policy
        trained = plan.durable_disk_bytes // (policy.num_slots - 1)
        rows = {row.what: row.num_bytes for row in plan.rows if row.tier is Tier.NVME}
        assert trained + BASE_BYTES == rows["parameters"] + rows["optimizer states"]
        (file,) = tmp_path.glob("tiermem-*/segment.bin")
        planned = file.stat().st_blocks * 512
        assert 0 <= planned - plan.disk_bytes <= 1 << 16
        for number in range(5):
            step(shards, optim)
            if durability == "step":
                tiermem.checkpoint.make_durable(shards, optim)
            tiermem.checkpoint.save(shards, optim, tmp_path / "out", f"t{number}")
        shards.store.flush()
        assert file.stat().st_blocks * 512 == planned, "all that a run needs was taken at its start"


def write_by_loading(shards: tiermem.Shards, folder: Path) -> None:
    tiermem.checkpoint.load(shards, None, folder, "first")


def write_by_hand(shards: tiermem.Shards, folder: Path, value: float = 0.75) -> None:
    base = next(p for p in shards.model.parameters() if not p.requires_grad)
    with tiermem.zero.GatheredParameters(base, modifier_rank=0), torch.no_grad():
        base.fill_(value)


@pytest.mark.parametrize("write", [write_by_loading, write_by_hand])
def test_frozen_parameters_that_are_written_all_the_same_leave_durable_steps_alone(
    tmp_path: Path, write: Callable[[tiermem.Shards, Path], None]
) -> None:
    with tiermem.shard(seeded(adapted).bfloat16(), adapted_policy(tmp_path, keep=2)) as shards:
        optim = tiermem.AdamW([p for p in shards.model.parameters() if p.requires_grad])
        name, base = next((n, p) for n, p in shards.model.named_parameters() if not p.requires_grad)
        first = shards.weight(base)
        tiermem.checkpoint.save(shards, optim, tmp_path / "out", "first")
        write_by_hand(shards, tmp_path / "out", 0.25)
        tiermem.checkpoint.save(shards, optim, tmp_path / "out", "second")
        freeze, sizes = shards.store.freeze(), sizes_of(shards.store)
        before = digests(freeze, sizes)
        write(shards, tmp_path / "out")
        assert digests(freeze, sizes) == before
        shards.store.thaw(freeze)
        assert torch.equal(
            shards.weight(base),
            first if write is write_by_loading else torch.full_like(first, 0.75),
        )
    for tag, expected in (("first", first), ("second", torch.full_like(first, 0.25))):
        with Source.open(tmp_path / "out", tag) as source:
            assert torch.equal(
                source.read(name, "weight", 0, first.numel()).view(first.shape), expected
            )
