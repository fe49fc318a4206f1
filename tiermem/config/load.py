"""load_config reads a config from a dict, a file or JSON text; with_tuned adds the result of
`tiermem tune` to one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from tiermem.config.root import TiermemConfig
from tiermem.keys import INERT, given_twice, is_auto, is_comment, is_off
from tiermem.section import ConfigError, Problem, problems_of

# ---- load_config and resolve_auto ----------------------------------------------------------------

Given = Mapping[str, Any] | str | os.PathLike[str]
"""A config as users give it: a mapping, the path of a JSON file, or JSON text."""


def load_config(config: Given | TiermemConfig) -> TiermemConfig:
    """Reads and checks a config: a mapping, the path of a JSON file, JSON text (starting with `{`),
    or a TiermemConfig.

        given --read--> dict (no key twice) --drop comments--> --note "auto"--> --validate-->
        TiermemConfig, or ConfigError

    A comment is a key that begins with `_` or `//`, in any object. ConfigError has every problem.

    HJSON (comments, no quotes) is read if the package `hjson` is installed. Raises ConfigError (a
    ValueError) that lists every problem; OSError when the file cannot be read. It never changes the
    given value.
    """
    if isinstance(config, TiermemConfig):
        return config
    raw, source = read_raw(config)
    raw = _without_comments(raw)
    try:
        read = TiermemConfig.model_validate(raw)
    except pydantic.ValidationError as error:
        raise ConfigError([*problems_of(error, TiermemConfig)], source) from None
    read._auto_keys = frozenset(_auto_paths(raw, ""))
    read._inert = {key: raw[key] for key in INERT if not is_off(raw.get(key), None)}
    return read


def resolve_auto(config: TiermemConfig, hidden_size: int) -> TiermemConfig:
    """Returns the config with three "auto" sizes computed from the hidden size h, as Hugging Face's
    integration does.

    reduce_bucket_size becomes h * h, stage3_prefetch_bucket_size 0.9 * h * h (rounded down) and
    stage3_param_persistence_threshold 10 * h, all in elements. Keys with a value and absent keys do
    not change. Raises ValueError for a hidden size below 1.
    """
    if hidden_size < 1:
        raise ValueError(f"hidden_size is {hidden_size}; it must be at least 1")
    zero = config.zero_optimization
    computed = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "prefetch_bucket_size": 9 * hidden_size * hidden_size // 10,
        "param_persistence_threshold": 10 * hidden_size,
    }
    auto = {
        name: value for name, value in computed.items() if zero.path_of(name) in config.auto_keys
    }
    return (
        config.model_copy(update={"zero_optimization": zero.model_copy(update=auto)})
        if auto
        else config
    )


def read_raw(given: Given) -> tuple[dict[str, Any], str]:
    """A mapping, or a JSON text or file, as a dict, and where it comes from. Raises ConfigError and
    OSError."""
    if isinstance(given, Mapping):
        return dict(given), "the config"
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigError(
            [Problem("", f"a {type(given).__name__} given; allowed is a dict, a path or JSON text")]
        )
    if is_json(given):
        return _parsed(str(given), "the config text"), "the config text"
    source = os.fspath(given)
    try:
        text = Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("", f"not UTF-8 text: {error}")], source) from None
    return _parsed(text, source), source


@contextlib.contextmanager
def named_in_errors(source: str) -> Iterator[None]:
    """A block whose ConfigErrors name the file of a config, where the block has only what was read
    from it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.problems, source) from error.__cause__


def is_json(given: str | os.PathLike[str]) -> bool:
    """Whether a config is JSON text rather than a path."""
    return isinstance(given, str) and given.lstrip().startswith("{")


def _without_comments(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_comments(inner) for key, inner in value.items() if not is_comment(key)
        }
    return [_without_comments(each) for each in value] if isinstance(value, list) else value


def _auto_paths(raw: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _auto_paths(value, f"{prefix}{key}.")
        elif is_auto(value):
            yield f"{prefix}{key}"


def _parsed(text: str, source: str) -> dict[str, Any]:
    repeated: list[str] = []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.extend(given_twice(pairs))
        return dict(pairs)

    try:
        raw = json.loads(text, object_pairs_hook=noted)
    except json.JSONDecodeError as error:
        repeated.clear()
        raw = _parsed_as_hjson(text, source, error, noted)
    except RecursionError:
        raise ConfigError([Problem("", "not JSON: it is nested too deeply")], source) from None
    if repeated:
        raise ConfigError(
            [Problem(key, "appears twice in one object; keep one of them") for key in repeated],
            source,
        )
    if not isinstance(raw, dict):
        raise ConfigError(
            [Problem("", f"a JSON {type(raw).__name__} given; allowed is an object")], source
        )
    return raw


def _parsed_as_hjson(
    text: str, source: str, first: json.JSONDecodeError, noted: Callable[..., dict[str, Any]]
) -> Any:
    """What a text that is not JSON says as HJSON; raises ConfigError where it is not, or nothing
    here reads that."""
    where = f"not JSON at line {first.lineno}, column {first.colno}: {first.msg}"
    try:
        import hjson  # optional
    except ImportError:
        raise ConfigError(
            [Problem("", f"{where} (to read HJSON: pip install hjson)")], source
        ) from None
    try:
        return hjson.loads(text, object_pairs_hook=noted)
    except hjson.HjsonDecodeError as error:
        where += f"; nor HJSON at line {error.lineno}, column {error.colno}: {error.msg}"
        raise ConfigError([Problem("", where)], source) from None


# ---- with_tuned ----------------------------------------------------------------------------------

_KEYS = {"aio", "tiermem"}
_OWN_KEYS = {"engine", "paths", "measured"}


def with_tuned(config: Given, tuned: Given) -> dict[str, Any]:
    """Returns the config with the sections that `tiermem tune` wrote; both are mappings or JSON
    files and do not change.

        {"aio": {...}, "tiermem": {"engine": ..., "paths": [...], "measured": {...}}}     the tuned file
          |             |
          |             each key replaces the config's key; the config's other keys stay
          replaces the config's whole section

    The tuned file is itself a config: `load_config` reads it, and DeepSpeed understands its `aio`
    section. `load_config` checks the values of the result, not this function. Raises OSError;
    ValueError for a file that is no JSON object or has keys that `tiermem tune` does not write.
    """
    (merged, _), (found, source) = read = read_raw(config), read_raw(tuned)
    for content, where in read:
        for key in _KEYS:
            if not isinstance(content.get(key, {}), Mapping):
                raise ValueError(f"{key} of {where} is no object of keys")
    foreign = sorted(set(found) - _KEYS) + sorted(
        f"tiermem.{key}" for key in set(found.get("tiermem", {})) - _OWN_KEYS
    )
    if foreign:
        raise ValueError(
            f"{source} holds {', '.join(foreign)}, which `tiermem tune` does not write; is it the "
            "right file?"
        )
    if "aio" in found:
        merged["aio"] = dict(found["aio"])
    if "tiermem" in found:
        merged["tiermem"] = {**merged.get("tiermem", {}), **found["tiermem"]}
    return merged
