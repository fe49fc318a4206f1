"""Where does a model go on a machine with an accelerator, and what does a run on the CPU touch of
it?"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from on_simulated import python
from programs import models
from programs.models import Tower, logits_of
from programs.twins import batch, loss_of, seeded, train_engine
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier


class Counted(Tower):
    """A tower with buffers, one of them in two places, and one on no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(31))
        self.layers[0].register_buffer("scale", self.scale)
        self.register_buffer("nothing", None)


@pytest.fixture
def policy(tmp_path: Path) -> OffloadPolicy:
    return OffloadPolicy(params=Tier.HOST, optim=Tier.NVME, paths=[tmp_path], persistence_numel=50)


def test_sharding_takes_a_model_to_the_accelerator(sim: ModuleType, policy: OffloadPolicy) -> None:
    model = seeded(Counted)
    before = {name: id(param) for name, param in model.named_parameters()}
    with tiermem.shard(model, policy) as shards:
        assert str(shards.device) == "sim:0"
        assert {str(each.device) for each in (*model.parameters(), *model.buffers())} == {"sim:0"}
        assert {name: id(param) for name, param in model.named_parameters()} == before
        assert model.scale is model.layers[0].scale
        tokens = batch(0)[0].to("sim")
        assert model(tokens).device == shards.device
    shards = tiermem.shard(seeded(Tower), policy)
    weights = {name: value.cpu() for name, value in shards.model.state_dict().items()}
    shards.close(materialize=True)
    assert {str(param.device) for param in shards.model.parameters()} == {"sim:0"}
    assert all(
        torch.equal(weights[name], value.cpu()) for name, value in shards.model.state_dict().items()
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_without_offload_keep_everything_on_the_device(stage: int, sim: ModuleType) -> None:
    engine, _, _, _ = tiermem.initialize(
        model=seeded(models.ShortTower),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "gradient_clipping": 0.5,
        },
    )
    assert (engine.device, engine.local_rank, engine.global_rank, engine.world_size) == (
        torch.device("sim:0"),
        0,
        0,
        1,
    )
    assert {row.what for row in engine.shards.plan.rows if row.tier is not Tier.DEVICE} <= {
        "context",
        "small copies",
    }
    losses = train_engine(engine, [0, 1, 0])
    assert losses[2] < losses[0]
    engine.close()


def test_resident_weights_leave_the_device_and_come_back_as_they_were(sim: ModuleType) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine, _, _, _ = tiermem.initialize(model=seeded(models.ShortTower), config=config)
    for step in range(2):
        train_engine(engine, [step])
        before = [param.cpu() for param in engine.module.parameters()]
        weights, reserved = sum(each.nbytes for each in before), sim.memory_reserved("sim")
        engine.offload_states()
        # the driver has it again, for other processes
        assert sim.memory_reserved("sim") <= reserved - weights
        assert not any(live.is_present for live in engine.shards.units)
        engine.reload_states()
        assert all(live.is_present for live in engine.shards.units)
        assert all(map(torch.equal, before, (param.cpu() for param in engine.module.parameters())))
    with pytest.raises(RuntimeError, match="cannot go from PRESENT to PRESENT"):
        engine.shards.values.keep_present(engine.shards.units[0])
    engine.close()


TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your "
    "GPU driver by"
)


@pytest.mark.parametrize(
    ("said", "is_hidden"), [(TOO_OLD, False), (TOO_OLD, True), ("Found no NVIDIA driver", False)]
)
def test_a_driver_that_is_too_old_is_an_error_and_no_training_on_the_cpu(
    said: str, is_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch for CUDA on a machine whose driver it refuses, as torch says it, whether "cuda" was
    asked for or nothing."""

    def init() -> None:
        raise RuntimeError(said)

    def found(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if is_hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    policy = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST)
    is_fault = said == TOO_OLD and not is_hidden
    if is_fault:
        with pytest.raises(
            ValueError,
            match=r"too old \(found version 11040\) for torch .*\. Update the driver, .*'cpu'",
        ):
            tiermem.shard(seeded(Tower), policy)
    with pytest.raises(ValueError, match="too old" if is_fault else "has no accelerator\\. Name"):
        tiermem.shard(seeded(Tower), policy, device="cuda")
    with tiermem.shard(seeded(Tower), policy, device="cpu" if is_fault else None) as shards:
        assert shards.device == torch.device("cpu")


def test_a_model_stays_on_the_cpu_when_that_is_asked_for(
    sim: ModuleType, policy: OffloadPolicy
) -> None:
    model = seeded(Counted)
    with tiermem.shard(model, policy, device="cpu") as shards:
        optim = tiermem.AdamW(model.parameters())
        loss_of(model, 0).backward()
        optim.step()
        assert {
            each.device.type
            for each in (*model.parameters(), *model.buffers(), shards.weight(model.head.weight))
        } == {"cpu"}


@pytest.mark.parametrize("with_init", [False, True])
def test_parameters_under_init_stay_on_the_device_that_they_are_made_on(
    with_init: bool, sim: ModuleType, policy: OffloadPolicy
) -> None:
    plain = seeded(models.ShortTower)
    torch.manual_seed(0)
    with tiermem.zero.Init(policy=policy, enabled=with_init), torch.device("sim"):
        model = models.ShortTower()
    assert {param.device.type for param in model.parameters()} == {"sim"}
    plain.load_state_dict({name: value.cpu() for name, value in _values(model).items()})
    with tiermem.shard(model, policy):
        tokens = batch(0)[0]
        assert torch.equal(logits_of(model(tokens.to("sim"))).cpu(), logits_of(plain(tokens)))


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    with tiermem.zero.GatheredParameters(list(model.parameters())):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_only_what_crosses_the_link_is_registered_in_one_call(
    sim: ModuleType, tmp_path: Path
) -> None:
    before = sim.registered()
    policy = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST, persistence_numel=50)
    with tiermem.shard(seeded(Tower), policy) as shards:
        tiermem.AdamW(shards.model.parameters())
        ranges, num_bytes = (
            after - early for after, early in zip(sim.registered(), before, strict=True)
        )
        assert (ranges, num_bytes) == (1, shards.plan.link_bytes)
        assert num_bytes < shards.plan.host_bytes / 2  # states and gradients are not pinned
    assert sim.registered() == before
    with tiermem.shard(
        seeded(Tower), OffloadPolicy(params=Tier.HOST, pin_memory=False, optim=Tier.HOST)
    ):
        assert sim.registered() == before


def test_a_driver_that_refuses_to_pin_is_told_and_training_goes_on(
    sim: ModuleType, policy: OffloadPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    sim.set_register_limit(0)
    model = seeded(Tower)
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        tokens = batch(0)[0].to("sim")
        model(tokens).square().mean().backward()
        optim.step()
    assert "host memory is not pinned" in caplog.text
    assert "ulimit -l" in caplog.text


def test_a_driver_with_a_limit_pins_the_buffers_and_tells_what_it_does_not(
    sim: ModuleType, policy: OffloadPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    before = sim.registered().num_bytes
    with tiermem.shard(seeded(Tower), policy) as shards:
        whole, links = shards.plan.link_bytes, shards.plan.links
    limit = whole // 2
    sim.set_register_limit(limit)
    with tiermem.shard(seeded(Tower), policy) as shards:
        pinned = sim.registered().num_bytes - before
        assert links.slot_bytes * links.num <= pinned <= limit
        assert not shards.store.arena.is_pinned
    assert f"({whole - pinned} of {whole} bytes: " in caplog.text
    assert sim.registered().num_bytes == before


def test_a_device_that_is_not_there_is_named(sim: ModuleType, policy: OffloadPolicy) -> None:
    for asked in ("sim:7", "cuda", "xpu:0"):
        with pytest.raises(
            ValueError, match=f"device '{asked}' is not there: this machine has 2 of type 'sim'"
        ):
            tiermem.shard(seeded(Tower), policy, device=asked)
    sim.unplug()
    with pytest.raises(
        ValueError, match="device 'cuda' is not there: this machine has no accelerator"
    ):
        tiermem.shard(seeded(Tower), policy, device="cuda")
    with pytest.raises(ValueError, match="grads=DEVICE without an accelerator"):
        tiermem.shard(seeded(Tower), OffloadPolicy(grads=Tier.DEVICE))


def test_generators_of_the_device_are_in_checkpoints(
    sim: ModuleType, policy: OffloadPolicy, tmp_path: Path
) -> None:
    drawn = []
    for is_resumed in (False, True):
        model = seeded(Tower)
        with tiermem.shard(model, policy) as shards:
            optim = tiermem.AdamW(model.parameters())
            if is_resumed:
                torch.manual_seed(99)
                tiermem.checkpoint.load(shards, optim, tmp_path / "saved")
            else:
                torch.manual_seed(5)
                torch.rand(3, device="sim")
                tiermem.checkpoint.save(shards, optim, tmp_path / "saved", tag="one", copy=True)
            drawn.append(torch.rand(4, device="sim").tolist())
    assert drawn[0] == drawn[1]


def test_out_of_memory_in_a_step_ends_it_and_leaves_the_step_before(
    sim: ModuleType, tmp_path: Path
) -> None:
    """A step that fails half-way is told as torn; the last durable step opens and goes on as if
    nothing had been."""
    losses: list[list[float]] = []
    failures: list[str] = []
    for fails in (False, True):
        folder = tmp_path / str(fails)
        folder.mkdir()
        policy = OffloadPolicy(
            params=Tier.HOST, optim=Tier.DEVICE, persistence_numel=50, paths=[folder]
        )
        model = seeded(Tower)
        with tiermem.shard(model, policy) as shards:
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            own = [_step(model, optim, step) for step in range(2)]
            tiermem.checkpoint.save(shards, optim, folder / "saved", tag="two", copy=True)
            if fails:
                for capacity in (0, torch.accelerator.memory_reserved()):
                    sim.set_capacity(capacity)
                    torch.accelerator.empty_cache()
                    for _ in range(3):  # what is cached may be enough for some
                        try:
                            _step(model, optim, 5)
                        except (torch.OutOfMemoryError, RuntimeError) as error:
                            failures.append(str(error))
                    optim.zero_grad()
                sim.set_capacity(1 << 30)
                tiermem.checkpoint.load(shards, optim, folder / "saved")
            losses.append(own + [_step(model, optim, step) for step in range(2, 4)])
    assert any("out of memory" in each.lower() for each in failures), failures
    assert losses[0] == losses[1]


def _step(model: nn.Module, optim: tiermem.AdamW, step: int) -> float:
    tokens, targets = (each.to("sim") for each in batch(step))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.item()


UNTOUCHED = """
import sys
sys.path[:0] = [{tests!r}]
import torch, tiermem
from programs.models import *\nfrom programs.twins import *
assert torch.accelerator.is_available()
policy = OffloadPolicy(params=tiermem.Tier.NVME, optim=tiermem.Tier.NVME, paths=[{folder!r}], persistence_numel=50)
with tiermem.zero.Init(policy=policy):
    model = seeded(Tower)
with tiermem.shard(model, policy, device="cpu"):
    optim = tiermem.AdamW(model.parameters())
    loss_of(model, 0).backward()
    optim.step()
config = {{"train_batch_size": 1, "optimizer": {{"type": "AdamW"}}}}
engine = tiermem.initialize(model=seeded(Tower), device="cpu", config=config)[0]
engine.backward(loss_of(engine, 0))
engine.step()
engine.close()
assert not torch.sim.was_touched(), "a context was made"
assert torch.sim.registered().num_ranges == 0
print("untouched")
"""


@pytest.mark.slow
def test_a_run_on_the_cpu_makes_no_context_and_pins_nothing(
    sim: ModuleType, tmp_path: Path
) -> None:
    script = UNTOUCHED.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    assert "untouched" in python("-c", script)
