"""Others may have written into the folders of a user. Does any write of ours go through what they
put there?

The list of names is not kept by hand: a first run notes every file that it creates, opens for
writing or renames to. Then each of these names is planted as a link, and everything is run again.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import model, policy, train

import tiermem
from tiermem import checkpoint
from tiermem.swap.disk.durable import NEW_PREFIX
from tiermem.tools.cli import main
from tiermem.tools.record.plots import save_figure
from tiermem.tools.record.run_record import Span, write_trace
from tiermem.tools.words import save_json

PRECIOUS = "precious\n"
_seen: list[tuple[str, int]] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None or event not in ("open", "os.rename", "os.mkdir"):
        return
    name = arguments[1] if event == "os.rename" else arguments[0]
    flags = arguments[2] if event == "open" else os.O_CREAT | os.O_EXCL
    if isinstance(name, str | bytes | os.PathLike) and flags & (
        os.O_CREAT | os.O_WRONLY | os.O_RDWR
    ):
        _seen.append((os.fsdecode(name), flags))


@pytest.fixture(scope="module", autouse=True)
def _hook() -> None:
    sys.addaudithook(_note)  # it cannot be taken off; `_seen` switches it off


@contextlib.contextmanager
def noting() -> Iterator[list[tuple[str, int]]]:
    """The names that Python opens for writing, and its flags."""
    global _seen
    _seen = found = []
    try:
        yield found
    finally:
        _seen = None


def run_all(place: Path) -> None:
    """A training that saves in the store, a copy and the weights; then export, repair, whole copies
    and a run's records.

    A step that a planted name makes impossible ends with an OSError; the others are run all the
    same.
    """
    nvme, saved, out = place / "nvme", place / "saved", place / "out"
    refused = contextlib.suppress(OSError, ValueError)
    made = model()
    with tiermem.shard(made, policy("nvme", nvme)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=1e-2)
        train(made, optimizer, 1)
        for tag, copies in (("t1", False), ("t2", True), ("t3", False)):
            with refused:
                checkpoint.save(shards, optimizer, saved, tag=tag, copy=copies)
                checkpoint.wait(shards)
    for words in ((), ("--pytorch",), ("--dcp",), ("--whole",)):
        with contextlib.suppress(SystemExit):
            main(["export", str(saved), str(out / f"e{''.join(words)}"), "--tag", "t2", *words])
    (saved / "latest").unlink(missing_ok=True)
    with contextlib.suppress(SystemExit):
        main(["fsck", str(saved), "--repair"])
    records = out / "records"
    from matplotlib.figure import Figure

    for write in (
        lambda: save_json(records / "run.json", {"made_by": "test"}),
        lambda: write_trace(records / "trace.json", [Span("unit", "a", 0, 1, 0)]),
        lambda: save_figure(Figure(), records / "loss.png", "test"),
    ):
        with refused:
            write()


def fresh(place: Path) -> Path:
    for each in ("nvme", "saved", "out/records", "out/e", "out/e--pytorch"):
        (place / each).mkdir(parents=True)
    return place


def below(place: Path, seen: list[tuple[str, int]]) -> dict[str, int]:
    """The names below a place without their random part, and flags. A name that came with a
    descriptor is found by its like."""
    found: dict[str, int] = {}
    files = {file.name: str(file.relative_to(place)) for file in place.rglob("*")}
    for name, flags in seen:
        path = Path(re.sub(f"^{NEW_PREFIX}", "", Path(name).name).removesuffix(".new"))
        if Path(name).is_absolute() and place in Path(name).parents:
            found[str(Path(name).parent.relative_to(place) / path)] = flags
        elif not Path(name).is_absolute() and path.name in files:
            found[files[path.name]] = flags
    return found


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    place = fresh(tmp_path_factory.mktemp("first"))
    with noting() as seen:
        run_all(place)
    return below(place, seen)


def test_every_file_is_made_exclusively_or_opened_without_following(names: dict[str, int]) -> None:
    careless = {
        name: oct(flags)
        for name, flags in names.items()
        if flags & os.O_TMPFILE != os.O_TMPFILE
        and not (flags & os.O_CREAT and flags & os.O_EXCL)
        and not flags & os.O_NOFOLLOW
        # torch writes into a folder that was made with a random name
        and ".e--dcp.new/" not in name
    }
    assert careless == {}


def test_the_list_has_what_each_kind_of_write_makes(names: dict[str, int]) -> None:
    told = " ".join(names)
    for name in (
        "saved/latest",
        "tiermem.json",
        "model.safetensors",
        "pytorch_model.bin",
        "run.json",
        "trace.json",
        "loss.png",
    ):
        assert name in told
    assert re.search(r"nvme/tiermem-\w+/segment\.bin", told) and re.search(
        r"saved/t2/data-\w+-\d+-0\.bin", told
    )


@pytest.mark.parametrize("planted", ["ends", "names", "latest"])
def test_no_planted_link_is_followed(names: dict[str, int], tmp_path: Path, planted: str) -> None:
    """Names with the random id of a run cannot be planted. "ends": the names of unfinished files
    were once predictable."""
    predictable = {name for name in names if not re.search(r"[0-9a-f]{12}", name)}
    assert len(predictable) >= 8
    if planted == "ends":
        links = {f"{name}{end}" for name in predictable for end in (".new", ".partial")}
    else:  # a `latest` that cannot be read ends every save
        links = {name for name in predictable if (name == "saved/latest") == (planted == "latest")}
    place, keep = fresh(tmp_path / "place"), tmp_path / "precious"
    keep.write_text(PRECIOUS)
    for name in sorted(links, key=len, reverse=True):  # files before their folders
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(place / name):
            (place / name).symlink_to(keep)
    run_all(place)
    assert keep.read_text() == PRECIOUS
    if planted == "ends":
        # t3 dropped it
        assert all(
            (place / name).exists() for name in predictable if not name.startswith("saved/t1")
        )


def test_a_folder_of_a_tag_that_is_a_link_is_refused(tmp_path: Path) -> None:
    place, other = fresh(tmp_path / "place"), tmp_path / "other"
    other.mkdir()
    (place / "saved" / "t1").symlink_to(other)
    made = model()
    with tiermem.shard(made, policy("nvme", place / "nvme")) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=1e-2)
        train(made, optimizer, 1)
        for copies in (False, True):
            with pytest.raises(NotADirectoryError, match="t1"):
                checkpoint.save(shards, optimizer, place / "saved", tag="t1", copy=copies)
        assert not list(other.iterdir())
        checkpoint.save(shards, optimizer, place / "saved", tag="t2")


def test_run_folders_are_private_and_named_files_follow_the_umask(tmp_path: Path) -> None:
    place, before = fresh(tmp_path / "place"), os.umask(0o022)
    try:
        made = model()
        with tiermem.shard(made, policy("nvme", place / "nvme")) as shards:
            optimizer = tiermem.AdamW(made.parameters(), lr=1e-2)
            train(made, optimizer, 1)
            checkpoint.save(shards, optimizer, place / "saved", tag="t1", copy=True)
            checkpoint.wait(shards)
            (run,) = (place / "nvme").glob("tiermem-*")
            assert stat.S_IMODE(run.stat().st_mode) == 0o700
        modes = {
            stat.S_IMODE(file.stat().st_mode)
            for file in (place / "saved").rglob("*")
            if file.is_file()
        }
        assert modes == {0o644}
    finally:
        os.umask(before)
