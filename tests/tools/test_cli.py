"""Is a mistake of the user's one line and exit status 2, with nothing left behind?"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiermem.swap.disk.run_folder import RunFolder, RunName
from tiermem.tools.checkpoints import export_checkpoint
from tiermem.tools.cli import main, spread_lists
from tiermem.tools.job.train_job import make_job
from tiermem.tools.options import ExportOptions, TrainOptions


def tiermem(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tiermem.tools.cli", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


MISTAKES = {
    "plan": [
        (
            ["--preset", "151m", "--frozen", "nf4"],
            "--frozen packs frozen weights, and without --lora none are; write: tiermem plan "
            "--preset 151m --frozen nf4 --lora 16",
        ),
    ],
    "sft": [
        ([], "--model_name_or_path is missing; write: tiermem sft --model_name_or_path FOLDER"),
        (["--model_name_or_path", "m"], "--dataset_name is missing"),
        (
            ["--model_name_or_path", "m", "--dataset_name", "d", "--deepspeed", "x.json"],
            "here --config takes its file; write: tiermem sft --model_name_or_path m "
            "--dataset_name d --config x.json",
        ),
        (["--model_name_or_path=m", "--dataset_name=d", "--config", "x.json"], "x.json: --config"),
        (
            ["--model_name_or_path=m", "--dataset_name=d", "--config", "y.yaml", "--nvme", "no"],
            "y.yaml: --config: no such file",
        ),
        (
            ["--model_name_or_path=m", "--dataset_name=d", "--nvme", ".", "--offload", "cpu"],
            "--nvme names folders, but with --offload cpu nothing rests there",
        ),
        (["--offload", "disk"], "--offload is 'disk'; allowed are auto, none, cpu, nvme"),
        (
            ["--model_name_or_path=m", "--dataset_name=d", "--load_in_4bit", "true"],
            "--load_in_4bit is bitsandbytes'; tiermem packs frozen weights itself; write: tiermem "
            "sft --model_name_or_path=m --dataset_name=d --frozen nf4",
        ),
        (
            ["--model_name_or_path=m", "--dataset_name=d", "--max-seq-length", "64"],
            "--max-seq-length is --max_length in this TRL; write: tiermem sft --model_name_or_path=m "
            "--dataset_name=d --max_length 64",
        ),
        (
            ["--model_name_or_path=m", "--dataset_name=d", "--frozen", "nf4"],
            "--frozen packs frozen weights, and without --use_peft none are",
        ),
    ],
    "train": [
        (["--preset", "420m"], "the preset is '420m'; allowed are 151m, 419m"),
        ([], "exactly one of --preset and --model; none is given"),
        (["--preset", "151m", "--model", "x.json"], "--preset and --model; both are given"),
        (["--model", "no.json"], "--model: there is no file no.json"),
        (["--model", "no-folder"], "--model: no-folder has no config.json"),
        (
            ["--preset", "151m", "--memory", "much"],
            "'much' is not a size; write bytes, or for example 1250MiB",
        ),
        (
            ["--preset", "151m", "--offload", "disk"],
            "--offload is 'disk'; allowed are auto, none, cpu, nvme",
        ),
        (
            ["--preset", "151m", "--offload", "cpu", "--nvme", "."],
            "--nvme names folders, but with --offload cpu",
        ),
        (["--preset", "151m", "--nvme", "no-disk"], "no-disk: no such folder"),
        (["--preset", "151m", "--data", "no-data"], "--data: there is no no-data"),
        (["--preset", "151m", "--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--preset", "151m", "--seq", "1"], "--seq is 1; it must be at least 2"),
        (["--preset", "151m", "--seq", "100000000"], "are fewer than one sequence of 100000000"),
        (["--preset", "151m", "--lr", "-1"], "--lr is -1.0"),
        (
            ["--preset", "151m", "--precision", "int8"],
            "--precision is 'int8'; allowed are auto, bf16, fp32, fp16",
        ),
        (
            ["--preset", "151m", "--config", "no.json"],
            "no.json: No such file or directory",
        ),
        (
            ["--preset", "151m", "--config", "x", "--lr", "1"],
            "--lr: --config decides this",
        ),
        (["--preset", "151m", "--tuned", "no.json"], "no.json: No such file or directory"),
        (["--preset", "151m", "--tbw", "much"], "'much' is no drive's endurance"),
        (["--preset", "151m", "--threads", "100000"], "--threads is 100000; allowed are 1 to"),
        (["--preset", "151m", "--lr", "inf"], "--lr is inf"),
        (
            ["--preset", "151m", "--overlap", "sideways"],
            "--overlap is 'sideways'; allowed are auto, none, forward, backward",
        ),
        (["--preset", "151m", "--seed", "-1"], "--seed is -1; allowed are"),
        (
            ["--preset", "151m", "--memory", "10"],
            "--memory is 10 bytes, which Python alone exceeds",
        ),
        (["--preset", "151m", "--save", "/proc/1/no"], "cannot write here"),
        (["--preset", "151m", "--save", "/dev/null/ck"], "/dev/null: is a file: name a folder"),
    ],
    "tune": [
        (["--path", "nowhere"], "nowhere: no such folder"),
        (["--path", ".", "."], "--path names a folder twice"),
        (
            ["--path", ".", "--engine", "uring,disk"],
            "--engine is 'disk'; allowed are auto, uring",
        ),
        (["--path", ".", "--out", "no/tiermem.json"], "no: no such folder"),
        (["--path", ".", "--size", "1MiB"], "--size is 1.0 MiB; it must be at least 8.0 MiB"),
        (["--path", ".", "--size", "much"], "'much' is not a size"),
        (["--path", ".", "--seconds", "0"], "--seconds is 0.0; it must be more than 0"),
        (["--path", ".", "--size", "8000TiB"], "are needed"),
    ],
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("command", "arguments", "reason"),
    [(command, *each) for command, several in MISTAKES.items() for each in several],
)
def test_a_mistake_is_one_line_and_nothing_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([command, *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"tiermem {command}: ")
    assert reason in said
    assert len(said.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


SHAPE = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 200}, "at least 256 are due"),
        ({"hidden_size": 10_000_000}, "weights alone are"),
        (
            {"num_attention_heads": 7},
            "num_attention_heads is 7, which does not divide hidden_size 64",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"model_type": "bert"}, "model_type is 'bert', an encoder"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_anything_is_made(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | change))
    with pytest.raises(ValueError, match=re.escape(reason)):
        make_job(TrainOptions(model=tmp_path / "config.json"), "name", tmp_path / "run")
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_shard_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--max-shard-size is 0"):
        export_checkpoint(ExportOptions(tmp_path, tmp_path / "out", max_shard_bytes=0), Console())


def test_an_error_of_the_system_names_the_file_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def over_quota(fd: int, data: bytes) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    run = RunName.new()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(OSError, match=r"No locks available .*mount it with locks") as caught:
            RunFolder.new(tmp_path, run)
        assert caught.value.filename == str(tmp_path / run.folder_name / "lock.new")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", over_quota)
        with pytest.raises(OSError, match="the quota is used up") as caught:
            RunFolder.new(tmp_path, run)
        assert caught.value.filename == str(tmp_path / run.folder_name / "lock.new")
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = tiermem(tmp_path, "train", "--preset", "420m", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    done = tiermem(tmp_path, "train", "--offlaod", "nvme")
    assert done.returncode == 2
    assert "--offload" in done.stderr


def test_check_names_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--path", "nowhere"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("tiermem check: nowhere: no such folder")


def test_the_command_line_imports_no_torch() -> None:
    look = "import sys, tiermem.tools.cli, tiermem.tools.train.train; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        (["--nvme", "a", "b", "--steps", "3"], ["--nvme", "a", "--nvme", "b", "--steps", "3"]),
        (["--nvme", "a", "--nvme", "b"], ["--nvme", "a", "--nvme", "b"]),
        (["--data", "a", "b", "c"], ["--data", "a", "--data", "b", "--data", "c"]),
        (["train", "--steps", "3", "x"], ["train", "--steps", "3", "x"]),
        (["--nvme=a", "--verbose"], ["--nvme=a", "--verbose"]),
    ],
)
def test_an_option_that_takes_several_takes_the_words_after_it(
    given: list[str], spread: list[str]
) -> None:
    assert spread_lists(given) == spread
