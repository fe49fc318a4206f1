"""Which modules are fetched as one? On one rank; touch_on_ranks.py sends ranks to different
experts."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from programs.homes import all_on_nvme
from programs.models import SparseBlock, Tower
from programs.twins import loss_of, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.config import load_config
from tiermem.policy import LeafRules
from tiermem.units.unit import divide
from tiermem.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)


def sparse() -> Tower:
    """A tower of two sparse blocks."""
    return Tower(num_blocks=2, block=lambda *_: SparseBlock())


def units_of(model: nn.Module, policy: OffloadPolicy) -> list[str]:
    with tiermem.shard(model, policy) as shards:
        return [live.unit.name for live in shards.units]


def test_on_one_rank_experts_come_singly(tmp_path: Path) -> None:
    model = seeded(sparse)
    plain = copy.deepcopy(model)
    with tiermem.shard(model, all_on_nvme(tmp_path, max_reuse_numel=0)) as shards:
        names = [live.unit.name for live in shards.units]
        assert [n for n in names if n.startswith("layers.0.")] == [
            "layers.0.gate",
            *(f"layers.0.experts.{i}" for i in range(5)),
        ]
        loss = loss_of(model, 0)
        assert loss.item() == loss_of(plain, 0).item()
        used = {names[i] for i in shards.prefetcher.order._seen}
        assert sum("experts" in name for name in used) == 2  # one of each block
        loss.backward()


def test_a_marked_block_comes_as_one(tmp_path: Path) -> None:
    model = seeded(sparse)
    plain = copy.deepcopy(model)
    assert set_z3_leaf_modules(model, [SparseBlock]) == list(model.layers)
    with tiermem.shard(model, all_on_nvme(tmp_path)) as shards:
        assert [live.unit.name for live in shards.units] == [
            "embed",
            "layers.0",
            "layers.1",
            "head",
        ]
        assert z3_leaf_parameter(model.layers[0].experts[3].up.weight)
        assert not z3_leaf_parameter(model.head.weight)
        loss = loss_of(model, 0)
        assert loss.item() == loss_of(plain, 0).item()
        loss.backward()
        unused = [p for p in model.layers[0].experts.parameters() if p.grad is None]
        # as in plain torch: parameters that were not used are not stepped
        assert len(unused) == 4 * 4


@pytest.mark.parametrize("name", ["SparseBlock", f"{SparseBlock.__module__}.SparseBlock"])
def test_classes_may_be_named(name: str) -> None:
    model = sparse()
    assert set_z3_leaf_modules(model, [name]) == list(model.layers) == get_z3_leaf_modules(model)
    assert unset_z3_leaf_modules(model, [SparseBlock]) == list(model.layers)
    assert not get_z3_leaf_modules(model)


def test_modules_may_be_named() -> None:
    model = sparse()
    assert set_z3_leaf_modules_by_name(model, ["layers.1"]) == ([model.layers[1]], [])
    assert set_z3_leaf_modules_by_suffix(model, ["experts.2"]) == (
        [b.experts[2] for b in model.layers],
        [],
    )
    assert get_z3_leaf_modules(model) == [
        model.layers[0].experts[2],
        model.layers[1],
        model.layers[1].experts[2],
    ]
    set_z3_leaf_module(model.layers[1], False)
    assert not z3_leaf_module(model.layers[1])


def test_what_is_not_there_is_an_error_unless_it_need_not_be() -> None:
    model = sparse()
    with pytest.raises(ValueError, match=r"no module of .*LSTM"):
        set_z3_leaf_modules(model, [nn.LSTM])
    with pytest.raises(ValueError, match=r"has no module layers\.7"):
        set_z3_leaf_modules_by_name(model, ["layers.0", "layers.7"])
    assert set_z3_leaf_modules(model, [nn.LSTM], raise_if_not_found=False) == []
    assert set_z3_leaf_modules_by_suffix(model, ["x"], raise_if_not_found=False) == ([], ["x"])
    with pytest.raises(TypeError, match="neither a class nor the name of one"):
        set_z3_leaf_modules(model, [3])


def test_a_marked_list_comes_as_one_with_the_module_around_it(tmp_path: Path) -> None:
    model = seeded(sparse)
    plain = copy.deepcopy(model)
    for block in model.layers:
        set_z3_leaf_module(block.experts, True)
    with tiermem.shard(model, all_on_nvme(tmp_path, max_reuse_numel=0)) as shards:
        names = [live.unit.name for live in shards.units]
        assert [name for name in names if name.startswith("layers.0")] == [
            "layers.0.gate",
            "layers.0.experts",
        ]
        for step in range(2):
            loss = loss_of(model, step)
            assert loss.item() == loss_of(plain, step).item()
            loss.backward()


def test_a_marked_model_comes_as_one(tmp_path: Path) -> None:
    model = seeded(sparse)
    plain = copy.deepcopy(model)
    set_z3_leaf_module(model, True)
    with tiermem.shard(model, all_on_nvme(tmp_path)) as shards:
        assert [live.unit.name for live in shards.units] == ["root"]
        loss = loss_of(model, 0)
        assert loss.item() == loss_of(plain, 0).item()
        loss.backward()


def test_a_marked_model_without_forward_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(3, 3)])
    set_z3_leaf_module(model, True)
    with pytest.raises(ValueError, match=r"ModuleList has no forward.*mark the modules in it"):
        tiermem.shard(model, all_on_nvme(tmp_path))


def test_marks_are_copied_with_the_model() -> None:
    model = sparse()
    set_z3_leaf_modules(model, [SparseBlock])
    assert len(get_z3_leaf_modules(copy.deepcopy(model))) == 2


def test_a_leaf_larger_than_a_buffer_is_refused(tmp_path: Path) -> None:
    model = sparse()
    set_z3_leaf_modules(model, [SparseBlock])
    with pytest.raises(ValueError, match=r"unit 'layers\.0' holds .* is a leaf module"):
        tiermem.shard(model, all_on_nvme(tmp_path, unit_numel=5000))


@pytest.mark.parametrize(
    "keys",
    [
        {"leaf_module": {"classes": "SparseBlock"}},
        {"leaf_module": {"names": ["layers.0", "layers.1"]}},
        {"leaf_module": {"name_suffixes": [".0", ".1"]}},
        {"stage3_module_granularity_threshold": 2000},
    ],
    ids=lambda keys: next(iter(keys.values())) and str(keys),
)
def test_the_config_names_leaves(keys: dict[str, object], tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": offload, "stage3_param_persistence_threshold": 0}
    policy = load_config({"train_batch_size": 1, "zero_optimization": zero}).policy()
    assert "layers.0.experts.0" in units_of(sparse(), policy)
    policy = load_config({"train_batch_size": 1, "zero_optimization": zero | keys}).policy()
    assert units_of(sparse(), policy) == ["embed", "layers.0", "layers.1", "head"]


def test_granularity_leaves_coarse_modules_alone(tmp_path: Path) -> None:
    names = units_of(sparse(), all_on_nvme(tmp_path, leaves=LeafRules(granularity_numel=100)))
    assert "layers.0.experts.0" in names


def test_the_log_says_what_the_config_named_in_vain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tiermem"):
        units_of(
            sparse(),
            all_on_nvme(tmp_path, leaves=LeafRules(classes=("Nothing",), names=("nowhere",))),
        )
    assert "does not have: Nothing, nowhere" in caplog.text


class Sublayers(nn.Module):
    """A block of several modules in lists of its own."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        super().__init__()
        self.lists = nn.ModuleList(nn.Linear(400, 400) for _ in range(counts[0]))
        self.others = nn.ModuleList(nn.Linear(400, 400) for _ in range(counts[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in (*self.lists, *self.others):
            x = each(x)
        return x


@pytest.mark.parametrize(("counts", "is_stage"), [((3, 3), True), ((2, 2), True), ((2, 1), False)])
def test_a_row_of_blocks_in_a_list_is_no_block(counts: tuple[int, int], is_stage: bool) -> None:
    model = nn.Sequential(nn.Linear(400, 400), nn.Identity())
    model.stages = nn.ModuleList(Sublayers(counts) for _ in range(2))
    policy = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST, persistence_numel=0)
    names = {unit.name for unit in divide(model, policy, 1).units}
    assert ("stages.1.others.0" in names) is is_stage
    assert ("stages.1" in names) is not is_stage
