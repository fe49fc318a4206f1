"""Is a state's checksum by MiB the same however its bytes were cut?"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tiermem.checkpoint.saving.pieces import Run, checksums, cuts, joined
from tiermem.swap.store.checksum import crc32c

MIB = 1 << 20
DATA = torch.randint(0, 256, (3 * MIB + 12345,), dtype=torch.uint8)


def run(start: int, stop: int) -> Run:
    return Run(
        start,
        stop - start,
        crc32c([DATA[at : at + n].clone() for at, n in cuts(start, stop - start)]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_runs_of_any_sizes_give_the_checksums_of_whole_blocks(seed: int) -> None:
    chance = random.Random(seed)
    edges = sorted(
        {
            0,
            DATA.numel(),
            *(chance.choice([chance.randrange(DATA.numel()), MIB, 2 * MIB]) for _ in range(9)),
        }
    )
    runs = [run(start, stop) for start, stop in itertools.pairwise(edges)]
    chance.shuffle(runs)
    due = tuple(crc32c([block.clone() for block in DATA.split(MIB)]))
    assert checksums(runs, "w") == due
    half = len(runs) // 2
    assert checksums(joined(runs[:half]) + joined(runs[half:]), "w") == due


def test_what_is_missing_or_twice_is_an_error() -> None:
    for runs in ([run(0, 100), run(101, 200)], [run(0, 100), run(0, 100)], [run(5, 100)]):
        with pytest.raises(RuntimeError, match="once and whole"):
            checksums(runs, "w")
