"""A store that is killed at any step: are the bytes that its last manifest names there, to the bit?

A child goes through rounds as a run that saves does: it overwrites parts of its entries, freezes,
writes a manifest that says where the frozen bytes lie, removes the one before, and thaws that one's
freeze. It is killed before and after every single step that durable.py tells of (of every fifth in
the short form), while transfers are under way. Its parent looks at what is left.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import Forked, Inside, fork
from frozen_bytes import write

from tiermem.swap.base.native import Fault, IoSettings
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk import durable
from tiermem.swap.disk.run_folder import RunFolder, RunName, is_dead, run_folders
from tiermem.swap.store.store import TensorStore

Pattern = Callable[..., torch.Tensor]
PAGE = 4096
SIZES = {"a": 7 * PAGE, "b": 3 * PAGE + 5, "c": PAGE}
NUM_ROUNDS = 3
LATE = (Fault(0, "late", 3, repeat=1 << 30),)
NEVER = 1 << 30


def changes_of(number: int) -> list[tuple[str, int, int]]:
    """(entry, first page, last page) that a round writes: parts that overlap those of the round
    before, and not all entries."""
    whole = [("a", 0, 7), ("b", 0, 4), ("c", 0, 1)]
    return (
        whole
        if number == 0
        else [("a", number, number + 3), (("b", 1, 3), ("c", 0, 1))[number % 2]]
    )


def states(pattern: Pattern) -> list[dict[str, torch.Tensor]]:
    """What the entries hold after each round, in whole pages."""
    live = {
        name: torch.zeros(-(-size // PAGE) * PAGE, dtype=torch.uint8)
        for name, size in SIZES.items()
    }
    found = []
    for number in range(NUM_ROUNDS):
        for name, first, last in changes_of(number):
            live[name][first * PAGE : last * PAGE] = pattern((last - first) * PAGE, seed=number)
        found.append({name: data.clone() for name, data in live.items()})
    return found


def go_through_rounds(path: Path, expected: list[dict[str, torch.Tensor]]) -> None:
    with TensorStore(
        path, 1 << 20, IoSettings(block_bytes=PAGE, depth=4), faults=LATE, num_slots=2
    ) as store:
        store.keep_files()
        for name, size in SIZES.items():
            store.reserve(name, (size,), torch.uint8, Tier.NVME)
        (folder,) = store.folders()
        before = None
        for number, state in enumerate(expected):
            for name, first, last in changes_of(number):
                write(store, name, first * PAGE, state[name][first * PAGE : last * PAGE])
            freeze = store.freeze()
            places = {name: freeze.ranges(name, 0, size) for name, size in SIZES.items()}
            durable.write_file(folder / f"manifest-{number}.json", json.dumps(places).encode())
            if before is not None:
                durable.remove(folder / f"manifest-{number - 1}.json")
                store.thaw(before)
            before = freeze


def run_until(path: Path, expected: list[dict[str, torch.Tensor]], last_step: int) -> Forked:
    """A child that is killed at its step of that number, or ends and says how many there were."""

    def run(inside: Inside) -> None:
        seen: list[durable.Step] = []

        def look(step: durable.Step) -> None:
            seen.append(step)
            if len(seen) > last_step:
                os.kill(os.getpid(), signal.SIGKILL)

        with durable.watch(look):
            go_through_rounds(path, expected)
        inside.say(len(seen))

    return fork(run)


def check_what_is_left(folder: Path, expected: list[dict[str, torch.Tensor]]) -> int:
    """The number of the newest manifest, whose bytes are all there; -1: nothing had been made
    durable."""
    manifests = {int(file.stem.partition("-")[2]): file for file in folder.glob("manifest-*.json")}
    for number, file in manifests.items():  # the one before as well, as long as it is there
        data = (folder / "segment.bin").read_bytes()
        for name, places in json.loads(file.read_text()).items():
            found = b"".join(data[offset : offset + num_bytes] for _, offset, num_bytes in places)
            is_same = found == expected[number][name][: SIZES[name]].numpy().tobytes()
            # not compared here: where CI is set pytest would show every byte
            assert is_same, (file.name, name)
    return max(manifests, default=-1)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_store_killed_at_any_step_leaves_its_last_manifest_true(
    tmp_path: Path, pattern: Pattern, stride: int
) -> None:
    expected = states(pattern)
    whole = run_until(tmp_path, expected, NEVER)
    num_steps = int(whole.hear())
    whole.end()
    (folder,) = run_folders(tmp_path)
    assert not is_dead(folder)  # it was closed in order, and kept
    assert check_what_is_left(folder, expected) == NUM_ROUNDS - 1
    RunFolder.claim(folder).close(keep=False)

    newest = []
    for last_step in range(0, num_steps, stride):
        assert run_until(tmp_path, expected, last_step).end() == -signal.SIGKILL
        for folder in tmp_path.iterdir():
            assert RunName.of(folder) is not None
            newest.append(check_what_is_left(folder, expected))
            if (folder / "lock").exists():
                assert (
                    is_dead(folder)
                    or not (folder / "segment.bin").exists()
                    or newest[-1] == NUM_ROUNDS - 1
                )
                RunFolder.claim(folder).close(keep=False)
            else:  # killed while the run began, or when it had ended
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()
    assert newest == sorted(newest)  # never back
    assert set(newest) == set(range(-1, NUM_ROUNDS))
    assert num_steps > 20 * NUM_ROUNDS


def test_the_check_sees_a_frozen_byte_that_was_written_over(
    tmp_path: Path, pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = states(pattern)
    # as if freezes held nothing
    monkeypatch.setattr(
        "tiermem.swap.store.entry.Slots._target", lambda self, piece, is_apart: piece.current
    )
    whole = run_until(tmp_path, expected, NEVER)
    num_steps = int(whole.hear())
    whole.end()
    (folder,) = run_folders(tmp_path)
    RunFolder.claim(folder).close(keep=False)
    wrong = 0
    for last_step in range(num_steps // 2, num_steps, 5):
        run_until(tmp_path, expected, last_step).end()
        (folder,) = run_folders(tmp_path)
        try:
            check_what_is_left(folder, expected)
        except AssertionError:
            wrong += 1
        RunFolder.claim(folder).close(keep=False)
    assert wrong
