"""Are sizes read as people write them, and mistakes told?"""

from __future__ import annotations

import pytest

from tiermem.tools.words import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("0", 0),
        ("1250MiB", 1250 << 20),
        ("2GiB", 2 << 30),
        ("1G", 1 << 30),
        ("1g", 1 << 30),
        ("1.5G", 3 << 29),
        ("500MB", 500_000_000),
        ("10 kb", 10_000),
        ("2TiB", 2 << 40),
        (" 7b ", 7),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "1XiB", "1 2", "1e9", "1250 Mi B", "NaN"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="1250MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (12, "12 B"),
        (20 << 10, "20.0 KiB"),
        (5 << 20, "5.0 MiB"),
        (1250 << 20, "1250.0 MiB"),
        (20 << 30, "20.00 GiB"),
    ],
)
def test_sizes_are_shown_in_one_unit_per_range(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
