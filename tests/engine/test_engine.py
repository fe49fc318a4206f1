"""Does the face that DeepSpeed users know compute what a plain loop does?"""

from __future__ import annotations

import argparse
import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, loss_of, seeded, train_engine
from torch import nn

import tiermem
from tiermem import Tier
from tiermem.config import load_config
from tiermem.optimizers import PARAMS
from tiermem.zero import Init

OFFLOADS = ["none", "cpu", "nvme"]


def config(offload: str, folder: Path, stage: int = 3, **keys: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 50}
    if offload != "none":
        zero["offload_optimizer"] = {"device": offload, "nvme_path": str(folder)}
        if stage == 3:
            zero["offload_param"] = {"device": offload, "nvme_path": str(folder)}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": optimizer,
        "zero_optimization": zero,
    } | keys


def run(engine: tiermem.Engine, num_steps: int = 4) -> list[float]:
    return train_engine(engine, range(num_steps * engine.gradient_accumulation_steps()))


def plain_run(
    model: nn.Module, num_steps: int = 4, accumulation: int = 1, lr: float = 1e-2
) -> list[float]:
    optim, losses = tiermem.AdamW(model.parameters(), lr=lr, weight_decay=0.01), []
    for micro in range(num_steps * accumulation):
        loss = loss_of(model, micro)
        (loss / accumulation if accumulation > 1 else loss).backward()
        losses.append(loss.item())
        if (micro + 1) % accumulation == 0:
            optim.step()
            optim.zero_grad()
    return losses


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.sampled(16)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "offload"),
    [(0, "none"), (1, "none"), (1, "cpu"), (2, "nvme"), (3, "none"), (3, "cpu"), (3, "nvme")],
)
def test_engine_trains_as_a_plain_loop(
    stage: int, offload: str, precision: str, accumulation: int, tmp_path: Path
) -> None:
    model = seeded(models.tied_tower)
    plain = copy.deepcopy(model).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    keys = {"gradient_accumulation_steps": accumulation, "bf16": {"enabled": precision == "bf16"}}
    engine, _, _, _ = tiermem.initialize(
        model=model, config=config(offload, tmp_path, stage, **keys)
    )
    assert run(engine) == plain_run(plain, accumulation=accumulation)
    assert engine.global_steps == 4
    assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
    engine.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_weights_built_under_init_train_as_plain_ones(offload: str, tmp_path: Path) -> None:
    losses = []
    for is_enabled in (False, True):
        cfg = config(offload, tmp_path, bf16={"enabled": True})
        torch.manual_seed(0)
        with Init(config_dict_or_path=cfg, enabled=is_enabled):
            model = models.llama()
        engine, _, _, _ = tiermem.initialize(model=model, config=cfg)
        losses.append(run(engine))
        engine.close()
    assert losses[0] == losses[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_fp16_with_a_dynamic_scale_skips_and_recovers(offload: str, tmp_path: Path) -> None:
    """The scale starts too high: steps are skipped, states untouched to the bit, until it fits;
    then training goes on."""
    model = seeded(models.ShortTower)
    twin = copy.deepcopy(model).half()
    fp16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1}
    engine, _, _, _ = tiermem.initialize(model=model, config=config(offload, tmp_path, fp16=fp16))
    expected, losses, scale, good = (
        tiermem.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.01),
        [],
        2.0**24,
        0,
    )
    for micro in range(16):
        assert engine.loss_scale() == scale
        loss = loss_of(twin, micro)
        (loss * scale).backward()
        overflows = not all(p.grad.isfinite().all() for p in twin.parameters())
        before = dict(model.state_dict())
        losses.append((*train_engine(engine, [micro]), loss.item()))
        if overflows:
            assert_same_tensors(before, dict(model.state_dict()))
            scale, good = scale / 2, 0
        else:
            expected.step(scale=scale)
            good += 1
            scale = scale * 2 if good % 3 == 0 else scale
        expected.zero_grad()
    assert 0 < engine.skipped_steps < 16
    assert all(mine == other for mine, other in losses)
    assert_same_tensors(dict(model.state_dict()), dict(twin.state_dict()))
    engine.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_static_scale_changes_no_loss(offload: str, tmp_path: Path) -> None:
    losses = []
    for scale in (1, 256):
        fp16 = {"enabled": True, "loss_scale": scale}
        engine, _, _, _ = tiermem.initialize(
            model=seeded(models.ShortTower), config=config(offload, tmp_path, fp16=fp16)
        )
        losses.append(run(engine))
        engine.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_clipping_and_the_global_norm(tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    plain = copy.deepcopy(model)
    engine, _, _, _ = tiermem.initialize(
        model=model, config=config("nvme", tmp_path, gradient_clipping=0.05)
    )
    train_engine(engine, [0])
    loss_of(plain, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item()
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6)
    engine.close()


@pytest.mark.parametrize("given", ["instance", "factory", "torch's own"])
def test_an_optimizer_that_is_given_keeps_its_groups(given: str, tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    plain = copy.deepcopy(model)
    cfg = config("nvme", tmp_path)
    del cfg["optimizer"]

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        weights = [p for p in of.parameters() if p.ndim > 1]
        return [
            {"params": weights, "weight_decay": 0.3},
            {"params": [p for p in of.parameters() if p.ndim == 1], "lr": 0.1},
        ]

    kinds: dict[str, Callable[[], Any]] = {
        "instance": lambda: tiermem.AdamW(groups(model), lr=1e-2),
        "factory": lambda: lambda params: tiermem.AdamW(groups(model), lr=1e-2),
        "torch's own": lambda: torch.optim.AdamW(groups(model), lr=1e-2),
    }
    engine, _, _, _ = tiermem.initialize(model=model, optimizer=kinds[given](), config=cfg)
    mine = run(engine)
    assert engine.get_lr() == [1e-2, 0.1]
    twin, losses = tiermem.AdamW(groups(plain), lr=1e-2), []
    for micro in range(4):
        loss = loss_of(plain, micro)
        loss.backward()
        twin.step()
        twin.zero_grad()
        losses.append(loss.item())
    assert mine == losses
    engine.close()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, tiermem.AdamW, torch.optim.SGD])
def test_the_groups_of_a_given_optimizer_stay_those_of_both(kind: Any, tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    given = kind(model.parameters(), lr=1e-2)
    # the user steps it
    schedule = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1.0 / (1 + step))
    cfg = config("nvme", tmp_path)
    del cfg["optimizer"]
    engine, optim, _, _ = tiermem.initialize(model=model, optimizer=given, config=cfg)
    schedule.step()
    assert optim is not given and engine.get_lr() == [5e-3]
    optim.load_state_dict(optim.state_dict())
    given.param_groups[0]["lr"] = 0.0
    before = {name: each.clone() for name, each in model.state_dict().items()}
    run(engine)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    engine.close()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, tiermem.AdamW])
def test_states_and_hooks_of_a_given_optimizer_stay(kind: Any, tmp_path: Path) -> None:
    found = []
    for is_plain in (True, False):
        model = seeded(models.ShortTower)
        given = kind(model.parameters(), lr=1e-2)
        loss_of(model, 0).backward()
        given.step()
        given.zero_grad()

        def halve(optimizer: Any, *_: Any) -> None:
            for param in optimizer.param_groups[0]["params"]:
                param.grad.mul_(0.5)

        given.register_step_pre_hook(halve)
        cfg = config("nvme", tmp_path)
        del cfg["optimizer"]
        engine, optim = None, given
        if not is_plain:
            engine, optim, _, _ = tiermem.initialize(model=model, optimizer=given, config=cfg)
            assert not given.state
        loss = loss_of(model, 1)
        loss.backward() if engine is None else engine.backward(loss)
        optim.step() if engine is None else engine.step()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        if engine is not None:
            engine.close()
            with pytest.raises(RuntimeError, match="were freed when"):
                optim.state_dict()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.filterwarnings("error:.*optimizer.step")
def test_a_scheduler_that_is_given_steps_with_the_engine(is_built: bool, tmp_path: Path) -> None:
    factory = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    cfg = config("cpu", tmp_path, gradient_accumulation_steps=2)
    model = seeded(models.ShortTower)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, _, scheduler = tiermem.initialize(
        model=model,
        optimizer=theirs,
        lr_scheduler=factory(theirs) if is_built else factory,
        config=cfg,
    )
    run(engine, num_steps=4)
    assert scheduler is engine.lr_scheduler
    assert engine.get_lr() == [pytest.approx(1e-2 / 4)]
    engine.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_step_in_backward_trains_as_stepping_after_it(precision: str, tmp_path: Path) -> None:
    losses = []
    keys = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "loss_scale": 64.0}}
    for own in ({}, {"step_in_backward": True}):
        cfg = config("nvme", tmp_path, tiermem=own, **{precision: keys[precision]})
        engine, _, _, _ = tiermem.initialize(model=seeded(models.tied_tower), config=cfg)
        losses.append(run(engine))
        engine.close()
    assert losses[0] == losses[1]


# ---- inference -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_generate_gives_the_plain_models_tokens(offload: str, tied: bool, tmp_path: Path) -> None:
    model = seeded(functools.partial(models.llama, tied=tied)).eval()
    prompt = torch.randint(1, 61, (2, 5), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = copy.deepcopy(model).generate(prompt, **settings)
    cfg = config(offload, tmp_path)
    del cfg["optimizer"]
    engine, optim, _, _ = tiermem.initialize(model=model, config=cfg)
    assert optim is None
    assert torch.equal(engine.module.generate(prompt, **settings), expected)
    assert torch.equal(engine.generate(prompt, **settings), expected)
    assert (engine.shards.store.stats().nvme_read_bytes > 0) == (offload == "nvme")
    assert not [
        row for row in engine.shards.plan.rows if "gradient" in row.what or "states" in row.what
    ]
    engine.close()


def test_an_engine_for_inference_refuses_to_train(tmp_path: Path) -> None:
    cfg = config("cpu", tmp_path)
    del cfg["optimizer"]
    engine, _, _, _ = tiermem.initialize(model=seeded(models.ShortTower), config=cfg)
    with pytest.raises(RuntimeError, match="for inference"):
        engine.backward(loss_of(engine, 0))
    with pytest.raises(RuntimeError, match="for inference"):
        engine.step()
    engine.close()


# ---- bad input: one clear error, before any byte is written --------------------------------------


def refused(folder: Path, error: type[Exception], match: str, **given: Any) -> None:
    with pytest.raises(error, match=match):
        tiermem.initialize(**given)
    assert not list(folder.rglob("tiermem-*"))


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    cfg = config("nvme", tmp_path, gradient_cliping=1.0)
    refused(tmp_path, ValueError, "gradient_clipping", model=models.ShortTower(), config=cfg)


def test_both_precisions_are_refused(tmp_path: Path) -> None:
    cfg = config("nvme", tmp_path, bf16={"enabled": True}, fp16={"enabled": True})
    refused(tmp_path, ValueError, "both", model=models.ShortTower(), config=cfg)


def test_a_model_is_needed_and_a_config() -> None:
    with pytest.raises(ValueError, match="needs a model"):
        tiermem.initialize(config={})
    with pytest.raises(ValueError, match="needs a config"):
        tiermem.initialize(model=models.ShortTower())


class Mpu:
    """A model-parallel unit, as Megatron-LM's."""

    def __init__(self, model_parallel: int = 1) -> None:
        self.model_parallel = model_parallel

    def get_model_parallel_world_size(self) -> int:
        return self.model_parallel

    def get_data_parallel_group(self) -> None:
        return None


def test_a_model_may_come_first_or_after_args(tmp_path: Path) -> None:
    model, cfg = models.ShortTower, config("cpu", tmp_path)
    optim = tiermem.AdamW
    for arguments, keywords in (
        ((model(),), {"config": cfg}),
        ((None, model()), {"config": cfg}),
        (
            (
                argparse.Namespace(deepspeed_config=cfg),
                model(),
                lambda params: optim(params, lr=1e-3),
            ),
            {},
        ),
        ((None, model(), None, None, None, None, 29500, Mpu(), None, None, cfg, (1, 1), None), {}),
        (
            (),
            {
                "model": model(),
                "config_params": cfg,
                "mpu": Mpu(),
                "dist_init_required": None,
                "mesh_param": None,
            },
        ),
    ):
        engine, optimizer, _, _ = tiermem.initialize(*arguments, **keywords)
        assert isinstance(optimizer, tiermem.AdamW)
        engine.close()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"args": nn.Linear(2, 2)}, ValueError, "two models are given"),
        ({"mpu": Mpu(2)}, ValueError, "mpu has 2 model-parallel ranks"),
        ({"mesh_param": (1, 2)}, ValueError, "sequence parallelism does not exist"),
        ({"mesh_param": 2}, ValueError, "mesh_param is 2: sequence parallelism does not exist"),
        ({"mpu": "x"}, ValueError, "mpu is 'x'; give an object with get_data_parallel_group"),
        ({"model": "gpt2"}, ValueError, r"model is 'gpt2'; give a torch.nn.Module"),
        (
            {"optimizer": "adam"},
            ValueError,
            "optimizer is 'adam'; give an optimizer, or a function",
        ),
        (
            {"lr_scheduler": "WarmupLR"},
            ValueError,
            "lr_scheduler is 'WarmupLR'; give a schedule, or a function",
        ),
        ({"model_parameters": 3}, ValueError, "model_parameters is 3; give parameters or groups"),
        (
            {"model_parameters": "weight"},
            ValueError,
            "model_parameters is 'weight'; give parameters or groups",
        ),
        ({"training_data": 3}, ValueError, "training_data is 3; give a data set"),
        ({"dist_init_required": False}, RuntimeError, "there is no process group"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_arguments_that_ask_for_what_is_not_there_are_refused(
    given: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        tiermem.initialize(
            **{"model": models.ShortTower(), "config": config("cpu", tmp_path)} | given
        )


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("set_train_batch_size", "8", "train_batch_size is '8'; it must be a whole number"),
        ("train_batch", None, "train_batch takes an iterator of micro-batches; given None"),
    ],
)
def test_an_engine_names_what_it_cannot_take(
    name: str, given: Any, said: str, tmp_path: Path
) -> None:
    engine = tiermem.initialize(model=seeded(models.ShortTower), config=config("cpu", tmp_path))[0]
    with pytest.raises(ValueError, match=said):
        getattr(engine, name)(given)
    with pytest.raises(ValueError, match="client_state is 3; give a dict"):
        engine.save_checkpoint(tmp_path / "out", client_state=3)  # type: ignore[arg-type]
    engine.close()


def into_store(tier: Any) -> None:
    with tiermem.TensorStore(host_bytes=1 << 20) as store:
        store.put("w", torch.ones(1), Tier.HOST)
        store.fetch("w", to=tier)


REFUSED: dict[str, Callable[..., Any]] = {
    "policy is a dict; give an OffloadPolicy: tiermem.config.load_config": lambda model: (
        tiermem.shard(model, {"stage": 3})
    ),
    "model is 'gpt2'; give a torch.nn.Module": lambda model: tiermem.shard("gpt2"),
    "model is 'm'; give": lambda model: tiermem.choose_policy("m"),
    "policy is a str; give": lambda model: tiermem.choose_policy(model, "nvme"),
    "moved names ['param']; allowed are 'params', 'optim'": lambda model: tiermem.choose_policy(
        model, moved=("param",)
    ),
    "a batch is given and no loss_of": lambda model: tiermem.choose_policy(model, batch=[1]),
    "num_micro is 0": lambda model: tiermem.choose_policy(model, num_micro=0),
    "model is 'x'; give": lambda model: tiermem.EMA("x"),
    "home is 'nvme'; allowed are Tier.HOST, Tier.NVME": lambda model: tiermem.EMA(
        model, home="nvme"
    ),
    "dtype is 'bf16'; give one of torch's": lambda model: tiermem.EMA(model, dtype="bf16"),
    "dtype is 'fp16'; give": lambda model: [*tiermem.export_weights(model, "fp16")],
    "dtype is 'fp32'; give": lambda model: tiermem.zero.Init(dtype="fp32"),
    "policy is a float; give": lambda model: tiermem.AdamW(model.parameters(), policy=1.0),
    "host_bytes is '1GiB'; give a number of bytes": lambda model: tiermem.TensorStore(
        host_bytes="1GiB"
    ),
    "disk_bytes is -1; give": lambda model: tiermem.TensorStore(disk_bytes=-1),
    "io is 'uring'; give an IoSettings": lambda model: tiermem.TensorStore(io="uring"),
    "to is 'device'; allowed are Tier.HOST, Tier.DEVICE": lambda model: into_store("device"),
    "home is 'cpu'; allowed are Tier.DEVICE, Tier.HOST, Tier.NVME": lambda model: (
        tiermem.TensorStore().put("w", torch.ones(1), "cpu")
    ),
    "block_bytes is '1MiB'; allowed": lambda model: tiermem.IoSettings(block_bytes="1MiB"),
    "depth is '8'; allowed are 1 to 4096": lambda model: tiermem.IoSettings(depth="8"),
    "a path is None; give a folder": lambda model: tiermem.NvmePath(None),
    "max_bytes is '1GB'; it must be": lambda model: tiermem.NvmePath(".", "1GB"),
    "weight is 'fast'; it must be": lambda model: tiermem.NvmePath(".", weight="fast"),
    "it is nested too deeply": lambda model: load_config('{"a":' + "[" * 100_000),
}


@pytest.mark.parametrize("said", REFUSED)
def test_calls_name_what_they_cannot_take(said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        REFUSED[said](models.ShortTower())


def test_one_process_without_a_launcher_needs_no_group() -> None:
    tiermem.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, distributed_port=29500)
    assert not torch.distributed.is_initialized()


def test_an_engine_is_not_cast_or_moved_silently(tmp_path: Path) -> None:
    engine = tiermem.initialize(model=seeded(models.ShortTower), config=config("nvme", tmp_path))[0]
    for casts in (
        engine.half,
        engine.bfloat16,
        engine.double,
        lambda: engine.to(torch.float16),
        lambda: engine.to("meta"),
    ):
        with pytest.raises(
            RuntimeError, match=r"weights rest on tiers.*ask for a dtype in the config"
        ):
            casts()
    for same in (
        engine.float,
        engine.cpu,
        lambda: engine.to("cpu"),
        lambda: engine.to(torch.float32),
    ):
        assert same() is engine
    with pytest.raises(
        RuntimeError, match=r"setting data writes a parameter of shape .*GatheredParameters"
    ):
        engine.module.half()
    assert engine.module.to("cpu") is engine.module
    assert {param.dtype for param in engine.module.parameters()} == {torch.float32}
    engine.close()


def test_an_optimizer_without_parameters_is_refused(tmp_path: Path) -> None:
    cfg = config("nvme", tmp_path)
    refused(
        tmp_path,
        ValueError,
        "no parameters",
        model=models.ShortTower().requires_grad_(False),
        config=cfg,
    )
    refused(
        tmp_path,
        ValueError,
        "no parameters",
        model=models.ShortTower(),
        model_parameters=[],
        config=cfg,
    )


def test_an_optimizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = models.ShortTower()
    given = torch.optim.RMSprop(model.parameters())
    said = (
        f"RMSprop cannot step states.*allowed are {', '.join(PARAMS)} of tiermem.*"
        "Give the nearest of these"
    )
    refused(
        tmp_path, ValueError, said, model=model, optimizer=given, config=config("nvme", tmp_path)
    )


def test_an_optimizer_with_a_step_of_its_own_is_refused(tmp_path: Path) -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = models.ShortTower()
    given = Own(model.parameters())
    said = "Own has a step of its own, which would not run"
    cfg = config("nvme", tmp_path)
    refused(tmp_path, ValueError, said, model=model, optimizer=given, config=cfg)


def test_a_loss_of_several_elements_is_refused(tmp_path: Path) -> None:
    engine, _, _, _ = tiermem.initialize(
        model=seeded(models.ShortTower), config=config("cpu", tmp_path)
    )
    with pytest.raises(ValueError, match="loss of one element"):
        engine.backward(torch.ones(3, requires_grad=True))
    engine.close()


def test_init_and_config_must_agree_on_the_dtype(tmp_path: Path) -> None:
    with Init(config_dict_or_path=config("cpu", tmp_path, bf16={"enabled": True})):
        model = models.ShortTower()
    cfg = config("cpu", tmp_path, fp16={"enabled": True})
    refused(tmp_path, ValueError, "built parameters as torch.bfloat16", model=model, config=cfg)


class Adapted(nn.Module):
    """A frozen base, and an adapter in another dtype that computes in its own."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)

    def add(self) -> None:
        self.low = nn.Linear(16, 4, bias=False)
        self.high = nn.Linear(4, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.base(x).float() + self.high(self.low(x.float()))).square().mean()


@pytest.mark.parametrize("are_converted", [True, False])
@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_adapters_in_another_dtype_than_a_base_that_zero_init_built_keep_it(
    offload: str, are_converted: bool, tmp_path: Path
) -> None:
    cfg = config(offload, tmp_path, bf16={"enabled": True})
    found = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        with Init(config_dict_or_path=cfg, enabled=not is_plain):
            model = Adapted()
        if is_plain:
            model.to(torch.bfloat16)
        model.add()
        adapters = [*model.low.parameters(), *model.high.parameters()]
        if is_plain:
            optim = tiermem.AdamW(adapters, lr=1e-2)
        else:
            if are_converted:
                model.base.weight.convert_to_zero_parameters(adapters)
            given = torch.optim.AdamW(adapters, lr=1e-2)
            engine, optim, _, _ = tiermem.initialize(model=model, optimizer=given, config=cfg)
            assert (model.base.weight.dtype, model.low.weight.dtype) == (
                torch.bfloat16,
                torch.float32,
            )
        for _ in range(3):
            loss = (model if is_plain else engine)(torch.ones(2, 16, dtype=torch.bfloat16))
            loss.backward() if is_plain else engine.backward(loss)
            optim.step() if is_plain else engine.step()
            optim.zero_grad()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    engine.close()
    for name, value in found[0].items():
        assert value.dtype == found[1][name].dtype
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_non_finite_gradients_are_skipped_or_raise_as_asked(precision: str, tmp_path: Path) -> None:
    for choice in ("skip", "raise"):
        keys = {"tiermem": {"on_nonfinite": choice}, "bf16": {"enabled": precision == "bf16"}}
        engine, _, _, _ = tiermem.initialize(
            model=seeded(models.ShortTower), config=config("nvme", tmp_path, **keys)
        )
        before = dict(engine.module.state_dict())
        engine.backward(loss_of(engine, 0) * float("nan"))
        if choice == "raise":
            with pytest.raises(RuntimeError, match="NaN or infinity"):
                engine.step()
        else:
            engine.step()
            assert engine.skipped_steps == 1
        assert_same_tensors(before, dict(engine.module.state_dict()))
        engine.close()
