"""with_tuned: a config with what `tiermem tune` found laid over it.

    {"aio": {...}, "tiermem": {"engine": ..., "paths": [...], "measured": {...}}}     the file
      |             |
      |             each key takes the place of the config's own; its other keys stay
      takes the place of the whole section, which was measured as one

The file is a config of its own: `load_config` reads it, and its `aio` section is in the documented spelling, for whoever else
reads that. With a config that has neither section, `{**config, **tuned}` does the same. Nothing here checks values: that is
`load_config`'s.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["with_tuned"]

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
