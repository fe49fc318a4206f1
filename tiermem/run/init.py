"""Init and MiCS_Init: contexts that build a model larger than memory."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import sys
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from tiermem.policy import OffloadPolicy, Tier, check_kind
from tiermem.precision import check_is_dtype
from tiermem.ranks.collectives import exchange
from tiermem.ranks.joining import join_ranks
from tiermem.ranks.topology import Topology, find_topology, numbered
from tiermem.run.init_params import AsBuilt, ParametersInInit, size_of_near
from tiermem.swap.memory.accelerator import device_taken, find_device, kind_of_device
from tiermem.units import registry
from tiermem.weights.absent import needs_values, parameters_in, replaces_data, writes_in_place

# ---- Init ----------------------------------------------------------------------------------------

AnyConfig = Mapping[str, Any] | str | os.PathLike[str]

_CREATORS = {
    torch.tensor,
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.arange,
    torch.eye,
    torch.randn,
}


class DeepSpeedTensorOverride(enum.Enum):
    """Properties of new tensors that Init may set, dtype and device: see `tensor_overrides`."""

    dtype = 1
    device = 2


class Init:
    """A context that partitions parameters while a model is built in it.

        with tiermem.zero.Init(config_dict_or_path=cfg):
            model = MyLargeModel()

    When a module is assigned to its parent, its parameters are partitioned: each rank keeps its
    part, and the parameter shows NaN (init_params.py). The root's parameters are partitioned when
    Init exits; a parameter on the meta device, when another takes its place. Code that uses a
    parameter afterwards (weight initialisation by a library, tied weights, `Module.apply`) finds
    its values: inside Init a TorchFunctionMode sees torch's calls on parameters and brings the
    values back before the call. A bounded cache holds them; the oldest leave first.

    The values are the same as in a plain build with the same seed. They keep the dtype in which
    they were built and are cast when the model is sharded. With several ranks they are rank 0's
    values; other ranks' writes are dropped.

    Peak memory while building is this rank's parts, and the larger of one module that is not yet
    assigned to its parent and the cache: 16 MiB, or the parameters of one call if they take more.
    The modules of a plain list (`nn.ModuleList([nn.Linear(...) for ...])`) are all assigned at
    once, so the list may exceed that.

    Contexts nest: the innermost takes the modules built in it. No torch name is patched: the
    registration hooks and the mode are torch's own, and are removed when Init exits. The model is
    usable only after `shard` or `initialize`, which take over the parameters. A subclass may
    override `get_partition_rank` and `get_dp_process_group`.

    Args:
        module: partition a finished module instead of building one inside the context.
        data_parallel_group: ranks that share the parameters; default: those of mpu, else the world.
            If a launcher (torchrun) has started ranks and no process group exists, entering the
            context creates it.
        mem_efficient_linear: has no effect: linear layers keep no copy of a weight
            (weights/unit_state.py).
        remote_device: where parameters rest until they are sharded: "none", "cpu" or "nvme";
            default: as in the config.
        pin_memory: page-lock the parts that rest in memory, where there is a GPU.
        config_dict_or_path: a DeepSpeed-style config: a dict or the path of a JSON file.
        config: the deprecated name of config_dict_or_path.
        enabled: False makes the context do nothing.
        dtype: dtype of the parameters once sharded; default: the config's precision, else as built.
        mpu: an object whose `get_data_parallel_group()` returns the ranks that share the
            parameters.
        zero_param_parallel_group: neighbouring ranks, this one among them, that keep a second copy
            of gathered parameters (hpZ): the same as zero_hpz_partition_size with the number of
            these ranks.
        zero_quantized_weights, zero_quantized_nontrainable_weights: as the config keys of the same
            name.
        sequence_data_parallel_group: the deprecated name of data_parallel_group.
        param_swapper: refused: the reference's own object for reading and writing files; here tiers
            do that.
        tensor_overrides: `DeepSpeedTensorOverride` members. With `dtype`, floating-point tensors
            made inside (by torch.tensor, empty, zeros, ones, full, arange, eye, randn) without a
            dtype get `dtype`. With `device`, tensors made without a device get the current GPU.
            Default: neither, so values and buffers are those of a plain build; the reference does
                both.
        policy: an OffloadPolicy instead of a config.
    These arguments and a subclass's methods also hold for `shard` and `initialize` afterwards
    (init_params.py). Entering is collective. Raises ValueError for arguments that are wrong or
    contradict each other, OSError when a path is missing or full.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: AnyConfig | None = None,
        config: AnyConfig | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: dist.ProcessGroup | None = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: dist.ProcessGroup | None = None,
        param_swapper: None = None,
        tensor_overrides: Collection[DeepSpeedTensorOverride] = (),
        *,
        policy: OffloadPolicy | None = None,
    ) -> None:
        if param_swapper:
            raise ValueError(
                f"zero.Init was given param_swapper={param_swapper!r}; allowed is leaving it out: "
                "tiers move parameters here"
            )
        given = _newer(config_dict_or_path, config, "config_dict_or_path", "config")
        self._policy, self._dtype, self._serves_apply, self._fp32_names = _read(
            given, policy, dtype
        )
        if remote_device is not None:
            self._policy = _rest_on(self._policy, remote_device)
        self._group: dist.ProcessGroup | None = _newer(
            data_parallel_group,
            sequence_data_parallel_group,
            "data_parallel_group",
            "sequence_data_parallel_group",
        )
        if self._group is None and mpu is not None:
            self._group = mpu.get_data_parallel_group()
        self._near = zero_param_parallel_group
        self._fields: dict[str, Any] = {}
        if zero_quantized_weights:
            self._fields["quantised_gather"] = True
        if zero_quantized_nontrainable_weights:
            self._fields["quantised_frozen"] = True
        self._pins = pin_memory
        self._overrides = frozenset(tensor_overrides)
        self._enabled = enabled and self._policy.stage == 3
        self._handles: list[RemovableHandle] = []
        self._mode: _Touch | None = None
        self._built: ParametersInInit | None = None
        # built here, in order
        self._seen: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        if module is not None and self._enabled:
            with self:
                self._seen.update(dict.fromkeys(module.modules()))

    def get_partition_rank(self) -> int:
        """The part of every parameter that this rank keeps: its place in the group.

        A subclass may return another number. The numbers of all ranks must be a permutation of 0 to
        ranks - 1.
        """
        group = self.get_dp_process_group()
        return dist.get_rank(group) if group is not None else 0

    def get_dp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the parameters; None where torch.distributed is not initialised."""
        if self._group is not None or not dist.is_initialized():
            return self._group
        return dist.group.WORLD

    def __enter__(self) -> Init:
        if self._enabled:
            device = kind_of_device()  # the kind alone: `shard` chooses the device itself
            join_ranks(self._policy.timeout_s, device, self._policy.join_timeout_s)
            group = self.get_dp_process_group()
            topology = find_topology(3, group, self._policy.timeout_s, device_taken(group, device))
            if self._near is not None and group is not None:
                self._fields["secondary_group_size"] = size_of_near(group, self._near)
            as_built = AsBuilt(group, self._numbers(topology), self._fields)
            as_built.over(self._policy)  # raises ValueError if the config contradicts the arguments
            if as_built.parts is not None:
                topology = numbered(topology, as_built.parts)
            self._built = ParametersInInit(self._policy, topology, as_built, self._pins)
            self._handles = [
                register_module_module_registration_hook(self._stands),
                register_module_parameter_registration_hook(self._appears),
            ]
            self._mode = _Touch(self._built, self._serves_apply, self._overrides, self._dtype)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            registry.open_init(1)
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._mode is None or self._built is None:
            return
        registry.open_init(-1)
        self._mode.__exit__(*raised)  # type: ignore[no-untyped-call]
        while self._handles:
            self._handles.pop().remove()
        if raised[0] is None:
            # A module may hold other parameters than those registered: to_empty replaces them.
            for module in list(self._seen):
                self._built.admit_new(module.parameters(recurse=False))
            self._built.finish(self._dtype, [each for each in self._seen if each._parameters])
            roots = set(self._seen) - {
                child for parent in self._seen for child in parent.children()
            }
            for root in roots:
                keep_buffers_in_fp32(root, self._dtype, self._fp32_names)
        else:
            self._built.discard()
        self._seen.clear()
        self._mode = None

    def _numbers(self, topology: Topology) -> tuple[int, ...] | None:
        """The part of each rank, where they differ from the ranks' numbers; else None.
        Collective."""
        if type(self).get_partition_rank is Init.get_partition_rank or topology.group is None:
            return None
        numbers = [int(each) for each in exchange(topology, self.get_partition_rank())]
        if sorted(numbers) != list(range(topology.num_shards)):
            raise ValueError(
                f"get_partition_rank gave {numbers}, in the order of ranks; together they must be "
                f"0 to {topology.num_shards - 1}"
            )
        return tuple(numbers)

    def _appears(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if _innermost() is self._mode and self._built is not None:
            self._seen[module] = None
            before = module._parameters.get(name)
            # a library fills it
            if before is not None and before.is_meta and param is not None and not param.is_meta:
                self._built.admit_new([param])

    def _stands(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None and self._built is not None and _innermost() is self._mode:
            self._seen[parent] = None
            self._built.admit_new(param for param in module.parameters() if not param.is_meta)


# ---- what stays in fp32 beside bf16 and fp16 -----------------------------------------------------

_LISTS = {
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
    torch.float16: ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"),
}
"""Attributes of transformers' classes that list names, by the dtype of the model."""


def names_in_fp32(
    module: nn.Module, dtype: torch.dtype | None, asked: Sequence[str] | None = None
) -> re.Pattern[str] | None:
    """A pattern that is found in the names of a module's tensors that stay in fp32 beside a dtype;
    None: no tensor does.

    asked: parts of names, in which `*` stands for any characters; None: those that the module's
        class lists. diffusers' classes list whole parts, for both dtypes.
    """
    if dtype not in _LISTS:
        return None
    words = getattr(module, "_keep_in_fp32_modules", None)
    if asked is None and words and not hasattr(module, "_keep_in_fp32_modules_strict"):
        return re.compile(rf"(^|\.)({'|'.join(map(re.escape, words))})(\.|$)")
    if asked is None:
        asked = [word for name in _LISTS[dtype] for word in getattr(module, name, None) or ()]
    return re.compile("|".join(word.replace("*", ".*") for word in asked)) if asked else None


def keep_buffers_in_fp32(
    model: nn.Module, dtype: torch.dtype | None, asked: Sequence[str] | None = None
) -> list[torch.Tensor]:
    """Makes the floating-point buffers that stay in fp32 fp32, and returns them. `asked`: see
    `names_in_fp32`."""
    kept: list[torch.Tensor] = []
    for module in model.modules() if asked is None else (model,):
        names = names_in_fp32(module, dtype, asked)
        for name, buffer in module.named_buffers():
            if names is not None and names.search(name) and buffer.is_floating_point():
                buffer.data = buffer.data.float()
                kept.append(buffer)
    return kept


def shutdown_init_context() -> None:
    """Suspends every Init context around the caller, so that modules built then are ordinary. Does
    nothing outside one."""
    for mode in _modes():
        mode.is_suspended = True


def restore_init_context() -> None:
    """Ends the suspension that `shutdown_init_context` began."""
    for mode in _modes():
        mode.is_suspended = False


class _Touch(TorchFunctionMode):
    """Sees torch's calls inside Init: brings back the values of parameters that a call uses, and
    sets `tensor_overrides`.

    Args:
        parameters: holds the parts of the parameters.
        serves_apply: False: a function given to `Module.apply` gathers the parameters that it uses
            (override_module_apply).
        overrides: the properties to set on tensors made inside.
        dtype: the dtype for new floating-point tensors.
    """

    def __init__(
        self,
        parameters: ParametersInInit,
        serves_apply: bool,
        overrides: frozenset[DeepSpeedTensorOverride],
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.is_suspended = False
        self._built = parameters
        self._serves_apply = serves_apply
        self._overrides = overrides
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CREATORS and self._overrides and not self.is_suspended:
            return self._create(func, args, kwargs)
        touched = parameters_in(args, kwargs) if needs_values(func) else ()
        if touched:
            with torch._C.DisableTorchFunction():
                if not self._serves_apply and _is_in_apply():
                    self._refuse_writes(func, writes_in_place(func, args, kwargs))
                else:
                    self._built.make_room(touched)
                    for param in touched:
                        self._built.wake(param, replaces_data(func) and param is args[0])
        return func(*args, **kwargs)

    def _create(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        if DeepSpeedTensorOverride.device in self._overrides and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": find_device()}
        made: torch.Tensor = func(*args, **kwargs)
        sets_dtype = (
            DeepSpeedTensorOverride.dtype in self._overrides and kwargs.get("dtype") is None
        )
        return (
            made.to(self._dtype)
            if sets_dtype and self._dtype is not None and made.is_floating_point()
            else made
        )

    def _refuse_writes(self, func: Any, written: list[torch.Tensor]) -> None:
        for param in written:
            if isinstance(param, nn.Parameter) and self._built.is_asleep(param):
                raise RuntimeError(
                    f"{func.__name__} in Module.apply writes a parameter of shape "
                    f"{tuple(param.shape)} that is partitioned, and override_module_apply is "
                    "false: gather it with tiermem.zero.GatheredParameters(parameter, "
                    "modifier_rank=0) in the function, or set the key to true"
                )


def _modes() -> list[_Touch]:
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _Touch)]


def _innermost() -> _Touch | None:
    """The mode of the context that takes modules built now; None outside Init or while contexts are
    suspended."""
    modes = _modes()
    return modes[-1] if modes and not modes[-1].is_suspended else None


def _is_in_apply() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is nn.Module.apply.__code__:
            return True
    return False


def _newer(given: Any, older: Any, name: str, older_name: str) -> Any:
    """An argument of Init that has an older name as well. Warns where the older name is used.
    Raises ValueError where both are given."""
    if older is None:
        return given
    if given is not None:
        raise ValueError(f"{older_name} is an older name of {name}: give one of them")
    warnings.warn(
        f"zero.Init({older_name}=...) is deprecated; use {name}", DeprecationWarning, stacklevel=3
    )
    return older


def _read(
    given: AnyConfig | None, policy: OffloadPolicy | None, dtype: torch.dtype | None
) -> tuple[OffloadPolicy, torch.dtype | None, bool, Sequence[str] | None]:
    """The policy, the dtype that parameters will have, whether `Module.apply` brings values back,
    and what stays in fp32."""
    check_kind(policy)
    check_is_dtype(dtype)
    if given is None:
        return policy or OffloadPolicy(), dtype, True, None
    if policy is not None:
        raise ValueError("give a config or a policy, not both")
    from tiermem.config import load_config  # needed only by callers with a config

    loaded = load_config(given)
    dtype = dtype or {"bf16": torch.bfloat16, "fp16": torch.float16}.get(loaded.precision)
    kept = loaded.data_types.keep_in_fp32_modules
    planned = loaded.policy()
    if "params" in loaded.moved and planned.stage == 3:  # until the whole model can be planned
        planned = dataclasses.replace(planned, params=Tier.NVME if planned.paths else Tier.HOST)
    return planned, dtype, loaded.zero_optimization.override_module_apply, kept


def _rest_on(policy: OffloadPolicy, remote_device: str) -> OffloadPolicy:
    homes = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
    if remote_device not in homes:
        raise ValueError(f"remote_device is {remote_device!r}; allowed are {', '.join(homes)}")
    if remote_device == "nvme" and not policy.paths:
        raise ValueError(
            "remote_device is 'nvme', but no path is given: set offload_param.nvme_path in the "
            "config (in a policy: paths)"
        )
    return dataclasses.replace(policy, params=homes[remote_device])


# ---- MiCS_Init -----------------------------------------------------------------------------------


class MiCS_Init(Init):  # noqa: N801 (the documented name)
    """Init for sharding within groups of ranks (MiCS), for a config with `mics_shard_size`.

    While the model is built, parameters are divided over all ranks, not only over one group, so
    building takes less memory than training. `shard` and `initialize` divide them within groups and
    make the copies. Raises ValueError when the config has no `mics_shard_size`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._enabled and self._policy.shard_group_size is None:
            raise ValueError(
                "MiCS_Init without a size of shard groups: set zero_optimization.mics_shard_size "
                "to 1 or more in its config (shard_group_size of a policy), or use Init"
            )
