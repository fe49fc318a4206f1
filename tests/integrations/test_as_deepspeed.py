"""Does a script that uses DeepSpeed through transformers and accelerate train, save and resume with
tiermem answering?"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import fork_server
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import PartialState
from as_deepspeed_cases import CASES, table
from forks import free_port
from safetensors.torch import load_file
from trainings import Trainer, train
from transformers import AutoModelForCausalLM

import tiermem
from tiermem.integrations import as_deepspeed
from tiermem.integrations.as_deepspeed import initialize, main

HERE = Path(__file__).parent
MAIN = HERE.parent.parent / "tiermem" / "as_deepspeed.py"


def test_a_script_with_a_deepspeed_config_trains_as_without(tmp_path: Path) -> None:
    done = fork_server.run(
        [str(MAIN), str(HERE / "deepspeed_script.py"), str(tmp_path)], 400, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "logs.json").read_text("utf-8"))
    asked = {"max_steps": 6, "warmup_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    plain = train(Trainer, "llama", tmp_path / "expected", **asked)
    for name in ("Trainer's optimizer", "resumed"):
        for mine, theirs in zip(zip(*found[name], strict=True), plain[:3], strict=True):
            assert list(mine) == pytest.approx(theirs, rel=1e-6, abs=1e-9), name
    rates = [rate for _, _, rate in found["config's optimizer"]]
    assert rates[-1] == pytest.approx(1e-3) and rates == sorted(
        rates
    )  # WarmupLR stays, the Trainer's own schedule falls
    assert "deepspeed.moe is not one of the names" in found["AttributeError"]
    assert "No module named 'deepspeed.pipe'" in found["ImportError"]
    opened = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict())
    assert (
        opened.keys() >= load_file(tmp_path / "plain" / "checkpoint-6" / "model.safetensors").keys()
    )


PAGE = HERE.parent.parent / "docs" / "as_deepspeed.md"


def rows_in(text: str) -> list[str]:
    return [
        line
        for line in text.splitlines()
        if line.startswith(("| transformers |", "| accelerate |"))
    ]


def test_the_page_names_every_case_and_none_failed() -> None:
    expected = [
        line.rpartition(" | passed |")[0] for line in table(CASES, ["passed"] * len(CASES))[2:]
    ]
    rows = [row.rpartition(" | ") for row in rows_in(PAGE.read_text("utf-8"))]
    assert [before for before, _, _ in rows] == expected
    assert all(result.startswith(("passed |", "refused: ")) for _, _, result in rows)


@pytest.mark.slow
def test_every_case_gives_the_result_that_the_page_says(tmp_path: Path) -> None:
    done = fork_server.run(
        [str(MAIN), str(HERE / "as_deepspeed_cases.py"), str(tmp_path)], 1200, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows_in(done.stdout) == rows_in(PAGE.read_text("utf-8")), done.stderr[-20000:]


RANKS = HERE / "deepspeed_on_ranks.py"


UNDER = ["-m", "tiermem.as_deepspeed"]


def launched(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Runs a launcher of the script of two ranks; returns what each wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words, str(RANKS), str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=500, env=environment
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-20000:]
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(2)]


def assert_near(found: dict[str, Any], expected: str, *names: str) -> None:
    for name in names:
        for mine, theirs in zip(found[name], found[expected], strict=True):
            assert mine == pytest.approx(theirs, rel=2e-6, abs=1e-9), name


@pytest.mark.slow
def test_two_ranks_of_torchrun_train_and_resume_as_without_deepspeed(tmp_path: Path) -> None:
    for found in launched(
        tmp_path, "torch.distributed.run", "--standalone", "--nproc-per-node=2", *UNDER
    ):
        assert_near(found, "plain", "zero2", "zero2 resumed", "zero3", "zero3 resumed")
        assert_near(found, "plain loop", "loop 1", "loop 2", "loop 3")


@pytest.mark.slow
def test_accelerate_launch_with_a_deepspeed_plugin(tmp_path: Path) -> None:
    sizes = [
        "--num_processes=2",
        "--num_machines=1",
        f"--main_process_port={free_port()}",
        "--mixed_precision=no",
    ]
    zero = [
        "--use_deepspeed",
        "--zero_stage=3",
        "--offload_optimizer_device=cpu",
        "--offload_param_device=cpu",
    ]
    steps = ["--gradient_accumulation_steps=2", "--gradient_clipping=1.0"]
    # ranks have no prefix
    words = ["tiermem.as_deepspeed", "-m", "accelerate.commands.launch", *sizes, *zero, *steps]
    for found in launched(tmp_path, *words):
        assert_near(found, "plain loop", "plugin of the launcher")


def test_the_metadata_names_the_version_that_is_answered() -> None:
    metadata = Path(as_deepspeed.__file__).with_name("deepspeed_names") / "deepspeed.egg-info"
    assert f"Version: {as_deepspeed.VERSION}\n" in metadata.read_text("utf-8")


def test_it_is_refused_after_transformers_or_deepspeed_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RuntimeError, match=r"after transformers was imported: call it before"):
        tiermem.as_deepspeed()
    assert importlib.util.find_spec("deepspeed") is None
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    with pytest.raises(RuntimeError, match=r"after deepspeed was imported: call it before"):
        tiermem.as_deepspeed()


def test_an_accelerate_that_counts_other_processes_than_the_launcher_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    try:
        with pytest.raises(
            ValueError,
            match=r"Accelerate counts 2 processes, and the launcher has started 1, .*gloo",
        ):
            initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1})
    finally:
        torch.distributed.destroy_process_group()


def test_a_config_of_the_script_s_arguments_makes_complete_copies(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 3, "optimizer": {"type": "AdamW"}}), "utf-8"
    )
    (tmp_path / "wrong.json").write_text(json.dumps({"gradient_accumulation_steps": 3}), "utf-8")
    try:
        engine = initialize(
            argparse.Namespace(deepspeed_config=tmp_path / "ds.json"), torch.nn.Linear(2, 2)
        )[0]
        assert engine.config.tiermem.durability == "none"
        engine.close()
        with pytest.raises(
            ValueError, match=f"^{tmp_path}/wrong.json: neither train_batch_size nor"
        ):
            initialize(model=torch.nn.Linear(2, 2), config=str(tmp_path / "wrong.json"))
    finally:
        torch.distributed.destroy_process_group()


def test_a_script_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["as_deepspeed"])
    with pytest.raises(SystemExit, match=r"usage: python -m tiermem.as_deepspeed SCRIPT"):
        main()
