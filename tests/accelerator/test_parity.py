"""Does a program compute on a device what it computes on the CPU, to the bit, wherever states rest,
however late it is?

Each program runs at once, as late as may be, with the default stream or all others first, and under
three random schedules: in `make test` under two of these, with its states on NVMe and at one other
home, in `make test-all` at every home. `make soak` runs all of them under twenty random
schedules.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from programs.faces import Found
from programs.homes import EARLY, HOMES, UNDONE, policy_of
from programs.models import ShortTower as Tower
from programs.on_device import PROGRAMS, Place, dropout, found
from programs.twins import loss_of, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Shards, Tier
from tiermem.optim.tentative import History
from tiermem.plans.budget import make_plan
from tiermem.ranks.topology import Topology
from tiermem.units.unit import divide

OTHERS = [home for home in HOMES if home not in ("nvme", EARLY, UNDONE)]
EVERY = [
    (name, home)
    for name in PROGRAMS
    for home in HOMES
    if name[-11:] != "in_backward" or home[-5:] != "early"
]
# its evaluation waits for no step, and there steps write in place
EVERY.remove(("held_until_backward_ends", "device"))
FEW = {(name, "nvme") for name in PROGRAMS}
FEW |= {(name, OTHERS[i % len(OTHERS)]) for i, name in enumerate(list(PROGRAMS)[::2])}
FEW |= {
    ("read_after_steps", "host, gradients on device"),
    ("saved_and_resumed", "nvme, gradients on device"),
}
FEW |= {(name, "nvme, gradients on device") for name in ("unfrozen", "one_matrix_of_muon")}
FEW |= {
    (name, EARLY)
    for name in ("plain", "clipped", "accumulated", "tied", "seen_from_outside", "in_fp16")
}
FEW |= {
    (name, UNDONE)
    for name in ("plain", "clipped", "accumulated", "unfrozen", "evaluated_between", "in_fp16")
}
FEW |= {("evaluated_aside", UNDONE), ("branches_stepped_in_backward", "host, states on device")}
FEW |= {("sharded_again", "device")}
FEW |= {(name, "states on host") for name in ("widened", "evaluated_aside")}
SIDE_FIRST = {
    ("activations_on_nvme", "host"),
    ("read_after_steps", "host, most sent"),
    ("widened", "device"),
}
SIDE_FIRST |= {("batches_there", "host, states on device")}
FEW |= SIDE_FIRST
FEW |= {("held_until_backward_ends", "host, gradients on device"), ("held_and_let_go", "host")}


def run(name: str, home: str, device: str, folder: Path) -> Found:
    folder.mkdir(parents=True)
    policy = policy_of(home, folder, persistence_numel=50, unit_buffers=3, tile_numel=8192)
    torch.manual_seed(0)
    # each backward steps its units, whatever became of earlier steps
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(History, "is_due", True)
        patched.setattr(History, "is_last", lambda *_: True)
        return PROGRAMS[name](Place(policy, device, folder))


@functools.cache
def on_cpu(name: str) -> Found:
    """What a program computes on the CPU, with everything in memory."""
    with tempfile.TemporaryDirectory() as folder:
        return run(name, "host", "cpu", Path(folder, "cpu"))


def differences(mine: Found, theirs: Found) -> list[str]:
    """What is not equal to the bit."""
    found = []
    for key, expected in theirs.items():
        pairs = expected.items() if isinstance(expected, dict) else [("", expected)]
        for name, value in pairs:
            own = mine[key][name] if isinstance(expected, dict) else mine[key]
            if not (torch.equal(own, value) if torch.is_tensor(value) else own == value):
                found.append(f"{key} {name}: {own} for {value}"[:300])
    return found


def assert_equal_under(
    schedules: list[str], name: str, home: str, sim: ModuleType, folder: Path
) -> None:
    for schedule in schedules:
        sim.set_schedule(schedule)
        assert differences(run(name, home, "sim", folder / schedule), on_cpu(name)) == [], schedule


SHOWN = [pair for pair in EVERY if pair in FEW]
HOMES_OF = collections.Counter(name for name, _ in SHOWN)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "home"), SHOWN)
def test_a_program_computes_on_a_device_what_it_computes_on_the_cpu(
    name: str, home: str, sim: ModuleType, tmp_path: Path
) -> None:
    """Late and under another schedule: at its one home both, else in turn."""
    first = "side_first" if home in ("nvme", EARLY) or (name, home) in SIDE_FIRST else "main_first"
    is_first = bool(len(name) % 2) or (name, home) in SIDE_FIRST
    schedules = ["late", first if is_first else f"random:{len(name)}"]
    if HOMES_OF[name] > 1 and (name, home) not in SIDE_FIRST:
        turn = SHOWN.index((name, home)) % 2
        schedules = schedules[turn : turn + 1]
    assert_equal_under(schedules, name, home, sim, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "home"), EVERY)
def test_a_program_computes_the_same_under_seven_schedules(
    name: str, home: str, sim: ModuleType, tmp_path: Path
) -> None:
    seeds = range(3 * len(name), 3 * len(name) + 3)
    schedules = [
        "at_once",
        "late",
        "main_first",
        "side_first",
        *(f"random:{seed}" for seed in seeds),
    ]
    assert_equal_under(schedules, name, home, sim, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "home"), EVERY)
def test_a_program_computes_the_same_under_every_schedule(
    name: str, home: str, sim: ModuleType, tmp_path: Path
) -> None:
    assert_equal_under([f"random:{seed}" for seed in range(20)], name, home, sim, tmp_path)


def test_tiles_on_nvme_are_stepped_while_backward_runs_on_the_device(
    sim: ModuleType, tmp_path: Path
) -> None:
    """How many is a matter of time: a unit is stepped when its gradients have come and a later
    unit's are on their way."""
    sim.set_schedule("at_once")
    policy = policy_of(EARLY, tmp_path, tile_numel=8192, persistence_numel=50)
    model = seeded(lambda: Tower(num_blocks=10))
    with tiermem.shard(model, policy, device="sim") as shards:
        optim, num_early = tiermem.AdamW(model.parameters(), lr=1e-2), 0
        for step in range(12):
            loss_of(model, step, "sim").backward()
            num_early += len(shards.program.attempted)
            optim.step()
            optim.zero_grad()
        assert num_early > 0
        assert shards.steps.num_redone == 0


IN_MEMORY = OffloadPolicy(
    params=Tier.HOST, optim=Tier.HOST, precision=Precision.preset("tiny"), tile_numel=8192, persistence_numel=50,
    unit_buffers=3, tile_buffers=2,
)  # fmt: skip


def host_bytes_of(model: nn.Module, overlap: str) -> int:
    policy = dataclasses.replace(IN_MEMORY, grads=Tier.DEVICE, overlap=overlap)  # type: ignore[arg-type]
    return make_plan(
        divide(model, policy, 1), policy, Topology(None, 0, 1, 1, 0), True, 1
    ).host_bytes


def trained_in(room: str, device: str) -> tuple[Found, list[set[int]], Shards]:
    """Ten steps of a model in memory. A parameter is frozen for two of them; three blocks are,
    until the seventh.

    room: "all": for second copies of all units; "a part": of some, and the blocks stay frozen; "for
        now": that the blocks need
    later. Returns what was computed, the units that each backward stepped, and the closed model.
    """
    model = seeded(lambda: Tower(num_blocks=6)).bfloat16()
    whole, body, param = (
        host_bytes_of(model, "forward"),
        model.layers[:3],
        model.layers[4].up.weight,
    )
    body.requires_grad_(False)
    less, more = (host_bytes_of(model, overlap) for overlap in ("forward", "backward"))
    host_bytes = {"all": None, "a part": (less + more) // 2, "for now": whole + (180 << 10)}[room]
    homes = (
        {"grads": Tier.DEVICE, "overlap": "backward", "host_bytes": host_bytes}
        if device != "cpu"
        else {}
    )
    early, losses = list[set[int]](), list[torch.Tensor]()
    with tiermem.shard(model, dataclasses.replace(IN_MEMORY, **homes), device=device) as shards:  # type: ignore[arg-type]
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(10):
            param.requires_grad_(step not in (3, 4))
            if step == 6 and room != "a part":
                body.requires_grad_(True)
            losses.append(loss_of(model, step, device))
            losses[-1].backward()
            early.append({tile.live.unit.index for tile in shards.program.attempted})
            optim.step()
            optim.zero_grad()
        assert shards.steps.num_redone == 0
        return found(shards, model, optim, losses), early, shards


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("room", "first", "later"), [("all", 5, 5), ("a part", 2, 2), ("for now", 5, 0)]
)
def test_units_in_memory_are_stepped_under_backward_as_far_as_there_is_room(
    room: str, first: int, later: int, sim: ModuleType
) -> None:
    """Not those that are unfrozen later, whose states have no second copy."""
    sim.set_schedule("late")
    mine, early, shards = trained_in(room, "sim")
    assert differences(mine, trained_in(room, "cpu")[0]) == []
    # the first step with blocks that were frozen makes their states
    seventh = first if room == "a part" else 0
    assert list(map(len, early)) == [0, 0, *[first] * 4, seventh, *[later] * 3]
    assert early[-1] == set(shards.plan.copied)


@pytest.mark.parametrize("reentrant", [False, True])
def test_random_numbers_of_the_device_are_the_same_under_every_schedule(
    reentrant: bool, sim: ModuleType, tmp_path: Path
) -> None:
    """Dropout in a checkpointed block: what is computed again uses the numbers of the first
    time."""
    losses = []
    for schedule in ("at_once", "late", "random:1"):
        sim.set_schedule(schedule)
        policy = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST, persistence_numel=50)
        losses.append(dropout(Place(policy, "sim", tmp_path), reentrant)["losses"])
    assert losses[0] == losses[1] == losses[2]
