"""Does `tiermem train --resume` find the newest durable step, and take from it what is not said
again?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_by_hand import write

from tiermem.checkpoint.format.manifest import choices_of
from tiermem.forecast import Rates
from tiermem.forecast.rates import Compute
from tiermem.tools.job.launcher import Job
from tiermem.tools.job.train_job import (
    find_resumed,
    make_job,
    options_to_save,
    with_key,
    with_saved,
)
from tiermem.tools.options import TrainOptions
from tiermem.tools.presets import preset
from tiermem.tools.words import Mistake


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("words and words " * 100)
    return file


def save_step(
    folder: Path, step: int, tag: str, client_state: dict[str, Any], streamed_part: float = 0.0
) -> Path:
    choices = choices_of("storage", "auto", streamed_part)
    write(
        folder,
        {"weight": {"weight": torch.zeros(3)}},
        tag,
        step=step,
        client_state=client_state,
        choices=choices,
    )
    return folder


def saved(
    folder: Path,
    text: Path,
    step: int = 7,
    tag: str = "step7",
    streamed_part: float = 0.0,
    **fields: Any,
) -> Path:
    """A checkpoint that says it was saved by a run of these options."""
    options = TrainOptions(
        preset="151m",
        data=(text,),
        **({"seq": 64, "lr": 3e-4, "offload": "cpu", "steps": 20} | fields),
    )
    told = options_to_save(options, "151m-cpu", preset("151m"), None)
    return save_step(folder, step, tag, {"tiermem train": told}, streamed_part)


def test_what_is_not_said_again_is_as_it_was(tmp_path: Path, text: Path) -> None:
    resumed = find_resumed(saved(tmp_path / "ck", text))
    options = with_saved(TrainOptions(resume=tmp_path / "ck", lr=1e-5), resumed)
    assert (options.seq, options.lr, options.offload, options.steps, options.data) == (
        64,
        1e-5,
        "cpu",
        20,
        (text,),
    )
    job = make_job(options, resumed.name, tmp_path / "run", resumed)
    assert job.shape == preset("151m")
    assert job.resume == str(tmp_path / "ck" / "step7")
    assert job.config["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert job.to_save["seq"] == 64


def test_the_dtype_of_products_is_that_of_the_saved_step(tmp_path: Path, text: Path) -> None:
    assert (
        make_of(tmp_path, saved(tmp_path / "ck", text)) == "storage"
    )  # as measured there, whatever would be measured here
    old = saved(tmp_path / "old", text, compute="fp32")
    assert make_of(tmp_path, old) == "fp32"


def make_of(tmp_path: Path, where: Path) -> str:
    return str(resume(tmp_path, where).config["tiermem"]["compute_dtype"])


def resume(tmp_path: Path, where: Path, **given: Any) -> Job:
    resumed = find_resumed(where)
    return make_job(
        with_saved(TrainOptions(resume=where, **given), resumed),
        resumed.name,
        tmp_path / "run",
        resumed,
    )


@pytest.mark.parametrize("part", [0.5, 0.0])
def test_tiles_that_an_accelerator_steps_are_those_of_the_saved_step(
    part: float, tmp_path: Path, text: Path
) -> None:
    """Although the machine that goes on would choose others; what a config names is kept."""
    pytest.importorskip("transformers")
    from tiermem.tools.plan.planned import Cluster, Scenario
    from tiermem.tools.plan.settle import choose_config

    rates = Rates(1e9, 1e9, link_bytes_s=200e9, kernel_bytes_s=1e9)

    def part_here(config: dict[str, Any]) -> float:
        cluster, compute = Cluster(1, 1, 24 << 30), Compute(1e-12, 2e-12)
        chosen = choose_config(Scenario(shape, config, cluster, rates, compute, 64, True))
        return float(chosen.config["tiermem"]["streamed_ratio"])

    job, shape = resume(tmp_path, saved(tmp_path / "ck", text, streamed_part=part)), preset("151m")
    assert part_here(job.config) == part
    assert part_here(with_key(job.config, ("tiermem", "streamed_ratio"), None)) == 1.0
    config = with_key(job.config, ("tiermem", "streamed_ratio"), 0.25)
    told = options_to_save(
        TrainOptions(data=(text,), seq=64, steps=20), "run", preset("151m"), config
    )
    named = resume(
        tmp_path, save_step(tmp_path / "named", 7, "step7", {"tiermem train": told}, part)
    )
    assert named.config["tiermem"]["streamed_ratio"] == 0.25


def test_whether_blocks_are_recomputed_is_as_it_was_or_as_it_is_said_now(
    tmp_path: Path, text: Path
) -> None:
    for was in (None, True, False):
        where = saved(tmp_path / f"ck {was}", text, is_checkpointing=was)
        assert resume(tmp_path, where).is_checkpointing is was
        for now in (True, False):
            assert resume(tmp_path, where, is_checkpointing=now).is_checkpointing is now


def test_what_runs_beside_steps_is_as_it_was_or_as_it_is_said_now(
    tmp_path: Path, text: Path
) -> None:
    where = saved(tmp_path / "ck", text, overlap="none")
    assert resume(tmp_path, where).config["tiermem"]["overlap"] == "none"
    assert resume(tmp_path, where, overlap="backward").config["tiermem"]["overlap"] == "backward"
    assert "overlap" not in resume(tmp_path, saved(tmp_path / "other", text)).config["tiermem"]


def test_other_homes_may_be_named(tmp_path: Path, text: Path) -> None:
    resumed = find_resumed(
        saved(tmp_path / "ck", text, offload="nvme", nvme=(tmp_path,), resident_bytes=4096)
    )
    options = with_saved(TrainOptions(offload="cpu"), resumed)
    assert (options.offload, options.nvme, options.resident_bytes) == ("cpu", (), None)
    options = with_saved(TrainOptions(), resumed)
    assert (options.nvme, options.resident_bytes) == ((tmp_path,), 4096)


def test_steps_count_from_the_first(tmp_path: Path, text: Path) -> None:
    resumed = find_resumed(saved(tmp_path / "ck", text, steps=7))
    with pytest.raises(
        ValueError,
        match="has 7 steps behind it, and --steps counts from the first: give more than 7, not 7",
    ):
        with_saved(TrainOptions(), resumed)
    assert with_saved(TrainOptions(steps=8), resumed).steps == 8
    resumed = find_resumed(saved(tmp_path / "of 10", text, 10, steps=None))
    with pytest.raises(ValueError, match="give more than 10, not 10"):
        with_saved(TrainOptions(), resumed)


def test_what_goes_on_from_a_run_that_saved_saves_in_its_own_folder(
    tmp_path: Path, text: Path
) -> None:
    options = TrainOptions(preset="151m", data=(text,), offload="cpu", save=tmp_path / "ck")
    job = make_job(options, "run", tmp_path / "first")
    for step in (1, 2):
        where = save_step(tmp_path / f"ck{step}", step, "tag", {"tiermem train": job.to_save})
        job = resume(tmp_path, where)
        assert job.save_dir == str(tmp_path / "run" / "checkpoints")
    assert resume(tmp_path, saved(tmp_path / "unsaved", text)).save_dir is None


def test_a_run_s_folder_means_its_newest_step(tmp_path: Path, text: Path) -> None:
    saved(tmp_path / "checkpoints", text, 5, "step5")
    saved(tmp_path, text, 9, "tiermem-abc")
    (tmp_path / "latest").unlink()
    assert find_resumed(tmp_path).step == 9
    saved(tmp_path, text, 3, "tiermem-def")
    (tmp_path / "latest").unlink()
    with pytest.raises(ValueError, match="several runs: name one of tiermem-abc, tiermem-def"):
        find_resumed(tmp_path)
    for store in tmp_path.glob("tiermem-*"):
        shutil.rmtree(store)


def test_a_saved_config_decides_what_a_config_decides(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folders are those of the working directory where it was saved."""
    monkeypatch.chdir(tmp_path)
    Path("disk").mkdir()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": ["disk"]}},
    }
    told = options_to_save(
        TrainOptions(data=(text,), seq=64, steps=20), "run", preset("151m"), config
    )
    resumed = find_resumed(save_step(tmp_path / "ck", 7, "step7", {"tiermem train": told}))
    monkeypatch.chdir("disk")
    job = make_job(with_saved(TrainOptions(), resumed), "run", tmp_path, resumed)
    # as it was saved
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = [str(tmp_path / "disk")]
    assert (job.batch, job.config) == (3, config | {"tiermem": {"streamed_ratio": 0.0}})
    assert job.nvme_paths == [str(tmp_path / "disk")]
    with pytest.raises(
        ValueError, match=r"--offload: .* was saved with a config, which decides this"
    ):
        make_job(with_saved(TrainOptions(offload="cpu"), resumed), "run", tmp_path, resumed)


def test_what_another_program_saved_is_refused(tmp_path: Path) -> None:
    save_step(tmp_path / "ck", 7, "step7", {"epoch": 3})
    with pytest.raises(ValueError, match="was not saved by tiermem train"):
        find_resumed(tmp_path / "ck")
    save_step(tmp_path / "half", 7, "step7", {"tiermem train": {"seq": 64}})
    with pytest.raises(ValueError, match="is not complete"):
        find_resumed(tmp_path / "half")
    with pytest.raises(Mistake, match="there is no folder"):
        find_resumed(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no file named latest"):
        find_resumed(tmp_path / "empty")


def test_a_job_without_saving_has_no_folder_for_it(tmp_path: Path, text: Path) -> None:
    plain = TrainOptions(preset="151m", data=(text,), offload="cpu")
    assert make_job(plain, "name", tmp_path / "run").save_dir is None
    every = TrainOptions(
        preset="151m", data=(text,), offload="cpu", save_every=5, durability="step", keep=2
    )
    job = make_job(every, "name", tmp_path / "run")
    assert (job.save_dir, job.save_every) == (str(tmp_path / "run" / "checkpoints"), 5)
    assert job.config["tiermem"] == {"durability": "step", "keep": 2, "compute_dtype": "measured"}
    assert json.loads(json.dumps(job.to_save)) == job.to_save
