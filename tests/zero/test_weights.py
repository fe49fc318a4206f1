"""Do weights from safetensors files arrive in every kind of model, and are bad files refused before
anything changes?"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import models
from programs.twins import assert_same_tensors, loss_of, seeded
from safetensors.torch import save_file
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.weights_io import INDEX_NAME, read_header
from tiermem.zero import Init

KINDS = [
    "plain",
    "plain on meta",
    "sharded on HOST",
    "sharded on NVME",
    "built under Init",
    "built under Init on meta",
]


@pytest.fixture
def saved() -> nn.Module:
    return seeded(models.tied_tower, seed=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nvme").mkdir()
    return tmp_path


@pytest.fixture(params=KINDS)
def loaded(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    """A function that loads a file into a model of this kind and returns its weights."""
    kind, home = request.param, Tier.HOST if "HOST" in request.param else Tier.NVME
    policy = OffloadPolicy(params=home, paths=[folder / "nvme"], persistence_numel=50)

    def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        if kind.startswith("plain"):
            with torch.device("meta" if "meta" in kind else "cpu"):
                model = seeded(models.tied_tower).to(dtype)
            tiermem.load_safetensors(model, path)
            return dict(model.state_dict())
        if kind.startswith("sharded"):
            model = seeded(models.tied_tower).to(dtype)
            with tiermem.shard(model, policy):
                tiermem.load_safetensors(model, path)
                return dict(model.state_dict())
        with Init(policy=policy, dtype=dtype), torch.device("meta" if "meta" in kind else "cpu"):
            model = models.tied_tower()
        tiermem.load_safetensors(model, path)
        with tiermem.shard(model, policy):
            return dict(model.state_dict())

    return load


def test_one_file(loaded: Any, saved: nn.Module, folder: Path) -> None:
    save_file(untied(saved), folder / "model.safetensors")
    assert_same_tensors(loaded(folder / "model.safetensors"), dict(saved.state_dict()))
    assert_same_tensors(loaded(folder), dict(saved.state_dict()))


def test_an_index_and_its_files(loaded: Any, saved: nn.Module, folder: Path) -> None:
    save_in_files(untied(saved), folder)
    (folder / "other.safetensors").write_bytes(b"not in the index, not read")
    assert_same_tensors(loaded(folder), dict(saved.state_dict()))


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_cast_to_the_models_dtype(
    loaded: Any, stored: torch.dtype, wanted: torch.dtype, saved: nn.Module, folder: Path
) -> None:
    tensors = {name: value.to(stored) for name, value in untied(saved).items()}
    save_file(tensors, folder / "model.safetensors")
    weights = loaded(folder, wanted)
    assert_same_tensors(
        {n: weights[n] for n in tensors}, {n: v.to(wanted) for n, v in tensors.items()}
    )


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_either_name_of_a_tied_weight_will_do(
    loaded: Any, name: str, saved: nn.Module, folder: Path
) -> None:
    tensors = untied(saved)
    tensors[name] = tensors.pop("embed.weight")
    save_file(tensors, folder / "model.safetensors")
    weights = loaded(folder)
    assert torch.equal(weights["embed.weight"], saved.embed.weight)
    assert torch.equal(weights["head.weight"], saved.embed.weight)


def test_the_first_step_starts_from_what_was_loaded(saved: nn.Module, folder: Path) -> None:
    save_file(untied(saved), folder / "model.safetensors")
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=[folder / "nvme"], persistence_numel=50
    )
    model, plain = seeded(models.tied_tower), copy.deepcopy(saved)
    with tiermem.shard(model, policy):
        tiermem.load_safetensors(model, folder)
        for each in (model, plain):
            optim = tiermem.AdamW(each.parameters(), lr=1e-2)
            loss_of(each, 0).backward()
            optim.step()
        del optim
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


# ---- bad files -----------------------------------------------------------------------------------


@pytest.fixture
def model() -> nn.Module:
    return seeded(models.tied_tower)


def test_names_that_do_not_fit_are_all_named(
    model: nn.Module, saved: nn.Module, folder: Path
) -> None:
    tensors = untied(saved)
    del tensors["layers.0.up.bias"]
    tensors["surplus"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError,
        match=r"Missing in the files: \['layers\.0\.up\.bias'\]. Not in the model: \['surplus'\]",
    ):
        tiermem.load_safetensors(model, folder)
    assert_same_tensors(dict(model.state_dict()), dict(before))
    tiermem.load_safetensors(model, folder, strict=False)
    assert torch.equal(model.head.weight, saved.head.weight)


def test_a_wrong_shape_is_named_before_anything_changes(
    model: nn.Module, saved: nn.Module, folder: Path
) -> None:
    save_file(untied(saved) | {"layers.2.up.bias": torch.zeros(3)}, folder / "model.safetensors")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"layers\.2\.up\.bias has shape \(3,\), the model wants \(97,\)"
    ):
        tiermem.load_safetensors(model, folder)
    assert_same_tensors(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_named_before_anything_changes(
    kept: float, model: nn.Module, saved: nn.Module, folder: Path
) -> None:
    save_in_files(untied(saved), folder)
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[: int(last.stat().st_size * kept)])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=last.name):
        tiermem.load_safetensors(model, folder)
    assert_same_tensors(dict(model.state_dict()), dict(before))


def test_a_missing_file_is_named(model: nn.Module, saved: nn.Module, folder: Path) -> None:
    save_in_files(untied(saved), folder)
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(FileNotFoundError, match=last.name):
        tiermem.load_safetensors(model, folder)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tiermem.load_safetensors(model, folder / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        tiermem.load_safetensors(model, folder / "nvme")


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": 3}',
        *(f'{{"weight_map": {{"a": {name}}}}}' for name in ("3", '"../a"', r'"\ud800"')),
    ],
)
def test_a_bad_index_is_refused(index: str, model: nn.Module, folder: Path) -> None:
    (folder / INDEX_NAME).write_text(index)
    with pytest.raises(ValueError, match=INDEX_NAME):
        tiermem.load_safetensors(model, folder)


HOSTILE = {
    "a list": [],
    "a number": 7,
    "an entry that is a number": {"a": 7},
    "an unknown dtype": {"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}},
    "a dtype that is a list": {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
    "negative sizes": {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
    "a fraction": {"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}},
    "a shape of digits": {"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}},
    "huge sizes": {"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 4]}},
    "endless sizes": {"a": {"dtype": "F32", "shape": [10**400], "data_offsets": [0, 4]}},
    "too many sizes": {"a": {"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 4]}},
    "an offset before the start": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
    "an offset past the end": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [60, 64]}},
    "offsets the wrong way round": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
    "one offset": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}},
}


@pytest.mark.parametrize("header", HOSTILE)
def test_a_hostile_header_is_refused(header: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        read_header(write(tmp_path / "bad.safetensors", json.dumps(HOSTILE[header]).encode()))


def test_a_header_nested_too_deep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no JSON"):
        read_header(write(tmp_path / "bad.safetensors", b"[" * 200_000))


def test_a_header_longer_than_the_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_header(tmp_path / "bad.safetensors")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=10,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "BOOL"]) | JSON,
        "shape": st.lists(st.integers(-2, 5) | st.integers(), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-8, 64) | st.integers(), min_size=2, max_size=2)
        | JSON,
    }
)


@settings(max_examples=drawn(200))
@given(
    header=st.dictionaries(st.text(max_size=5), ENTRY | JSON, max_size=3) | JSON,
    rest=st.binary(max_size=40),
)
def test_any_header_is_understood_or_refused(
    header: Any, rest: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = write(
        tmp_path_factory.getbasetemp() / "any.safetensors", json.dumps(header).encode(), rest
    )
    try:
        found = read_header(file)
    except ValueError:
        return
    assert all(stored.start + stored.num_bytes <= file.stat().st_size for stored in found)


@settings(max_examples=drawn(200))
@given(content=st.binary(max_size=64))
def test_any_file_is_understood_or_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(content)
    try:
        read_header(file)
    except ValueError:
        return


def untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is saved: every parameter under its first name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def save_in_files(tensors: dict[str, torch.Tensor], folder: Path, num_files: int = 3) -> None:
    names, where = list(tensors), {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = names[number::num_files]
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write(file: Path, header: bytes, rest: bytes = bytes(16)) -> Path:
    file.write_bytes(struct.pack("<Q", len(header)) + header + rest)
    return file


def test_tensors_that_overlap_and_names_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}
    same = json.dumps({"a": entry, "nothing": nothing, "b": entry}).encode()
    with pytest.raises(ValueError, match=r"overlaps another tensor at byte"):
        read_header(write(tmp_path / "bad.safetensors", same))
    part = json.dumps({"a": entry}).encode()
    with pytest.raises(ValueError, match=r"bad\.safetensors.*a key is there twice"):
        read_header(write(tmp_path / "bad.safetensors", part[:-1] + b"," + part[1:]))
