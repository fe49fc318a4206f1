"""Is a flipped bit of any state or weight on NVMe named before it is used, and are checksums those
of the bytes alone?"""

from __future__ import annotations

import errno
import math
import os
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import launch
from saved_by_hand import flip
from summed_states import model, policy, summed, train

import tiermem
from tiermem import Shards
from tiermem.checkpoint.format.manifest import CHECKSUM_BYTES
from tiermem.checkpoint.saving.pieces import checksums
from tiermem.optim import at_rest
from tiermem.optim.tile_step import TilePass
from tiermem.precision import PRESETS
from tiermem.swap.base.errors import CorruptionError
from tiermem.swap.base.tier import Tier
from tiermem.swap.store.checksum import ROTATION, Pieces, crc32c
from tiermem.swap.store.store import TensorStore
from tiermem.units import state_layout
from tiermem.units.state_layout import BLOCK_BYTES, StatePiece, StatePieces, StateRange
from tiermem.weights.pages import UnitPages

HERE = Path(__file__).parent


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Callable[..., tuple[Shards, torch.optim.Optimizer]]]:
    """trained(preset, **policy fields): a model with states of two steps."""
    opened: list[Shards] = []

    def make(
        preset: str, num_steps: int = 2, **fields: object
    ) -> tuple[Shards, torch.optim.Optimizer]:
        wide = model()
        shards = tiermem.shard(wide, policy(tmp_path, preset, **fields))
        opened.append(shards)
        optim = tiermem.AdamW(wide.parameters(), lr=1e-2)
        train(wide, optim, num_steps)
        return shards, optim

    yield make
    for shards in opened:
        shards.close()


def on_disk(shards: Shards, entry: str) -> tuple[Path, int, int]:
    """(file, offset, bytes) of an entry, found by what it holds."""
    table = shards.store.sums.of(entry)
    assert table is not None
    num_bytes = int(table.pieces.stops[-1])
    data = shards.values.read_part(entry, torch.uint8, slice(0, num_bytes)).numpy().tobytes()
    (file,) = Path(shards.policy.paths[0].path).glob("tiermem-*/segment.bin")
    whole = file.read_bytes()
    assert whole.count(data) == 1
    return file, whole.index(data), num_bytes


# ---- every bit is somebody's ---------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_flipped_bit_in_any_part_of_a_tile_is_named(
    trained: Callable[..., tuple[Shards, torch.optim.Optimizer]],
    preset: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_layout, "STRIP_NUMEL", 1 << 16)  # some ten pieces of each state
    shards, _ = trained(preset, tile_numel=561_152)  # the whole weight but for its last elements
    states = shards.states
    assert states is not None and shards.tile_pool is not None
    work, slot = (
        TilePass(shards, lambda shard: states.names(shard), reads_weights=True),
        shards.tile_pool.take(),
    )
    assert slot is not None
    shards.drop_head_start()
    named: set[tuple[str, str]] = set()
    for tile in states.tiles:
        shards.store.read(work.early_reads(tile, slot), tile.entry).wait()
        for entry in (tile.entry, tile.live.entry):
            assert entry is not None
            file, place, _ = on_disk(shards, entry)
            table = shards.store.sums.of(entry)
            assert table is not None
            for number, (start, stop) in enumerate(
                zip(table.pieces.starts, table.pieces.stops, strict=True)
            ):
                first, last = (
                    tile.start * tile.dtype.itemsize,
                    tile.elements.stop * tile.dtype.itemsize,
                )
                if entry == tile.live.entry and not first <= start < last:
                    continue  # of another tile
                for at in {int(start), int(stop) - 1}:
                    flip(file, place + at, number % 8)
                    with pytest.raises(CorruptionError) as caught:
                        shards.store.read(work.early_reads(tile, slot), tile.entry).wait()
                    flip(file, place + at, number % 8)
                    error, piece = caught.value, caught.value.piece
                    assert (
                        isinstance(piece, StatePiece)
                        and str(piece) in str(error)
                        and piece.num_steps == 2
                    )
                    assert (error.errno, Path(error.filename), error.offset) == (
                        errno.EIO,
                        file,
                        place + start,
                    )
                    named.add((piece.param, piece.state))
        shards.store.read(work.early_reads(tile, slot), tile.entry).wait()
    shards.tile_pool.give_back(slot)
    moments = ["exp_avg", "exp_avg_sq"]
    kept = [*moments, *(f"{name}.scales" for name in moments)] if preset == "tiny" else moments
    kept += ["weight"] if preset == "bf16" else ["master", "weight"]
    trainable = [name for name, p in shards.model.named_parameters() if p.requires_grad]
    assert named == {(name, state) for name in trainable for state in kept}


def test_the_elements_that_an_error_names_are_those_of_the_flipped_byte(
    trained: Callable[..., tuple[Shards, torch.optim.Optimizer]],
) -> None:
    shards, optim = trained("exact", tile_numel=561_152)
    assert shards.states is not None
    tile = shards.states.tiles[0]
    file, place, _ = on_disk(shards, tile.entry)
    (part,) = [s for s in tile.ranges if s.shard.name == "up.weight"]
    element = 2 * BLOCK_BYTES // 4 + 5  # in the third block of exp_avg
    flip(file, place + 4 * (tile.numel + tile.slice_of(part).start + element))
    with pytest.raises(
        CorruptionError, match=r"exp_avg of up.weight, elements 524288 to"
    ) as caught:
        train(shards.model, optim, 1)
    assert isinstance(caught.value.piece, StatePiece)
    assert caught.value.piece.start <= element < caught.value.piece.stop


@pytest.mark.parametrize("what", ["lost", "misdirected"])
def test_a_write_that_was_lost_or_went_elsewhere_is_named(
    trained: Callable[..., tuple[Shards, torch.optim.Optimizer]], what: str
) -> None:
    """The bytes there are valid ones of another time, or of another tile."""
    shards, optim = trained("exact")
    assert shards.states is not None
    shards.drop_head_start()
    tile, other = shards.states.tiles[2], shards.states.tiles[3]
    before = on_disk(shards, tile.entry)[0].read_bytes()
    train(shards.model, optim, 1)
    shards.drop_head_start()
    file, place, num_bytes = on_disk(shards, tile.entry)
    old, start = (
        (before, place) if what == "lost" else (file.read_bytes(), on_disk(shards, other.entry)[1])
    )
    assert old[start : start + num_bytes] != file.read_bytes()[place : place + num_bytes]
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(old[start : start + num_bytes])
        os.fsync(opened.fileno())
    with pytest.raises(CorruptionError) as caught:
        train(shards.model, optim, 1)
    error = caught.value
    # with the one under way
    assert isinstance(error.piece, StatePiece) and error.piece.num_steps in (3, 4)
    assert Path(error.filename) == file and place <= error.offset < place + num_bytes


def test_rows_that_come_singly_bring_every_piece_whole() -> None:
    """Wherever rows begin in their pages, and in whatever order they come."""
    numbers = random.Random(0)
    for row_bytes in (4096, 6000, 1000, 20_000):
        shard = types.SimpleNamespace(num_rows=9, shard_offset=350, numel=9 * row_bytes // 2)
        shares = {"shards": [shard], "dtype": torch.bfloat16, "shard_bytes": 50 * 4096}
        pages = UnitPages(types.SimpleNamespace(**shares))  # type: ignore[arg-type]
        place = 700, 0, 9 * row_bytes
        run = StateRange(shard, lambda: "", *place, 2, row_bytes=row_bytes)  # type: ignore[arg-type]
        pieces = StatePieces([run]).pieces
        come = np.zeros(len(pieces.starts), np.bool_)
        for rows in [(), *((row,) for row in numbers.sample(range(9), 7)), None]:
            found = pages.missing(rows)
            pages.note(found)
            for part in found:
                come |= (part.start <= pieces.starts) & (pieces.stops <= part.stop)
        assert come.all()


# ---- nothing is trained on it --------------------------------------------------------------------


def test_a_tile_that_is_corrupt_is_not_stepped(
    trained: Callable[..., tuple[Shards, torch.optim.Optimizer]],
) -> None:
    shards, optim = trained("compact")
    assert shards.states is not None
    tile = shards.states.tiles[3]
    shards.drop_head_start()
    file, place, num_bytes = on_disk(shards, tile.entry)
    flip(file, place + num_bytes // 2)
    before = file.read_bytes()[place : place + num_bytes]
    weight = shards.values.elements(tile.live, tile.elements)
    with pytest.raises(CorruptionError, match=r"of up\.weight"):
        train(shards.model, optim, 1)
    for _ in range(2):  # others have been stepped: nothing goes on from there
        assert file.read_bytes()[place : place + num_bytes] == before
        assert torch.equal(shards.values.elements(tile.live, tile.elements), weight)
        with pytest.raises(RuntimeError, match="mixture of two steps"):
            optim.step()


def test_a_unit_that_is_corrupt_is_not_computed_with_and_can_be_mended(
    trained: Callable[..., tuple[Shards, torch.optim.Optimizer]], tmp_path: Path
) -> None:
    shards, _ = trained("compact")
    x = torch.randn(2, 701, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    right = shards.model(x)
    for name in ("up.weight", "norm.bias", "frozen.weight"):
        live, shard = shards.find(dict(shards.model.named_parameters())[name])
        shards.prefetcher.empty()
        assert live.entry is not None
        file, place, _ = on_disk(shards, live.entry)
        at = shard.shard_offset * (1 if live.unit.is_packed else 2)
        flip(file, place + at, 6)
        with pytest.raises(CorruptionError, match=f"weight of {name}, elements 0 to"):
            shards.model(x)
        flip(file, place + at, 6)
        assert torch.equal(shards.model(x), right)


def test_scales_of_frozen_weights_are_checked_as_well(
    trained: Callable[..., tuple[Shards, torch.optim.Optimizer]],
) -> None:
    shards, _ = trained("compact")
    live, _ = shards.find(shards.model.frozen.weight)  # type: ignore[union-attr, arg-type]
    shards.prefetcher.empty()
    assert live.entry is not None
    file, place, num_bytes = on_disk(shards, live.entry)
    flip(file, place + num_bytes - 1, 5)
    with pytest.raises(
        CorruptionError, match=r"weight.scales of frozen.weight, elements 0 to 40050"
    ):
        shards.model(torch.zeros(1, 701, dtype=torch.bfloat16))


# ---- whose sums they are -------------------------------------------------------------------------


def assert_sums_are_those_of_the_bytes(
    found: Mapping[tuple[str, str], Sequence[tuple[int, torch.Tensor, list]]],
) -> None:  # type: ignore[type-arg]
    assert found
    for (param, state), parts in found.items():
        whole = torch.cat([data for _, data, _ in sorted(parts, key=lambda part: part[0])])
        fragments = [each for _, _, several in parts for each in several]
        due = crc32c([block.contiguous() for block in whole.split(CHECKSUM_BYTES)])
        assert checksums(fragments, f"{state} of {param}") == tuple(due)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("preset", PRESETS)
def test_sums_do_not_depend_on_tiles_and_buffers(
    trained: Callable[..., tuple[Shards, torch.optim.Optimizer]], preset: str
) -> None:
    several = []
    for fields in (
        {"tile_numel": 4096, "tile_buffers": 2},
        {"tile_numel": 561_152},
        {"pipeline_write": False},
    ):
        shards, _ = trained(preset, **fields)
        found = summed(shards)
        assert_sums_are_those_of_the_bytes(found)
        several.append(
            {
                key: checksums([f for part in parts for f in part.fragments], str(key))
                for key, parts in found.items()
            }
        )
        shards.close()
    assert several[0] == several[1] == several[2]
    weight = several[0]["up.weight", "weight"]
    assert len(weight) == math.ceil(701 * 801 * 2 / CHECKSUM_BYTES) == 2


def test_sums_of_several_ranks_make_up_those_of_the_whole(tmp_path: Path) -> None:
    for folder in ("nvme", "out"):
        (tmp_path / folder).mkdir()
    ranks = launch(
        HERE / "sums_on_ranks.py", 2, tmp_path / "out", str(tmp_path / "nvme"), timeout_s=240
    )
    for preset in ranks[0]:
        together: dict[tuple[str, str], list[tuple[int, torch.Tensor, list]]] = {}  # type: ignore[type-arg]
        for rank in ranks:
            for key, parts in rank[preset].items():
                together.setdefault(key, []).extend(parts)
        assert_sums_are_those_of_the_bytes(together)
        numel = sum(data.numel() for _, data, _ in together["up.weight", "weight"])
        assert numel == 701 * 801 * 2


@pytest.mark.sampled(12)
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_put_in_place_is_summed_as_what_is_stepped(
    trained: Callable[..., tuple[Shards, torch.optim.Optimizer]], preset: str
) -> None:
    shards, optim = trained(preset)
    states, weights = optim.state_dict(), shards.model.state_dict()
    fresh, other = trained(preset, num_steps=0)
    fresh.model.load_state_dict(weights)
    other.load_state_dict(states)
    assert_sums_are_those_of_the_bytes(summed(fresh))
    with tiermem.zero.GatheredParameters([fresh.model.norm.weight], modifier_rank=0):  # type: ignore[union-attr, list-item]
        fresh.model.norm.weight.data.fill_(0.5)  # type: ignore[union-attr]
    fresh.prefetcher.empty()
    train(fresh.model, other, 1)
    assert_sums_are_those_of_the_bytes(summed(fresh))


class Odd(torch.nn.Module):
    """Its second parameter begins inside a strip."""

    def __init__(self) -> None:
        super().__init__()
        self.few = torch.nn.Parameter(torch.ones(801))
        self.many = torch.nn.Parameter(torch.ones(300_000))

    def forward(self) -> torch.Tensor:
        return self.few.sum() + self.many.sum()


def test_states_that_come_and_go_bit_by_bit_are_verified_and_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_rest, "PIECE_NUMEL", 1 << 18)  # a strip of 8-bit moments
    odd = Odd().bfloat16()
    with tiermem.shard(odd, policy(tmp_path, "tiny", tile_numel=1 << 20)) as shards:
        optim = tiermem.AdamW(odd.parameters(), lr=1e-2)
        odd().backward()
        optim.step()
        states = optim.state_dict()
        optim.load_state_dict(states)
        assert shards.states is not None
        table = shards.store.sums.of(shards.states.tiles[0].entry)
        assert table is not None and table.is_known.all()
        for number in range(len(table.crcs)):
            table.crcs[number] ^= 1
            with pytest.raises(CorruptionError):
                optim.state_dict()
            table.crcs[number] ^= 1


# ---- which reads are checked ---------------------------------------------------------------------


def test_nothing_is_summed_when_nothing_is_durable_nor_verified(
    trained: Callable[..., tuple[Shards, torch.optim.Optimizer]],
) -> None:
    shards, _ = trained("compact", durability="none", verify="resume")
    assert shards.states is not None
    entries = [tile.entry for tile in shards.states.tiles] + [
        live.entry for live in shards.units if live.entry
    ]
    assert entries and all(shards.store.sums.of(entry) is None for entry in entries)


def test_sampling_sees_a_corrupt_tile_within_sixteen_steps(
    trained: Callable[..., tuple[Shards, torch.optim.Optimizer]],
) -> None:
    shards, optim = trained("compact", verify="sample")
    assert shards.states is not None
    shards.drop_head_start()
    tile = shards.states.tiles[5]
    file, place, num_bytes = on_disk(shards, tile.entry)
    seen = []
    for number in range(ROTATION):
        # anew: a step that does not see it sums what it made of it
        flip(file, place + num_bytes // 2)
        try:
            train(shards.model, optim, 1)
        except CorruptionError:
            seen.append(number)
            shards.steps.is_torn = False  # as if it had been restored
    assert len(seen) == 1


def test_a_read_that_is_cancelled_leaves_its_turn_to_the_next(tmp_path: Path) -> None:
    with TensorStore([tmp_path], 1 << 20) as store:
        store.reserve("x", (4096,), torch.uint8, Tier.NVME)
        store.sums.use(None, "sample")
        store.sums.protect("x", Pieces(np.array([0]), np.array([4096])))
        memory = [("x", 0, store.arena.take(4096, "a test").tensor)]
        store.write(memory, "x").wait()
        table = store.sums.of("x")
        assert table is not None
        table.crcs[0] ^= 1
        table._num_reads[:] = -table._serial - 1
        store.read(memory, "x").cancel()
        with pytest.raises(CorruptionError):
            store.read(memory, "x").wait()
        table.crcs[0] ^= 1
        store.read(memory, "x").wait()
        table.crcs[0] ^= 1
        store.read(memory, "x").wait()  # not due: the last one was verified


def test_blocks_are_those_of_the_manifest() -> None:
    assert BLOCK_BYTES == CHECKSUM_BYTES
