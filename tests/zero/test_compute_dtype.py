"""Are weights that rest in bf16 and are multiplied in fp32 equal, to the bit, to a plain model that
makes the same casts?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from programs.models import VOCAB, Block, Tower
from programs.twins import seeded
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.policy import CombinedError
from tiermem.units import compute
from tiermem.units.compute import (
    ComputeChoice,
    Products,
    choose_compute,
    measure_products,
    narrow_part,
    widen,
)

HERE = Path(__file__).parent
TIERS = [Tier.DEVICE, Tier.HOST, Tier.NVME]


class CheckpointedBlock(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def tower(dtype: torch.dtype = torch.bfloat16, **fields: Any) -> nn.Module:
    return seeded(lambda: Tower(**fields)).to(dtype)


def policy_of(tier: Tier, path: Path, **fields: Any) -> OffloadPolicy:
    return OffloadPolicy(
        **({"params": tier, "optim": tier, "paths": [path], "compute_dtype": "fp32"} | fields)
    )


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int, casts: bool) -> torch.Tensor:
    """The loss; with `casts` a plain model computes with fp32 copies of its weights."""
    x = tokens(step)
    full = {name: param.float() for name, param in model.named_parameters()} if casts else {}
    out = torch.func.functional_call(model, full, (x,)) if casts else model(x)
    return F.cross_entropy(out.view(-1, VOCAB), x.view(-1))


def train(
    model: nn.Module, casts: bool, num_steps: int = 3, num_micro: int = 1, **settings: Any
) -> list[float]:
    optim, losses = tiermem.AdamW(model.parameters(), lr=1e-2, **settings), []
    for step in range(num_steps):
        for micro in range(num_micro):
            loss = loss_of(model, 10 * step + micro, casts)
            loss.backward()
            losses.append(loss.item())
        optim.step()
        optim.zero_grad()
    return losses


def assert_equal(found: dict[str, torch.Tensor], plain: nn.Module) -> None:
    for name, value in plain.state_dict().items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tier", TIERS)
def test_every_tier_equals_a_twin_that_casts(
    tier: Tier, dtype: torch.dtype, tmp_path: Path
) -> None:
    plain, model = tower(dtype), tower(dtype)
    expected = train(plain, casts=True)
    with tiermem.shard(model, policy_of(tier, tmp_path)) as shards:
        assert train(model, casts=False) == expected
        assert all(live.unit.is_widened for live in shards.units)
        assert_equal(model.state_dict(), plain)
        shards.close(materialize=True)
    assert_equal(model.state_dict(), plain)


@pytest.mark.parametrize(
    "fields",
    [{"unit_buffers": 2}, {"prefetch_numel": 0, "max_reuse_numel": 0}, {"grads": Tier.NVME}],
)
def test_buffers_and_homes_change_no_bit(fields: dict[str, Any], tmp_path: Path) -> None:
    plain, model = tower(), tower()
    expected = train(plain, casts=True, num_micro=2)
    with tiermem.shard(model, policy_of(Tier.NVME, tmp_path, **fields)):
        assert train(model, casts=False, num_micro=2) == expected
        assert_equal(model.state_dict(), plain)


def test_recomputed_activations_change_no_bit(tmp_path: Path) -> None:
    plain, model = tower(), tower(block=CheckpointedBlock)
    expected = train(plain, casts=True)
    with tiermem.shard(model, policy_of(Tier.NVME, tmp_path)):
        assert train(model, casts=False) == expected


def test_without_swapped_pointers_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermem.weights.unit_memory.can_swap_pointers", lambda device: False)
    plain, model = tower(), tower()
    expected = train(plain, casts=True, num_steps=2)
    with tiermem.shard(model, policy_of(Tier.NVME, tmp_path)):
        assert train(model, casts=False, num_steps=2) == expected


def test_dtypes_inside_and_outside_forward(tmp_path: Path) -> None:
    model = tower()
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def look(module: nn.Module, args: Any) -> None:
        seen.append((module.up.weight.dtype, model.state_dict()["layers.0.up.weight"].dtype))  # type: ignore[union-attr]

    model.layers[0].register_forward_pre_hook(look)
    with tiermem.shard(model, policy_of(Tier.NVME, tmp_path)) as shards:
        weight = model.layers[0].up.weight
        assert weight.dtype is torch.bfloat16
        loss = loss_of(model, 0, casts=False)
        assert loss.dtype is torch.float32
        assert seen == [(torch.float32, torch.bfloat16)]
        loss.backward()
        assert (weight.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
        assert shards.gradient(weight).dtype is torch.bfloat16  # type: ignore[union-attr]
        assert weight.sum().dtype is torch.bfloat16  # read outside forward: a copy, as it rests
        with tiermem.zero.GatheredParameters(weight, modifier_rank=0):
            assert weight.dtype is torch.bfloat16
            with torch.no_grad():
                weight.fill_(0.5)
        assert (model.state_dict()["layers.0.up.weight"] == 0.5).all()
        with tiermem.zero.unwrap_model_for_generation(model):
            assert model.state_dict()["head.weight"].dtype is torch.bfloat16


def test_inputs_in_the_dtype_at_rest_are_widened(tmp_path: Path) -> None:
    plain = seeded(lambda: nn.Sequential(nn.Linear(31, 17), nn.ReLU(), nn.Linear(17, 5))).bfloat16()
    model, x = (
        copy.deepcopy(plain),
        torch.randn(4, 31, generator=torch.Generator().manual_seed(1)).bfloat16(),
    )
    with tiermem.shard(model, policy_of(Tier.HOST, tmp_path)):
        out = model(x)
    expected = torch.func.functional_call(
        plain, {n: p.float() for n, p in plain.named_parameters()}, (x.float(),)
    )
    assert torch.equal(out, expected)


def test_a_units_buffer_takes_4_bytes_an_element(tmp_path: Path) -> None:
    plans = {}
    for dtype in ("storage", "fp32"):
        with tiermem.shard(
            tower(), policy_of(Tier.NVME, tmp_path, compute_dtype=dtype, persistence_numel=0)
        ) as shards:
            plans[dtype] = shards.plan
    assert plans["fp32"].units.slot_bytes == 2 * plans["storage"].units.slot_bytes
    assert plans["fp32"].units.num == plans["storage"].units.num
    assert plans["fp32"].staging.num == 0  # a shard is read into the buffer in which it is widened
    assert plans["fp32"].disk_bytes == plans["storage"].disk_bytes


def test_with_fp32_weights_nothing_changes(tmp_path: Path) -> None:
    with tiermem.shard(tower(torch.float32), policy_of(Tier.NVME, tmp_path)) as shards:
        assert not any(live.unit.is_widened for live in shards.units)


@pytest.mark.parametrize(
    "fields",
    [{"stage": 2, "params": Tier.DEVICE}, {"quantised_gather": True}, {"gather_dtype": "bf16"}],
)
def test_what_it_does_not_go_with_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        CombinedError, match=r'compute_dtype="fp32" is given, but .* does not allow it'
    ):
        policy_of(Tier.HOST, tmp_path, **fields)
    policy_of(Tier.HOST, tmp_path, **fields, compute_dtype="measured")


@pytest.mark.parametrize("numel", [4096, 8192, 3 * 4096, 1 << 20])
def test_values_are_widened_in_place(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).bfloat16()
    full = torch.empty(numel)
    narrow = narrow_part(full, torch.bfloat16)
    narrow.copy_(values)
    widen(full, narrow)
    assert torch.equal(full, values.float())


# ---- the choice ----------------------------------------------------------------------------------


def pretend(monkeypatch: pytest.MonkeyPatch, rest: float, fp32: float) -> None:
    monkeypatch.setattr(
        compute, "measure_products", lambda shapes, dtype: Products(dtype, rest, fp32)
    )


def choice_of(model: nn.Module, **fields: Any) -> ComputeChoice:
    return choose_compute(
        model, OffloadPolicy(compute_dtype="measured", **fields), torch.device("cpu")
    )


def test_measured_takes_fp32_where_products_at_rest_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, 0.4e9, 60e9)
    choice = choice_of(tower())
    assert (choice.dtype, choice.is_measured) == ("fp32", True)
    assert (
        "0.4 GFLOP/s in bfloat16 and 60.0 GFLOP/s in float32, so bfloat16 is 150 times slower"
        in choice.why
    )
    assert choice_of(tower(torch.float32)).dtype == "storage"
    assert choice_of(tower(), stage=2).dtype == "storage"
    assert (
        choice_of(nn.ParameterList([torch.ones(64, dtype=torch.bfloat16)])).dtype == "storage"
    )  # nothing is multiplied
    pretend(monkeypatch, 40e9, 60e9)
    assert choice_of(tower()).dtype == "storage"


@pytest.mark.parametrize(
    ("capability", "fast", "is_told"),
    [("AVX2", 1e9, True), ("AVX2", 30e9, False), ("AVX512", 1e9, False)],
)
def test_far_slower_products_at_rest_are_told_when_a_model_is_sharded(
    capability: str,
    fast: float,
    is_told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    pretend(monkeypatch, fast, 60e9)
    with tiermem.shard(
        tower(), policy_of(Tier.HOST, tmp_path, compute_dtype="storage"), device="cpu"
    ):
        pass
    assert ('bfloat16 is 60 times slower; compute_dtype "measured"' in caplog.text) is is_told


def test_products_are_measured_within_a_second() -> None:
    import time

    start = time.thread_time()
    found = measure_products([(4096, 1024), (1024, 4096), (8192, 1024)], torch.bfloat16)
    assert time.thread_time() - start < 2.0
    assert found.rest_flops > 0 and found.fp32_flops > 1e8


def test_the_choice_is_in_the_checkpoint_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }

    def start(compute_dtype: str) -> tiermem.Engine:
        return tiermem.initialize(
            model=tower(), config=config | {"tiermem": {"compute_dtype": compute_dtype}}
        )[0]

    def step(engine: tiermem.Engine) -> float:
        loss = loss_of(engine, 1, casts=False)
        engine.backward(loss)
        engine.step()
        return loss.item()

    pretend(monkeypatch, 1e9, 60e9)
    first = start("measured")
    step(first)
    first.save_checkpoint(str(tmp_path))
    after = step(first)
    first.close()
    for dtype in ("measured", "fp32"):
        again = start(dtype)
        again.load_checkpoint(str(tmp_path))
        assert step(again) == after
        again.close()
    pretend(monkeypatch, 60e9, 60e9)
    other = start("measured")
    with pytest.raises(
        ValueError, match=r'set "tiermem": {"compute_dtype": "fp32"} to go on with the same bits'
    ):
        other.load_checkpoint(str(tmp_path))
    other.close()
    changed = start("storage")
    changed.load_checkpoint(str(tmp_path))
    assert "losses differ from those of the run that saved it" in caplog.text
    changed.close()


# ---- several ranks -------------------------------------------------------------------------------


def test_two_ranks_compute_with_the_same_casts(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "nvme").mkdir()
    found = launch(HERE / "compute_on_ranks.py", 2, tmp_path / "out", str(tmp_path / "nvme"))
    for each in found:
        assert each["wrong"] == []
        assert each["gathered"] == each["gathered as it rests"]  # parts cross ranks in 16 bits
        assert each["agreed"] == "fp32"  # one rank's products are slow
