"""config: reads DeepSpeed-style JSON into one checked TiermemConfig, and makes one frozen
OffloadPolicy from it.

Files in order: each imports only files before it.

    keys       refused, computed and planned keys              base       base class of all sections; ConfigError
    io         aio, the offload sections, paths                optimizer  optimizer, scheduler, the batch sizes
    precision  bf16, fp16, data_types, torch_autocast          own        "tiermem", from the policy's fields
    zero       zero_optimization, checkpoint
    translate  keys -> policy, report                          root       TiermemConfig, the top section
    load       load_config, resolve_auto, with_tuned

A key that sets a field of the policy acts only when it is given: the default that acts is
OffloadPolicy's (policy.py), whose annotations name the keys.

Every documented key is honoured, or computed and reported, or refused with the reason. No key is
parsed and ignored. DeepSpeed's class names are aliases of tiermem's classes.
"""

from tiermem.config.base import ConfigError as ConfigError
from tiermem.config.base import Problem as Problem
from tiermem.config.io import AioConfig as AioConfig
from tiermem.config.io import OffloadDevice as OffloadDevice
from tiermem.config.io import OffloadOptimizerConfig as OffloadOptimizerConfig
from tiermem.config.io import OffloadParamConfig as OffloadParamConfig
from tiermem.config.io import OffloadState as OffloadState
from tiermem.config.io import PathConfig as PathConfig
from tiermem.config.load import load_config as load_config
from tiermem.config.load import resolve_auto as resolve_auto
from tiermem.config.optimizer import AdagradParams as AdagradParams
from tiermem.config.optimizer import AdamParams as AdamParams
from tiermem.config.optimizer import BatchSizes as BatchSizes
from tiermem.config.optimizer import LionParams as LionParams
from tiermem.config.optimizer import MuonParams as MuonParams
from tiermem.config.optimizer import OptimizerConfig as OptimizerConfig
from tiermem.config.optimizer import OptimizerParams as OptimizerParams
from tiermem.config.optimizer import SchedulerConfig as SchedulerConfig
from tiermem.config.optimizer import SgdParams as SgdParams
from tiermem.config.optimizer import solve_batch as solve_batch
from tiermem.config.own import OwnConfig as OwnConfig
from tiermem.config.precision import AutocastConfig as AutocastConfig
from tiermem.config.precision import Bf16Config as Bf16Config
from tiermem.config.precision import DataTypesConfig as DataTypesConfig
from tiermem.config.precision import Fp16Config as Fp16Config
from tiermem.config.precision import PrecisionConfig as PrecisionConfig
from tiermem.config.root import TiermemConfig as TiermemConfig
from tiermem.config.translate import ReportRow as ReportRow
from tiermem.config.zero import CheckpointConfig as CheckpointConfig
from tiermem.config.zero import ZeroConfig as ZeroConfig
from tiermem.config.zero import ZeroStage as ZeroStage

OffloadDeviceEnum = OffloadDevice
OffloadStateTypeEnum = OffloadState
DeepSpeedZeroOffloadParamConfig = OffloadParamConfig
DeepSpeedZeroOffloadOptimizerConfig = OffloadOptimizerConfig
DeepSpeedZeroConfig = ZeroConfig
ZeroStageEnum = ZeroStage
