"""A step that goes on under the next forward, or begins under backward: the same bits in any
program, its errors at their places, and no more memory?"""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerator.fixture import sim
from drawn import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch import launch
from programs.homes import overlapped
from programs.models import Tower
from programs.twins import assert_same_tensors, batch, loss_of, seeded, states_of, train_steps
from torch import nn

import tiermem
import tiermem.checkpoint
from tiermem import IoSettings, Precision, Shards, Tier
from tiermem.checkpoint.survey import survey
from tiermem.optim.tentative import History
from tiermem.state_access import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tiermem.swap.base.engines import ENGINES
from tiermem.swap.base.errors import CorruptionError
from tiermem.swap.base.native import READ, WRITE, TransferError
from tiermem.swap.program.program import Program
from tiermem.swap.program.table import TileRow, TileWork
from tiermem.weights.unit_state import UnitState

__all__ = ["sim"]
Optim = tiermem.AdamW
WIDENED: dict[str, Any] = {"params": Tier.HOST, "compute_dtype": "fp32"}
"""Weights of 16 bits that are fetched although they rest in memory."""
EACH: dict[str, Any] = {"durability": "step"}


# ---- any program ---------------------------------------------------------------------------------


class Stopped(Exception):
    """What a forward raises in `Loop.fail`."""


class Loop:
    """A training loop whose operations come in any order. `seen` is what they have shown. rank:
    chooses the batches."""

    def __init__(self, shards: Shards, optim: Optim, folder: Path, rank: int) -> None:
        self._shards = shards
        self._rank = rank
        self._model = shards.model
        self._optim = optim
        self._folder = folder
        self._saved = 0
        self._has_gradients = False
        self.seen: list[Any] = []

    def micro(self, number: int, factor: float = 1.0) -> None:
        loss = loss_of(self._model, number + 10 * self._rank, self._shards.device)
        (loss * factor).backward()
        self.seen.append(loss.item())
        self._has_gradients = True

    def spoil(self, number: int) -> None:
        """Gradients that are not finite on one rank; no rank steps with them."""
        self.micro(
            number, float("nan") if self._rank == number % self._shards.topology.world else 1.0
        )

    def forget(self, number: int) -> None:
        """No step follows the backwards before."""
        self._optim.zero_grad(set_to_none=number % 2 == 0)
        self._has_gradients = False

    def step(self, number: int) -> None:
        """Every third time gradients stay, and the next micro-batches are added to them."""
        self._optim.step(max_norm=(0.0, 0.1, 1e9)[number % 3])
        self.seen.append(self._optim.grad_norm)
        if number % 3:
            self._optim.zero_grad(set_to_none=number % 3 == 1)
            self._has_gradients = False

    def train(self, number: int) -> None:
        """Half of these steps clip."""
        self.micro(number)
        self.step(3 * number + 1 + number % 2)

    def edit(self, number: int) -> None:
        if self._has_gradients:
            param = self._param(number)
            safe_set_full_grad(param, torch.full(param.shape, 1e-3 * number))

    def scale(self, number: int) -> None:
        if self._has_gradients:
            nn.utils.clip_grad_norm_(self._model.parameters(), 0.5)

    def rate(self, number: int) -> None:
        self._optim.set_lr(1e-3 * (1 + number))

    def evaluate(self, number: int) -> None:
        with torch.no_grad():
            self.seen.append(loss_of(self._model, number, self._shards.device).item())

    def generate(self, number: int) -> None:
        """Without a cache: a forward for each token."""
        tokens = batch(number)[0].to(self._shards.device)
        with torch.no_grad():
            for _ in range(3):
                tokens = torch.cat([tokens, self._model(tokens)[:, -1:].argmax(-1)], 1)
        self.seen.append(tokens)

    def read_state(self, number: int) -> None:
        param = self._param(number)
        for name in self._moments(param):
            self.seen.append(safe_get_full_optimizer_state(param, name))

    def write_state(self, number: int) -> None:
        param = self._param(number)
        for name in self._moments(param)[:1]:
            safe_set_full_optimizer_state(param, torch.full(param.shape, 1e-3 * number), name)

    def read_master(self, number: int) -> None:
        self.seen.append(safe_get_full_fp32_param(self._param(number)))

    def write_master(self, number: int) -> None:
        param = self._param(number)
        safe_set_full_fp32_param(param, torch.full(param.shape, 1e-2 * number))

    def read_weights(self, number: int) -> None:
        self.seen.append(dict(self._model.state_dict()))

    def read_weight(self, number: int) -> None:
        self.seen.append(float(self._param(number).detach().float().sum()))

    def read_part(self, number: int) -> None:
        if self._shards.policy.params is Tier.HOST:
            self.seen.append(self._param(number).ds_tensor.clone())  # type: ignore[attr-defined]

    def save(self, number: int) -> None:
        if not self._has_gradients:
            self._saved += 1
            tiermem.checkpoint.save(
                self._shards, self._optim, self._folder, f"tag{self._saved}", copy=number % 2 == 0
            )

    def resume(self, number: int) -> None:
        if self._saved and not self._has_gradients:
            tiermem.checkpoint.wait(self._shards)
            tiermem.checkpoint.load(self._shards, self._optim, self._folder)

    def fail(self, number: int) -> None:
        """A forward that raises, when some units have been fetched and others are on their way."""

        def stop(*_: Any) -> None:
            raise Stopped

        handle = self._model.layers[number % 4].up.register_forward_pre_hook(stop)  # type: ignore[union-attr,index]
        with pytest.raises(Stopped):
            loss_of(self._model, number, self._shards.device)
        handle.remove()

    def unfreeze(self, number: int) -> None:
        """What was frozen when the model was sharded gets room at the next forward, or at this
        step."""
        self._block(number).requires_grad_(True)

    def freeze(self, number: int) -> None:
        self._block(number).requires_grad_(False)

    def _block(self, number: int) -> nn.Module:
        return (*self._model.layers, self._model.embed)[number % 5]  # type: ignore[arg-type,return-value,misc]

    def _moments(self, param: nn.Parameter) -> tuple[str, ...]:
        return self._optim.tiles_of(self._shards).names(self._shards.find(param)[1])

    def _param(self, number: int) -> nn.Parameter:
        """One that has states, or will have them after a step."""
        params = [p for p in self._model.parameters() if self._shards.find(p)[0].unit.is_trainable]
        return params[number % len(params)]


OPERATIONS = [name for name in vars(Loop) if not name.startswith("_") and name != "seen"]
WEIGHTED = ["train", "train", "train", "micro", "micro", "step", "step", *OPERATIONS]
"""Most programs train, so that steps are under way when something else happens."""


def two_groups(params: Any) -> torch.optim.Optimizer:
    given = list(params)
    return tiermem.AdamW([{"params": given[:5]}, {"params": given[5:], "lr": 1e-3}], lr=1e-2)


def muon(params: Any) -> torch.optim.Optimizer:
    """A matrix that Python steps, between tiles of AdamW that are native."""
    given = list(params)
    return tiermem.Muon(
        [{"params": given[9:10]}, {"params": given[:9] + given[10:], "use_muon": False}], lr=1e-2
    )


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda params: tiermem.AdamW(params, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda params: tiermem.Adam(params, lr=1e-2, amsgrad=True),
    "adagrad": lambda params: tiermem.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "lion": lambda params: tiermem.Lion(params, lr=1e-3),
    "momentum": lambda params: tiermem.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd": lambda params: tiermem.SGD(params, lr=1e-2),
    "two groups": two_groups,
    "muon": muon,
}
HOMES: dict[str, dict[str, Any]] = {
    "nvme": {},
    "gradients on nvme": {"grads": Tier.NVME, "keep": 2},
    "weights in memory": {"params": Tier.HOST},
    "weights in memory, widened": WIDENED,
    "some states in memory": {"resident_bytes": 99_000, "verify": "sample"},
    "states in memory": {"optim": Tier.HOST},
    "weights on nvme, no durability": {"durability": "none", "prefetch_numel": 0},
    "each step durable": EACH,
    "stage 2": {"stage": 2, "params": Tier.DEVICE},
}
IN_MEMORY: dict[str, Any] = {"params": Tier.HOST, "optim": Tier.HOST}
BESIDE: dict[str, dict[str, Any]] = {
    "in memory, gradients on the device": {**IN_MEMORY, "grads": Tier.DEVICE},
    "in memory": IN_MEMORY,
    "in memory, gradients on nvme": {**IN_MEMORY, "grads": Tier.NVME},
    "in memory, widened": {**IN_MEMORY, "compute_dtype": "fp32"},
    "on nvme, gradients on the device": {"grads": Tier.DEVICE},
}
"""Homes beside an accelerator."""
CHOICES: dict[str, list[Any]] = {
    "optimizer": sorted(OPTIMIZERS),
    "home": sorted(HOMES),
    "precision": ["exact", "compact", "bf16", "tiny"],
    "dtype": [torch.float32, torch.bfloat16],
    "engine": list(ENGINES[1:]),
    "tile_numel": [4096, 1 << 20],
    "tile_buffers": [1, 2, 4],
    "overlap": ["forward", "backward", "backward"],
    "num_frozen": [0, 0, 2, 4],
}
"""Of each part of a way to run a program."""
WAYS = st.fixed_dictionaries({part: st.sampled_from(choices) for part, choices in CHOICES.items()})


def run(
    program: Sequence[tuple[str, int]], way: dict[str, Any], overlap: str, folder: Path, rank: int
) -> tuple[list[Any], Any, int]:
    """What a program has shown, its last states, and how many steps went on when `step` had
    returned."""
    on_disk, saved = folder / overlap / "disk", folder / overlap / "saved"
    on_disk.mkdir(parents=True, exist_ok=True)  # another rank may have made it
    fields = dict((HOMES | BESIDE)[way["home"]])
    fields |= {name: way[name] for name in ("tile_numel", "tile_buffers")}
    fields |= {"precision": Precision.preset(way["precision"]), "io": IoSettings(way["engine"])}
    fields |= {"muon": {"tile_numel": 1 << 20}, "amsgrad": {"num_moments": 3}}.get(
        way["optimizer"], {}
    )
    model = seeded(Tower).to(way["dtype"])
    for each in model.layers[: way["num_frozen"]]:  # type: ignore[index,union-attr]
        each.requires_grad_(False)
    with tiermem.shard(model, overlapped(on_disk, overlap, **fields)) as shards:
        optim = OPTIMIZERS[way["optimizer"]](model.parameters())
        loop, num_under_way = Loop(shards, optim, saved, rank), 0
        for operation, number in program:
            getattr(loop, operation)(number)
            num_under_way += operation in ("step", "train") and shards.program.is_running
        return loop.seen, (dict(model.state_dict()), states_of(shards, optim)), num_under_way


def check_alike(
    program: Sequence[tuple[str, int]], way: dict[str, Any], folder: Path, rank: int = 0
) -> int:
    """With overlap "backward" every backward steps its units, whatever became of the steps before.
    Collective.

    Returns how many steps went on when `step` had returned.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(History, "is_due", True)
        patched.setattr(History, "is_last", lambda *_: True)
        seen, last, num_under_way = run(program, way, way["overlap"], folder, rank)
    expected, expected_last, none = run(program, way, "none", folder, rank)
    assert none == 0
    assert len(seen) == len(expected)
    for mine, theirs in zip(seen, expected, strict=True):
        if isinstance(mine, dict):
            assert_same_tensors(mine, theirs)
        elif isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs or mine != mine
    for mine, theirs in zip(last, expected_last, strict=True):
        assert_same_tensors(mine, theirs)
    return num_under_way


PROGRAM = st.lists(st.tuples(st.sampled_from(WEIGHTED), st.integers(0, 9)), min_size=4, max_size=14)
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@settings(max_examples=drawn(12), suppress_health_check=CHECKS)
@given(PROGRAM, WAYS)
def test_any_program_shows_the_same_bits(
    program: list[tuple[str, int]], way: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_alike(program, way, Path(folder))


@pytest.mark.slow
@settings(max_examples=drawn(300), suppress_health_check=CHECKS)
@given(PROGRAM, WAYS)
def test_any_program_shows_the_same_bits_long(
    program: list[tuple[str, int]], way: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_alike(program, way, Path(folder))


@pytest.mark.parametrize(
    ("num_ranks", "num"),
    [
        (2, 5),
        pytest.param(2, 60, marks=pytest.mark.slow),
        pytest.param(4, 30, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_any_program_shows_the_same_bits_on_ranks(num_ranks: int, num: int, tmp_path: Path) -> None:
    """Each rank trains on batches of its own. So many programs."""
    (tmp_path / "out").mkdir()
    (tmp_path / "places").mkdir()
    script, places = Path(__file__).parent / "overlap_on_ranks.py", tmp_path / "places"
    for found in launch(script, num_ranks, tmp_path / "out", str(places), str(num)):
        assert len(found) == num and sum(found) >= num  # steps that went on


BESIDE_WAYS = st.tuples(WAYS, st.sampled_from(sorted(BESIDE))).map(
    lambda pair: pair[0] | {"home": pair[1]}
)


@pytest.mark.slow
@settings(max_examples=drawn(100), suppress_health_check=CHECKS)
@given(
    program=PROGRAM,
    way=BESIDE_WAYS,
    schedule=st.sampled_from(["at_once", "late", "random:1", "random:2"]),
)
def test_any_program_shows_the_same_bits_beside_an_accelerator(
    program: list[tuple[str, int]], way: dict[str, Any], schedule: str, sim: ModuleType
) -> None:
    sim.set_schedule(schedule)
    with tempfile.TemporaryDirectory() as folder:
        check_alike(program, way, Path(folder))


# ---- what goes on --------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    """trained(overlap, **fields): a model with states of two steps, the last of which may be under
    way."""
    opened: list[Shards] = []

    def make(
        overlap: str = "forward", num_steps: int = 2, **fields: Any
    ) -> tuple[nn.Module, Shards, Optim]:
        model = seeded(Tower).bfloat16()
        shards = tiermem.shard(model, overlapped(tmp_path, overlap, **fields))
        opened.append(shards)
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(num_steps))
        return model, shards, optim

    yield make
    for each in opened:
        with contextlib.suppress(OSError):  # of a step that has failed
            each.close()


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("overlap", "fields", "is_under_way"),
    [
        ("auto", {}, True),
        ("forward", {}, True),
        ("backward", {}, True),
        ("auto", {"params": Tier.HOST}, True),
        ("auto", EACH, True),
        ("auto", WIDENED, True),
        ("auto", {"optim": Tier.HOST}, False),
        ("forward", {"optim": Tier.HOST}, True),
        ("none", {}, False),
        ("forward", {"persistence_numel": 1 << 20}, False),
        ("forward", {"pipeline_write": False}, False),
        ("auto", {"step_in_backward": True}, False),
        ("forward", {"stage": 2, "params": Tier.DEVICE}, False),
    ],
    ids=str,
)
def test_a_step_goes_on_where_units_are_fetched_and_it_pays(
    trained: Any, overlap: str, fields: dict[str, Any], is_under_way: bool
) -> None:
    _, shards, _ = trained(overlap, **fields)
    assert shards.program.is_running == is_under_way


def test_a_first_step_and_whole_matrices_end_before_step_returns(tmp_path: Path) -> None:
    model = seeded(Tower)
    with tiermem.shard(model, overlapped(tmp_path, "forward", tile_numel=1 << 20)) as shards:
        optim = muon(model.parameters())
        for step in range(3):
            train_steps(model, optim, [step])
            assert not shards.program.is_running


def test_what_is_always_present_is_stepped_when_step_returns(trained: Any) -> None:
    plain = seeded(Tower).bfloat16()
    train_steps(plain, tiermem.AdamW(plain.parameters(), lr=1e-2), range(3))
    model, shards, _ = trained(num_steps=3)
    assert shards.program.is_running
    residents = [
        shard.param for live in shards.units if live.unit.is_resident for shard in live.unit.shards
    ]
    names = {id(param): name for name, param in model.named_parameters()}
    assert residents
    for param in residents:
        assert torch.equal(param.detach(), dict(plain.named_parameters())[names[id(param)]])
    assert shards.program.is_running


@pytest.mark.sampled(2)
@pytest.mark.parametrize("home", ["HOST", "NVME"])
def test_changing_a_gradient_after_a_step_changes_no_step(trained: Any, home: str) -> None:
    """The step under way reads gradients at home; each look at their values waits for it."""
    found = {}
    for overlap in ("none", "forward"):
        model, shards, optim = trained(overlap, tile_buffers=2, grads=Tier[home])
        loss_of(model, 9).backward()
        optim.step()
        assert shards.program.is_running == (overlap == "forward")
        for param in model.parameters():
            param.grad.clamp_(0.0, 0.0)
        assert not shards.program.is_running
        assert not any(param.grad.clone().any() for param in model.parameters())
        found[overlap] = states_of(shards, optim)
        shards.close()
    assert_same_tensors(found["forward"], found["none"])


def read_so_far(shards: Shards) -> int:
    """Bytes read from disk, once a step under way and the reads for the next forward have ended."""
    shards.check_whole()
    for live in shards.units:
        if live.state is UnitState.READING:
            live.land()
    return shards.store.stats().nvme_read_bytes


def test_a_step_under_a_forward_reads_no_more(trained: Any) -> None:
    """It reads less where new weights come from memory."""
    read = {}
    for overlap in ("none", "forward"):
        model, shards, optim = trained(overlap, unit_buffers=8, tile_buffers=2)
        before = read_so_far(shards)
        train_steps(model, optim, range(5))
        with torch.no_grad():
            loss_of(model, 9)
        read[overlap] = read_so_far(shards) - before
        shards.close()
    assert read["forward"] <= read["none"]


def test_memory_is_the_plan_s(trained: Any) -> None:
    peaks = []
    for overlap in ("none", "forward"):
        _, shards, _ = trained(overlap, num_steps=4)
        shards.check_whole()
        assert shards.store.stats().host_peak_bytes <= shards.plan.host_bytes
        peaks.append(shards.store.stats().host_peak_bytes)
        shards.close()
    assert peaks[0] == peaks[1]


# ---- errors --------------------------------------------------------------------------------------


def entry_of(optim: Optim, shards: Shards, place: int) -> str:
    """The entry of the states of a tile that is fetched, in the order of a step."""
    return [tile for tile in optim.tiles_of(shards).tiles if tile.live.is_streamed][place].entry


def step_and(optim: Optim, look: Callable[[], object]) -> None:
    """A step, which raises what is found before it returns; then what may find it later."""
    optim.step()
    look()


def check_torn(model: nn.Module, shards: Shards, optim: Optim, folder: Path) -> None:
    """It says so from now on, and nothing is committed: with durability="step" the last step is the
    one before."""
    with pytest.raises(RuntimeError, match="mixture of two steps"):
        optim.step()
    with pytest.raises(RuntimeError, match="mixture of two steps"):
        tiermem.checkpoint.save(shards, optim, folder)
    assert not shards.program.is_running
    assert not folder.exists() or not list(folder.iterdir())
    durable = survey(shards.store.folders()[0], verifies=True).steps
    assert [(each.step, each.state) for each in durable] == [(2, "whole")] * (
        shards.policy.durability == "step"
    )


@pytest.mark.parametrize("fields", [{}, WIDENED, EACH], ids=["read", "copied", "each step durable"])
@pytest.mark.parametrize("place", [0, -1])
def test_damaged_states_are_named_by_the_fetch_of_their_unit(
    trained: Any, place: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    model, shards, optim = trained(**fields)
    shards.check_whole()
    shards.drop_head_start()
    table = shards.store.sums.of(entry_of(optim, shards, place))
    assert table is not None
    loss_of(model, 5).backward()
    shards.program.drop()  # the first tiles are read anew
    table.crcs[0] ^= 1
    with pytest.raises(CorruptionError, match="bytes"):
        step_and(optim, lambda: loss_of(model, 6))
    table.crcs[0] ^= 1
    with pytest.raises((RuntimeError, CorruptionError)):
        loss_of(model, 6).backward()
    check_torn(model, shards, optim, tmp_path / "saved")


def fail(monkeypatch: pytest.MonkeyPatch, fd: int, kind: int, num_left: int) -> None:
    """Of the next step's transfers of a kind the last of so many is of a file that refuses it, as
    are all that follow."""
    update = TileRow.update

    def updated(self: TileRow[Any], work: TileWork[Any]) -> None:
        nonlocal num_left
        update(self, work)
        choice = self.choice
        rows = choice.native_writes if kind == WRITE else choice.native_reads
        num_left -= len(rows) > 0
        for row in rows if num_left <= 0 else ():
            row.fd = fd

    monkeypatch.setattr(TileRow, "update", updated)


LOOKS: dict[str, Callable[[nn.Module, Shards, Optim, Path], object]] = {
    "backward": lambda model, shards, optim, folder: loss_of(model, 6).backward(),
    "step": lambda model, shards, optim, folder: optim.step(),
    "save": lambda model, shards, optim, folder: tiermem.checkpoint.save(shards, optim, folder),
    "state_dict": lambda model, shards, optim, folder: model.state_dict(),
    "close": lambda model, shards, optim, folder: shards.close(),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fields", [{}, EACH], ids=["", "each step durable"])
@pytest.mark.parametrize("look", LOOKS)
def test_a_write_that_fails_is_raised_by_the_next_look(
    trained: Any, look: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shards, optim = trained(**fields)
    shards.check_whole()
    loss_of(model, 5).backward()
    with open(os.devnull, "rb") as readable:
        fail(monkeypatch, readable.fileno(), WRITE, len(optim.tiles_of(shards).tiles))
        with pytest.raises(TransferError) as caught:
            step_and(optim, lambda: LOOKS[look](model, shards, optim, tmp_path / "saved"))
    assert caught.value.errno == errno.EBADF
    if look != "close":
        check_torn(model, shards, optim, tmp_path / "saved")


@pytest.mark.parametrize("fields", [{}, EACH], ids=["", "each step durable"])
def test_a_read_that_fails_is_raised_by_the_fetch_of_its_unit(
    trained: Any, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shards, optim = trained(**fields)
    shards.check_whole()
    loss_of(model, 5).backward()
    with open(os.devnull, "wb") as writable:
        fail(monkeypatch, writable.fileno(), READ, 2)
        with pytest.raises(TransferError) as caught:
            step_and(optim, lambda: loss_of(model, 6))
    assert caught.value.errno == errno.EBADF
    with pytest.raises((RuntimeError, OSError)):
        loss_of(model, 6).backward()
    check_torn(model, shards, optim, tmp_path / "saved")


def test_a_model_that_is_torn_is_repaired_by_loading(trained: Any, tmp_path: Path) -> None:
    model, shards, optim = trained()
    tiermem.checkpoint.save(shards, optim, tmp_path / "saved")
    expected = copy.deepcopy(dict(model.state_dict()))
    table = shards.store.sums.of(entry_of(optim, shards, 3))
    assert table is not None
    loss_of(model, 5).backward()
    table.crcs[0] ^= 1
    with contextlib.suppress(CorruptionError):  # if it is found at once
        optim.step()
    table.crcs[0] ^= 1
    # while the step is under way, or has failed
    tiermem.checkpoint.load(shards, optim, tmp_path / "saved")
    assert_same_tensors(dict(model.state_dict()), expected)
    train_steps(model, optim, range(2))


# ---- its end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("materialize", [False, True])
def test_closing_ends_the_step(tmp_path: Path, materialize: bool) -> None:
    plain = seeded(Tower)
    train_steps(plain, tiermem.AdamW(plain.parameters(), lr=1e-2), range(3))
    model = seeded(Tower)
    shards = tiermem.shard(model, overlapped(tmp_path, "forward"))
    train_steps(model, tiermem.AdamW(model.parameters(), lr=1e-2), range(3))
    assert shards.program.is_running
    shards.close(materialize)
    assert not list(tmp_path.iterdir())
    if materialize:
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_model_that_is_dropped_under_way_ends_its_threads(tmp_path: Path) -> None:
    model = seeded(Tower)
    shards = tiermem.shard(model, overlapped(tmp_path, "forward"))
    train_steps(model, tiermem.AdamW(model.parameters(), lr=1e-2), range(3))
    assert shards.program.is_running
    del model, shards
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["_call_next", "_report"])
def test_an_interrupt_leaves_the_step_under_way(
    verb: str, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shards, optim = trained()
    expected = None
    for is_interrupted in (True, False):
        with monkeypatch.context() as patched:
            if is_interrupted:

                def interrupt(self: Any, *_: Any) -> bool:
                    raise KeyboardInterrupt

                patched.setattr(Program, verb, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    shards.check_whole()
                assert shards.program.is_running and not shards.steps.is_torn
        if not is_interrupted:
            expected = states_of(shards, optim)
    assert expected and not shards.program.is_running
