"""Is a checksum that of the bytes, on any number of threads, and does it combine from pieces?"""

import itertools

import numpy as np
import pytest
import torch

from tiermem.swap.base.native import Workers, crc32c_of
from tiermem.swap.store.checksum import crc32c, crc32c_combine


def test_the_check_value_of_crc32c() -> None:
    assert crc32c([torch.tensor(list(b"123456789"), dtype=torch.uint8)]) == [0xE3069283]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_and_dtypes_change_nothing(num_threads: int) -> None:
    data = torch.randint(
        0, 256, ((1 << 20) + 12,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    workers = Workers(num_threads)
    assert crc32c([data, data[:0], data.view(torch.float32)], workers) == [
        *crc32c([data]),
        0,
        *crc32c([data]),
    ]
    workers.close()


def test_pieces_of_any_length_combine_to_the_whole() -> None:
    data = torch.randint(
        0, 256, (700_001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    whole, cuts = 0, [0, 0, 1, 4095, 4096, 70_000, 699_999, 700_001]
    for start, stop in itertools.pairwise(cuts):
        whole = crc32c_combine(whole, *crc32c([data[start:stop]]), stop - start)
    assert [whole] == crc32c([data])


def test_what_does_not_lie_in_one_row_of_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        crc32c([torch.zeros(4, 4)[:, 1]])
    with pytest.raises(ValueError, match="two rows"):
        crc32c_of(np.zeros((2, 2), np.uint64), np.zeros((2, 2), np.uint64))
