"""Run under `python -m tiermem.as_deepspeed`: prints those of the names on standard input, one a
line, that are answered."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def is_answered(name: str) -> bool:
    """Whether a dotted name is a module, an attribute of one, or a method of the engine."""
    before, _, last = name.rpartition(".")
    try:
        if not before:
            return importlib.import_module(name) is not None
        is_method = before == "deepspeed.DeepSpeedEngine"
        holder = (
            importlib.import_module("deepspeed").DeepSpeedEngine
            if is_method
            else importlib.import_module(before)
        )
        return hasattr(holder, last)
    except ImportError:
        return False


for each in Path(sys.argv[1]).read_text("utf-8").split():
    if is_answered(each):
        print(each)
