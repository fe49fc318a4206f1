"""Does a copy take a share of the time while training goes on, and all of it once somebody
waits?"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from runs import model, policy, states_in, train

import tiermem
from tiermem import checkpoint
from tiermem.checkpoint.saving import copies
from tiermem.checkpoint.saving.copies import Pace
from tiermem.checkpoint.saving.saver import saver_of


class Counted(Pace):
    """Counts the rests that are due."""

    def __init__(self, busy_share: float = 1.0) -> None:
        super().__init__(busy_share)
        self.num_rests = 0

    def rest(self, busy_s: float) -> None:
        assert busy_s > 0
        self.num_rests += 1
        super().rest(busy_s)


def test_a_copy_behind_rests_until_it_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as good as for ever: without being hurried the test does not end
    monkeypatch.setattr(copies, "_BUSY_SHARE", 1e-6)
    monkeypatch.setattr(copies, "Pace", Counted)
    made, out = model(), tmp_path / "out"
    with tiermem.shard(made, policy("nvme", tmp_path, keep=2)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, out, "here")
        checkpoint.save(shards, optimizer, out, "copy", copy=True)
        pace = saver_of(shards)._copies._pace
        assert isinstance(pace, Counted)
        train(made, optimizer, 2)
        copying = saver_of(shards)._copies._thread
        assert (
            copying is not None
            and copying.is_alive()
            and not (out / "copy" / "tiermem.json").exists()
        )
        assert pace.num_rests <= 1
        checkpoint.wait(shards)
        assert pace.num_rests >= 1
        assert states_in(out, "copy") == states_in(out, "here")


def test_who_rests_can_be_hurried_and_a_whole_share_never_rests() -> None:
    Pace().rest(1.0)
    pace = Pace(1e-6)
    resting = threading.Thread(target=pace.rest, args=(1.0,))
    resting.start()
    assert resting.is_alive()
    pace.hurry()
    resting.join()
    pace.rest(1.0)
