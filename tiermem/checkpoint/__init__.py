"""Checkpoint: durable steps of a sharded model, and complete copies of them. The store's own files
are the durable step.

Packages and modules in order; each imports only those before it:

    format/       kinds       how elements are stored                 fields     strict readers of JSON files
                  manifest    the files of a durable step             finding    the durable steps of a folder
    together      runs a stage on all ranks; an error on one rank is an error on all
    saving/       pieces      the file ranges that a rank saves       capture    which elements a rank saves, and their places
                  publish     writes the manifest, drops old steps    commit     makes a step durable in the store's files
                  copies      a complete copy in another folder       saver      saves tags and steps
    opening/      verified    reads bytes, compares checksums         source     an opened step
                  restore     puts saved states into a model          loading    load_checkpoint and resume
    interchange/  imports and exports checkpoints of other systems
    survey        lists the runs and steps of a place, read only
    zero_to_fp32  the reference's functions that take weights out of a checkpoint
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Beside": "tiermem.checkpoint.saving.saver",
    "DamagedState": "tiermem.checkpoint.opening.verified",
    "Loaded": "tiermem.checkpoint.opening.loading",
    "ManifestError": "tiermem.checkpoint.format.fields",
    "Source": "tiermem.checkpoint.opening.source",
    "decode": "tiermem.checkpoint.format.fields",
    "load": "tiermem.checkpoint.opening.loading",
    "make_durable": "tiermem.checkpoint.saving.saver",
    "save": "tiermem.checkpoint.saving.saver",
    "wait": "tiermem.checkpoint.saving.saver",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiermem.checkpoint' has no attribute {name!r}")
