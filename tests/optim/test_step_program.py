"""Which tiles are stepped natively, and to the bits of kernels that Python calls one by one?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.optim.tile_step import TilePass
from tiermem.units.state_layout import MASTER
from tiermem.weights.unit_memory import apart

MOMENTS = {"num_moments": 3}


def muon(params: Any) -> torch.optim.Optimizer:
    """Matrices of the blocks, and AdamW for the rest, which has other shapes."""
    given = list(params)
    matrices = [param for param in given if param.dim() == 2 and param.shape[0] != 256][:4]
    rest = [param for param in given if all(param is not other for other in matrices)]
    return tiermem.Muon([{"params": matrices}, {"params": rest, "use_muon": False}], lr=1e-2)


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "adamw": (lambda params: tiermem.AdamW(params, lr=1e-2), {}),
    "amsgrad": (
        lambda params: tiermem.Adam(params, lr=1e-2, amsgrad=True, weight_decay=0.1),
        MOMENTS,
    ),
    "adagrad": (lambda params: tiermem.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1), {}),
    "lion": (lambda params: tiermem.Lion(params, lr=1e-3, weight_decay=0.1), {}),
    "momentum": (lambda params: tiermem.SGD(params, lr=1e-2, momentum=0.9, nesterov=True), {}),
    "sgd": (lambda params: tiermem.SGD(params, lr=1e-2, maximize=True), {}),
}


def policy(folder: Path, home: Tier, **fields: Any) -> OffloadPolicy:
    homes = {"params": home, "optim": home, "paths": [folder] if home is Tier.NVME else []}
    return OffloadPolicy(
        **(homes | {"tile_numel": 4096, "tile_buffers": 3, "persistence_numel": 0} | fields)
    )


def train(
    model: nn.Module, make: Callable[[Any], Any], where: OffloadPolicy, num_steps: int = 3
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], tuple[int, int, int]]:
    """The weights and states after some steps; tiles, and how many were stepped natively and by
    Python."""
    own = copy.deepcopy(model)
    with tiermem.shard(own, where) as shards:
        optim = make(own.parameters())
        train_steps(own, optim, range(num_steps))
        shards.check_whole()  # the last step may be under way
        program, tiles = shards.program, optim.tiles_of(shards)
        counts = len(tiles.tiles), program.num_native, program.num_called
        states = {
            f"{shard.name}.{name}": tiles.state(shard, name)
            for _, shard in shards.parameters()
            for name in (MASTER, *tiles.names(shard))
        }
        return dict(own.state_dict()), states, counts


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("home", "preset", "fields"),
    [
        (Tier.NVME, "exact", {"grads": Tier.NVME}),
        (Tier.NVME, "tiny", {}),
        (Tier.NVME, "compact", {"params": Tier.HOST, "resident_bytes": 99_000}),
        (Tier.HOST, "bf16", {}),
    ],
    ids=str,
)
def test_native_tiles_get_the_bits_of_called_ones(
    name: str,
    home: Tier,
    preset: str,
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, moments = OPTIMIZERS[name]
    where = policy(tmp_path, home, precision=Precision.preset(preset), **fields, **moments)
    model = seeded(Tower).bfloat16()
    weights, states, (num_tiles, num_native, num_called) = train(model, make, where)
    # the first states are made by Python
    assert (num_native, num_called) == (2 * num_tiles, num_tiles)
    monkeypatch.setattr(TilePass, "steps", lambda *_: None)
    again, states_again, counts = train(model, make, where)
    assert counts == (num_tiles, 0, 3 * num_tiles)
    assert_same_tensors(weights, again)
    assert_same_tensors(states, states_again)


@pytest.mark.parametrize("moves", [False, True])
def test_native_steps_in_memory_are_kept_and_find_weights_that_have_moved(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept steps point at memory: they are made again when it has changed, and the bits are those
    of the first kind."""
    model, num_made = seeded(Tower), 0
    steps = TilePass.steps

    def counted(self: TilePass, *args: Any) -> Any:
        nonlocal num_made
        num_made += 1
        return steps(self, *args)

    where, make = policy(Path(), Tier.HOST), OPTIMIZERS["adamw"][0]
    plain, _, _ = train(model, make, where, num_steps=4)
    monkeypatch.setattr(TilePass, "steps", counted)
    with tiermem.shard(model, where) as shards:
        optim = make(model.parameters())
        tiles, kept = optim.tiles_of(shards).tiles, list[torch.Tensor]()
        for step in range(4):
            for live in shards.units if moves else ():
                assert live.shard is not None
                kept.append(apart(live.shard.clone()))
                live.exchange(kept[-1])
            train_steps(model, optim, [step])
        # first states have no native steps, and their rows are not kept
        assert num_made == len(tiles) * (4 if moves else 2)
        assert_same_tensors(dict(model.state_dict()), plain)


def test_whole_matrices_are_stepped_by_python_and_the_rest_natively(tmp_path: Path) -> None:
    model = seeded(Tower)
    where = policy(tmp_path, Tier.NVME, tile_numel=8192)
    _, _, (num_tiles, num_native, num_called) = train(model, muon, where)
    assert 0 < num_native < 2 * num_tiles
    assert num_called == 3 * num_tiles - num_native


def test_a_weight_that_is_written_back_unread_comes_from_its_master(tmp_path: Path) -> None:
    """Tiles of parameters without a gradient: Python copies their masters; a step of the others
    stays native."""
    model = seeded(Tower).bfloat16()
    plain = copy.deepcopy(model)
    with tiermem.shard(model, policy(tmp_path, Tier.NVME)) as shards:
        for each in (model, plain):
            optim = tiermem.AdamW(each.parameters(), lr=1e-2)
            train_steps(each, optim, range(2))
            shards.check_whole()
            x = torch.randn(2, 31, generator=torch.Generator().manual_seed(3)).bfloat16()
            before = shards.program.num_native
            each.layers[1](x).square().mean().backward()
            optim.step()
            optim.zero_grad()
            shards.check_whole()
            if each is model:
                tiles = optim.tiles_of(shards).tiles
                assert 0 < shards.program.num_native - before < len(tiles) / 2
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_step_whose_plan_fails_half_way_leaves_the_model_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, Tier.NVME)) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(2))
        loss_of(model, 2).backward()
        num_planned = 0
        basis = TilePass.basis

        def failing(*args: Any) -> Any:
            nonlocal num_planned
            num_planned += 1
            if num_planned == 4:
                raise KeyboardInterrupt
            return basis(*args)

        monkeypatch.setattr(TilePass, "basis", failing)
        with pytest.raises(KeyboardInterrupt):
            optim.step()
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="mixture of two steps"):
            optim.step()
        assert shards.program.begun == []


def test_states_that_stay_in_memory_are_those_of_the_first_units(tmp_path: Path) -> None:
    """A step changes their weights at once, and the next forward needs these first."""
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, Tier.NVME, resident_bytes=99_000)) as shards:
        optim = tiermem.AdamW(model.parameters())
        tiles = optim.tiles_of(shards).tiles
        homes = [tile.state_home for tile in tiles]
        num_resident = homes.count(Tier.HOST)
        assert 0 < num_resident < len(homes)
        assert homes[:num_resident] == [Tier.HOST] * num_resident
        kept = sum(tile.state_bytes for tile in tiles[:num_resident])
        assert kept <= 99_000 < kept + tiles[num_resident].state_bytes
