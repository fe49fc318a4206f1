"""On a file system that can share blocks, does a complete copy share the store's, and is it a copy
all the same?

On xfs and btrfs of their own, on loop devices; skipped, with the reason, where these cannot be made
or mounted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from mounts import run_or_skip
from runs import model, policy, states_in, train

import tiermem
from tiermem import checkpoint

MIB = 1 << 20


def shared_bytes(file: Path) -> int:
    """Bytes of a file whose blocks another file has as well."""
    os.sync()  # places of what was written a moment ago
    found = 0
    for line in run_or_skip("filefrag", "-v", "-b1", str(file)).splitlines():
        cells = line.split(":")
        if len(cells) >= 4 and cells[0].strip().isdigit() and "shared" in cells[-1]:
            found += int(cells[3])
    return found


@pytest.mark.parametrize("is_behind", [True, False])
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_a_copy_shares_blocks_and_outlives_the_store(
    mount: Callable[..., Path], tmp_path: Path, kind: str, is_behind: bool
) -> None:
    point = mount(kind, 320 * MIB)
    made, out = model(), point / "out"
    with tiermem.shard(made, policy("nvme", point, keep=2 if is_behind else 1)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 2)
        if not is_behind:
            checkpoint.save(shards, optimizer, out, "held")
        checkpoint.save(shards, optimizer, out, "copy", copy=True)
        checkpoint.wait(shards)
        (data,), (segment,) = (out / "copy").glob("data-*.bin"), point.glob("tiermem-*/segment.bin")
        assert not segment.samefile(data)
        shared = shared_bytes(data)
        assert shared >= data.stat().st_size * 0.9  # all but what rested in memory
        saved = states_in(out, "copy")
        due = train(made, optimizer, 3)  # writes to every slot, some of which the copy shares
        assert states_in(out, "copy") == saved
        assert shared_bytes(data) <= shared
    for folder in point.glob("tiermem-*"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    assert states_in(out, "copy") == saved
    (tmp_path / "other").mkdir()
    again = model(seed=5)
    with tiermem.shard(again, policy("nvme", tmp_path / "other")) as shards:
        optimizer = tiermem.AdamW(again.parameters(), lr=0.01)
        assert checkpoint.load(shards, optimizer, out, "copy") is not None
        assert train(again, optimizer, 3) == due
