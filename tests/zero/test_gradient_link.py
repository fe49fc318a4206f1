"""Do gradients come from a device whole and in order, whatever fits a buffer, and is an error told
once?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from accelerator.fixture import sim

from tiermem.gradients.gradient_link import GradientLink, GradientPart
from tiermem.swap.memory.arena import Arena, Pool

__all__ = ["sim"]
ROOM = 4 << 20


class Links(NamedTuple):
    link: GradientLink
    arena: Arena


@pytest.fixture
def links(sim: ModuleType) -> Iterator[Links]:
    arena = Arena(4 * ROOM, link_bytes=2 * ROOM)
    pool = Pool(arena, ROOM, 2, "links", crosses_link=True)
    arena.pin(torch.device("sim:0"))
    link = GradientLink(torch.device("sim:0"), pool)
    yield Links(link, arena)
    link.close()
    sim.synchronize()
    arena.close()


def part(name: Any, numel: int, dtype: torch.dtype = torch.float32) -> GradientPart:
    data = torch.arange(numel, dtype=torch.float32).remainder(97).to(dtype)
    return GradientPart(name, 0, data.to("sim"))


def sent(links: Links, groups: Sequence[Sequence[GradientPart]]) -> dict[Any, torch.Tensor]:
    """What the helper thread got, by name, put together from its pieces."""
    found: dict[Any, list[torch.Tensor]] = {}

    def store(parts: Sequence[GradientPart]) -> None:
        for each in parts:
            assert each.start == sum(piece.numel() for piece in found.setdefault(each.shard, []))
            found[each.shard].append(each.data.clone())

    for group in groups:
        links.link.send(group, store)
    links.link.join()
    return {name: torch.cat(pieces) for name, pieces in found.items()}


@pytest.mark.parametrize("schedule", ["at_once", "late", *(f"random:{seed}" for seed in range(5))])
def test_gradients_of_every_size_come_whole(schedule: str, links: Links, sim: ModuleType) -> None:
    """Small ones are packed, large ones copied alone, one that no buffer holds in pieces; nothing
    is pageable."""
    sizes = [3, 17, 400_000, 1, 3_000_000, 0, 262_144, 5]
    groups = [
        [part((n, i), size, dtype) for i, size in enumerate(sizes)]
        for n, dtype in enumerate((torch.float32, torch.bfloat16))
    ]
    expected = {each.shard: each.data.cpu() for group in groups for each in group}
    sim.set_schedule(schedule)
    sim.reset_counts()
    found = sent(links, groups)
    assert sim.copies()["num_pageable"] == 0 and sim.host_waits()["main"] == 0
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_small_gradients_leave_in_one_copy(links: Links, sim: ModuleType) -> None:
    sim.record(True)
    sent(links, [[part(i, 1000) for i in range(40)]])
    sim.record(False)
    assert [entry["name"] for entry in sim.recording()].count("copy to host") == 1


def test_the_memory_for_packing_is_bounded(
    links: Links, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four gradients of 1 MiB two leave in one copy, in memory that is used again, and two
    alone."""
    monkeypatch.setattr("tiermem.gradients.gradient_link._ROOM_BYTES", 2 << 20)
    groups = [[part((n, i), 1 << 18) for i in range(4)] for n in range(5)]
    sim.synchronize()
    sim.reset_peak_memory_stats("sim")
    before = sim.memory_reserved("sim")
    sim.record(True)
    sent(links, groups)
    sim.record(False)
    assert [entry["name"] for entry in sim.recording()].count("copy to host") == 5 * 3
    assert sim.max_memory_reserved("sim") - before == 2 << 20


def test_an_error_is_raised_once_and_what_was_sent_after_it_is_skipped(
    links: Links, sim: ModuleType
) -> None:
    taken = []

    def fail(parts: Sequence[GradientPart]) -> None:
        raise OSError(28, "no space")

    for store in (fail, taken.append, taken.append, taken.append):
        # more than there are buffers: a failure gives its own back
        links.link.send([part(0, 100)], store)
    with pytest.raises(OSError, match="no space"):
        links.link.join()
    assert taken == []
    links.link.join()
    assert sent(links, [[part(1, 10)]])[1].numel() == 10
