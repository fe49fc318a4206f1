"""as_deepspeed: answers for the modules of DeepSpeed that transformers, accelerate, trl and peft
import.

    tiermem.as_deepspeed()                        before transformers is imported
    python -m tiermem.as_deepspeed train.py ...   for a script that stays as it is

The folder deepspeed_names, first in sys.path, has a module deepspeed and its metadata. Imported,
the module puts a finder into sys.meta_path that makes the modules of NAMES. Their names are
tiermem's, imported when first used; other names raise AttributeError, other modules
ModuleNotFoundError. Nothing is patched, and without a call nothing is changed.

Saved checkpoints are complete copies, as DeepSpeed's are, unless the config sets
`tiermem.durability`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from tiermem.config.load import named_in_errors, read_raw
from tiermem.engine import Engine
from tiermem.engine.start import initialize as start
from tiermem.optim import Adagrad, Adam, AdamW, Lion
from tiermem.ranks.joining import hold_no_group
from tiermem.ranks.joining import init_distributed as join
from tiermem.run.init import Init as ZeroInit
from tiermem.swap.memory.accelerator import backends_of, find_device

VERSION = "0.18.9"
"""The version of the interface that is answered; accelerate compares it."""

DeepSpeedEngine = Engine

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

# ---- functions and classes under DeepSpeed's names -----------------------------------------------


def initialize(
    args: Any = None, *more: Any, config: Any = None, config_params: Any = None, **kwargs: Any
) -> Any:
    """tiermem.initialize, whose checkpoints are complete copies unless the config says otherwise.
    Collective; blocks."""
    init_distributed()
    _check_processes()
    given = next(
        (
            each
            for each in (config, config_params, getattr(args, "deepspeed_config", None))
            if each is not None
        ),
        None,
    )
    if given is None:
        return start(args, *more, **kwargs)
    raw, source = read_raw(given)
    own = {"durability": "none", **raw.get("tiermem", {})}
    kwargs["config"] = {**raw, "tiermem": own}
    with named_in_errors(source):
        return start(args, *more, **kwargs)


def _check_processes() -> None:
    """Raises ValueError when Accelerate counts other processes than the launcher has started."""
    known: Mapping[str, Any] = (
        sys.modules["accelerate"].PartialState._shared_state if "accelerate" in sys.modules else {}
    )
    counted = known.get("num_processes")
    started = dist.get_world_size()
    if counted not in (None, started):
        raise ValueError(
            f"Accelerate counts {counted} processes, and the launcher has started {started}, so "
            f"that batches and data would be those of {counted}. Without an accelerator give "
            'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]); with one, '
            "start the script by `accelerate launch`, or by torchrun alone"
        )


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """tiermem.init_distributed; without a launcher a group of this process alone, which
    transformers expects."""
    join(dist_backend, *args, **kwargs)
    if not dist.is_initialized():
        hold_no_group()
        dist.init_process_group(backends_of(find_device()), store=HashStore(), rank=0, world_size=1)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config, which `initialize(args, ...)` reads; returns the
    parser."""
    group = parser.add_argument_group("DeepSpeed", "the config of the engine")
    group.add_argument(
        "--deepspeed", action="store_true", help="for the script itself; tiermem does not read it"
    )
    group.add_argument("--deepspeed_config", help="the JSON file of the config")
    return parser


def get_accelerator() -> Any:
    """The device of this rank, as far as transformers asks for it."""
    device = find_device()
    return SimpleNamespace(
        current_device_name=lambda: str(device),
        device_name=lambda _=None: device.type,
        communication_backend_name=lambda: backends_of(device).rpartition(":")[2],
    )


def get_rank(group: Any = None) -> int:
    """This rank; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def clone_tensors_for_torch_save(item: Any) -> Any:
    """The same tensors: tiermem's state dicts are copies already."""
    return item


def zero_wrapper_for_fp_tensor_constructor(constructor: Any, *args: Any, **kwargs: Any) -> Any:
    """The same constructor: tiermem's zero.Init changes no dtype of torch.arange, for which
    transformers replaces this."""
    return constructor


class InitInGroup(ZeroInit):
    """tiermem.zero.Init in a process group, which transformers expects inside. Collective;
    blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        init_distributed()
        super().__init__(*args, **kwargs)

    def __exit__(self, kind: Any, *more: Any) -> None:
        given = sys.modules.get("transformers.initialization")
        if (
            kind is None
            and given is not None
            and nn.init.uniform_ is not given.TORCH_INIT_FUNCTIONS["uniform_"]
        ):
            for module in list(self._seen):
                _draw_parametrised(module)
        super().__exit__(kind, *more)


Init = InitInGroup


def _draw_parametrised(module: nn.Module) -> None:
    """Gives a layer's computed weights the values that torch's layers begin with, also those that
    older hooks compute.

    transformers' no_init_weights has left them undefined. It initialises what the files lack after
    the build, and then writes to `layer.weight`, which is no parameter. The random state stays.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        computed: Any = getattr(module, "parametrizations", {})
        for name in computed:
            setattr(module, name, _drawn(getattr(module, name)))
            for buffer, vector in computed[name].named_buffers():
                if buffer.endswith(("._u", "._v")):  # of a spectral norm
                    vector.copy_(F.normalize(torch.randn_like(vector), dim=0))
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                direction = getattr(module, f"{hook.name}_v")
                direction.copy_(_drawn(direction))
                getattr(module, f"{hook.name}_g").copy_(
                    torch.norm_except_dim(direction, 2, hook.dim)
                )
            elif isinstance(hook, SpectralNorm):
                weight = getattr(module, f"{hook.name}_orig")
                weight.copy_(_drawn(weight))


def _drawn(shown: torch.Tensor) -> torch.Tensor:
    """Values of its shape, drawn as torch's layers draw their weights."""
    bound = max(shown[:1].numel(), 1) ** -0.5
    return torch.empty_like(shown).uniform_(-bound, bound)


def _without_speed(params: Any) -> Any:
    """The same groups without torch's options about speed, which do not apply."""
    found = list(params)
    for group in found:
        for key in ("fused", "foreach", "capturable"):
            if isinstance(group, dict):
                group.pop(key, None)
    return found


class DeepSpeedCPUAdam:
    """Makes tiermem.AdamW, or tiermem.Adam for adamw_mode=False, from DeepSpeed's arguments."""

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        """Raises ValueError for bias_correction=False; the policy says in which precision states
        are kept."""
        if not bias_correction:
            raise ValueError(
                "bias_correction=False is not done: tiermem corrects the moments, as torch does"
            )
        kind = AdamW if adamw_mode else Adam
        return kind(_without_speed(model_params), lr, betas, eps, weight_decay, amsgrad)


class FusedAdam:
    """Makes the same from the arguments of DeepSpeed's FusedAdam."""

    def __new__(
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Any:
        """Raises ValueError as DeepSpeedCPUAdam."""
        return DeepSpeedCPUAdam(
            params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode
        )


class DeepSpeedCPUAdagrad(Adagrad):
    """Adagrad under DeepSpeed's arguments, and adamw_mode, which Accelerate gives every
    optimizer."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(_without_speed(model_params), lr, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPULion(Lion):
    """Lion under DeepSpeed's arguments."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(_without_speed(model_params), lr, betas, weight_decay)


FusedLion = DeepSpeedCPULion


# ---- the modules ---------------------------------------------------------------------------------

_HERE = "tiermem.integrations.as_deepspeed"
_ALL = "*"  # every name of a module of tiermem

NAMES: Mapping[str, Mapping[str, Sequence[str] | str]] = {
    "deepspeed": {
        _HERE: ("initialize", "init_distributed", "add_config_arguments", "DeepSpeedEngine"),
    },
    "deepspeed.accelerator": {_HERE: ("get_accelerator",)},
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": {_HERE: ("clone_tensors_for_torch_save",)},
    "deepspeed.comm": {
        _HERE: ("get_rank", "get_world_size", "init_distributed"),
        "torch.distributed": (
            "is_initialized",
            "barrier",
            "broadcast",
            "all_reduce",
            "all_gather",
            "ReduceOp",
        ),
    },
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {_HERE: ("DEEPSPEED_ENVIRONMENT_NAME",)},
    "deepspeed.ops": {},
    "deepspeed.ops.adagrad": {_HERE: ("DeepSpeedCPUAdagrad",)},
    "deepspeed.ops.adam": {_HERE: ("DeepSpeedCPUAdam", "FusedAdam")},
    "deepspeed.ops.lion": {_HERE: ("DeepSpeedCPULion", "FusedLion")},
    "deepspeed.runtime": {},
    "deepspeed.runtime.dataloader": {"tiermem.utils": ("RepeatingLoader",)},
    "deepspeed.runtime.engine": {_HERE: ("DeepSpeedEngine",)},
    "deepspeed.runtime.lr_schedules": {
        _HERE: ("VALID_LR_SCHEDULES",),
        "tiermem.schedule": VALID_LR_SCHEDULES,
    },
    "deepspeed.runtime.zero": {_HERE: ("Init",), "tiermem.zero": _ALL},
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {"tiermem.zero": ("TiledMLP",)},
    "deepspeed.runtime.zero.offload_config": {
        "tiermem.zero": ("OffloadDeviceEnum", "OffloadStateTypeEnum")
    },
    "deepspeed.runtime.zero.partition_parameters": {
        _HERE: ("Init", "zero_wrapper_for_fp_tensor_constructor"),
        "tiermem.zero.partition_parameters": _ALL,
    },
    "deepspeed.utils": {"tiermem.utils": _ALL},
    "deepspeed.utils.zero_to_fp32": {"tiermem.utils.zero_to_fp32": _ALL},
    "deepspeed.zero": {_HERE: ("Init",), "tiermem.zero": _ALL},
}
"""The modules, and the names that each takes from modules of tiermem."""


def as_deepspeed() -> None:
    """Makes `import deepspeed`, of the modules in NAMES, mean tiermem in this process. A second
    call does nothing.

    Raises RuntimeError when deepspeed itself, or transformers or accelerate, which looked for it,
    is imported already.
    """
    if _FOLDER in sys.path:
        return
    early = [name for name in ("deepspeed", "transformers", "accelerate") if name in sys.modules]
    if early:
        raise RuntimeError(f"as_deepspeed was called after {early[0]} was imported: call it before, or start the script by "
                           "`python -m tiermem.as_deepspeed`")  # fmt: skip
    sys.path.insert(0, _FOLDER)


_FOLDER = os.path.join(os.path.dirname(__file__), "deepspeed_names")


def find_modules() -> None:
    """Makes `deepspeed.X` be found from now on, of the modules in NAMES."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of NAMES."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=__file__, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__dict__["__version__"] = VERSION
        module.__dict__["__getattr__"] = lambda attribute: look_up(name, attribute)


def look_up(module: str, name: str) -> Any:
    """A name of one of the modules. Raises AttributeError."""
    if f"{module}.{name}" in NAMES:
        return importlib.import_module(f"{module}.{name}")
    if module == "deepspeed.utils" and name == "logger":
        return logging.getLogger("tiermem")
    for source, names in NAMES[module].items():
        found = importlib.import_module(source)
        if (names == _ALL and hasattr(found, name) and not name.startswith("_")) or name in names:
            return getattr(found, name)
    raise AttributeError(
        f"{module}.{name} is not one of the names of DeepSpeed that tiermem answers: "
        "docs/from_deepspeed.md says what to use"
    )


def main() -> None:
    """Runs a script, or a module after -m, with its own arguments, as Python does.

    Processes that it starts with this environment find tiermem under the same names.
    """
    if len(sys.argv) < 2 or (sys.argv[1] == "-m" and len(sys.argv) < 3):
        raise SystemExit(
            "usage: python -m tiermem.as_deepspeed SCRIPT [ARGUMENTS], or -m MODULE [ARGUMENTS]"
        )
    as_deepspeed()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (_FOLDER, os.environ.get("PYTHONPATH")))
    )
    if sys.argv[1] == "-m":
        sys.argv[:] = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = sys.argv[1:]
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")
