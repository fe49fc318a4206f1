"""After an interrupt: does the model go on to the bit, or does each call say that it is torn and
how to go on?"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier, checkpoint, weights_io
from tiermem.gradients.gradient_store import GradientStore
from tiermem.gradients.gradients import GradientHomes
from tiermem.optim.tentative import TentativeStep
from tiermem.optim.tiles import StateTiles
from tiermem.run.shards import Shards
from tiermem.swap.store.checksum import Sums
from tiermem.weights.unit_memory import UnitMemory
from tiermem.weights.unit_state import LiveUnit

KINDS = (KeyboardInterrupt, SystemExit, asyncio.CancelledError, MemoryError)


class Stopping(nn.Linear):
    """Raises what it is told to in its next forward."""

    stop: type[BaseException] | Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stop, Stopping.stop = Stopping.stop, None
        if isinstance(stop, type):
            raise stop
        if stop is not None:
            stop()
        return super().forward(x)


class Run:
    """A small sharded model, its optimizer and one batch."""

    def __init__(self, folder: Path, tier: Tier, overlap: Any = "none", **more: Any) -> None:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(64, 64), Stopping(64, 64))
        self.model = nn.Sequential(nn.Linear(64, 64), inner, *(nn.Linear(64, 64) for _ in range(6)))
        self.x = torch.randn(4, 64)
        paths = [folder] if tier is Tier.NVME else []
        policy = OffloadPolicy(
            params=tier, optim=tier, paths=paths, persistence_numel=0, overlap=overlap, **more
        )
        self.shards = tiermem.shard(self.model, policy, device="cpu")
        self.optim = tiermem.AdamW(self.model.parameters(), lr=1e-2)

    def backward(self) -> None:
        self.model(self.x).square().mean().backward()

    def train(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.backward()
            self.optim.step()
            self.optim.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        found = [value.clone() for value in self.model.state_dict().values()]
        self.shards.close()
        return found


def undisturbed(
    folder: Path, tier: Tier, num_steps: int, overlap: Any = "none"
) -> list[torch.Tensor]:
    run = Run(folder, tier, overlap)
    run.train(num_steps)
    return run.weights()


def is_equal(found: list[torch.Tensor], due: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, due, strict=True))


@pytest.mark.parametrize(
    ("kind", "tier"), [*((kind, Tier.NVME) for kind in KINDS), (KeyboardInterrupt, Tier.HOST)]
)
def test_a_forward_that_was_interrupted_is_made_again_to_the_bit(
    kind: type[BaseException], tier: Tier, tmp_path: Path
) -> None:
    run = Run(tmp_path, tier)
    run.train(2)
    Stopping.stop = kind
    with pytest.raises(kind):
        run.train()
    run.train(2)
    assert is_equal(run.weights(), undisturbed(tmp_path, tier, 4))


def test_a_module_that_is_called_by_itself_after_an_interrupt_begins_a_pass(tmp_path: Path) -> None:
    run = Run(tmp_path, Tier.NVME)
    run.train(2)
    with torch.no_grad():
        due = run.model[1](run.x)
        Stopping.stop = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            run.model(run.x)
        assert torch.equal(run.model[1](run.x), due)
    run.train(2)
    assert is_equal(run.weights(), undisturbed(tmp_path, Tier.NVME, 4))


@pytest.mark.parametrize(
    ("overlap", "place"),
    [
        ("none", (StateTiles, "_in_order")),
        ("forward", (StateTiles, "step")),
        ("backward", (TentativeStep, "end")),
    ],
)
def test_a_step_that_was_interrupted_after_it_was_counted_leaves_a_torn_model(
    overlap: str, place: tuple[type, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, Tier.NVME, overlap)
    run.train(3)
    run.backward()
    interrupt(monkeypatch, *place, run.optim.step)
    run.optim.zero_grad()
    param = next(run.model.parameters())
    replace = functools.partial(run.shards.replace, param, torch.zeros(64, 64))
    for call in (run.backward, run.optim.step, replace, run.model.state_dict, run.optim.state_dict):
        with pytest.raises(
            RuntimeError, match=r"half-way.*open a checkpoint that is whole, or close it"
        ):
            call()
    run.shards.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("place", "is_step"),
    [
        ((LiveUnit, "_become"), True),
        ((LiveUnit, "_point"), False),
        ((UnitMemory, "free"), True),
        ((UnitMemory, "free"), False),
        ((UnitMemory, "allocate_slot"), False),
        ((Sums, "_check"), False),
    ],
)
def test_a_fetch_that_was_interrupted_is_made_again_to_the_bit(
    place: tuple[type, str], is_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, Tier.NVME)
    run.train(2)
    if is_step:
        run.backward()
    interrupt(monkeypatch, *place, run.optim.step if is_step else run.backward)
    run.optim.zero_grad()
    run.train(2)
    assert is_equal(run.weights(), undisturbed(tmp_path, Tier.NVME, 4))


def interrupt(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, act: Callable[[], object]
) -> None:
    """Calls a function, which is interrupted where it first calls this method."""

    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        with pytest.raises(KeyboardInterrupt):
            act()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("tier", [Tier.NVME, Tier.HOST])
def test_a_gather_whose_end_was_interrupted_shows_no_old_weight(
    tier: Tier, is_written: bool, tmp_path: Path
) -> None:
    run = Run(tmp_path, tier)
    run.train(2)
    params = list(run.model.parameters())
    left = tiermem.zero.GatheredParameters(params, modifier_rank=0 if is_written else None)
    left.__enter__()  # an interrupt comes before the first statement of its __exit__
    run.train(2)
    with tiermem.zero.GatheredParameters(params, modifier_rank=0):
        shown = [param.detach().clone() for param in params]
    due = undisturbed(tmp_path, tier, 4)
    assert is_equal(shown, due) and is_equal(run.weights(), due)


def test_what_is_written_before_a_step_in_its_own_context_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, Tier.NVME)
    with (
        pytest.raises(RuntimeError, match="a step or a load in this context has ended the gather"),
        tiermem.zero.GatheredParameters(list(run.model.parameters()), modifier_rank=0),
    ):
        run.train()
    run.train()
    assert is_equal(run.weights(), undisturbed(tmp_path, Tier.NVME, 2))


def test_what_is_written_to_weights_in_memory_stays_after_an_interrupt(tmp_path: Path) -> None:
    found = []
    for stops in (False, True):
        run = Run(tmp_path, Tier.HOST)
        run.train(2)
        context = tiermem.zero.GatheredParameters(list(run.model.parameters()), modifier_rank=0)
        context.__enter__()
        for param in run.model.parameters():
            with torch.no_grad():
                param.mul_(0.5)
        if not stops:  # else an interrupt comes before the first statement of its __exit__
            context.__exit__(None, None, None)
        run.train(2)
        found.append(run.weights())
    assert is_equal(*found)


@pytest.mark.parametrize("in_backward", [False, True])
def test_what_was_written_before_an_interrupt_at_the_end_of_its_context_is_not_lost_silently(
    in_backward: bool, tmp_path: Path
) -> None:
    run = Run(tmp_path, Tier.NVME, step_in_backward=in_backward)
    run.train(2)
    kept = {name: value.clone() for name, value in run.model.state_dict().items()}
    left = tiermem.zero.GatheredParameters(list(run.model.parameters()), modifier_rank=0)
    left.__enter__()  # an interrupt comes before the first statement of its __exit__
    for param in run.model.parameters():
        param.data.mul_(0.5)
    acts: list[Callable[[], object]] = [
        lambda: checkpoint.save(run.shards, run.optim, tmp_path / "saved"),
        lambda: list(weights_io.export_weights(run.model)),
        run.train,
        run.train,
    ]
    for act in acts[2 * in_backward :]:
        with pytest.raises(RuntimeError, match=r"half-way, so that this model is (torn|a mixture)"):
            act()
    if not in_backward:
        run.optim.zero_grad()
        run.model.load_state_dict(kept)
        run.train(2)
        assert is_equal(run.weights(), undisturbed(tmp_path, Tier.NVME, 4))
    run.shards.close()


@pytest.mark.parametrize("tier", [Tier.NVME, Tier.HOST])
def test_a_load_reaches_a_gather_that_an_interrupt_has_left(tier: Tier, tmp_path: Path) -> None:
    run = Run(tmp_path, tier)
    params = list(run.model.parameters())
    kept = {name: value.clone() for name, value in run.model.state_dict().items()}
    due = run.model(run.x).detach()
    run.train(2)
    left = tiermem.zero.GatheredParameters(params)
    left.__enter__()  # an interrupt comes before the first statement of its __exit__
    run.model.load_state_dict(kept)
    assert is_equal([param.detach() for param in params], list(kept.values()))
    assert torch.equal(run.model(run.x), due)
    run.shards.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["_give_back", "close"])
def test_no_buffer_of_gradients_is_lost_by_interrupts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, Tier.NVME, grads=Tier.NVME)
    run.train(2)
    for _ in range(6):  # more than there are buffers
        interrupt(monkeypatch, GradientStore, name, run.backward)
        run.optim.zero_grad()
    run.train(2)
    assert is_equal(run.weights(), undisturbed(tmp_path, Tier.NVME, 4))


def test_a_gradient_that_was_received_before_an_interrupt_is_not_added_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, Tier.NVME)
    run.train(2)
    for param in run.model.parameters():
        param.grad = torch.ones(param.shape)
    interrupt(monkeypatch, GradientHomes, "_end", run.optim.step)
    with pytest.raises(
        RuntimeError,
        match=r"a change of gradients ended in an exception.*run forward and backward again",
    ):
        run.optim.step()
    run.train(2)
    assert is_equal(run.weights(), undisturbed(tmp_path, Tier.NVME, 4))


def test_a_backward_that_was_interrupted_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, Tier.NVME)
    run.train(2)
    loss = run.model(run.x).square().mean()
    interrupt(monkeypatch, LiveUnit, "land", loss.backward)
    with pytest.raises(RuntimeError, match="run forward and backward again"):
        run.optim.step()
    run.train(2)
    assert is_equal(run.weights(), undisturbed(tmp_path, Tier.NVME, 4))


def test_half_a_load_is_refused_until_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, Tier.NVME)
    run.train(2)
    kept = run.optim.state_dict()
    interrupt(monkeypatch, StateTiles, "load", lambda: run.optim.load_state_dict(kept))
    with pytest.raises(RuntimeError, match=r"load_state_dict.*ended half-way.*load again"):
        run.train()
    run.optim.load_state_dict(kept)
    run.train(2)
    assert is_equal(run.weights(), undisturbed(tmp_path, Tier.NVME, 4))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["load_state_dict", "load_safetensors", "gather", "averages"])
def test_several_weights_of_which_an_interrupt_left_some_are_refused_until_all_are_replaced(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, left = Shards.replace, [0]

    def stopping(shards: Shards, param: nn.Parameter, value: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        replace(shards, param, value)

    monkeypatch.setattr(Shards, "replace", stopping)
    run = Run(tmp_path, Tier.NVME)
    run.train(1)
    params = list(run.model.parameters())
    kept = {name: torch.zeros_like(value) for name, value in run.model.state_dict().items()}
    save_file(kept, tmp_path / "model.safetensors")
    averages = tiermem.EMA(run.model, paths=[tmp_path])
    averages.update()

    def gather() -> None:
        with tiermem.zero.GatheredParameters(params, modifier_rank=0):
            for param in params:
                param.zero_()

    ways: dict[str, Callable[[], object]] = {
        "load_state_dict": lambda: run.model.load_state_dict(kept),
        "load_safetensors": lambda: tiermem.load_safetensors(run.model, tmp_path),
        "gather": torch.no_grad()(gather),
        "averages": averages.copy_to,
    }
    left[0] = 4
    with pytest.raises(KeyboardInterrupt):
        ways[way]()
    for act in (run.train, run.shards.check_whole, run.model.state_dict):
        with pytest.raises(RuntimeError, match="ended half-way, so that this model is torn"):
            act()
    ways[way]()
    assert way == "averages" or not any(weight.any() for weight in run.model.state_dict().values())
    run.train(1)
    averages.close()
    run.shards.close()


def test_a_forward_in_a_second_thread_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    run, said = Run(tmp_path, Tier.NVME), list[str]()
    run.train(2)

    def call() -> None:
        for module in (run.model, run.model[1], run.model[2]):
            try:
                module(run.x)
            except RuntimeError as error:
                said.append(str(error))

    def call_aside() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    Stopping.stop = call_aside
    run.train(2)
    assert len(said) == 3 and all(
        "another thread is in a forward of this model" in each for each in said
    )
    aside = threading.Thread(target=run.train)  # when the first has ended, it may
    aside.start()
    aside.join()
    assert is_equal(run.weights(), undisturbed(tmp_path, Tier.NVME, 5))


def test_a_backward_that_steps_and_was_left_is_told_at_every_entry(tmp_path: Path) -> None:
    """Some of its units have made the step, others have not: before, their weights were read, and
    saved, without a word."""
    run = Run(tmp_path, Tier.NVME, step_in_backward=True)
    run.train(1)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handle = run.model[1].register_full_backward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run.backward()
    handle.remove()
    run.optim.zero_grad()
    for act in (run.model.state_dict, run.optim.state_dict, run.optim.step, run.backward):
        with pytest.raises(RuntimeError, match="a mixture of two steps"):
            act()
    run.shards.close()
