"""Does the engine keep states as the config says, skip without a trace, and reduce and compute in
what is asked?"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.models import logits_of
from programs.twins import assert_same_tensors, batch, loss_of, seeded

import tiermem
from tiermem.optimizers import PARAMS
from tiermem.precision import PRESETS

OFFLOADS = ["none", "cpu", "nvme"]


def config(offload: str, folder: Path, **keys: Any) -> dict[str, Any]:
    target = {"device": offload, "nvme_path": str(folder)}
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 50,
        "sub_group_size": 4096,
    }
    if offload != "none":
        zero |= {"offload_optimizer": target, "offload_param": target}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": zero,
    } | {**keys, "tiermem": {**keys.get("tiermem", {}), "strict": True}}


def start(build: Any, cfg: dict[str, Any], **given: Any) -> tiermem.Engine:
    return tiermem.initialize(model=seeded(build), config=cfg, **given)[0]


def step(engine: tiermem.Engine, micro: int, factor: float = 1.0) -> float:
    loss = loss_of(engine, micro) * factor
    engine.backward(loss)
    engine.step()
    return loss.item()


def everything(engine: tiermem.Engine) -> dict[str, torch.Tensor]:
    """Weights, and of every parameter its master, its moments and the number of its steps."""
    found = {f"weight {name}": value.clone() for name, value in engine.module.state_dict().items()}
    tiles, names = engine.optimizer.tiles_of(engine.shards), ["exp_avg", "exp_avg_sq"]
    has_master = engine.shards.policy.precision.master_of(torch.bfloat16) is not None
    for _, shard in engine.shards.parameters():
        for name in ["master", *names] if has_master else names:
            found[f"{name} {shard.name}"] = tiles.state(shard, name)
        found[f"steps {shard.name}"] = torch.tensor(shard.num_steps)
    return found


# ---- steps that are skipped, and those that are not ----------------------------------------------


@pytest.mark.sampled(16)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_skipped_step_leaves_every_state_as_it_is(
    preset: str, offload: str, tmp_path: Path
) -> None:
    """Also what rounding is drawn from: training goes on as if the step had never been."""
    keys = {"bf16": {"enabled": True}, "tiermem": {"precision": preset}}
    losses = []
    for skips in (True, False):
        engine = start(models.tied_tower, config(offload, tmp_path, **keys))
        mine = [step(engine, micro) for micro in range(2)]
        if skips:
            before = everything(engine)
            step(engine, 7, float("nan"))
            step(engine, 8, float("inf"))
            assert engine.skipped_steps == 2
            assert_same_tensors(before, everything(engine))
        losses.append([*mine, *(step(engine, micro) for micro in range(2, 5))])
        engine.close()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
@pytest.mark.parametrize("preset", ["exact", "compact", "bf16"])
def test_without_the_check_a_step_is_applied_whatever_it_holds(
    preset: str, offload: str, tmp_path: Path
) -> None:
    keys = {
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "tiermem": {"precision": preset},
    }
    engine = start(models.ShortTower, config(offload, tmp_path, **keys))
    step(engine, 0)
    loss = loss_of(engine, 1)
    loss.register_hook(lambda grad: grad * float("nan"))
    engine.backward(loss)
    engine.step()
    assert (engine.skipped_steps, engine.global_steps) == (0, 2)
    assert not torch.tensor(engine.get_global_grad_norm()).isfinite()  # told as it is, not as +1
    assert all(
        value.isnan().all()
        for name, value in engine.module.state_dict().items()
        if "layers" in name
    )
    engine.close()


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_a_loss_scale_waits_for_its_hysteresis(hysteresis: int, tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": hysteresis}
    engine = start(models.ShortTower, config("cpu", tmp_path, fp16=fp16))
    for overflow in range(hysteresis):
        assert engine.loss_scale() == 256
        step(engine, overflow, float("inf"))
    assert (engine.loss_scale(), engine.skipped_steps) == (128, hysteresis)
    engine.close()


def test_a_run_that_overflows_at_the_least_scale_ends_with_an_error(tmp_path: Path) -> None:
    engine = start(
        models.ShortTower,
        config("cpu", tmp_path, fp16={"enabled": True, "initial_scale_power": 1, "hysteresis": 1}),
    )
    before = everything(engine)
    step(engine, 0, float("nan"))
    with pytest.raises(FloatingPointError, match="every further step would be skipped"):
        step(engine, 1, float("nan"))
    assert (engine.loss_scale(), engine.was_step_applied()) == (1, False)
    assert_same_tensors(everything(engine), before)
    step(engine, 2)  # it can go on
    assert engine.was_step_applied()
    engine.close()


# ---- states as asked -----------------------------------------------------------------------------


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_fp32_moments_beside_a_bf16_master_stay_fp32(offload: str, tmp_path: Path) -> None:
    """Where the reference turns them into bf16 after the first step."""
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True}
    engine = start(models.ShortTower, config(offload, tmp_path, bf16=bf16))
    for micro in range(3):
        step(engine, micro)
    states = {
        name: value for name, value in everything(engine).items() if name.startswith("exp_avg ")
    }
    assert states
    assert all(
        (value != value.bfloat16().float()).any()
        for name, value in states.items()
        if "weight" in name
    )
    engine.close()


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_states_are_kept_in_what_the_switches_say(half: str, tmp_path: Path) -> None:
    """Bytes of states written per parameter and step: a master of 4, of 2 that is the weight
    itself, and moments of 2."""
    written, dtype = [], {"bf16": torch.bfloat16, "fp16": torch.float16}[half]
    for has_master, is_fp32 in ((False, True), (True, True), (True, False)):
        section = {"enabled": True} | (
            {f"{half}_master_weights_and_grads": True} if has_master else {}
        )
        section |= {"initial_scale_power": 4} if half == "fp16" else {}
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "fp32_optimizer_states": is_fp32}}
        engine = start(
            models.ShortTower, config("nvme", tmp_path, **{half: section}, optimizer=optimizer)
        )
        step(engine, 0)
        engine.shards.check_whole()
        engine.shards.store.flush()
        before = engine.shards.store.stats().nvme_written_bytes
        step(engine, 1)
        engine.shards.check_whole()
        engine.shards.store.flush()
        written.append(engine.shards.store.stats().nvme_written_bytes - before)
        moments = [
            value for name, value in everything(engine).items() if name.startswith("exp_avg ")
        ]
        is_rounded = all(torch.equal(value.float(), value.to(dtype).float()) for value in moments)
        assert is_rounded != is_fp32
        assert engine.skipped_steps == 0
        engine.close()
    assert written[0] > written[1] > written[2], written


@pytest.mark.parametrize(
    ("betas", "is_stalling"),
    [([0.9, 0.999], True), ([0.9, 0.98], False)],
    ids=["beta2 0.999", "beta2 0.98"],
)
def test_bf16_states_warn_once_with_the_arithmetic(
    betas: list[float], is_stalling: bool, tmp_path: Path
) -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "betas": betas}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = start(models.ShortTower, config("cpu", tmp_path, bf16=bf16, optimizer=optimizer))
        step(engine, 0)
    engine.close()
    said = [str(each.message) for each in caught if "rounded to nearest" in str(each.message)]
    assert len(said) == int(is_stalling)
    if is_stalling:
        assert "1 - beta2 = 0.001" in said[0]
        assert "0.2 to 0.4 %" in said[0]


def test_stochastic_bf16_states_do_not_warn(tmp_path: Path) -> None:
    own = {"precision": "compact"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        start(
            models.ShortTower, config("cpu", tmp_path, bf16={"enabled": True}, tiermem=own)
        ).close()


# ---- optimizers ----------------------------------------------------------------------------------

SECTIONS: dict[str, dict[str, Any]] = {
    **{name: {"lr": 1e-3} for name in PARAMS if name != "Muon"},  # which has groups of its own
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True},
    "Adam": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False, "maximize": True},
    "Adagrad": {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "Lion": {"lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
    "SGD plain": {"lr": 1e-2, "weight_decay": 0.1},
}


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("name", SECTIONS)
def test_every_optimizer_trains_as_on_ordinary_parameters(
    name: str, offload: str, tmp_path: Path
) -> None:
    kind, params = name.split()[0], SECTIONS[name]
    model = seeded(models.tied_tower)
    twin = copy.deepcopy(model)
    settings = {key: value for key, value in params.items() if key != "adam_w_mode"}
    plain = getattr(tiermem.optim, kind)(twin.parameters(), **settings)
    keys = {"gradient_clipping": 0.0, "optimizer": {"type": kind, "params": params}}
    engine, optim, _, _ = tiermem.initialize(model=model, config=config(offload, tmp_path, **keys))
    assert type(optim) is type(plain)
    for micro in range(4):
        loss = loss_of(twin, micro)
        loss.backward()
        plain.step()
        plain.zero_grad()
        assert step(engine, micro) == loss.item()
    assert_same_tensors(dict(engine.module.state_dict()), dict(twin.state_dict()))
    engine.close()


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_muon_steps_hidden_matrices_and_adamw_the_rest(offload: str, tmp_path: Path) -> None:
    section = {"type": "Muon", "params": {"lr": 1e-2, "muon_lr": 2e-2, "adam_lr": 1e-3}}
    cfg = config(offload, tmp_path, optimizer=section)
    del cfg["zero_optimization"]["sub_group_size"]  # a tile holds a whole matrix
    model = seeded(models.ShortTower)
    bias = next(p for p in model.parameters() if p.dim() == 1)
    rest = [(name, p) for name, p in model.named_parameters() if p is not bias]
    given: Any = {  # in the forms that torch's optimizers take
        "nvme": model.named_parameters(),
        "cpu": [{"params": bias}, {"params": rest}],
    }
    engine, _, _, _ = tiermem.initialize(model=model, config=cfg, model_parameters=given[offload])
    names = {id(shard.param): shard.name for _, shard in engine.shards.parameters()}
    groups = {group["use_muon"]: group for group in engine.optimizer.param_groups}
    by_muon = {names[id(param)] for param in groups[True]["params"]}
    assert by_muon == {
        name
        for name in names.values()
        if name.endswith(("up.weight", "down.weight", "head.weight"))
    }
    assert (groups[True]["lr"], groups[False]["lr"]) == (2e-2, 1e-3)
    first = loss_of(engine, 0).item()
    for _ in range(8):
        step(engine, 0)
    assert loss_of(engine, 0).item() < first
    engine.close()


@pytest.mark.parametrize(
    "name", [name for name in PARAMS if name != "Muon" and hasattr(torch.optim, name)]
)
def test_torchs_own_optimizers_are_taken_over(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.05}
    settings |= {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}.get(name, {})
    model = seeded(models.ShortTower)
    twin = copy.deepcopy(model)
    given = getattr(torch.optim, name)(model.parameters(), **settings, foreach=True)
    plain = getattr(torch.optim, name)(twin.parameters(), **settings)
    cfg = config("nvme", tmp_path, gradient_clipping=0.0)
    engine, optim, _, _ = tiermem.initialize(model=model, optimizer=given, config=cfg)
    assert type(optim) is getattr(tiermem.optim, name)
    for micro in range(3):
        loss = loss_of(twin, micro)
        loss.backward()
        plain.step()
        plain.zero_grad()
        assert step(engine, micro) == pytest.approx(loss.item(), rel=1e-5)
    engine.close()


class Normed(torch.nn.Module):
    """A model with a batch norm, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).float().square().mean()


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_a_batch_norm_on_the_cpu_names_the_key_that_makes_it_run(half: str, tmp_path: Path) -> None:
    cfg = config("cpu", tmp_path, **{half: {"enabled": True}})
    with pytest.raises(
        ValueError, match=rf'module .inner.1.: .*Set data_types.buffer_dtype to "{half}"'
    ):
        tiermem.initialize(model=Normed(), config=cfg)
    engine, _, _, _ = tiermem.initialize(
        model=Normed(), config=cfg | {"data_types": {"buffer_dtype": half}}
    )
    before = engine.module.inner[1].running_mean.clone()
    engine.backward(engine(torch.ones(4, 8).to(before.dtype)))
    engine.step()
    assert not torch.equal(engine.module.inner[1].running_mean, before)
    engine.close()


# ---- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpoint", [None, False])
def test_forward_runs_under_autocast(
    checkpoint: bool | None, weights: str, offload: str, tmp_path: Path
) -> None:
    build = functools.partial(models.ShortTower, checkpoint=checkpoint)
    twin = seeded(build).to(torch.bfloat16 if weights == "bf16" else torch.float32)
    plain = tiermem.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.01)
    keys = {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "bf16": {"enabled": weights == "bf16"},
    }
    engine = start(build, config(offload, tmp_path, gradient_clipping=0.0, **keys))
    for micro in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(twin, micro)
        loss.backward()
        plain.step()
        plain.zero_grad()
        assert step(engine, micro) == loss.item()
    assert logits_of(engine(batch(0)[0])).dtype == torch.bfloat16
    engine.close()


@pytest.mark.parametrize("inside", ["fp32", "bf16", "autocast"])
def test_the_config_decides_the_precision_under_the_caller_s_autocast(
    inside: str, tmp_path: Path
) -> None:
    autocast = {"enabled": inside == "autocast", "dtype": "bf16"}
    keys = {"bf16": {"enabled": inside == "bf16"}, "torch_autocast": autocast}
    found = []
    for outer in (None, torch.float16, torch.bfloat16):
        engine = start(models.ShortTower, config("cpu", tmp_path, **keys))
        with (
            torch.autocast("cpu", outer, enabled=outer is not None),
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            loss = loss_of(engine, 0)
            assert torch.is_autocast_enabled("cpu") == (outer is not None)
        engine.backward(loss)  # blocks that are computed again
        engine.step()
        found.append((loss.item(), everything(engine)))
        is_told = outer is not None and (inside, outer) != ("autocast", torch.bfloat16)
        assert [str(each.message).startswith("the caller's torch.autocast") for each in told] == [
            True
        ] * is_told
        engine.close()
    for loss, states in found[1:]:
        assert loss == found[0][0]
        assert_same_tensors(states, found[0][1])


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "name", ["set_autocast_enabled", "set_autocast_dtype", "set_autocast_cache_enabled"]
)
def test_ctrl_c_while_autocast_is_set_leaves_it_as_it_was(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While forward turns autocast on, and while it turns it off."""

    def found() -> tuple[bool, torch.dtype, bool]:
        is_cached = torch.is_autocast_cache_enabled()
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), is_cached

    keys = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}
    engine = start(models.ShortTower, config("cpu", tmp_path, **keys))
    before = found()
    loss = loss_of(engine, 0)
    left = itertools.count(1)
    set_state = getattr(torch, name)

    def set_and_stop(*values: Any) -> None:
        set_state(*values)
        if next(left) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, name, set_and_stop)
    with pytest.raises(KeyboardInterrupt):
        loss_of(engine, 0)
    monkeypatch.undo()
    assert found() == before
    assert loss_of(engine, 0) == loss
    engine.close()


def test_autocast_to_fp16_scales_the_loss(tmp_path: Path) -> None:
    keys = {
        "torch_autocast": {"enabled": True, "dtype": "fp16"},
        "fp16": {"initial_scale_power": 4, "hysteresis": 1},
    }
    engine = start(models.ShortTower, config("cpu", tmp_path, **keys))
    assert engine.loss_scale() == 16
    step(engine, 0, float("inf"))
    assert (engine.loss_scale(), engine.skipped_steps) == (8, 1)
    assert next(engine.module.parameters()).dtype == torch.float32
    engine.close()
