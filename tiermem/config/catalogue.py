"""Catalogue: every key of every section, with its kind, default and fate, read off the models themselves.

    models (type, default, docstring) + keys.py (refused, computed, planned) --> Section(title, Key, Key, ...)

`page.py` prints it, and a test asks of each key that something shows what it says. Nothing here knows a key by name.
"""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pydantic
from pydantic.fields import FieldInfo

from tiermem.config.aio import AioConfig
from tiermem.config.autocast import AutocastConfig
from tiermem.config.base import Bytes, ConfigModel, canonical_key
from tiermem.config.checkpoint import CheckpointConfig
from tiermem.config.keys import COMPUTED, PLANNED, REFUSED, is_recognised_only
from tiermem.config.offload import OffloadOptimizerConfig, OffloadParamConfig
from tiermem.config.optimizer import (
    AdagradParams,
    AdamParams,
    LionParams,
    MuonParams,
    OptimizerConfig,
    SgdParams,
)
from tiermem.config.own import OwnConfig
from tiermem.config.paths import PathConfig
from tiermem.config.precision import Bf16Config, DataTypesConfig, Fp16Config, PrecisionConfig
from tiermem.config.root import TiermemConfig
from tiermem.config.scheduler import SchedulerConfig
from tiermem.config.zero import LeafModuleConfig, ZeroConfig
from tiermem.schedule import DOCUMENTED, arguments_of

__all__ = ["Fate", "Key", "Section", "catalogue", "every_model", "kind_of"]

Fate = Literal["honoured", "planned", "computed", "inert", "refused", "deprecated"]


class Key(NamedTuple):
    """One key, as a row of the page."""

    path: str
    """Dotted, from the top of the config, in the documented spelling."""
    kind: str
    """The values that it takes, in words."""
    default: str
    """As JSON; with commas in large numbers."""
    fate: Fate
    """honoured: acts as set. planned: acts as set, computed when not. computed: any value is taken, the design decides.
    inert: does nothing, with a warning. refused: any value but the default is an error. deprecated: becomes its successor, with
    a warning."""
    asks: str
    """What the key asks for."""
    note: str
    """What happens instead, or when it is not set; empty for a key that is simply honoured."""
    spellings: tuple[str, ...] = ()
    """Other names of the same key."""


class Section(NamedTuple):
    """The keys of one object of the config."""

    path: str
    title: str
    intro: str
    keys: tuple[Key, ...]


_MODELS: tuple[tuple[str, type[ConfigModel]], ...] = (
    ("The top of the config", TiermemConfig),
    ("zero_optimization", ZeroConfig),
    ("zero_optimization.offload_param", OffloadParamConfig),
    ("zero_optimization.offload_optimizer", OffloadOptimizerConfig),
    ("zero_optimization.leaf_module", LeafModuleConfig),
    ("bf16", Bf16Config),
    ("fp16", Fp16Config),
    ("data_types", DataTypesConfig),
    ("torch_autocast", AutocastConfig),
    ("checkpoint", CheckpointConfig),
    ("aio", AioConfig),
    ("optimizer", OptimizerConfig),
    ("optimizer.params of Adam and AdamW", AdamParams),
    ("optimizer.params of Adagrad", AdagradParams),
    ("optimizer.params of Lion", LionParams),
    ("optimizer.params of SGD", SgdParams),
    ("optimizer.params of Muon", MuonParams),
    ("scheduler", SchedulerConfig),
    ("tiermem", OwnConfig),
    ("tiermem.paths, each", PathConfig),
    ("tiermem.precision", PrecisionConfig),
)
_MARK_OF_DEPRECATED = "Deprecated: "
_MARK_OF_PLANNED = " Not set: planned."


def catalogue() -> list[Section]:
    """Every section of a config, documented ones first, then the parameters of schedules and what is only recognised."""
    sections = [_section_of(title, model) for title, model in _MODELS]
    after_scheduler = 1 + [model for _, model in _MODELS].index(SchedulerConfig)
    sections[after_scheduler:after_scheduler] = [_schedule(name) for name in DOCUMENTED]
    return [*sections, _recognised()]


def every_model() -> list[type[ConfigModel]]:
    """The models that the catalogue shows."""
    return [model for _, model in _MODELS]


def _section_of(title: str, model: type[ConfigModel]) -> Section:
    keys = tuple(_key(model, name, field) for name, field in model.model_fields.items())
    doc = " ".join((inspect.getdoc(model) or "").partition("\n\n")[0].split())
    return Section(model.section, title, doc.partition(": ")[2], keys)


def _key(model: type[ConfigModel], name: str, field: FieldInfo) -> Key:
    path = model.path_of(name)
    fate, note = _fate(path, field)
    asks = " ".join((field.description or "").split())
    if fate in ("computed", "refused"):
        asks = (
            asks.partition("; ")[0].rstrip(".") + "."
        )  # what follows says what becomes of it here, and so does the note
    return Key(
        path,
        kind_of(field.annotation, field.metadata),
        _written(field.get_default(call_default_factory=True)),
        fate,
        asks.removeprefix(_MARK_OF_DEPRECATED).removesuffix(_MARK_OF_PLANNED),
        note,
        _other_spellings(model, name, field),
    )


def _fate(path: str, field: FieldInfo) -> tuple[Fate, str]:
    if (field.description or "").startswith(_MARK_OF_DEPRECATED):
        return "deprecated", "taken with a warning; an error beside its successor"
    if path in REFUSED:
        return "refused", REFUSED[path].reason
    if path in COMPUTED:
        return "computed", COMPUTED[path]
    if path in PLANNED:
        return "planned", PLANNED[path]
    return "honoured", ""


def _other_spellings(model: type[ConfigModel], name: str, field: FieldInfo) -> tuple[str, ...]:
    aliases = field.validation_alias
    choices = aliases.choices if isinstance(aliases, pydantic.AliasChoices) else [aliases]
    names = dict.fromkeys([*(str(each) for each in choices if isinstance(each, str)), name])
    return tuple(each for each in names if each != canonical_key(model, name))


def _schedule(name: str) -> Section:
    keys = tuple(
        Key(
            f"scheduler.params.{key}",
            _kind_of_argument(given),
            "needed" if given.default is given.empty else _written(given.default),
            "honoured",
            "",
            "",
        )
        for key, given in arguments_of(DOCUMENTED[name]).items()
    )
    doc = " ".join((inspect.getdoc(DOCUMENTED[name]) or "").split())
    return Section("scheduler.params", f"scheduler.params of {name}", doc.replace("`", "'"), keys)


def _recognised() -> Section:
    keys = tuple(
        Key(
            path,
            "",
            "null" if refusal.off is None else _written(refusal.off),
            "inert" if refusal.is_inert else "refused",
            "",
            refusal.reason,
        )
        for path, refusal in REFUSED.items()
        if is_recognised_only(path, TiermemConfig.model_fields)
    )
    intro = 'accepted where they ask for nothing (false, null, {}, {"enabled": false}, or the default), else inert or refused.'
    return Section("", "Sections and switches that are only recognised", intro, keys)


def kind_of(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values of a type in words: `Annotated[int, Field(ge=0)] | None` is "whole number, 0 or more"."""
    if annotation == Bytes or typing.get_args(Bytes)[1] in metadata:
        return 'bytes, or a size such as "2GiB"'
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind_of(inner[0], [*inner[1:], *metadata])
    if origin in (typing.Union, types.UnionType):
        kinds = dict.fromkeys(kind_of(each, metadata) for each in inner if each is not type(None))
        return " or ".join(kinds)
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin is tuple:
        return _kind_of_tuple(inner)
    if origin is list:
        return f"list of {kind_of(inner[0])}"
    if origin is dict:
        return "object"
    return _kind_of_class(annotation) + _bounds(metadata)


def _kind_of_tuple(inner: tuple[Any, ...]) -> str:
    if inner[0] is PathConfig:
        return "folder, or a list of folders"
    if inner[-1] is Ellipsis:
        return f"list of {kind_of(inner[0])}"
    return f"list of {len(inner)}: {kind_of(inner[0])}"


def _kind_of_class(cls: Any) -> str:
    if cls is Any:
        return "anything"
    if issubclass(cls, enum.Enum):
        return ", ".join(str(member.value) for member in cls)
    if issubclass(cls, pydantic.BaseModel):
        return "object"
    return {bool: "boolean", int: "whole number", float: "number", str: "text", Path: "folder"}[cls]


def _kind_of_argument(given: inspect.Parameter) -> str:
    """The kind of a schedule's argument, from its annotation as it is written."""
    written = str(given.annotation).partition(" | ")
    kind = {"int": "whole number", "float": "number", "bool": "boolean", "str": "log, linear"}[written[0]]
    return f"{kind}, or a list of one per group" if "Sequence" in written[2] else kind


def _bounds(metadata: Sequence[Any]) -> str:
    said = dict(_limits(metadata))
    low = f"{said['ge']:g} or more" if "ge" in said else f"more than {said['gt']:g}" if "gt" in said else ""
    high = ""
    if "le" in said:
        high = f"at most {said['le']:,}" if isinstance(said["le"], int) else f"at most {said['le']:g}"
    elif "lt" in said:
        high = f"less than {said['lt']:g}"
    return "".join(f", {each}" for each in (low, high) if each)


def _limits(metadata: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Bounds of a type, outermost last, so that the tightest is kept."""
    for each in metadata:
        if isinstance(each, FieldInfo):
            yield from _limits(each.metadata)
        for name in ("ge", "gt", "le", "lt"):
            if getattr(each, name, None) is not None:
                yield name, getattr(each, name)


def _written(value: Any) -> str:
    """A default as JSON would have it, with commas in large numbers."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, pydantic.BaseModel) or value == {}:
        return "{}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}" if value != int(value) else f"{value:.1f}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}": {_written(inner)}' for key, inner in value.items()) + "}"
    return f'"{value}"' if str(value) != str(FieldInfo(annotation=str).get_default()) else "needed"
