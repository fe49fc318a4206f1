"""How much Python lies between a hook and the disk? Counted on a real step with sys.setprofile.

A fetch goes from the hook of a module, or of a tensor in backward, to the native queue. A gradient
goes from the hook of a tensor to its home: a kernel adds it to host memory, or the native queue
writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
from programs.models import Tower
from programs.twins import batch, seeded

import tiermem
from tiermem import OffloadPolicy, Tier

MOST_FRAMES = 8
MOST_FILES = 10
_ROOT = Path(tiermem.__file__).parent
_HOOKS = ("before_forward", "_hold")  # of a module, of a tensor


def _stack(frame: FrameType | None) -> list[tuple[str, str]]:
    """The (file, function) of every frame of ours on the stack, outermost first. torch's own frames
    are left out."""
    found: list[tuple[str, str]] = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) or path.is_relative_to(_ROOT.parent / "swap"):
            found.insert(0, (path.name, frame.f_code.co_name))
        frame = frame.f_back
    return found


@pytest.mark.parametrize("grads", [Tier.HOST, Tier.NVME])
def test_a_fetch_crosses_few_frames_and_a_gradient_few_files(tmp_path: Path, grads: Tier) -> None:
    model = seeded(Tower)
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, grads=grads, paths=[tmp_path], persistence_numel=0
    )
    stacks: dict[str, list[list[tuple[str, str]]]] = {
        "tm_queue_submit": [],
        "tm_gradient_store": [],
    }

    def profile(frame: FrameType, event: str, called: object) -> None:
        name = getattr(called, "__name__", "")
        if event == "c_call" and name in stacks:
            stacks[name].append(_stack(frame))

    with tiermem.shard(model, policy) as shards:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        for is_counted in (False, True):  # the order is learnt in the first step
            sys.setprofile(profile if is_counted else None)
            try:
                model(batch(0)[0]).square().mean().backward()
            finally:
                sys.setprofile(None)
            optimizer.step()
            optimizer.zero_grad()
        num_units = sum(live.is_streamed for live in shards.units)
    fetches = [s for s in stacks["tm_queue_submit"] if ("unit_state.py", "read") in s]
    assert len(fetches) >= num_units // 2  # the others were fetched ahead, after the step
    assert {function for stack in fetches for _, function in stack} >= set(_HOOKS), (
        "one of the hooks fetched nothing"
    )
    for stack in fetches:
        assert len(stack) <= MOST_FRAMES, stack
    home = "tm_queue_submit" if grads is Tier.NVME else "tm_gradient_store"
    gradients = [stack for stack in stacks[home] if ("gradients.py", "receive") in stack]
    assert len(gradients) >= num_units
    for stack in gradients:
        assert len({file for file, _ in stack}) <= MOST_FILES, stack
