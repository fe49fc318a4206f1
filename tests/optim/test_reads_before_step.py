"""Are the first tiles of a step read before backward has ended, once, and is what was read always
what rests on disk?"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded, states_of, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Shards, Tier
from tiermem.optim.tile import Tile
from tiermem.optim.tile_step import TilePass
from tiermem.units.registry import owner_of
from tiermem.weights.unit_state import LiveUnit

NUM_BUFFERS = 3


def policy(folder: Path, **fields: Any) -> OffloadPolicy:
    settings = {
        "params": Tier.NVME,
        "optim": Tier.NVME,
        "paths": [folder],
        "persistence_numel": 0,
        "overlap": "none",
    }
    return OffloadPolicy(
        **(settings | {"tile_numel": 4096, "tile_buffers": NUM_BUFFERS, "unit_buffers": 2} | fields)
    )


def watch(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A log of what is asked of the disk, and of gradients received, from now on, in the program's
    order."""
    log: list[str] = []

    def note(owner: object, verb: str, say: Callable[..., str]) -> None:
        do = getattr(owner, verb)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if args[0]:  # not a read of nothing
                log.append(say(*args))
            return do(*args, **kwargs)

        monkeypatch.setattr(owner, verb, noted)

    def read(ranges: object, name: str, *_: object) -> str:
        return f"fetch {name.split('/')[-1]}" if name.startswith("param/") else f"read {name}"

    def begin(tiles: Iterable[Tile], work: TilePass) -> None:
        before = begun(shards)
        start(tiles, work)
        log.extend(f"read tile {name}" for name in begun(shards)[len(before) :])

    start = shards.program.begin
    monkeypatch.setattr(shards.program, "begin", begin)
    note(shards.store, "read", read)
    note(shards.homes, "receive", lambda unit: f"receive {unit.name}")
    return log


def num_free_buffers(shards: Shards) -> int:
    pool = shards.tile_pool
    assert pool is not None
    slots = []
    while (slot := pool.take()) is not None:
        slots.append(slot)
    for slot in slots:
        pool.give_back(slot)
    return len(slots)


def begun(shards: Shards) -> list[str]:
    return [tile.entry for tile in shards.program.begun]


def first_tiles(shards: Shards, optim: tiermem.AdamW) -> list[str]:
    return [tile.entry for tile in optim.tiles_of(shards).tiles[:NUM_BUFFERS]]


# ---- when they are read --------------------------------------------------------------------------


def test_tiles_are_read_from_the_begin_of_backward_on_behind_all_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, tile_numel=1 << 20)) as shards:
        optim = tiermem.AdamW(model.parameters())
        for step in range(2):
            loss = loss_of(model, step)
            if step == 1:
                log = watch(shards, monkeypatch)
            loss.backward()
            if step == 0:
                optim.step()
                optim.zero_grad()
        assert log == [
            "read tile state/0/embed/0",
            "read tile state/1/layers.0/0",
            "read tile state/2/layers.1/0",
            "receive head",  # which is there from forward, as layers.3 is
            "fetch layers.2",
            "receive layers.3",
            "fetch layers.1",
            "receive layers.2",
            # the last that backward needs: an embedding's gradient does not depend on its weights
            "fetch layers.0",
            "receive layers.1",
            "receive layers.0",
            "receive embed",
        ]


def test_with_parameters_in_memory_tiles_are_read_from_the_first_gradient_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, params=Tier.HOST)) as shards:
        optim = tiermem.AdamW(model.parameters())
        loss_of(model, 0).backward()
        assert begun(shards) == []  # a tile that was never stepped has nothing on disk
        optim.step()
        optim.zero_grad()
        loss = loss_of(model, 1)
        log = watch(shards, monkeypatch)
        loss.backward()
        assert [entry.split()[0] for entry in log[: NUM_BUFFERS + 1]] == ["read"] * NUM_BUFFERS + [
            "receive"
        ]
        assert begun(shards) == first_tiles(shards, optim)


def test_gradients_that_rest_on_disk_are_read_when_the_step_begins(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, grads=Tier.NVME)) as shards:
        optim = tiermem.AdamW(model.parameters())
        grads = sum(tile.grad_bytes for tile in optim.tiles_of(shards).tiles)
        for _ in range(2):
            loss_of(model, 0).backward()
            shards.homes.store.flush()
            before = [shards.store.stats().nvme_read_bytes, len(begun(shards))]
            optim.step()
            optim.zero_grad()
        states = sum(tile.state_bytes for tile in optim.tiles_of(shards).tiles[NUM_BUFFERS:])
        assert before[1] == NUM_BUFFERS
        assert shards.store.stats().nvme_read_bytes - before[0] >= grads + states


def test_each_tile_is_read_once_however_many_micro_batches_there_are(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path)) as shards:
        optim = tiermem.AdamW(model.parameters())
        tiles = optim.tiles_of(shards).tiles
        expected = sorted(f"tile {tile.entry}" for tile in tiles)
        assert len(expected) > 2 * NUM_BUFFERS
        for _ in range(3):
            shards.store.recorder.forget()
            for micro in range(3):
                loss_of(model, micro).backward()
            optim.step()
            optim.zero_grad()
            read = sorted(
                e.name
                for e in shards.store.recorder.events
                if e.lane == "read" and e.name.startswith("tile")
            )
            assert read == expected


@pytest.mark.parametrize(
    "fields", [{"pipeline_read": False}, {"step_in_backward": True}, {"optim": Tier.HOST}], ids=str
)
def test_nothing_is_read_early_when_the_policy_does_not_want_it(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path, **({"params": Tier.HOST} | fields))) as shards:
        optim = tiermem.AdamW(model.parameters())
        for step in range(2):
            loss_of(model, step).backward()
            assert begun(shards) == []
            optim.step()
            optim.zero_grad()


# ---- whether it is right -------------------------------------------------------------------------

Run = Callable[[nn.Module, torch.optim.Optimizer], None]


def plain_steps(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    train_steps(model, optim, range(3))


def micro_batches(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    for step in range(3):
        for micro in range(3):
            (loss_of(model, 3 * step + micro) / 3).backward()
        optim.step()
        optim.zero_grad()


def skipped_steps(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """A whole step, one that is skipped (plain torch: not made), and one more."""
    plain_steps(model, optim)
    if owner_of(next(model.parameters())) is not None:
        (loss_of(model, 7) * float("nan")).backward()
        optim.step()
        assert optim.was_skipped
        optim.zero_grad()
    plain_steps(model, optim)


def failed_backward(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    plain_steps(model, optim)

    def fail(*_: Any) -> None:
        raise InterruptedError

    loss = loss_of(model, 5)
    handle = model.embed.weight.register_hook(fail)  # type: ignore[union-attr]
    with pytest.raises(InterruptedError):
        loss.backward()
    handle.remove()
    del loss
    optim.zero_grad()
    plain_steps(model, optim)


def weights_loaded_between(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    loss_of(model, 0).backward()
    model.load_state_dict(seeded(Tower, seed=5).to(next(model.parameters()).dtype).state_dict())
    plain_steps(model, optim)


def states_read_between(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    for step in range(3):
        loss_of(model, step).backward()
        model.state_dict()
        optim.step()
        optim.zero_grad()


def backward_of_a_part(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """Most parameters have no gradient, so their tiles are read and written as they are."""
    plain_steps(model, optim)
    x = torch.randn(
        2, 31, generator=torch.Generator().manual_seed(3), dtype=next(model.parameters()).dtype
    )
    model.layers[1](x).square().mean().backward()  # type: ignore[index]
    optim.step()
    optim.zero_grad()
    plain_steps(model, optim)


def two_backwards_of_one_graph(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    plain_steps(model, optim)
    loss = loss_of(model, 3)
    loss.backward(retain_graph=True)
    loss.backward()
    optim.step()
    optim.zero_grad()


RUNS = [
    plain_steps,
    micro_batches,
    skipped_steps,
    failed_backward,
    weights_loaded_between,
    states_read_between,
    backward_of_a_part,
    two_backwards_of_one_graph,
]
FIELDS: list[dict[str, Any]] = [
    {},
    {"grads": Tier.NVME},
    {"params": Tier.HOST},
    {"resident_bytes": 99_000},
]
DTYPES = [torch.float32, torch.bfloat16]
CASES = [
    pytest.param(run, fields, dtype, marks=[] if (i + j) % 2 == k else [pytest.mark.slow])
    for i, run in enumerate(RUNS)
    for j, fields in enumerate(FIELDS)
    for k, dtype in enumerate(DTYPES)
]


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("run", "fields", "dtype"), CASES)
def test_what_was_read_early_changes_no_bit(
    run: Run, fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = seeded(Tower).to(dtype)
    results = []
    for reads_ahead, overlap in ((True, "forward"), (True, "none"), (False, "none")):
        sharded = copy.deepcopy(model)
        where = policy(tmp_path, **fields, pipeline_read=reads_ahead, overlap=overlap)
        with tiermem.shard(sharded, where) as shards:
            optim = tiermem.AdamW(sharded.parameters(), lr=1e-2)
            run(sharded, optim)
            results.append((dict(sharded.state_dict()), states_of(shards, optim)))
            shards.drop_head_start()
            assert num_free_buffers(shards) == shards.plan.tiles.num
    plain = copy.deepcopy(model)
    run(plain, tiermem.AdamW(plain.parameters(), lr=1e-2))
    for weights, states in results:
        assert_same_tensors(weights, dict(plain.state_dict()))
        assert_same_tensors(states, results[0][1])


def test_masters_that_were_kept_are_read_early_too(tmp_path: Path) -> None:
    results = []
    for reads_ahead in (True, False):
        where = policy(tmp_path, master_from="init", pipeline_read=reads_ahead)
        with tiermem.zero.Init(policy=where, dtype=torch.bfloat16):
            model = seeded(Tower)
        with tiermem.shard(model, where) as shards:
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            plain_steps(model, optim)
            results.append(states_of(shards, optim))
    assert_same_tensors(*results)


def test_two_models_read_into_buffers_of_their_own(tmp_path: Path) -> None:
    models = [seeded(Tower, seed) for seed in (0, 1)]
    plains = copy.deepcopy(models)
    shards = [tiermem.shard(model, policy(tmp_path)) for model in models]
    for each in (models, plains):
        optims = [tiermem.AdamW(model.parameters(), lr=1e-2) for model in each]
        for step in range(3):
            for model in each:
                loss_of(model, step).backward()
            for optim in reversed(optims):
                optim.step()
                optim.zero_grad()
    for model, plain in zip(models, plains, strict=True):
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
    for each in shards:
        each.close()


# ---- its end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("materialize", [False, True])
def test_closing_without_a_step_ends_the_reads(tmp_path: Path, materialize: bool) -> None:
    model = seeded(Tower)
    before = copy.deepcopy(model.state_dict())
    shards = tiermem.shard(model, policy(tmp_path))
    optim = tiermem.AdamW(model.parameters())
    loss_of(model, 0).backward()
    assert begun(shards) == first_tiles(shards, optim)
    shards.close(materialize)
    assert begun(shards) == []
    assert num_free_buffers(shards) == NUM_BUFFERS
    if materialize:
        assert_same_tensors(dict(model.state_dict()), dict(before))


def test_a_step_without_read_ahead_does_not_use_what_came_early(tmp_path: Path) -> None:
    """As a benchmark does that switches it off between two steps."""
    model = seeded(Tower)
    with tiermem.shard(model, policy(tmp_path)) as shards:
        optim = tiermem.AdamW(model.parameters())
        loss_of(model, 0).backward()
        assert begun(shards) == first_tiles(shards, optim)
        shards.switch_pipeline(read=False, write=True)
        optim.step()
        assert begun(shards) == []
        assert num_free_buffers(shards) == NUM_BUFFERS


def test_a_fetch_ahead_that_fails_is_no_error_of_the_step_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was: the step counted in the states and not in the engine, whose next save was wrong."""
    found = []
    for fails in (False, True):
        model = seeded(Tower)
        policy = OffloadPolicy(
            params=Tier.NVME, optim=Tier.NVME, paths=[tmp_path], persistence_numel=0
        )
        with tiermem.shard(model, policy, device="cpu") as shards:
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            losses = train_steps(model, optim, range(1))
            loss = loss_of(model, 1)
            loss.backward()
            with monkeypatch.context() as patch:
                if fails:
                    read = Mock(side_effect=OSError(errno.ENOMEM, "no memory"))
                    patch.setattr(LiveUnit, "read", read)
                optim.step()
                assert not fails or read.call_count
            optim.zero_grad()
            found.append([*losses, float(loss.detach()), *train_steps(model, optim, range(2, 4))])
            assert shards.steps.check_whole() is None
    assert found[0] == found[1]
