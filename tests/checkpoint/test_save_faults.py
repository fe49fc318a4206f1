"""Is what was saved before untouched by whatever fails, and does nothing of what failed stay?

Where each fault is met, by injection and by real means:

    ENOSPC                      here                            test_failing_file_systems; test_failing_disks (swap)
    a limit, a quota            test_files (swap): a quota      test_failing_file_systems: writes that are cut short
    EIO                         here, test_export_faults        test_failing_disks: a lost range, a bad one, a disk that is gone
    read-only                   here: from any moment on        test_failing_file_systems: while each thing is done
    a tile cut, or a bit of it  test_source, test_unharmed      test_load_arguments: the model is opened from the one before
    a manifest or part          test_source, test_manifest, test_fuzz: cut, flipped, changed in any way
    another system's header     test_fuzz; test_torch_import, test_dcp_import, test_deepspeed_import
    a deleted segment or part   test_source                     test_store_damage (swap): under a run
    a newer version             test_source, test_manifest
    a path listed twice         test_manifest; test_files (swap): of a store
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    Small,
    error_of,
    failing,
    files_below,
    live_states,
    model,
    opened,
    policy,
    read_only_from,
    states_in,
    train,
)
from saved_by_hand import latest_of, pieces_of

import tiermem
from tiermem import checkpoint
from tiermem.checkpoint.saving import publish
from tiermem.checkpoint.survey import survey
from tiermem.precision import Precision
from tiermem.swap.base.errors import CorruptionError


def train_durably(shards: tiermem.Shards, optimizer: Any, num_steps: int) -> None:
    """Steps that are durable on return."""
    train(shards.model, optimizer, num_steps)
    checkpoint.wait(shards)


def test_a_step_that_cannot_be_made_durable_leaves_the_one_before(tmp_path: Path) -> None:
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path, durability="step")) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train_durably(shards, optimizer, 2)
        folder = shards.store.folders()[0]
        before = {
            name: (folder / name).read_bytes()
            for name in ("manifest-2.json", "part-2-0.json", "data-2.bin")
        }
        for kind, ending in [("sync", "segment.bin"), ("sync", "data-4.bin"), ("write", "part-5-0.json.new"),
                             ("rename", "manifest-6.json")]:  # fmt: skip
            with (
                failing(kind, ending, code=errno.EIO),
                pytest.raises(OSError, match="it fails") as caught,
            ):
                train_durably(shards, optimizer, 1)
            assert caught.value.errno == errno.EIO
            optimizer.zero_grad()
            assert {name: (folder / name).read_bytes() for name in before} == before
            assert sorted(path.name for path in folder.iterdir()) == sorted(
                [*before, "lock", "segment.bin"]
            )
        train_durably(shards, optimizer, 1)
        assert (folder / "manifest-7.json").exists() and not (folder / "manifest-2.json").exists()


def test_an_old_step_that_cannot_be_removed_is_said_and_the_new_one_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path, durability="step")) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train_durably(shards, optimizer, 1)
        folder = shards.store.folders()[0]
        with failing("remove", "manifest-1.json", code=errno.EIO):
            train_durably(shards, optimizer, 1)
        assert "manifest-1.json is left" in caplog.text
        assert checkpoint.Source.open(folder).manifest.commit == 2
        assert steps_in(folder) == {1: "whole", 2: "whole"} and (folder / "part-1-0.json").exists()
        train_durably(shards, optimizer, 1)
        assert steps_in(folder) == {3: "whole"} and not (folder / "part-1-0.json").exists()
    assert steps_in(folder) == {3: "whole"}


def steps_in(folder: Path) -> dict[int | None, str]:
    """What fsck says of the steps in a folder."""
    return {each.step: each.state for each in survey(folder, verifies=True).steps}


def test_what_a_manifest_of_an_earlier_run_names_stays_while_it_cannot_be_removed(
    tmp_path: Path,
) -> None:
    for number in range(2):
        made = model()
        with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
            optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
            if number:
                checkpoint.load(shards, optimizer, tmp_path / "out")
            train(made, optimizer, 1, seed=number)
            # of the first run, when the second saves
            with failing("remove", "manifest-1.json", code=errno.EIO):
                checkpoint.save(shards, optimizer, tmp_path / "out", f"tag{number}")
    assert steps_in(tmp_path) == {1: "whole", 2: "whole"} and steps_in(tmp_path / "out") == {
        1: "whole",
        2: "whole",
    }


def test_an_earlier_run_whose_folder_cannot_be_looked_through_is_left_and_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(commit: int) -> str:
        raise OSError(errno.EIO, "it fails", str(tmp_path))

    for number in range(2):
        made = model()
        with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
            if number:
                # once the folder of the first run is claimed
                monkeypatch.setattr(publish, "manifest_name", fail)
            checkpoint.save(shards, None, tmp_path / "out", f"tag{number}")
    assert "is left" in caplog.text and not list(tmp_path.glob("tiermem-*/lock"))
    assert len(steps_in(tmp_path)) == 1 and {
        each.state for each in survey(tmp_path / "out").steps
    } == {"whole"}


def test_a_disk_that_runs_full_keeps_the_tag_that_is_saved_again(tmp_path: Path) -> None:
    made, out = model(), tmp_path / "out"
    with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        checkpoint.save(shards, optimizer, out, "tag")
        saved = states_in(out, "tag")
        train(made, optimizer, 1)
        for number in range(1, 6):  # part, manifest, README, pointer, latest
            with (
                read_only_from(number, ("write",), errno.ENOSPC),
                pytest.raises(OSError, match="No space left"),
            ):
                checkpoint.save(shards, optimizer, out, "tag")
            assert states_in(out, "tag") == saved and latest_of(out) == "tag"
        checkpoint.save(shards, optimizer, out, "tag")
        assert states_in(out, "tag") != saved


def test_a_file_that_cannot_be_looked_at_is_no_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, latest = {"stat": os.stat, "lstat": os.lstat}, tmp_path / "out" / "latest"

    def fail_in(call: str) -> Callable[..., os.stat_result]:
        def fail(path: object, **fields: Any) -> os.stat_result:
            if str(path) == str(latest):
                raise OSError(errno.EIO, "it fails", str(path))
            return real[call](path, **fields)  # type: ignore[operator]

        return fail

    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path, keep=2)) as shards:
        checkpoint.save(shards, None, tmp_path / "out", "first")
        for call in real:
            monkeypatch.setattr(os, call, fail_in(call))
        with pytest.raises(OSError, match="it fails") as caught:
            checkpoint.load(shards, None, tmp_path / "out")
        assert caught.value.errno == errno.EIO  # and not: nothing is saved there
        with failing("rename", "latest", code=errno.EIO), pytest.raises(OSError, match="it fails"):
            checkpoint.save(shards, None, tmp_path / "out", "second")
        monkeypatch.undo()
        assert latest_of(tmp_path / "out") == "first"  # what was not written is not taken back


def copy_behind_a_step(
    made: Small, shards: tiermem.Shards, optimizer: tiermem.AdamW, out: Path
) -> None:
    checkpoint.save(shards, optimizer, out, "second", copy=True)
    train(made, optimizer, 1)
    checkpoint.wait(shards)


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_copy_that_fails_is_told_and_leaves_nothing(tmp_path: Path, is_behind: bool) -> None:
    made, out = model(), tmp_path / "out"
    with tiermem.shard(made, policy("nvme", tmp_path, keep=2 if is_behind else 1)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, out, "first")
        saved, files = states_in(out, "first"), list(files_below(tmp_path))
        for number, (kind, ending) in enumerate(
            [("sync", ".bin"), ("write", "0.json.new"), ("rename", "tiermem.json")]
        ):
            with (
                failing(kind, ending, 2 if kind == "sync" else 1),
                pytest.raises(OSError, match="it fails"),
            ):
                copy_behind_a_step(made, shards, optimizer, out)
            assert list(files_below(tmp_path)) == files and not (out / "second").exists(), (
                number,
                ending,
            )
            assert states_in(out, "first") == saved
            train(made, optimizer, 1)  # nothing is held that a step would write to
        checkpoint.wait(shards)  # an error is told once
        checkpoint.save(shards, optimizer, out, "second", copy=True)
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, out, "third", copy=True)  # waits for the second
        assert states_in(out, "second") != saved
    assert set(states_in(out, "third")) == set(saved)


@pytest.mark.parametrize("tag", [None, 7])
def test_a_load_waits_for_the_copy_under_way(tmp_path: Path, tag: Any) -> None:
    made, out = model(), tmp_path / "out"
    with tiermem.shard(made, policy("nvme", tmp_path, keep=2)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, out, "first")
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, out, tag or "7", copy=True)
        loaded = checkpoint.load(shards, optimizer, out, tag)
        assert loaded is not None and (loaded.tag, loaded.step) == ("7", 2)


def test_a_load_after_a_copy_that_failed_opens_what_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, out = model(), tmp_path / "out"
    with tiermem.shard(made, policy("nvme", tmp_path, keep=2)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        checkpoint.save(shards, optimizer, out, "first")
        with failing("rename", "tiermem.json", 1):
            checkpoint.save(shards, optimizer, out, "second", copy=True)
            loaded = checkpoint.load(shards, optimizer, out)
        assert loaded is not None and loaded.tag == "first"
    assert "the last save did not end well: [Errno 28] it fails" in caplog.text


@pytest.mark.parametrize("tag", ["latest", "latest/1", "\udcff", "a/../b", "\0"])
def test_a_tag_that_names_no_folder_of_its_own_is_refused(tmp_path: Path, tag: str) -> None:
    with (
        tiermem.shard(model(), policy("cpu", tmp_path)) as shards,
        pytest.raises(ValueError, match="tag is "),
    ):
        checkpoint.save(shards, None, tmp_path / "out", tag, copy=True)
    assert not (tmp_path / "out").exists()


def test_a_copy_without_a_free_slot_is_whole_on_return(tmp_path: Path) -> None:
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        # holds the one slot beside the live one
        checkpoint.save(shards, optimizer, tmp_path / "out", "tag")
        train(made, optimizer, 1)
        threads = threading.active_count()
        checkpoint.save(shards, optimizer, tmp_path / "out", "copy", copy=True)
        assert threading.active_count() == threads
        saved = states_in(tmp_path / "out", "copy")
        train(made, optimizer, 1)
        assert states_in(tmp_path / "out", "copy") == saved != states_in(tmp_path / "out", "tag")


def test_a_run_whose_folder_was_removed_is_saved_as_a_copy(tmp_path: Path) -> None:
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path, keep=2)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        shutil.rmtree(shards.store.folders()[0])
        with pytest.raises(FileNotFoundError, match=r"Save a copy elsewhere \(copy=True\)"):
            checkpoint.save(shards, optimizer, tmp_path / "out", "tag")
        checkpoint.save(shards, optimizer, tmp_path / "out", "tag", copy=True)
        kept = live_states(shards)
        train(made, optimizer, 1)
    made = model(1)
    with tiermem.shard(made, policy("cpu", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        checkpoint.load(shards, optimizer, tmp_path / "out")
        opened = live_states(shards)
        assert all(torch.equal(opened[key], value) for key, value in kept.items())


def test_what_a_read_has_found_damaged_is_not_saved_in_the_place_of_a_whole_step(
    tmp_path: Path,
) -> None:
    made, out = model(), tmp_path / "out"
    with tiermem.shard(made, policy("nvme", tmp_path, keep=1)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, out, "whole")
        saved = states_in(out, "whole")
        train(made, optimizer, 1)
        shards.check_whole()
        frozen = {
            block // 4096
            for _, part in opened(out, "whole")[2]
            for piece in pieces_of(part)
            for block in range(piece.offset // 4096 * 4096, piece.offset + piece.num_bytes, 4096)
        }
        with open(shards.store.folders()[0] / "segment.bin", "r+b", buffering=0) as file:
            for block in set(range(os.fstat(file.fileno()).st_size // 4096)) - frozen:
                os.pwrite(file.fileno(), b"other", block * 4096)
        for act in (
            lambda: train(made, optimizer, 1),
            lambda: checkpoint.save(shards, optimizer, out, "damaged"),
        ):
            with pytest.raises(CorruptionError, match="are not those that were written"):
                act()
        assert states_in(out, "whole") == saved and not (out / "damaged").exists()
        checkpoint.load(shards, optimizer, out)
        checkpoint.save(shards, optimizer, out, "again")
    assert states_in(out, "again") == saved


def test_a_copy_under_way_is_ended_by_the_end_of_the_run(tmp_path: Path) -> None:
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
        checkpoint.save(shards, None, tmp_path / "out", "t", copy=True)
    assert states_in(tmp_path / "out", "t")
    assert not list(tmp_path.glob("tiermem-*"))  # a copy needs no store


def test_the_same_tag_may_change_between_a_copy_and_the_store(tmp_path: Path) -> None:
    made, out = model(), tmp_path / "out"
    with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        for copy in (True, False, True, True, False):
            train(made, optimizer, 1)
            checkpoint.save(shards, optimizer, out, "t", copy=copy)
            checkpoint.wait(shards)
            assert states_in(out, "t")["scale", "weight"] == made.scale.detach().numpy().tobytes()
            assert len(list(files_below(out))) == (5 if copy else 3)
            assert len(list(tmp_path.glob("tiermem-*/manifest-*"))) == (0 if copy else 1)


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_masters_that_wait_for_the_first_step_are_saved(tmp_path: Path, where: str) -> None:
    made = model()
    for layer in made.layers:
        layer.bfloat16()
    fields = {"master_from": "init", "precision": Precision.preset("compact")}
    made = model(dtype=torch.bfloat16)
    with tiermem.shard(made, policy(where, tmp_path, **fields)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        checkpoint.save(shards, optimizer, tmp_path / "out", "t")
        saved = states_in(tmp_path / "out", "t")
        weight = shards.weight(made.layers[0].weight)
        assert saved["layers.0.weight", "master"] == weight.float().numpy().tobytes()
        assert ("layers.0.weight", "exp_avg") not in saved


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", ["in place", "a step", "a copy"])
def test_a_disk_that_is_read_only_from_any_moment_keeps_what_was_saved(
    tmp_path: Path, way: str
) -> None:
    """Without a mount (test_failing_file_systems.py has those): what cannot be taken back goes with
    the next save."""
    made, out = model(), tmp_path / "out"
    with tiermem.shard(
        made,
        policy("nvme", tmp_path, keep=2, durability="step" if way == "a step" else "checkpoint"),
    ) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, out, "kept", copy=way == "a copy")
        checkpoint.wait(shards)
        saved = states_in(out, "kept")

        def act() -> None:
            if way == "a step":
                checkpoint.make_durable(shards, optimizer)
            else:
                checkpoint.save(shards, optimizer, out, "new", copy=way == "a copy")
                checkpoint.wait(shards)

        for number in range(1, 60):
            with read_only_from(number):
                error = error_of(act)
            if error is None:
                break
            assert (error.errno, str(error.filename).startswith(str(tmp_path))) == (
                errno.EROFS,
                True,
            )
            assert "see the kernel log" in str(error)
            assert states_in(out, "kept") == saved, number
        assert number > 5
        train(made, optimizer, 1)
        act()
        commits = {"in place": 2, "a step": 2, "a copy": 0}[way]
        assert len(list(tmp_path.glob("tiermem-*/manifest-*"))) == commits
        # lock, segment; manifest, part, data
        assert len(list(tmp_path.glob("tiermem-*/*"))) == 2 + 3 * commits
        assert len(list(out.rglob("*.*"))) == (
            8 if way == "a copy" else 2 if way == "a step" else 4
        )
        assert states_in(out, "kept") == saved


@pytest.mark.parametrize("name", ["a\0b", "", "\ud800", "n" * 5000])
def test_a_name_that_opening_refuses_is_refused_by_the_save(tmp_path: Path, name: str) -> None:
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, tmp_path / "out", "t")
        saved, files = states_in(tmp_path / "out", "t"), sorted(files_below(tmp_path))
        made._buffers[name] = torch.ones(3)
        for copy in (False, True):
            with pytest.raises(
                checkpoint.ManifestError,
                match=r"cannot be saved, because it would not open again.*name",
            ):
                checkpoint.save(shards, optimizer, tmp_path / "out", "u", copy=copy)
        assert sorted(files_below(tmp_path)) == files
        assert states_in(tmp_path / "out", "t") == saved
        del made._buffers[name]
        checkpoint.save(shards, optimizer, tmp_path / "out", "u")


def test_a_path_that_opening_refuses_is_refused_by_the_save(tmp_path: Path) -> None:
    made, out = model(), tmp_path / "out"
    store = tmp_path / "a" / "\udc80"  # a byte that is no UTF-8
    store.mkdir(parents=True)
    with tiermem.shard(made, policy("nvme", store)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        with pytest.raises(checkpoint.ManifestError, match=r"cannot be saved.*the pointer: folder"):
            checkpoint.save(shards, optimizer, out, "t")
        assert not list(files_below(out))
