"""Does `tiermem sft` train as TRL's own script does, on every tier, on one and two ranks, with LoRA,
and after a kill? Skipped where trl is not installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("_tiermem_native")
pytest.importorskip("trl", reason="trl is not installed: pip install trl")

import peft
import safetensors.torch
import torch
import trl
from pretrained import completes, pretrained, tokenizer, write_chats
from transformers import AutoModelForCausalLM
from trl.scripts import sft as script

from tiermem.tools.job.launcher import Channel, Job
from tiermem.tools.words import Stop

ARGUMENTS = """
--model_name_or_path ../model --dataset_name ../chats --output_dir out --max_steps 6 --save_steps 3
--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3 --logging_steps 1
--use_cpu true --bf16 false --max_length 32 --disable_tqdm true
"""
LORA = "--use_peft true --lora_r 4 --lora_target_modules q_proj v_proj --lora_dropout 0.1"
EVALUATION = "--eval_strategy steps --eval_steps 3"
STREAMED = {
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "nvme"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "nvme"},
        "stage3_param_persistence_threshold": 0,
    }
}
TOLERANCE = 1e-5
Logged = dict[str, list[float]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pretrained model and chats. The libraries start their threads now, which
    stay."""
    folder = tmp_path_factory.mktemp("home")
    pretrained(folder / "model")
    (folder / "chats").mkdir()
    write_chats(folder / "chats" / "train.jsonl")
    write_chats(folder / "chats" / "test.jsonl", 6)
    words = tokenizer()
    data = script_data(folder)
    data.map(lambda row: words.apply_chat_template(row["messages"])).with_format("torch")[:2]
    return folder


def script_data(folder: Path) -> Any:
    import datasets

    return datasets.load_dataset(str(folder / "chats"))["train"]


def place(home: Path, name: str) -> Path:
    """The folder of one run, beside the model and the chats."""
    folder = home / name
    (folder / "nvme").mkdir(parents=True)
    (folder / "ds.json").write_text(json.dumps(STREAMED))
    return folder


def words_of(module: str, ranks: int, *words: str) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *(launch if ranks > 1 else []), "-m", module, *words]


def variables() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CI": "true", "HF_HUB_OFFLINE": "1"}


def run(folder: Path, words: list[str]) -> None:
    done = subprocess.run(
        words,
        cwd=folder,
        env=variables(),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]


def logged(folder: Path, num_steps: int = 6) -> Logged:
    """What the last checkpoint says of the training."""
    file = folder / "out" / f"checkpoint-{num_steps}" / "trainer_state.json"
    history = json.loads(file.read_text())["log_history"]
    keys = "loss", "grad_norm", "eval_loss"
    return {key: [each[key] for each in history if key in each] for key in keys}


def assert_near(found: Logged, expected: Logged) -> None:
    assert len(expected["loss"]) == 6 and expected["loss"][-1] < expected["loss"][0]
    for key, values in expected.items():
        relative = 1e-4 if key == "grad_norm" else 0
        assert found[key] == pytest.approx(values, rel=relative, abs=TOLERANCE), key


def assert_opens(folder: Path, other: Path) -> None:
    """The output opens in plain transformers, or in peft, and has the weights of another."""
    name = "adapter_model" if (folder / "adapter_config.json").is_file() else "model"
    tensors, others = (
        safetensors.torch.load_file(each / f"{name}.safetensors") for each in (folder, other)
    )
    for each, value in others.items():
        torch.testing.assert_close(tensors[each], value, rtol=0, atol=1e-4)
    if name == "model":
        opened = AutoModelForCausalLM.from_pretrained(folder)
    else:
        base = AutoModelForCausalLM.from_pretrained(folder.parents[1] / "model")
        opened = peft.PeftModel.from_pretrained(base, folder)
    chat = [{"role": "user", "content": "where"}]
    words = tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    assert opened.generate(**words, max_new_tokens=4).shape[1] > words["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "rows.jsonl is empty"),
        ('{"messages": [{"from": "human", "text": "2+2="}]}\n', "no line of the data is left"),
        (
            '{"prompt": "2+2=", "response": "4"}\n',
            "lines have 'prompt', 'response': give 'messages'",
        ),
    ],
)
def test_data_that_cannot_be_trained_on_are_named(
    rows: str, said: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place(home, f"rows {len(rows)}"))
    monkeypatch.setattr(trl, "SFTTrainer", trl.SFTTrainer)
    from tiermem.tools.train.fine_tuning import fine_tune

    Path("rows.jsonl").write_text(rows)
    words = ARGUMENTS.replace("../chats", "rows.jsonl").split()
    asked = {"arguments": words, "offload": "cpu", "states": None, "frozen": None}
    with pytest.raises(ValueError, match=said):
        fine_tune(Job("tiermem sft", sft=asked), Channel(None), Stop())


def test_the_model_was_pretrained(home: Path) -> None:
    assert completes(AutoModelForCausalLM.from_pretrained(home / "model"), tokenizer(), 4)


def test_in_memory_losses_are_those_of_trl(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # trl reports its use otherwise
    words = f"{ARGUMENTS} {EVALUATION}".split()
    monkeypatch.chdir(place(home, "plain here"))
    script.main(*script.make_parser().parse_args_and_config(words))
    monkeypatch.chdir(place(home, "ours here"))
    monkeypatch.setattr(trl, "SFTTrainer", trl.SFTTrainer)
    from tiermem.tools.train.fine_tuning import fine_tune

    asked = {
        "arguments": words,
        "offload": "cpu",
        "states": None,
        "frozen": None,
        "tbw_bytes": None,
    }
    fine_tune(Job("tiermem sft", sft=asked), Channel(None), Stop())
    expected = logged(home / "plain here")
    assert len(expected["eval_loss"]) == 2
    assert_near(logged(home / "ours here"), expected)
    assert_opens(home / "ours here" / "out", home / "plain here" / "out")


@pytest.mark.slow
@pytest.mark.parametrize("section", [{"bf16": {"enabled": True}}, {}], ids=["said", "left out"])
def test_a_config_in_bf16_makes_weights_of_it(
    section: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though TRL's own `--dtype` is float32 where it is left out. The data is a file beside it."""
    monkeypatch.setenv("CI", "true")
    monkeypatch.chdir(place(home, f"bf16 {len(section)}"))
    monkeypatch.setattr(trl, "SFTTrainer", trl.SFTTrainer)
    from tiermem.tools.train.fine_tuning import fine_tune

    more = "--bf16 true --max_steps 1 --save_steps 1"
    shutil.copy(next(Path("../chats").glob("train*")), "chats.jsonl")
    words = f"{ARGUMENTS} {more}".replace("../chats", "chats.jsonl").split()
    asked = {"arguments": words, "tbw_bytes": None}
    config = STREAMED | section
    fine_tune(Job("tiermem sft", config=config, sft=asked), Channel(None), Stop())
    saved = safetensors.torch.load_file("out/model.safetensors")
    assert {each.dtype for each in saved.values()} == {torch.bfloat16}


CASES = {
    "on nvme under a cap": ("--offload nvme --nvme nvme --memory 1100MiB", EVALUATION, 1),
    "packed, all streamed": ("--config ds.json", "--packing true --packing_strategy wrapped", 1),
    "lora": ("--config ds.json", LORA, 1),
    "ranks": ("--config ds.json", EVALUATION, 2),
    "lora on ranks": ("--config ds.json", LORA, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_trl(case: str, home: Path) -> None:
    options, arguments, ranks = CASES[case]
    theirs = place(home, f"plain {case}")
    run(theirs, words_of("trl.scripts.sft", ranks, *ARGUMENTS.split(), *arguments.split()))
    ours = place(home, f"ours {case}")
    words = ["sft", *ARGUMENTS.split(), *arguments.split(), *options.split()]
    run(ours, words_of("tiermem.tools.cli", ranks, *words, "--json", "out.json"))
    assert_near(logged(ours), logged(theirs))
    assert_opens(ours / "out", theirs / "out")
    figures = json.loads((ours / "out.json").read_text())
    assert figures["losses"] == pytest.approx(logged(ours)["loss"], abs=1e-6)
    assert figures["outcome"] == "finished" and len(figures["step_s"]) == 6
    assert [path.name for path in (ours / "runs").glob("*/loss.png")] == ["loss.png"]
    assert not [*(ours / "nvme").glob("tiermem-*/lock")]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["", LORA], ids=["whole", "lora"])
def test_killed_and_resumed_losses_are_the_same_to_the_bit(arguments: str, home: Path) -> None:
    num_steps = 40
    more = (
        f"--max_steps {num_steps} --save_steps 4 --save_total_limit 3 --config ds.json {arguments}"
    )
    words = words_of("tiermem.tools.cli", 1, "sft", *ARGUMENTS.split(), *more.split())
    whole = place(home, f"whole {len(arguments)}")
    run(whole, words)
    killed = place(home, f"killed {len(arguments)}")
    with subprocess.Popen(
        words, cwd=killed, env=variables(), stdout=subprocess.DEVNULL, start_new_session=True
    ) as launcher:
        deadline = time.monotonic() + 200
        while not (killed / "out" / "checkpoint-8" / "trainer_state.json").is_file():
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        for pid in (launcher.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
    assert not (killed / "out" / f"checkpoint-{num_steps}").exists()
    run(killed, [*words, "--resume_from_checkpoint", "true"])
    assert logged(killed, num_steps) == logged(whole, num_steps)
    shutil.rmtree(killed)


@pytest.mark.slow
def test_the_base_of_adapters_is_packed(home: Path) -> None:
    folder = place(home, "packed")
    shutil.copytree(home / "model", folder / "wide")
    shape = AutoModelForCausalLM.from_pretrained(home / "model").config
    shape.update({"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128})
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "wide")
    words = [*ARGUMENTS.split(), *LORA.split(), "--model_name_or_path", "wide", "--max_steps", "1"]
    words += ["--frozen", "nf4", "--offload", "cpu", "--json", "run.json", "--verbose"]
    run(folder, words_of("tiermem.tools.cli", 1, "sft", *words))
    (run_folder,) = (folder / "runs").iterdir()
    rows = json.loads((run_folder / "run.json").read_text())["pictures"]["plan"]
    assert any("frozen matrices in nf4 blocks" in why for *_, why in rows)
