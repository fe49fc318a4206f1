"""Translates the keys of a config to the policy, and reports the outcome of every key.

A key that is set becomes the field of the policy whose annotation Key names it; the keys of
"tiermem" have their fields' names. For a key that is not set, the field stays at None (planned) or at the
policy's default. Where DeepSpeed counts differently, or two keys meet, `TiermemConfig.policy` and
this file convert:

    offload_optimizer.buffer_count   buffers of single states; 4 are one tile of Adam      tile_buffers = count // 4
    pipeline_read, pipeline_write    the reference's default is off                        not set: on
    pin_memory                       two keys, one arena                                   either asks for it: pinned
    nvme_path                        two keys, one store                                   union, order kept;
                                                                                           tiermem.paths instead of both
    queue_depth                      in flight for each of intra_op_parallelism threads    depth = their product
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

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
from tiermem.config.own import OwnConfig
from tiermem.config.zero import ZeroConfig
from tiermem.keys import COMPUTED, PLANNED
from tiermem.policy import (
    LEAST_STAGES,
    USUAL_TILE_NUMELS,
    USUAL_UNITS_AHEAD,
    IoSettings,
    NvmePath,
    Tier,
    usual_tile_buffers,
)
from tiermem.section import KEY_OF, SET_BY, ConfigModel, Problems, canonical_key

_TIERS = ("params", "optim", "grads", "activations")  # fields
_ONLY_ON_NVME = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
# keys that may differ between ranks: in sections, and at the top
_OF_A_RANK = (
    "nvme_path",
    "pin_memory",
    "paths",
    "disk_bytes",
    "measured",
    "timeout_s",
    "join_timeout_s",
    "engine",
)
_OF_A_RANK_AT_TOP = ("aio", "steps_per_print", "wall_clock_breakdown", "dump_state")
_SWITCHED = ("bf16", "torch_autocast")  # sections of which nothing acts while they are off
_NO_PATH = (
    'is missing, but device is nvme; set it to a folder, such as "/mnt/nvme0", or to a '
    "list, or set tiermem.paths"
)


class ReportRow(NamedTuple):
    """What became of one key."""

    key: str
    """Dotted path."""
    value: Any
    """The value that was set, or the documented default."""
    how: Literal["honoured", "computed", "inert", "default"]
    """honoured: the value acts. computed: the plan or the design decides, see the note. inert: the
    key does nothing. default: not set, and acts."""
    note: str
    """What happens instead, or an empty string."""
    is_set: bool = True
    """Whether the config gives the key a value."""

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r} ({self.how}{': ' if self.note else ''}{self.note})"


def fields_of(config: ConfigModel, sizes_are_least: bool = True) -> dict[str, Any]:
    """The fields of the policy that single keys set. Counts of buffers are those of NVMe alone, but
    where no size is a least one."""
    fields = {}
    only_on_nvme = {*_ONLY_ON_NVME} - ({"buffer_count"} if not sizes_are_least else set())
    for section, name, key, value in _leaves(config):
        if key not in SET_BY or not section.is_set(name):
            continue
        field, (_, off, on) = SET_BY[key]
        if (
            value is None
            or value == off
            or (name in only_on_nvme and _device_of(section) is not OffloadDevice.nvme)
        ):
            continue
        if on is not None:
            value = on
        if field in _TIERS:
            value = Tier.DEVICE if value == "device" else Tier(value)
        fields[field] = value // STATES_PER_TILE if field == "tile_buffers" else value
    return fields


def named_by_keys(config: ConfigModel, found: Problems) -> Problems:
    """What is wrong with fields of the policy, with the keys that set fields instead of their
    names."""
    keys = {SET_BY[key].field: key for _, _, key, _ in _leaves(config) if key in SET_BY}
    for field, sentence in found:
        yield (
            keys[field],
            re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda name: keys.get(name[0], name[0]), sentence),
        )


def _device_of(section: ConfigModel) -> OffloadDevice:
    """The device of an offload section; nvme for other sections, where no key depends on it."""
    return getattr(section, "device", OffloadDevice.nvme)


def paths_of(zero: ZeroConfig, own: OwnConfig, is_open: bool = False) -> tuple[NvmePath, ...]:
    """Lists the paths in use, each once; none when nothing goes to nvme, unless a home is open.

    They are those of `tiermem.paths`, else of the sections with device nvme, or of both when
    gradients or activations do.
    """
    if not is_open and OffloadDevice.nvme not in (
        zero.param_device,
        zero.optimizer_device,
        own.grads,
        own.activations,
    ):
        return ()
    named = _section_paths(zero, own, is_open).values()
    return united(own.paths or [path for paths in named for path in paths])


def path_problems(zero: ZeroConfig, own: OwnConfig) -> Problems:
    """What is wrong with the paths of both offload sections and of `tiermem.paths`, together: (key,
    sentence) each."""
    given = _section_paths(zero, own)
    named = [path for paths in given.values() for path in paths]
    if own.paths is None:
        for key, section in _sections(zero):
            if section.device is OffloadDevice.nvme and key not in given:
                yield key, _NO_PATH
        if clash := clashes(named):
            yield next(iter(given)), clash
    elif named and _places(named) != _places(own.paths):
        verb = "names" if len(given) == 1 else "name"
        said = f"{_folders(own.paths)} given, but {' and '.join(given)} {verb} {_folders(named)}"
        yield "tiermem.paths", f"{said}; remove one of the two, or name the same folders in both"
    elif clash := clashes(
        [*own.paths, *(each for each in named if not isinstance(each.written, str))]
    ):
        yield "tiermem.paths", clash


def _section_paths(
    zero: ZeroConfig, own: OwnConfig, is_open: bool = False
) -> dict[str, tuple[PathConfig, ...]]:
    """The paths of the sections that are on nvme, or of both when gradients or activations are; by
    key, where there are any."""
    in_use = (
        (key, s.nvme_path)
        for key, s in _sections(zero)
        if is_open or OffloadDevice.nvme in (s.device, own.grads, own.activations)
    )
    return {key: paths for key, paths in in_use if paths}


def _sections(
    zero: ZeroConfig,
) -> Iterator[tuple[str, OffloadParamConfig | OffloadOptimizerConfig]]:
    """Both offload sections that are there, each with the key of its paths."""
    for name, section in (
        ("offload_param", zero.offload_param),
        ("offload_optimizer", zero.offload_optimizer),
    ):
        if section is not None:
            yield f"zero_optimization.{name}.nvme_path", section


def _places(paths: Sequence[PathConfig]) -> set[str]:
    return {os.path.abspath(each.path) for each in paths}


def _folders(paths: Sequence[PathConfig]) -> str:
    return ", ".join(str(value.path) for value in united(paths))


def io_of(aio: AioConfig, own: OwnConfig) -> IoSettings:
    """Builds the queue's settings; raises ValueError for a block size or depth that the queue does
    not take."""
    depth = aio.depth or IoSettings.depth
    threads = aio.threads or 0
    given = IoSettings(
        own.engine, aio.block_size, depth, threads, aio.single_submit, aio.overlap_events
    )
    if own.measured is not None or not own.takes_more:
        return given
    larger = max(given.block_bytes, IoSettings.block_bytes)
    return dataclasses.replace(given, block_bytes=larger, depth=max(depth, IoSettings.depth))


def least_keys(config: ConfigModel, aio: AioConfig, own: OwnConfig) -> list[str]:
    """The keys with small numbers, of which more is taken where memory allows; unless the config
    says no."""
    if not own.takes_more:
        return []
    fields = fields_of(config)
    io = io_of(aio, own)
    found = []
    pipelines = fields.get("pipeline_read", True), fields.get("pipeline_write", True)
    usual = {
        "tile_buffers": usual_tile_buffers(*pipelines)[0],
        "tile_numel": USUAL_TILE_NUMELS[0],
        "unit_buffers": 1 + USUAL_UNITS_AHEAD,
        "block_size": io.block_bytes,
        "queue_depth": io.depth // (aio.threads or 1),
    }
    for section, name, key, value in _leaves(config):
        what, given = name, value
        if key in SET_BY:
            what = SET_BY[key].field
            given = fields.get(what)
        if section.is_set(name) and given is not None and what in usual and given < usual[what]:
            found.append(key)
    return found


def report_of(config: ConfigModel, auto_keys: frozenset[str], uses_nvme: bool) -> list[ReportRow]:
    """Lists every key of every section, in the order of the models."""
    rows = []
    for model, name, key, value in _leaves(config):
        is_set = model.is_set(name)
        note = (
            COMPUTED.get(key)
            or _matters_elsewhere(
                model, name, is_set and f"{key.rpartition('.')[0]}.device" not in auto_keys
            )
            or ("" if is_set else PLANNED.get(key, ""))
        )
        if key == "tiermem.paths" and is_set and not uses_nvme:
            note = "matters with device nvme; no device is"
        if key in auto_keys:
            is_home = key in map(KEY_OF.get, LEAST_STAGES)
            if is_home or is_set:
                note = (
                    "the fastest that the free memory holds" if is_home else "from the hidden size"
                )
            note = f"auto: {note or 'the default'}"
            value = value if is_set else "auto"
        how: Literal["honoured", "computed", "default"] = "honoured" if is_set else "default"
        rows.append(ReportRow(key, value, "computed" if note else how, note, is_set))
    return rows


def shared_by_ranks(config: ConfigModel) -> dict[str, Any]:
    """Keys that have to be the same on every rank, with their values: all but those about folders,
    queues and printing."""
    return {
        key: value
        for _, _, key, value in _leaves(config)
        if key.rpartition(".")[2] not in _OF_A_RANK
        and key.partition(".")[0] not in _OF_A_RANK_AT_TOP
    }


def _leaves(model: ConfigModel, prefix: str = "") -> Iterator[tuple[ConfigModel, str, str, Any]]:
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
    device = _device_of(model)
    if is_set and name in _ONLY_ON_NVME and device is not OffloadDevice.nvme:
        return f"matters with device nvme; device is {device.value}"
    if is_set and name == "cpu_offload_use_pin_memory":
        return "matters with cpu_offload or cpu_offload_param, and neither is on"
    if (
        is_set
        and model.section in _SWITCHED
        and name != "enabled"
        and not getattr(model, "enabled", True)
    ):
        return f"matters with {model.section}.enabled"
    return ""
