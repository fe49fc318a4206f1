"""Names that programs import from `deepspeed.zero.partition_parameters`. This file only re-exports them."""

from __future__ import annotations

from tiermem.zero.absent import ZeroParamStatus, ZeroParamType
from tiermem.zero.access import GatheredParameters, register_external_parameter, unregister_external_parameter
from tiermem.zero.init import DeepSpeedTensorOverride, Init, restore_init_context, shutdown_init_context

__all__ = [
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "restore_init_context",
    "shutdown_init_context",
    "unregister_external_parameter",
]
