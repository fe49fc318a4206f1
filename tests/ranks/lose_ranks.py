"""Run once by test_lost_ranks.py: worlds in which one rank dies, raises, hangs, or goes another way
through the model.

lose_ranks.py OUT WORLD...     writes OUT/found.json: {world: [how each rank ended]}
lose_ranks.py OUT SEED...      the same of deaths at random moments
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import Body, World, die, run_worlds
from programs import models
from programs.twins import loss_of, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier, checkpoint
from tiermem.plans import agreement
from tiermem.ranks import failures
from tiermem.ranks.failures import Watch
from tiermem.wires import gather
from tiermem.zero import Init

NUM_STEPS = 6
TIERS = {"memory": Tier.HOST, "nvme": Tier.NVME}


def policy_of(tier: Tier, nvme: Path, timeout_s: float = 60.0, **fields: object) -> OffloadPolicy:
    settings = {"persistence_numel": 50, "tile_numel": 4096} | fields
    return OffloadPolicy(params=tier, optim=tier, paths=[nvme], timeout_s=timeout_s, **settings)  # type: ignore[arg-type]


def train(model: nn.Module, policy: OffloadPolicy, at_step: Body | None = None) -> None:
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(NUM_STEPS):
            if step == 2 and at_step is not None:
                at_step(shards, optim)  # type: ignore[arg-type]
            loss_of(model, step).backward()
            optim.step()
            optim.zero_grad()


# ---- deaths --------------------------------------------------------------------------------------


def dies_in(phase: str, who: int, tier: Tier) -> Body:
    """A rank is killed in its third step: in the forward of a block, in its backward, in the
    optimizer's step or between."""

    def body(rank: int, nvme: Path) -> None:
        model = seeded(models.ShortTower)
        train(
            model,
            policy_of(tier, nvme),
            lambda shards, optim: prepare(model, optim) if rank == who else None,
        )

    def prepare(model: nn.Module, optim: torch.optim.Optimizer) -> None:
        block = model.layers[1]
        if phase == "forward":
            block.register_forward_hook(lambda *_: die())
        elif phase == "backward":
            block.register_forward_hook(
                lambda module, given, out: out.register_hook(lambda grad: die()) and None
            )
        elif phase == "step":
            optim.register_step_pre_hook(lambda *_: die())
        else:
            die()

    return body


def dies_with_a_child(who: int, tier: Tier) -> Body:
    """A rank is killed between steps, and a process that it has started keeps its connections
    open."""

    def body(rank: int, nvme: Path) -> None:
        train(
            seeded(models.ShortTower),
            policy_of(tier, nvme, 600.0),
            leave_a_child if rank == who else None,
        )

    def leave_a_child(*_: object) -> None:
        if os.fork() == 0:
            time.sleep(120.0)  # its session is killed before that
            os._exit(0)
        die()

    return body


def dies_seeing(lane: str, who: int, tier: Tier) -> Body:
    """A rank is killed by a thread of its own that has seen another event on a lane: a gather, a
    reduction, a tile."""

    def body(rank: int, nvme: Path) -> None:
        train(seeded(models.ShortTower), policy_of(tier, nvme), watch if rank == who else None)

    def watch(shards: tiermem.Shards, optim: object) -> None:
        def count() -> int:
            return sum(event.lane == lane for event in shards.store.recorder.events)

        num_seen = count()

        def look() -> None:
            while count() < num_seen + 3:
                time.sleep(0.0002)
            die()

        threading.Thread(target=look, daemon=True).start()

    return body


def dies_amid_a_message(who: int, tier: Tier) -> Body:
    """A rank is killed when it has sent a part of a piece that is larger than what the sockets
    hold."""

    def body(rank: int, nvme: Path) -> None:
        if rank == who:
            gather.send_to_all = send_a_part  # type: ignore[assignment]
        model = nn.Embedding.from_pretrained(torch.zeros(1 << 18, 31), freeze=False)
        with tiermem.shard(model, policy_of(tier, nvme, 600.0)):
            model(torch.zeros(2, dtype=torch.int64))

    def send_a_part(
        group: dist.ProcessGroup, me: int, pieces: list[torch.Tensor], tag: int
    ) -> None:
        time.sleep(1.0)  # the other rank waits by then
        group.send([pieces[me]], 1 - me, tag)
        die()

    return body


def dies_building(who: int, tier: Tier) -> Body:
    """A rank is killed under zero.Init, when half the model stands."""

    class Growing(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.first = nn.Linear(31, 97)
            if rank == who:
                die()
            self.second = nn.Linear(97, 31)

    def body(rank: int, nvme: Path) -> None:
        with Init(policy=policy_of(tier, nvme)):
            Growing(rank)

    return body


def dies_before(who: int, tier: Tier) -> Body:
    """A rank is killed before the library has heard of it."""

    def body(rank: int, nvme: Path) -> None:
        if rank == who:
            die()
        train(seeded(models.ShortTower), policy_of(tier, nvme))

    return body


def dies_agreeing(who: int, tier: Tier) -> Body:
    """A rank is killed when it has said where it runs, and before all have met."""

    def body(rank: int, nvme: Path) -> None:
        if rank == who:
            agreement.exchange_digests = lambda *_: die()  # type: ignore[assignment,return-value]
        train(seeded(models.ShortTower), policy_of(tier, nvme))

    return body


def dies_at_random(seed: int) -> Body:
    """A rank is killed after a random time, wherever it is then."""
    choice = random.Random(seed)
    who, tier, delay_s = (
        choice.randrange(2),
        choice.choice(list(TIERS.values())),
        choice.uniform(0.0, 0.5),
    )

    def body(rank: int, nvme: Path) -> None:
        dist.barrier()  # torch's own errors are not ours
        if rank == who:
            killer = threading.Timer(delay_s, die)
            killer.daemon = True
            killer.start()
        while True:
            train(seeded(models.ShortTower), policy_of(tier, nvme))

    return body


# ---- other troubles ------------------------------------------------------------------------------


def raises(who: int, tier: Tier) -> Body:
    def body(rank: int, nvme: Path) -> None:
        def trouble(*_: object) -> None:
            raise LookupError("this rank's own trouble")

        train(seeded(models.ShortTower), policy_of(tier, nvme), trouble if rank == who else None)

    return body


def hangs(who: int, tier: Tier) -> Body:
    """A rank does nothing until the other has given up."""

    def body(rank: int, nvme: Path) -> None:
        def wait(*_: object) -> None:
            while not (nvme.parent / f"{1 - who}.json").exists():
                time.sleep(0.05)
            die()

        train(
            seeded(models.ShortTower),
            policy_of(tier, nvme, timeout_s=3.0),
            wait if rank == who else None,
        )

    return body


def strays(who: int, way: tuple[int, ...], tier: Tier, **fields: object) -> Body:
    """From its third step on a rank goes another way through the layers."""

    def body(rank: int, nvme: Path) -> None:
        model = seeded(models.ShortTower)
        turn = (lambda *_: setattr(model, "path", way)) if rank == who else None
        train(model, policy_of(tier, nvme, **fields), turn)

    return body


def saves_alone(who: int, tier: Tier) -> Body:
    """One rank saves, as under `if rank == 0`, and the others go on."""

    def body(rank: int, nvme: Path) -> None:
        train(seeded(models.ShortTower), policy_of(tier, nvme), save if rank == who else None)

    def save(shards: tiermem.Shards, optim: tiermem.AdamW) -> None:
        checkpoint.save(shards, optim, Path(shards.policy.paths[0].path, "saved"))

    return body


# ---- who asks when -------------------------------------------------------------------------------


def asks_late(who: int, body: Body, sees_deaths: bool = True) -> Body:
    """A rank looks for the reason when the others have had time to be gone; on another host it sees
    no processes."""

    def late(rank: int, nvme: Path) -> None:
        if rank == who:
            difference = Watch.difference
            Watch.difference = lambda self: (time.sleep(1.5), difference(self))[1]  # type: ignore[method-assign]
        if rank == who and not sees_deaths:
            failures._has_died = lambda *_: False
        body(rank, nvme)

    return late


def worlds() -> dict[str, World]:
    memory, nvme = Tier.HOST, Tier.NVME
    return {
        "1 of 2 dies in forward, nvme": World(dies_in("forward", 1, nvme)),
        "0 of 2 dies in backward, nvme": World(dies_in("backward", 0, nvme)),
        "1 of 3 dies in step, nvme": World(dies_in("step", 1, nvme), 3),
        "0 of 3 dies in forward, memory": World(dies_in("forward", 0, memory), 3),
        "2 of 3 dies between steps, memory": World(dies_in("nothing", 2, memory), 3),
        "1 of 2 dies with a child, memory": World(dies_with_a_child(1, memory)),
        "1 of 2 dies seeing gather, nvme": World(dies_seeing("gather", 1, nvme)),
        "0 of 2 dies seeing reduce, memory": World(dies_seeing("reduce", 0, memory)),
        "1 of 2 dies seeing compute, nvme": World(dies_seeing("compute", 1, nvme)),
        "1 of 2 dies amid a message, memory": World(dies_amid_a_message(1, memory)),
        "0 of 2 dies amid a message, memory": World(dies_amid_a_message(0, memory)),
        "1 of 2 dies building, nvme": World(dies_building(1, nvme)),
        "0 of 2 dies building, memory": World(dies_building(0, memory)),
        "1 of 2 dies before, memory": World(dies_before(1, memory)),
        "1 of 2 dies agreeing, memory": World(dies_agreeing(1, memory)),
        "1 of 3 dies in step, far from 2, memory": World(
            asks_late(2, dies_in("step", 1, memory), False), 3
        ),
        "1 of 2 raises, nvme": World(raises(1, nvme)),
        "1 of 2 hangs, memory": World(hangs(1, memory)),
        "1 of 2 turns, memory": World(strays(1, (0, 2, 1), memory)),
        "1 of 3 skips, nvme": World(strays(1, (0, 2), nvme), 3),
        "1 of 3 skips, 1 asks late, memory": World(asks_late(1, strays(1, (0, 2), memory)), 3),
        "0 of 2 saves alone, memory": World(saves_alone(0, memory)),
        "0 of 3 repeats, memory": World(
            strays(0, (0, 1, 1, 2), memory, max_reuse_numel=0, unit_buffers=2), 3
        ),
    }


def main(out: Path, words: list[str]) -> None:
    chosen = {name: world for name, world in worlds().items() if name in words} or {
        f"random {seed}": World(dies_at_random(int(seed))) for seed in words
    }
    found = run_worlds(chosen, out)
    (out / "found.json").write_text(
        json.dumps({name: [rank._asdict() for rank in ranks] for name, ranks in found.items()})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
