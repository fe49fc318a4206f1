"""config: reads DeepSpeed-style JSON into one checked TiermemConfig, and makes one frozen OffloadPolicy from it.

Files in order: each imports only files before it.

    base       base class of all sections; ConfigError         keys       refused, computed and planned keys
    io         aio, the offload sections, paths                precision  bf16, fp16, data_types, torch_autocast
    optimizer  optimizer, scheduler, the batch sizes           zero       zero_optimization, checkpoint, "tiermem"
    root       TiermemConfig, the top section                  translate  keys -> policy, report
    load       load_config, resolve_auto, with_tuned

Every documented key is honoured, or computed and reported, or refused with the reason. No key is parsed and ignored.
DeepSpeed's class names are aliases of tiermem's classes.
"""

from tiermem.config.base import ConfigError, Problem
from tiermem.config.io import (
    AioConfig,
    OffloadDevice,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    OffloadState,
    PathConfig,
)
from tiermem.config.load import load_config, resolve_auto
from tiermem.config.optimizer import (
    AdagradParams,
    AdamParams,
    BatchSizes,
    LionParams,
    MuonParams,
    OptimizerConfig,
    OptimizerParams,
    SchedulerConfig,
    SgdParams,
    solve_batch,
)
from tiermem.config.precision import AutocastConfig, Bf16Config, DataTypesConfig, Fp16Config, PrecisionConfig
from tiermem.config.root import TiermemConfig
from tiermem.config.translate import ReportRow
from tiermem.config.zero import CheckpointConfig, OwnConfig, ZeroConfig, ZeroStage

DeepSpeedZeroConfig = ZeroConfig
DeepSpeedZeroOffloadParamConfig = OffloadParamConfig
DeepSpeedZeroOffloadOptimizerConfig = OffloadOptimizerConfig
ZeroStageEnum = ZeroStage
OffloadDeviceEnum = OffloadDevice
OffloadStateTypeEnum = OffloadState

__all__ = [
    "AdagradParams",
    "AdamParams",
    "AioConfig",
    "AutocastConfig",
    "BatchSizes",
    "Bf16Config",
    "CheckpointConfig",
    "ConfigError",
    "DataTypesConfig",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "Fp16Config",
    "LionParams",
    "MuonParams",
    "OffloadDevice",
    "OffloadDeviceEnum",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OffloadState",
    "OffloadStateTypeEnum",
    "OptimizerConfig",
    "OptimizerParams",
    "OwnConfig",
    "PathConfig",
    "PrecisionConfig",
    "Problem",
    "ReportRow",
    "SchedulerConfig",
    "SgdParams",
    "TiermemConfig",
    "ZeroConfig",
    "ZeroStage",
    "ZeroStageEnum",
    "load_config",
    "resolve_auto",
    "solve_batch",
]
