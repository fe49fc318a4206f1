"""Is a drop found where it is, and noise left alone?"""

from __future__ import annotations

import pytest

from tiermem.tools.measure.sustained import Knee, find_knee


def test_a_drop_is_found_where_it_is() -> None:
    knee = find_knee([4.0, 4.2, 3.9, 4.1, 1.0, 1.2, 0.9])
    assert knee is not None
    assert knee.num_before == 4
    assert knee.before == pytest.approx(4.05)
    assert knee.after == pytest.approx(3.1 / 3)


@pytest.mark.parametrize(
    "rates",
    [
        [],
        [4.0],
        [4.0, 1.0, 1.0],  # one point is no level
        [4.0, 3.6, 4.1, 3.7, 3.9],
        [1.0, 1.1, 4.0, 4.1],  # a rise
        [4.0, 4.0, 3.3, 3.3],  # less than a fifth
        [4.0, 4.0, 4.0, 4.0, 0.5],  # a single slow point at the end
    ],
)
def test_noise_a_rise_and_a_short_series_have_none(rates: list[float]) -> None:
    assert find_knee(rates) is None


def test_a_knee_is_a_value() -> None:
    assert find_knee([2.0, 2.0, 1.0, 1.0]) == Knee(2, 2.0, 1.0)
