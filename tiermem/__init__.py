"""tiermem: train models whose states do not fit in memory.

A tiered tensor store (GPU, HOST memory, NVMe) under ZeRO-style partitioning, and optimizers that
step on the CPU or a GPU. Start at `shard` for plain PyTorch, or at `initialize` and `zero.Init`
with a DeepSpeed-style config. The floors, lowest first:

    version       the version of the package
    swap/         tensors at rest and on the move
    precision     the formats of a parameter's states
    policy        OffloadPolicy: where states rest and how they move
    schedule      learning-rate schedules
    keys          keys of a config that are refused, computed or planned
    section       the base class of a config's sections; ConfigError
    optimizers/   one file an optimizer: section of the config, rule, torch's arguments
    config/       JSON to one frozen OffloadPolicy
    ranks/        groups of ranks, their collectives, and how one that is gone is found
    units/        how parameters, gradients and states lie, in elements
    wires/        parts of units on their way between ranks
    plans/        bytes of every tier, before anything is allocated
    weights/      what a parameter shows, where its unit rests, when it is fetched
    gradients/    from autograd to the tier where they rest until the step
    run/          hooks around modules; the sharded model
    layers/       layers and a loss that take less memory
    optim/        optimizer states, tile by tile
    weights_io    safetensors files in and out of models
    averages      EMA, a moving average of weights that rests on a tier
    checkpoint/   durable steps
    forecast/     bytes and seconds of a step before it runs
    state_access  one parameter's value, gradient and states on any tier
    engine/       initialize, backward, step
    integrations/  Hugging Face, Lightning, answers to DeepSpeed's names
    compat/       functions under the names of the reference system
    zero/         the names of its partitioner
    as_deepspeed  runs a script that imports deepspeed
    utils/        the names of the reference system's `utils`
    tools/        the `tiermem` command

Names are imported when first used, so that `import tiermem` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tiermem.version import __version__ as __version__

if TYPE_CHECKING:
    from tiermem import checkpoint as checkpoint
    from tiermem import config as config
    from tiermem import utils as utils
    from tiermem import zero as zero
    from tiermem.averages import EMA as EMA
    from tiermem.config.load import with_tuned as with_tuned
    from tiermem.engine import Engine as Engine
    from tiermem.engine import initialize as initialize
    from tiermem.engine.room import choose_policy as choose_policy
    from tiermem.engine.sharding import shard as shard
    from tiermem.integrations.as_deepspeed import add_config_arguments as add_config_arguments
    from tiermem.integrations.as_deepspeed import as_deepspeed as as_deepspeed
    from tiermem.integrations.models import from_pretrained as from_pretrained
    from tiermem.layers.chunked_loss import chunked_cross_entropy as chunked_cross_entropy
    from tiermem.optim import SGD as SGD
    from tiermem.optim import Adagrad as Adagrad
    from tiermem.optim import Adam as Adam
    from tiermem.optim import AdamW as AdamW
    from tiermem.optim import Lion as Lion
    from tiermem.optim import Muon as Muon
    from tiermem.policy import IoSettings as IoSettings
    from tiermem.policy import NvmePath as NvmePath
    from tiermem.policy import OffloadPolicy as OffloadPolicy
    from tiermem.precision import Precision as Precision
    from tiermem.ranks.joining import init_distributed as init_distributed
    from tiermem.run.shards import Shards as Shards
    from tiermem.swap.base.errors import CorruptionError as CorruptionError
    from tiermem.swap.base.tier import Tier as Tier
    from tiermem.swap.store.store import TensorStore as TensorStore
    from tiermem.weights_io import export_weights as export_weights
    from tiermem.weights_io import load_safetensors as load_safetensors

_HOMES = {
    "EMA": "tiermem.averages",
    "SGD": "tiermem.optim",
    "Adagrad": "tiermem.optim",
    "Adam": "tiermem.optim",
    "AdamW": "tiermem.optim",
    "CorruptionError": "tiermem.swap.base.errors",
    "Engine": "tiermem.engine",
    "IoSettings": "tiermem.policy",
    "Lion": "tiermem.optim",
    "Muon": "tiermem.optim",
    "NvmePath": "tiermem.policy",
    "OffloadPolicy": "tiermem.policy",
    "Precision": "tiermem.precision",
    "Shards": "tiermem.run.shards",
    "TensorStore": "tiermem.swap.store.store",
    "Tier": "tiermem.swap.base.tier",
    "add_config_arguments": "tiermem.integrations.as_deepspeed",
    "as_deepspeed": "tiermem.integrations.as_deepspeed",
    "choose_policy": "tiermem.engine.room",
    "chunked_cross_entropy": "tiermem.layers.chunked_loss",
    "export_weights": "tiermem.weights_io",
    "from_pretrained": "tiermem.integrations.models",
    "init_distributed": "tiermem.ranks.joining",
    "initialize": "tiermem.engine",
    "load_safetensors": "tiermem.weights_io",
    "shard": "tiermem.engine.sharding",
    "with_tuned": "tiermem.config.load",
}
_PACKAGES = ("checkpoint", "config", "utils", "zero")

__all__ = [*_HOMES, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"tiermem.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiermem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
