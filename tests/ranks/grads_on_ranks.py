"""Run once per rank by test_grads_on_ranks.py: trains with every way of reducing gradients and says
what came of it.

grads_on_ranks.py OUT NVME CASE...    writes OUT/<rank>.pt: {case: losses, weights, the twin's, payloads and events}
"""

from __future__ import annotations

import array
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from launch import as_rank
from programs import models
from programs.models import Block
from programs.twins import batch, seeded
from torch import nn
from ways_to_reduce import BUCKET_NUMEL, CASES, NUM_MICRO, NUM_STEPS

import tiermem
from tiermem import OffloadPolicy

LR = 1e-2


class Branches(nn.Module):
    """Which branches run depends on the rank; the last never does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 31)
        self.block = nn.ModuleList([Ways()])
        self.ways = nn.ModuleList([Block(31, 7) for _ in range(4)])
        self.head = nn.Linear(31, 61)

    def forward(self, tokens: torch.Tensor, way: int) -> torch.Tensor:
        return self.head(self.ways[way](self.block[0](self.embed(tokens), way)))


class Ways(nn.Module):
    """The same inside of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ParameterList([nn.Parameter(torch.randn(31)) for _ in range(4)])

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return x * self.ways[way]


class WaysOnly(Branches):
    """All ranks use the same modules; parameters inside differ."""

    def forward(self, tokens: torch.Tensor, way: int) -> torch.Tensor:
        return self.head(self.block[0](self.embed(tokens), way))


MODELS = {
    "tower": models.ShortTower,
    "one block": lambda: models.ShortTower(1),
    "branches": Branches,
    "ways": WaysOnly,
}


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs, targets = batch(step * 8 + rank)
    outputs = model(inputs) if isinstance(model, models.Tower) else model(inputs, rank)
    return nn.functional.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    twins: dict[tuple[str, int, bool], dict[str, Any]] = {}
    found = {}
    with as_rank() as (rank, out, (nvme, *names)):
        for name, case in CASES.items():
            if name not in names:
                continue
            about = (
                case.get("model", "tower"),
                case.get("micro", 1),
                case.get("fields", {}).get("reduce_op") == "sum",
            )
            if about not in twins:
                twins[about] = train_twin(*about)
            found[name] = train(case, Path(nvme)) | {"twin": twins[about]}
        found["together"] = {"weights": train_together(Path(nvme))}
        found["added"] = [gradients_of_added(rank, reduce_op) for reduce_op in ("mean", "sum")]
        torch.save(found, out, pickle_protocol=4)  # 2, the default, takes an array number by number


def train_twin(model_name: str, num_micro: int, is_sum: bool) -> dict[str, Any]:
    """A plain model on every rank's batches in turn; what each rank's gradients add up to, in the
    order of ranks."""
    model, world = seeded(MODELS[model_name]), dist.get_world_size()
    optim = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for step in range(NUM_STEPS):
        sums: dict[str, torch.Tensor] = {}
        for micro in range(num_micro):
            for rank in range(world):
                model.zero_grad()
                loss = loss_of(model, step * NUM_MICRO + micro, rank)
                loss.backward()
                losses += [loss.item()] * (rank == dist.get_rank())
                for name, param in model.named_parameters():
                    if param.grad is not None:
                        sums[name] = sums.get(name, 0) + param.grad
        for name, param in model.named_parameters():
            param.grad = sums[name] / (1 if is_sum else world) if name in sums else None
        optim.step()
    del optim
    return {"losses": losses, "weights": weights_of(model)}


def train(case: dict[str, Any], nvme: Path) -> dict[str, Any]:
    model = seeded(MODELS[case.get("model", "tower")])
    fields = {
        "stage": 3,
        "persistence_numel": 50,
        "paths": [nvme],
        "reduce_bucket_numel": BUCKET_NUMEL,
    }
    policy = OffloadPolicy(**(fields | case.get("fields", {})))
    found: dict[str, Any] = {}
    losses: list[float] = []
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=LR)
        traffic, recorder = shards.topology.traffic.payloads, shards.store.recorder
        try:
            for step in range(NUM_STEPS):
                traffic.clear()
                recorder.forget()
                losses += run_step(case, shards, model, step)
                before = len(traffic)
                optim.step()
                found["in step"] = [each.what for each in list(traffic)[before:]]
                optim.zero_grad()
        except RuntimeError as error:
            found["error"] = str(error)
        found["payloads"] = [list(each[:3]) for each in traffic if each.what.startswith("reducing")]
        found["updates"] = [list(each[:3]) for each in traffic if each.what.startswith("gathering")]
        found["rows"] = {row.what: row.num_bytes for row in shards.plan.rows}
        found["events"] = [list(each) for each in recorder.events if each.lane == "reduce"]
        found["norm"] = optim.grad_norm
        found["buffers"] = [shards.plan.sums.num, shards.plan.sums.slot_bytes]
        found["steps"] = {shard.name: shard.num_steps for _, shard in shards.parameters()}
        found["resident"] = [live.unit.name for live in shards.units if live.unit.is_resident]
        found["units"] = [
            [live.unit.name, sum(s.shard_numel for s in live.unit.shards)] for live in shards.units
        ]
        found["ends"] = {live.unit.name: end_of(live.unit.shards) for live in shards.units}
        del optim
        return found | {"losses": losses, "weights": weights_of(model)}


def gradients_of_added(rank: int, reduce_op: Literal["mean", "sum"]) -> list[list[float]]:
    """Of two parameters that are added after sharding, after two micro-batches: one whose gradients
    differ by rank, and one in another order of memory, which rank 0 alone uses."""
    model = seeded(MODELS["tower"])
    policy = OffloadPolicy(persistence_numel=50, reduce_op=reduce_op)
    with tiermem.shard(model, policy) as shards:
        model.first = nn.Parameter(torch.ones(3))
        model.second = nn.Parameter(torch.ones(1, 2, 1, 2).to(memory_format=torch.channels_last))
        optim = tiermem.AdamW(model.parameters(), lr=LR)
        for micro in range(2):
            own = (rank + 1) * model.first.sum()
            if rank == 0:
                own = own + (model.second * torch.arange(4.0).view(1, 2, 1, 2)).sum()
            (loss_of(model, micro, rank) + own).backward()
        optim.step()
        del optim, shards
        return [param.grad.flatten().tolist() for param in (model.first, model.second)]


def train_together(nvme: Path) -> dict[str, array.array[float]]:
    """Trains "stage 3" beside another model of the group, which steps before it or after it and is
    closed before the last step.

    Parameters of the other model are unfrozen on the way, so its rows of norms become longer.
    Returns the first one's weights.
    """
    model, other = seeded(models.ShortTower), seeded(models.ShortTower)
    other.layers[0].up.requires_grad_(False)
    policy = OffloadPolicy(
        stage=3, persistence_numel=50, paths=[nvme], reduce_bucket_numel=BUCKET_NUMEL
    )
    with tiermem.shard(model, policy):
        optims = [tiermem.AdamW(model.parameters(), lr=LR)]
        with tiermem.shard(other, policy):
            optims.append(tiermem.AdamW(other.parameters(), lr=LR))
            for step in range(NUM_STEPS - 1):
                for each in (model, other):
                    loss_of(each, step * NUM_MICRO, dist.get_rank()).backward()
                for optim in optims[:: 1 if step % 2 else -1]:
                    optim.step()
                    optim.zero_grad()
                other.layers[0].up.requires_grad_(True)
            loss_of(other, NUM_STEPS, dist.get_rank()).backward()  # no step follows
            optims.pop()
        loss_of(model, (NUM_STEPS - 1) * NUM_MICRO, dist.get_rank()).backward()
        optims.pop().step()
        return weights_of(model)


def end_of(shards: list[Any]) -> int:
    """Elements of a unit's shard layout up to the end of its last parameter."""
    return max(shard.shard_offset + shard.shard_numel for shard in shards)


def run_step(
    case: dict[str, Any], shards: tiermem.Shards, model: nn.Module, step: int
) -> list[float]:
    if case.get("breaks") and step == 1:
        break_backward(model, step)
    kept = model(batch(step)[0]) if case.get("keeps") else None
    if dist.get_rank() > 0 or step == 1:
        del kept
    losses = []
    for micro in range(case.get("micro", 1)):
        is_last = micro == case.get("micro", 1) - 1
        loss = loss_of(model, step * NUM_MICRO + micro, dist.get_rank())
        if case.get("no_sync") and (not is_last or case.get("leaves")):
            with shards.no_sync():
                loss.backward()
        else:
            loss.backward()
        losses.append(loss.item())
    return losses


def break_backward(model: nn.Module, step: int) -> None:
    """An exception on every rank, after some gradients have been reduced and before others."""
    handle = model.layers[0].up.register_full_backward_hook(lambda *_: 1 / 0)
    try:
        loss_of(model, step + 5, dist.get_rank()).backward()
    except ZeroDivisionError:
        handle.remove()
        return
    raise AssertionError("nothing broke")


def weights_of(model: nn.Module) -> dict[str, array.array[float]]:
    """Pickled at once, where a list is pickled number by number."""
    return {
        name: array.array("f", value.flatten().tolist())
        for name, value in model.state_dict().items()
    }


if __name__ == "__main__":
    main()
