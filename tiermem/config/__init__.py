"""config: DeepSpeed-style JSON in, one checked TiermemConfig out, and from it one frozen OffloadPolicy.

    load       load_config, resolve_auto          root        TiermemConfig, the top section
    zero       zero_optimization                  offload     offload_param, offload_optimizer
    precision  bf16, fp16, data_types, and        states      which of them go together, and what they mean
               tiermem.precision                  autocast    torch_autocast
    optimizer  optimizer and its params           scheduler   scheduler
    aio        aio                                gds         why aio.use_gds cannot be had
    paths      nvme_path, tiermem.paths           batch       the three batch sizes
    own        the section "tiermem"              dtypes      fp32, bf16, fp16 and their spellings
    keys       refused, computed, planned keys    errors      ConfigError
    translate  keys -> policy, report             base        what sections share

Every documented key is honoured, or computed and reported, or refused with the reason; none is parsed and ignored.
The documented class names are aliases of ours.
"""

from tiermem.config.aio import AioConfig
from tiermem.config.autocast import AutocastConfig
from tiermem.config.batch import BatchSizes, solve_batch
from tiermem.config.checkpoint import CheckpointConfig
from tiermem.config.errors import ConfigError, Problem
from tiermem.config.load import load_config, resolve_auto
from tiermem.config.offload import OffloadDevice, OffloadOptimizerConfig, OffloadParamConfig, OffloadState
from tiermem.config.optimizer import (
    AdagradParams,
    AdamParams,
    LionParams,
    MuonParams,
    OptimizerConfig,
    OptimizerParams,
    SgdParams,
)
from tiermem.config.own import OwnConfig
from tiermem.config.paths import PathConfig
from tiermem.config.precision import Bf16Config, DataTypesConfig, Fp16Config, PrecisionConfig
from tiermem.config.root import TiermemConfig
from tiermem.config.scheduler import SchedulerConfig
from tiermem.config.translate import ReportRow
from tiermem.config.zero import ZeroConfig, ZeroStage

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
