"""From keys to the policy, and the report of what became of every key.

A key that is set goes through; one that is not leaves its policy field at None (planned) or at the policy's own
default. Where the reference counts differently the count is converted here, and nowhere else:

    offload_optimizer.buffer_count   buffers of single states; 4 are one tile of Adam      tile_buffers = count // 4
    pipeline_read, pipeline_write    the reference's default is off                        not set: on
    pin_memory                       two keys, one arena                                   either asks for it: pinned
    nvme_path                        two keys, one store                                   union, order kept
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tiermem.config.aio import AioConfig
from tiermem.config.base import ConfigModel, canonical_key
from tiermem.config.keys import COMPUTED, PLANNED
from tiermem.config.offload import STATES_PER_TILE, OffloadDevice
from tiermem.config.own import OwnConfig
from tiermem.config.zero import ZeroConfig
from tiermem.policy import IoSettings, OffloadPolicy, Tier

__all__ = ["ReportRow", "io_of", "paths_of", "policy_of", "report_of"]

_ZERO_FIELDS = {
    "sub_group_size": "tile_numel",
    "prefetch_bucket_size": "prefetch_numel",
    "max_live_parameters": "max_live_numel",
    "max_reuse_distance": "max_reuse_numel",
    "param_persistence_threshold": "persistence_numel",
    "model_persistence_threshold": "model_persistence_numel",
    "reduce_bucket_size": "reduce_bucket_numel",
}
_PARAM_FIELDS = {"buffer_count": "unit_buffers", "buffer_size": "unit_numel", "max_in_cpu": "host_param_numel"}
_OWN_FIELDS = (
    "host_bytes",
    "disk_bytes",
    "resident_bytes",
    "step_in_backward",
    "on_nonfinite",
    "master_from",
    "timeout_s",
)
_ONLY_ON_NVME = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")


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


def policy_of(zero: ZeroConfig, aio: AioConfig, own: OwnConfig, overrides: Mapping[str, Any]) -> OffloadPolicy:
    """Builds the policy; raises ValueError when `overrides` contradict the config."""
    fields: dict[str, Any] = {
        "stage": int(zero.stage),
        "params": Tier(zero.param_device.value),
        "optim": Tier(zero.optimizer_device.value),
        "paths": paths_of(zero, own),
        "io": io_of(aio, own),
    }
    fields |= {ours: getattr(zero, theirs) for theirs, ours in _ZERO_FIELDS.items() if zero.is_set(theirs)}
    fields |= _offload_fields(zero)
    fields |= {name: getattr(own, name) for name in _OWN_FIELDS if own.is_set(name)}
    if own.grads not in (None, OffloadDevice.none):
        fields["grads"] = Tier(own.grads.value)
    return OffloadPolicy(**(fields | dict(overrides)))


def _offload_fields(zero: ZeroConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    param, optim = zero.offload_param, zero.offload_optimizer
    if param is not None and param.device is OffloadDevice.nvme:
        fields |= {ours: getattr(param, theirs) for theirs, ours in _PARAM_FIELDS.items() if param.is_set(theirs)}
    if optim is not None:
        fields |= {name: getattr(optim, name) for name in ("pipeline_read", "pipeline_write") if optim.is_set(name)}
        if optim.device is OffloadDevice.nvme and optim.is_set("buffer_count"):
            fields["tile_buffers"] = max(1, optim.buffer_count // STATES_PER_TILE)
    pins = [section.pin_memory for section in (param, optim) if section is not None and section.is_set("pin_memory")]
    if pins:
        fields["pin_memory"] = any(pins)
    return fields


def paths_of(zero: ZeroConfig, own: OwnConfig) -> tuple[Path, ...]:
    """Lists the paths in use: of the sections with device nvme, or of both when gradients go to nvme; each once."""
    paths: list[Path] = []
    for section in (zero.offload_param, zero.offload_optimizer):
        if section is not None and OffloadDevice.nvme in (section.device, own.grads):
            paths += section.nvme_path or ()
    return tuple(dict.fromkeys(paths))


def io_of(aio: AioConfig, own: OwnConfig) -> IoSettings:
    """Builds the queue's settings; raises ValueError for a block size or depth that the queue does not take."""
    fields: dict[str, Any] = {}
    if aio.is_set("block_size"):
        fields["block_bytes"] = aio.block_size
    if aio.is_set("queue_depth"):
        fields["depth"] = aio.queue_depth
    if aio.threads is not None:
        fields["threads"] = aio.threads
    if own.is_set("engine"):
        fields["engine"] = own.engine
    return IoSettings(**fields)


def report_of(config: ConfigModel, auto_keys: frozenset[str]) -> list[ReportRow]:
    """Lists every key of every section, in the order of the models."""
    rows = []
    for model, name, key, value in _leaves(config, ""):
        is_set = model.is_set(name)
        note = COMPUTED.get(key) or _only_on_nvme(model, name, is_set) or ("" if is_set else PLANNED.get(key, ""))
        if key in auto_keys:
            note = "auto: from the hidden size" if is_set else f"auto: {note or 'the default'}"
        how: Literal["honoured", "computed", "default"] = "honoured" if is_set else "default"
        rows.append(ReportRow(key, value, "computed" if note else how, note))
    return rows


def _leaves(model: ConfigModel, prefix: str) -> Iterator[tuple[ConfigModel, str, str, Any]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        key = prefix + canonical_key(type(model), name)
        if isinstance(value, ConfigModel):
            yield from _leaves(value, key + ".")
        else:
            yield model, name, key, value


def _only_on_nvme(model: ConfigModel, name: str, is_set: bool) -> str:
    device = getattr(model, "device", OffloadDevice.nvme)
    if is_set and name in _ONLY_ON_NVME and device is not OffloadDevice.nvme:
        return f"matters with device nvme; device is {device.value}"
    return ""
