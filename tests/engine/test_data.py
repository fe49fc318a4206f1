"""Do ranks see disjoint, equal parts in an order that the seed decides, and does repeating go on
for ever?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from tiermem.engine.start import RepeatingLoader, build_loader


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index >= self.count:
            raise IndexError(index)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def seen(loader: Any) -> list[int]:
    return [int(v) for batch in loader for v in batch]


def test_one_rank_sees_every_sample_once_and_shuffled() -> None:
    order = seen(build_loader(Numbers(40), 4))
    assert sorted(order) == list(range(40))
    assert order != list(range(40))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_ranks_see_disjoint_parts_of_equal_size(num_ranks: int) -> None:
    parts = [seen(build_loader(Numbers(60), 2, rank, num_ranks)) for rank in range(num_ranks)]
    assert {len(part) for part in parts} == {60 // num_ranks}
    assert sorted(v for part in parts for v in part) == list(range(60))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_seed_decides_the_order(num_ranks: int) -> None:
    first, again, other = (
        seen(build_loader(Numbers(40), 4, 0, num_ranks, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_last_batch_that_is_not_full_is_dropped_unless_asked_for() -> None:
    assert [len(b) for b in build_loader(Numbers(10), 4)] == [4, 4]
    assert [len(b) for b in build_loader(Numbers(10), 4, drop_last=False)] == [4, 4, 2]


def test_collate_fn_makes_the_batches() -> None:
    assert all(isinstance(batch, tuple) for batch in build_loader(Numbers(4), 2, collate_fn=tuple))


def test_stream_is_read_as_it_comes() -> None:
    assert seen(build_loader(Stream(), 2, rank=1, num_ranks=2, drop_last=False)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("micro", "rank", "ranks", "what"), [(0, 0, 1, "micro_batch is 0"), (1, 2, 2, "rank is 2 of 2")]
)
def test_impossible_arguments_are_refused(micro: int, rank: int, ranks: int, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        build_loader(Numbers(4), micro, rank, ranks)


def test_repeating_loader_begins_again_with_another_order() -> None:
    loader = RepeatingLoader(build_loader(Numbers(12), 3, rank=0, num_ranks=2))
    epochs = [
        [int(v) for v in torch.cat([next(loader) for _ in range(len(loader))])] for _ in range(3)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_repeating_loader_continues_where_it_stopped() -> None:
    loader = RepeatingLoader([1, 2, 3])
    assert [next(loader), next(loader)] == [1, 2]
    assert [value for value, _ in zip(iter(loader), range(4), strict=False)] == [3, 1, 2, 3]


def test_repeating_loader_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="yields no batch"):
        next(RepeatingLoader(build_loader(Numbers(1), 2)))
