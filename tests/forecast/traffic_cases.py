"""The cases whose traffic test_traffic.py holds against forecasts: fields of the policy, and
micro-batches of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

from tiermem import Tier

NUM_STEPS = 3


class Case(NamedTuple):
    fields: dict[str, Any]
    num_micro: int = 1
    is_frozen: bool = False  # all but the first layer


_ON_NVME = {"params": Tier.NVME, "optim": Tier.NVME}

CASES = {
    "stage 0": Case({"stage": 0}),
    "stage 1": Case({"stage": 1}),
    "stage 1, updates in spans": Case({"stage": 1, "allgather_bucket_numel": 1001}),
    "stage 2, updates in spans": Case(
        {"stage": 2, "allgather_bucket_numel": 3001, "reduce_bucket_numel": 3001}
    ),
    "stage 3": Case({}),
    "stage 3, three micro-batches": Case({}, num_micro=3),
    "stage 3, small buckets": Case({"reduce_bucket_numel": 777}),
    "stage 3, parameters one by one": Case({"gather_way": "single"}),
    "stage 3, gathers by all-reduce": Case({"gather_way": "all_reduce"}),
    "stage 3, reduced in fp32": Case({"reduce_dtype": "fp32"}),
    "stage 3, NVMe": Case(_ON_NVME),
    "stage 3, NVMe, two buffers, three micro-batches": Case(
        _ON_NVME | {"unit_buffers": 2}, num_micro=3
    ),
    "stage 3, NVMe, gradients there": Case(_ON_NVME | {"grads": Tier.NVME}, num_micro=2),
    "stage 3, NVMe, stepped in backward": Case(_ON_NVME | {"step_in_backward": True}),
    "stage 3, NVMe, some units on the host": Case(_ON_NVME | {"host_param_numel": 9000}),
    "stage 3, NVMe, qwZ, qgZ": Case(
        _ON_NVME | {"quantised_gather": True, "quantised_reduction": True}
    ),
    "stage 3, NVMe, frozen nf4": Case(_ON_NVME | {"frozen_quant_type": "nf4"}, is_frozen=True),
    "stage 3, frozen int8": Case({"frozen_quant_type": "int8"}, is_frozen=True),
    "MiCS of one": Case({"shard_group_size": 1}),
}
