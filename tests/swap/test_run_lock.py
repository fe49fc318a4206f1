"""Whose is a run's folder: is a live run's refused, a dead one's taken over by exactly one, and a
reader left in peace?"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked import Inside, fork

from tiermem.swap.base.tier import Tier
from tiermem.swap.disk import durable, run_folder
from tiermem.swap.disk.files import Files
from tiermem.swap.disk.run_folder import (
    RunFolder,
    RunName,
    RunOwner,
    has_saved,
    is_dead,
    is_live,
    owner_of,
    remove_dead_runs,
    run_folders,
    share,
    this_process,
)
from tiermem.swap.store.store import TensorStore


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    """Removes what runs are meant to leave here, before it is looked at as a leak."""
    yield
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """A folder of a run that was killed."""
    fork(lambda inside: Files([tmp_path]).allocate(4096)).end()  # type: ignore[arg-type,return-value]
    (folder,) = run_folders(tmp_path)
    return folder


def kept(tmp_path: Path, name: RunName) -> Path:
    """A folder of a run that was closed in order and kept."""
    store = TensorStore(tmp_path, 1 << 20, run=name)
    store.put("x", torch.arange(1000), Tier.NVME)
    store.close(keep=True)
    return tmp_path / name.folder_name


# ---- names ---------------------------------------------------------------------------------------


def test_folders_of_ranks_share_the_run_id_and_are_told_apart(tmp_path: Path) -> None:
    names = [RunName("abc"), RunName("abc", 0), RunName("abc", 12)]
    assert [name.folder_name for name in names] == [
        "tiermem-abc",
        "tiermem-abc.0",
        "tiermem-abc.12",
    ]
    assert [RunName.of(tmp_path / name.folder_name) for name in names] == names
    for other in (
        "tiermem-",
        "tiermem-a.b",
        "tiermem-a.1.2",
        "tiermem-a b",
        "abc",
        "tiermem-abc.x",
    ):
        assert RunName.of(tmp_path / other) is None
    for wrong in (RunName("a/b"), RunName(""), RunName("a.1"), RunName("a", -1)):
        with pytest.raises(ValueError, match="name no folder"):
            wrong.folder_name  # noqa: B018
    assert RunName.new() != RunName.new()


def test_two_ranks_of_a_run_live_side_by_side_and_a_second_of_one_name_is_refused(
    tmp_path: Path,
) -> None:
    with (
        TensorStore(tmp_path, 1 << 20, run=RunName("r", 0)),
        TensorStore(tmp_path, 1 << 20, run=RunName("r", 1)),
    ):
        assert [folder.name for folder in run_folders(tmp_path)] == ["tiermem-r.0", "tiermem-r.1"]
        with pytest.raises(FileExistsError):
            TensorStore(tmp_path, 1 << 20, run=RunName("r", 1))
    assert list(tmp_path.iterdir()) == []


# ---- live, dead, kept ----------------------------------------------------------------------------


def test_lock_says_which_process_holds_it_since_when(tmp_path: Path) -> None:
    with TensorStore(tmp_path, 1 << 20) as store:
        (folder,) = store.folders()
        owner = owner_of(folder)
        assert (
            owner
            == this_process()
            == RunOwner(os.getpid(), socket.gethostname(), this_process().started)
        )
        assert owner is not None
        assert owner.started.endswith("+00:00")
        assert (is_live(folder), is_dead(folder)) == (True, False)
    assert owner_of(folder) is None


def test_live_run_is_refused_and_named(tmp_path: Path) -> None:
    with TensorStore(tmp_path, 1 << 20) as store:
        (folder,) = store.folders()
        for take in (lambda: RunFolder.claim(folder), lambda: share(folder).__enter__()):
            with pytest.raises(
                OSError, match=f"its run lives: process {os.getpid()} on {socket.gethostname()}"
            ) as refusal:
                take()
            assert (refusal.value.errno, refusal.value.filename) == (errno.EBUSY, str(folder))
        assert sorted(file.name for file in folder.iterdir()) == ["lock", "segment.bin"]
        assert owner_of(folder) == this_process()
        with share(folder, RunName.of(folder).run_id):  # type: ignore[union-attr]
            pass  # a rank of the same run reads another's


def test_dead_run_is_taken_over_with_a_word_and_removed(
    dead: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = owner_of(dead)
    assert (is_live(dead), is_dead(dead)) == (False, True)
    with caplog.at_level(logging.WARNING, "tiermem"):
        claimed = RunFolder.claim(dead)
    assert caplog.messages == [
        f"{dead} was left by {owner}, which has ended: its lock is taken over"
    ]
    assert owner_of(dead) == this_process()
    assert (is_live(dead), is_dead(dead)) == (True, False)
    claimed.close(keep=False)
    assert list(dead.parent.iterdir()) == []


def test_dead_run_that_is_kept_is_closed_in_order(dead: Path) -> None:
    RunFolder.claim(dead).close(keep=True)
    assert [file.name for file in dead.iterdir()] == ["segment.bin"]
    assert (is_live(dead), is_dead(dead)) == (False, False)


def test_pid_that_lives_again_does_not_make_a_dead_run_live(dead: Path) -> None:
    (dead / "lock").write_text(
        json.dumps(this_process()._replace(started="2001-01-01T00:00:00+00:00")._asdict())
    )
    assert is_dead(dead)
    RunFolder.claim(dead).close(keep=False)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', "\0" * 5000, "[" * 4000])
def test_lock_that_says_nothing_is_taken_over_all_the_same(dead: Path, text: str) -> None:
    (dead / "lock").write_text(text)
    assert is_dead(dead)
    RunFolder.claim(dead).close(keep=False)
    assert not dead.exists()


def test_kept_run_is_claimed_without_a_word_and_kept_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = kept(tmp_path, RunName("k"))
    with caplog.at_level(logging.WARNING, "tiermem"):
        claimed = RunFolder.claim(folder)
        with pytest.raises(OSError, match="its run lives"):
            RunFolder.claim(folder)
        claimed.close(keep=True)
    assert caplog.text == ""
    assert [file.name for file in folder.iterdir()] == ["segment.bin"]


def test_what_is_no_runs_folder_is_not_claimed(tmp_path: Path) -> None:
    for name in ("tiermem-notes", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").touch()
        with pytest.raises(FileNotFoundError, match="no folder that a run has left"):
            RunFolder.claim(tmp_path / name)
        assert [file.name for file in (tmp_path / name).iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["lock.new", None])
def test_run_that_was_killed_before_it_had_a_lock_is_dead_after_a_while(
    tmp_path: Path, name: str | None
) -> None:
    folder = tmp_path / "tiermem-0123456789ab"
    folder.mkdir()
    if name is not None:
        (folder / name).touch()
    assert not is_dead(folder)  # it may be just beginning
    os.utime(folder, (1e9, 1e9))
    assert is_dead(folder)
    RunFolder.claim(folder).close(keep=False)
    assert not folder.exists()


def test_another_hosts_lock_is_taken_over_only_where_its_flock_is_seen(
    dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dead / "lock").write_text(
        json.dumps({"pid": 7, "host": "elsewhere", "started": "2026-01-01T00:00:00+00:00"})
    )
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "file_system_of", lambda path: "nfs4")
        for take in (lambda: RunFolder.claim(dead), lambda: share(dead).__enter__()):
            with pytest.raises(
                OSError, match=r"process 7 on elsewhere.*nfs4.*Open it on elsewhere; or"
            ) as refusal:
                take()
            assert refusal.value.errno == errno.EBUSY
        assert json.loads((dead / "lock").read_text())["host"] == "elsewhere"
    # a local file system: a container's name may have been another
    RunFolder.claim(dead).close(keep=False)


# ---- together ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_kept", [False, True])
def test_of_processes_that_race_for_one_folder_one_wins(dead: Path, is_kept: bool) -> None:
    if is_kept:
        RunFolder.claim(dead).close(keep=True)

    def race(inside: Inside) -> None:
        inside.wait()
        try:
            claimed = RunFolder.claim(dead)
        except OSError as error:
            inside.say(error.errno)
        else:
            inside.say(f"won {claimed.folder.name}")
        inside.wait()

    racers = [fork(race) for _ in range(4)]
    for racer in racers:
        racer.go()
    told = sorted(racer.hear() for racer in racers)
    assert told == [str(errno.EBUSY)] * 3 + [f"won {dead.name}"]
    assert [racer.kill() for racer in racers] == [-signal.SIGKILL] * 4
    assert is_dead(dead)  # the winner ended without closing
    assert sorted(file.name for file in dead.iterdir()) == ["lock", "segment.bin"]


def test_readers_share_a_folder_and_nobody_takes_it_from_them(dead: Path) -> None:
    with share(dead), share(dead):
        with pytest.raises(OSError, match="another process reads it") as refusal:
            RunFolder.claim(dead)
        assert refusal.value.errno == errno.EBUSY
    claimed = RunFolder.claim(dead)
    with pytest.raises(OSError, match=r"its run lives|taken it over"), share(dead):
        pass
    claimed.close(keep=True)
    with share(dead):
        assert [file.name for file in dead.iterdir()] == ["segment.bin"]  # a reader writes nothing


def test_forked_child_neither_unlocks_nor_keeps_the_lock_when_its_parent_has_died(
    tmp_path: Path,
) -> None:
    def parent(inside: Inside) -> None:
        store = TensorStore(tmp_path, 1 << 20)
        if not os.fork():
            store.close()
            store._files.close(keep=False)
            inside.say(os.getpid())
            signal.pause()
        signal.pause()

    run = fork(parent)
    child = int(run.hear())
    (folder,) = run_folders(tmp_path)
    assert sorted(file.name for file in folder.iterdir()) == ["lock", "segment.bin"]
    assert is_live(folder)
    assert run.kill() == -signal.SIGKILL
    assert is_dead(folder)  # though its child lives
    os.kill(child, signal.SIGKILL)
    RunFolder.claim(folder).close(keep=False)


# ---- what fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["write", "rename"])
def test_lock_that_cannot_be_written_leaves_things_as_they_were(
    tmp_path: Path, dead: Path, kind: str
) -> None:
    def fail(step: durable.Step) -> None:
        if (step.when, step.kind) == ("before", kind):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = (dead / "lock").read_text()
    is_saved = kept(tmp_path, RunName("k"))
    for folder, names in ((dead, ["lock", "segment.bin"]), (is_saved, ["segment.bin"])):
        with durable.watch(fail), pytest.raises(OSError, match="No space left"):
            RunFolder.claim(folder)
        assert sorted(file.name for file in folder.iterdir() if file.name != "lock.new") == names
    assert (is_dead(dead), (dead / "lock").read_text()) == (True, before)
    with durable.watch(fail), pytest.raises(OSError, match="No space left"):
        TensorStore(tmp_path, 1 << 20, run=RunName("new"))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == sorted([dead.name, "tiermem-k"])


def test_folder_deleted_under_a_claim_does_no_harm(
    dead: Path, caplog: pytest.LogCaptureFixture
) -> None:
    claimed = RunFolder.claim(dead)
    for file in dead.iterdir():
        file.unlink()
    dead.rmdir()
    claimed.close(keep=False)
    assert "removed while the run used it" in caplog.text


# ---- removal -------------------------------------------------------------------------------------


def test_only_files_that_runs_make_are_removed_manifests_first(dead: Path) -> None:
    made = ["manifest-3.json", "manifest-3.json.new", "part-3-0.json", "data-3.bin"]
    for name in [*made, "notes.txt", "manifest-x.json", "data.bin"]:
        (dead / name).touch()
    removed: list[str] = []
    claimed = RunFolder.claim(dead)
    with durable.watch(
        lambda step: (
            removed.append(Path(step.name).name)
            if (step.when, step.kind) == ("after", "remove")
            else None
        )
    ):
        claimed.close(keep=False)
    assert removed[0] == "manifest-3.json"
    # so that a removal that is cut short leaves a dead run, not a kept one
    assert removed[-1] == "lock"
    assert sorted(file.name for file in dead.iterdir()) == [
        "data.bin",
        "manifest-x.json",
        "notes.txt",
    ]


def test_dead_run_that_has_saved_is_spared_by_who_started_it(dead: Path) -> None:
    owner = owner_of(dead)
    assert owner is not None
    (dead / "part-1-0.json").touch()
    assert has_saved(dead)
    assert remove_dead_runs([dead.parent], owner.pid) == []
    (dead / "part-1-0.json").unlink()
    assert remove_dead_runs([dead.parent], owner.pid) == [dead]


# ---- what a store leaves -------------------------------------------------------------------------


def test_store_that_is_kept_leaves_its_files_also_after_an_error_and_when_forgotten(
    tmp_path: Path,
) -> None:
    def fail() -> None:
        with TensorStore(tmp_path, 1 << 20, run=RunName("error")) as store:
            store.keep_files()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    TensorStore(tmp_path, 1 << 20, run=RunName("forgotten")).keep_files()
    gc.collect()
    kept(tmp_path, RunName("asked"))
    assert [folder.name for folder in run_folders(tmp_path)] == [
        "tiermem-asked",
        "tiermem-error",
        "tiermem-forgotten",
    ]
    for folder in run_folders(tmp_path):
        assert [file.name for file in folder.iterdir()] == ["segment.bin"]


def test_kept_store_gives_the_disk_back_what_no_freeze_holds(
    tmp_path: Path, pattern: Callable[..., torch.Tensor]
) -> None:
    mib = 1 << 20
    with TensorStore(tmp_path, 8 * mib, num_slots=2) as store:
        store.reserve_disk(32 * mib)
        for name in "abc":
            store.put(name, pattern(mib, seed=ord(name)), Tier.NVME).wait()
        first = store.freeze()
        for name in "ac":
            store.fetch(name).wait().zero_()
            store.release(name, dirty=True)
        store.flush()
        second = store.freeze()  # b where it was, the others in their second slots
        store.thaw(first)
        store.keep_files()
    (file,) = second.files
    assert file.stat().st_blocks * 512 == 3 * mib
    for name in "abc":
        (place,) = second.ranges(name, 0, mib)
        data = pattern(mib, seed=ord("b")) if name == "b" else torch.zeros(mib, dtype=torch.uint8)
        assert file.read_bytes()[place.offset :][:mib] == data.numpy().tobytes()


def test_bytes_of_a_kept_store_are_found_by_its_last_freeze(
    tmp_path: Path, pattern: Callable[..., torch.Tensor]
) -> None:
    with TensorStore(tmp_path, 1 << 20, num_slots=2) as store:
        store.put("x", pattern(5000), Tier.NVME)
        freeze = store.freeze()
        store.fetch("x").wait().zero_()
        store.release("x", dirty=True)
        store.keep_files()
    (place,) = freeze.ranges("x", 0, 5000)
    data = freeze.files[place.path_index].read_bytes()[place.offset :][:5000]
    assert data == pattern(5000).numpy().tobytes()


@pytest.mark.parametrize("is_renamed", [False, True])
def test_an_interrupt_while_a_folder_is_made_leaves_none(
    is_renamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = run_folder._lock

    def interrupted(folder: Path, first: str = "") -> int:
        if is_renamed:
            os.close(lock(folder))
        else:
            folder.joinpath(run_folder._NEW_LOCK).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "_lock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RunFolder.new(tmp_path, RunName("r"))
    assert list(tmp_path.iterdir()) == []
