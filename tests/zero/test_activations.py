"""Do inputs of checkpointed blocks rest on NVMe between forward and backward, and change no bit? On
the CPU."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import batch, seeded
from saved_by_hand import flip
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

import tiermem
from tiermem import OffloadPolicy, Shards, Tier
from tiermem.swap.base.errors import CorruptionError
from tiermem.tools.memory_limit import open_limit

INPUT_BYTES = 40 * 50 * 31 * 4  # samples x tokens x width x fp32
PADDED_BYTES = -(-INPUT_BYTES // 4096) * 4096
MIB = 1 << 20


def policy_of(folder: Path, **fields: Any) -> OffloadPolicy:
    return OffloadPolicy(**{"params": Tier.HOST, "optim": Tier.HOST, "paths": [folder]} | fields)


def loss_of(model: nn.Module, step: int = 0, samples: int = 40) -> torch.Tensor:
    tokens, targets = batch(step, samples, 50)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def written(shards: Shards) -> int:
    shards.store.flush()
    return shards.store.stats().nvme_written_bytes


def train(
    folder: Path, build: Callable[[], nn.Module], num_steps: int = 4, **fields: Any
) -> tuple[list[Any], int]:
    """Losses and weights; and the bytes written to NVMe."""
    model, found = seeded(build), []
    with tiermem.shard(model, policy_of(folder, **fields)) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(num_steps):
            loss = loss_of(model, step, samples=40 + 9 * (step % 2))  # two sizes of inputs
            loss.backward()
            optim.step()
            optim.zero_grad()
            found.append(loss.detach())
        return [*found, *model.state_dict().values()], written(shards)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_trains_to_the_same_bits(reentrant: bool, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return models.ShortTower(checkpoint=reentrant)

    plain, _ = train(tmp_path, build)
    moved, written_bytes = train(tmp_path, build, activations=Tier.NVME)
    assert written_bytes >= 4 * 3 * INPUT_BYTES
    assert all(torch.equal(a, b) for a, b in zip(moved, plain, strict=True))


def test_nothing_moves_without_a_checkpoint_and_on_host_where_the_maths_runs(
    tmp_path: Path,
) -> None:
    assert train(tmp_path, lambda: models.ShortTower(), 1, activations=Tier.NVME)[1] == 0
    assert (
        train(tmp_path, lambda: models.ShortTower(checkpoint=False), 1, activations=Tier.HOST)[1]
        == 0
    )


class Parts(models.ShortTower):
    """Saves what must stay: a weight, a buffer, a part of a tensor, a small tensor; and what moves,
    with odd strides."""

    def __init__(self) -> None:
        super().__init__(checkpoint=False)
        self.shift = nn.Parameter(torch.rand(40, 50, 31))
        self.register_buffer("mask", torch.ones(40, 50, 31))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = recompute(lambda y, w: y * w, x, self.shift, use_reentrant=False)
        x = recompute(
            lambda y, m: y * m, x.transpose(0, 2), self.mask.transpose(0, 2), use_reentrant=False
        )
        x = recompute(lambda y, z: y + z.mean(), x.transpose(0, 2), x[:1], use_reentrant=False)
        return self.head(x)


def test_weights_buffers_parts_and_small_tensors_stay(tmp_path: Path) -> None:
    plain, _ = train(tmp_path, Parts, 1)
    moved, written_bytes = train(tmp_path, Parts, 1, activations=Tier.NVME)
    assert written_bytes == 3 * PADDED_BYTES
    assert all(torch.equal(a, b) for a, b in zip(moved, plain, strict=True))


class Changed(models.ShortTower):
    """Changes the first block's input in place: before the second block is called, or after."""

    def __init__(self, computes_again: bool, early: bool) -> None:
        super().__init__(checkpoint=False)
        self._computes_again, self._early = computes_again, early

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        first = self._call(lambda y: (y * 2).sin(), x)
        if self._early:
            x.add_(0.5)
        second = self._call(lambda y: (y * 3).cos(), first)
        if not self._early:
            x.add_(0.5)
        return self.head(second + x)

    def _call(self, act: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return recompute(act, x, use_reentrant=False) if self._computes_again else act(x)


def test_a_block_is_computed_again_from_what_its_input_was(tmp_path: Path) -> None:
    plain, _ = train(tmp_path, lambda: Changed(False, early=False), 2)
    moved, written_bytes = train(
        tmp_path, lambda: Changed(True, early=False), 2, activations=Tier.NVME
    )
    assert written_bytes >= 4 * INPUT_BYTES
    assert all(torch.equal(a, b) for a, b in zip(moved, plain, strict=True))


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_an_input_that_changes_before_it_has_left_is_an_error_as_in_torch(
    home: Tier, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=r"in.?place"):
        train(tmp_path, lambda: Changed(True, early=True), 1, activations=home)


class _Exponential(models.ShortTower):
    """Changes what backward needs."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).exp()
        found = self.head(x.clone())
        with torch.no_grad():
            x.add_(1)
        return found


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_what_backward_needs_is_not_changed_in_place(home: Tier, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"in.?place"):
        train(tmp_path, lambda: _Exponential(checkpoint=False), 1, activations=home)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(31))


class Borrowing(models.ShortTower):
    """Gives a checkpoint the weight of a module that does not run, which is absent then."""

    def __init__(self) -> None:
        super().__init__(checkpoint=False)
        self.scale = _Scale()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = recompute(lambda y, w: (y * w).relu().exp(), x, self.scale.weight, use_reentrant=False)
        return self.head(self.through(self.layers[0], x))


def test_an_absent_weight_may_be_an_argument_of_a_checkpoint(tmp_path: Path) -> None:
    streamed = {"params": Tier.NVME, "persistence_numel": 0, "unit_buffers": 2}
    plain, _ = train(tmp_path, Borrowing, 3, **streamed)
    moved, _ = train(tmp_path, Borrowing, 3, activations=Tier.NVME, **streamed)
    assert all(torch.equal(a, b) for a, b in zip(moved, plain, strict=True))


@pytest.fixture
def offloaded(tmp_path: Path) -> Iterator[tuple[nn.Module, Shards]]:
    model = seeded(lambda: models.ShortTower(checkpoint=False, num_blocks=4))
    with tiermem.shard(model, policy_of(tmp_path, activations=Tier.NVME)) as shards:
        yield model, shards


def test_homes_are_used_again_after_backward_after_an_exception_and_without_a_graph(
    offloaded: tuple[nn.Module, Shards],
) -> None:
    model, shards = offloaded
    sizes = set()
    for step in range(6):
        loss = loss_of(model, step)
        if step % 3 == 0:
            loss.backward()
        elif step % 3 == 1:
            handle = loss.register_hook(_raise)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            handle.remove()
        del loss
        gc.collect()
        sizes.add(shards.store.stats().nvme_bytes)
    assert len(sizes) == 1  # no more than the first forward took


@pytest.mark.parametrize("activations", [None, Tier.NVME])
def test_a_graph_that_is_dropped_leaves_no_use(activations: Tier | None, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(31, 31), nn.Tanh(), nn.Linear(31, 31), nn.Softmax(-1))
    policy = policy_of(tmp_path, params=Tier.NVME, persistence_numel=0, activations=activations)
    with tiermem.shard(model, policy) as shards:
        model(torch.randn(3, 31))
        for param in model.parameters():
            param.norm()
        gc.collect()
        assert not any(shards.hooks.is_open(live) for live in shards.units)


def test_a_checkpoint_around_the_whole_forward_computes_it_again(tmp_path: Path) -> None:
    calls = []
    model = nn.Sequential(nn.Linear(31, 31), nn.Tanh(), nn.Linear(31, 31))
    model[0].register_forward_pre_hook(lambda *_: calls.append("forward"))
    with tiermem.shard(model, policy_of(tmp_path, activations=Tier.NVME)):
        recompute(model, torch.randn(3, 31), use_reentrant=False).sum().backward()
    assert len(calls) == 2


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


def test_a_forward_that_is_interrupted_leaves_no_hook(offloaded: tuple[nn.Module, Shards]) -> None:
    model, shards = offloaded
    handle = model.layers[2].register_forward_pre_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        loss_of(model)
    handle.remove()
    before = shards.store.stats().nvme_bytes
    x = torch.ones(MIB, requires_grad=True)
    recompute(torch.exp, x.exp(), use_reentrant=False).sum().backward()
    assert shards.store.stats().nvme_bytes == before
    loss_of(model).backward()
    assert shards.store.stats().nvme_bytes > before


def test_a_write_that_fails_is_raised_in_forward(
    offloaded: tuple[nn.Module, Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shards = offloaded
    loss_of(model).backward()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(shards.store, "write", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        loss_of(model)
    monkeypatch.undo()
    loss_of(model).backward()


def test_what_is_read_is_verified(offloaded: tuple[nn.Module, Shards]) -> None:
    model, shards = offloaded
    loss = loss_of(model)
    shards.store.flush()
    [extent] = shards.store._entries["activation.2"].nvme_home().extents[:1]
    flip(shards.store._files.segment_of(extent).file, extent.offset + 100)
    with pytest.raises(CorruptionError, match=r"activation\.2"):
        loss.backward()


def test_a_plan_counts_activations(tmp_path: Path) -> None:
    model = seeded(lambda: models.ShortTower(checkpoint=False))
    policy = policy_of(
        tmp_path, activations=Tier.NVME, activation_bytes=5 * MIB, disk_bytes=16 * MIB
    )
    with tiermem.shard(model, policy) as shards:
        rows = {row.what: (row.tier, row.num_bytes) for row in shards.plan.rows}
        assert rows["activations"] == (Tier.NVME, 5 * MIB)
        assert rows["8 activation buffers"] == (Tier.HOST, 8 * MIB)
        assert shards.plan.disk_bytes >= 5 * MIB


def test_a_full_disk_keeps_inputs_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> nn.Module:
        return models.ShortTower(checkpoint=False)

    plain, _ = train(tmp_path, build, 1)
    moved, written_bytes = train(
        tmp_path, build, 1, activations=Tier.NVME, disk_bytes=2 * PADDED_BYTES
    )
    assert all(torch.equal(a, b) for a, b in zip(moved, plain, strict=True))
    assert written_bytes == 2 * PADDED_BYTES
    assert "stays on cpu, and so do others" in caplog.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"activations": Tier.DEVICE}, "activations=DEVICE is given, where they are without it"),
        ({"activation_bytes": 1}, "activation_bytes=1 without activations"),
        ({"activations": Tier.NVME}, "activations rest on NVME but no path is given"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OffloadPolicy(**fields)


# ---- the peak of memory --------------------------------------------------------------------------

DEEP = """
import sys, resource, torch, tiermem
from pathlib import Path
from torch import nn
from torch.utils.checkpoint import checkpoint
from tiermem import OffloadPolicy, Tier

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(128), nn.Linear(128, 128)
    def forward(self, x):
        return x + torch.relu(self.up(self.norm(x)))

class Deep(nn.Module):
    def __init__(self, num_blocks):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

num_blocks, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
nvme = {"params": Tier.NVME, "optim": Tier.NVME, "activations": Tier.NVME}
model = Deep(num_blocks)
with tiermem.shard(model, OffloadPolicy(paths=[folder], persistence_numel=0, **nvme)) as shards:
    optim = tiermem.AdamW(model.parameters())
    for step in range(2):
        model(torch.ones(32768, 128)).square().mean().backward()
        optim.step()
        optim.zero_grad()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_48_layers_take_the_peak_of_24(tmp_path: Path) -> None:
    """An input takes 16 MiB: 24 layers more would take 384 MiB more. The kernel enforces a cap near
    the first peak.

    glibc maps each large block: in its heap they would lie between small ones that stay.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB)}

    def peak(num_blocks: int, cap_bytes: int | None) -> int:
        folder = tmp_path / str(num_blocks)
        folder.mkdir()
        with open_limit(cap_bytes) as limit:
            command = limit.wrap([sys.executable, "-c", DEEP, str(num_blocks), str(folder)])
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment
            )
            assert done.returncode == 0, f"{limit.kind}: {done.stderr}"
        return int(done.stdout)

    once = peak(24, None)
    # a cgroup's cap counts the kernel's own memory, too
    twice = peak(48, int(1.03 * once) + 64 * MIB)
    assert twice <= 1.03 * once, (once, twice)
