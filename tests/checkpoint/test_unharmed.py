"""When bytes on the paths turn out to be wrong, is the durable step named that does not hold them,
and is no more claimed?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import model, policy, states_in, train
from torch import nn

import tiermem
from tiermem import CorruptionError, Shards, checkpoint

Run = tuple[nn.Module, Shards, Any]


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """trained(**policy fields): a model on NVMe after two steps."""
    opened: list[Shards] = []

    def make(**fields: Any) -> Run:
        made = model(dtype=torch.bfloat16)
        opened.append(
            tiermem.shard(
                made, policy("nvme", tmp_path, resident_bytes=0, overlap="none", **fields)
            )
        )
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 2)
        return made, opened[-1], optimizer

    yield make
    for shards in opened:
        shards.close()


def spoil(shards: Shards, path: Path, param: str) -> None:
    """Flips a bit of a master where it is read from now."""
    assert shards.states is not None
    shards.drop_head_start()
    shard = next(shard for _, shard in shards.parameters() if shard.name == param)
    tile, elements = shards.states.pieces(shard)[0]
    data = (
        shards.values.read_part(tile.entry, torch.uint8, slice(0, tile.state_bytes))
        .numpy()
        .tobytes()
    )
    (file,) = path.glob("tiermem-*/segment.bin")
    place = file.read_bytes().index(data) + tile.slice_of(elements).start * 4
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))
        opened.flush()
        os.fsync(opened.fileno())


def test_a_step_that_was_written_over_elsewhere_is_whole(
    trained: Callable[..., Run], tmp_path: Path
) -> None:
    made, shards, optimizer = trained()
    checkpoint.save(shards, optimizer, tmp_path / "out", "a")
    saved = states_in(tmp_path / "out", "a")
    train(made, optimizer, 1)
    spoil(shards, tmp_path, "layers.1.weight")
    with pytest.raises(
        CorruptionError,
        match=r"master of layers.1.weight.* Step 2 \(tag 'a'\) holds none of these bytes: .* open ",
    ) as caught:
        train(made, optimizer, 1)
    manifest = Path(str(caught.value.strerror).rpartition("open ")[2])
    assert manifest.is_file()
    assert states_in(tmp_path / "out", "a") == saved


def test_a_step_that_holds_the_bytes_is_not_called_whole(
    trained: Callable[..., Run], tmp_path: Path
) -> None:
    made, shards, optimizer = trained()
    checkpoint.save(shards, optimizer, tmp_path / "out", "a")
    spoil(shards, tmp_path, "layers.1.weight")
    with pytest.raises(
        CorruptionError,
        match=r"Step 2 \(tag 'a'\) holds these bytes as well; go back to a complete copy",
    ):
        train(made, optimizer, 1)


def test_a_step_that_is_damaged_elsewhere_is_not_called_whole(
    trained: Callable[..., Run], tmp_path: Path
) -> None:
    made, shards, optimizer = trained()
    checkpoint.save(shards, optimizer, tmp_path / "out", "a")
    (file,) = tmp_path.glob("tiermem-*/segment.bin")
    at_save = file.read_bytes()
    train(made, optimizer, 1)
    shards.drop_head_start()
    data = file.read_bytes()
    kept = [
        place
        for place in range(0, min(len(data), len(at_save)), 4096)
        if any(data[place : place + 4096])
    ]
    with file.open("r+b") as opened:  # a bit of each block, those of the saved step too
        for place in kept:
            opened.seek(place)
            opened.write(bytes([data[place] ^ 1]))
        opened.flush()
        os.fsync(opened.fileno())
    with pytest.raises(
        CorruptionError, match=r"[Ss]tep 2 \(tag 'a'\) holds none of these bytes: .* open "
    ) as caught:
        train(made, optimizer, 1)
    assert "whole:" not in str(caught.value)
    optimizer.zero_grad()
    with pytest.raises(CorruptionError):
        checkpoint.load(shards, optimizer, tmp_path / "out")


def test_an_older_tag_is_named_when_the_newest_holds_the_bytes(
    trained: Callable[..., Run], tmp_path: Path
) -> None:
    made, shards, optimizer = trained(keep=2)
    checkpoint.save(shards, optimizer, tmp_path / "out", "a")
    train(made, optimizer, 1)
    checkpoint.save(shards, optimizer, tmp_path / "out", "b")
    spoil(shards, tmp_path, "layers.0.bias")
    with pytest.raises(
        CorruptionError,
        match=r"Step 3 \(tag 'b'\) holds these.*; step 2 \(tag 'a'\) holds none of these bytes: .* open ",
    ):
        train(made, optimizer, 1)


def test_a_run_that_saved_nothing_where_it_rests_says_so(
    trained: Callable[..., Run], tmp_path: Path
) -> None:
    made, shards, optimizer = trained()
    checkpoint.save(shards, optimizer, tmp_path / "out", "a", copy=True)
    checkpoint.wait(shards)
    spoil(shards, tmp_path, "layers.1.weight")
    with pytest.raises(CorruptionError, match="Nothing of this run has been saved where it rests"):
        train(made, optimizer, 1)


def test_a_run_goes_on_from_the_step_that_is_whole(
    trained: Callable[..., Run], tmp_path: Path
) -> None:
    made, shards, optimizer = trained()
    checkpoint.save(shards, optimizer, tmp_path / "out", "a")
    due = train(made, optimizer, 1)
    spoil(shards, tmp_path, "layers.1.weight")
    with pytest.raises(CorruptionError):
        train(made, optimizer, 1)
    for act in (optimizer.step, lambda: checkpoint.save(shards, optimizer, tmp_path / "out", "b")):
        with pytest.raises(RuntimeError, match="mixture of two steps"):
            act()
    optimizer.zero_grad()
    checkpoint.load(shards, optimizer, tmp_path / "out")
    assert train(made, optimizer, 1) == due
    train(made, optimizer, 2)
