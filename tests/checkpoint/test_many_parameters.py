"""Does the work grow with the number of parameters, and no faster? From `shard` to `tiermem
inspect`."""

from __future__ import annotations

import contextlib
import io
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from runs import policy
from torch import nn

import tiermem
from tiermem import checkpoint
from tiermem.checkpoint.opening.source import Source
from tiermem.checkpoint.survey import survey
from tiermem.precision import Precision
from tiermem.tools.cli import main

Work = Callable[[], float]
"""Returns the work done so far, in any unit that only grows."""


MOST_CALLS = {"save": 168, "copy": 150, "open": 30, "fsck": 30, "inspect": 82}
"""Calls for each parameter, which has six states. The rest of the work is done on arrays and
columns."""


class Small(nn.Module):
    """Four parameters of 8 to 14 elements."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(4):
            self.register_parameter(f"p{number}", nn.Parameter(torch.full((8 + 2 * number,), 0.5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(p.sum() for p in self.parameters())


def layers(num: int) -> nn.Sequential:
    """So many parameters, 40 in a layer."""
    return nn.Sequential(
        *(nn.Sequential(*(Small() for _ in range(10))) for _ in range(num // 40))
    ).to(torch.bfloat16)


def phases(num: int, folder: Path, where: str, work: Work) -> dict[str, float]:
    """The work of each phase of a run of so many parameters."""
    found: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        before = work()
        yield
        found[name] = work() - before

    folder.mkdir()
    model, fields = (
        layers(num),
        {"persistence_numel": 0, "host_bytes": 1 << 30, "precision": Precision.preset("tiny")},
    )
    with contextlib.ExitStack() as closing:
        with phase("shard"):
            shards = closing.enter_context(tiermem.shard(model, policy(where, folder, **fields)))
            optimizer = tiermem.AdamW(model.parameters(), lr=0.01)
        with phase("step"):
            model(torch.ones(2, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        with phase("save"):
            checkpoint.save(shards, optimizer, folder / "saved", "t")
        with phase("copy"):
            checkpoint.save(shards, optimizer, folder / "copy", "t", copy=True)
            checkpoint.wait(shards)
    with phase("open"):
        Source.open(folder / "saved").close()
    with phase("fsck"):
        assert [step.state for step in survey(folder / "saved").steps] == ["whole"]
    shown = io.StringIO()
    with phase("inspect"), contextlib.redirect_stdout(shown), pytest.raises(SystemExit, match="0"):
        main(["inspect", str(folder / "saved")])
    assert f"{num} tensors" in shown.getvalue()
    return found


@contextlib.contextmanager
def counted_calls() -> Iterator[Work]:
    """Counts calls of Python functions and turns of generators, on this thread."""
    num_calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield lambda: num_calls
    finally:
        sys.setprofile(before)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["nvme", "cpu"])
def test_work_is_linear_in_the_number_of_parameters(where: str, tmp_path: Path) -> None:
    with counted_calls() as work:
        phases(40, tmp_path / "first", where, work)  # imports, caches
        few = phases(160, tmp_path / "few", where, work)
        many = phases(640, tmp_path / "many", where, work)
    assert {name: many[name] / num for name, num in few.items() if many[name] > 4.4 * num} == {}
    of_each = {name: (many[name] - num) / 480 for name, num in few.items()}
    assert {name: num for name, num in of_each.items() if num > MOST_CALLS.get(name, num)} == {}


@pytest.mark.soak
@pytest.mark.parametrize("where", ["nvme", "cpu"])
def test_100_000_parameters_take_ten_times_as_long_as_10_000(where: str, tmp_path: Path) -> None:
    def cpu_s() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_utime

    phases(40, tmp_path / "first", where, cpu_s)
    few = phases(10_000, tmp_path / "few", where, cpu_s)
    many = phases(100_000, tmp_path / "many", where, cpu_s)
    print(where, {name: round(value, 1) for name, value in many.items()})
    assert {
        name: (few[name], value) for name, value in many.items() if value > 15 * few[name]
    } == {}
