"""Knee: where a series of rates drops for good, as a drive does when its fast cache is full.

The series is cut in two where two levels fit it best (least squares). It is a knee when the second level is at least a
fifth lower, and two points or more, three quarters of those behind the cut, lie that low; anything less is noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

_LEAST_DROP = 0.2
_LEAST_POINTS = 2
_LEAST_PART = 0.75


class Knee(NamedTuple):
    """The number of points before the drop, and the mean rate on either side."""

    num_before: int
    before: float
    after: float


def find_knee(rates: Sequence[float]) -> Knee | None:
    """The drop, if there is one."""
    cuts = range(_LEAST_POINTS, len(rates) - _LEAST_POINTS + 1)
    if not cuts:
        return None
    index = min(cuts, key=lambda cut: _scatter(rates[:cut]) + _scatter(rates[cut:]))
    before, after = statistics.fmean(rates[:index]), statistics.fmean(rates[index:])
    low = sum(rate < before * (1 - _LEAST_DROP) for rate in rates[index:])
    is_knee = after < before * (1 - _LEAST_DROP) and low >= max(_LEAST_POINTS, _LEAST_PART * (len(rates) - index))
    return Knee(index, before, after) if is_knee else None


def _scatter(rates: Sequence[float]) -> float:
    mean = statistics.fmean(rates)
    return sum((rate - mean) ** 2 for rate in rates)
