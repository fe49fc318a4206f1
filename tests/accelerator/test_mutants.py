"""Do the parity tests see a mistake? Each mutant (mutants.py) must give other bits, or an error, under some schedule."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from accelerator.mutants import MUTANTS, applied
from accelerator.test_parity import differences, on_cpu, run

SCHEDULES = ["late", *(f"random:{seed}" for seed in range(20)), "at_once"]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen(name: str, sim: ModuleType, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    expected = on_cpu(mutant.program)
    seen = []
    with applied(mutant):
        for number, schedule in enumerate(SCHEDULES):
            sim.set_schedule(schedule)
            try:
                seen = differences(run(mutant.program, mutant.home, "sim", tmp_path / str(number)), expected)
            except RuntimeError as error:
                seen = [str(error)]
            if seen:
                break
    assert seen, f"no schedule shows that {name}"
