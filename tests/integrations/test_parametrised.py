"""Have weights that a parametrisation computes their values, also where the files lack them and after the model is built?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file

import tiermem

FIELDS = {
    "vocab_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
}
POSITION = "wav2vec2.encoder.pos_conv_embed.conv"

SCRIPT = """
import sys, torch, transformers as T
from safetensors.torch import save_file
zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
args = T.TrainingArguments(  # which transformers remembers weakly
    sys.argv[1], per_device_train_batch_size=2, max_steps=1, report_to=[], use_cpu=True,
    deepspeed={"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero},
)
import deepspeed
real = torch.empty
def dirty(*args, **kwargs):  # memory that was used before
    made = real(*args, **kwargs)
    return made.fill_(float("nan")) if made.is_floating_point() and not made.is_meta else made
torch.empty = dirty
torch.manual_seed(0)
kind = T.Wav2Vec2ForCTC
model = kind.from_pretrained(sys.argv[1]) if sys.argv[3] == "file" else kind._from_config(
    T.AutoConfig.from_pretrained(sys.argv[1])
)
assert hasattr(next(model.parameters()), "ds_id")
torch.empty = real
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    save_file({name: each.detach().clone() for name, each in model.named_parameters()}, sys.argv[2])
"""


def saved(folder: Path, lacks: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**FIELDS)).save_pretrained(folder)
    file = folder / "model.safetensors"
    kept = {name: each for name, each in load_file(file).items() if not lacks or lacks not in name}
    save_file(kept, file, {"format": "pt"})
    return kept


def assert_values(found: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
    assert [name for name, each in found.items() if not each.isfinite().all()] == []
    assert [name for name, each in stored.items() if not torch.equal(each, found[name])] == []
    weight = found[f"{POSITION}.parametrizations.weight.original1"]
    assert 0.01 < weight.std() < 1


@pytest.mark.parametrize(
    ("lacks", "source"),
    [
        pytest.param("", "file", marks=pytest.mark.slow),  # 6 s
        ("pos_conv_embed", "file"),
        pytest.param(".", "config", marks=pytest.mark.slow),  # 9 s
    ],
)
def test_weight_norm_is_finite_as_under_deepspeed(lacks: str, source: str, tmp_path: Path) -> None:
    stored = saved(tmp_path, lacks)
    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / "found.safetensors"
    command = [sys.executable, "-m", "tiermem.as_deepspeed", str(tmp_path / "script.py"), str(tmp_path)]
    command += [str(out), source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_values(load_file(out), stored)


@pytest.mark.parametrize("lacks", ["", "pos_conv_embed"])
def test_weight_norm_is_finite_when_opened(lacks: str, tmp_path: Path) -> None:
    stored = saved(tmp_path, lacks)
    with tiermem.shard(tiermem.from_pretrained(tmp_path), tiermem.OffloadPolicy()) as shards:
        assert_values({name: each.clone() for name, each in shards.model.state_dict().items()}, stored)
