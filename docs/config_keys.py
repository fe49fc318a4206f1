"""The page of keys, docs/keys.md, and the catalogue behind it: every key of a config with its kind,
default and fate.

    models (type, default, docstring) + keys.py (refused, computed, planned) --> Section(title, Key,
    Key, ...) --> page

    python docs/config_keys.py > docs/keys.md

A test makes the page again and compares, and asks of each key that something shows what its row
says. The text of a row is the field's docstring and what tiermem/keys.py says. This script
holds only the words around the tables, and where the sources that define a key disagree.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import inspect
import itertools
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import pydantic
from pydantic.fields import FieldInfo

from tiermem.config.io import AioConfig, OffloadOptimizerConfig, OffloadParamConfig, PathConfig
from tiermem.config.optimizer import OptimizerConfig, SchedulerConfig
from tiermem.config.own import OwnConfig
from tiermem.config.precision import (
    AutocastConfig,
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    PrecisionConfig,
)
from tiermem.config.root import TiermemConfig
from tiermem.config.zero import (
    ActivationConfig,
    CheckpointConfig,
    LeafModuleConfig,
    ZeroConfig,
)
from tiermem.keys import COMPUTED, INERT, OFF, PLANNED, RECOGNISED, REFUSED
from tiermem.optimizers import PARAMS
from tiermem.optimizers.base import OptimizerParams
from tiermem.policy import OffloadPolicy
from tiermem.schedule import DOCUMENTED, arguments_of
from tiermem.section import SET_BY, Bytes, ConfigModel, spellings

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
    """honoured: acts as set. planned: acts as set, computed when not. computed: any value is taken,
    the design decides. inert: does nothing, with a warning. refused: any value but the default is
    an error. deprecated: becomes its successor, with a warning."""
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


def _names_of(params: type[OptimizerParams]) -> list[str]:
    return sorted(name for name, each in PARAMS.items() if each is params)


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
    ("activation_checkpointing", ActivationConfig),
    ("checkpoint", CheckpointConfig),
    ("aio", AioConfig),
    ("optimizer", OptimizerConfig),
    *(
        (f"optimizer.params of {' and '.join(_names_of(params))}", params)
        for params in dict.fromkeys(PARAMS.values())
    ),
    ("scheduler", SchedulerConfig),
    ("tiermem", OwnConfig),
    ("tiermem.paths, each", PathConfig),
    ("tiermem.precision", PrecisionConfig),
)


def _docstrings_of(cls: type) -> dict[str, str]:
    """The docstrings of a class's attributes, by name."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    return {
        attribute.target.id: inspect.cleandoc(str(text.value.value))
        for attribute, text in itertools.pairwise(body.body)
        if isinstance(attribute, ast.AnnAssign)
        and isinstance(attribute.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _describe(model: type[ConfigModel]) -> None:
    """Gives the fields of a model their docstrings.

    Pydantic would when a module is imported, and read every source: a quarter of a second of each
    program's start.
    """
    for each in (base for base in reversed(model.__mro__) if issubclass(base, ConfigModel)):
        with contextlib.suppress(OSError):  # one that is made has no source
            for name, text in _docstrings_of(each).items():
                if name in model.model_fields:
                    model.model_fields[name].description = text


for _, _model in _MODELS:
    _describe(_model)
_POLICY_DOCS = _docstrings_of(OffloadPolicy)
_MARK_OF_DEPRECATED = "Deprecated: "
_MARK_OF_PLANNED = " Not set: planned."


def catalogue() -> list[Section]:
    """Every section of a config, documented ones first, then the parameters of schedules and what
    is only recognised."""
    sections = [_section_of(title, model) for title, model in _MODELS]
    after_scheduler = 1 + [model for _, model in _MODELS].index(SchedulerConfig)
    sections[after_scheduler:after_scheduler] = [_schedule(name) for name in DOCUMENTED]
    return [*sections, _recognised()]


def every_model() -> list[type[ConfigModel]]:
    """The models that the catalogue shows."""
    return [model for _, model in _MODELS]


def text_of(path: str, field: FieldInfo) -> str:
    """The docstring of a key, else that of the field of the policy that it sets."""
    return field.description or _POLICY_DOCS[SET_BY[path].field]


def _section_of(title: str, model: type[ConfigModel]) -> Section:
    keys = tuple(_key(model, name, field) for name, field in model.model_fields.items())
    doc = " ".join((inspect.getdoc(model) or "").partition("\n\n")[0].split())
    return Section(model.section, title, doc.partition(": ")[2], keys)


def _key(model: type[ConfigModel], name: str, field: FieldInfo) -> Key:
    path = model.path_of(name)
    fate, note = _fate(path, field)
    asks = " ".join(text_of(path, field).split())
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
        spellings(model, name)[1:],
    )


def _fate(path: str, field: FieldInfo) -> tuple[Fate, str]:
    if text_of(path, field).startswith(_MARK_OF_DEPRECATED):
        return "deprecated", "taken with a warning; an error beside its successor"
    if path in REFUSED:
        return "refused", REFUSED[path]
    if path in COMPUTED:
        return "computed", COMPUTED[path]
    if path in PLANNED:
        return "planned", PLANNED[path]
    return "honoured", ""


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
            _written(OFF.get(path)),
            "inert" if path in INERT else "refused",
            "",
            REFUSED[path],
        )
        for path in RECOGNISED
    )
    intro = (
        'accepted where they ask for nothing (false, null, {}, {"enabled": false}, or the '
        "default), else inert or refused."
    )
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
    kind = {"int": "whole number", "float": "number", "bool": "boolean", "str": "log, linear"}[
        written[0]
    ]
    return f"{kind}, or a list of one per group" if "Sequence" in written[2] else kind


def _bounds(metadata: Sequence[Any]) -> str:
    said = dict(_limits(metadata))
    low = (
        f"{said['ge']:g} or more"
        if "ge" in said
        else f"more than {said['gt']:g}"
        if "gt" in said
        else ""
    )
    high = ""
    if "le" in said:
        high = (
            f"at most {said['le']:,}" if isinstance(said["le"], int) else f"at most {said['le']:g}"
        )
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


# ---- the page ------------------------------------------------------------------------------------

_HEAD = """\
<!-- Made by `python docs/config_keys.py > docs/keys.md`. Do not edit it. -->

# Keys of a config

Every key that a DeepSpeed-style config may hold, with its default and what becomes of it here. No key is read and then
forgotten. The column "here" says which of these it is:

| here | meaning |
|---|---|
| honoured | acts as it is set, or as its default says |
| planned | acts as it is set; when it is not set, the plan computes the value instead of taking the documented default |
| computed | any value is accepted and none changes the result: the design decides, and the note says what happens |
| inert | accepted with one warning, since nothing of what is trained depends on it; an error with `tiermem.strict` |
| refused | any value but the default is an error that gives the reason in the note |
| deprecated | taken with a warning that names its successor; beside its successor it is an error |

Unknown keys are errors that name the nearest known key. `"auto"` is the same as leaving a key out;
of `device` it is the home with the fastest plan that the free memory holds. Numbers may be written as
`5e8` or `"5e8"`. Sizes that end in `_bytes` are bytes and take units ("2GiB", "2GB"); all other sizes are counts of elements.
`tiermem check --config FILE` says of a file what this page says of all keys, and `"dump_state": true` logs it at the start
of a run. The defaults are those of the documentation of ZeRO; where its sources disagree, the note says which was taken.
"""

DISAGREEMENTS: Mapping[str, str] = MappingProxyType(
    {
        "zero_optimization.offload_param.pin_memory": "The documentation says false, newer sources true. Taken: false as the "
        "default shown, and neither when it is not set.",
        "zero_optimization.offload_optimizer.pin_memory": "The documentation says false, newer sources true. Taken: false as "
        "the default shown, and neither when it is not set.",
        "zero_optimization.sub_group_size": "The class says 1e9, an example of the documentation 1e12. Taken: 1e9 as the "
        "default shown, and neither when it is not set.",
        "zero_optimization.overlap_comm": "null is documented; the sources make it true with stage 3 and false below. "
        "Taken: true.",
        "zero_optimization.stage3_allgather_sequential": "Proposed as stage3_allgather_single_param and merged under this "
        "name. Taken: both, and the one without a prefix.",
        "bf16.immediate_grad_update": "The section's class says false, a constant beside it true. Taken: false.",
        "bf16.check_grad_overflow": "The section's class says true, a constant beside it false. Taken: true.",
        "aio.intra_op_parallelism": "The documentation calls it thread_count, the tuner num_threads. Taken: all three.",
        "aio.overlap_events": "The section says true, the handle of the reference false. Taken: true.",
        "aio.queue_depth": "The section says 8, the handle of the reference 128. Taken: 8 as the default shown.",
    }
)
"""Where documentation and sources of the reference disagree, by key: what each says and what was
taken."""


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([_HEAD, *(line for section in catalogue() for line in _section(section))])


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n"
    if section.intro:
        yield f"{section.intro[0].upper()}{section.intro[1:]}\n"
    has_kinds = any(key.kind for key in section.keys)
    columns = (
        ["key", "values", "default", "here", "note"]
        if has_kinds
        else ["key", "default", "here", "note"]
    )
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for key in section.keys:
        cells = [
            f"`{_name(key, section)}`",
            *([key.kind] if has_kinds else []),
            f"`{key.default}`",
            key.fate,
            _note(key),
        ]
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
    yield ""


def _name(key: Key, section: Section) -> str:
    return key.path.removeprefix(f"{section.path}.") if section.path else key.path


def _note(key: Key) -> str:
    """What is asked for, what becomes of it, other spellings, and where sources disagree."""
    said = {
        "computed": f"Here: {key.note}.",
        "inert": f"Does nothing here: {key.note}.",
        "refused": f"Refused: {key.note}.",
        "planned": "" if "Not set:" in key.asks else f"Not set: {key.note}.",
        "deprecated": f"{_sentence(key.note)}",
        "honoured": "",
    }[key.fate]
    spelt = (
        f"Also spelt {' and '.join(f'`{each}`' for each in key.spellings)}."
        if key.spellings
        else ""
    )
    asks = f"Use {key.asks}" if key.fate == "deprecated" else key.asks
    parts = [_sentence(asks), said, spelt, DISAGREEMENTS.get(key.path, "")]
    return " ".join(part for part in parts if part)


def _sentence(text: str) -> str:
    """The text with a capital and a full stop; a name such as bf16 at its start stays as it is."""
    is_word = text.split(" ")[0].rstrip(",.").isalpha() and not text.startswith("Use ")
    return f"{text[0].upper() if is_word else text[0]}{text[1:].rstrip('.')}." if text else ""


if __name__ == "__main__":
    sys.stdout.write(page())
