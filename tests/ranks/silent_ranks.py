"""Run once by test_silent_ranks.py: worlds in which a rank is killed, stopped, exits or turns, on
gloo and simulated devices.

silent_ranks.py OUT WORLD ...     writes OUT/found.json: {world: {rank: [class, seconds, words] of what it raised}}

A world is a text: "simccl, 0 of 2 stopped in forward".

silent_ranks.py OUT               one rank, which writes OUT/at-RANK when it trains, and OUT/RANK.json
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from accelerator import build, device
from forks import forked, free_port
from programs import models
from programs.twins import batch, seeded
from torch.nn import functional as F

import tiermem
from tiermem import OffloadPolicy, Tier, checkpoint

TIMEOUT_S = 6.0
_LAST = 3  # the step in which the rank goes
if build.missing_for_build() is None:
    device.load()
    # imports what Meta kernels in Python need, once before the ranks are forked
    torch.ones(1, device="meta").add(1)


def go(folder: Path, how: str, model: models.ShortTower) -> None:
    """Ends or stops this rank or has it go another way, and notes when."""
    model.path = (0, 2, 1)
    (folder / "gone.part").write_text(str(time.time()))
    (folder / "gone.part").rename(folder / "gone")
    if how == "exits":
        os._exit(0)
    if how != "turns":
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


class Asked:
    """A schedule that does something when a save asks for its state."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def state_dict(self) -> dict[str, int]:
        self._act()
        return {"at": 1}


def train(folder: Path, where: str, how: str, phase: str) -> None:
    """Trains for ever; a rank with a `how` goes in a phase of the last step, which every rank saves
    if it is "save"."""
    model = seeded(models.ShortTower)
    policy = OffloadPolicy(
        params=Tier.HOST, optim=Tier.HOST, timeout_s=TIMEOUT_S, persistence_numel=50
    )
    step = 0

    def go_in(here: str) -> None:
        if how and step == _LAST and phase == here:
            go(folder, how, model)

    with tiermem.shard(model, policy, device=where) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        model.layers[1].register_forward_hook(lambda *_: go_in("forward"))
        model.layers[1].register_forward_hook(
            lambda module, given, out: out.register_hook(lambda grad: go_in("backward")) and None
        )
        optim.register_step_pre_hook(lambda *_: go_in("step"))
        while True:
            go_in("batch")
            tokens, targets = (each.to(shards.device) for each in batch(step))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optim.step()
            optim.zero_grad()
            loss.item()
            if phase == "save" and step == _LAST:
                checkpoint.save(
                    shards, optim, folder / "saved", scheduler=Asked(lambda: go_in("save"))
                )
            if step == _LAST - 1:
                time.sleep(1.5)  # every rank has been heard
                (folder / f"at-{dist.get_rank()}").touch()
            step += 1


def be_a_rank(
    folder: Path, backend: str, world: int, port: int, how: str, phase: str, rank: int
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train_and_say(folder, "cpu" if backend == "gloo" else f"sim:{rank % 2}", how, phase, rank)


def train_and_say(folder: Path, where: str, how: str, phase: str, rank: int) -> None:
    """Trains until something is raised, and writes that."""
    torch.set_num_threads(1)
    try:
        train(folder, where, how, phase)
    except RuntimeError as error:
        (folder / f"{rank}.part").write_text(
            json.dumps([type(error).__name__, time.time(), str(error)])
        )
        (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    os._exit(0)


def start(folder: Path, name: str) -> list[int]:
    """Forks the ranks of a world; returns their process ids."""
    folder.mkdir()
    backend, who, _, world, how, _, phase = name.replace(",", "").split()
    port, ranks = free_port(), range(int(world))
    hows = [how if rank == int(who) else "" for rank in ranks]
    return [
        forked(
            functools.partial(be_a_rank, folder, backend, len(ranks), port, hows[rank], phase, rank)
        )
        for rank in ranks
    ]


def end(folder: Path, name: str, pids: list[int]) -> dict[int, list[object]]:
    """What the survivors said; ends those that said nothing."""
    others = [rank for rank in range(len(pids)) if rank != int(name.split()[1])]
    deadline = time.monotonic() + 45.0
    while (
        not all((folder / f"{rank}.json").exists() for rank in others)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    since = float((folder / "gone").read_text())
    found: dict[int, list[object]] = {}
    for rank in others:
        said = folder / f"{rank}.json"
        kind, at, words = (
            json.loads(said.read_text()) if said.exists() else ["silence", since + 45.0, ""]
        )
        found[rank] = [kind, at - since, words]
    return found


if __name__ == "__main__":
    out, names = Path(sys.argv[1]), sys.argv[2:]
    if not names:
        train_and_say(out, "cpu", "", "", int(os.environ["RANK"]))
    started = {name: start(out / str(number), name) for number, name in enumerate(names)}
    found = {
        name: end(out / str(number), name, pids)
        for number, (name, pids) in enumerate(started.items())
    }
    (out / "found.json").write_text(json.dumps(found))
