"""MiCS_Init: building a model for sharding within groups of ranks (MiCS), under the name that the reference gives it.

It is Init with a config whose `mics_shard_size` is set, and says so when it is not. While a model is built its parameters are
divided over all ranks, not only over a group's, so that building takes less memory than training will; `shard` and
`initialize` divide them within groups and make the copies.
"""

from __future__ import annotations

from typing import Any

from tiermem.zero.building.init import Init


class MiCS_Init(Init):  # noqa: N801 (the documented name)
    """As Init, for a config with `mics_shard_size`. Raises ValueError when it has none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._enabled and self._policy.shard_group_size is None:
            raise ValueError(
                "MiCS_Init without a size of shard groups: set zero_optimization.mics_shard_size to 1 or more in its config "
                "(shard_group_size of a policy), or use Init"
            )
