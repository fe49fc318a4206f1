"""Does a sharded model train as its plain twin, whichever of its modules are called, in any order,
and whenever gradients are zeroed?

Random programs (programs/random_calls.py): the same first cases in `make test`, others in every `make soak`,
which keeps seed and count.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from programs.random_calls import Case

HERE = Path(__file__).parent
_SOAK_S = 300.0  # on one rank, and again on two


def run_cases(
    first: int, folder: Path, most: float = math.inf, seconds: float = math.inf
) -> dict[str, Any]:
    """Runs cases one after the other, `most` of them or until time is up. Raises Mismatch."""
    torch.set_num_threads(1)
    deadline, number, operations = time.monotonic() + seconds, first, 0
    while number - first < most and time.monotonic() < deadline:
        place = folder / str(number)
        place.mkdir()
        operations += Case(number, place).run()
        number += 1
    return {"cases": number - first, "operations": operations}


def test_any_module_may_be_called_by_itself(tmp_path: Path) -> None:
    assert run_cases(0, tmp_path, most=10)["cases"] == 10


def test_any_module_may_be_called_by_itself_on_two_ranks(tmp_path: Path) -> None:
    found = launch(HERE / "any_calls_on_ranks.py", 2, tmp_path, "0", "4", "inf")
    assert found[0] == found[1]
    assert found[0]["cases"] == 4


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_any_module_may_be_called_by_itself_for_long(num_ranks: int, tmp_path: Path) -> None:
    first = random.SystemRandom().randrange(1 << 32)
    totals: dict[str, Any] = {"first case": first, "ranks": num_ranks}
    try:
        if num_ranks == 1:
            totals |= run_cases(first, tmp_path, seconds=_SOAK_S)
        else:
            words = str(first), "inf", str(_SOAK_S)
            totals |= launch(
                HERE / "any_calls_on_ranks.py", 2, tmp_path, *words, timeout_s=_SOAK_S + 300
            )[0]
    finally:
        print("any calls", totals)
        if folder := os.environ.get("TIERMEM_SOAK_TOTALS"):
            Path(folder, f"any calls on {num_ranks}.json").write_text(json.dumps(totals))
