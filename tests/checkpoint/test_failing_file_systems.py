"""When a file system turns read-only or fills up, is what was saved untouched, and does a run go on
from it to the bit?

Every test has file systems of its own on loop devices; the faults are the kernel's, and the tests
are skipped, with the reason, where mounting is not allowed. The same faults without a mount:
test_save_faults.py. While files are open for writing the kernel refuses `mount -o remount,ro`; what
turns a file system read-only under a run is an error that it finds in itself, and that is what is
set off here.

    what happens                        read-only                full
    a store is made                     here                     here, test_failing_disks (swap)
    a step                              here                     never: its room is taken at the start
    a save in place                     here                     here, at every block that is missing
    a copy, at its start and behind     here                     here, at every block that is missing
    opening                             here: reads; no store    -
    an export, an import                -                        here, at every block that is missing
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mounts import device_of, fill
from runs import Small, error_of, model, policy, states_in, train

import tiermem
from tiermem import checkpoint
from tiermem.checkpoint.interchange.export import export_dcp, export_weights
from tiermem.checkpoint.interchange.from_torch import read_torch
from tiermem.checkpoint.interchange.write import write_checkpoint
from tiermem.checkpoint.opening.source import weights_of
from tiermem.checkpoint.survey import survey
from tiermem.swap.disk import durable
from tiermem.tools.check import direct_alignment

Mount = Callable[..., Path]
Run = tuple[Small, tiermem.Shards, Any]
MIB = 1 << 20
BLOCK = 4096


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """start(path, **policy fields): a model on that path after two steps. What was not closed is
    closed, whatever it says."""
    begun: list[tiermem.Shards] = []

    def make(path: Path, **fields: Any) -> Run:
        made = model()
        begun.append(tiermem.shard(made, policy("nvme", path, **fields)))
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 2)
        return made, begun[-1], optimizer

    yield make
    for shards in begun:
        close(shards)


def close(shards: tiermem.Shards) -> None:
    """Ends a run whose disk has failed: what its last moves failed with is told once more."""
    error = error_of(shards.close)
    assert error is None or error.errno == errno.EROFS, error


def turn_read_only(point: Path) -> None:
    """What ext4 does when it finds itself damaged, mounted with errors=remount-ro."""
    trigger = Path("/sys/fs/ext4", Path(device_of(point)).name, "trigger_fs_error")
    if not trigger.exists():
        pytest.skip(f"no {trigger}")
    trigger.write_text("1")


def mount_again(point: Path) -> None:
    """Repaired, as after a restart. The kernel ends an io_uring a little after it is closed: until
    then it is busy."""
    deadline = time.monotonic() + 5
    while (
        subprocess.run(["umount", str(point)], capture_output=True).returncode
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    subprocess.run(["mount", "-o", "loop", f"{point}.image", str(point)], check=True)


def files_of(*folders: Path) -> dict[str, str]:
    """Every file but what fills a disk, by a digest of its bytes; folders too."""
    found = {}
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.name not in ("filler", "lost+found"):
                data = (
                    hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "a folder"
                )
                found[str(file)] = data
    return found


def check_goes_on(out: Path, tag: str, saved: Any, due: list[float], path: Path) -> None:
    """A run on another path opens a tag, has its states, and trains as the run did that saved
    it."""
    assert states_in(out, tag) == saved
    made = model(seed=7)
    path.mkdir()
    with tiermem.shard(made, policy("nvme", path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        assert checkpoint.load(shards, optimizer, out, tag) is not None
        assert train(made, optimizer, len(due)) == due


# ---- read-only -----------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", ["step", "save", "durable step", "copy", "open"])
def test_a_file_system_that_turns_read_only_under_a_run_keeps_what_was_saved(
    mount: Mount, start: Callable[..., Run], tmp_path: Path, what: str
) -> None:
    point, out = mount("ext4", 64 * MIB, "errors=remount-ro"), tmp_path / "mounted ext4" / "out"
    made, shards, optimizer = start(
        point, durability="step" if what == "durable step" else "checkpoint", keep=2
    )
    checkpoint.save(shards, optimizer, out, "kept")
    saved, due = states_in(out, "kept"), train(made, optimizer, 1)
    before = files_of(out)
    turn_read_only(point)
    acts: dict[str, Callable[[], object]] = {
        "step": lambda: (train(made, optimizer, 1), shards.check_whole()),  # it may go on behind
        "save": lambda: checkpoint.save(shards, optimizer, out, "new"),
        "durable step": lambda: checkpoint.make_durable(shards, optimizer),
        "copy": lambda: checkpoint.save(shards, optimizer, out, "new", copy=True),
        "open": lambda: checkpoint.load(shards, optimizer, out),
    }
    with pytest.raises(OSError, match="Read-only file system") as caught:
        acts[what]()
    assert caught.value.errno == errno.EROFS
    assert str(caught.value.filename).startswith(str(point))
    assert "see the kernel log" in str(caught.value)
    assert files_of(out) == before
    close(shards)
    check_goes_on(out, "kept", saved, due, tmp_path / "other")  # from where it is, read-only
    with pytest.raises(OSError, match="cannot write here: Read-only file system") as refusal:
        tiermem.shard(model(), policy("nvme", point))
    assert (refusal.value.errno, refusal.value.filename) == (errno.EROFS, str(point))
    mount_again(point)
    looked = survey(point, verifies=True)
    assert not looked.is_damaged and {step.state for step in looked.steps} == {"whole"}
    check_goes_on(out, "kept", saved, due, point / "again")


def test_a_copy_behind_whose_disk_turns_read_only_is_told_and_the_run_goes_on(
    mount: Mount, start: Callable[..., Run], tmp_path: Path
) -> None:
    point = mount("ext4", 64 * MIB, "errors=remount-ro")
    (tmp_path / "nvme").mkdir()
    made, shards, optimizer = start(tmp_path / "nvme", keep=2)
    checkpoint.save(shards, optimizer, point / "out", "kept", copy=True)
    checkpoint.wait(shards)
    saved, before = states_in(point / "out", "kept"), files_of(point)

    def turn(step: durable.Step) -> None:
        is_behind = threading.current_thread() is not threading.main_thread()
        if (
            is_behind
            and step.when == "before"
            and step.kind == "sync"
            and step.name.endswith(".bin")
        ):
            turn_read_only(point)

    with durable.watch(turn):
        checkpoint.save(shards, optimizer, point / "out", "new", copy=True)
        with pytest.raises(OSError, match=r"Read-only file system \(.*kernel log\)") as caught:
            checkpoint.wait(shards)
    assert (caught.value.errno, str(caught.value.filename).startswith(str(point))) == (
        errno.EROFS,
        True,
    )
    assert {name: data for name, data in files_of(point).items() if "/new" not in name} == before
    # the run's own disk is whole
    checkpoint.save(shards, optimizer, tmp_path / "nvme" / "out", "here")
    due = train(made, optimizer, 2)
    check_goes_on(tmp_path / "nvme" / "out", "here", saved, due, tmp_path / "other")
    check_goes_on(point / "out", "kept", saved, due, tmp_path / "third")


# ---- full ----------------------------------------------------------------------------------------


def leave_free(filler: Path, num_blocks: int) -> None:
    """Makes a full file system one with so many free blocks."""
    size = filler.stat().st_size
    os.truncate(filler, size - num_blocks * BLOCK)


def until_it_fits(point: Path, act: Callable[[], object], unchanged: Callable[[], object]) -> int:
    """Does something with no free block, one, two, ...: how often that was ENOSPC, each time with
    everything as before."""
    before = unchanged()
    for num_blocks in range(200):
        leave_free(fill(point), num_blocks)
        error = error_of(act)
        if error is None:
            return num_blocks
        assert error.errno == errno.ENOSPC, error
        assert str(error.filename).startswith(str(point)), error
        assert "free some space" in str(error), error
        assert unchanged() == before, num_blocks
    raise AssertionError("it never fits")


def test_a_store_that_does_not_fit_is_refused_with_the_arithmetic(
    mount: Mount, tmp_path: Path
) -> None:
    point = mount("ext4", 8 * MIB)
    fill(point)
    before = files_of(point)
    with pytest.raises(
        OSError, match=r"\d+ bytes are needed.* are free: No space left on device"
    ) as refusal:
        tiermem.shard(model(), policy("nvme", point))
    assert (refusal.value.errno, refusal.value.filename) == (errno.ENOSPC, str(point))
    assert files_of(point) == before
    full = point / "full"
    leave_free(fill(point), 1)
    full.mkdir()  # takes the last block
    for act in (
        lambda: tiermem.shard(model(), policy("nvme", full)),
        lambda: direct_alignment(full),
    ):
        with pytest.raises(OSError, match="free some space") as refusal:
            act()
        assert str(refusal.value.filename).startswith(str(full))


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "way", ["in place", "in place, same tag", "a step", "a copy", "a copy behind"]
)
def test_a_save_onto_a_full_disk_changes_nothing_wherever_it_ends(
    mount: Mount, start: Callable[..., Run], tmp_path: Path, way: str
) -> None:
    point, path = mount("ext4", 8 * MIB), tmp_path / "nvme"
    path.mkdir()
    is_copy = "copy" in way
    made, shards, optimizer = start(
        path if is_copy else point, keep=1 if way == "a copy" else 2, durability="step"
    )
    out = point / "out"
    checkpoint.save(shards, optimizer, out, "kept", copy=is_copy)
    checkpoint.wait(shards)
    saved, due = states_in(out, "kept"), train(made, optimizer, 1)
    checkpoint.wait(shards)
    if way == "a copy":
        # leaves steps no slot: the copy is whole on return
        checkpoint.save(shards, optimizer, path / "out", "held")

    def act() -> None:
        if way == "a step":
            checkpoint.make_durable(shards, optimizer)
        else:
            checkpoint.save(
                shards, optimizer, out, "kept" if "same tag" in way else "new", copy=is_copy
            )
            checkpoint.wait(shards)

    num_refused = until_it_fits(point, act, lambda: (files_of(point), states_in(out, "kept")))
    assert num_refused > 3
    if "same tag" not in way:
        check_goes_on(out, "kept", saved, due, tmp_path / "other")
    if way != "a step":
        later = train(made, optimizer, 1)
        tag = "kept" if "same tag" in way else "new"
        check_goes_on(out, tag, states_in(out, tag), later, tmp_path / "third")


@pytest.mark.parametrize("way", ["safetensors", "bin", "dcp", "import"])
def test_an_export_or_import_onto_a_full_disk_leaves_nothing(
    mount: Mount, start: Callable[..., Run], tmp_path: Path, way: str
) -> None:
    point, path = mount("ext4", 8 * MIB), tmp_path / "nvme"
    path.mkdir()
    _, shards, optimizer = start(path)
    checkpoint.save(shards, optimizer, path / "out", "kept")
    shards.close()
    out = point / "exported"
    (tmp_path / "plain").mkdir()
    with checkpoint.Source.open(path / "out") as source:
        if way == "import":
            export_weights(weights_of(source), tmp_path / "plain", None)
            foreign = read_torch(tmp_path / "plain")

        def act() -> None:
            if way == "dcp":
                export_dcp(source, out)
            elif way == "import":
                write_checkpoint(foreign, out)
            else:
                export_weights(
                    weights_of(source), out, 3000, way == "safetensors", config="{}" * 3000
                )

        assert (
            until_it_fits(
                point, act, lambda: [name for name in files_of(point) if name != str(out)]
            )
            > 2
        )
    assert len(list(out.rglob("*"))) > 1


def test_a_limit_of_the_process_cuts_writes_short_and_changes_nothing(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """As a quota does: part of a write goes through, and the rest is refused."""
    made, shards, optimizer = start(tmp_path, keep=2)
    out = tmp_path / "out"
    checkpoint.save(shards, optimizer, out, "kept")
    saved, due = states_in(out, "kept"), train(made, optimizer, 1)
    shards.check_whole()  # the step may be under way
    before = files_of(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1, 2, 100, 500, 3000, 5000, 20000):  # latest, pointer, data, manifest, part
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match=r"File too large.*see ulimit -f") as caught:
                checkpoint.save(shards, optimizer, out, "new")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (caught.value.errno, str(caught.value.filename).startswith(str(tmp_path))) == (
            errno.EFBIG,
            True,
        )
        assert files_of(tmp_path) == before
    checkpoint.save(shards, optimizer, out, "new")
    check_goes_on(out, "kept", saved, due, tmp_path / "other")
