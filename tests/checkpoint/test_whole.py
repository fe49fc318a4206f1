"""Does a save say where its bytes lie, can all of them be taken along, and does the error
afterwards name what lay where?"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from runs import model, policy, train

import tiermem
from tiermem import checkpoint
from tiermem.checkpoint.opening.source import Source
from tiermem.tools import cli


def main(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def saved(place: Path, tag: str = "t1", **given: object) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of a checkpoint beside its run's path, and the states that it has."""
    made = model()
    with tiermem.shard(made, policy("nvme", place / "nvme", **given)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=1e-2)
        train(made, optimizer, 2)
        checkpoint.save(shards, optimizer, place / "saved", tag=tag, client_state={"epoch": 3})
        checkpoint.wait(shards)
    return place / "saved", states_of(place / "saved")


def states_of(where: Path) -> dict[str, torch.Tensor]:
    with Source.open(where) as source:
        return {
            f"{p}.{s}": source.read(p, s, 0, each.numel).clone()
            for p, each in source.parameters.items()
            for s in source.states(p)
        }


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "nvme").mkdir()
    return tmp_path


def test_a_save_says_where_its_bytes_lie(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tiermem"):
        folder, _ = saved(place)
    (run,) = (place / "nvme").glob("tiermem-*")
    readme = (folder / "t1" / "README.txt").read_text()
    assert f"\n    {run}\n" in readme and "tiermem export --whole" in readme
    assert f"checkpoint 't1' (step 2) stays where its states rest: {run}" in caplog.text


def test_a_readme_of_the_user_stays(place: Path) -> None:
    mine = place / "saved" / "t1" / "README.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    saved(place)
    assert mine.read_text() == "mine"


def test_a_dropped_tag_takes_its_readme_along(place: Path) -> None:
    made = model()
    with tiermem.shard(made, policy("nvme", place / "nvme")) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=1e-2)
        for tag in ("t1", "t2"):
            train(made, optimizer, 1)
            checkpoint.save(shards, optimizer, place / "saved", tag=tag)
        assert not (place / "saved" / "t1").exists()
        checkpoint.save(shards, optimizer, place / "saved", tag="t2", copy=True)
        checkpoint.wait(shards)
    assert not (place / "saved" / "t2" / "README.txt").exists()  # it holds all of it now


def test_an_export_of_the_whole_is_moved_and_continues(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, states = saved(place)
    assert main(["export", str(folder), str(place / "out"), "--whole"]) == 0
    assert "all that a run needs" in capsys.readouterr().out
    shutil.rmtree(place / "nvme")
    shutil.rmtree(folder)
    (place / "out").rename(place / "moved")
    found = states_of(place / "moved")
    assert found.keys() == states.keys()
    assert all(torch.equal(found[name], states[name]) for name in states)
    made = model(seed=1)
    (place / "nvme").mkdir()
    with tiermem.shard(made, policy("nvme", place / "nvme")) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=1e-2)
        assert checkpoint.load(shards, optimizer, place / "moved").client_state == {"epoch": 3}
    assert main(["fsck", str(place / "moved"), "--verify"]) == 0


def test_an_export_of_a_damaged_step_leaves_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved(place)
    (segment,) = (place / "nvme").glob("tiermem-*/segment.bin")
    segment.write_bytes(bytes(byte ^ 1 for byte in segment.read_bytes()))
    assert main(["export", str(folder), str(place / "out"), "--whole"]) == 2
    assert "CRC-32C" in capsys.readouterr().err
    assert not (place / "out").exists()


def test_whole_goes_with_nothing_that_changes_values(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in ((("--fp32",), "leave --fp32"), (("--dcp",), "choose one")):
        assert main(["export", str(place), str(place / "out"), "--whole", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_key_makes_every_save_a_complete_copy(place: Path) -> None:
    engine, *_ = tiermem.initialize(
        model=model(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": str(place / "nvme")},
            },
            "tiermem": {"copies": True},
        },
    )
    engine.save_checkpoint(place / "saved", tag="t1")
    engine.wait_checkpoint()
    engine.close()
    assert not list((place / "nvme").glob("tiermem-*"))
    assert len(states_of(place / "saved")) > 0
    assert not (place / "saved" / "t1" / "README.txt").exists()


@pytest.mark.parametrize("victim", ["folder", "manifest", "part"])
def test_the_error_afterwards_names_what_lay_where(place: Path, victim: str) -> None:
    folder, _ = saved(place)
    (run,) = (place / "nvme").glob("tiermem-*")
    if victim == "folder":
        shutil.rmtree(run)
    else:
        next(run.glob(f"{victim}-*.json")).unlink()
    now = "which is not there" if victim == "folder" else "which holds it no more"
    with pytest.raises(
        FileNotFoundError, match=rf"the step's bytes lay in {run}, {now}\. .*copy=True"
    ):
        Source.open(folder)
    shutil.rmtree(place / "nvme")
