"""Is what is read ahead the same to the bit whatever was told, each block read once, within the
memory that was lent?"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from runs import live_states, policy
from saved_by_hand import write

import tiermem
from tiermem import Tier, checkpoint
from tiermem.checkpoint.format.manifest import CHECKSUM_BYTES
from tiermem.checkpoint.opening import verified as verified_module
from tiermem.checkpoint.opening.source import Elements, Source
from tiermem.swap.base.ranges import FileRange
from tiermem.swap.memory.arena import Arena
from tiermem.swap.store.stream import ReadAhead, Reading

NUMEL = 9 * CHECKSUM_BYTES // 4 + 101


@pytest.fixture(scope="module")
def states() -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    names = ("weight", "master", "exp_avg")
    return {
        f"p{i}": {name: torch.randn(NUMEL, generator=generator) for name in names} for i in range(2)
    }


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, states: dict[str, dict[str, torch.Tensor]]
) -> Path:
    where = tmp_path_factory.mktemp("ahead")
    write(where, states, world=2, most_numel=400_003)
    return where


class Watched:
    """What is asked of ReadAhead: every range, and how many readings were under way at most."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ranges: list[FileRange] = []
        self.most = self._now = 0
        start, release = ReadAhead.start, Reading.release

        def watch_start(ahead: ReadAhead, ranges: list[FileRange]) -> Reading | None:
            reading = start(ahead, ranges)
            if reading is not None:
                self.ranges += ranges
                self._now += 1
                self.most = max(self.most, self._now)
            return reading

        def watch_release(reading: Reading) -> None:
            self._now -= 1
            release(reading)

        patch.setattr(ReadAhead, "start", watch_start)
        patch.setattr(Reading, "release", watch_release)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.ranges)


def tiles(numel: int = 300_001) -> list[Elements]:
    """Every state of every parameter, as tiles that cut through blocks ask for it."""
    return [
        Elements(param, state, start, min(numel, NUMEL - start))
        for param in ("p0", "p1")
        for start in range(0, NUMEL, numel)
        for state in ("weight", "master", "exp_avg")
    ]


def read_all(
    source: Source, asked: list[Elements], states: dict[str, dict[str, torch.Tensor]]
) -> None:
    for param, state, start, numel in asked:
        found = source.read(param, state, start, numel)
        assert torch.equal(found, states[param][state][start : start + numel]), (
            param,
            state,
            start,
        )


def test_tiles_that_were_told_are_read_once_and_ahead(
    folder: Path, states: dict[str, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    with Source.open(folder) as source:
        source.follow(tiles())
        assert watched.most > 2, "reads are under way before anything is asked for"
        read_all(source, tiles(), states)
        assert watched.num_bytes == source.num_bytes


@pytest.mark.parametrize("told", ["nothing", "others", "backwards", "more", "shuffled"])
def test_what_was_told_changes_no_bit(
    folder: Path, states: dict[str, dict[str, torch.Tensor]], told: str
) -> None:
    asked = tiles()
    hints = {
        "nothing": [],
        "others": tiles(70_001)[::3],
        "backwards": asked[::-1],
        "more": [each for each in asked for _ in range(2)],
        "shuffled": random.Random(0).sample(asked, len(asked)),
    }
    with Source.open(folder) as source:
        source.follow(hints[told])
        read_all(source, asked, states)
        read_all(source, asked[::-1], states)


@pytest.mark.slow
def test_pieces_too_many_for_the_memory_are_read_one_by_one(
    folder: Path, states: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    few = {"p0": {"weight": states["p0"]["weight"]}}
    # each with a block before and behind it: more than twice its bytes
    write(tmp_path, few, most_numel=300)
    arena = Arena(verified_module.LEAST_AREA_BYTES)
    with (
        Source.open(tmp_path) as source,
        source.lent([arena.take(verified_module.LEAST_AREA_BYTES).tensor]),
    ):
        read_all(source, tiles()[:9:3], states)
    arena.close()


def test_verify_reads_every_block_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    with Source.open(folder) as source:
        num_bytes = sum(
            sum(source.verify(param, state))
            for param in source.parameters
            for state in source.states(param)
        )
        assert num_bytes == source.num_bytes == watched.num_bytes


def wide(path: Path) -> tuple[torch.nn.Module, tiermem.OffloadPolicy]:
    """A model whose tiles have buffers that are large enough to be lent."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    return made, policy("nvme", path, tile_numel=1 << 18, tile_buffers=8, grads=Tier.NVME)


def step(made: torch.nn.Module, optimizer: tiermem.AdamW) -> None:
    made(torch.ones(2, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_resuming_reads_ahead_in_the_buffers_of_the_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, own = wide(tmp_path)
    with tiermem.shard(made, own) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        step(made, optimizer)
        checkpoint.save(shards, optimizer, tmp_path / "out", "t")
        saved = live_states(shards)
    made, own = wide(tmp_path)
    with tiermem.shard(made, own) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        pool = shards.tile_pool
        assert pool is not None and pool.slot_bytes >= verified_module.LEAST_AREA_BYTES
        peak_bytes, watched = shards.store.arena.peak_bytes, Watched(monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(verified_module, "Arena", None)  # memory of its own would fail
            checkpoint.load(shards, optimizer, tmp_path / "out")
        assert shards.store.arena.peak_bytes == peak_bytes
        assert watched.most > 1
        assert watched.num_bytes == 4 * 512 * 512 * 12, "every byte once"
        found = live_states(shards)
        assert all(torch.equal(found[key], value) for key, value in saved.items())
        step(made, optimizer)


def test_a_resume_that_fails_gives_the_buffers_back(tmp_path: Path) -> None:
    made, own = wide(tmp_path)
    with tiermem.shard(made, own) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        step(made, optimizer)
        checkpoint.save(shards, optimizer, tmp_path / "out", "t", copy=True)
        checkpoint.wait(shards)
        data = next((tmp_path / "out" / "t").glob("data-*.bin"))
        with open(data, "r+b") as file:
            file.seek(data.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(checkpoint.DamagedState):
            checkpoint.load(shards, optimizer, tmp_path / "out")
        with open(data, "r+b") as file:
            file.seek(data.stat().st_size // 2)
            file.write(bytes([byte]))
        checkpoint.load(shards, optimizer, tmp_path / "out")
        step(made, optimizer)
        pool = shards.tile_pool
        assert pool is not None
        shards.drop_head_start()
        assert len([slot for _ in range(8) if (slot := pool.take()) is not None]) == 8
