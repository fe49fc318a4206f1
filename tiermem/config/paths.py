"""Paths of a config: one folder or several, each with an optional cap and weight. For `nvme_path` and `tiermem.paths`.

    "/mnt/nvme0"
    ["/mnt/nvme0", "/mnt/nvme1"]
    [{"path": "/mnt/nvme0", "max_bytes": "200GiB", "weight": 2.5}, {"path": "/mnt/nvme1", "weight": 1}]

A cap is per node, all its ranks together. Weights are given for all paths or for none; for none they are measured when the
store opens. Whether a folder exists and can be written is found out then, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import BeforeValidator, Field

from tiermem.config.base import Bytes, ConfigModel, Number
from tiermem.policy import NvmePath

__all__ = ["PathConfig", "Paths", "clashes", "united"]

_ALLOWED = 'allowed is the path of a folder, or {"path": "/mnt/nvme0", "max_bytes": "200GiB", "weight": 2.5}'


class PathConfig(ConfigModel):
    """One folder on an NVMe file system; a plain string is a folder without cap and weight."""

    section: ClassVar[str] = "tiermem.paths"

    path: Path
    """The folder."""
    max_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    """Most bytes to take there, all ranks of the node together. Not set: what is free."""
    weight: Annotated[Number, Field(gt=0.0)] | None = None
    """Its part of the bytes, relative to the other paths. Not set: measured when there are several."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _accept_plain_folders(cls, raw: Any) -> Any:
        folder = raw.get("path") if isinstance(raw, dict) else raw
        if isinstance(raw, dict) and "path" not in raw:
            return raw
        if not isinstance(folder, (str, Path)):
            raise ValueError(f"{folder!r} given; {_ALLOWED}")
        if not str(folder).strip():
            raise ValueError(f"an empty path given; {_ALLOWED}")
        return raw if isinstance(raw, dict) else {"path": raw}

    @property
    def value(self) -> NvmePath:
        """What the policy takes."""
        return NvmePath(self.path, self.max_bytes, self.weight)

    @property
    def written(self) -> str | dict[str, Any]:
        """The shortest form that says the same."""
        extra = {"max_bytes": self.max_bytes, "weight": self.weight}
        given = {name: value for name, value in extra.items() if value is not None}
        return {"path": str(self.path), **given} if given else str(self.path)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, Path, dict)) else value


Paths = Annotated[tuple[PathConfig, ...], BeforeValidator(_as_list), Field(min_length=1)]
"""One path or several; several share the load."""


def united(paths: Sequence[PathConfig]) -> tuple[NvmePath, ...]:
    """Every folder once, in order."""
    return tuple(dict.fromkeys(each.value for each in paths))


def clashes(paths: Sequence[PathConfig]) -> str:
    """What keeps these from being one list: a folder with two caps or weights, weights for some alone; empty if nothing."""
    values = united(paths)
    folders = [value.path for value in values]
    for folder in folders:
        if folders.count(folder) > 1:
            given = " and ".join(str(each.written) for each in dict.fromkeys(paths) if each.path == folder)
            return f"{folder} is given as {given}; give it one cap and one weight"
    bare = [str(value.path) for value in values if value.weight is None]
    if bare and len(bare) < len(values):
        return (
            f"{', '.join(bare)} without a weight beside paths that have one; give all a weight, or none to measure them"
        )
    return ""
