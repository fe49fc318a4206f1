"""Does what a killed save has left in a tag's folder go with the next save, and nothing else?"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
from runs import model, policy

import tiermem
from tiermem import checkpoint
from tiermem.checkpoint.format.manifest import Pointer
from tiermem.checkpoint.saving import publish
from tiermem.checkpoint.saving.copies import remove_other_copies
from tiermem.checkpoint.saving.publish import SavingInto, remove_unfinished
from tiermem.ranks.topology import Topology
from tiermem.swap.disk.durable import NewFile

DATA, PART, MANIFEST = "data-0a1b2c-3-0.bin", "part-0a1b2c-3-1.json", "manifest-0a1b2c-3.json"


def _make(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


def test_copy_without_manifest_is_removed_with_its_folder(tmp_path: Path) -> None:
    new = [f"0123456789ab.{name}.new" for name in (PART, "tiermem.json", "latest")]
    tag = _make(tmp_path / "step3", DATA, PART, *new[:2], PART + ".new", "tiermem.json.new")
    (tmp_path / new[2]).touch()
    with NewFile(tmp_path / "latest") as written:  # by a process that lives
        remove_unfinished(tmp_path)
        assert not tag.exists()
        assert [file.name for file in tmp_path.iterdir()] == [written.name.name]


def test_files_of_others_stay(tmp_path: Path) -> None:
    tag = _make(tmp_path / "step3", DATA, "notes.txt")
    empty = _make(tmp_path / "empty")
    # begins to save for the first time
    run = _make(tmp_path / "tiermem-0a1b2c", "part-2-0.json", "data-2.bin")
    remove_unfinished(tmp_path)
    assert [file.name for file in tag.iterdir()] == ["notes.txt"]
    assert empty.is_dir() and len(list(run.iterdir())) == 2


def test_copy_with_manifest_and_no_pointer_stays(tmp_path: Path) -> None:
    tag = _make(tmp_path / "step3", DATA, PART, MANIFEST)
    remove_unfinished(tmp_path)
    assert len(list(tag.iterdir())) == 3


def test_beside_a_pointer_only_what_it_names_stays(tmp_path: Path) -> None:
    tag = _make(tmp_path / "step3", DATA, PART, MANIFEST, "data-77-1-0.bin")
    (tag / "tiermem.json").write_bytes(
        Pointer("0a1b2c", 3, ".", MANIFEST, 1, 0, "t", 3, "s", 1).dump()
    )
    remove_unfinished(tmp_path)
    assert sorted(file.name for file in tag.iterdir()) == sorted(
        [DATA, PART, MANIFEST, "tiermem.json"]
    )


def test_folder_that_is_saved_into_stays_until_that_ends(tmp_path: Path) -> None:
    with contextlib.ExitStack() as undo:
        saving = SavingInto(tmp_path / "step3", undo)
        (tmp_path / "step3" / DATA).write_bytes(b"x")
        remove_unfinished(tmp_path)
        assert (tmp_path / "step3" / DATA).exists()
        saving.close()
        remove_unfinished(tmp_path)
        assert not (tmp_path / "step3").exists()


def test_a_copy_of_a_tag_of_several_parts_goes_with_the_next(tmp_path: Path) -> None:
    left = tmp_path / "out" / "a" / "b"
    left.mkdir(parents=True)
    tag = _make(left / "t1", DATA)
    made = model()
    with tiermem.shard(made, policy("cpu", tmp_path)) as shards:
        checkpoint.save(shards, None, tmp_path / "out", "a/b/t2")
    assert not tag.exists()


def test_a_copy_leaves_what_another_run_saves_under_its_tag(tmp_path: Path) -> None:
    own = ["data-77-1-0.bin", "manifest-77-1.json", "data-77-2-0.bin", "manifest-77-2.json"]
    tag = _make(tmp_path / "t", *own, DATA, PART, MANIFEST)
    topology = Topology(None, 0, 1, 1, 0)
    pointer = Pointer("77", 2, ".", own[3], 1, 0, "t", 3, "s", 1)
    (tag / "tiermem.json").write_bytes(pointer.dump())
    with contextlib.ExitStack() as undo:
        other = SavingInto(tag, undo)
        remove_other_copies(tag, "77", 2, topology)
        due = sorted([*own[2:], DATA, PART, MANIFEST, "tiermem.json"])
        assert sorted(file.name for file in tag.iterdir()) == due
        other.close()
    # the other run has published meanwhile: the pointer names its copy
    (tag / "tiermem.json").write_bytes(
        dataclasses.replace(pointer, run_id="0a1b2c", commit=3, file=MANIFEST).dump()
    )
    remove_other_copies(tag, "77", 2, topology)
    due = sorted([DATA, PART, MANIFEST, "tiermem.json"])
    assert sorted(file.name for file in tag.iterdir()) == due


def test_nothing_is_removed_where_another_host_may_be_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "is_of_one_host", lambda folder: False)
    tag = _make(tmp_path / "step3", DATA)
    remove_unfinished(tmp_path)
    assert (tag / DATA).exists()
