"""Numbers: columns of tables as flat int64 arrays: byte offsets, lengths, element starts, numbers of rows.

Where a model has tens of thousands of ranges, what is done with them is done to all at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


def spread(first: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    """Row i as often as counts[i] says, and with it first[i], first[i] + 1, ..."""
    row = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return row, first[row] + np.arange(len(row)) - before[row]
