"""Is a command that was typed wrongly answered by one sentence, with the command that works?"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from saved_by_hand import write

import tiermem
from tiermem.tools.cli import app, main
from tiermem.tools.job.train_job import options_to_save
from tiermem.tools.memory_limit import parse_memory
from tiermem.tools.mistakes import _name_of, _takes, example_of
from tiermem.tools.options import TrainOptions
from tiermem.tools.presets import llama, preset

MIB = 1 << 20
ANSWERS = {
    "trainn --preset 419m": "train --preset 419m",
    "train": "train --preset 419m",
    "train 419m --steps 3": "train --preset 419m --steps 3",
    "train --preset 420m": "train --preset 419m",
    "train --preset 419m --ofload nvme": "train --preset 419m --offload nvme",
    "train --preset 419m --offload disk": "train --preset 419m --offload nvme",
    "train --preset 419m --memory 1250": "train --preset 419m --memory 1250MiB",
    "train --config ds.json": "train --config ds.json --preset 419m",
    "train --resume runs/lost": "train --resume",
    "plan 7b --gpu-mem 24GB": "plan --preset 7b --gpu-memory 24GB",
    # more than ten
    "train --preset": "train --preset 419m",
    "train --preset 419m --precision=bfloat16": "train --preset 419m --precision bf16",
    "train --preset 419m --steps ten": "train --preset 419m --steps 10",
    "--preset 419m": "train --preset 419m",
    "plan": "plan --preset 7b",
    "plan --preset 7b --gpu 24GB": "plan --preset 7b --gpu-memory 24GB",
    "plan --preset 7b --gpu 409": "plan --preset 7b --gpu 4090",
    "plan --preset 7b --gpu-memory 24": "plan --preset 7b --gpu-memory 24GiB",
    "plan --preset 7b --memory 64GiB": "plan --preset 7b --host-memory 64GiB",
    "plan --preset 7b --config 'a model.json'": "plan --model 'a model.json'",
    "train 'a model.json'": "train --config 'a model.json'",
    "version": "--version",
    "tune": "tune --path .",
    "fsck": "fsck .",
    "bench adm": "bench adam",
    "resume runs": "train --resume runs",
    "completion": "--install-completion",
    "--install-completions": "--install-completion",
    "frobnicate": "--help",
    "train -preset 419m": "train --preset 419m",
    "train --preset 419m --frobnicate 3": "train --help",
    "train --preset 419m --learning-rate 0.1": "train --preset 419m --lr 0.1",
    "train --preset 419m --gpu-memory 24GiB": "train --help",
    # another kind of thing, though the word is like one that there is
    "train --preset 419m --lora 16": "train --help",
    "train --preset 419m --epochs 3": "train --help",
    "train --preset 419m --wear 10TB": "train --help",
    "train --preset 419m --size 1GiB": "train --help",
    "train --preset 419m --log-every 5": "train --help",
    "train --preset 419m --disk 2TB": "train --help",
    "plan --preset 7b --rate 3,3": "plan --preset 7b --nvme-rate 3,3",
    "plan --preset 7b --gpu-memory 24GiB --vram 24GiB": "plan --help",
    "bench io --path . --model gpt2": "bench io --help",
    "bench io --path . --bs 1MiB": "bench io --path . --block 1MiB",
    "tune --depth 8": "tune --help",
    "sft --model m --dataset_name a.jsonl": "sft --model_name_or_path m --dataset_name a.jsonl",
    # TRL takes either sign
    "sft --model-name-or-path m --data 'a b'": "sft --model-name-or-path m --dataset_name 'a b'",
    "train --preset 419m --lr fast": "train --preset 419m --lr 1e-4",
    "train --preset 419m --save": "train --preset 419m --save checkpoints",
    "train --preset 419m --batch 0": "train --preset 419m --batch 1",
    "train --preset 419m --batch -1": "train --preset 419m --batch 1",
    "train --batch -.5 --preset 419m": "train --batch 10 --preset 419m",
    "train --preset 419m --threads 0": "train --preset 419m --threads 1",
    "train --preset 419m --resident 1GiB --offload cpu": "train --preset 419m --offload cpu",
    "train --preset 419m --nvme . --offload cpu": "train --preset 419m --nvme . --offload nvme",
    "train --preset 419m --deepspeed ds.json": "train --preset 419m --config ds.json",
    "tune --nvme .": "tune --path .",
    "tune 'a disk' --seconds 3": "tune --path 'a disk' --seconds 3",
    "train --preset 419m --steps 3 'a b'": "train --preset 419m --steps 3",
    "tune --path . --size 1MiB": "tune --path . --size 8.0MiB",
    "bench step --nvme .": "bench step --path .",
    "bench step --frobnicate": "bench step --help",
    "fsck --path .": "fsck .",
    "import": "import deepspeed_checkpoint out",
    "export checkpoints": "export checkpoints out",
}
"""By what was typed, what to write instead."""


@pytest.mark.parametrize(("typed", "right"), ANSWERS.items())
def test_a_wrong_command_is_answered_by_the_right_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    right: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 1, "zero_optimization": {"stage": 3}})
    )
    (tmp_path / "a model.json").write_text(json.dumps(preset("151m")))
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(typed))
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.err.rstrip().endswith(f"; write: tiermem {right}")
    assert right != typed
    assert "runs" not in {each.name for each in tmp_path.iterdir()}


def test_every_option_without_its_value_is_answered_with_one_that_it_takes() -> None:
    def checked(command: Any, path: str) -> int:
        options = [each for each in command.params if _name_of(each) and not each.is_flag]
        for name in map(_name_of, options):
            assert _takes(path, name, example_of(path, name)), f"{path} {name}"
        inside = getattr(command, "commands", {}).items()
        return len(options) + sum(checked(each, f"{path} {name}") for name, each in inside)

    assert checked(typer.main.get_command(app), "tiermem") > 100


def test_a_cap_that_is_far_too_small_is_answered_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["train", "--preset", "419m", "--memory", "300MiB", "--precision", "bf16"])
    found = re.search(r"and --memory (\d+)MiB is the smallest that works", capsys.readouterr().err)
    assert found and 600 < int(found[1]) < 760  # with blocks recomputed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_smallest_cap_that_is_named_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps(llama(64, 128, 2, 4, 512)))
    (tmp_path / "data.txt").write_text("The quick brown fox. " * 100)
    words = ["train", "--model", "model.json", "--steps", "1", "--seq", "32", "--data", "data.txt"]
    with pytest.raises(SystemExit):
        main([*words, "--memory", "100MiB"])
    least = re.search(r"and (--memory \d+MiB) is the smallest", capsys.readouterr().err)
    assert least
    with pytest.raises(SystemExit) as ended:
        main([*words, *least[1].split()])
    assert ended.value.code == 0, capsys.readouterr().err


def test_memory_auto_is_most_of_what_is_free() -> None:
    free = int(re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024
    assert 0 < parse_memory("auto") <= free
    assert parse_memory("auto") % MIB == 0
    assert parse_memory("2GiB") == 2 << 30


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"tiermem {tiermem.__version__}\n")


def test_resume_without_a_folder_lists_what_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    options = TrainOptions(preset="151m")
    told = {"tiermem train": options_to_save(options, "151m-nvme", preset("151m"), None)}
    for folder, step in (("runs/one/checkpoints", 7), ("my own", 9)):
        write(
            Path(folder),
            {"weight": {"weight": torch.zeros(3)}},
            f"step{step}",
            step=step,
            client_state=told,
        )
    (tmp_path / "runs" / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["train", "--resume", "--steps", "3"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "tiermem train --resume runs/one" in said and "tiermem train --resume 'my own'" in said
    assert said.count("151m-nvme") == 2 and "empty" not in said


def test_nothing_to_resume_says_how_steps_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["train", "--resume"])
    assert "--save-every" in capsys.readouterr().out


def test_a_shell_completes_commands_options_and_their_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offered(line: str) -> list[str]:
        words = line.split(" ")
        monkeypatch.setenv("_TIERMEM_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        with pytest.raises(SystemExit):
            main([])
        return capsys.readouterr().out.split()

    assert "train" in offered("tiermem tr")
    assert "--offload" in offered("tiermem train --off")
    assert offered("tiermem train --offload n") == ["none", "nvme"]
    assert offered("tiermem train --preset 4") == ["419m"]
