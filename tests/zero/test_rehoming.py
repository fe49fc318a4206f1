"""Do the results of training stay the same, to the bit, when states or weights move amid it,
and are moves refused that would change them?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded, train_steps

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.precision import Precision

HOST = Tier.HOST
NVME = Tier.NVME

BASES: dict[str, dict[str, Any]] = {
    "host": {"params": HOST, "optim": HOST},
    "nvme": {"params": NVME, "optim": NVME, "grads": NVME, "tile_numel": 4096},
    "attempts": {
        "params": NVME,
        "optim": NVME,
        "tile_numel": 4096,
        "overlap": "backward",
        "resident_bytes": 0,
    },
    "stage 1": {"stage": 1, "params": Tier.DEVICE, "optim": NVME},
    "second copies": {"params": HOST, "optim": NVME, "overlap": "backward", "resident_bytes": 0},
}
MOVES: list[dict[str, Any]] = [
    {"optim": NVME, "optim_ratio": 1.0},
    {"optim": HOST},
    {"optim": NVME, "optim_ratio": 0.5, "grads": HOST},
    {"optim_ratio": 0.25},
    {"optim_ratio": 0.75},
    {"optim": Tier.DEVICE},
    {"optim": NVME, "optim_ratio": 1.0, "grads": NVME},
]
WITH_WEIGHTS: list[dict[str, Any]] = [
    {"params": HOST},
    {"params": NVME, "optim": HOST},
    {"params": NVME, "host_param_numel": 9000, "optim": NVME, "optim_ratio": 0.5},
    {"params": Tier.DEVICE, "optim_ratio": 1.0},
    {"params": NVME, "host_param_numel": 0, "grads": NVME},
]


def train(
    base: str, moves: list[dict[str, Any]], nvme: Path, **fields: Any
) -> tuple[list[float], dict[str, torch.Tensor], dict[int, dict[str, torch.Tensor]], list[int]]:
    """Losses, weights and states, and the tiles on NVMe after each move."""
    model = seeded(Tower)
    precision = Precision.preset(fields.pop("precision", "exact"))
    if precision != Precision():
        model = model.bfloat16()
    given = {"persistence_numel": 50, "precision": precision, **BASES[base], **fields}
    losses = []
    counts = []
    with tiermem.shard(model, OffloadPolicy(paths=[nvme], **given), device="cpu") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number, move in enumerate(moves):
            losses += train_steps(model, optim, range(3 * number, 3 * number + 1))
            if number % 2:  # between two micro-batches
                loss_of(model, 3 * number + 1).backward()
            shards.rehome(dataclasses.replace(shards.policy, **move))
            assert shards.store.arena.carved_bytes <= shards.plan.arena_bytes
            homes = [tile.state_home for tile in optim.tiles_of(shards).tiles]
            counts.append(homes.count(NVME))
            losses += train_steps(model, optim, range(3 * number + 1, 3 * number + 3))
        return losses, dict(model.state_dict()), optim.state_dict()["state"], counts


def tiles_on_nvme(base: str, moves: list[dict[str, Any]], precision: str, nvme: Path) -> list[int]:
    """How many tiles are on NVMe after each move. Everything is as without the moves."""
    stays = train(base, [{}] * len(moves), nvme, precision=precision)
    moved = train(base, moves, nvme, precision=precision)
    assert moved[0] == stays[0]
    assert_same_tensors(moved[1], stays[1])
    for number, states in stays[2].items():
        assert_same_tensors(moved[2][number], states)
    return moved[3]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("precision", ["exact", "compact", "tiny"])
@pytest.mark.parametrize("base", BASES)
def test_states_move_between_tiers(base: str, precision: str, tmp_path: Path) -> None:
    on_nvme = tiles_on_nvme(base, MOVES, precision, tmp_path)
    assert on_nvme[0] > on_nvme[4] > on_nvme[2] > on_nvme[3] > on_nvme[1] == on_nvme[5] == 0
    assert on_nvme[6] == on_nvme[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["exact", "compact", "tiny"])
@pytest.mark.parametrize("base", ["nvme", "attempts", "second copies"])
def test_weights_move_between_tiers(base: str, precision: str, tmp_path: Path) -> None:
    on_nvme = tiles_on_nvme(base, WITH_WEIGHTS, precision, tmp_path)
    assert on_nvme[1] == 0 < on_nvme[3]


@pytest.mark.parametrize("base", ["host", "nvme"])
def test_initial_values_move_before_masters_begin_with_them(base: str, tmp_path: Path) -> None:
    fields = {"params": HOST, "optim": HOST, **BASES[base]}
    policy = OffloadPolicy(
        paths=[tmp_path], precision=Precision.preset("compact"), master_from="init", **fields
    )
    found = []
    for moves in ([], [NVME, HOST], [HOST, NVME]):
        with tiermem.zero.Init(policy=policy, dtype=torch.bfloat16):
            model = seeded(Tower)
        with tiermem.shard(model, policy, device="cpu") as shards:
            for optim_home in moves:
                shards.rehome(dataclasses.replace(policy, optim=optim_home))
                assert shards.store.arena.carved_bytes <= shards.plan.arena_bytes
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            found.append((train_steps(model, optim, range(3)), dict(model.state_dict())))
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert_same_tensors(weights, found[0][1])


def test_checkpoints_of_before_and_after_a_move_open(tmp_path: Path) -> None:
    """Steps are durable: the bytes of a checkpoint stay where they are while weights and states
    move. A frozen layer is saved in each place."""
    policy = OffloadPolicy(
        params=NVME, optim=NVME, paths=[tmp_path / "nvme"], persistence_numel=0, tile_numel=4096,
        durability="checkpoint", keep=2, resident_bytes=0,
    )  # fmt: skip
    (tmp_path / "nvme").mkdir()
    expected = {}
    model = seeded(Tower)
    model.layers[1].requires_grad_(False)
    with tiermem.shard(model, policy, device="cpu") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for tag, optim_home in (("before", HOST), ("after", NVME)):
            train_steps(model, optim, range(2))
            tiermem.checkpoint.save(shards, optim, tmp_path / "saved", tag=tag)
            expected[tag] = {name: value.clone() for name, value in model.state_dict().items()}
            moved = dataclasses.replace(shards.policy, params=optim_home, optim=optim_home)
            shards.rehome(moved)
        train_steps(model, optim, range(2, 5))
    for tag in ("before", "after"):
        opened = seeded(Tower, 1)
        opened.layers[1].requires_grad_(False)
        with tiermem.shard(opened, policy, device="cpu") as shards:
            other = tiermem.AdamW(opened.parameters(), lr=1e-2)
            tiermem.checkpoint.load(shards, other, tmp_path / "saved", tag=tag)
            assert_same_tensors(dict(opened.state_dict()), expected[tag])


def test_a_checkpoint_has_what_changed_places_since_the_last(tmp_path: Path) -> None:
    """As many tiles are on NVMe as before, and others."""
    policy = OffloadPolicy(
        params=NVME, optim=NVME, paths=[tmp_path], persistence_numel=0, tile_numel=4096,
        optim_ratio=0.5, resident_bytes=0,
    )  # fmt: skip
    model = seeded(Tower)
    with tiermem.shard(model, policy, device="cpu") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        places = []
        for resident_bytes in (None, shards.plan.kept_bytes):
            for size in () if resident_bytes is None else (0, resident_bytes):
                shards.rehome(
                    dataclasses.replace(shards.policy, optim_ratio=1.0, resident_bytes=size)
                )
            train_steps(model, optim, range(2))
            tiermem.checkpoint.save(shards, optim, tmp_path / "saved")
            places.append([tile.state_home for tile in optim.tiles_of(shards).tiles])
        assert places[0] != places[1] and places[0].count(NVME) == places[1].count(NVME)
        expected = optim.state_dict()["state"]
    opened = seeded(Tower, 1)
    with tiermem.shard(opened, policy, device="cpu") as shards:
        other = tiermem.AdamW(opened.parameters(), lr=1e-2)
        tiermem.checkpoint.load(shards, other, tmp_path / "saved")
        for number, states in other.state_dict()["state"].items():
            assert_same_tensors(states, expected[number])


def test_what_a_move_cannot_do_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    policy = OffloadPolicy(params=NVME, optim=NVME, paths=[tmp_path], tile_numel=4096)
    model = seeded(Tower)
    with tiermem.shard(model, policy, device="cpu") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(2))
        loss_of(model, 2).backward()
        with pytest.raises(ValueError, match="gradients that are there stay"):
            shards.rehome(dataclasses.replace(policy, grads=NVME))
        optim.step()
        optim.zero_grad()
        plan = shards.plan
        with pytest.raises(ValueError, match="rehome: tile_numel is settled"):
            shards.rehome(dataclasses.replace(policy, params=HOST, tile_numel=8192))
        with pytest.raises(ValueError, match=r"states cannot rest.*host_bytes=100000 per node"):
            shards.rehome(dataclasses.replace(policy, optim=HOST, host_bytes=100_000))
        model.layers[0].register_forward_pre_hook(lambda *_: shards.rehome(shards.policy))
        with pytest.raises(RuntimeError, match="inside a forward"):
            loss_of(model, 2)
        assert shards.plan is plan


def test_weights_that_are_always_present_stay(tmp_path: Path) -> None:
    policy = OffloadPolicy(params=NVME, optim=NVME, paths=[tmp_path], persistence_numel=1 << 20)
    said = "always present.*persistence_numel=1048576 elements"
    with (
        tiermem.shard(seeded(Tower), policy, device="cpu") as shards,
        pytest.raises(ValueError, match=said),
    ):
        shards.rehome(dataclasses.replace(policy, params=HOST))


def test_second_copies_leave_with_their_room(tmp_path: Path) -> None:
    """Also when a step has made the copy of a unit the place where it rests."""
    policy = OffloadPolicy(
        params=HOST, optim=NVME, paths=[tmp_path], tile_numel=4096, persistence_numel=0,
        early_steps=True, resident_bytes=0, host_bytes=16 << 20,
    )  # fmt: skip
    found = []
    for states in (NVME, HOST):
        model = seeded(Tower)
        with tiermem.shard(model, policy, device="cpu") as shards:
            assert shards.plan.copied
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            losses = train_steps(model, optim, range(3))
            shards.rehome(dataclasses.replace(policy, optim=states))
            assert bool(shards.plan.copied) is (states is NVME)
            assert shards.store.arena.carved_bytes <= shards.plan.arena_bytes
            found.append((losses + train_steps(model, optim, range(3, 6)), model.state_dict()))
    assert found[0][0] == found[1][0]
    assert_same_tensors(found[0][1], found[1][1])


def test_a_plan_without_room_for_second_copies_goes_on_elsewhere(tmp_path: Path) -> None:
    fields = {"params": HOST, "paths": [tmp_path], "tile_numel": 4096, "resident_bytes": 0}
    with tiermem.shard(seeded(Tower), OffloadPolicy(optim=NVME, **fields), device="cpu") as shards:
        least = shards.plan.host_bytes
    found = []
    for states in (NVME, HOST):
        policy = OffloadPolicy(optim=NVME, early_steps=True, host_bytes=least, **fields)
        model = seeded(Tower)
        with tiermem.shard(model, policy, device="cpu") as shards:
            assert not shards.plan.copied
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            losses = train_steps(model, optim, range(2))
            shards.rehome(dataclasses.replace(policy, optim=states, host_bytes=16 << 20))
            found.append(losses + train_steps(model, optim, range(2, 4)))
    assert found[0] == found[1]


def test_a_disk_without_room_refuses_states_and_training_goes_on(tmp_path: Path) -> None:
    found = []
    for is_full in (False, True):
        policy = OffloadPolicy(
            params=NVME, optim=HOST, paths=[tmp_path], disk_bytes=100_000 if is_full else None
        )
        model = seeded(Tower)
        with tiermem.shard(model, policy, device="cpu") as shards:
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            losses = train_steps(model, optim, range(2))
            if is_full:
                with pytest.raises(OSError, match="100000"):
                    shards.rehome(dataclasses.replace(policy, optim=NVME))
            found.append((losses + train_steps(model, optim, range(2, 4)), shards.policy.optim))
    assert found[0] == found[1]


@pytest.mark.slow
def test_ranks_move_together(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    script = Path(__file__).with_name("rehomed_on_ranks.py")
    for each in launch(script, 2, tmp_path / "out", str(tmp_path)):
        assert_same_tensors(each["moves"], each["stays"])
        assert "policy.optim is Tier.HOST on rank 0 and Tier.NVME on rank 1" in each["differing"]
