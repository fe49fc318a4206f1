"""Do the parity tests see a mistake? Each mutant (mutants.py) must give other bits, or an error, under some schedule."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from accelerator.mutants import MUTANTS, applied
from accelerator.test_parity import differences, on_cpu, run
from tiermem.swap.memory import accelerator

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

SCHEDULES = [
    "late",
    "side_first",
    "main_first",
    *(f"random:{seed}" for seed in range(20)),
    "at_once",
]


@pytest.fixture
def unpinned(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a run that fails leaves registered is unregistered after the test."""
    held: set[int] = set()
    register, unregister = accelerator._register, accelerator._unregister

    def register_and_note(device: torch.device, address: int, num_bytes: int) -> None:
        register(device, address, num_bytes)
        held.add(address)

    def unregister_and_note(device: torch.device, address: int) -> None:
        unregister(device, address)
        held.discard(address)

    monkeypatch.setattr(accelerator, "_register", register_and_note)
    monkeypatch.setattr(accelerator, "_unregister", unregister_and_note)
    yield
    sim.synchronize()
    gc.collect()  # stores of runs that failed unregister what they have
    for address in held:
        sim.host_unregister(address)


SAMPLED = 3
"""`make test` tries every third mutant and those that no other quick test sees, `make test-all` all of them."""
ALWAYS = {
    "weights that are about to change are not noted",
    "resident weights are overwritten while they are copied",
    "an input is copied to the device before the disk has read it",
    "a step does not wait until the tiles that are sent have come back",
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if number % SAMPLED == 0 or name in ALWAYS else pytest.mark.slow
        )
        for number, name in enumerate(MUTANTS)
    ],
)
def test_a_mutant_is_seen(name: str, sim: ModuleType, unpinned: None, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    expected = on_cpu(mutant.program)
    seen = []
    with applied(mutant):
        for number, schedule in enumerate(SCHEDULES):
            sim.set_schedule(schedule)
            try:
                seen = differences(
                    run(mutant.program, mutant.home, "sim", tmp_path / str(number)), expected
                )
            except (RuntimeError, AssertionError) as error:
                seen = [str(error)]
            if seen:
                break
    assert seen, f"no schedule shows that {name}"
