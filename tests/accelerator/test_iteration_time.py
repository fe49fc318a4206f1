"""In simulated time: a whole iteration of a model of 8B on a card of 24 GB, whose step goes on under the next forward, and
begins under backward where nothing is clipped.

The graph is what the library asked of the device, and which thread waited for which tile's step. Bytes and arithmetic are those
of the full size. The machine has one DRAM for the CPU's kernels and for both directions of the link.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from accelerator import clock
from accelerator.iteration import Marks, Model, Sizes, policy_of, record
from tiermem.tools.planned import INTERPRETER
from tiermem.zero.budget import make_plan
from tiermem.zero.plan import Plan, Planner
from tiermem.zero.topology import Topology
from tiermem.zero.unit import divide

SIZES = Sizes(width=256, layers=32, vocabulary=617, rows=256, tile_numel=4096)
"""A layer has 16 tiles of 4096 elements, as one of 218 M elements has of 16 M; the vocabulary is as large beside it."""
RAM_BYTES, SYSTEM_BYTES, CONTEXT_BYTES = 64 * 10**9, 2 * 10**9 + INTERPRETER.num_bytes, 500 << 20
"""Of the machine; what a system takes of it, and this process's libraries; what a driver takes (the plan counts it)."""
SCALE = 218e6 / SIZES.width**2
NUMEL = SIZES.layers * 218e6 + 2 * SIZES.vocabulary * SIZES.width * SCALE


def full_plan(overlap: str) -> Plan:
    """The plan of the full size. All that the machine's memory holds is in it, or left to the system."""
    width = math.isqrt(round(SCALE * SIZES.width**2))
    vocabulary, tile_numel = round(SIZES.vocabulary * SIZES.width * SCALE / width), round(SCALE * 4096) // 4096 * 4096
    with torch.device("meta"):
        model = Model(Sizes(width, SIZES.layers, vocabulary, SIZES.rows, tile_numel)).bfloat16()
    policy = policy_of(overlap, tile_numel, host_bytes=RAM_BYTES - SYSTEM_BYTES)
    topology = Topology(None, 0, 1, 1, 0)
    return make_plan(divide(model, policy, 1), policy, topology, True, 1, CONTEXT_BYTES)


def with_dram(entries: list[Any]) -> list[Any]:
    """Each copy over the link also takes the DRAM, as work that nothing waits for."""
    copies = [(number, entry) for number, entry in enumerate(entries) if entry.get("lane") in ("to device", "to host")]
    return entries + [
        entry | {"kind": "host_work", "lane": "cpu", "needs": [number], "blocks": False, "thread": ("link", -1)}
        for number, entry in copies
    ]


def seconds(entries: list[Any], starts: list[int], tokens: int) -> float:
    """Of one iteration, from a step's start to the next."""
    products = sum(entry["flops"] for entry in entries if entry.get("lane") == "compute") / len(starts)

    def size_of(entry: Any) -> tuple[float, float]:
        if (
            entry["lane"] == "compute"
        ):  # 8 a parameter and token in all, the embedding's and the attention's share included
            return 0.0, entry["flops"] * 8 * NUMEL * tokens / products
        return entry["bytes"] * SCALE, 0.0

    replay = clock.replay(entries, clock.CARD_24GB, size_of=size_of)
    times = [replay.spans[number][1] for number in starts]
    return times[-1] - times[-2]


LEAST = {8192: 1650, 16384: 2100}
"""Tokens a second with clipping at every step; the products alone allow 2335."""


def test_8b_that_clips_every_step_hides_it_under_the_next_forward(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all tokens in one micro-batch, beside whose activations 24 GB may have no room: nothing here counts them.

    150 TFLOPS, a link of 22 GB/s each way, DRAM of 65 GB/s.
    """
    marks = Marks(sim, monkeypatch)
    found = {}
    for overlap in ("none", "forward"):
        entries = with_dram(record(sim, marks, SIZES, overlap))
        found[overlap] = {tokens: tokens / seconds(entries, marks.starts, tokens) for tokens in LEAST}
    for tokens, least in LEAST.items():
        assert found["forward"][tokens] >= least, found
        assert found["forward"][tokens] > 1.1 * found["none"][tokens], found


LEAST_UNCLIPPED = {8192: 1800, 16384: 2200}


def test_8b_that_never_clips_steps_under_backward_where_memory_has_room_to_undo(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, without clipping. Of 64 GB of RAM a second copy of some units takes what is left."""
    plan, none = full_plan("backward"), full_plan("forward")
    room = [row for row in plan.rows if "second copies" in row.what]
    numel = sum(plan.division.units[index].shard_numel for index in plan.drafted)
    assert none.host_bytes < plan.host_bytes <= RAM_BYTES - SYSTEM_BYTES
    assert sum(row.num_bytes for row in room) == plan.host_bytes - none.host_bytes
    assert 6.03 * numel <= plan.host_bytes - none.host_bytes <= 6.04 * numel
    monkeypatch.setattr(Planner, "drafted_within", lambda *_: plan.drafted)
    marks = Marks(sim, monkeypatch)
    entries = with_dram(record(sim, marks, SIZES, "backward", max_norm=0.0))
    assert marks.num_attempted > 0
    found = {tokens: tokens / seconds(entries, marks.starts, tokens) for tokens in LEAST_UNCLIPPED}
    assert all(found[tokens] >= least for tokens, least in LEAST_UNCLIPPED.items()), found
