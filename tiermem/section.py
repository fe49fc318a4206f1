"""ConfigModel, the base class of all sections of a config; the types of their numbers and dtypes;
which key sets which field of the policy; ConfigError."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import pydantic
import torch
from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo

from tiermem.keys import RECOGNISED, REFUSED, is_auto
from tiermem.policy import CombinedError, Key, OffloadPolicy
from tiermem.precision import marks_of

# ---- ConfigError ---------------------------------------------------------------------------------

_SHOWN_CHARACTERS = 80


class Problem(NamedTuple):
    """One problem of a config: the key and a sentence."""

    path: str
    """Dotted path of the key, from the top of the config; empty for a problem of the whole
    config."""
    message: str
    """What was given, what is allowed, what to change."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """A config that cannot be used. `problems` lists all its problems; the message prints one on
    each line."""

    def __init__(self, problems: Sequence[Problem], source: str = "the config") -> None:
        self.problems = tuple(problems)
        self.source = source
        lines = "".join(f"\n  {problem}" for problem in problems)
        several = f"{len(problems)} problems in {source}:{lines}"
        super().__init__(f"{source}: {problems[0]}" if len(problems) == 1 else several)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.source), self.__dict__


Problems = Iterable[tuple[str, str]]
"""What is wrong: (key relative to a section, sentence) each."""


def problems_of(
    error: pydantic.ValidationError, root: type[pydantic.BaseModel]
) -> Iterator[Problem]:
    """Yields pydantic's findings as problems with paths from `root`; for an unknown key it names
    the nearest known key."""
    for detail in error.errors():
        parts = [str(part) for part in detail["loc"]]
        path = ".".join(parts)
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, CombinedError):
            yield from (
                Problem(".".join(filter(None, (path, key))), message)
                for key, message in cause.found
            )
        elif isinstance(cause, ValueError):
            yield Problem(path, str(cause))
        elif detail["type"] == "extra_forbidden":
            yield Problem(path, _unknown_key(path, parts, root))
        elif detail["type"] == "missing":
            yield Problem(path, "is missing and has no default")
        else:
            yield Problem(path, f"{_shown(detail['input'])} given; {_allowed(detail)}")


_MEANT = {
    **dict.fromkeys(("gpu", "accelerator"), ("device", "none")),
    **dict.fromkeys(("disk", "ssd", "drive"), ("nvme",)),
    **dict.fromkeys(("ram", "host", "memory", "dram"), ("cpu",)),
}
"""Other words for homes, with those that a key may take."""


def _allowed(detail: Any) -> str:
    message = str(detail["msg"])
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return 'allowed is an object of keys, like {"key": value}'
    if detail["type"] == "int_from_float":
        return f"allowed is a whole number, such as {math.ceil(detail['input'])}"
    if "expected" in detail.get("ctx", {}) and isinstance(word := detail["input"], str):
        known = re.findall(r"'(\w+)'", detail["ctx"]["expected"])
        meant = next((each for each in _MEANT.get(word.lower(), ()) if each in known), word)
        message += did_you_mean(meant, known)
    message = re.sub("^Input should be (greater|less)", r"allowed is a value \1", message)
    return message.replace("Input should be", "allowed is", 1)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _unknown_key(path: str, parts: Sequence[str], root: type[pydantic.BaseModel]) -> str:
    if path in REFUSED:
        return f"set, but {REFUSED[path]}"
    known = known_paths(root)
    # a number is a place in a list of sections
    *section, key = (part for part in parts if not part.isdigit())
    prefix = known.get(".".join(section), ".".join(section))
    same = known.get(".".join([*section, key]))
    if same is not None:
        return f"given together with another spelling of {same}; keep one of them"
    nearest = _nearest(key, prefix, list(dict.fromkeys(known.values())))
    return (
        f"unknown key; did you mean {nearest}?"
        if nearest
        else "unknown key, and none known is like it; remove it"
    )


def _nearest(key: str, prefix: str, known: Sequence[str]) -> str | None:
    """A sibling that is spelled alike; else the same name, or one like it, elsewhere in the
    config."""
    siblings = {p.rpartition(".")[2]: p for p in known if p.rpartition(".")[0] == prefix}
    anywhere = {p.rpartition(".")[2]: p for p in reversed(known)}
    for paths, cutoff in ((siblings, 0.7), (anywhere, 0.75), (siblings, 0.55)):
        if close := difflib.get_close_matches(key, paths, n=1, cutoff=cutoff):
            return paths[close[0]]
    return None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause that names the nearest known word, in any case; empty where none is like it."""
    words = {each.lower(): each for each in known}
    close = difflib.get_close_matches(word.lower(), words, n=1)
    return f"; did you mean {words[close[0]]}?" if close else ""


def known_paths(model: type[pydantic.BaseModel]) -> dict[str, str]:
    """Every key below a model in each of its spellings, as a dotted path, with its documented
    path."""
    return {**dict(_paths_in(model, "", "")), **{key: key for key in RECOGNISED}}


def _paths_in(
    model: type[pydantic.BaseModel], spelt: str, documented: str
) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        path = documented + canonical_key(model, name)
        for key in spellings(model, name):
            yield spelt + key, path
            for inner in _types_in(field.annotation):
                if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
                    yield from _paths_in(inner, f"{spelt}{key}.", f"{path}.")


def _types_in(annotation: Any) -> Iterator[Any]:
    """The types that an annotation holds, through unions, containers and Annotated; a Literal is
    one."""
    inner = () if typing.get_origin(annotation) is Literal else typing.get_args(annotation)
    if not inner:
        yield annotation
    for each in inner:
        yield from _types_in(each)


# ---- fields of the policy and their keys ---------------------------------------------------------


class SetField(NamedTuple):
    """What a key sets in the policy."""

    field: str
    key: Key


def _keys_of_fields() -> Iterator[SetField]:
    marks = marks_of(OffloadPolicy, Key)
    named = {field for field, _ in marks}
    yield from (SetField(field, key) for field, key in marks)
    for field in dataclasses.fields(OffloadPolicy):
        if field.name not in named:
            yield SetField(field.name, Key(f"tiermem.{field.name}"))


SET_BY: Mapping[str, SetField] = {setting.key.path: setting for setting in _keys_of_fields()}
"""What each key of a config sets, by its dotted path."""
KEY_OF: Mapping[str, str] = {field: path for path, (field, _) in [*SET_BY.items()][::-1]}
"""The key that sets each field of the policy: of several the one that its annotation names first."""


# ---- sections and their numbers ------------------------------------------------------------------
#
# Numbers refuse booleans (`true` is no count) and accept whole floats (`5e8` and `"5e8"` are
# counts). Where a key takes one of several words, their case does not matter.

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_FLOAT = re.compile(r"\s*[+-]?\d+(\.\d*)?e[+-]?\d+\s*", re.IGNORECASE)
_SIZE_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class ConfigModel(pydantic.BaseModel):
    """A section of the config.

        raw section --drop "auto"--> known keys only --type and range--> refused keys --cross
        checks--> frozen model

    A section refuses unknown keys and is frozen. It treats a key with the value "auto" as absent.
    It refuses a key whose effect tiermem does not have (`keys.py`), unless the value is the
    documented default. It reports its problems together.

    Building a section directly raises pydantic's ValidationError, which is a ValueError.
    `load_config` raises ConfigError with paths and suggestions.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        allow_inf_nan=False,
    )

    section: ClassVar[str] = ""
    """Dotted path of this section in the config; empty for the top."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_auto(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return {key: value for key, value in raw.items() if not is_auto(value)}

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _know_words_in_any_case(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str) or info.field_name is None:
            return value
        words = {
            word.lower(): word for word in _words_of(cls.model_fields[info.field_name].annotation)
        }
        return words.get(value.lower(), value)

    @pydantic.field_validator("*", mode="after")
    @classmethod
    def _refuse_what_does_not_exist(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        reason = REFUSED.get(cls.path_of(info.field_name))
        if reason is not None and value != cls.model_fields[info.field_name].get_default(
            call_default_factory=True
        ):
            raise ValueError(f"{value!r} given, but {reason}")
        return value

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> ConfigModel:
        if found := list(self.contradictions()):
            raise CombinedError(found)
        return self

    def contradictions(self) -> Problems:
        """What is wrong with the keys taken together."""
        return ()

    def is_set(self, name: str) -> bool:
        """Whether the user gave the field a value ("auto" is none)."""
        return name in self.model_fields_set

    @classmethod
    def path_of(cls, name: str) -> str:
        """Dotted path of a field from the top of the config, by its documented key."""
        key = canonical_key(cls, name)
        return f"{cls.section}.{key}" if cls.section else key


def canonical_key(model: type[pydantic.BaseModel], name: str) -> str:
    """The documented key of a field: its alias where it has one (`stage3_prefetch_bucket_size`),
    else its name."""
    return spellings(model, name)[0]


@functools.cache
def spellings(model: type[pydantic.BaseModel], name: str) -> tuple[str, ...]:
    """The keys that set a field, the documented one first."""
    alias = model.model_fields[name].validation_alias
    choices = alias.choices if isinstance(alias, pydantic.AliasChoices) else [alias]
    return tuple(dict.fromkeys([*(each for each in choices if isinstance(each, str)), name]))


def _words_of(annotation: Any) -> Iterator[str]:
    """The words that a value may be: those of a Literal or an enum, inside unions, too."""
    for each in _types_in(annotation):
        if isinstance(each, type) and issubclass(each, str) and issubclass(each, enum.Enum):
            yield from (member.value for member in each)
        elif typing.get_origin(each) is Literal:
            yield from (word for word in typing.get_args(each) if isinstance(word, str))


def _no_bool(value: Any) -> Any:
    """The value, unless it is a boolean; text such as "5e8", which YAML makes of 5e8, as its
    number."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} given; allowed is a number, not a boolean")
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


def _parse_size(value: Any) -> Any:
    if not isinstance(value, str):
        return _no_bool(value)
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(
            f'{value!r} given; allowed is a number of bytes, or a size such as "512MiB", "2GiB" or '
            '"2GB"'
        )
    number, power, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** _SIZE_POWERS[power.upper()]
    if size != int(size):
        raise ValueError(
            f"{value!r} given, which is {size} bytes; allowed is a whole number of bytes"
        )
    return int(size)


Whole = Annotated[int, BeforeValidator(_no_bool)]
"""A whole number; a float without a fraction counts as one."""

Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
"""A whole number, 0 or more."""

PositiveCount = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
"""A whole number, 1 or more."""

Number = Annotated[float, BeforeValidator(_no_bool), Field(ge=0.0)]
"""A finite number, 0 or more."""

Bytes = Annotated[int, BeforeValidator(_parse_size), Field(ge=0)]
"""A size: bytes as a number, or a string with a unit ("2GiB" is 2 * 1024**3, "2GB" is 2 *
1000**3)."""


# ---- dtypes --------------------------------------------------------------------------------------
#
# Every spelling of DeepSpeed is accepted and becomes the short one:
#
#     fp32    fp32, float32, float, torch.float32
#     bf16    bf16, bfloat16, torch.bfloat16
#     fp16    fp16, float16, half, torch.float16

_SPELLINGS = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}


def _short_name(value: Any) -> Any:
    """Returns the short name of a spelling or a torch.dtype, and any other value unchanged;
    pydantic checks it then."""
    if not isinstance(value, (str, torch.dtype)):
        return value
    name = str(value).lower().removeprefix("torch.")
    return _SPELLINGS.get(name, name)


DtypeName = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_short_name)]
"""fp32, bf16 or fp16, in any of its spellings."""
