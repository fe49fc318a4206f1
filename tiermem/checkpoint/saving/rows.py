"""Rows: pieces of states as arrays, a row for each, of which a model has tens of thousands.

A row is of a key (parameter, state, kind): elements `start` to `start + numel`, in `num_bytes` bytes of a file. In that form
pieces are cut, moved and put in order at once; one by one they are manifest.py's Piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tiermem.checkpoint.format.manifest import PartState
from tiermem.swap.numbers import Numbers

Key = tuple[str, str, str]
"""Parameter, state, kind."""


class Rows(NamedTuple):
    """Flat int64 arrays of one length; `key` counts `keys`, `file` the files of a part."""

    keys: Sequence[Key]
    key: Numbers
    start: Numbers
    numel: Numbers
    file: Numbers
    offset: Numbers
    num_bytes: Numbers

    def states(self) -> tuple[PartState, ...]:
        """What a part says of them: keys in their order, each with its rows by element."""
        order = np.lexsort((self.start, self.key))
        table = np.stack((self.start, self.numel, self.file, self.offset), 1)[order].tolist()
        edges = [0, *np.cumsum(np.bincount(self.key, minlength=len(self.keys))).tolist()]
        found = zip(self.keys, itertools.pairwise(edges), strict=True)
        return tuple(PartState(*key, table[start:end]) for key, (start, end) in found if start < end)


def rows_of(keys: Sequence[Key], rows: Sequence[tuple[int, int, int, int, int, int]]) -> Rows:
    """From tuples: key, start, numel, file, offset, bytes."""
    return Rows(keys, *np.array(rows, np.int64).reshape(-1, 6).T)


def joined_rows(several: Sequence[Rows]) -> Rows:
    """All of these; a key may be in several."""
    numbers: dict[Key, int] = {}
    for rows in several:
        for key in rows.keys:
            numbers.setdefault(key, len(numbers))
    mapped = [np.array([numbers[key] for key in rows.keys], np.int64)[rows.key] for rows in several if len(rows.key)]
    columns = zip(*(rows[2:] for rows in several if len(rows.key)), strict=True)
    if not mapped:
        return rows_of([], [])
    return Rows(list(numbers), np.concatenate(mapped), *(np.concatenate(each) for each in columns))
