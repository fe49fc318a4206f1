"""Have weights that a parametrisation computes their values, also where the files lack them and
after the model is built?"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations

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


class Normed(transformers.PreTrainedModel):
    """A layer under each norm that torch has, those of older hooks among them."""

    config_class = transformers.LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        make = functools.partial(nn.Linear, 6, 6)
        self.by_hook = nn.Sequential(nn.utils.weight_norm(make()), nn.utils.spectral_norm(make()))
        self.computed = nn.Sequential(
            parametrizations.weight_norm(make()), parametrizations.spectral_norm(make())
        )
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.computed(self.by_hook(x))


SCRIPT = """
import sys, torch, transformers as T
sys.path.insert(0, sys.argv[4])
from safetensors.torch import save_file
from test_parametrised import Normed
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
config = T.AutoConfig.from_pretrained(sys.argv[1])
kind = Normed if config.model_type == "llama" else T.Wav2Vec2ForCTC
model = kind.from_pretrained(sys.argv[1]) if sys.argv[3] == "file" else kind._from_config(config)
assert hasattr(next(model.parameters()), "ds_id")
torch.empty = real
found = {name: each.clone() for name, each in model.named_buffers()}
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    found |= {name: each.detach().clone() for name, each in model.named_parameters()}
    if kind is Normed:
        found["output"] = model(torch.ones(2, 6)).detach()
save_file(found, sys.argv[2])
"""


def saved(folder: Path, lacks: str, is_normed: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = (
        Normed(transformers.LlamaConfig())
        if is_normed
        else transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**FIELDS))
    )
    made.save_pretrained(folder)
    file = folder / "model.safetensors"
    kept = {name: each for name, each in load_file(file).items() if not lacks or lacks not in name}
    save_file(kept, file, {"format": "pt"})
    return kept


def assert_values(found: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
    assert [name for name, each in found.items() if not each.isfinite().all()] == []
    assert [name for name, each in stored.items() if not torch.equal(each, found[name])] == []
    weight = found[f"{POSITION}.parametrizations.weight.original1"]
    assert 0.01 < weight.std() < 1


def as_under_deepspeed(
    folder: Path, source: str, reported: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """The tensors that a script under as_deepspeed has found; reported: what it says on stderr."""
    (folder / "script.py").write_text(SCRIPT)
    out = folder / "found.safetensors"
    command = [sys.executable, "-m", "tiermem.as_deepspeed", str(folder / "script.py"), str(folder)]
    command += [str(out), source, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [each for each in reported if each not in done.stderr] == []
    return load_file(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lacks", "source"), [("", "file"), ("pos_conv_embed", "file"), (".", "config")]
)
def test_weight_norm_is_finite_as_under_deepspeed(lacks: str, source: str, tmp_path: Path) -> None:
    stored = saved(tmp_path, lacks)
    assert_values(as_under_deepspeed(tmp_path, source), stored)


def assert_normed(found: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
    assert [name for name, each in found.items() if not each.isfinite().all()] == []
    assert [name for name, each in stored.items() if not torch.equal(each, found[name])] == []
    vectors = [
        each
        for name, each in found.items()
        if name.endswith(("._u", "._v", "t_u", "weight_v")) and each.dim() == 1
    ]
    assert len(vectors) == 4
    torch.testing.assert_close(torch.stack([each.norm() for each in vectors]), torch.ones(4))
    weights = [each for each in found.values() if each.shape == (6, 6)]
    assert all(0.01 < each.std() < 1 for each in weights)


@pytest.mark.slow
@pytest.mark.parametrize("lacks", [".", "weight"])
@pytest.mark.usefixtures("forked_python")
def test_every_norm_has_values_as_under_deepspeed(lacks: str, tmp_path: Path) -> None:
    stored = saved(tmp_path, lacks, is_normed=True)
    assert_normed(as_under_deepspeed(tmp_path, "file"), stored)


@pytest.mark.slow
def test_weights_of_older_hooks_that_transformers_does_not_find_are_in_its_report(
    tmp_path: Path,
) -> None:
    """Its loader for ZeRO-3 renames weight_g and weight_v, as if a parametrisation had them; so it
    does under DeepSpeed."""
    stored = saved(tmp_path, "", is_normed=True)
    renamed = [f"by_hook.{name}" for name in ("0.weight_g", "0.weight_v", "1.weight_v")]
    reported = ("LOAD REPORT", "by_hook.0.weight_g", "by_hook.{0, 1}.weight_v")
    found = as_under_deepspeed(tmp_path, "file", reported)
    assert_normed(found, {name: each for name, each in stored.items() if name not in renamed})


@pytest.mark.parametrize("lacks", ["", ".", "weight", "_u"])
def test_every_norm_has_values_when_opened(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, real = saved(tmp_path, lacks, is_normed=True), torch.empty

    def dirty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = real(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() and not made.is_meta else made

    monkeypatch.setattr(torch, "empty", dirty)
    model = tiermem.from_pretrained(tmp_path, model_class=Normed)
    monkeypatch.undo()
    with tiermem.shard(model, tiermem.OffloadPolicy()) as shards:
        found = {name: each.clone() for name, each in shards.model.state_dict().items()}
        assert_normed(found | {"output": model(torch.ones(2, 6)).detach()}, stored)


@pytest.mark.parametrize("lacks", ["", "pos_conv_embed"])
def test_weight_norm_is_finite_when_opened(lacks: str, tmp_path: Path) -> None:
    stored = saved(tmp_path, lacks)
    with tiermem.shard(tiermem.from_pretrained(tmp_path), tiermem.OffloadPolicy()) as shards:
        assert_values(
            {name: each.clone() for name, each in shards.model.state_dict().items()}, stored
        )
