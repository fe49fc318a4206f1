"""Tuned file: what `tiermem tune` writes, and how it knows its own.

    {
        "aio": {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events"},
        "tiermem": {"engine", "paths": [{"path", "weight"}, ...], "measured": {"made_by": "tiermem tune", ...}}
    }

Two sections of a config, read by `load_config` as they stand and laid over another by `tiermem.with_tuned`; nothing acts on
`measured`. A file is overwritten only while it holds what this command wrote and nothing else: a config that was made of it
is the user's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiermem.swap.paths import NvmePath
from tiermem.swap.settings import IoSettings
from tiermem.tools.outputs import check_outputs

MADE_BY = "tiermem tune"
_OWN_KEYS = {"engine", "paths", "measured"}


def section_of(io: IoSettings, paths: Sequence[NvmePath], measured: dict[str, Any]) -> dict[str, Any]:
    """The config section that reads back as these settings and paths."""
    threads = {"intra_op_parallelism": io.threads} if io.threads else {}
    return {
        "aio": {
            "block_size": io.block_bytes,
            "queue_depth": io.depth // max(1, io.threads),  # of each thread, as the documentation counts
            **threads,
            "single_submit": io.single_submit,
            "overlap_events": io.overlap_events,
        },
        "tiermem": {
            "engine": io.engine,
            "paths": [
                {"path": str(each.path), **({"weight": each.weight} if each.weight is not None else {})}
                for each in paths
            ],
            "measured": measured,
        },
    }


def check_out(file: Path) -> None:
    """Sees that the file can be written: that it is not there, or is what this command wrote and nobody has added to.

    Raises FileExistsError, FileNotFoundError or PermissionError.
    """
    if not _is_ours(file):
        check_outputs([file], MADE_BY)


def _is_ours(file: Path) -> bool:
    """Whether a file is there, was made by this command and holds nothing that it does not write."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        own = content["tiermem"]
        is_marked = own["measured"]["made_by"] == MADE_BY
    except (OSError, ValueError, KeyError, TypeError):  # not there, not readable, or something else
        return False
    return bool(is_marked and set(content) == {"aio", "tiermem"} and set(own) == _OWN_KEYS)
