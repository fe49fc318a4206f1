"""A small training run that may be killed at any moment, and what it says as it goes.

    <place>/nvme      the path of its store          <place>/saved    where it saves
    <place>/said      one line of JSON for each thing that has happened: survives whatever happens to the run

It opens the newest durable state that it finds, trains to the last step and saves on the way. Data
is a function of the step alone, so that a run that was killed and opened says the same losses, to
the bit, as one that was not. It tells which phase it is in: with durability="step", saving also
follows a freeze, as a backward begins. A window is the forward under which the step before goes on;
speculation is what follows the first tile that a backward steps; an undo is a step that drops such
tiles and steps them again, with the forward under which it goes on. With durability="step" it says
that a step is durable when the next backward has ended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from strips import cut_small_tiles
from torch import nn

import tiermem
from tiermem import utils

cut_small_tiles()

PHASES = ("opening", "training", "saving", "window", "speculation", "undo", "ending")


class Plan(NamedTuple):
    """How a run trains and saves."""

    durability: str = "checkpoint"
    save_every: int = 2
    keep: int = 1
    copies: bool = False
    precision: str = "compact"
    num_steps: int = 5
    tile_numel: int = 4096
    engine: str = "auto"
    overlap: str = "auto"
    clipping: float = 1.0
    steep: int | None = None  # after so many steps comes one with four times its gradients
    params: str = "nvme"


class Block(nn.Module):
    """Sizes that no tile, shard or page divides."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(61, 67), nn.Linear(67, 61, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))  # type: ignore[no-any-return]


class Small(nn.Module):
    """Three units, a tied weight and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 61)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(61, 31, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.gain
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(
            self.head(x).float().flatten(0, 1), tokens.roll(1, 1).flatten()
        )


def config_of(place: Path, plan: Plan) -> dict[str, Any]:
    """As a user of a JSON config would write it."""
    nvme = {"device": "nvme", "nvme_path": str(place / "nvme")}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": plan.clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
        "zero_optimization": {
            "stage": 3, "sub_group_size": plan.tile_numel, "offload_optimizer": nvme,
            "offload_param": nvme if plan.params == "nvme" else {"device": plan.params},
            "stage3_param_persistence_threshold": 0,
        },
        "tiermem": {
            "precision": plan.precision, "durability": plan.durability, "keep": plan.keep, "engine": plan.engine,
            "overlap": plan.overlap, "strict": True,
        },
    }  # fmt: skip


def train(place: Path, plan: Plan, rank: int, begin: Callable[[str], None]) -> None:
    """Trains to the last step, from the newest durable state that there is; tells of its phases.
    Every rank calls it."""
    said, copied = Said(place / f"said.{rank}"), 0
    begin("opening")
    torch.manual_seed(7)
    engine, *_ = tiermem.initialize(model=Small(), config=config_of(place, plan))
    opened = open_newest(engine, newest(place, plan))
    said(opened=engine.global_steps, name=opened)
    tell_of_tiles(engine, begin)
    num_redone = 0
    while engine.global_steps < plan.num_steps:
        begin("window" if num_redone == engine.shards.steps.num_redone else "undo")
        num_redone = engine.shards.steps.num_redone
        steepness = 4.0 if engine.global_steps == plan.steep else 1.0
        loss = step_once(
            engine,
            rank,
            lambda: begin("training"),
            lambda: say_durable(engine, plan, said),
            steepness,
        )
        said(step=engine.global_steps, loss=loss.hex())
        if plan.overlap == "none":
            say_durable(engine, plan, said)
        if plan.save_every and engine.global_steps % plan.save_every == 0:
            begin("saving")
            engine.save_checkpoint(str(place / "saved"), **({"copy": True} if plan.copies else {}))
            said(
                durable=copied if plan.copies else engine.global_steps
            )  # a copy goes on behind, the one before has ended
            copied = engine.global_steps
    begin("ending")
    said(end=digest(engine))
    engine.destroy()


def tell_of_tiles(engine: Any, begin: Callable[[str], None]) -> None:
    """Tells when a backward steps tiles, and when a step steps them again."""
    program = engine.shards.program
    attempt, start = program.attempt, program.start

    def attempting(*args: Any) -> Any:
        begin("speculation")
        return attempt(*args)

    def starting(*args: Any, **kwargs: Any) -> None:
        if program.attempted:
            begin("undo")
        start(*args, **kwargs)

    program.attempt, program.start = attempting, starting


def say_durable(engine: Any, plan: Plan, said: Callable[..., None]) -> None:
    """Says that the last step is durable, if the plan makes every step so."""
    if plan.durability == "step":
        said(durable=engine.global_steps)


def step_once(
    engine: Any,
    rank: int,
    after_forward: Callable[[], None] = lambda: None,
    after_backward: Callable[[], None] = lambda: None,
    steepness: float = 1.0,
) -> float:
    """One step on data that is a function of the step and the rank; returns its loss, without
    `steepness`, which scales it."""
    generator = torch.Generator().manual_seed(100 * engine.global_steps + rank)
    loss = engine(torch.randint(0, 31, (2, 9), generator=generator))
    after_forward()
    engine.backward(loss * steepness)
    after_backward()
    engine.step()
    return float(loss.detach())


def digest(engine: Any) -> str:
    """Of every weight, master and moment, whole. Collective."""
    found = hashlib.sha256()
    for name, param in engine.module.named_parameters():
        values = [utils.safe_get_full_fp32_param(param)]
        values += [
            utils.safe_get_full_optimizer_state(param, state) for state in ("exp_avg", "exp_avg_sq")
        ]
        for value in values:
            assert value is not None
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


class Said:
    """Appends lines to a file, one system call each."""

    def __init__(self, file: Path) -> None:
        self._out = open(file, "ab", buffering=0)  # noqa: SIM115  (closed with this object: thousands are made)

    def __call__(self, **what: Any) -> None:
        self._out.write(json.dumps(what).encode() + b"\n")


def lines_of(file: Path) -> list[dict[str, Any]]:
    """What a run has said."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def newest(place: Path, plan: Plan) -> Path | None:
    """The folder that holds `latest`, or that of the run with the newest manifest: what the user of
    a killed run opens."""
    manifests = sorted(
        (place / "nvme").glob("tiermem-*/manifest-*.json"), key=lambda file: file.stat().st_mtime_ns
    )
    if plan.durability == "step" and manifests:
        return manifests[-1].parent
    return place / "saved" if (place / "saved" / "latest").exists() else None


def open_newest(engine: Any, folder: Path | None) -> str | None:
    """Opens a folder, if there is one; returns what was opened."""
    path = engine.load_checkpoint(str(folder))[0] if folder is not None else None
    return None if path is None else str(path)
