"""Do TRL's SFT, DPO and GRPO trainers take the mixin, and train as they do without it? Skipped where trl is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed: pip install trl")

from launch import launch
from trainings import assert_equal, on_nvme
from transformers import AutoModelForCausalLM
from trl_trainings import KINDS, rows, saved, tokenizer, train

import tiermem
from tiermem.integrations.choice import owner_of

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    """The libraries of the data and of the tokenizer start their threads now, which stay."""
    words = tokenizer()
    rows({"text": 3}).map(lambda row: words(row["text"])).with_format("torch")[:2]


MODELS = ["llama", pytest.param("gpt2", marks=pytest.mark.slow)]


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
    assert_equal(train(kind, sharded, opened, ours, str(ours / "checkpoint-3"), tiermem=policy, **own), expected)
    if own:
        owner = owner_of(own["ref_model"])
        assert owner is not None
        owner.close()


@pytest.mark.slow
def test_losses_equal_those_of_two_ranks_under_ddp(tmp_path: Path) -> None:
    for folder in ("out", "work"):
        (tmp_path / folder).mkdir()
    for found in launch(HERE / "trl_trainings.py", 2, tmp_path / "out", str(tmp_path / "work"), *KINDS):
        for expected, log in found.values():
            assert_equal(log, expected)
