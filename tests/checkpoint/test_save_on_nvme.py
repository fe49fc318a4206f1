"""Is what rests on NVMe the checkpoint, without a copy, in the order that a crash may come at any
time?"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from runs import files_below, live_states, model, opened, policy, states_in, train
from saved_by_hand import latest_of

import tiermem
from tiermem import checkpoint
from tiermem.precision import Precision
from tiermem.swap.disk import durable
from tiermem.weights.unit_state import UnitState


def short(step: durable.Step) -> str:
    """A step as a test lists it: the kind and the file's name without the run's id."""
    name = Path(step.name).name
    return (
        f"{step.kind} "
        f"{'RUN' if name.startswith('tiermem-') else re.sub(durable.NEW_PREFIX, '', name).removesuffix('.new')}"
    )


@pytest.mark.parametrize("preset", ["exact", "compact", "tiny"])
def test_every_state_is_saved_to_the_bit_and_stays_while_training_goes_on(
    tmp_path: Path, preset: str
) -> None:
    dtype = torch.float32 if preset == "exact" else torch.bfloat16
    made, precision = model(dtype=dtype), Precision.preset(preset)
    with tiermem.shard(made, policy("nvme", tmp_path, precision=precision)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 2)
        checkpoint.save(shards, optimizer, tmp_path / "out", "t")
        live, saved = live_states(shards), states_in(tmp_path / "out", "t")
        for (name, state), value in live.items():
            if (
                value.numel()
                and (state == "weight" or preset == "exact")
                and (name, state) in saved
            ):
                assert (
                    saved[name, state] == value.view(torch.uint8).numpy().tobytes()
                    if value.dim()
                    else True
                ), (
                    name,
                    state,
                )
        train(made, optimizer, 3, seed=9)
        assert states_in(tmp_path / "out", "t") == saved
        assert (
            live_states(shards)["layers.1.weight", "weight"]
            .ne(live["layers.1.weight", "weight"])
            .any()
        )
        checkpoint.save(shards, optimizer, tmp_path / "out", "u")
        later = states_in(tmp_path / "out", "u")
    # the run has ended, its store stays
    assert later != saved and states_in(tmp_path / "out", "u") == later


def test_a_twin_that_saves_computes_the_same(tmp_path: Path) -> None:
    found = []
    for saves in (False, True):
        made = model()
        (tmp_path / str(saves)).mkdir()
        with tiermem.shard(made, policy("nvme", tmp_path / str(saves))) as shards:
            optimizer, losses = tiermem.AdamW(made.parameters(), lr=0.01), []
            for number in range(4):
                losses += train(made, optimizer, 1, seed=number)
                if saves:
                    checkpoint.save(
                        shards, optimizer, tmp_path / "out", f"t{number}", copy=number == 2
                    )
            found.append((losses, live_states(shards)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][key], value) for key, value in found[0][1].items())


def test_nothing_that_rests_on_nvme_is_written_again(tmp_path: Path) -> None:
    made = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        made(torch.randn(3, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        shards.store.flush()
        for live in shards.units:
            if live.state is UnitState.READING:  # for the next forward
                live.land()
        state_bytes = 8 * 256 * 256 * 12
        before, stats = _written(), shards.store.stats()
        checkpoint.save(shards, optimizer, tmp_path / "out", "t")
        assert shards.store.stats().nvme_written_bytes == stats.nvme_written_bytes
        # checksums are known
        assert shards.store.stats().nvme_read_bytes - stats.nvme_read_bytes < state_bytes / 10
        assert _written() - before < state_bytes / 10, "bytes that the kernel was given"


def test_steps_of_a_commit_come_in_their_order(tmp_path: Path) -> None:
    made, steps = model(), list[str]()
    with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        for number in (1, 2):
            train(made, optimizer, 1)
            with durable.watch(
                lambda step: steps.append(short(step)) if step.when == "after" else None
            ):
                checkpoint.save(shards, optimizer, tmp_path / "out", f"t{number}")
            if number == 1:
                steps.clear()
    renamed = [step for step in steps if step.split()[0] in ("freeze", "rename", "remove", "thaw")]
    assert renamed == [
        "freeze RUN",
        "rename part-2-0.json",
        "rename manifest-2.json",
        "rename README.txt",
        "rename tiermem.json",
        "rename latest",
        "remove manifest-1.json",
        "thaw RUN",
        "remove part-1-0.json",
        "remove data-1.bin",
        "remove tiermem.json",
        "remove README.txt",
        "remove t1",
    ]
    assert "sync segment.bin" in steps[: steps.index("freeze RUN")]
    assert "sync data-2.bin" in steps[: steps.index("rename part-2-0.json")]


def test_the_oldest_tag_is_dropped_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, saved = model(), {}
    with (
        tiermem.shard(made, policy("nvme", tmp_path, keep=2)) as shards,
        caplog.at_level(logging.WARNING, "tiermem"),
    ):
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        for number in range(5):
            train(made, optimizer, 1, seed=number)
            checkpoint.save(
                shards, optimizer, tmp_path / "out", f"t{number}", save_latest=number != 4
            )
            saved[number] = states_in(tmp_path / "out", f"t{number}")
            for older in range(max(0, number - 1), number):
                assert states_in(tmp_path / "out", f"t{older}") == saved[older]
        assert [record.args[0] for record in caplog.records if "is dropped" in record.msg] == [
            "t0",
            "t1",
            "t2",
        ]
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["latest", "t3", "t4"]
        assert latest_of(tmp_path / "out") == "t3"
        # the same tag again, by another name of the folder: replaced, nothing else is dropped
        (tmp_path / "link").symlink_to("out")
        for is_copy in (False, True):
            checkpoint.save(shards, optimizer, tmp_path / "link", "t3", copy=is_copy)
            checkpoint.wait(shards)
            names = sorted(path.name for path in (tmp_path / "out").iterdir())
            assert names == ["latest", "t3", "t4"]
            assert (
                states_in(tmp_path / "out", "t3") == saved[4] == states_in(tmp_path / "out", "t4")
            )


def test_a_run_that_saved_leaves_its_store_and_any_other_leaves_nothing(tmp_path: Path) -> None:
    for saves in (False, True):
        made = model()
        with tiermem.shard(made, policy("nvme", tmp_path)) as shards:
            if saves:
                checkpoint.save(shards, None, tmp_path / "out", "t")
        names = {Path(file).name for file in files_below(tmp_path)}
        assert names == (
            {
                "segment.bin",
                "manifest-1.json",
                "part-1-0.json",
                "data-1.bin",
                "tiermem.json",
                "README.txt",
                "latest",
            }
            if saves
            else set()
        )


def test_every_step_is_durable_when_asked(tmp_path: Path) -> None:
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path, durability="step")) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        for number in (1, 2, 3):
            train(made, optimizer, 1, seed=number)
            checkpoint.wait(shards)
            [file] = shards.store.folders()[0].glob("manifest-*.json")
            assert file.name == f"manifest-{number}.json"
        checkpoint.save(shards, optimizer, tmp_path / "out", "t")
        saved = states_in(tmp_path / "out", "t")
        train(made, optimizer, 2, seed=7)
        checkpoint.wait(shards)
        assert states_in(tmp_path / "out", "t") == saved
        assert len(list(shards.store.folders()[0].glob("manifest-*.json"))) == 2
        assert opened(tmp_path / "out", "t")[1].step == 3


def test_without_slots_a_tag_is_a_copy(tmp_path: Path) -> None:
    made = model()
    with tiermem.shard(made, policy("nvme", tmp_path, durability="none")) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, tmp_path / "out", "t")
        saved = states_in(tmp_path / "out", "t")
        train(made, optimizer, 1)
        assert states_in(tmp_path / "out", "t") == saved
    assert not list(tmp_path.glob("tiermem-*"))


def _written() -> int:
    """Bytes that this process has had written to storage, as the kernel counts them."""
    return int(
        next(
            line
            for line in Path("/proc/self/io").read_text().splitlines()
            if line.startswith("write_bytes")
        ).split()[1]
    )
