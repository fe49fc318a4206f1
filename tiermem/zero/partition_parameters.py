"""Names that programs import from `deepspeed.zero.partition_parameters`."""

from __future__ import annotations

from torch import nn

from tiermem.run.access import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from tiermem.run.init import (
    DeepSpeedTensorOverride,
    Init,
    restore_init_context,
    shutdown_init_context,
)
from tiermem.units import registry
from tiermem.weights.absent import ZeroParamStatus, ZeroParamType

__all__ = [
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "is_zero_param",
    "register_external_parameter",
    "restore_init_context",
    "shutdown_init_context",
    "unregister_external_parameter",
]


def is_zero_param(param: nn.Parameter) -> bool:
    """Whether zero.Init, `initialize` or `shard` has partitioned a parameter, and it is not an
    ordinary one again."""
    return registry.owner_of(param) is not None
