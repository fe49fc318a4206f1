"""When an export fails, is the error what went wrong, and is nothing left of it, whatever the
format?"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import error_of, failing, files_below, model, policy, train

import tiermem
from tiermem import checkpoint
from tiermem.checkpoint.interchange.export import export_dcp, export_weights
from tiermem.checkpoint.interchange.from_torch import read_torch
from tiermem.checkpoint.interchange.whole import export_whole
from tiermem.checkpoint.interchange.write import write_checkpoint
from tiermem.checkpoint.opening.source import weights_of
from tiermem.checkpoint.opening.verified import DamagedState
from tiermem.checkpoint.saving.publish import SavingInto
from tiermem.swap.disk.durable import NewFile

Export = Callable[[checkpoint.Source, Path], object]

WAYS: dict[str, Export] = {
    "safetensors": lambda source, out: export_weights(weights_of(source), out, 3000, config="{}"),
    "bin": lambda source, out: export_weights(weights_of(source), out, 3000, is_safetensors=False),
    "dcp": lambda source, out: export_dcp(source, out),
}
COPIES: dict[str, Export] = {
    "whole": lambda source, out: export_whole(source.place.parent, out),
    "import": lambda source, out: write_checkpoint(
        read_torch(source.place.parents[1] / "plain"), out, "t"
    ),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A complete copy of a small model after a step."""
    made = model()
    with tiermem.shard(made, policy("cpu", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, tmp_path / "saved", "t")
    return tmp_path / "saved"


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_state_ends_the_export_and_is_what_is_raised(
    tmp_path: Path, saved: Path, way: str
) -> None:
    with checkpoint.Source.open(saved) as source:
        (file,) = source.files("embed.weight", "weight")
        file.write_bytes(bytes(file.stat().st_size))
        with pytest.raises(DamagedState, match="not what was saved at step 1"):
            WAYS[way](source, tmp_path / "out" / "x")
    assert not list(files_below(tmp_path / "out"))


@pytest.mark.parametrize("way", WAYS | COPIES)
@pytest.mark.parametrize("kind", ["rename", "sync"])
def test_an_export_that_fails_at_any_step_leaves_nothing(
    tmp_path: Path, saved: Path, way: str, kind: str
) -> None:
    """No file, no folder; beside an older checkpoint, that one and its `latest`."""
    act = (WAYS | COPIES)[way]
    out = tmp_path / "out" / "x" / "y"
    (tmp_path / "out").mkdir()
    with checkpoint.Source.open(saved) as source:
        export_weights(weights_of(source), tmp_path / "plain", None)
        if way in COPIES:
            write_checkpoint(read_torch(tmp_path / "plain"), out, "older")
        before = content_of(tmp_path / "out")
        for number in range(1, 40):
            with failing(kind, "", number, errno.EIO):
                error = error_of(lambda: act(source, out))
            if error is None:
                break
            assert (error.errno, str(error.filename).startswith(str(tmp_path / "out"))) == (
                errno.EIO,
                True,
            )
            assert "it fails" in str(error)
            assert content_of(tmp_path / "out") == before, number
    assert number > 1 and len(content_of(out)) > len(before)


def content_of(folder: Path) -> dict[str, bytes]:
    """Every folder, and every file with its bytes."""
    return {
        str(each.relative_to(folder)): each.read_bytes() if each.is_file() else b""
        for each in folder.rglob("*")
    }


@pytest.mark.parametrize("leads", [True, False])
def test_a_folder_of_dcp_takes_no_link_s_place(tmp_path: Path, saved: Path, leads: bool) -> None:
    """It is refused before anything is written; the folder would replace the link by a rename."""
    (tmp_path / "far").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "far" if leads else tmp_path / "nowhere")
    with checkpoint.Source.open(saved) as source:
        with pytest.raises(FileExistsError, match="is a link or a mount point; name a new folder"):
            export_dcp(source, link)
        export_dcp(source, tmp_path / "far" / "new")
    assert not (tmp_path / "nowhere").exists()


def test_what_a_killed_export_left_goes_with_the_next_one(tmp_path: Path, saved: Path) -> None:
    """Unless a process writes it, or it is another's."""
    out = tmp_path / "out"
    out.mkdir()
    left, other = out / "0123456789ab.model.safetensors.new", out / "mine.model.safetensors.new"
    for file in (left, other):
        file.touch()
    with checkpoint.Source.open(saved) as source, NewFile(out / "model.safetensors") as held:
        export_weights(weights_of(source), out, None)
        assert not left.exists()
        assert {held.name, other, out / "model.safetensors"} == {*out.iterdir()}


@pytest.mark.parametrize("way", ["dcp", *COPIES])
def test_what_a_killed_export_of_a_folder_left_goes_with_the_next_one(
    tmp_path: Path, saved: Path, way: str
) -> None:
    """Unless a process writes it, or it is another's."""
    named = "out" if way == "dcp" else "out/t"
    folder = tmp_path / named
    left, held, other = (
        folder.with_name(f"{start}.{folder.name}.new") for start in ("0" * 12, "1" * 12, "mine")
    )
    for each in (left, held, other):
        each.mkdir(parents=True)
        (each / "data").touch()
    with (
        checkpoint.Source.open(saved) as source,
        contextlib.closing(SavingInto(held, contextlib.ExitStack())),
    ):
        export_weights(weights_of(source), tmp_path / "plain", None)
        (WAYS | COPIES)[way](source, tmp_path / "out")
    assert folder.is_dir() and not left.exists()
    assert held.is_dir() and other.is_dir()


def test_an_import_that_cannot_be_named_latest_leaves_nothing(tmp_path: Path, saved: Path) -> None:
    with checkpoint.Source.open(saved) as source:
        export_weights(weights_of(source), tmp_path / "plain", None)
    foreign = read_torch(tmp_path / "plain")
    for kind, name in [
        ("rename", "latest"),
        ("rename", "tag"),
        ("write", "latest.new"),
        ("sync", ".bin"),
    ]:
        with failing(kind, name, code=errno.EIO), pytest.raises(OSError, match="it fails"):
            write_checkpoint(foreign, tmp_path / "out", "tag")
        assert not (tmp_path / "out").exists()
    write_checkpoint(foreign, tmp_path / "out", "tag")
