"""Checkpoint: durable steps of a sharded model, which are the store's own files, and complete copies of them.

The format, lowest first: manifest.py specifies it.

    crc        CRC-32C of texts               kinds      how elements are stored     fields    strict JSON
    plain      values as JSON                 manifest   the files                   cover     parts put together

Saving:

    stretch    elements in one range of bytes     capture    what a rank saves           blocks   checksums by MiB
    pieces     ranges of files, summed            content    what is saved, all of it    places   paths
    together   a stage on every rank              publish    manifest, pointer, latest
    commit     where states rest                  copying    ranges into a copy          copies   complete copies, behind
    saver      tags and steps                     scalars    generators, groups, schedules
    unharmed   the step that a corruption left whole

Opening:

    finding    which steps a place holds          streams    a state's bytes             damage   what is not as it was saved
    source     an opened step, verified           fitting    names and shapes            filling  formats
    resuming   groups, generators                 ordinary   beside the model            custom   weights as a mapping
    restore    put where a model rests            everywhere ranks that fail alike       loading  all of it

Looking and exchanging:

    survey     runs and steps of a place, left alone      interchange/   other systems' checkpoints, in and out
    zero_to_fp32   the reference's functions that take weights out
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Beside": "tiermem.checkpoint.saver",
    "DamagedState": "tiermem.checkpoint.damage",
    "Loaded": "tiermem.checkpoint.loading",
    "ManifestError": "tiermem.checkpoint.fields",
    "Source": "tiermem.checkpoint.source",
    "decode": "tiermem.checkpoint.plain",
    "load": "tiermem.checkpoint.loading",
    "make_durable": "tiermem.checkpoint.saver",
    "save": "tiermem.checkpoint.saver",
    "wait": "tiermem.checkpoint.saver",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiermem.checkpoint' has no attribute {name!r}")
