"""Is each step of durability="step" durable before the next backward, as it was when it returned,
and not before its end?"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import failing, live_states, model, opened_at, policy, states_at
from torch import nn

import tiermem
from tiermem import Shards, Tier, checkpoint
from tiermem.checkpoint.survey import survey
from tiermem.optim.tentative import History
from tiermem.state_access import safe_set_full_fp32_param, safe_set_full_optimizer_state
from tiermem.swap.program.program import Program


def sharded(made: nn.Module, path: Path, overlap: str = "auto", **fields: Any) -> Shards:
    path.mkdir(exist_ok=True)
    found = policy("nvme", path, durability="step", overlap=overlap, tile_buffers=2)
    return tiermem.shard(made, dataclasses.replace(found, **fields))


class Loop:
    """A training loop: `go(n)` makes the nth step, which draws random numbers in its forward and
    changes the rate after it."""

    def __init__(self, path: Path, overlap: str = "auto", **fields: Any) -> None:
        self.made = model()
        self.shards = sharded(self.made, path, overlap, **fields)
        self.optim = tiermem.AdamW(self.made.parameters(), lr=0.01)
        self.path, self.num_steps = path, 0
        self.folder = self.shards.store.folders()[0]

    def forward(self) -> torch.Tensor:
        tokens = torch.arange(11) + self.num_steps
        return nn.functional.cross_entropy(nn.functional.dropout(self.made(tokens), 0.1), tokens)

    def go(self, num_steps: int = 1, after_backward: Callable[[], object] = lambda: None) -> None:
        for _ in range(num_steps):
            self.forward().backward()
            after_backward()
            self.num_steps += 1
            self.optim.step(max_norm=64.0)
            self.optim.set_lr(0.01 / self.num_steps)
            self.optim.zero_grad()

    def durable(self) -> list[tuple[int | None, str | None]]:
        """The steps that are whole on the disk, with their tags."""
        found = survey(self.folder, verifies=True).steps
        assert {each.state for each in found} <= {"whole"}
        return sorted(((each.step, each.tag) for each in found), key=str)


def content_of(folder: Path) -> list[Any]:
    """All that the newest durable step holds, but for its number and its run."""
    file = max(folder.glob("manifest-*.json"), key=lambda each: each.stat().st_mtime_ns)
    manifest, parts = opened_at(file)
    values = manifest.step, manifest.optimizer, manifest.parameters, manifest.checksums
    return [*values, [part.rng for _, part in parts], states_at(file)]


HOMES: dict[str, dict[str, Any]] = {
    "all on nvme": {},
    "weights in memory": {"params": Tier.HOST},
    "some states in memory": {"resident_bytes": 9000},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("home", HOMES)
def test_what_is_durable_is_the_step_as_it_was_when_it_returned(
    home: str, overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forwards in between change buffers and draw random numbers, and the rate of the next step
    is set."""
    monkeypatch.setattr(History, "is_due", True)
    monkeypatch.setattr(History, "is_last", lambda *_: True)
    at_once, later, made = list[Any](), list[Any](), 4
    torch.manual_seed(3)
    plain = Loop(tmp_path / "none", "none", **HOMES[home])
    for _ in range(made):
        plain.go()
        at_once.append(content_of(plain.folder))
        with torch.no_grad():
            plain.forward()
    plain.shards.close()

    def note() -> None:
        if loop.num_steps:
            later.append(content_of(loop.folder))

    torch.manual_seed(3)
    loop = Loop(tmp_path / "later", overlap, **HOMES[home])
    for _ in range(made):
        loop.go(after_backward=note)
        with torch.no_grad():
            loop.forward()
    loop.shards.close()
    later.append(content_of(loop.folder))
    assert later == at_once


def test_a_step_returns_before_it_is_durable_and_only_the_next_backward_ends_it(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path)
    loop.go(3)
    assert loop.shards.program.is_running and loop.durable() == [(2, None)]
    loss = loop.forward()
    with torch.no_grad():
        loop.forward()
    assert loop.durable() == [(2, None)]
    loss.backward()
    assert loop.durable() == [(3, None)]
    loop.shards.close()


def test_looking_at_states_ends_a_step_and_does_not_commit_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.go(2)
    live_states(loop.shards)
    dict(loop.made.state_dict())
    assert not loop.shards.program.is_running and loop.durable() == [(1, None)]
    loop.shards.close()


def step_again(loop: Loop) -> None:
    """A step without a backward: no parameter has a gradient."""
    loop.optim.step()


def raise_in_its_block(loop: Loop) -> None:
    with pytest.raises(KeyboardInterrupt), loop.shards:
        raise KeyboardInterrupt


def load_a_tag(loop: Loop) -> None:
    checkpoint.load(loop.shards, loop.optim, loop.path / "out", "t")
    assert next(iter(loop.shards.parameters()))[1].num_steps == 1


def write_a_moment(loop: Loop) -> None:
    param = loop.made.layers[0].weight  # type: ignore[union-attr]
    safe_set_full_optimizer_state(param, torch.ones(13, 13), "exp_avg")


def write_a_weight(loop: Loop) -> None:
    safe_set_full_fp32_param(loop.made.layers[0].weight, torch.ones(13, 13))  # type: ignore[union-attr]


def unfreeze(loop: Loop) -> None:
    loop.made.frozen.requires_grad_(True)  # type: ignore[operator]
    loop.forward()


COMMITS: dict[str, Callable[[Loop], object]] = {
    "step": step_again,
    "save": lambda loop: checkpoint.save(loop.shards, None, loop.path / "out", "weights alone"),
    "load": load_a_tag,
    "wait": lambda loop: checkpoint.wait(loop.shards),
    "state dict": lambda loop: loop.made.load_state_dict(loop.made.state_dict()),
    "moment": write_a_moment,
    "weight": write_a_weight,
    "unfreeze": unfreeze,
    "close": lambda loop: loop.shards.close(),
    "exception": raise_in_its_block,
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("way", COMMITS)
def test_a_change_a_save_and_the_end_make_the_last_step_durable_before(
    way: str, tmp_path: Path
) -> None:
    """And as it was before the change."""
    loop = Loop(tmp_path, keep=2)
    loop.go()
    checkpoint.save(loop.shards, loop.optim, loop.path / "out", "t")
    loop.go(2)
    due = live_states(loop.shards)
    assert (3, None) not in loop.durable()
    COMMITS[way](loop)
    assert (3, None) in loop.durable()
    file = next(
        file for file in loop.folder.glob("manifest-*.json") if opened_at(file)[0].step == 3
    )
    saved = states_at(file)
    for (name, state), value in due.items():
        if value.numel() and (name, state) in saved:
            assert (
                saved[name, state]
                == value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            ), (name, state)
    loop.shards.close()


@pytest.mark.parametrize("kind", ["sync", "rename"])
def test_a_commit_that_fails_is_raised_by_the_backward_and_training_goes_on(
    kind: str, tmp_path: Path
) -> None:
    loop = Loop(tmp_path)
    loop.go(2)
    loss = loop.forward()
    with (
        failing(kind, "segment.bin" if kind == "sync" else "manifest-2.json"),
        pytest.raises(OSError, match="it fails"),
    ):
        loss.backward()
    assert loop.durable() == [(1, None)]
    loop.go()
    checkpoint.wait(loop.shards)
    assert loop.durable() == [(3, None)]
    loop.shards.close()


@pytest.mark.parametrize("way", ["wait", "save", "close"])
def test_a_copy_that_fails_takes_no_commit_with_it(way: str, tmp_path: Path) -> None:
    """The step is durable when the copy's error is raised."""
    loop = Loop(tmp_path, keep=2)
    with failing("rename", "tiermem.json"):
        checkpoint.save(loop.shards, loop.optim, loop.path / "out", "t", copy=True)
        loop.go()
        due = live_states(loop.shards)
        with pytest.raises(OSError, match="it fails"):
            COMMITS[way](loop)
    assert loop.durable() == [(1, None)]
    loop.shards.close()
    saved = states_at(loop.folder / "manifest-2.json")
    for (name, state), value in due.items():
        if value.numel() and (name, state) in saved:
            assert saved[name, state] == value.contiguous().view(-1).numpy().tobytes()


def test_an_interrupt_leaves_the_commit_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path)
    loop.go(2)

    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    loss = loop.forward()
    with monkeypatch.context() as patched:
        patched.setattr(Program, "_call_next", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    assert loop.durable() == [(1, None)]
    loop.shards.close()
    assert loop.durable() == [(2, None)]


def test_a_forked_child_commits_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.go(2)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            loop.shards.close()
            with pytest.raises(RuntimeError):
                loop.shards.check_may_change()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert loop.durable() == [(1, None)]
    loop.shards.close()
    assert loop.durable() == [(2, None)]
