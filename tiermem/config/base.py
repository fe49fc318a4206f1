"""ConfigModel: what every section of a config has in common, and the kinds of number that keys hold.

    raw section --drop "auto"--> known keys only --type and range--> refused keys --cross checks--> frozen model

A section forbids unknown keys, is frozen once built, treats the string "auto" as if the key were absent, and refuses a
key whose effect does not exist (`keys.py`) unless its value is the documented default. Problems of one section are
found together. Numbers are strict about booleans (`true` is no count) and kind about whole floats (`5e8` is a count, and
so is `"5e8"`). Where a key takes one of several words, their case does not matter.
"""

from __future__ import annotations

import enum
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo

from tiermem.config.keys import REFUSED, is_auto

__all__ = [
    "Bytes",
    "CombinedError",
    "ConfigModel",
    "Count",
    "Number",
    "PositiveCount",
    "Whole",
    "canonical_key",
]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_FLOAT = re.compile(r"\s*[+-]?\d+(\.\d*)?e[+-]?\d+\s*", re.IGNORECASE)
_SIZE_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class CombinedError(ValueError):
    """Several problems of one section, each a key (relative to the section) and a sentence."""

    def __init__(self, found: Sequence[tuple[str, str]]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(f"{key}: {message}" if key else message for key, message in found))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.found,), self.__dict__


class ConfigModel(pydantic.BaseModel):
    """A section of the config.

    Building one directly raises pydantic's ValidationError, which is a ValueError; `load_config` raises ConfigError
    with paths and suggestions.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False, use_attribute_docstrings=True
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
        words = {word.lower(): word for word in _words_of(cls.model_fields[info.field_name].annotation)}
        return words.get(value.lower(), value)

    @pydantic.field_validator("*", mode="after")
    @classmethod
    def _refuse_what_does_not_exist(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        refusal = REFUSED.get(cls.path_of(info.field_name))
        default = cls.model_fields[info.field_name].get_default(call_default_factory=True)
        if refusal is not None and value != default:
            raise ValueError(f"{value!r} given, but {refusal.reason}")
        return value

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> ConfigModel:
        found = self.contradictions()
        if found:
            raise CombinedError(found)
        return self

    def contradictions(self) -> list[tuple[str, str]]:
        """What is wrong with the keys taken together: (key relative to this section, sentence) each."""
        return []

    def is_set(self, name: str) -> bool:
        """Whether the user gave the field a value ("auto" is none)."""
        return name in self.model_fields_set

    @classmethod
    def path_of(cls, name: str) -> str:
        """Dotted path of a field from the top of the config, by its documented key."""
        key = canonical_key(cls, name)
        return f"{cls.section}.{key}" if cls.section else key


def canonical_key(model: type[pydantic.BaseModel], name: str) -> str:
    """The documented key of a field: its alias where it has one (`stage3_prefetch_bucket_size`), else its name."""
    alias = model.model_fields[name].validation_alias
    if isinstance(alias, pydantic.AliasChoices):
        alias = alias.choices[0]
    return alias if isinstance(alias, str) else name


def _words_of(annotation: Any) -> Iterator[str]:
    """The words that a value may be: those of a Literal or an enum, inside unions, too."""
    if isinstance(annotation, type) and issubclass(annotation, str) and issubclass(annotation, enum.Enum):
        yield from (member.value for member in annotation)
    elif typing.get_origin(annotation) is Literal:
        yield from (word for word in typing.get_args(annotation) if isinstance(word, str))
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for inner in typing.get_args(annotation):
            yield from _words_of(inner)


def _no_bool(value: Any) -> Any:
    """The value, unless it is a boolean; text such as "5e8", which YAML makes of 5e8, as its number."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} given; allowed is a number, not a boolean")
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


def _parse_size(value: Any) -> Any:
    if not isinstance(value, str):
        return _no_bool(value)
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f'{value!r} given; allowed is a number of bytes, or a size such as "512MiB", "2GiB" or "2GB"')
    number, power, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** _SIZE_POWERS[power.upper()]
    if size != int(size):
        raise ValueError(f"{value!r} given, which is {size} bytes; allowed is a whole number of bytes")
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
"""A size: bytes as a number, or a string with a unit ("2GiB" is 2 * 1024**3, "2GB" is 2 * 1000**3)."""
