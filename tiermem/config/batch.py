"""Batch sizes: three numbers of which those given determine the rest.

train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BatchSizes", "solve_batch"]


class BatchSizes(NamedTuple):
    """The three sizes, in samples, micro-batches and samples."""

    micro: int
    """Samples in one forward of one rank."""
    accumulation: int
    """Forwards of one rank per optimizer step."""
    total: int
    """Samples per optimizer step, over all ranks."""


def solve_batch(total: int | None, micro: int | None, accumulation: int | None, num_ranks: int) -> BatchSizes:
    """Computes the sizes that are None from the others.

    With the total alone, or the micro-batch alone, nothing is accumulated. Raises ValueError with the arithmetic when
    the sizes do not multiply out, or when neither the total nor the micro-batch is given.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; it must be at least 1")
    if total is None and micro is None:
        raise ValueError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given; set one of them, and "
            "gradient_accumulation_steps if micro-batches are to be accumulated"
        )
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
        return BatchSizes(micro, accumulation, micro * accumulation * num_ranks)
    if micro is None:
        accumulation = accumulation or 1
        micro = _divided(total, accumulation, "gradient_accumulation_steps", num_ranks)
    elif accumulation is None:
        accumulation = _divided(total, micro, "train_micro_batch_size_per_gpu", num_ranks)
    if total != micro * accumulation * num_ranks:
        raise ValueError(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} * gradient_accumulation_steps "
            f"{accumulation} * ranks {num_ranks} = {micro * accumulation * num_ranks}; remove one of the three, or "
            f"set train_batch_size to {micro * accumulation * num_ranks}"
        )
    return BatchSizes(micro, accumulation, total)


def _divided(total: int, given: int, name: str, num_ranks: int) -> int:
    quotient, remainder = divmod(total, given * num_ranks)
    if remainder or not quotient:
        nearest = max(1, round(total / (given * num_ranks))) * given * num_ranks
        raise ValueError(
            f"train_batch_size {total} is not a multiple of {name} {given} * ranks {num_ranks} = {given * num_ranks}; "
            f"the nearest that is: {nearest}"
        )
    return quotient
