"""Random programs of test_overlap.py on several ranks; run once per rank by it.

overlap_on_ranks.py OUT FOLDER NUM     writes OUT/<rank>.pt: for each program how many steps went on when `step` had returned
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from launch import as_rank
from test_overlap import CHOICES, WEIGHTED, check_alike

ON_ONE = {"read_weight"}
"""What raises for an absent parameter on several ranks."""


def program_of(number: int) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """A program, and how it is run: the same on every rank. Muon's matrices are not cut, so they
    are left out."""
    chance = random.Random(number)
    operations = [each for each in WEIGHTED if each not in ON_ONE]
    program = [
        (chance.choice(operations), chance.randrange(10)) for _ in range(chance.randint(6, 14))
    ]
    way = {
        part: chance.choice([each for each in choices if each != "muon"])
        for part, choices in CHOICES.items()
    }
    return [("train", number % 10), *program, ("train", 1), ("train", 2)], way


if __name__ == "__main__":
    with as_rank() as (rank, out, (folder, num)):
        torch.set_num_threads(1)
        found = []
        for number in range(int(num)):
            program, way = program_of(number)
            print(number, program, way, flush=True)  # the error of a rank shows it
            found.append(check_alike(program, way, Path(folder, str(number)), rank))
        torch.save(found, out)
