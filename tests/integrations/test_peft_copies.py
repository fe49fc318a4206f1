"""Does peft work on a base that rests on a tier, also where it copies, replaces or resizes modules
of the base?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import peft
import torch
import torch.distributed as dist
import transformers
from launch import launch
from trainings import on_nvme

import tiermem

FIELDS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def with_lora(**fields: Any) -> Callable[[Any], Any]:
    return lambda model: peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **fields)
    )


def resized(model: Any) -> Any:
    model.resize_token_embeddings(71, mean_resizing=False)
    return with_lora(modules_to_save=["lm_head", "embed_tokens"])(model)


CASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a head that is saved": ("CausalLM", with_lora(modules_to_save=["lm_head"])),
    "a classifier": ("SequenceClassification", with_lora(task_type="SEQ_CLS")),
    "a classifier of tokens": ("TokenClassification", with_lora(task_type="TOKEN_CLS")),
    "replicated layers": ("CausalLM", with_lora(layer_replication=[(0, 2), (1, 2)])),
    "PiSSA": ("CausalLM", with_lora(init_lora_weights="pissa")),
    "PiSSA by random projections": ("CausalLM", with_lora(init_lora_weights="pissa_niter_2")),
    "OLoRA": ("CausalLM", with_lora(init_lora_weights="olora")),
    "resized embeddings": ("CausalLM", resized),
}


def made(name: str, folder: Path) -> Any:
    """The class of a case, whose weights it saves."""
    kind = getattr(transformers, f"LlamaFor{CASES[name][0]}")
    torch.manual_seed(0)
    kind(transformers.LlamaConfig(**FIELDS, pad_token_id=0, num_labels=3)).save_pretrained(folder)
    return kind


def losses(model: Any, optimizer: Any, name: str) -> list[float]:
    tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    of_samples = {"SequenceClassification": tokens[:, 0] % 3, "TokenClassification": tokens % 3}
    found = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=of_samples.get(CASES[name][0], tokens)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def plain(name: str, folder: Path) -> tuple[dict[str, torch.Size], list[float]]:
    """The names and shapes of plain peft's model, and its losses."""
    kind = made(name, folder)
    torch.manual_seed(0)
    model = CASES[name][1](kind.from_pretrained(folder, dtype=torch.float32).eval())
    names = {key: each.shape for key, each in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return names, losses(model, optimizer, name)


def ours(name: str, folder: Path, nvme: Path) -> tuple[dict[str, torch.Size], list[float]]:
    """The same of a base that rests. On several ranks peft works inside zero.Init, where ranks read
    together."""
    kind, build = getattr(transformers, f"LlamaFor{CASES[name][0]}"), CASES[name][1]
    policy = on_nvme(nvme)
    base = tiermem.from_pretrained(folder, policy=policy, model_class=kind, dtype=torch.float32)
    with tiermem.zero.Init(policy=policy, enabled=dist.is_initialized()):
        model = build(base)
    names = {key: each.shape for key, each in model.named_parameters()}
    with tiermem.shard(model, policy):
        optimizer = tiermem.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return names, losses(model, optimizer, name)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_an_adapted_model_is_the_plain_one(name: str, tmp_path: Path) -> None:
    names, expected = plain(name, tmp_path / "base")
    torch.manual_seed(0)
    found = ours(name, tmp_path / "base", tmp_path / "nvme")
    assert found[0] == names
    assert found[1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_on_two_ranks_an_adapted_model_is_the_plain_one(tmp_path: Path) -> None:
    expected = {name: plain(name, tmp_path / name) for name in CASES}
    (tmp_path / "out").mkdir()
    for found in launch(
        Path(__file__).with_name("peft_copies_on_ranks.py"), 2, tmp_path / "out", str(tmp_path)
    ):
        for name, (names, values) in expected.items():
            assert found[name][0] == names, name
            assert found[name][1] == pytest.approx(values, abs=1e-5), name


GROWTH = """
import re, sys
from pathlib import Path
import peft, transformers, tiermem
from tiermem import OffloadPolicy, Tier

policy = OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, paths=[sys.argv[1]], persistence_numel=50)

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) >> 10

def base(num_layers):
    fields = dict(vocab_size=64, hidden_size=1024, intermediate_size=1024, num_attention_heads=8)
    with tiermem.zero.Init(policy=policy):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=num_layers, **fields))

def adapted(model):
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=sys.argv[2])
    return peft.get_peft_model(model, config)

tiermem.shard(adapted(base(1)), policy).close()  # libraries that are loaded on first use are
model = base(5)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
model = adapted(model)
print(status("VmHWM") - before, sum(each.numel() * 4 >> 20 for each in model.parameters()))
tiermem.shard(model, policy).close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("values", ["olora", "pissa_niter_2"])
def test_values_computed_from_the_base_take_memory_for_one_weight(
    values: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", GROWTH, str(tmp_path), values]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    grown, whole = map(int, done.stdout.split()[-2:])
    # in MiB: copies of one weight and its factors, and what the C library keeps
    assert grown <= 12 * 4 < whole // 2


SCRIPT = """
import sys, peft, transformers as T
zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
args = T.TrainingArguments(  # which transformers remembers weakly
    sys.argv[1], per_device_train_batch_size=2, max_steps=1, report_to=[],
    deepspeed={"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero},
)
model = T.LlamaForSequenceClassification.from_pretrained(sys.argv[1])
assert hasattr(model.score.weight, "ds_id")
model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS"))
print("trained:", sorted(name.split(".")[-2] for name, each in model.named_parameters() if each.requires_grad))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_classifier_is_copied_as_under_deepspeed(tmp_path: Path) -> None:
    transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**FIELDS, pad_token_id=0, num_labels=3)
    ).save_pretrained(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "tiermem.as_deepspeed",
        str(tmp_path / "script.py"),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'default', 'default'" in done.stdout
