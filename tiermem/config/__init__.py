"""config: reads DeepSpeed-style JSON into one checked TiermemConfig, and makes one frozen
OffloadPolicy from it.

Files in order: each imports only files before it.

    io         aio, the offload sections, paths                optimizer  optimizer, scheduler, the batch sizes
    precision  bf16, fp16, data_types, torch_autocast          own        "tiermem", from the policy's fields
    zero       zero_optimization, checkpoint
    translate  keys -> policy, report                          root       TiermemConfig, the top section
    load       load_config, resolve_auto, with_tuned

A key that sets a field of the policy acts only when it is given: the default that acts is
OffloadPolicy's (policy.py), whose annotations name the keys. Three start otherwise, in
`TiermemConfig.policy`: stage is 0, early_steps true, sizes_are_least false where `strict` is set.

A new key of "tiermem" is a field of OffloadPolicy with its docstring, and the code that reads it.
Its type is a Literal, bool, int or float, or one of these and None; a value with another form in
JSON is also in `own._WRITTEN_OTHERWISE`, and a line of OwnConfig. A field that `Shards.rehome` may
change is in `run.next_plan._MAY_CHANGE`; one that ordinary parameters follow, in
`optim.resting._APPLIED`. A key with a name of DeepSpeed's is also a field of its section here,
named by `Key` at the field of the policy; a key that ranks may give differently is also in
`translate._OF_A_RANK`. Its claim in tests/config/key_claims.py names a test that sees what it
changes. Then `python docs/config_keys.py > docs/keys.md` and `python tests/test_public_names.py`.

Every documented key is honoured, or computed and reported, or refused with the reason. No key is
parsed and ignored. DeepSpeed's class names are aliases of tiermem's classes.
"""

from tiermem.config.io import (
    AioConfig,
    OffloadDevice,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    OffloadState,
    PathConfig,
)
from tiermem.config.load import load_config, resolve_auto
from tiermem.config.optimizer import BatchSizes, OptimizerConfig, SchedulerConfig, solve_batch
from tiermem.config.own import OwnConfig
from tiermem.config.precision import (
    AutocastConfig,
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    PrecisionConfig,
)
from tiermem.config.root import TiermemConfig
from tiermem.config.translate import ReportRow
from tiermem.config.zero import CheckpointConfig, ZeroConfig, ZeroStage
from tiermem.optimizers.adagrad import AdagradParams
from tiermem.optimizers.adam import AdamParams
from tiermem.optimizers.base import OptimizerParams
from tiermem.optimizers.lion import LionParams
from tiermem.optimizers.muon import MuonParams
from tiermem.optimizers.sgd import SgdParams
from tiermem.section import ConfigError, Problem

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

OffloadDeviceEnum = OffloadDevice
OffloadStateTypeEnum = OffloadState
DeepSpeedZeroOffloadParamConfig = OffloadParamConfig
DeepSpeedZeroOffloadOptimizerConfig = OffloadOptimizerConfig
DeepSpeedZeroConfig = ZeroConfig
ZeroStageEnum = ZeroStage
