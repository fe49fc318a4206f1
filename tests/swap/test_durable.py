"""Wherever a file operation stops: is there the old content or the new, whole, and is every step
announced in order?"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from tiermem.swap.disk import durable
from tiermem.swap.disk.durable import Step


class Stopped(Exception):
    """A program that ends here."""


def steps_of(path: Path) -> list[Step]:
    """The steps, without the random part of names."""
    seen: list[Step] = []
    with durable.watch(seen.append):
        durable.write_file(path, b"new")
    return [
        each._replace(name=re.sub(f"(?<=/){durable.NEW_PREFIX}", "", each.name)) for each in seen
    ]


def stop_at(number: int) -> durable.Observer:
    seen: list[Step] = []

    def stop(step: Step) -> None:
        seen.append(step)
        if len(seen) == number + 1:
            raise Stopped

    return stop


def test_write_file_writes_syncs_renames_and_syncs_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    new = str(path) + ".new"
    done = [("write", new), ("sync", new), ("rename", str(path)), ("sync", str(tmp_path))]
    assert steps_of(path) == [
        Step(when, kind, name) for kind, name in done for when in ("before", "after")
    ]  # type: ignore[arg-type]
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["m.json"]


def test_file_is_old_or_new_and_whole_wherever_writing_stops(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    steps = steps_of(path)
    renamed = steps.index(Step("after", "rename", str(path)))
    for number in range(len(steps)):
        path.write_bytes(b"old")
        with pytest.raises(Stopped), durable.watch(stop_at(number)):
            durable.write_file(path, b"new")
        assert path.read_bytes() == (b"old" if number < renamed else b"new")
        # an error, unlike a kill, leaves no .new
        assert [file.name for file in tmp_path.iterdir()] == ["m.json"]


@pytest.mark.parametrize("kind", ["write", "sync", "rename"])
def test_error_names_the_file_and_leaves_the_old_one(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(b"old")

    def fail(step: Step) -> None:
        if (step.when, step.kind) == ("before", kind):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with durable.watch(fail), pytest.raises(OSError, match="No space left") as failure:
        durable.write_file(path, b"new")
    assert (failure.value.errno, failure.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["m.json"]


@pytest.mark.parametrize("call", ["open", "close"])
def test_no_descriptor_is_needed_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path, close = tmp_path / "m.json", os.close

    def break_it(step: Step) -> None:
        if (step.when, step.kind) == ("after", "rename"):
            monkeypatch.setattr(os, call, broken)

    def broken(fd: object, *_: object) -> int:
        if call == "close":
            close(fd)  # as Linux does, whatever it answers
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with durable.watch(break_it):
        durable.write_file(path, b"new")
    monkeypatch.undo()
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("m.json", b"new")]


def test_a_new_file_opens_nothing_that_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if it could be guessed
    monkeypatch.setattr(durable.secrets, "token_hex", lambda _: "0" * 12)
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    for planted in ("m.json", "000000000000.x.json.new"):
        (tmp_path / planted).symlink_to(precious)
    durable.write_file(tmp_path / "m.json", b"new")
    with pytest.raises(FileExistsError):
        durable.write_file(tmp_path / "x.json", b"new")
    os.close(durable.create_anew(tmp_path / "m.json"))
    with pytest.raises(FileExistsError):
        durable.create(tmp_path / "000000000000.x.json.new")
    assert precious.read_bytes() == b"precious" and not (tmp_path / "m.json").is_symlink()


def test_folder_of_a_new_file_is_opened_once(tmp_path: Path) -> None:
    """A folder that is exchanged for a link meanwhile gets nothing."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir(), other.mkdir()

    def exchange(step: Step) -> None:
        if (step.when, step.kind) == ("before", "write"):
            folder.rename(tmp_path / "moved")
            folder.symlink_to(other)

    with durable.watch(exchange):
        durable.write_file(folder / "m.json", b"new")
    assert not list(other.iterdir())
    assert [each.name for each in (tmp_path / "moved").iterdir()] == ["m.json"]


def test_large_file_is_written_whole(tmp_path: Path) -> None:
    data = os.urandom(3_000_001)
    durable.write_file(tmp_path / "x", data)
    assert (tmp_path / "x").read_bytes() == data
    durable.write_file(tmp_path / "x", b"")
    assert (tmp_path / "x").read_bytes() == b""


@pytest.mark.parametrize("name", ["a" * 255, "\u6b65" * 85, "a" + "\u00e9" * 127])
def test_a_name_may_have_all_bytes_that_a_file_system_takes(name: str, tmp_path: Path) -> None:
    durable.write_file(tmp_path / name, b"new")
    assert (tmp_path / name).read_bytes() == b"new"
    assert os.listdir(tmp_path) == [name]


def test_folders_are_made_and_synced_from_above(tmp_path: Path) -> None:
    seen: list[Step] = []
    with durable.watch(seen.append):
        durable.make_folder(tmp_path / "a" / "b")
        durable.make_folder(tmp_path / "a" / "b")  # is there
    told = [(step.kind, Path(step.name).name) for step in seen if step.when == "after"]
    assert told == [("folder", "a"), ("sync", tmp_path.name), ("folder", "b"), ("sync", "a")]


@pytest.mark.parametrize("below", [".", "a/b"])
def test_a_folder_is_not_made_where_a_file_is(tmp_path: Path, below: str) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(NotADirectoryError, match=r"is a file .* where a folder is due") as refusal:
        durable.make_folder(tmp_path / "x" / below)
    assert refusal.value.filename == str(tmp_path / "x")


def test_remove_syncs_the_folder_and_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    seen: list[Step] = []
    with durable.watch(seen.append):
        durable.remove(tmp_path / "x")
        with pytest.raises(FileNotFoundError):
            durable.remove(tmp_path / "x")
    told = [(step.when, step.kind) for step in seen]
    assert told == [
        ("before", "remove"),
        ("after", "remove"),
        ("before", "sync"),
        ("after", "sync"),
        ("before", "remove"),
    ]


def test_nobody_is_told_after_the_watch_is_over(tmp_path: Path) -> None:
    seen: list[Step] = []
    with durable.watch(seen.append):
        assert durable.is_watched()
    assert not durable.is_watched()
    durable.write_file(tmp_path / "x", b"1")
    assert seen == []


def test_a_descriptor_is_closed_once_when_its_owner_is_gone(tmp_path: Path) -> None:
    own = durable.opened(tmp_path)
    fd = own[0]
    with own as given:
        assert given == fd
    own.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    lost = durable.opened(tmp_path)
    again = lost[0]
    del lost  # as an exception does whose traceback is gone
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(again)


def test_a_descriptor_is_closed_after_its_module_was_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = durable.opened(tmp_path)
    fd = own[0]
    monkeypatch.setattr(durable, "os", None)  # as an interpreter does that ends
    own.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_new_file_that_nothing_closes_leaves_no_descriptor(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    durable.NewFile(tmp_path / "file")
    assert os.listdir("/proc/self/fd") == before
