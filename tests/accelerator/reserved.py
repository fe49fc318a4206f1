"""What a sharded model reserves on a device, beside its plan; also run on each rank by
test_device_budget.py."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import as_rank
from programs.models import Tower
from programs.twins import seeded
from torch import nn

import tiermem
from accelerator import device
from tiermem import OffloadPolicy, Tier
from tiermem.gradients.gradient_store import GradientStore
from tiermem.plans.plan import PACKING
from tiermem.wires.packed import PackedGather
from tiermem.wires.reduce import Reducer

MIB = 1 << 20
_ON_HOST: dict[str, Any] = {"params": Tier.HOST, "optim": Tier.HOST}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "stage 0": ({"stage": 0}, ["grad", "param", "state", "sums"]),
    **{
        f"stage {n}": ({"stage": n}, ["grad", "layout", "param", "state", "sums"])
        for n in (1, 2, 3)
    },
    **{
        f"stage {n}, states on host": ({"stage": n, "optim": Tier.HOST}, ["layout", "sums"])
        for n in (1, 2)
    },
    "stage 3, states on host": ({"optim": Tier.HOST}, ["layout", "param", "sums"]),
    "stage 3, host": (_ON_HOST, ["layout", "sums"]),
    "stage 3, host, states there": (
        _ON_HOST | {"optim": Tier.DEVICE},
        ["grad", "layout", "param", "state", "stream", "sums"],
    ),
    "stage 3, cut": (_ON_HOST | {"reduce_bucket_numel": 1 << 20}, ["layout", "sums"]),
    "qwZ": (_ON_HOST | {"quantised_gather": True}, ["layout", "sums", "wires"]),
    "qgZ": (_ON_HOST | {"quantised_reduction": True}, ["layout", "sums"]),
}
"""On two ranks: fields of the policy, and the kinds of slabs."""
SELECTED = (
    "stage 0",
    "stage 1, states on host",
    "stage 3",
    "stage 3, host, states there",
    "stage 3, cut",
    "qwZ",
    "qgZ",
)
"""One of each combination of kinds, and what is sent in other forms."""


def large() -> nn.Module:
    """Its matrices are beyond the sizes that share a segment of CUDA's allocator."""
    return seeded(lambda: Tower(width=1024, inner=3072, num_blocks=2))


def check_reserved(
    model: nn.Module, policy: OffloadPolicy, where: str, kinds: list[str], is_rounded: bool
) -> None:
    """Asserts: one slab for each kind, together the plan's bytes. CUDA rounds each of them once, to
    2 MiB; nothing else.

    Then within one unit's slot: what a forward of two tokens takes, and a step. The plan counts
    what a step takes beside at its bound, and no activations, as gradients are before they are at
    home. What passes between ranks holds no other memory.
    """
    rounding = 2 * MIB if is_rounded else 0
    with tiermem.shard(model, policy, device=where) as shards:
        optim, plan = tiermem.AdamW(model.parameters()), shards.plan
        tiles = optim.tiles_of(shards).tiles
        beside = sum(row.num_bytes for row in plan.rows if row.what in ("step", PACKING))
        # a part is planned in bytes
        undivided = max(tile.state_bytes for tile in tiles) if plan.kept_bytes else 0
        slabs = [slab.memory.numel() for slab in shards.store.on_device._slabs]
        assert sorted(slab.kind for slab in shards.store.on_device._slabs) == kinds
        assert plan.device_bytes - beside - undivided <= sum(slabs) <= plan.device_bytes - beside
        pools = torch.accelerator.memory_stats(where)
        large_slabs = [num_bytes for num_bytes in slabs if num_bytes > MIB]
        assert pools["segment.large_pool.current"] == len(large_slabs)
        assert (
            0
            <= pools["reserved_bytes.large_pool.current"] - sum(large_slabs)
            <= len(large_slabs) * rounding
        )
        # of absent parameters, one element each
        placeholders = 1024 * sum(1 for _ in model.parameters())
        assert pools["reserved_bytes.small_pool.current"] <= sum(slabs) - sum(large_slabs) + (
            rounding or placeholders
        )
        tokens, slot = (
            torch.zeros(1, 2, dtype=torch.int64, device=where),
            max(u.full_bytes for u in plan.division.units),
        )
        with held_by_collectives() as held:
            with torch.no_grad():
                for _ in range(2):
                    model(tokens)
            if plan.steps_there or plan.sums.num:
                model(tokens).square().mean().backward()
                device.empty_cache()
                optim.step()
        device.synchronize(where)
        reserved = device.memory_reserved(where)
        assert plan.device_bytes - beside - undivided <= reserved <= plan.device_bytes + slot, (
            reserved,
            plan.rows,
        )
        assert not any(held) and len(held) >= len(plan.division.units) * (
            plan.sums.num + plan.wires.num > 0
        )


def check_closed(where: str) -> None:
    """Asserts that memory of a closed model is not given to others while a reduction in it is
    pending."""
    model, add, calls = large(), GradientStore.add, list[GradientStore]()

    def failing(store: GradientStore, *args: Any, **kwargs: Any) -> None:
        calls.append(store)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        add(store, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GradientStore, "add", failing)
        device.set_schedule("late")
        with tiermem.shard(
            model, OffloadPolicy(**_ON_HOST, persistence_numel=1100, timeout_s=60), device=where
        ) as shards:
            num_bytes = next(
                each.memory.numel() for each in shards.store.on_device._slabs if each.kind == "sums"
            )
            with pytest.raises(OSError, match="No space left"):
                model(torch.zeros(1, 2, dtype=torch.int64, device=where)).square().mean().backward()
    del model, shards
    gc.collect()
    others = [torch.full((num_bytes // 4,), 3.0, device=where) for _ in range(2)]
    device.synchronize(where)
    assert all((each == 3.0).all().item() for each in others)


@contextmanager
def held_by_collectives() -> Iterator[list[int]]:
    """Inside, the list gets the bytes that torch's allocator gives for each gather of blocks and
    each reduction."""
    held: list[int] = []
    with ExitStack() as patches:
        for owner, name in ((PackedGather, "put"), (Reducer, "start"), (Reducer, "finish")):
            original = getattr(owner, name)
            setattr(owner, name, _noting(original, held))
            patches.callback(setattr, owner, name, original)
        yield held


def _noting(function: Callable[..., Any], held: list[int]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        before = device.memory_allocated()
        result = function(*args, **kwargs)
        held.append(device.memory_allocated() - before)
        return result

    return noting


def main() -> None:
    backend, which = sys.argv[2:]
    with as_rank(backend) as (rank, out, _):
        where = f"sim:{rank % 2}"
        torch.sim.set_device(where)  # type: ignore[attr-defined]
        device.set_segments_like_cudas(True)
        for name in CASES if which == "all" else SELECTED:
            fields, kinds = CASES[name]
            folder = Path(out.parent, f"{name}-{rank}".replace(" ", "_"))
            policy = OffloadPolicy(
                **{"persistence_numel": 1100, "paths": [folder], "timeout_s": 60} | fields
            )
            folder.mkdir()
            check_reserved(large(), policy, where, kinds, is_rounded=True)
            gc.collect()
            device.empty_cache()
        check_closed(where)
        torch.save(True, out)


if __name__ == "__main__":
    device.load()
    main()
