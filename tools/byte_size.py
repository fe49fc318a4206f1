"""Byte sizes as people write them: "1250MiB", "2GiB", "1G", "4096".

KB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB and the bare letters K, M, G, T are powers of 1024.
"""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Reads a size. Raises ValueError that says what is allowed."""
    match = _PATTERN.fullmatch(text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes, or for example 1250MiB, 2GiB, 1.5G or 500MB")
    return int(float(match.group(1)) * _UNITS[unit]) if "." in match.group(1) else int(match.group(1)) * _UNITS[unit]


def parse_count(text: str) -> int:
    """Reads a number of things: "256M", "1.3b", "4096"; K, M and B are powers of 1000. Raises ValueError."""
    match = _PATTERN.fullmatch(text)
    powers = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
    unit = match.group(2).lower() if match else None
    if match is None or unit not in powers:
        raise ValueError(f"{text!r} is not a number of parameters; write for example 256M, 1.3B or 4096")
    return int(float(match.group(1)) * powers[unit])


def parse_flops(text: str) -> float:
    """Reads operations a second: "150T", "2.5P", "300G", "1e14"; G, T and P are powers of 1000. Raises ValueError."""
    powers = {"g": 1e9, "t": 1e12, "p": 1e15}
    number, factor = (text[:-1], powers[text[-1].lower()]) if text[-1:].lower() in powers else (text, 1.0)
    try:
        return float(number) * factor
    except ValueError:
        raise ValueError(
            f"{text!r} is no number of operations a second; write for example 150T, 2.5P or 1e14"
        ) from None


def format_bytes(num_bytes: float) -> str:
    """A size for people: MiB up to 10 GiB, so that figures of one run compare; "1250.0 MiB", "19.53 GiB"."""
    if abs(num_bytes) < 10 << 10:
        return f"{num_bytes:.0f} B"
    if abs(num_bytes) < 1 << 20:
        return f"{num_bytes / (1 << 10):.1f} KiB"
    if abs(num_bytes) < 10 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"
