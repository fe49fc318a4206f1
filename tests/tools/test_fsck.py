"""Does fsck see what is live, dead, whole and damaged, and does it remove only what it names and
runs made?"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from saved_by_hand import latest_of, rewrite, write

from tiermem.checkpoint.format.finding import read_pointer
from tiermem.swap.base import native
from tiermem.swap.disk.run_folder import remove_dead_runs
from tiermem.swap.store.store import TensorStore
from tiermem.tools.check import find_path
from tiermem.tools.checkpoints import EXIT_DAMAGED, EXIT_DEAD, EXIT_UNREAD, fsck, inspect_checkpoint
from tiermem.tools.cli import main
from tiermem.tools.options import FsckOptions, InspectOptions, TrainOptions
from tiermem.tools.train.train import list_steps
from tiermem.tools.words import STDOUT

SCRIPT = Path(__file__).parent / "leaves_a_run.py"


class Found(NamedTuple):
    """What fsck said."""

    status: int
    text: str


class Left(NamedTuple):
    """What a process has left that was killed: a run with a tag beside it, and a run that had saved
    nothing."""

    saved: Path
    unsaved: Path
    pid: int
    when_live: Found
    refused: str  # the error of --repair while they lived

    @property
    def run(self) -> Path:
        """The folder of the run that had saved."""
        return next(self.saved.glob("tiermem-*"))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    """Killed once for all tests."""
    folder = tmp_path_factory.mktemp("left")
    paths = folder / "saved", folder / "unsaved"
    for path in paths:
        path.mkdir()
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, paths)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            console = Console(markup=False, width=400, file=io.StringIO())
            status = fsck(FsckOptions(folder, removes=True), console)  # live runs stay
            said = console.file.getvalue()  # type: ignore[attr-defined]
            with pytest.raises(OSError, match="tiermem-") as refused:
                fsck(FsckOptions(paths[0], repairs=True), console)
        finally:
            process.send_signal(signal.SIGKILL)
    yield Left(*paths, process.pid, Found(status, said), str(refused.value))
    for path in paths:
        shutil.rmtree(path)


@pytest.fixture
def left(template: Left, tmp_path: Path) -> Iterator[Left]:
    """A copy of it."""
    paths = tmp_path / "saved", tmp_path / "unsaved"
    for source, path in zip(template, paths, strict=False):
        assert isinstance(source, Path)
        shutil.copytree(source, path)
    yield template._replace(saved=paths[0], unsaved=paths[1])
    for path in paths:
        shutil.rmtree(path)


def look(where: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> Found:
    """fsck's exit status and what it prints; it must not wait for a FIFO's other end."""
    capsys.readouterr()
    console = Console(markup=False, width=400, stderr="json_file" in options)
    status = fsck(FsckOptions(where, **options), console)
    return Found(status, capsys.readouterr().out)


def line_of(text: str, what: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(what))


@pytest.mark.slow
def test_live_runs_are_named_and_never_removed(template: Left) -> None:
    status, text = template.when_live
    assert status == 0
    for name in (f"saved/{template.run.name}", "unsaved/tiermem-"):
        assert f" live process {template.pid} on " in " ".join(line_of(text, name).split())
    assert " live " in line_of(text, "saved/global_step2")
    assert "its run lives" in line_of(text, "saved/global_step2")
    assert template.run.is_dir()
    assert "--repair changes nothing here before the run's end" in template.refused


def test_a_killed_runs_step_is_found_and_verified(
    left: Left, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = look(left.saved, capsys, verifies=True)
    assert status == EXIT_DEAD
    assert " dead " in line_of(text, left.run.name)
    assert "global_step2 (latest)" in line_of(text, "global_step2")
    assert "whole, verified" in line_of(text, "global_step2")
    advice = (
        f"was killed; step 2 is durable: resume it, or remove it with tiermem fsck {left.run} "
        "--remove"
    )
    assert advice in text


def test_json_says_the_same(left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    (left.run / "notes.txt").write_text("mine")
    status, text = look(left.saved, capsys, json_file=STDOUT)
    found = json.loads(text)
    assert status == EXIT_DEAD
    (run,) = found["runs"]
    assert (run["state"], run["rank"], run["unknown"]) == ("dead", None, ["notes.txt"])
    (step,) = found["steps"]
    assert (step["state"], step["step"], step["world"], step["run_id"]) == (
        "whole",
        2,
        1,
        run["run_id"],
    )
    assert step["num_bytes"] == 4 * 3 * (33 * 65 * 2 + 33 + 65)  # an fp32 weight and two moments
    assert (
        step["num_bytes"]
        <= run["durable_bytes"]
        == sum(place["own_bytes"] for place in step["places"])
    )
    assert [place["folder"] for place in step["places"]] == [str(left.run)]
    assert run["free_bytes"] > 0 == run["live_bytes"] == run["unclear_bytes"]
    kinds = ("durable_bytes", "live_bytes", "free_bytes", "unclear_bytes", "record_bytes")
    taken = sum(file.stat().st_blocks * 512 for file in left.run.iterdir())
    assert sum(run[kind] for kind in kinds) == run["file_bytes"] == taken
    (path,) = found["paths"]
    assert path == {"path": str(left.saved)} | {name: run[name] for name in ("file_bytes", *kinds)}


def test_the_table_says_whose_the_bytes_are(left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    lines = look(left.saved.parent, capsys).text.splitlines()
    assert lines[1].split("not ours")[0].split() == [
        "folder",
        "state",
        "process",
        "on",
        "the",
        "disk",
        "durable",
        "live",
        "free",
        "unclear",
        "records",
    ]
    assert any(
        line.split()
        == ["path", "on", "the", "disk", "durable", "live", "free", "unclear", "records"]
        for line in lines
    )
    assert any(line.startswith(str(left.unsaved)) for line in lines)
    assert any(
        line.split()[-5:] == ["tensors", "states", "durable", "own", "state"] for line in lines
    )


class Placed(NamedTuple):
    """A piece of a run's part."""

    param: str
    file: Path
    offset: int


def a_state(run: Path) -> Placed:
    """Where a first moment lies."""
    part = json.loads(next(run.glob("part-*.json")).read_text())
    state = next(each for each in part["states"] if each["state"] == "exp_avg")
    _, _, file, offset = state["pieces"][0]
    return Placed(state["param"], run / part["files"][file], offset)


def test_a_flipped_bit_is_found_by_verifying_alone(
    left: Left, capsys: pytest.CaptureFixture[str]
) -> None:
    param, file, offset = a_state(left.run)
    data = bytearray(file.read_bytes())
    data[offset + 5] ^= 4
    file.write_bytes(data)
    assert look(left.saved, capsys).status == EXIT_DEAD
    status, text = look(left.saved, capsys, verifies=True)
    assert status == EXIT_DAMAGED
    assert f"exp_avg of {param}" in text
    assert file.name in text


@pytest.mark.parametrize("victim", ["manifest", "part", "state"])
def test_what_is_cut_is_broken(left: Left, capsys: pytest.CaptureFixture[str], victim: str) -> None:
    _, file, offset = a_state(left.run)
    keep = offset + 5
    if victim != "state":
        file = next(left.run.glob(f"{victim}*"))
        keep = file.stat().st_size - 3
    file.write_bytes(file.read_bytes()[:keep])
    for where in (left.saved, left.saved / "global_step2", left.run):
        status, text = look(where, capsys)
        assert status == EXIT_DAMAGED
        assert " broken " in text
        assert file.name in text


def test_a_run_with_a_durable_step_goes_only_when_it_is_named(
    left: Left, capsys: pytest.CaptureFixture[str]
) -> None:
    run = left.run
    status, text = look(left.saved, capsys, removes=True)
    assert status == EXIT_DEAD
    assert run.is_dir()
    assert "step 2 is durable" in text
    status, text = look(run, capsys, removes=True)
    assert status == 0
    assert f"removing {run}, left by process {left.pid}" in text
    assert not run.exists()
    assert look(left.saved, capsys).status == EXIT_DAMAGED  # its tag points at what is gone


def test_a_killed_run_without_a_step_is_removed(
    left: Left, capsys: pytest.CaptureFixture[str]
) -> None:
    run = next(left.unsaved.glob("tiermem-*"))
    (run / "notes.txt").write_text("mine")
    (left.unsaved / "other.bin").write_text("mine")
    status, text = look(left.unsaved, capsys)
    assert status == EXIT_DEAD
    assert "no durable step: nothing can be resumed. --remove removes it" in text
    _, text = look(left.unsaved, capsys, removes=True)
    assert f"{run} stays: notes.txt in it was made by no run" in text
    assert "--remove removes it" not in text
    assert "no killed run lies here" in look(left.unsaved, capsys, removes=True).text
    assert [file.name for file in run.iterdir()] == ["notes.txt"]  # only what runs make goes
    assert (left.unsaved / "other.bin").exists()


def killed_on_two_paths(folder: Path, saves: bool) -> list[Path]:
    """The folders of a killed run, which may have saved: copies of a run that lives."""
    paths = [folder / "a", folder / "b"]
    for path in paths:
        path.mkdir(parents=True)
    with TensorStore(paths) as store:
        folders = list(store.folders())
        for each in folders:
            shutil.copytree(each, folder / "copy" / each.parent.name / each.name)
    for path in paths:
        shutil.rmtree(path)
        (folder / "copy" / path.name).rename(path)
    if saves:
        (folders[0] / "manifest-1.json").write_text("its parts lie on both paths")
    return folders


def test_each_path_of_a_killed_run_that_saved_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its manifest lies on the first path alone."""
    first, further = killed_on_two_paths(tmp_path, saves=True)
    status, text = look(further.parent, capsys, removes=True)
    assert (status, further.is_dir()) == (EXIT_DEAD, True)
    assert (
        f"lie on another path of the run: mount its disks, or lose them with tiermem fsck {further} --remove"
        in text
    )
    further.parent.rename(tmp_path / "not mounted")
    look(first.parent, capsys, removes=True)
    assert first.is_dir()
    (tmp_path / "not mounted").rename(further.parent)
    assert remove_dead_runs([first.parent, further.parent], os.getpid()) == []
    first.rename(tmp_path / "elsewhere")
    assert remove_dead_runs([further.parent], os.getpid()) == []
    look(further, capsys, removes=True)
    assert not further.exists()


def test_each_path_of_a_killed_run_that_saved_nothing_goes(tmp_path: Path) -> None:
    folders = killed_on_two_paths(tmp_path, saves=False)
    assert remove_dead_runs([each.parent for each in folders], os.getpid()) == folders


@pytest.mark.parametrize("names", [(), ("lock.new",)])
def test_a_run_killed_before_it_had_a_lock_is_removed(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "tiermem-0123456789ab"
    run.mkdir()
    for name in names:
        (run / name).touch()
    os.utime(run, (0, 0))
    assert look(tmp_path, capsys)[0] == EXIT_DEAD
    look(tmp_path, capsys, removes=True)
    assert not run.exists()


def test_checkpoints_are_looked_at_tag_by_tag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        write(
            tmp_path,
            {"w": {"weight": torch.arange(5000.0), "exp_avg": torch.ones(5000)}},
            f"t{number}",
            commit=number,
        )
    assert look(tmp_path, capsys, verifies=True)[0] == 0
    file = next((tmp_path / "t2").glob("part-*.json"))
    file.write_bytes(file.read_bytes().replace(b"exp_avg", b"exp_avh", 1))
    status, text = look(tmp_path, capsys)
    assert status == EXIT_DAMAGED
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("t")}
    assert " whole" in lines["t1"]
    assert " broken " in lines["t2"]
    assert "it is damaged" in lines["t2"]
    (tmp_path / "latest").write_text("t3")
    assert "names 't3', which is not there" in look(tmp_path, capsys)[1]


def test_an_empty_folder_is_clean_and_no_folder_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = look(tmp_path, capsys)
    assert status == 0
    assert "no run and no durable step" in text
    with pytest.raises(FileNotFoundError, match="no such folder"):
        look(tmp_path / "nowhere", capsys)


def test_inspect_lists_every_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = {
        "a.weight": {
            "weight": torch.randn(3, 5).bfloat16(),
            "master": torch.randn(3, 5),
            "exp_avg": torch.randn(3, 5),
        },
        "b": {"weight": torch.tensor(1.0)},
    }
    write(tmp_path, states, world=2, step=7)
    console = Console(markup=False, width=400)
    assert inspect_checkpoint(InspectOptions(tmp_path), console) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 7" in lines[0]
    assert "2 ranks" in lines[0]
    row = next(line for line in lines if "a.weight" in line)
    assert row.startswith("pts  3 x 5")
    assert "weight:bf16 master:fp32 exp_avg:fp32" in row
    assert "150" in row
    assert lines[-1].startswith("2 tensors, 154 B: weight 34 B, master 60 B, exp_avg 60 B")
    asked = InspectOptions(tmp_path, patterns=["b*"], json_file=STDOUT)
    assert inspect_checkpoint(asked, Console(quiet=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert [tensor["name"] for tensor in found["tensors"]] == ["b"]
    assert found["totals"] == {"weight": 4}
    with pytest.raises(ValueError, match=r"no tensor of .* is named c"):
        inspect_checkpoint(InspectOptions(tmp_path, patterns=["c"]), console)


PLACES = [
    "tiermem-*/manifest-*",
    "tiermem-*/part-*",
    "tiermem-*/segment.bin",
    "global_step2/tiermem.json",
    "latest",
]


@pytest.mark.parametrize("put", ["fifo", "link", "circle"])
@pytest.mark.parametrize("place", [*PLACES, "tiermem-*/lock"])
def test_what_is_no_regular_file_is_named_at_once(
    left: Left, capsys: pytest.CaptureFixture[str], place: str, put: str
) -> None:
    file = next(left.saved.glob(place))
    file.rename(left.saved / "elsewhere")
    if put == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to(left.saved / "elsewhere" if put == "link" else file)
    signal.alarm(20)  # a wait ends the test run, and is not waited for
    try:
        for where in (left.saved, file.parent):
            status, text = look(where, capsys, verifies=True)
            assert status == (
                EXIT_DEAD
                if file.name == "lock"
                else EXIT_DAMAGED
                if where == left.saved
                else status
            )
            if file.name != "lock":
                assert f"{file.name}: is a " in text
    finally:
        signal.alarm(0)


def test_a_folder_that_leads_to_itself_is_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    (tmp_path / "manifest-1.json").symlink_to(tmp_path / "manifest-1.json")
    status, text = look(tmp_path, capsys)
    assert (status, " broken " in text) == (EXIT_DAMAGED, True)
    with pytest.raises(NotADirectoryError):
        look(tmp_path / "round", capsys)


def test_a_file_with_a_run_s_name_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiermem-6c11e906ebea").touch()
    os.mkfifo(tmp_path / "tiermem-6c11e906ebeb")
    assert look(tmp_path, capsys) == (0, f"{tmp_path}: no run and no durable step\n")


def plant(path: Path) -> Path:
    """What others may leave on a shared path, beside a killed run that is returned."""
    elsewhere = path.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "segment.bin").write_text("precious")
    for number, kind in enumerate(
        ("link", "dangling", "circle", "folder", "fifo", "socket", "link to a lock")
    ):
        run = path / f"tiermem-bbb{number}"
        lock = run / "lock"
        if kind in ("link", "dangling", "circle"):
            run.symlink_to({"link": elsewhere, "dangling": path / "nothing", "circle": run}[kind])
            continue
        run.mkdir()
        if kind == "folder":
            lock.mkdir()
        elif kind == "fifo":
            os.mkfifo(lock)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(os.path.relpath(lock))
        else:
            lock.symlink_to(elsewhere / "segment.bin")
        (run / "segment.bin").symlink_to(elsewhere / "segment.bin")
        (run / "manifest-1.json").mkdir()
    (path / os.fsdecode(b"tiermem-\xff")).mkdir()
    (path / "tiermem-cc\n\x1b[2Jcc").mkdir()
    dead = path / "tiermem-0123"
    dead.mkdir()
    (dead / "lock").write_text(
        json.dumps({"pid": 1, "host": "x\x1b]0;owned\x07", "started": "\x1b[31m"})
    )
    (dead / os.fsdecode(b"odd\x1b[2J\xff")).touch()
    (dead / "segment.bin").write_bytes(b"x" * 4096)
    return dead


@pytest.mark.parametrize("where", ["the path", "a link to it", "a link to a run"])
def test_what_others_leave_on_a_path_never_stops_fsck(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.chdir(tmp_path)
    dead, link = plant(path), tmp_path / "link"
    link.symlink_to(path if where == "a link to it" else dead)
    signal.alarm(20)
    try:
        for words in ([], ["--json"], ["--verify"], ["--remove"]):
            with pytest.raises(SystemExit) as ended:
                main(["fsck", str(path if where == "the path" else link), *words])
            said = capsys.readouterr()
            assert ended.value.code in (EXIT_DEAD, EXIT_DAMAGED), said.err
            assert not re.search(
                r"[^\n -~]", said.out + said.err.encode("ascii", "backslashreplace").decode()
            )
            if not words:
                assert r"x\x1b]0;owned\x07" in "".join(said.out.split())  # a cell may be folded
    finally:
        signal.alarm(0)
    assert not (dead / "lock").exists() and not (dead / "segment.bin").exists()
    assert (tmp_path / "elsewhere" / "segment.bin").read_text() == "precious"
    shutil.rmtree(path)


def test_what_others_leave_on_a_path_stops_neither_a_run_nor_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "path"
    path.mkdir()
    plant(path)
    signal.alarm(60)
    try:
        with TensorStore(path):
            pass
        assert remove_dead_runs([path], 1) == []
        assert next(iter(find_path(path))).what == "path"
        assert list_steps(TrainOptions(runs=path), Console(file=io.StringIO())) == 0
    finally:
        signal.alarm(0)
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
def test_the_runs_of_another_user_are_told_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "path"
    dead = path / "tiermem-0123"
    dead.mkdir(parents=True)
    (dead / "lock").write_text("{}")
    (path / "tiermem-4567").mkdir(mode=0o700)
    for each in (path, dead, tmp_path, *tmp_path.parents[:-2]):
        each.chmod(0o755)
    console = Console(markup=False, width=400, file=io.StringIO())
    os.seteuid(65534)
    try:
        status = fsck(FsckOptions(path), console)
    finally:
        os.seteuid(0)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert status == EXIT_UNREAD
    assert "tiermem-4567: Permission denied: not looked at" in said and "tiermem-0123" in said
    shutil.rmtree(path)


def test_what_the_machine_lacks_is_no_damage(
    left: Left, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under pids.max=1, where no queue's thread can start."""

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(
            errno.EAGAIN, "no I/O queue (engine 'auto'): Resource temporarily unavailable"
        )

    monkeypatch.setattr(native.Queue, "__init__", refuse)
    status, text = look(left.saved, capsys, verifies=True, removes=True)
    assert status == EXIT_UNREAD
    assert "unread" in text and "no I/O queue" in text and "None" not in text
    assert left.run.is_dir(), "a step that was not seen may be whole: its run stays"


def test_a_folder_that_may_not_be_read_is_told_and_the_rest_is_looked_at(
    left: Left, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate, closed = Path.iterdir, left.saved / "lost+found"
    closed.mkdir()

    def refuse(folder: Path) -> Iterator[Path]:  # root reads everything
        if folder == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return iterate(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)
    status, text = look(left.saved, capsys)
    assert status == EXIT_UNREAD
    assert "lost+found: Permission denied: not looked at" in text
    assert " whole" in line_of(text, "global_step2")


def cut_short(left: Left, name: str = "older") -> Path:
    """A tag whose removal stopped between its manifest and its pointer."""
    shutil.copytree(left.saved / "global_step2", left.saved / name)
    file = left.saved / name / "tiermem.json"
    rewrite(file, tag=name, file="manifest-999.json", commit=999)
    return file


def test_a_removal_that_was_cut_short_is_ended_by_repair(
    left: Left, capsys: pytest.CaptureFixture[str]
) -> None:
    pointer = cut_short(left)
    status, text = look(left.saved, capsys)
    assert status == EXIT_DEAD
    assert " removed " in line_of(text, "older") and "--repair" in line_of(text, "older")
    assert pointer.exists()
    status, text = look(left.saved, capsys, repairs=True, json_file=STDOUT)
    assert status == EXIT_DEAD  # of the killed run
    assert json.loads(text)["repaired"] == [
        f"{pointer.parent}: the pointer of a removed step is removed"
    ]
    assert not pointer.parent.exists()
    assert [step["state"] for step in json.loads(text)["steps"]] == ["whole"]


def test_a_pointer_to_a_disk_that_is_not_there_stays(
    left: Left, capsys: pytest.CaptureFixture[str]
) -> None:
    pointer = cut_short(left)
    rewrite(pointer, folder=str(left.saved.parent / "unmounted" / "tiermem-1"))
    assert look(left.saved, capsys, repairs=True).status == EXIT_DAMAGED
    assert read_pointer(pointer)[0].commit == 999


def test_exchanged_tags_are_broken_and_stay_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        write(tmp_path, {"w": {"weight": torch.arange(50.0)}}, f"t{number}", commit=number)
    for old, new in (("t1", "aside"), ("t2", "t1"), ("aside", "t2")):
        (tmp_path / old).rename(tmp_path / new)
    for repairs in (False, True):
        status, text = look(tmp_path, capsys, repairs=repairs)
        assert status == EXIT_DAMAGED and "repaired" not in text
        assert (
            "is of step 2 (tag 't2', run byhand, commit 2), in the folder of tag 't1'"
            in line_of(text, "t1")
        )
        assert (
            "is of step 1 (tag 't1', run byhand, commit 1), in the folder of tag 't2'"
            in line_of(text, "t2")
        )


@pytest.mark.parametrize("latest", [None, "t9", "../x", "{"])
def test_a_lost_latest_is_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], latest: str | None
) -> None:
    for number in (1, 2, 3):
        folder = write(tmp_path, {"w": {"weight": torch.arange(50.0)}}, f"t{number}", commit=number)
        os.utime(next(folder.glob("manifest-*")), (number, number))
    next((tmp_path / "t3").glob("part-*")).unlink()
    (tmp_path / "latest").unlink()
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    status, text = look(tmp_path, capsys, repairs=True)
    assert status == EXIT_DAMAGED  # t3 is
    assert f"repaired {tmp_path / 'latest'}: names 't2' again" in text
    assert latest_of(tmp_path) == "t2"
    assert "repaired" not in look(tmp_path, capsys, repairs=True).text
