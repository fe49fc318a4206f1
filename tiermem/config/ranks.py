"""The keys of `zero_optimization` about what passes between ranks: MiCS, hpZ and quantised communication (ZeRO++).

    mics_shard_size                        -1: all ranks share one copy of the states     shard_group_size
    mics_hierarchical_params_gather        across nodes first, then within                two_stage_gather
    zero_hpz_partition_size                0 and 1: no secondary copy                     secondary_group_size
    zero_quantized_weights                 gathers (qwZ)                                  quantised_gather
    zero_quantized_gradients               reductions (qgZ)                               quantised_reduction
    zero_quantized_nontrainable_weights    frozen parameters at rest                      quantised_frozen

Whether sizes divide the ranks is known when there are ranks: `zero/ranks/mesh.py` says so.
"""

from __future__ import annotations

from typing import Any

from tiermem.config.zero import ZeroConfig

__all__ = ["rank_fields", "rank_problems"]

_STAGE_3 = (
    "mics_shard_size",
    "mics_hierarchical_params_gather",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
)


def rank_fields(zero: ZeroConfig) -> dict[str, Any]:
    """The fields of OffloadPolicy that these keys set."""
    fields: dict[str, Any] = {
        "two_stage_gather": zero.mics_hierarchical_params_gather,
        "secondary_group_size": max(1, zero.zero_hpz_partition_size),
        "quantised_gather": zero.zero_quantized_weights,
        "quantised_reduction": zero.zero_quantized_gradients,
        "quantised_frozen": zero.zero_quantized_nontrainable_weights,
    }
    if zero.mics_shard_size > 0:
        fields["shard_group_size"] = zero.mics_shard_size
    return fields


def rank_problems(zero: ZeroConfig, has_autocast: bool) -> list[tuple[str, str]]:
    """What is wrong with these keys, together and beside the others: (key relative to the top, sentence) each."""
    found: list[tuple[str, str]] = []
    if zero.stage != 3:
        for name in _STAGE_3:
            if getattr(zero, name) != type(zero).model_fields[name].get_default():
                found.append(
                    (name, f"{getattr(zero, name)!r} with stage {int(zero.stage)}, but it acts in stage 3 alone")
                )
    if zero.zero_quantized_gradients and zero.stage < 2:
        found.append(
            ("zero_quantized_gradients", f"true with stage {int(zero.stage)}, but gradients are sharded from 2 on")
        )
    if zero.mics_shard_size == 0 or zero.mics_shard_size < -1:
        found.append(
            ("mics_shard_size", f"{zero.mics_shard_size} given; allowed are 1 or more ranks, or -1 for all of them")
        )
    if zero.mics_hierarchical_params_gather and zero.mics_shard_size <= 0:
        found.append(("mics_hierarchical_params_gather", "true without mics_shard_size; set that too, or remove it"))
    if zero.zero_quantized_gradients and not zero.reduce_scatter:
        found.append(
            ("zero_quantized_gradients", "true with reduce_scatter false, but it is a reduce-scatter; remove one")
        )
    if zero.zero_quantized_gradients and not zero.use_multi_rank_bucket_allreduce:
        found.append(
            (
                "zero_quantized_gradients",
                "true with use_multi_rank_bucket_allreduce false, but it sends all ranks their parts at once; remove one",
            )
        )
    if zero.zero_quantized_weights and has_autocast:
        found.append(
            ("zero_quantized_weights", "true with torch_autocast, which decides what weights are sent as; remove one")
        )
    return [(f"zero_optimization.{key}", message) for key, message in found]
