"""Loaders of training data: what `initialize(training_data=...)` returns, and one that never ends.

Ranks see disjoint parts of a shuffled data set; the order depends on the seed and the epoch alone. A loader's `state_dict`
says how far it has come, by batches that it has handed out: loaded into one that was built alike, the next batch is the one
that would have come. Samples that were seen are passed over by number and not read, unless the data set is a stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

__all__ = ["RepeatingLoader", "TrainingLoader", "build_loader"]

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
) -> TrainingLoader:
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
    generator = torch.Generator().manual_seed(seed)
    sampler: _DealtSamples | _ShuffledSamples | None = None
    if num_ranks > 1 and not is_stream:
        sampler = _DealtSamples(
            dataset, num_replicas=num_ranks, rank=rank, shuffle=True, seed=seed, drop_last=drop_last
        )
    elif not is_stream:
        sampler = _ShuffledSamples(dataset, generator=generator)  # type: ignore[arg-type]  # a data set that has a length
    return TrainingLoader(
        dataset,
        batch_size=micro_batch,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        drop_last=drop_last,
        generator=generator,
    )


class _Skipping:
    """A sampler that leaves out the first samples of its next pass."""

    num_skipped = 0

    def __iter__(self) -> Iterator[int]:
        num_skipped, self.num_skipped = self.num_skipped, 0
        return itertools.islice(super().__iter__(), num_skipped, None)  # type: ignore[misc]  # of the sampler beside it


class _DealtSamples(_Skipping, DistributedSampler[Any]):
    """This rank's samples."""


class _ShuffledSamples(_Skipping, RandomSampler):
    """All samples."""


class TrainingLoader(DataLoader[Any]):
    """torch's loader, which knows how far it has come."""

    _num_batches = 0  # handed out in the pass at hand
    _epoch_start: torch.Tensor | None = None  # the generator when that pass began
    _to_skip = 0  # batches, in the next pass

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own iterators, counted
        skipped, self._to_skip = self._to_skip, 0
        self._num_batches = skipped
        self._epoch_start = self.generator.get_state() if self.generator is not None else None
        sampler: object = self.sampler
        if isinstance(sampler, _Skipping):
            sampler.num_skipped, skipped = skipped * (self.batch_size or 1), 0
        return self._count(super().__iter__(), skipped)

    def state_dict(self) -> dict[str, Any]:
        """How far it has come: batches of this pass, the pass, and the generator that its order came from."""
        epoch = self.sampler.epoch if isinstance(self.sampler, DistributedSampler) else 0
        start = self._epoch_start
        if start is None and self.generator is not None:
            start = self.generator.get_state()
        return {"num_batches": self._num_batches, "epoch": epoch, "generator": start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `iter()` goes on from there."""
        self._num_batches = self._to_skip = int(state["num_batches"])
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(int(state["epoch"]))
        if self.generator is not None and state["generator"] is not None:
            self.generator.set_state(state["generator"])
            self._epoch_start = state["generator"]

    def _count(self, batches: Iterator[Any], to_pass_over: int) -> Iterator[Any]:
        for batch in itertools.islice(batches, to_pass_over, None):
            self._num_batches += 1
            yield batch


class RepeatingLoader(Generic[T]):
    """Iterates over a loader again and again, with the next epoch's order each time.

    Iteration continues where it stopped when `iter()` is called again. Raises ValueError when the loader is empty,
    rather than looking for a first batch for ever.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._batches: Iterator[T] | None = None  # of this epoch, from its first batch on

    def __iter__(self) -> Iterator[T]:
        return self

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> T:
        if self._batches is None:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            return self._first_of_next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """How far the loader inside has come. Raises TypeError when that does not say."""
        inside = getattr(self.loader, "state_dict", None)
        if inside is None:
            raise TypeError(
                f"a {type(self.loader).__name__} has no state_dict, so its place is not known; build_loader's has"
            )
        return {"loader": inside()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next batch is the one that would have come."""
        self._batches = None
        self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]  # as `state_dict` has asked

    def _first_of_next_epoch(self) -> T:
        sampler = getattr(self.loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(sampler.epoch + 1)
        self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError("the loader yields no batch: fewer samples than one micro-batch on this rank?") from None
