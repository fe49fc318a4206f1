"""In simulated time: a whole iteration of a model of 8B on a card of 24 GB, whose step goes on
under the next forward, and begins under backward where nothing is clipped.

The graph is what the library asked of the device, and which thread waited for which tile's step.
Bytes and arithmetic are those of the full size. The machine has one DRAM for the CPU's kernels and
for both directions of the link. All memory is counted: a step's micro-batches go through the model
block by block, inputs of blocks rest on HOST, and two units are on the card at once.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from accelerator import clock
from accelerator.iteration import NUM_RECORDED, Marks, Model, Sizes, policy_of, record
from tiermem import Tier
from tiermem.plans.budget import make_plan
from tiermem.plans.plan import Plan, Planner
from tiermem.ranks.topology import Topology
from tiermem.tools.plan.budget import ActivationBytes
from tiermem.tools.plan.planned import Card
from tiermem.tools.presets import ModelSizes, llama
from tiermem.units.unit import divide
from tiermem.weights import unit_state

SIZES = Sizes(width=256, layers=32, vocabulary=617, rows=140, tile_numel=4096)
"""A layer has 16 tiles of 4096 elements, as one of 218 M elements has of 14 M; the vocabulary is as
large beside it. Inputs of blocks are little more than the 64 KiB from which they rest on HOST."""
INPUT_BYTES = SIZES.rows * SIZES.width * 2
"""Of a block's input; no piece of a tile or a unit has as many."""
SCALE = 218e6 / SIZES.width**2
NUMEL = SIZES.layers * 218e6 + 2 * SIZES.vocabulary * SIZES.width * SCALE
LLAMA = ModelSizes.of(
    llama(4096, 14336, SIZES.layers, 32, 128256)
    | {"num_key_value_heads": 8, "tie_word_embeddings": False}
)
MICRO_TOKENS = 4096
HOST_BYTES, CONTEXT_BYTES = 58 << 30, 500 << 20
"""What 64 GiB of RAM leave beside the system, as in docs/sizing.md; what a driver takes of it (the
plan counts it)."""
CARD = Card.elsewhere(24 * 10**9)


def fields_of(tokens: int) -> dict[str, Any]:
    """What the policy says beside iteration.py."""
    rest_bytes = SIZES.layers * tokens * LLAMA.hidden * 2
    return {"unit_buffers": 2, "activations": Tier.HOST, "activation_bytes": rest_bytes}


def full_plan(overlap: str, tokens: int) -> Plan:
    """The plan of the full size. All that the machine's memory holds is in it, or left to the
    system."""
    width = math.isqrt(round(SCALE * SIZES.width**2))
    vocabulary, tile_numel = (
        round(SIZES.vocabulary * SIZES.width * SCALE / width),
        round(SCALE * 4096) // 4096 * 4096,
    )
    with torch.device("meta"):
        model = Model(Sizes(width, SIZES.layers, vocabulary, SIZES.rows, tile_numel)).bfloat16()
    policy = policy_of(
        overlap, tile_numel, by_layer=True, host_bytes=HOST_BYTES, **fields_of(tokens)
    )
    return make_plan(
        divide(model, policy, 1), policy, Topology(None, 0, 1, 1, 0), True, 1, CONTEXT_BYTES
    )


def with_dram(entries: list[Any]) -> list[Any]:
    """Each copy over the link also takes the DRAM, as work that nothing waits for."""
    copies = [
        (number, entry)
        for number, entry in enumerate(entries)
        if entry.get("lane") in ("to device", "to host")
    ]
    return entries + [
        entry
        | {
            "kind": "host_work",
            "lane": "cpu",
            "needs": [number],
            "blocks": False,
            "thread": ("link", -1),
        }
        for number, entry in copies
    ]


def seconds(entries: list[Any], starts: list[int], tokens: int) -> float:
    """Of one iteration, from a step's start to the next."""
    products = sum(entry["flops"] for entry in entries if entry.get("lane") == "compute") / len(
        starts
    )

    def size_of(entry: Any) -> tuple[float, float]:
        if (
            entry["lane"] == "compute"
        ):  # 8 a parameter and token in all, the embedding's and the attention's share included
            return 0.0, entry["flops"] * 8 * NUMEL * tokens / products
        is_input = (
            entry["lane"] in ("to device", "to host", "cpu") and entry["bytes"] == INPUT_BYTES
        )
        return float(MICRO_TOKENS * LLAMA.hidden * 2) if is_input else entry["bytes"] * SCALE, 0.0

    replay = clock.replay(entries, clock.CARD_24GB, size_of=size_of)
    times = [replay.spans[number][1] for number in starts]
    return times[-1] - times[-2]


def tokens_per_s(
    marks: Marks, sim: ModuleType, overlap: str, tokens: int, max_norm: float
) -> float:
    """Records some iterations with so many tokens each, and replays them."""
    fields = fields_of(tokens) | {"activation_bytes": None}  # of the small size there is enough
    num_micros = tokens // MICRO_TOKENS
    entries = with_dram(
        record(sim, marks, SIZES, overlap, max_norm, num_micros, by_layer=True, **fields)
    )
    assert (
        sum(entry.get("bytes") == INPUT_BYTES for entry in entries)
        >= 2 * NUM_RECORDED * SIZES.layers * num_micros
    )
    return tokens / seconds(entries, marks.starts, tokens)


@pytest.fixture
def marks(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Marks:
    monkeypatch.setattr(
        unit_state, "_COPIED_NUMEL", round(unit_state._COPIED_NUMEL / SCALE) // 4096 * 4096
    )
    return Marks(sim, monkeypatch)


def check_memory(plan: Plan, tokens: int) -> None:
    activations = ActivationBytes(
        LLAMA, MICRO_TOKENS, "bf16", "bf16", True, True, tokens // MICRO_TOKENS
    )
    assert plan.device_bytes <= CARD.budget(activations, Tier.HOST).left_bytes
    assert plan.host_bytes <= HOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "least"), [(8192, 1650), (16384, 2100)])
def test_8b_that_clips_every_step_hides_it_under_the_next_forward(
    tokens: int, least: int, sim: ModuleType, marks: Marks
) -> None:
    """Tokens a second; the products alone allow 2335. 150 TFLOPS, a link of 22 GB/s each way, DRAM
    of 65 GB/s."""
    check_memory(full_plan("forward", tokens), tokens)
    assert tokens_per_s(marks, sim, "forward", tokens, 1e-3) >= least


@pytest.mark.slow
def test_8b_that_clips_every_step_is_a_tenth_slower_where_nothing_hides_it(
    sim: ModuleType, marks: Marks
) -> None:
    hidden = tokens_per_s(marks, sim, "forward", 8192, 1e-3)
    assert hidden > 1.1 * tokens_per_s(marks, sim, "none", 8192, 1e-3)


@pytest.mark.parametrize(
    ("tokens", "least"), [(8192, 1800), pytest.param(16384, 2200, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_8b_that_never_clips_steps_under_backward_where_memory_has_room_to_undo(
    tokens: int, least: int, sim: ModuleType, marks: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, without clipping. A second copy of some units takes what is left of the RAM."""
    plan, none = full_plan("backward", tokens), full_plan("forward", tokens)
    check_memory(plan, tokens)
    room = [row for row in plan.rows if "second copies" in row.what]
    numel = sum(plan.division.units[index].shard_numel for index in plan.copied)
    assert sum(row.num_bytes for row in room) == plan.host_bytes - none.host_bytes
    assert 6.03 * numel <= plan.host_bytes - none.host_bytes <= 6.04 * numel
    monkeypatch.setattr(Planner, "copied_within", lambda *_: plan.copied)
    assert tokens_per_s(marks, sim, "backward", tokens, 0.0) >= least
    assert marks.num_attempted > 0
