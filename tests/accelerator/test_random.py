"""Are random numbers those of the CPU's generator, drawn in the order of the host, saved and
restored per device?"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

DRAWS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "randn": lambda device: torch.randn(33, 3, device=device),
    "rand": lambda device: torch.rand(100, device=device),
    "randint": lambda device: torch.randint(0, 50, (40,), device=device),
    "randperm": lambda device: torch.randperm(40, device=device),
    "bernoulli_": lambda device: torch.empty(100, device=device).bernoulli_(0.3),
    "exponential_": lambda device: torch.empty(100, device=device).exponential_(),
    "normal": lambda device: torch.normal(2.0, 3.0, (50,), device=device),
    "dropout": lambda device: F.dropout(torch.ones(100, device=device), 0.3),
    "transposed": lambda device: torch.empty(7, 5, device=device).t().uniform_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_seeded_draws_equal_the_cpus(sim: ModuleType, name: str) -> None:
    sim.set_schedule("late")
    torch.manual_seed(3)
    drawn = [DRAWS[name](torch.device("sim")) for _ in range(2)]
    assert sim.pending() > 0
    torch.manual_seed(3)
    for found in drawn:
        assert torch.equal(found.cpu(), DRAWS[name](torch.device("cpu")))
    assert not torch.equal(drawn[0].cpu(), drawn[1].cpu())


def test_draws_by_probabilities_depend_on_the_seed_alone(sim: ModuleType) -> None:
    found = []
    for schedule in ("at_once", "late", "random:1"):
        sim.set_schedule(schedule)
        torch.manual_seed(3)
        chances = torch.full((100,), 0.5, device="sim")
        found.append([torch.bernoulli(chances).tolist(), torch.multinomial(chances, 9).tolist()])
    assert found[0] == found[1] == found[2]


def test_states_are_saved_and_restored_per_device(sim: ModuleType) -> None:
    torch.manual_seed(3)
    saved = sim.get_rng_state_all()
    first = [torch.randn(5, device=f"sim:{index}").tolist() for index in (0, 1)]
    assert first[0] == first[1] and saved[0].device.type == "cpu"
    sim.set_rng_state(saved[1], "sim:1")
    assert torch.randn(5, device="sim:1").tolist() == first[1]
    assert torch.randn(5, device="sim:0").tolist() != first[0]


def test_generators_of_the_device(sim: ModuleType) -> None:
    generator = torch.Generator("sim:1").manual_seed(9)
    state = generator.get_state()
    drawn = torch.randn(5, device="sim:1", generator=generator)
    assert drawn.tolist() == torch.randn(5, generator=torch.Generator().manual_seed(9)).tolist()
    generator.set_state(state)
    assert torch.equal(torch.randn(5, device="sim:1", generator=generator), drawn)
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.randn(5, device="sim:0", generator=generator)


def test_fork_rng_restores_the_devices(sim: ModuleType) -> None:
    torch.manual_seed(3)
    with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
        inside = torch.randn(5, device="sim").tolist()
    assert torch.randn(5, device="sim").tolist() == inside


def test_drawing_on_the_device_leaves_the_cpus_generator(sim: ModuleType) -> None:
    torch.manual_seed(3)
    torch.randn(5, device="sim")
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), state)
