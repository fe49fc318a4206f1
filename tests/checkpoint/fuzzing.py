"""Fuzzing: valid files changed at random, in their bytes or in the structure that they hold, and the totals of a long run."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_INPUTS, MOST_S = 1_000_000, 600.0
_MOST_GROWTH_BYTES = 192 << 20  # of the process, over all inputs: allocators keep some, and one hostile size is more
_SPLICES = (b"[", b"{", b'"', b"-", b"9" * 30, b"1e999", b"NaN", b"null", b"\0", b"\xff" * 8)


def scrambled(data: bytes, chance: random.Random) -> bytes:
    """Bytes with a few changed, cut out, or put in."""
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(data) + 1), chance.choice([1, 1, 2, 8, 100])
        new = chance.choice([b"", chance.randbytes(length), chance.choice(_SPLICES)])
        data = data[:at] + new + data[at + chance.choice([0, 1, length]) :]
    return data


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every value in some JSON."""
    found = [path]
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def inside(content: Any, path: tuple[Any, ...]) -> Any:
    """The value that a path leads to."""
    for key in path:
        content = content[key]
    return content


def altered(content: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    """JSON with one value replaced, removed or there twice."""
    if not path:
        return value
    content = copy.deepcopy(content)
    holder = inside(content, path[:-1])
    if how == "remove":
        del holder[path[-1]]
    elif how == "twice" and isinstance(holder, list):
        holder.insert(path[-1], copy.deepcopy(holder[path[-1]]))
    else:
        holder[path[-1]] = copy.deepcopy(value)
    return content


def soak(name: str, try_one: Callable[[random.Random], bool]) -> dict[str, Any]:
    """Tries inputs, made from a generator each, a million times or for ten minutes; `try_one` tells whether it was valid.

    Its seed and totals are printed and, where TIERMEM_SOAK_TOTALS names a folder, kept there: also those of a run that failed.
    """
    seed = random.SystemRandom().randrange(1 << 32)
    chance, start = random.Random(seed), time.monotonic()
    totals: dict[str, Any] = {"seed": seed, "inputs": 0, "valid": 0}
    for _ in range(100):
        try_one(random.Random(chance.random()))  # what is allocated once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    try:
        while totals["inputs"] < MOST_INPUTS and time.monotonic() - start < MOST_S:
            totals["inputs"] += 1
            totals["valid"] += try_one(chance)
    finally:
        totals["seconds"] = round(time.monotonic() - start, 1)
        totals["grown_bytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
        print(name, totals)
        if folder := os.environ.get("TIERMEM_SOAK_TOTALS"):
            Path(folder, f"{name}.json").write_text(json.dumps(totals))
    assert totals["grown_bytes"] < _MOST_GROWTH_BYTES, totals
    return totals
