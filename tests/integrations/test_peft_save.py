"""Is what is saved of adapters what the plain Trainer saves, whatever the tuner, so that a plain
model loads it?

Under TiermemTrainer, under as_deepspeed (stage 3 with offload) and under Accelerate.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")
pytest.importorskip("accelerate")

import peft
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from trainings import TiermemTrainer, Trainer, on_nvme

from tiermem.integrations.accelerate import prepare
from tiermem.run.shards import owner_of

TARGETS = ["q_proj", "v_proj"]
FIELDS: dict[str, dict[str, Any]] = {
    "Lora": {"r": 4},
    "Lora, DoRA": {"r": 4, "use_dora": True},
    "Lora, trainable tokens": {"r": 4, "trainable_token_indices": {"embed_tokens": [1, 5]}},
    "Lora, head saved": {"r": 4, "modules_to_save": ["lm_head"]},
    "AdaLora": {"init_r": 4, "target_r": 2, "total_step": 10},
    "IA3": {"feedforward_modules": []},
    "LoHa": {"r": 4},
    "LoKr": {"r": 4},
    "Vera": {"r": 4},
    "VBLoRA": {"r": 4, "num_vectors": 8, "vector_length": 8},
    "VBLoRA, top k alone": {
        "r": 4,
        "num_vectors": 8,
        "vector_length": 8,
        "save_only_topk_weights": True,
    },
    "RandLora": {"r": 4},
    "OFT": {"oft_block_size": 8},
    "BOFT": {"boft_block_size": 8},
    "HRA": {"r": 4},
    "FourierFT": {"n_frequency": 8},
    "LNTuning": {"target_modules": ["input_layernorm"]},
    "PromptTuning": {"target_modules": None, "num_virtual_tokens": 3, "task_type": "CAUSAL_LM"},
    "PrefixTuning": {"target_modules": None, "num_virtual_tokens": 3, "task_type": "CAUSAL_LM"},
    "PromptEncoder": {"target_modules": None, "num_virtual_tokens": 3, "task_type": "CAUSAL_LM"},
}


def config_of(name: str) -> Any:
    fields = {"target_modules": TARGETS, **FIELDS[name]}
    if fields["target_modules"] is None:
        del fields["target_modules"]
    return getattr(peft, f"{name.partition(',')[0]}Config")(**fields)


def second(model: Any) -> Any:
    model = peft.get_peft_model(model, config_of("Lora"))
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["v_proj"]))
    return model


def resized(model: Any) -> Any:
    model.resize_token_embeddings(71, mean_resizing=False)
    return peft.get_peft_model(model, config_of("Lora"))


def inside(model: Any) -> Any:
    """An adapter that transformers itself has put into its model."""
    model.add_adapter(config_of("Lora"))
    return model


BUILDS: dict[str, Callable[[Any], Any]] = {
    **{
        name: (lambda model, name=name: peft.get_peft_model(model, config_of(name)))
        for name in FIELDS
    },
    "a second, frozen adapter": second,
    "resized embeddings": resized,
    "an adapter of transformers": inside,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def saved(
    name: str, base: Path, folder: Path, kind: Any, deepspeed: Any = None, **given: Any
) -> dict[str, torch.Tensor]:
    """Trains two steps and saves; the tensors of all files."""
    torch.manual_seed(0)
    args = transformers.TrainingArguments(
        str(folder), max_steps=2, learning_rate=1e-2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        deepspeed=deepspeed,
    )  # fmt: skip
    model = BUILDS[name](transformers.AutoModelForCausalLM.from_pretrained(base))
    tokens = torch.randint(3, 64, (16, 12), generator=torch.Generator().manual_seed(0))
    trainer = kind(
        model, args, train_dataset=[{"input_ids": each, "labels": each} for each in tokens], **given
    )
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    if given:
        trainer.close()
    return tensors_in(folder / "saved")


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.rglob("*.safetensors")
    return {
        f"{file.parent.name}/{key}": value
        for file in files
        for key, value in load_file(file).items()
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=key)


QUICK = {"Lora", "Vera", "VBLoRA", "RandLora", "a second, frozen adapter", "resized embeddings"}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in BUILDS],
)
def test_a_saved_adapter_is_the_plain_trainers(name: str, base: Path, tmp_path: Path) -> None:
    expected = saved(name, base, tmp_path / "plain", Trainer)
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    found = saved(name, base, tmp_path / "ours", TiermemTrainer, tiermem=on_nvme(nvme))
    assert_equal(found, expected)
    # of which a loaded one has other logits, also a plain one
    if name in FIELDS and "top k" not in name:
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "ours" / "saved")
        state = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
        assert all(
            torch.equal(state[key], found[f"saved/{key}"])
            for key in state.keys() & {k[6:] for k in found}
        )


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_under_as_deepspeed_the_same_files_are_saved(base: Path, tmp_path: Path) -> None:
    compare_under_as_deepspeed(sorted(QUICK), base, tmp_path)


@pytest.mark.slow
def test_under_as_deepspeed_the_same_files_are_saved_of_every_tuner(
    base: Path, tmp_path: Path
) -> None:
    names = set(BUILDS) - QUICK
    if not torch.cuda.is_available():
        names -= {"Lora, trainable tokens"}  # peft itself gathers such tokens on CUDA in stage 3
    compare_under_as_deepspeed(sorted(names), base, tmp_path)


def compare_under_as_deepspeed(names: list[str], base: Path, folder: Path) -> None:
    script = Path(__file__).with_name("peft_under_deepspeed.py")
    command = ["-m", "tiermem.as_deepspeed", str(script), str(base), str(folder), *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=400
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    for number, name in enumerate(names):
        expected = saved(name, base, folder / "plain" / str(number), Trainer)
        assert_equal(tensors_in(folder / str(number) / "saved"), expected)


@pytest.mark.slow
def test_under_accelerate_peft_saves_the_same_from_the_whole_state(
    base: Path, tmp_path: Path
) -> None:
    for number, name in enumerate(sorted(QUICK)):
        torch.manual_seed(0)
        model = BUILDS[name](transformers.AutoModelForCausalLM.from_pretrained(base))
        folder = tmp_path / str(number)
        (folder / "nvme").mkdir(parents=True)
        model.save_pretrained(folder / "plain")
        accelerator = Accelerator(cpu=True)
        prepared = prepare(accelerator, model, policy=on_nvme(folder / "nvme"))
        state = accelerator.get_state_dict(prepared)
        accelerator.unwrap_model(prepared).save_pretrained(folder / "saved", state_dict=state)
        owner_of(prepared).close()
        found = {
            key.removeprefix("saved/"): each for key, each in tensors_in(folder / "saved").items()
        }
        assert_equal(
            found,
            {
                key.removeprefix("plain/"): each
                for key, each in tensors_in(folder / "plain").items()
            },
        )
