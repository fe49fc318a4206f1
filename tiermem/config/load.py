"""load_config: the one door for configs, from a dict, a file or JSON text; and what `tiermem tune` found laid over one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from tiermem.config.base import ConfigError, Problem, problems_of
from tiermem.config.keys import is_auto
from tiermem.config.root import TiermemConfig

# ---- load_config: the one door for configs, from a dict, a file or JSON text -----------------------------------------
#
#     given --read--> dict (no key twice) --note "auto"--> --validate--> TiermemConfig, or ConfigError with every problem
#
# And `resolve_auto`, which computes the three "auto" keys that Hugging Face integrations compute from the hidden size.


def load_config(config: Mapping[str, Any] | str | os.PathLike[str] | TiermemConfig) -> TiermemConfig:
    """Reads and checks a config: a mapping, the path of a JSON file, JSON text (starting with `{`), or one read before.

    HJSON (comments, no quotes) is read where the package `hjson` is installed. Raises ConfigError (a ValueError)
    that lists every problem; OSError when the file cannot be read. Values are never changed in place.
    """
    if isinstance(config, TiermemConfig):
        return config
    if isinstance(config, Mapping):
        return _validated(dict(config), "the config")
    if not isinstance(config, (str, os.PathLike)):
        given = type(config).__name__
        raise ConfigError([Problem("", f"a {given} given; allowed is a dict, a path or JSON text")])
    if isinstance(config, str) and config.lstrip().startswith("{"):
        return _validated(_parsed(config, "the config text"), "the config text")
    source = os.fspath(config)
    return _validated(_parsed(Path(source).read_text(encoding="utf-8"), source), source)


def resolve_auto(config: TiermemConfig, hidden_size: int) -> TiermemConfig:
    """Returns the config with the bucket, prefetch and persistence sizes that are "auto" computed from the hidden size.

    reduce_bucket_size is h * h, stage3_prefetch_bucket_size 0.9 * h * h (rounded down) and
    stage3_param_persistence_threshold 10 * h, as Hugging Face's integration has them. Keys with a value, and keys left
    out, stay as they are.
    """
    if hidden_size < 1:
        raise ValueError(f"hidden_size is {hidden_size}; it must be at least 1")
    zero = config.zero_optimization
    computed = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "prefetch_bucket_size": 9 * hidden_size * hidden_size // 10,
        "param_persistence_threshold": 10 * hidden_size,
    }
    auto = {name: value for name, value in computed.items() if zero.path_of(name) in config.auto_keys}
    return config.model_copy(update={"zero_optimization": zero.model_copy(update=auto)}) if auto else config


def _validated(raw: dict[str, Any], source: str) -> TiermemConfig:
    try:
        config = TiermemConfig.model_validate(raw)
    except pydantic.ValidationError as error:
        raise ConfigError(problems_of(error, TiermemConfig), source) from None
    config._auto_keys = frozenset(_auto_paths(raw, ""))
    return config


def _auto_paths(raw: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _auto_paths(value, f"{prefix}{key}.")
        elif is_auto(value):
            yield f"{prefix}{key}"


def _parsed(text: str, source: str) -> dict[str, Any]:
    repeated: list[str] = []
    try:
        raw = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, repeated))
    except json.JSONDecodeError as error:
        repeated.clear()
        raw = _parsed_as_hjson(text, source, error, repeated)
    if repeated:
        raise ConfigError([Problem(key, "appears twice in one object; keep one of them") for key in repeated], source)
    if not isinstance(raw, dict):
        raise ConfigError([Problem("", f"a JSON {type(raw).__name__} given; allowed is an object")], source)
    return raw


def _parsed_as_hjson(text: str, source: str, first: json.JSONDecodeError, repeated: list[str]) -> Any:
    """What a text that is not JSON says as HJSON; raises ConfigError where it is not, or nothing here reads that."""
    where = f"not JSON at line {first.lineno}, column {first.colno}: {first.msg}"
    try:
        import hjson  # optional
    except ImportError:
        raise ConfigError([Problem("", f"{where} (to read HJSON: pip install hjson)")], source) from None
    try:
        return hjson.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, repeated))
    except hjson.HjsonDecodeError as error:
        where += f"; nor HJSON at line {error.lineno}, column {error.colno}: {error.msg}"
        raise ConfigError([Problem("", where)], source) from None


def _unique(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            repeated.append(key)
        seen[key] = value
    return seen


# ---- with_tuned: a config with what `tiermem tune` found laid over it ------------------------------------------------
#
#     {"aio": {...}, "tiermem": {"engine": ..., "paths": [...], "measured": {...}}}     the file
#       |             |
#       |             each key takes the place of the config's own; its other keys stay
#       takes the place of the whole section, which was measured as one
#
# The file is a config of its own: `load_config` reads it, and its `aio` section is in the documented spelling, for
# whoever else reads that. With a config that has neither section, `{**config, **tuned}` does the same. Nothing here
# checks values: that is `load_config`'s.

Given = Mapping[str, Any] | str | os.PathLike[str]

_KEYS = {"aio", "tiermem"}
_OWN_KEYS = {"engine", "paths", "measured"}


def with_tuned(config: Given, tuned: Given) -> dict[str, Any]:
    """Returns the config with the tuned sections in it; both are mappings or JSON files, and stay as they are.

    What it returns is for `load_config`, which checks it. Raises OSError, or ValueError for a file that is no JSON object, or
    whose keys are others than those of `tiermem tune`.
    """
    merged, found = dict(_read(config)), _read(tuned)
    foreign = sorted(set(found) - _KEYS) + sorted(f"tiermem.{key}" for key in set(found.get("tiermem", {})) - _OWN_KEYS)
    if foreign:
        what = os.fspath(tuned) if not isinstance(tuned, Mapping) else "the mapping"
        raise ValueError(
            f"{what} holds {', '.join(foreign)}, which `tiermem tune` does not write; is it the right file?"
        )
    if "aio" in found:
        merged["aio"] = dict(found["aio"])
    if "tiermem" in found:
        merged["tiermem"] = {**merged.get("tiermem", {}), **found["tiermem"]}
    return merged


def _read(given: Given) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    try:
        content = json.loads(Path(given).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(given)} is not JSON: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(content.get(key, {}), dict) for key in _KEYS):
        raise ValueError(f"{os.fspath(given)} holds no config: allowed is a JSON object of sections")
    return content
