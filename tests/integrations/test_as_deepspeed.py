"""Does a script that uses DeepSpeed through transformers and accelerate train, save and resume with tiermem answering?"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import fork_server
import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file
from trainings import Trainer, train
from transformers import AutoModelForCausalLM

import tiermem
from tiermem.integrations.as_deepspeed import main

HERE = Path(__file__).parent
MAIN = HERE.parent.parent / "tiermem" / "as_deepspeed.py"


def test_a_script_with_a_deepspeed_config_trains_as_without(tmp_path: Path) -> None:
    done = fork_server.run([str(MAIN), str(HERE / "deepspeed_script.py"), str(tmp_path)], 400, OMP_NUM_THREADS="1")
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
    assert opened.keys() >= load_file(tmp_path / "plain" / "checkpoint-6" / "model.safetensors").keys()


def test_it_is_refused_after_transformers_was_imported() -> None:
    with pytest.raises(RuntimeError, match=r"after transformers was imported: call it before"):
        tiermem.as_deepspeed()
    assert importlib.util.find_spec("deepspeed") is None


def test_a_script_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["as_deepspeed"])
    with pytest.raises(SystemExit, match=r"usage: python -m tiermem.as_deepspeed SCRIPT"):
        main()
