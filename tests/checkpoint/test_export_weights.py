"""Are exported weights the saved ones to the bit, in every format, opened by others, and written in
little memory?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from saved_by_hand import write
from torch import nn

from tiermem.checkpoint.interchange.export import export_weights
from tiermem.checkpoint.interchange.foreign import Foreign, ForeignParameter, of_tensor
from tiermem.checkpoint.interchange.write import write_checkpoint
from tiermem.checkpoint.opening.source import CHUNK_NUMEL, Source, weights_of
from tiermem.utils import zero_to_fp32


def two_parts(shape: tuple[int, ...], is_split: bool = False) -> dict[str, torch.Tensor]:
    """A bf16 weight and its master: fp32 beside it, or the bits that it lacks."""
    master = torch.randn(shape)
    bits = master.view(torch.int32) + 0x8000  # the weight is the upper half, ties away from zero
    weight = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    if not is_split:
        return {"weight": weight, "master": master}
    return {"weight": weight, "master": master.view(torch.int32).to(torch.int16)}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """A checkpoint of three ranks, cut into odd pieces."""
    torch.manual_seed(0)
    states = {
        "embed.weight": two_parts((131, 7)),
        "split.weight": two_parts((1001,), is_split=True),
        "plain": {"weight": torch.randn(5, 3)},
        "scalar": {"weight": torch.tensor(2.5)},
        "seen": {"weight": torch.arange(9)},
    }
    states["embed.weight"]["exp_avg"] = torch.randn(131, 7)
    write(tmp_path / "ckpt", states, world=3, most_numel=193)
    return tmp_path / "ckpt", states


def test_weights_are_exported_as_they_are_stored(
    saved: tuple[Path, dict[str, dict[str, torch.Tensor]]],
) -> None:
    where, states = saved
    with Source.open(where) as source:
        shards = export_weights(weights_of(source), where.parent / "out", None, config='{"a": 1}')
    assert [shard.name for shard in shards] == ["model.safetensors"]
    assert sorted(os.listdir(where.parent / "out")) == ["config.json", "model.safetensors"]
    found = load_file(where.parent / "out" / "model.safetensors")
    assert set(found) == set(states)
    for name, value in found.items():
        assert value.dtype == states[name]["weight"].dtype
        assert torch.equal(value, states[name]["weight"]), name


def master_of(states: dict[str, torch.Tensor]) -> torch.Tensor:
    weight, master = states["weight"], states.get("master")
    if master is None:
        return weight.float() if weight.is_floating_point() else weight
    if master.dtype == torch.int16:
        upper = weight.view(torch.int16).to(torch.int32) << 16
        low = master.to(torch.int32)  # signed: the weight was rounded up where it is negative
        return (upper + low).view(torch.float32)
    return master


@pytest.mark.parametrize("is_safetensors", [True, False])
def test_masters_are_exported_in_fp32(
    saved: tuple[Path, dict[str, dict[str, torch.Tensor]]], is_safetensors: bool
) -> None:
    where, states = saved
    with Source.open(where) as source:
        shards = export_weights(
            weights_of(source, torch.float32), where.parent / "out", None, is_safetensors
        )
    file = where.parent / "out" / shards[0].name
    found = load_file(file) if is_safetensors else torch.load(file, weights_only=True)
    assert set(found) == set(states)
    for name, value in found.items():
        assert torch.equal(value, master_of(states[name])), name


def test_another_dtype_is_rounded_from_the_master(
    saved: tuple[Path, dict[str, dict[str, torch.Tensor]]],
) -> None:
    where, states = saved
    with Source.open(where) as source:
        export_weights(weights_of(source, torch.float16), where.parent / "out", None)
    found = load_file(where.parent / "out" / "model.safetensors")
    assert torch.equal(found["embed.weight"], states["embed.weight"]["master"].half())
    assert torch.equal(found["seen"], states["seen"]["weight"])


@pytest.mark.parametrize("is_safetensors", [True, False])
def test_shards_are_as_full_as_they_can_be_and_indexed(
    saved: tuple[Path, dict[str, dict[str, torch.Tensor]]], is_safetensors: bool
) -> None:
    where, states = saved
    with Source.open(where) as source:
        shards = export_weights(weights_of(source), where.parent / "out", 2070, is_safetensors)
    sizes = [[w.parameter.numel * w.dtype.itemsize for w in shard.weights] for shard in shards]
    assert sizes == [[1834], [2002, 60, 4], [72]]
    base, suffix = ("model", "safetensors") if is_safetensors else ("pytorch_model", "bin")
    names = [f"{base}-0000{i}-of-00003.{suffix}" for i in (1, 2, 3)]
    index = json.loads(
        (
            where.parent
            / "out"
            / f"{'model.safetensors' if is_safetensors else 'pytorch_model.bin'}.index.json"
        ).read_text()
    )
    assert index["metadata"] == {"total_size": 3972}
    assert index["weight_map"] == dict(
        zip(states, [names[0], *[names[1]] * 3, names[2]], strict=True)
    )
    found = {}
    for name in names:
        file = where.parent / "out" / name
        found |= load_file(file) if is_safetensors else torch.load(file, weights_only=True)
    assert all(torch.equal(found[name], states[name]["weight"]) for name in states)


def test_tied_names_are_there_once(tmp_path: Path) -> None:
    tied = ForeignParameter(
        "a.weight", (3, 2), {"weight": of_tensor(torch.randn(3, 2))}, aliases=("b.weight",)
    )
    write_checkpoint(Foreign("test", [tied]), tmp_path / "ckpt", "t")
    with Source.open(tmp_path / "ckpt") as source:
        export_weights(weights_of(source), tmp_path / "hf", None)
        export_weights(weights_of(source), tmp_path / "pt", None, is_safetensors=False)
    assert list(load_file(tmp_path / "hf" / "model.safetensors")) == ["a.weight"]
    found = torch.load(tmp_path / "pt" / "pytorch_model.bin", weights_only=True)
    assert found["a.weight"].data_ptr() == found["b.weight"].data_ptr()


def test_a_file_that_is_there_is_not_touched(
    saved: tuple[Path, dict[str, dict[str, torch.Tensor]]],
) -> None:
    where, _ = saved
    (where.parent / "out").mkdir()
    (where.parent / "out" / "model.safetensors").write_bytes(b"mine")
    with (
        Source.open(where) as source,
        pytest.raises(FileExistsError, match=r"model\.safetensors there already"),
    ):
        export_weights(weights_of(source), where.parent / "out", None)
    assert os.listdir(where.parent / "out") == ["model.safetensors"]
    assert (where.parent / "out" / "model.safetensors").read_bytes() == b"mine"


def test_a_damaged_state_ends_the_export_and_leaves_nothing(
    saved: tuple[Path, dict[str, dict[str, torch.Tensor]]],
) -> None:
    where, _ = saved
    for file in (where / "step1").glob("*-2.bin"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with (
        Source.open(where) as source,
        pytest.raises(OSError, match="is not what was saved at step 1"),
    ):
        export_weights(weights_of(source), where.parent / "out", 1000)
    assert not (where.parent / "out").exists()


EXPORT = """
import sys
from pathlib import Path
from tiermem.checkpoint import Source
from tiermem.checkpoint.interchange.export import export_weights
from tiermem.checkpoint.opening.source import weights_of

def memory_of(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) << 10

pieces = []
with Source.open(sys.argv[1]) as source:
    before = memory_of("VmRSS")
    export_weights(weights_of(source), Path(sys.argv[2]), None, progress=pieces.append)
print(memory_of("VmHWM") - before, *pieces)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_a_shard(tmp_path: Path) -> None:
    """A process grows by the 16 MiB that are read into, a piece of 16 MiB and some more: not by the
    shard of 224 MiB."""
    write(tmp_path / "ckpt", {"w": {"weight": torch.zeros(14 * CHUNK_NUMEL + 3)}})
    command = [sys.executable, "-c", EXPORT, str(tmp_path / "ckpt"), str(tmp_path / "out")]
    grown, *pieces = map(
        int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    assert pieces == [4 * CHUNK_NUMEL] * 14 + [12]
    assert grown < 96 << 20


@pytest.mark.parametrize("lazy", [False, True])
def test_the_reference_systems_function_gives_masters(
    saved: tuple[Path, dict[str, dict[str, torch.Tensor]]], lazy: bool
) -> None:
    where, states = saved
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(where, lazy_mode=lazy)
    assert set(found) == set(states)
    for name, value in found.items():
        assert value.shape == states[name]["weight"].shape
        assert torch.equal(value.contiguous(), master_of(states[name])), name


@pytest.mark.parametrize("safe", [False, True])
def test_the_reference_systems_conversion_writes_files(
    saved: tuple[Path, dict[str, dict[str, torch.Tensor]]], safe: bool
) -> None:
    where, states = saved
    out = where.parent / "out"
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        str(where), str(out), safe_serialization=safe, tag="step1"
    )
    found = (
        load_file(out / "model.safetensors")
        if safe
        else torch.load(out / "pytorch_model.bin", weights_only=True)
    )
    assert all(torch.equal(found[name], master_of(states[name])) for name in states)


def test_an_ordinary_model_is_filled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(7, 5), nn.Linear(7, 5)
    write(tmp_path, {name: {"weight": value} for name, value in model.state_dict().items()})
    assert zero_to_fp32.load_state_dict_from_zero_checkpoint(other, tmp_path) is other
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_transformers_open_what_was_exported(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # which has a thread of its own, for ever

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=31, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    states = {
        name: {"weight": value}
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    write(tmp_path / "ckpt", states, world=2, most_numel=100)
    with Source.open(tmp_path / "ckpt") as source:
        export_weights(
            weights_of(source), tmp_path / "out", 2000, config=json.dumps(config.to_dict())
        )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    opened, said = LlamaForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    for (name, a), b in zip(model.named_parameters(), opened.parameters(), strict=True):
        assert torch.equal(a, b), name
