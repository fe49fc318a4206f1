"""Are weights, masters and moments exported from what tiermem saved, in every precision and tier,
what the run had?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import tiermem

from checkpoint.test_deepspeed_import import values_of  # isort: skip
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.checkpoint import save
from tiermem.checkpoint.interchange.export import export_dcp, export_weights
from tiermem.checkpoint.interchange.from_dcp import read_dcp
from tiermem.checkpoint.interchange.from_torch import read_torch
from tiermem.checkpoint.opening.source import Source, weights_of
from tiermem.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, zero_to_fp32


class Net(nn.Module):
    """Odd sizes, tied and frozen parameters, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 67)
        self.frozen = nn.Linear(67, 67).requires_grad_(False)
        self.norm = nn.BatchNorm1d(67, affine=False)
        self.gain = nn.LayerNorm(67)
        self.head = nn.Linear(67, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(
            self.gain(self.norm(self.frozen(self.embed(x)).float()).to(self.scale.dtype))
            * self.scale
        )


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    """A path whose kept stores are gone when the test ends."""
    (tmp_path / "nvme").mkdir()
    yield tmp_path / "nvme"
    for folder in (tmp_path / "nvme").glob("tiermem-*"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


@pytest.mark.parametrize(
    ("preset", "dtype", "tier"),
    [
        ("exact", torch.float32, Tier.NVME),
        ("exact", torch.bfloat16, Tier.HOST),
        ("compact", torch.bfloat16, Tier.NVME),
        ("bf16", torch.bfloat16, Tier.NVME),
        ("tiny", torch.bfloat16, Tier.NVME),
        ("tiny", torch.bfloat16, Tier.HOST),
    ],
)
def test_what_is_exported_is_what_the_run_had(
    tmp_path: Path, nvme: Path, preset: str, dtype: torch.dtype, tier: Tier
) -> None:
    torch.manual_seed(0)
    model = Net().to(dtype)
    model.norm.float()  # its statistics
    paths = [str(nvme)] if tier is Tier.NVME else []
    precision = Precision.preset(preset)
    policy = OffloadPolicy(
        params=tier, optim=tier, paths=paths, host_bytes=64 << 20, precision=precision
    )
    with tiermem.shard(model, policy) as shards:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            x = torch.randint(0, 13, (6,))
            nn.functional.cross_entropy(model(x).float(), x).backward()
            optimizer.step()
            optimizer.zero_grad()
        save(shards, optimizer, tmp_path / "ckpt")
        weights = {name: shards.weight(p).clone() for name, p in model.named_parameters()}
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        masters = {name: safe_get_full_fp32_param(p) for name, p in trained}
        moments = {
            name: {
                state: safe_get_full_optimizer_state(p, state)
                for state in ("exp_avg", "exp_avg_sq")
            }
            for name, p in trained
        }
        buffers = {name: value.clone() for name, value in model.named_buffers()}
    with Source.open(tmp_path / "ckpt") as source:
        export_weights(weights_of(source), tmp_path / "hf", 5000)
        export_dcp(source, tmp_path / "dcp")
    exported = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        exported |= load_file(file)
    assert set(exported) == {*weights, *buffers}
    for name, value in (weights | buffers).items():
        assert exported[name].dtype == value.dtype
        assert torch.equal(exported[name], value), name
    fp32 = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt")
    assert set(fp32) == {*weights, *buffers, "head.weight"}
    read = {p.name: p for p in read_dcp(tmp_path / "dcp").parameters}
    for name, value in masters.items():
        assert torch.equal(fp32[name], value), name
        states = values_of(read[name])
        assert torch.equal(states["weight"], value), name
        assert read[name].num_steps == 2
        for state, moment in moments[name].items():
            assert torch.equal(states[state], moment.float()), (name, state)


class Scaled(nn.Linear):
    """Has a state beside its tensors."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """A checkpoint of modules with extra states; torch.load reads the third one's only with
    pickle."""
    made = nn.Sequential(*(Scaled(3, 3) for _ in range(3)))
    made[0].extra, made[1].extra = torch.arange(5.0), {"scale": [1.5, torch.ones(2)]}
    made[2].extra = np.ones(2)
    with tiermem.shard(made, OffloadPolicy()) as shards:
        save(shards, None, tmp_path / "saved")
    return tmp_path / "saved"


def check_extra(found: dict[str, Any]) -> None:
    made = nn.Sequential(*(Scaled(3, 3) for _ in range(3)))
    assert not made.load_state_dict(found, strict=False).unexpected_keys
    assert torch.equal(made[0].extra, torch.arange(5.0))
    assert made[1].extra["scale"][0] == 1.5
    assert torch.equal(made[1].extra["scale"][1], torch.ones(2))


@pytest.mark.parametrize("most", [None, 60])
def test_a_torch_file_holds_the_extra_states_of_modules(
    scaled: Path, most: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    out = scaled.parent / "out"
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(scaled, out, most)
    files = sorted(out.glob("*.bin"))
    found = {k: v for file in files for k, v in torch.load(file, weights_only=True).items()}
    check_extra(found)
    assert len(files) == (1 if most is None else 3)
    if most is not None:
        index = json.loads((out / "pytorch_model.bin.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
    assert "left behind, as the format does not hold it: 2._extra_state" in caplog.text
    foreign = read_torch(out)
    assert len(foreign.parameters) == 6
    assert foreign.left_behind == [f"'{number}._extra_state' of the file" for number in (0, 1)]


def test_a_folder_of_dcp_holds_the_groups_of_a_rule_without_moments(nvme: Path) -> None:
    model = nn.Linear(3, 5)
    with tiermem.shard(model, OffloadPolicy(paths=[nvme]), device="cpu") as shards:
        optim = tiermem.SGD(model.parameters(), lr=0.125)
        model(torch.ones(2, 3)).sum().backward()
        optim.step()
        save(shards, optim, nvme.parent / "saved", tag="one")
    with Source.open(nvme.parent / "saved" / "one") as source:
        export_dcp(source, nvme.parent / "out")
    made = nn.Linear(3, 5)
    sgd = torch.optim.SGD(made.parameters(), lr=1.0)
    state = {"optim": get_optimizer_state_dict(made, sgd)}
    dcp.load(state, checkpoint_id=nvme.parent / "out", no_dist=True)
    assert state["optim"]["param_groups"][0]["lr"] == 0.125


def test_a_folder_of_dcp_holds_the_extra_states_of_modules(scaled: Path) -> None:
    out = scaled.parent / "out"
    with Source.open(scaled) as source:
        export_dcp(source, out)
    made = nn.Sequential(*(Scaled(3, 3) for _ in range(3)))
    made[0].extra, made[1].extra = torch.zeros(5), {"scale": [0.0, torch.zeros(2)]}
    state = {"model": made.state_dict()}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    check_extra(state["model"])
    assert np.array_equal(state["model"]["2._extra_state"], np.ones(2))
    foreign = read_dcp(out)
    assert len(foreign.parameters) == 6
    assert foreign.left_behind == [f"'{number}._extra_state' of the model" for number in range(3)]


def test_safetensors_leave_the_extra_states_of_modules_behind(
    scaled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Source.open(scaled) as source:
        export_weights(weights_of(source), scaled.parent / "out", None)
    names = ", ".join(f"{number}._extra_state" for number in range(3))
    assert f"left behind, as the format does not hold it: {names}" in caplog.text


def test_a_state_dict_of_a_checkpoint_has_the_extra_states_of_modules(scaled: Path) -> None:
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(scaled)
    check_extra(found)
    assert np.array_equal(found["2._extra_state"], np.ones(2))
