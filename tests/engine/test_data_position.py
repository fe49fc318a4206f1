"""Does a loader go on where another one, built alike, had come to?"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tiermem.engine.start import RepeatingLoader, build_loader


class Watched(Dataset[int]):
    """Remembers which samples were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(23))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_before", [0, 1, 4, 5, 6, 11, 13])
def test_the_next_batch_is_the_one_that_would_have_come(
    num_ranks: int, drop_last: bool, num_before: int
) -> None:
    def build(data: Dataset[int]) -> RepeatingLoader[Any]:
        return RepeatingLoader(
            build_loader(data, 4, num_ranks - 1, num_ranks, seed=3, drop_last=drop_last)
        )

    first = build(Watched())
    for _ in range(num_before):
        next(first)
    state = copy.deepcopy(first.state_dict())
    due = [next(first).tolist() for _ in range(14)]
    data = Watched()
    again = build(data)
    next(again)  # whatever it has done before
    data.read.clear()
    again.load_state_dict(state)
    assert [next(again).tolist() for _ in range(14)] == due
    assert data.read == [v for batch in due for v in batch]  # nothing that was seen is read again


def test_the_loader_inside_may_be_set_alone() -> None:
    first = RepeatingLoader(build_loader(Watched(), 4, seed=1))
    due = [next(first).tolist() for _ in range(9)]
    loader = build_loader(Watched(), 4, seed=1)
    outside = RepeatingLoader(loader)
    for _ in range(7):
        next(first)
    state = loader.state_dict()
    assert state["num_batches"] == 0
    loader.load_state_dict(build_loader(Watched(), 4, seed=1).state_dict() | {"num_batches": 2})
    assert [next(outside).tolist() for _ in range(7)] == due[2:]


def test_a_stream_passes_over_what_was_seen() -> None:
    first = build_loader(Stream(), 4)
    batches = iter(first)
    seen = [next(batches).tolist() for _ in range(2)]
    again = build_loader(Stream(), 4)
    again.load_state_dict(first.state_dict())
    assert seen + [batch.tolist() for batch in again] == [
        batch.tolist() for batch in build_loader(Stream(), 4)
    ]


def test_a_loader_that_does_not_know_its_place_says_so() -> None:
    with pytest.raises(TypeError, match="DataLoader has no state_dict"):
        RepeatingLoader(DataLoader(Watched())).state_dict()
