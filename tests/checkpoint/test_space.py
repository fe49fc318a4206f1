"""Is what runs take on the disk told by who needs it, step by step and path by path, and is the sum
what stat says?"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import policy
from torch import nn

import tiermem
from tiermem import NvmePath, checkpoint
from tiermem.checkpoint.survey import (
    BLOCK_BYTES,
    PathReport,
    RunReport,
    Survey,
    blocks,
    length,
    survey,
)

WIDTH = 256
BASE_BYTES = WIDTH * WIDTH * 4
TRAINED_BYTES = WIDTH * WIDTH * 12  # a weight and two moments


def half_frozen() -> nn.Module:
    torch.manual_seed(0)
    base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    return nn.Sequential(base, nn.Linear(WIDTH, WIDTH, bias=False))


def started(path: Path, **fields: object) -> tuple[tiermem.Shards, tiermem.AdamW]:
    made = half_frozen()
    shards = tiermem.shard(
        made, policy("nvme", path, tile_numel=1 << 15, unit_numel=WIDTH * WIDTH, **fields)
    )
    return shards, tiermem.AdamW([p for p in made.parameters() if p.requires_grad], lr=0.01)


def step(shards: tiermem.Shards, optimizer: tiermem.AdamW) -> None:
    shards.model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    shards.store.flush()


def check_sums(found: Survey) -> None:
    def total(report: RunReport | PathReport) -> int:
        kinds = (
            report.durable_bytes,
            report.live_bytes,
            report.free_bytes,
            report.unclear_bytes,
            report.record_bytes,
        )
        assert min(kinds) >= 0
        return sum(kinds)

    for run in found.runs:
        taken = sum(file.stat().st_blocks * 512 for file in run.folder.iterdir())
        assert total(run) == run.file_bytes == taken
    for path in found.paths:
        own = [run.file_bytes for run in found.runs if run.folder.parent == path.path]
        assert total(path) == path.file_bytes == sum(own)


def test_steps_share_what_is_frozen_and_own_what_was_stepped(tmp_path: Path) -> None:
    shards, optimizer = started(tmp_path, keep=2)
    with shards:
        empty = survey(tmp_path)
        check_sums(empty)
        assert empty.runs[0].state == "live"
        assert empty.runs[0].durable_bytes == 0
        assert empty.runs[0].live_bytes >= BASE_BYTES + WIDTH * WIDTH * 4, (
            "the weights have been written"
        )
        assert empty.runs[0].free_bytes >= 2 * TRAINED_BYTES, (
            "room for what checkpoints hold has not"
        )
        for tag in ("a", "b"):
            step(shards, optimizer)
            checkpoint.save(shards, optimizer, tmp_path / "out", tag)
        step(shards, optimizer)
        shards.check_whole()  # it may be under way
        live = survey(tmp_path)
        check_sums(live)
    kept = survey(tmp_path)
    check_sums(kept)
    for found in (live, kept):
        (run,) = found.runs
        steps = [report for report in found.steps if report.places]
        assert run.durable_bytes == BASE_BYTES + 2 * TRAINED_BYTES
        assert [report.own_bytes for report in steps] == [TRAINED_BYTES] * 2
        assert [report.durable_bytes for report in steps] == [BASE_BYTES + TRAINED_BYTES] * 2
    assert live.runs[0].live_bytes >= TRAINED_BYTES, "the slots that the third step wrote"
    assert (kept.runs[0].state, kept.runs[0].live_bytes) == ("kept", 0)
    assert kept.runs[0].free_bytes < 1 << 16, "given back when it was closed"


def test_each_path_tells_its_own(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    own = policy("nvme", tmp_path, tile_numel=1 << 12, unit_numel=WIDTH * WIDTH)
    own = tiermem.OffloadPolicy(
        **{**vars(own), "paths": [NvmePath(folder, weight=1.0) for folder in folders]}
    )
    with tiermem.shard(half_frozen(), own) as shards:
        optimizer = tiermem.AdamW(
            [p for p in shards.model.parameters() if p.requires_grad], lr=0.01
        )
        step(shards, optimizer)
        checkpoint.save(shards, optimizer, tmp_path / "one" / "out", "t")
    found = survey(tmp_path)
    check_sums(found)
    assert [path.path for path in found.paths] == folders
    (report,) = [each for each in found.steps if each.tag == "t"]
    assert {place.folder.parent for place in report.places} == set(folders)
    assert report.durable_bytes == report.own_bytes == sum(run.durable_bytes for run in found.runs)
    assert report.durable_bytes >= BASE_BYTES + TRAINED_BYTES
    assert all(path.durable_bytes > TRAINED_BYTES // 4 for path in found.paths)
    for run in found.runs:
        shutil.rmtree(run.folder)


def test_what_a_step_that_cannot_be_read_may_name_is_not_called_free(tmp_path: Path) -> None:
    shards, optimizer = started(tmp_path)
    with shards:
        step(shards, optimizer)
        checkpoint.save(shards, optimizer, tmp_path / "out", "t")
    part = next(tmp_path.glob("tiermem-*/part-*"))
    os.truncate(part, part.stat().st_size - 3)
    found = survey(tmp_path)
    check_sums(found)
    (run,) = found.runs
    assert (run.durable_bytes, run.free_bytes) == (0, 0)
    assert run.unclear_bytes >= BASE_BYTES + TRAINED_BYTES
    part.unlink()
    next(tmp_path.glob("tiermem-*/manifest-*")).unlink()
    (run,) = survey(part.parent).runs
    assert run.unclear_bytes == 0 < run.free_bytes, "no step is left that could name it"
    shutil.rmtree(part.parent)


@settings(max_examples=drawn(60))
@given(st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 9_000)), max_size=8))
def test_blocks_hold_every_byte_and_no_other_block(drawn: list[tuple[int, int]]) -> None:
    ranges = [(start, start + num_bytes) for start, num_bytes in drawn]
    due = {
        number
        for start, stop in ranges
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
    }
    found = blocks([np.array(ranges, np.int64).reshape(-1, 2)]).tolist()
    assert {
        number
        for start, stop in found
        for number in range(start // BLOCK_BYTES, stop // BLOCK_BYTES)
    } == due
    assert length(np.array(found).reshape(-1, 2)) == len(due) * BLOCK_BYTES
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found))
