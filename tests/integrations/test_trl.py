"""Do TRL's SFT, DPO and GRPO trainers take the mixin, and train as they do without it? Skipped
where trl is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed: pip install trl")

from launch import launch
from trainings import assert_equal, on_nvme
from transformers import AutoModelForCausalLM
from trl_trainings import KINDS, rows, saved, tokenizer, train

import tiermem
from tiermem.run.shards import owner_of

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    """The libraries of the data and of the tokenizer start their threads now, which stay."""
    words = tokenizer()
    rows({"text": 3}).map(lambda row: words(row["text"])).with_format("torch")[:2]


MODELS = ["llama", pytest.param("gpt2", marks=pytest.mark.slow)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_equal_those_of_trl_also_when_resumed(kind: str, model: str, tmp_path: Path) -> None:
    opened, policy = saved(model, tmp_path), on_nvme(tmp_path / "nvme")
    sharded, ours = KINDS[kind].sharded, tmp_path / "ours"
    expected = train(kind, KINDS[kind].plain, opened, tmp_path / "plain")
    assert len(expected.losses) == 6 and min(expected.norms) > 1e-3
    assert_equal(train(kind, sharded, opened, ours, tiermem=policy), expected)
    own: dict[str, Any] = {}
    if kind == "dpo":  # the reference may rest on a tier, too
        own["ref_model"] = AutoModelForCausalLM.from_pretrained(opened).eval()
        tiermem.shard(own["ref_model"], policy, is_trained=False)
    assert_equal(
        train(kind, sharded, opened, ours, str(ours / "checkpoint-3"), tiermem=policy, **own),
        expected,
    )
    if own:
        owner = owner_of(own["ref_model"])
        assert owner is not None
        owner.close()


@pytest.mark.slow
def test_losses_equal_those_of_two_ranks_under_ddp(tmp_path: Path) -> None:
    for folder in ("out", "work"):
        (tmp_path / folder).mkdir()
    for found in launch(
        HERE / "trl_trainings.py", 2, tmp_path / "out", str(tmp_path / "work"), *KINDS
    ):
        for expected, log in found.values():
            assert_equal(log, expected)


ZERO3 = {
    "stage": 3,
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
    "stage3_param_persistence_threshold": 0,
}
SIZES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
SETTINGS = """
--max_steps 6 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3 --logging_steps 1
--use_cpu true --report_to none --max_length 16 --bf16 false --dtype float32 --gradient_checkpointing false
"""


@pytest.mark.slow
def test_its_command_line_under_as_deepspeed_has_the_losses_of_its_own(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    tokenizer().save_pretrained(model)
    (tmp_path / "text").mkdir()
    texts = [json.dumps({"text": text}) for text in rows({"text": 9})["text"]]
    (tmp_path / "text" / "train.jsonl").write_text("\n".join(texts))
    config = {**dict.fromkeys(SIZES, "auto"), "zero_optimization": ZERO3}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    given = [
        "--model_name_or_path",
        str(model),
        "--dataset_name",
        str(tmp_path / "text"),
        *SETTINGS.split(),
    ]

    def losses(name: str, *command: str) -> list[float]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CI": "true"}
        words = [sys.executable, "-m", *command, "--output_dir", str(tmp_path / name), *given]
        done = subprocess.run(
            words, capture_output=True, text=True, env=environment, timeout=200, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
        state = json.loads(
            (tmp_path / name / "checkpoint-6" / "trainer_state.json").read_text("utf-8")
        )
        return [each["loss"] for each in state["log_history"] if "loss" in each]

    expected = losses("plain", "trl.cli.main", "sft")
    assert len(expected) == 6
    config_file = str(tmp_path / "ds.json")
    found = losses(
        "ours", "tiermem.as_deepspeed", "-m", "trl.cli.main", "sft", "--deepspeed", config_file
    )
    assert found == pytest.approx(expected, rel=0, abs=1e-5)
