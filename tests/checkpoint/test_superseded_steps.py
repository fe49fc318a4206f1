"""Does a step that a killed run could no longer remove go with what the same run had put in its
place?"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import model, policy, train

import tiermem
from tiermem import checkpoint
from tiermem.checkpoint.format.finding import tags_of
from tiermem.checkpoint.opening.source import verify_all


def _killed_after_its_tag(tmp_path: Path) -> Path:
    """A run's folder as it is when the run dies between a tag's manifest and the removal of the
    step before, without a tag."""
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path, durability="step")) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1, seed=1)
        checkpoint.wait(shards)
        folder = shards.store.folders()[0]
        shutil.copytree(
            folder, tmp_path / "aside", ignore=shutil.ignore_patterns("segment.bin", "lock")
        )
        checkpoint.save(shards, optimizer, tmp_path / "out", "first")
    shutil.copytree(tmp_path / "aside", folder, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "aside")
    assert len(list(folder.glob("manifest-*.json"))) == 2
    return folder


def test_superseded_step_goes_with_the_tag_that_stands_in_for_it(tmp_path: Path) -> None:
    left = _killed_after_its_tag(tmp_path)
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        checkpoint.load(shards, optimizer, tmp_path / "out")
        train(made, optimizer, 1, seed=2)
        checkpoint.save(shards, optimizer, tmp_path / "out", "second")  # keep=1: the first goes
    assert not left.exists()


def _save(place: Path, tag: str, **how: Any) -> None:
    """A run that saves one tag in place."""
    made = model()
    out = how.pop("out", place / "out")
    with tiermem.shard(made, policy("nvme", place, keep=how.pop("keep", 1))) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, out, tag, **how)


def _check_whole(out: Path, *tags: str) -> None:
    for tag in tags:
        with checkpoint.Source.open(out, tag) as source:
            verify_all(source, lambda _: None)


@pytest.mark.parametrize("name", ["a", "z"])
@pytest.mark.parametrize("how", [{"keep": 2}, {"save_latest": False}])
def test_a_link_to_a_tag_counts_for_nothing(how: dict[str, Any], name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _save(tmp_path, "g1")
    (out / name).symlink_to("g1")
    _save(tmp_path, "g2", **how)
    _check_whole(out, "g1", name, "g2")
    _save(tmp_path, "g3")
    _check_whole(out, "g3")
    assert len(list(tmp_path.glob("tiermem-*"))) == 1  # the link keeps nothing either


def test_a_tag_that_latest_names_by_a_link_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _save(tmp_path, "g1")
    (out / "z").symlink_to("g1")
    (out / "latest").write_text("z")
    _save(tmp_path, "g2", save_latest=False)
    _check_whole(out, "g1", "g2")


def test_a_link_to_a_tag_of_another_folder_drops_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _save(tmp_path, "g1")
    out.rename(tmp_path / "other")
    out.mkdir()
    (out / "g1").symlink_to(tmp_path / "other" / "g1")
    _save(tmp_path, "g2")
    _check_whole(tmp_path / "other", "g1")


@pytest.mark.parametrize("tag", ["g1", "g2"])
@pytest.mark.parametrize("gone", ["", "moved", "removed", "restored"])
def test_a_copy_of_the_folder_drops_nothing_that_the_folder_names(
    tag: str, gone: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "copy"
    _save(tmp_path, "g1")
    shutil.copytree(tmp_path / "out", copy)
    if gone == "moved":
        (tmp_path / "out").rename(tmp_path / "other")
    elif gone == "removed":
        shutil.copytree(copy, tmp_path / "other")
        shutil.rmtree(tmp_path / "out")
    elif gone == "restored":  # under its first name, and here with the number that it had
        shutil.rmtree(tmp_path / "out")
        copy.rename(tmp_path / "other")
        copy = shutil.copytree(tmp_path / "other", tmp_path / "out")
    _save(tmp_path, tag, out=copy)
    _check_whole(tmp_path / ("other" if gone else "out"), "g1")
    _check_whole(copy, tag)
    assert f"{copy / 'g1'}: its states stay in {tmp_path}/tiermem-" in caplog.text


def test_the_oldest_tag_goes_also_where_the_clock_was_set_back(tmp_path: Path) -> None:
    for number in range(4):
        _save(tmp_path, f"t{number}", keep=3)
        os.utime(tmp_path / "out" / f"t{number}" / "tiermem.json", (1e9 - number, 1e9 - number))
    assert tags_of(tmp_path / "out") == ["t3", "t2", "t1"]
    _check_whole(tmp_path / "out", "t1", "t2", "t3")


def test_a_folder_that_was_moved_drops_what_it_names(tmp_path: Path) -> None:
    _save(tmp_path, "g1")
    (tmp_path / "out").rename(tmp_path / "other")
    for tag in ("g2", "g2"):
        _save(tmp_path, tag, out=tmp_path / "other")
    _check_whole(tmp_path / "other", "g2")
    assert len(list(tmp_path.glob("tiermem-*"))) == 1


@pytest.mark.parametrize("tag", ["b", "c"])
def test_a_copied_pointer_takes_no_other_tag_with_it(tag: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _save(tmp_path, "a")
    shutil.copytree(out / "a", out / "b")
    _save(tmp_path, tag, keep=2)
    _check_whole(out, "a", tag)


@pytest.mark.parametrize("how", ["no optimizer", "frozen parameters left out"])
def test_the_step_that_was_opened_stays_until_a_save_can_stand_in_for_it(
    how: str, tmp_path: Path
) -> None:
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path, durability="step")) as shards:
        train(made, tiermem.AdamW(made.parameters(), lr=0.01), 1)
        checkpoint.wait(shards)
        left = shards.store.folders()[0]
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        checkpoint.load(shards, optimizer, left)
        given = None if how == "no optimizer" else optimizer
        checkpoint.save(
            shards, given, tmp_path / "out", "part", exclude_frozen_parameters=given is not None
        )
        with checkpoint.Source.open(left) as source:
            verify_all(source, lambda _: None)
        checkpoint.save(shards, optimizer, tmp_path / "out", "whole")
        assert not left.exists()


def test_folders_that_may_not_be_read_are_left_and_the_save_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, out, kept = os.stat, tmp_path / "out", ""

    def refuse(path: object, **fields: Any) -> os.stat_result:  # root may read everything
        if kept and kept in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **fields)  # type: ignore[call-overload]

    for number in range(2):
        made = model()
        with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
            optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
            train(made, optimizer, 1)
            if number:
                monkeypatch.setattr(os, "stat", refuse)
            checkpoint.save(shards, optimizer, out, f"t{number}")
            if not number:
                kept = shards.store.folders()[0].name
    monkeypatch.undo()
    assert sorted(path.name for path in out.iterdir()) == ["latest", "t0", "t1"]
    with checkpoint.Source.open(out, "t0") as source:
        assert source.manifest.tag == "t0"


@pytest.mark.parametrize("copy", [False, True])
def test_an_earlier_runs_states_go_when_their_tag_is_saved_again(
    copy: bool, tmp_path: Path
) -> None:
    for number in range(3):
        made = model()
        with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
            optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
            train(made, optimizer, 1)
            checkpoint.save(shards, optimizer, tmp_path / "out", "last", copy=copy and number == 2)
        assert len(list(tmp_path.glob("tiermem-*"))) == (0 if copy and number == 2 else 1)
    with checkpoint.Source.open(tmp_path / "out") as source:
        assert source.manifest.tag == "last"


def test_a_run_drops_no_tag_that_another_has_saved_meanwhile(tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        checkpoint.save(shards, optimizer, out, "shared")
        other = model()
        with tiermem.shard(other, policy("nvme", tmp_path)) as others:
            checkpoint.save(others, tiermem.AdamW(other.parameters()), out, "shared", copy=True)
        checkpoint.save(shards, optimizer, out, "own")  # keep=1: its "shared" goes
    for tag in ("shared", "own"):
        with checkpoint.Source.open(out, tag) as source:
            assert source.manifest.tag == tag


@pytest.mark.parametrize(
    "tags", [("t0", "t1"), ("t0", "of/t1"), ("of/t0", "t1"), ("a/b/t0", "t1"), ("a/t0", "a/b/c/t1")]
)
def test_an_earlier_runs_tag_goes_also_for_a_tag_in_a_folder_of_its_own(
    tags: tuple[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for tag in tags:
        _save(tmp_path, tag)
    assert [str(file.parent.relative_to(out)) for file in out.rglob("tiermem.json")] == [tags[1]]
    assert len(list(tmp_path.glob("tiermem-*"))) == 1
    _check_whole(out, tags[1])
