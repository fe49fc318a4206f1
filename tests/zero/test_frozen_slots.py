"""When a model's states are frozen between steps: does training go on to the same bits, in the disk that was planned?"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
from collections import deque
from pathlib import Path

import pytest
import torch
import zoo
from twins import seeded

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.swap.freeze import Freeze
from tiermem.swap.reader import FileReader
from tiermem.swap.store import TensorStore

NUM_STEPS = 4


def policy_of(path: Path, **fields: object) -> OffloadPolicy:
    tiles = {"tile_numel": 1000, "persistence_numel": 50, "grads": Tier.NVME, "master_from": "init"}
    return OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, paths=[path], **(tiles | fields))  # type: ignore[arg-type]


def digests(freeze: Freeze, sizes: dict[str, int]) -> dict[str, str]:
    """What lies in the frozen bytes of each entry, read from the files."""
    found = {}
    for name in freeze.entries():
        told = hashlib.sha256()
        for path_index, offset, num_bytes in freeze.ranges(name, 0, sizes[name]):
            with FileReader(freeze.files()[path_index]) as reader:
                told.update(reader.read(offset, num_bytes).numpy().tobytes())
        found[name] = told.hexdigest()
    return found


def sizes_of(store: TensorStore) -> dict[str, int]:
    return {entry.name: entry.num_bytes for entry in store._entries.values()}


def train(policy: OffloadPolicy, num_held: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a few steps, with a freeze before each; so many are held at a time."""
    held: deque[tuple[Freeze, dict[str, int], dict[str, str]]] = deque()
    losses = []
    with tiermem.shard(seeded(zoo.tied_tower).bfloat16(), policy) as shards:
        optim = tiermem.AdamW(shards.model.parameters())
        for step in range(NUM_STEPS):
            if num_held:
                freeze, sizes = shards.store.freeze(), sizes_of(shards.store)
                held.append((freeze, sizes, digests(freeze, sizes)))
            if len(held) > num_held:
                shards.store.thaw(held.popleft()[0])
            loss = zoo.loss_of(shards.model, step)
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
            for freeze, sizes, before in held:
                assert digests(freeze, sizes) == before
        assert not any(name.startswith("grad/") for freeze, _, _ in held for name in freeze.entries())
        shards.store.settle()
        used, plan = shards.store.stats().nvme_bytes, shards.plan
        live = plan.disk_bytes - plan.frozen_disk_bytes
        initial = sum(row.num_bytes for row in plan.rows if row.what == "initial masters")
        assert used == live - initial + (plan.frozen_disk_bytes // (policy.num_slots - 1) * num_held if num_held else 0)
        weights = {name: shards.weight(param) for name, param in shards.model.named_parameters()}
    return losses, weights


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


def test_room_for_every_slot_is_taken_at_the_start_or_refused_with_the_arithmetic(tmp_path: Path) -> None:
    with tiermem.shard(seeded(zoo.tied_tower), policy_of(tmp_path)) as shards:
        plan = shards.plan
        (file,) = tmp_path.glob("tiermem-*/segment.bin")
        assert file.stat().st_blocks * 512 >= plan.disk_bytes > plan.frozen_disk_bytes > 0
    less = plan.disk_bytes - plan.frozen_disk_bytes
    tight = dataclasses.replace(policy_of(tmp_path), disk_bytes=plan.disk_bytes - 4096)
    with pytest.raises(
        OSError, match=rf"2 slots .durability='checkpoint', keep=1.*durability='none' {less} bytes"
    ) as told:
        tiermem.shard(seeded(zoo.tied_tower), tight)
    assert told.value.errno == errno.ENOSPC
    tiermem.shard(seeded(zoo.tied_tower), dataclasses.replace(tight, durability="none")).close()
    assert list(tmp_path.iterdir()) == []
