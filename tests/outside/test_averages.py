"""Does tiermem.EMA average as torch's AveragedModel, wherever weights and averages rest, and give a
model back as it was?"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded, train_steps
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tiermem
from tiermem import OffloadPolicy, Tier, averages
from tiermem.zero import GatheredParameters, unwrap_model_for_generation

WEIGHTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "weights on host": {"params": Tier.HOST, "optim": Tier.HOST},
    "weights on nvme": {"params": Tier.NVME, "optim": Tier.NVME, "durability": "none"},
    "resident": {"stage": 2},
}


@contextlib.contextmanager
def model_of(where: str, nvme: Path, dtype: torch.dtype = torch.float32) -> Iterator[nn.Module]:
    model, fields = seeded(Tower).to(dtype), WEIGHTS[where]
    if fields is None:
        yield model
        return
    with tiermem.shard(
        model, OffloadPolicy(paths=[nvme], persistence_numel=50, **fields), device="cpu"
    ):
        yield model


def torchs(
    dtype: torch.dtype = torch.float32, num_steps: int = 5
) -> tuple[AveragedModel, nn.Module, list[float]]:
    """Torch's averages of a plain model, the model, and its losses afterwards."""
    model = seeded(Tower).to(dtype)
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(num_steps):
        train_steps(model, optim, range(step, step + 1))
        averaged.update_parameters(model)
    return averaged, model, train_steps(model, optim, range(num_steps, num_steps + 2))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("where", WEIGHTS)
def test_averages_equal_torchs_and_the_model_comes_back(
    where: str, home: Tier, tmp_path: Path
) -> None:
    averaged, _, went_on = torchs()
    expected = dict(averaged.module.named_parameters())
    with model_of(where, tmp_path) as model:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        ema = tiermem.EMA(model, 0.9, home=home, paths=[tmp_path])
        for step in range(5):
            train_steps(model, optim, range(step, step + 1))
            ema.update()
        assert_same_tensors(ema.state_dict()["averages"], expected)
        before = copy.deepcopy(model.state_dict())
        with ema.applied(), torch.no_grad():
            assert_same_tensors(dict(model.state_dict()), expected)
            assert loss_of(model, 9).item() == loss_of(averaged.module, 9).item()
            with unwrap_model_for_generation(model):
                assert loss_of(model, 9).item() == loss_of(averaged.module, 9).item()
            with pytest.raises(RuntimeError, match=r"leave the block|leave its block"):
                ema.update()
            if where != "plain":
                with pytest.raises(RuntimeError, match=r"EMA\.applied"):
                    optim.step()
        assert_same_tensors(dict(model.state_dict()), before)
        assert train_steps(model, optim, range(5, 7)) == went_on
        ema.copy_to()
        assert_same_tensors(dict(model.state_dict()), expected)
        ema.close()
        with pytest.raises(RuntimeError, match="this store is closed"):
            ema.update()


def test_averages_are_applied_after_weights_were_written_gathered(tmp_path: Path) -> None:
    """What was written through `p.data` has been taken over, so that nothing is written inside."""
    with model_of("weights on nvme", tmp_path) as model:
        ema = tiermem.EMA(model, 0.9)
        with GatheredParameters(list(model.parameters()), modifier_rank=0):
            for param in model.parameters():
                param.data.mul_(0.5)
        ema.update()
        with ema.applied(), torch.no_grad():
            loss = loss_of(model, 0).item()
        assert loss_of(model, 0).item() == loss
        ema.close()


def test_averages_in_the_parameters_own_dtype(tmp_path: Path) -> None:
    averaged, _, _ = torchs(torch.bfloat16)
    with model_of("weights on nvme", tmp_path, torch.bfloat16) as model:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        ema, precise = tiermem.EMA(model, 0.9, dtype=None), tiermem.EMA(model, 0.9)
        for step in range(5):
            train_steps(model, optim, range(step, step + 1))
            ema.update()
            precise.update()
        assert_same_tensors(ema.state_dict()["averages"], dict(averaged.module.named_parameters()))
        assert {value.dtype for value in precise.state_dict()["averages"].values()} == {
            torch.float32
        }
        before = copy.deepcopy(model.state_dict())
        with precise.applied():
            rounded = {
                name: value.bfloat16() for name, value in precise.state_dict()["averages"].items()
            }
            assert_same_tensors(dict(model.state_dict()), rounded)
        assert_same_tensors(dict(model.state_dict()), before)
        ema.close()
        precise.close()


def test_a_state_dict_continues_on_another_tier(tmp_path: Path) -> None:
    expected = None
    for where, home in (
        ("plain", Tier.HOST),
        ("weights on host", Tier.NVME),
        ("weights on nvme", Tier.HOST),
    ):
        with model_of(where, tmp_path) as model:
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            ema = tiermem.EMA(model, 0.9, home=home, paths=[tmp_path])
            train_steps(model, optim, range(2))
            ema.update()
            saved = copy.deepcopy(ema.state_dict())
            ema.close()
            other = tiermem.EMA(model, 0.5, home=Tier.HOST)
            other.load_state_dict(saved)
            train_steps(model, optim, range(2, 3))
            other.update()
            found = other.state_dict()
            other.close()
        assert (found["decay"], found["num_updates"]) == (0.9, 2)
        if expected is not None:
            assert_same_tensors(found["averages"], expected)
        expected = found["averages"]


def test_turned_parameters_and_pieces_that_cut_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermem.averages._PIECE_NUMEL", 4096)
    torch.manual_seed(0)
    model = nn.Module()
    model.turned, model.long = (
        nn.Parameter(torch.randn(70, 90).t()),
        nn.Parameter(torch.randn(9001)),
    )
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    for home in (Tier.HOST, Tier.NVME):
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        ema = tiermem.EMA(model, 0.5, home=home, paths=[tmp_path])
        for _ in range(2):
            averaged.update_parameters(model)
            ema.update()
            with torch.no_grad():
                model.turned += 1
                model.long *= 2
        before = copy.deepcopy(model.state_dict())
        with ema.applied():
            assert torch.equal(model.turned, averaged.module.turned)
            assert torch.equal(model.long, averaged.module.long)
        assert_same_tensors(dict(model.state_dict()), before)
        ema.close()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = seeded(Tower)
    with pytest.raises(ValueError, match=r"decay is 1\.5"):
        tiermem.EMA(model, 1.5)
    with pytest.raises(ValueError, match="no path"):
        tiermem.EMA(model, home=Tier.NVME)
    model.head.requires_grad_(False)
    ema = tiermem.EMA(model)
    with pytest.raises(RuntimeError, match="before the first update"), ema.applied():
        pass
    model.head.requires_grad_(True)
    with pytest.raises(
        RuntimeError, match=r"head\.weight, head\.bias are trained and was frozen|make a new EMA"
    ):
        ema.update()
    with pytest.raises(ValueError, match="of another model"):
        ema.load_state_dict({"decay": 0.9, "num_updates": 1, "averages": {}})
    ema.close()


def test_averages_and_weights_that_an_interrupt_left_half_changed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str, act: Callable[[], object]) -> None:
        """Calls a function, in which the second call of one of averages.py is interrupted."""
        called, calls = getattr(averages, name), itertools.count()

        def stop(*args: Any) -> Any:
            if next(calls):
                raise KeyboardInterrupt
            return called(*args)

        with monkeypatch.context() as patch:
            patch.setattr(averages, name, stop)
            with pytest.raises(KeyboardInterrupt):
                act()

    with model_of("weights on nvme", tmp_path) as model:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        ema = tiermem.EMA(model, 0.9, paths=[tmp_path])
        ema.update()
        train_steps(model, optim, range(1))
        kept, before = ema.state_dict(), copy.deepcopy(model.state_dict())
        interrupted("_read", ema.update)
        for act in (ema.update, ema.state_dict, ema.copy_to, ema.applied().__enter__):
            with pytest.raises(RuntimeError, match="ended half-way, so that they are torn"):
                act()
        ema.load_state_dict(kept)
        applied = ema.applied()
        applied.__enter__()
        interrupted("_write", lambda: applied.__exit__(None, None, None))
        for act in (lambda: loss_of(model, 0), lambda: train_steps(model, optim, range(1))):
            with pytest.raises(RuntimeError, match="ended half-way, so that this model is torn"):
                act()
        model.load_state_dict(before)
        with ema.applied(), torch.no_grad():
            assert_same_tensors(dict(model.state_dict()), kept["averages"])
        assert_same_tensors(model.state_dict(), before)
        ema.close()
