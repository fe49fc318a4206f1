"""Run by test_save_on_ranks.py, once per rank: several cases in one process group; each leaves
checkpoints to be looked at."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from launch import as_rank
from runs import live_states, model, policy, states_at, states_in, train

import tiermem
from tiermem import checkpoint
from tiermem.swap.disk import durable

CASES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "nvme": ("nvme", {}, torch.float32),
    "tiny": ("nvme", {"precision": tiermem.Precision.preset("tiny")}, torch.bfloat16),
    "cpu": ("cpu", {}, torch.float32),
    "stage 0": ("none", {"stage": 0}, torch.float32),
    "stage 2": ("nvme", {"stage": 2}, torch.float32),
    "replicas": ("nvme", {"shard_group_size": 1}, torch.float32),
    "partly resident": ("nvme", {"resident_bytes": 9000}, torch.float32),
    "initial masters": (
        "nvme",
        {"master_from": "init", "precision": tiermem.Precision.preset("compact")},
        torch.bfloat16,
    ),
    "frozen in 8 bits": ("nvme", {"quantised_frozen": True}, torch.float32),
}


def saved_equals_live(
    saved: dict[Any, bytes], live: dict[Any, torch.Tensor], precision: str
) -> list[Any]:
    """Weights (and in fp32 every state) that are not saved as they are."""
    return [
        key
        for key, value in live.items()
        if value.numel() and key in saved and (key[1] == "weight" or precision == "exact")
        and saved[key] != value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ]  # fmt: skip


def whole_states(shards: tiermem.Shards) -> dict[Any, torch.Tensor]:
    """Every weight and moment, gathered."""
    found = {}
    for live, shard in shards.parameters():
        found[shard.name, "weight"] = shards.weight(shard.param)
        if shards.states is not None and live.unit.is_trainable:
            for name in shards.states.names(shard):
                mine = shards.states.state(shard, name)
                found[shard.name, name] = shards.values.assemble(shard, mine)
    return found


def run_case(name: str, rank: int, folder: Path) -> dict[str, Any]:
    where, fields, dtype = CASES[name]
    out = folder / "out" / name
    made = model(dtype=dtype)
    with tiermem.shard(made, policy(where, folder, **fields)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 2, seed=rank)  # ranks see different data: so do their buffers
        checkpoint.save(shards, optimizer, out, "t")
        live, saved = whole_states(shards), states_in(out, "t")
        precision = "exact" if dtype == torch.float32 else "less"
        wrong = saved_equals_live(saved, live, precision) if name != "frozen in 8 bits" else []
        train(made, optimizer, 1, seed=rank)
        stays = states_in(out, "t") == saved
        checkpoint.save(shards, optimizer, out, "copy", copy=True)
        train(made, optimizer, 1, seed=rank)
        checkpoint.wait(shards)
        copied = states_in(out, "copy")
        checkpoint.save(shards, optimizer, out, "t")
        again = states_in(out, "t")
        mean = made.norm.running_mean.view(torch.uint8).numpy().tobytes()
        own = again["norm.running_mean", "weight" + (f".rank{rank}" if rank else "")] == mean
    return {
        "wrong": wrong, "stays": stays, "own": own, "keys": sorted(saved), "is_other": copied != saved and copied != again,
        "numels": {key: len(value) for key, value in saved.items()},
    }  # fmt: skip


def fail_on(rank: int, failing_rank: int, kind: str, ending: str) -> Any:
    """An observer that raises on one rank, before one kind of step on files of some name."""

    def observe(step: durable.Step) -> None:
        if (
            rank == failing_rank
            and step.when == "before"
            and step.kind == kind
            and step.name.endswith(ending)
        ):
            raise OSError(28, "No space left on device", step.name)

    return durable.watch(observe)


FAULTS = [
    (1, "sync", "segment.bin"),
    (1, "write", "part-3-1.json.new"),
    (0, "write", "manifest-4.json.new"),
    (0, "rename", "tiermem.json"),
    (0, "rename", "latest"),
]


def run_faults(rank: int, folder: Path) -> list[Any]:
    """A tag stays as it was, whatever fails while the next one is saved, and the one after is
    fine."""
    out, found, made = folder / "out" / "faults", [], model()
    with tiermem.shard(made, policy("nvme", folder)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 1, seed=rank)
        checkpoint.save(shards, optimizer, out, "first")
        train(made, optimizer, 1, seed=rank)
        saved, used = states_in(out, "first"), None
        for number, (failing, kind, ending) in enumerate(FAULTS):
            ending = ending.replace("part-3", f"part-{number + 2}").replace(
                "manifest-4", f"manifest-{number + 2}"
            )
            try:
                with fail_on(rank, failing, kind, ending):
                    checkpoint.save(shards, optimizer, out, "second")
                said = "nothing"
            except OSError as error:
                said = f"{error.errno} {error}"
            train(made, optimizer, 1, seed=rank)
            files = sorted(path.name for path in shards.store.folders()[0].iterdir())
            left = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
            used = shards.store.stats().nvme_bytes if number == 0 else used
            found.append(
                (
                    said,
                    states_in(out, "first") == saved,
                    files,
                    left,
                    shards.store.stats().nvme_bytes == used,
                )
            )
        checkpoint.save(shards, optimizer, out, "second")
        live = whole_states(shards)
        found.append(saved_equals_live(states_in(out, "second"), live, "exact"))
    return found


def run_steps(rank: int, folder: Path) -> dict[str, Any]:
    """durability="step", whose steps go on: what is durable (rank 0's manifests) after each part of
    a program."""
    found: dict[str, Any] = {}
    place = folder / "steps"
    place.mkdir(exist_ok=True)

    def note(what: str) -> None:
        found[what] = sorted(file.name for file in store.glob("manifest-*"))

    def begin() -> tuple[tiermem.Shards, tiermem.AdamW, torch.nn.Module, Path]:
        made = model()
        shards = tiermem.shard(made, policy("nvme", place, durability="step", overlap="forward"))
        return shards, tiermem.AdamW(made.parameters(), lr=0.01), made, shards.store.folders()[0]

    shards, optimizer, made, store = begin()
    with shards:
        train(made, optimizer, 2, seed=rank)
        note("two steps")
        with torch.no_grad():
            made(torch.arange(11))
        whole_states(shards)
        note("looked at")
        for failing in (0, 1):
            with fail_on(rank, failing, "sync", "segment.bin"):
                try:
                    train(made, optimizer, 1, seed=rank)
                except OSError as error:
                    found[f"error of {failing}"] = str(error)
            note(f"a backward that fails on {failing}")
            train(made, optimizer, 1, seed=rank)
        checkpoint.wait(shards)
        note("waited")
        live = whole_states(shards)
        found["wrong"] = [
            saved_equals_live(states_at(file), live, "exact") for file in store.glob("manifest-*")
        ]
        train(made, optimizer, 1, seed=rank)
    note("closed")
    shards, optimizer, made, store = begin()
    try:
        with shards:
            train(made, optimizer, 2, seed=rank)
            raise KeyError
    except KeyError:
        note("closed by an exception")
    return found


def run_blocks(rank: int, folder: Path) -> dict[str, Any]:
    """A parameter of several MiB whose blocks are cut by tiles and by the rank's edge."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(1031, 523))
    with tiermem.shard(made, policy("nvme", folder, tile_numel=1 << 16)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        made(torch.randn(2, 1031)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        shards.store.flush()
        shards.prefetcher.empty()  # it reads ahead for the next forward
        before = shards.store.stats()
        checkpoint.save(shards, optimizer, folder / "out" / "blocks", "t")
        after = shards.store.stats()
        saved, live = states_in(folder / "out" / "blocks", "t"), whole_states(shards)
    moved = (
        after.nvme_written_bytes - before.nvme_written_bytes,
        after.nvme_read_bytes - before.nvme_read_bytes,
    )
    return {
        "wrong": saved_equals_live(saved, live, "exact"),
        "moved": moved,
        "bytes": len(saved["0.weight", "exp_avg"]),
    }


def run_disagreements(rank: int, folder: Path) -> list[str]:
    """Tags that differ, flags that differ, a client state that one rank cannot save, and buffers
    that are no variants."""
    out, said, made = folder / "out" / "apart", [], model()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("tiermem").addHandler(handler)
    with tiermem.shard(made, policy("cpu", folder)) as shards:
        checkpoint.save(shards, None, out, f"tag{rank}")
        said.append("; ".join(record.getMessage() for record in records))
        for tag, fields in (
            (f"tag{rank}", {"tag_validation": "Fail"}),
            ("t", {"save_latest": rank == 0}),
            ("t", {"client_state": {"x": object() if rank else 1}}),
        ):
            try:
                checkpoint.save(shards, None, out, tag, **fields)
                said.append("nothing")
            except (ValueError, TypeError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
        made.register_buffer("seen", torch.zeros(3 + rank))
        try:
            checkpoint.save(shards, None, out, "t")
        except ValueError as error:
            said.append(str(error))
    logging.getLogger("tiermem").removeHandler(handler)
    return [*said, *sorted(path.name for path in out.iterdir())]


def run_beside(rank: int, folder: Path) -> dict[str, bool]:
    """States of an ordinary parameter that stay: its moments have other codes on each rank, and the
    same scales."""
    made, out = model(dtype=torch.bfloat16), folder / "out" / "beside"
    beside = torch.nn.Parameter(torch.zeros(64))
    tiny = tiermem.Precision.preset("tiny")
    with tiermem.shard(made, policy("cpu", folder, precision=tiny)) as shards:
        optimizer = tiermem.AdamW([*made.parameters(), beside], lr=0.01, precision=tiny)
        grad = torch.linspace(0.5, 1.0, 64)
        beside.grad = grad.flip(0) if rank else grad
        optimizer.step()
        *_, before = optimizer.state_dict()["state"].values()
        checkpoint.save(shards, optimizer, out, "t")
        checkpoint.load(shards, optimizer, out, "t")
        *_, after = optimizer.state_dict()["state"].values()
    return {name: torch.equal(value, after[name]) for name, value in before.items()}


def run_engine(rank: int, folder: Path) -> list[str]:
    """An engine whose config says what becomes of tags that differ."""
    said = []
    for validation in ("Fail", "ignore"):
        made = torch.nn.Sequential(torch.nn.Linear(5, 5))
        config = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"tag_validation": validation}}
        engine = tiermem.initialize(model=made, config=config)[0]
        try:
            engine.save_checkpoint(folder / "out" / validation, f"tag{rank}")
            said.append("saved")
        except ValueError as error:
            said.append(str(error))
        engine.close()
    return said


if __name__ == "__main__":
    with as_rank() as (rank, out_file, (folder, *names)):
        nvme = Path(folder)
        found: dict[str, Any] = {name: run_case(name, rank, nvme) for name in names}
        found["blocks"] = run_blocks(rank, nvme)
        found["faults"] = run_faults(rank, nvme)
        found["steps"] = run_steps(rank, nvme)
        found["apart"] = run_disagreements(rank, nvme)
        found["beside"] = run_beside(rank, nvme)
        found["engine"] = run_engine(rank, nvme)
        torch.save(found, out_file)


__all__ = ["live_states"]
