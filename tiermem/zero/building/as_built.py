"""AsBuilt: what zero.Init was told by hand and no config says, which `shard` and `initialize` obey as well.

    get_dp_process_group()    the ranks that share the model            unless shard is given a group
    get_partition_rank()      which part of everything each of them keeps, for as long as the model is sharded
    quantised arguments, zero_param_parallel_group      fields of the policy

It goes with the parameters: whoever keeps them while the model is built (nursery.py) has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from tiermem.policy import OffloadPolicy
from tiermem.zero import registry


@dataclasses.dataclass(frozen=True)
class AsBuilt:
    """See above; by default nothing was said."""

    group: dist.ProcessGroup | None = None
    """The ranks that share the model; None: the world."""
    parts: tuple[int, ...] | None = None
    """Which part each rank of the group keeps, in the order of ranks; None: that of its number."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the policy."""

    def over(self, policy: OffloadPolicy) -> OffloadPolicy:
        """A policy with these fields. Raises ValueError for one that says something else."""
        defaults = {field.name: field.default for field in dataclasses.fields(policy)}
        for name, value in self.fields.items():
            if getattr(policy, name) not in (value, defaults[name]):
                raise ValueError(
                    f"{name}={getattr(policy, name)!r} in the policy, but the model was built under a zero.Init whose "
                    f"arguments say {value!r}: say it in one place, or the same in both"
                )
        return dataclasses.replace(policy, **self.fields)


def built_with(model: nn.Module) -> AsBuilt:
    """What the zero.Init that a model was built under was told; nothing for one that was built plainly."""
    for param in model.parameters():
        found = getattr(registry.keeper_of(param), "as_built", None)
        if isinstance(found, AsBuilt):
            return found
    return AsBuilt()


def size_of_near(group: dist.ProcessGroup, near: dist.ProcessGroup) -> int:
    """The number of ranks of `near`, which keep a second copy of what is gathered (hpZ), among those of `group`.

    Raises ValueError when they are not neighbours of which all ranks make groups of this size.
    """
    ranks, inside = dist.get_process_group_ranks(group), dist.get_process_group_ranks(near)
    size = len(inside)
    blocks = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    if len(ranks) % size or sorted(inside) not in blocks or dist.get_rank() not in inside:
        raise ValueError(
            f"zero_param_parallel_group holds ranks {inside} of {ranks}, and a second copy is kept among neighbours: allowed "
            f"are {_allowed(ranks)}, and every rank gives the one that it is in"
        )
    return size


def _allowed(ranks: Sequence[int]) -> str:
    sizes = [size for size in range(1, len(ranks) + 1) if len(ranks) % size == 0]
    return "; ".join(
        ", ".join(str(ranks[start : start + size]) for start in range(0, len(ranks), size)) for size in sizes
    )
