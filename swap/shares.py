"""Shares: how many bytes each of several paths gets, by weight, where some of them are capped.

    100 GiB over weights 1 : 1 : 2          25    25    50
    the third has room for 20 only          40    40    20     what it cannot take is dealt over the others

Plain arithmetic on numbers; it knows no path and no file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from tiermem.swap.direct import ALIGNMENT
from tiermem.swap.extents import round_up


def deal_shares(num_bytes: int, weights: Sequence[float], rooms: Sequence[int | None]) -> list[int]:
    """Shares that hold num_bytes together, multiples of ALIGNMENT, none above its room (None: no bound).

    Rooms are multiples of ALIGNMENT. Raises ValueError when they are too small together.
    """
    shares = [0] * len(weights)
    exact = [Fraction(weight) for weight in weights]
    takers, left = list(range(len(weights))), num_bytes
    while left > 0:
        if not takers:
            raise ValueError(f"{left} of {num_bytes} bytes have no room")
        total = sum(exact[i] for i in takers)
        wished = {i: left * exact[i] / total for i in takers}
        full = [(i, room) for i in takers if (room := rooms[i]) is not None and wished[i] > room]
        if not full:
            for i in takers:
                shares[i] = round_up(math.ceil(wished[i]), ALIGNMENT)
            break
        for i, room in full:
            shares[i] = room
            left -= room
            takers.remove(i)
    return shares
