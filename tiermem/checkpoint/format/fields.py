"""Fields: strict readers of what a JSON file says, so that a hostile one is an error and nothing else.

    text(data, source)    bytes -> one JSON object: UTF-8, no NaN, no key twice
    Fields(...)           its keys, each read once, as one type, within bounds; what is left over is an error

Every error is a ManifestError that names the file and the field. Nothing is executed. Time is linear in a file's bytes, and
what is made of it takes at most 26 bytes for each; usually it is 5.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from tiermem.checkpoint.format.crc import crc32c

LARGEST = (1 << 63) - 1
MOST_TEXT = 4096  # characters of a name or a path
MOST_BYTES = 1 << 28  # of a file that says what is where: enough for 20 TB of states, at 12 bytes for each MiB
_TRAILER = re.compile(rb',"crc32c":"([0-9a-f]{8})"\}\n\Z')
_TRAILER_BYTES = len(b',"crc32c":"00000000"}\n')


class ManifestError(ValueError):
    """A file of a checkpoint is not what it should be; names the file and the field."""


def seal(content: Mapping[str, Any]) -> bytes:
    """A JSON file: one object of one line, whose last field is the CRC-32C of all bytes before it."""
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + b',"crc32c":"%08x"}\n' % crc32c(body)


def unseal(data: bytes, source: str) -> dict[str, Any]:
    """The object in a sealed file, without its CRC. Raises ManifestError for anything else."""
    if len(data) > MOST_BYTES:
        raise ManifestError(f"{source}: has {len(data)} bytes; {MOST_BYTES} are allowed")
    match = _TRAILER.search(data, max(0, len(data) - _TRAILER_BYTES))
    if match is None:
        raise ManifestError(
            f"{source}: its {len(data)} bytes do not end as a checkpoint's file does: cut, or no such file"
        )
    said, found = int(match[1], 16), crc32c(memoryview(data)[: match.start()])
    if found != said:
        raise ManifestError(f"{source}: crc32c is {found:08x} and the file says {said:08x}: it is damaged")
    content = text(data, source)
    del content["crc32c"]
    return content


def text(data: bytes, source: str) -> dict[str, Any]:
    """The JSON object of a file. Raises ManifestError."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_once, parse_float=_finite, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{source}: is not JSON that a checkpoint holds: {error}") from None
    if not isinstance(value, dict):
        raise ManifestError(f"{source}: holds {_kind(value)} where an object is due")
    return value


class Fields:
    """The keys of one JSON object.

    Args:
        value: what the file has in this place; anything but an object is an error.
        where: the file and the field, for errors.
    """

    def __init__(self, value: Any, where: str) -> None:
        self._where = where
        if not isinstance(value, dict):
            raise ManifestError(f"{where}: is {_kind(value)}; an object is due")
        self._left = dict(value)

    def integer(self, name: str, most: int = LARGEST, least: int = 0) -> int:
        """A whole number within bounds."""
        value = self.any(name)
        if type(value) is not int or not least <= value <= most:
            self.refuse(name, value, f"a whole number of {least} to {most}")
        return int(value)

    def text(self, name: str, most: int = MOST_TEXT, allowed: frozenset[str] | None = None, least: int = 1) -> str:
        """A string of at most so many characters, without NUL and half surrogate pairs; one of `allowed`."""
        value = self.any(name)
        if not _is_text(value, least, most):
            self.refuse(name, value, f"a string of {least} to {most} characters, without NUL, that UTF-8 can hold,")
        if allowed is not None and value not in allowed:
            self.refuse(name, value, f"one of {', '.join(sorted(allowed))}")
        return str(value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.any(name)
        if type(value) is not bool:
            self.refuse(name, value, "true or false")
        return bool(value)

    def digest(self, name: str) -> int:
        """A CRC-32C as 8 hexadecimal digits."""
        value = self.text(name, 8)
        if not re.fullmatch("[0-9a-f]{8}", value):
            self.refuse(name, value, "8 hexadecimal digits")
        return int(value, 16)

    def items(self, name: str) -> Iterator[tuple[str, Any]]:
        """(where, value) of every item of a list."""
        value = self.any(name)
        if not isinstance(value, list):
            self.refuse(name, value, "a list")
        return ((f"{self._where}: {name}[{i}]", item) for i, item in enumerate(value))

    def integers(self, name: str, most: int = LARGEST) -> tuple[int, ...]:
        """A list of whole numbers of 0 to `most`."""
        value = self.any(name)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= most for item in value):
            self.refuse(name, value, f"a list of whole numbers of 0 to {most}")
        return tuple(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, none of them twice."""
        value = self.any(name)
        if not isinstance(value, list) or not all(_is_text(each, 1, MOST_TEXT) for each in value):
            self.refuse(name, value, f"a list of strings of 1 to {MOST_TEXT} characters, without NUL, in UTF-8,")
        seen: set[str] = set()
        for each in value:
            if each in seen:
                raise ManifestError(f"{self._where}: {name}: {each!r} is listed twice")
            seen.add(each)
        return tuple(value)

    def names(self) -> list[str]:
        """The names that have not been read."""
        return list(self._left)

    def any(self, name: str) -> Any:
        """Whatever is there."""
        if name not in self._left:
            raise ManifestError(f"{self._where}: {name} is missing")
        return self._left.pop(name)

    def done(self) -> None:
        """Raises ManifestError when there are fields that nobody has read."""
        if self._left:
            raise ManifestError(f"{self._where}: {', '.join(map(repr, list(self._left)[:4]))}: no such field")

    def refuse(self, name: str, value: Any, due: str) -> NoReturn:
        """Raises ManifestError for a field."""
        raise ManifestError(f"{self._where}: {name} is {_kind(value)}; {due} is due")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is no finite number")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _is_text(value: Any, least: int, most: int) -> bool:
    """Whether it is a string that can be written again: JSON may smuggle half a surrogate pair in."""
    if not isinstance(value, str) or not least <= len(value) <= most or "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _kind(value: Any) -> str:
    """A value as an error shows it: itself if short, else its type."""
    try:
        shown = repr(value) if isinstance(value, (int, float, str, type(None))) else ""
    except ValueError:  # more digits than Python shows
        shown = ""
    names = {dict: "an object", list: "a list", str: "a string", int: "a number"}
    return shown if 0 < len(shown) <= 80 else names.get(type(value), type(value).__name__)
