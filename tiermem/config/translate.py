"""Translates the keys of a config to the policy, and reports the outcome of every key.

A key that is set becomes its policy field. For a key that is not set, the field stays at None (planned) or at the policy's
default. Where DeepSpeed counts differently, this file converts the count:

    offload_optimizer.buffer_count   buffers of single states; 4 are one tile of Adam      tile_buffers = count // 4
    pipeline_read, pipeline_write    the reference's default is off                        not set: on
    pin_memory                       two keys, one arena                                   either asks for it: pinned
    nvme_path                        two keys, one store                                   union, order kept;
                                                                                           tiermem.paths instead of both
    queue_depth                      in flight for each of intra_op_parallelism threads    depth = their product
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tiermem.config.base import ConfigModel, canonical_key
from tiermem.config.io import (
    STATES_PER_TILE,
    AioConfig,
    OffloadDevice,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    PathConfig,
    clashes,
    united,
)
from tiermem.config.keys import COMPUTED, PLANNED
from tiermem.config.zero import OwnConfig, ZeroConfig, rank_fields
from tiermem.policy import IoSettings, LeafRules, NvmePath, OffloadPolicy, Tier

__all__ = ["ReportRow", "io_of", "path_problems", "paths_of", "policy_of", "report_of", "shared_by_ranks"]

_ZERO_FIELDS = {
    "sub_group_size": "tile_numel",
    "prefetch_bucket_size": "prefetch_numel",
    "max_live_parameters": "max_live_numel",
    "max_reuse_distance": "max_reuse_numel",
    "param_persistence_threshold": "persistence_numel",
    "model_persistence_threshold": "model_persistence_numel",
    "reduce_bucket_size": "reduce_bucket_numel",
    "allgather_bucket_size": "allgather_bucket_numel",
    "ignore_unused_parameters": "ignore_unused",
    "load_from_fp32_weights": "loads_masters",
}
_PARAM_FIELDS = {"buffer_count": "unit_buffers", "buffer_size": "unit_numel", "max_in_cpu": "host_param_numel"}
_OWN_FIELDS = (
    "host_bytes",
    "disk_bytes",
    "resident_bytes",
    "step_in_backward",
    "on_nonfinite",
    "master_from",
    "durability",
    "keep",
    "verify",
    "timeout_s",
    "join_timeout_s",
)
_PLANNED_IF_0 = ("sub_group_size", "buffer_count", "buffer_size")
_ONLY_ON_NVME = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
_OF_A_RANK = (
    "nvme_path",
    "pin_memory",
    "paths",
    "disk_bytes",
    "measured",
    "timeout_s",
    "join_timeout_s",
    "engine",
)  # may differ between ranks
_OF_A_RANK_AT_TOP = ("aio", "steps_per_print", "wall_clock_breakdown", "dump_state")
_SWITCHED = ("bf16", "torch_autocast")  # sections of which nothing acts while they are off
_NO_PATH = (
    'is missing, but device is nvme; set it to a folder, such as "/mnt/nvme0", or to a list, or set tiermem.paths'
)


class ReportRow(NamedTuple):
    """What became of one key."""

    key: str
    """Dotted path."""
    value: Any
    """The value that was set, or the documented default."""
    how: Literal["honoured", "computed", "default"]
    """honoured: the value acts. computed: the plan or the design decides, see the note. default: not set, and acts."""
    note: str
    """What happens instead, or an empty string."""
    is_set: bool = True
    """Whether the config gives the key a value."""

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r} ({self.how}{': ' if self.note else ''}{self.note})"


def policy_of(zero: ZeroConfig, aio: AioConfig, own: OwnConfig, overrides: Mapping[str, Any]) -> OffloadPolicy:
    """Builds the policy; raises ValueError when `overrides` contradict the config."""
    fields: dict[str, Any] = {
        "stage": int(zero.stage),
        "params": Tier(zero.param_device.value),
        "optim": Tier(zero.optimizer_device.value),
        "paths": paths_of(zero, own),
        "io": io_of(aio, own),
    }
    fields |= {ours: getattr(zero, theirs) for theirs, ours in _ZERO_FIELDS.items() if _is_given(zero, theirs)}
    leaf = zero.leaf_module
    fields["leaves"] = LeafRules(
        tuple(leaf.classes), tuple(leaf.names), tuple(leaf.name_suffixes), zero.module_granularity_threshold
    )
    fields |= rank_fields(zero)
    if zero.allgather_sequential:
        fields["gather_way"] = "single"
    fields |= _offload_fields(zero)
    fields |= {name: getattr(own, name) for name in _OWN_FIELDS if own.is_set(name)}
    if own.grads not in (None, OffloadDevice.none):
        fields["grads"] = Tier(own.grads.value)
    return OffloadPolicy(**(fields | dict(overrides)))


def _is_given(section: ConfigModel, name: str) -> bool:
    """Whether a key decides something: it is set, and not a size of 0 that leaves it to the plan."""
    return section.is_set(name) and not (name in _PLANNED_IF_0 and getattr(section, name) == 0)


def _offload_fields(zero: ZeroConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    param, optim = zero.offload_param, zero.offload_optimizer
    if param is not None and param.device is OffloadDevice.nvme:
        fields |= {ours: getattr(param, theirs) for theirs, ours in _PARAM_FIELDS.items() if _is_given(param, theirs)}
    if optim is not None:
        fields |= {name: getattr(optim, name) for name in ("pipeline_read", "pipeline_write") if optim.is_set(name)}
        if optim.device is OffloadDevice.nvme and _is_given(optim, "buffer_count"):
            fields["tile_buffers"] = optim.buffer_count // STATES_PER_TILE
    pins = [section.pin_memory for section in (param, optim) if section is not None and section.is_set("pin_memory")]
    if pins:
        fields["pin_memory"] = any(pins)
    return fields


def paths_of(zero: ZeroConfig, own: OwnConfig) -> tuple[NvmePath, ...]:
    """Lists the paths in use, each once; none when nothing goes to nvme.

    They are those of `tiermem.paths`, else of the sections with device nvme, or of both when gradients go to nvme.
    """
    if OffloadDevice.nvme not in (zero.param_device, zero.optimizer_device, own.grads):
        return ()
    return united(own.paths or [path for paths in _section_paths(zero, own).values() for path in paths])


def path_problems(zero: ZeroConfig, own: OwnConfig) -> list[tuple[str, str]]:
    """What is wrong with the paths of both offload sections and of `tiermem.paths`, together: (key, sentence) each."""
    given = _section_paths(zero, own)
    named = [path for paths in given.values() for path in paths]
    if own.paths is None:
        missing = [key for key, section in _sections(zero) if section.device is OffloadDevice.nvme and key not in given]
        clash = clashes(named)
        return [*((key, _NO_PATH) for key in missing), *([(next(iter(given)), clash)] if clash else [])]
    if named and _places(named) != _places(own.paths):
        verb = "names" if len(given) == 1 else "name"
        said = f"{_folders(own.paths)} given, but {' and '.join(given)} {verb} {_folders(named)}"
        return [("tiermem.paths", f"{said}; remove one of the two, or name the same folders in both")]
    clash = clashes([*own.paths, *(each for each in named if not isinstance(each.written, str))])
    return [("tiermem.paths", clash)] if clash else []


def _section_paths(zero: ZeroConfig, own: OwnConfig) -> dict[str, tuple[PathConfig, ...]]:
    """The paths of the sections that are on nvme, or of both when gradients are; by key, where there are any."""
    in_use = ((key, s.nvme_path) for key, s in _sections(zero) if OffloadDevice.nvme in (s.device, own.grads))
    return {key: paths for key, paths in in_use if paths}


def _sections(zero: ZeroConfig) -> Iterator[tuple[str, OffloadParamConfig | OffloadOptimizerConfig]]:
    """Both offload sections that are there, each with the key of its paths."""
    for name, section in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if section is not None:
            yield f"zero_optimization.{name}.nvme_path", section


def _places(paths: Sequence[PathConfig]) -> set[str]:
    return {os.path.abspath(each.path) for each in paths}


def _folders(paths: Sequence[PathConfig]) -> str:
    return ", ".join(str(value.path) for value in united(paths))


def io_of(aio: AioConfig, own: OwnConfig) -> IoSettings:
    """Builds the queue's settings; raises ValueError for a block size or depth that the queue does not take."""
    fields: dict[str, Any] = {}
    if aio.is_set("block_size"):
        fields["block_bytes"] = aio.block_size
    if aio.depth is not None:
        fields["depth"] = aio.depth
    for name in ("single_submit", "overlap_events"):
        if aio.is_set(name):
            fields[name] = getattr(aio, name)
    if aio.threads is not None:
        fields["threads"] = aio.threads
    if own.is_set("engine"):
        fields["engine"] = own.engine
    return IoSettings(**fields)


def report_of(config: ConfigModel, auto_keys: frozenset[str], uses_nvme: bool) -> list[ReportRow]:
    """Lists every key of every section, in the order of the models."""
    rows = []
    for model, name, key, value in _leaves(config, ""):
        is_set = model.is_set(name)
        note = COMPUTED.get(key) or _matters_elsewhere(model, name, is_set) or ("" if is_set else PLANNED.get(key, ""))
        if key == "tiermem.paths" and is_set and not uses_nvme:
            note = "matters with device nvme; no device is"
        if key in auto_keys:
            note = "auto: from the hidden size" if is_set else f"auto: {note or 'the default'}"
        how: Literal["honoured", "computed", "default"] = "honoured" if is_set else "default"
        rows.append(ReportRow(key, value, "computed" if note else how, note, is_set))
    return rows


def shared_by_ranks(config: ConfigModel) -> dict[str, Any]:
    """Keys that have to be the same on every rank, with their values: all but those about folders, queues and printing."""
    leaves = {key: value for _, _, key, value in _leaves(config, "")}
    return {
        key: value
        for key, value in leaves.items()
        if key.rpartition(".")[2] not in _OF_A_RANK and key.partition(".")[0] not in _OF_A_RANK_AT_TOP
    }


def _leaves(model: ConfigModel, prefix: str) -> Iterator[tuple[ConfigModel, str, str, Any]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        key = prefix + canonical_key(type(model), name)
        if isinstance(value, ConfigModel):
            yield from _leaves(value, key + ".")
        else:
            yield model, name, key, _written(value)


def _written(value: Any) -> Any:
    """Paths and choices as a person would write them; everything else as it is."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple) and value and isinstance(value[0], PathConfig):
        return [each.written for each in value]
    return value


def _matters_elsewhere(model: ConfigModel, name: str, is_set: bool) -> str:
    """Why a key that is set has no effect; empty when it has."""
    device = getattr(model, "device", OffloadDevice.nvme)
    if is_set and name in _ONLY_ON_NVME and device is not OffloadDevice.nvme:
        return f"matters with device nvme; device is {device.value}"
    if is_set and name == "cpu_offload_use_pin_memory":
        return "matters with cpu_offload or cpu_offload_param, and neither is on"
    if is_set and model.section in _SWITCHED and name != "enabled" and not getattr(model, "enabled", True):
        return f"matters with {model.section}.enabled"
    return ""
