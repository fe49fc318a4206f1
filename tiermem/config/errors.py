"""ConfigError: everything that is wrong with a config, said at once.

A problem is a dotted path into the config and one sentence that says what was given, what is allowed and what to
change. pydantic finds most of them; `problems_of` turns its findings into that form, and for a key that nobody knows it
names the nearest key that somebody does. Nothing here reads a file or knows what a key means.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pydantic

from tiermem.config.base import CombinedError, canonical_key
from tiermem.config.keys import REFUSED

__all__ = ["ConfigError", "Problem", "problems_of"]

_SHOWN_CHARACTERS = 80


class Problem(NamedTuple):
    """One thing that is wrong, and where."""

    path: str
    """Dotted path of the key, from the top of the config; empty when it is about the whole."""
    message: str
    """What was given, what is allowed, what to change."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """A config that cannot be used; `problems` lists every reason, and the message prints them, one on a line."""

    def __init__(self, problems: Sequence[Problem], source: str = "the config") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(self._text())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.source), self.__dict__

    def _text(self) -> str:
        if len(self.problems) == 1:
            return f"{self.source}: {self.problems[0]}"
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems in {self.source}:{lines}"


def problems_of(error: pydantic.ValidationError, root: type[pydantic.BaseModel]) -> list[Problem]:
    """Says each finding of pydantic in our words, with paths from `root`."""
    return [problem for detail in error.errors() for problem in _problems_of_detail(detail, root)]


def _problems_of_detail(detail: Any, root: type[pydantic.BaseModel]) -> Iterator[Problem]:
    parts = tuple(str(part) for part in detail["loc"])
    path = ".".join(parts)
    kind = detail["type"]
    if kind == "extra_forbidden":
        yield Problem(path, _unknown_key(path, parts, root))
    elif kind == "missing":
        yield Problem(path, "is missing and has no default")
    elif kind == "value_error":
        yield from _own_problems(path, detail)
    else:
        yield Problem(path, f"{_shown(detail['input'])} given; {_allowed(detail)}")


def _own_problems(path: str, detail: Any) -> Iterator[Problem]:
    cause = detail["ctx"]["error"]
    if isinstance(cause, CombinedError):
        for key, message in cause.found:
            yield Problem(".".join(part for part in (path, key) if part), message)
    else:
        yield Problem(path, str(cause))


def _allowed(detail: Any) -> str:
    message = str(detail["msg"])
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return 'allowed is an object of keys, like {"key": value}'
    if detail["type"] == "int_from_float":
        return f"allowed is a whole number, such as {math.ceil(detail['input'])}"
    message = message.replace("Input should be greater", "allowed is a value greater", 1)
    message = message.replace("Input should be less", "allowed is a value less", 1)
    return message.replace("Input should be", "allowed is", 1)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _unknown_key(path: str, parts: Sequence[str], root: type[pydantic.BaseModel]) -> str:
    if path in REFUSED:
        return f"set, but {REFUSED[path].reason}"
    prefix, section = _section_of(parts, root)
    same = _field_of(section, parts[-1]) if section is not None else None
    if same is not None:
        return f"given together with another spelling of {prefix}.{same[0]}; keep one of them"
    nearest = _nearest(parts[-1], prefix, list(_known_paths(root)))
    return f"unknown key; did you mean {nearest}?" if nearest else "unknown key, and none known is like it; remove it"


def _section_of(parts: Sequence[str], root: type[pydantic.BaseModel]) -> tuple[str, type[pydantic.BaseModel] | None]:
    """The section that holds a key: its path in documented names (`bf16` for `bfloat16`), and its model."""
    names: list[str] = []
    model: type[pydantic.BaseModel] | None = root
    for part in parts[:-1]:
        if part.isdigit():  # a place in a list: what it holds is the list's kind of section
            continue
        found = _field_of(model, part) if model is not None else None
        if found is None:
            return ".".join(parts[:-1]), None
        names.append(found[0])
        model = found[1]
    return ".".join(names), model


def _nearest(key: str, prefix: str, known: Sequence[str]) -> str | None:
    """A sibling that is spelled alike; else the same name, or one like it, elsewhere in the config."""
    siblings = {p.rpartition(".")[2]: p for p in known if p.rpartition(".")[0] == prefix}
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.7)
    if close:
        return siblings[close[0]]
    anywhere = {p.rpartition(".")[2]: p for p in reversed(known)}
    close = difflib.get_close_matches(key, anywhere, n=1, cutoff=0.75)
    if close:
        return anywhere[close[0]]
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.5)
    return siblings[close[0]] if close else None


def _known_paths(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = prefix + canonical_key(model, name)
        yield path
        for inner in _models_in(field.annotation):
            yield from _known_paths(inner, path + ".")
    if not prefix:
        yield from (key for key in REFUSED if "." not in key)


def _field_of(model: type[pydantic.BaseModel], key: str) -> tuple[str, type[pydantic.BaseModel] | None] | None:
    for name, field in model.model_fields.items():
        aliases = field.validation_alias
        spellings = aliases.choices if isinstance(aliases, pydantic.AliasChoices) else [aliases]
        if key == name or key in spellings:
            return canonical_key(model, name), next(_models_in(field.annotation), None)
    return None


def _models_in(annotation: object) -> Iterator[type[pydantic.BaseModel]]:
    """The models that an annotation holds, through Optional, Annotated and unions; none for plain values."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, pydantic.BaseModel):
            yield annotation
        return
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)
