"""`import deepspeed` under as_deepspeed, also in processes that the program starts: their
PYTHONPATH has this folder.

deepspeed.py         the module; as_deepspeed finds those below it
deepspeed.egg-info   its metadata, for which libraries ask before they import it. A file: wheels leave out such folders
"""

from __future__ import annotations

from typing import Any

from tiermem.integrations.as_deepspeed import VERSION, find_modules, look_up

__version__ = VERSION
__path__: list[str] = []

find_modules()


def __getattr__(name: str) -> Any:
    return look_up("deepspeed", name)
