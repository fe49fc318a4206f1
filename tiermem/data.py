"""Loaders of training data: what `initialize(training_data=...)` returns, and one that never ends.

Ranks see disjoint parts of a shuffled data set; the order depends on the seed and the epoch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

__all__ = ["RepeatingLoader", "build_loader"]

T = TypeVar("T")


def build_loader(
    dataset: Dataset[Any],
    micro_batch: int,
    rank: int = 0,
    num_ranks: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    drop_last: bool = True,
    num_workers: int = 0,
) -> DataLoader[Any]:
    """Builds the loader of this rank's micro-batches.

    With several ranks a DistributedSampler deals the samples, so that every rank gets as many: with drop_last those
    left over are left out, otherwise some are dealt twice. Call `loader.sampler.set_epoch(n)`, as RepeatingLoader does,
    for another order in each epoch. An iterable data set is read as it comes and has to deal by itself.
    """
    if micro_batch < 1:
        raise ValueError(f"micro_batch is {micro_batch}; it must be at least 1")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank} of {num_ranks}; allowed are 0 to {num_ranks - 1}")
    is_stream = isinstance(dataset, IterableDataset)
    sampler: DistributedSampler[Any] | None = None
    if num_ranks > 1 and not is_stream:
        sampler = DistributedSampler(
            dataset, num_replicas=num_ranks, rank=rank, shuffle=True, seed=seed, drop_last=drop_last
        )
    return DataLoader(
        dataset,
        batch_size=micro_batch,
        shuffle=None if is_stream or sampler is not None else True,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        drop_last=drop_last,
        generator=torch.Generator().manual_seed(seed),
    )


class RepeatingLoader(Generic[T]):
    """Iterates over a loader again and again, with the next epoch's order each time.

    Iteration continues where it stopped when `iter()` is called again. Raises ValueError when the loader is empty,
    rather than looking for a first batch for ever.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._epoch = 0
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> T:
        try:
            return next(self._batches)
        except StopIteration:
            return self._first_of_next_epoch()

    def _first_of_next_epoch(self) -> T:
        self._epoch += 1
        sampler = getattr(self.loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self._epoch)
        self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError("the loader yields no batch: fewer samples than one micro-batch on this rank?") from None
