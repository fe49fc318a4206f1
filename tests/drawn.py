"""Drawn: how many examples a property is given. Every run draws others.

`make test` draws a quarter of them; `make test-all`, and whoever chooses tests by another `-m`,
draws all.
"""

from __future__ import annotations

_LEAST = 6
_chosen = {"is_quick": False}


def note_marks(expression: str) -> None:
    """Says which tests this run has chosen, before any module of tests is imported."""
    _chosen["is_quick"] = "not slow" in expression


def drawn(count: int) -> int:
    """The examples of a property that is given `count` of them where all tests run."""
    return min(count, max(_LEAST, count // 4)) if _chosen["is_quick"] else count
