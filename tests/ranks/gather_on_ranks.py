"""Run once per rank by test_gathers.py: trains small models and says what was gathered, and when.

gather_on_ranks.py OUT NVME    writes OUT/<rank>.pt: {case: what run() returns}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gather_cases import CASES, NUM_STEPS, Case
from launch import as_rank
from programs import models
from programs.twins import loss_of, seeded, train_steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiermem
from tiermem.config import load_config

MODELS = {"tower": models.Tower, "tied": models.tied_tower, "wandering": models.Wandering}


def main() -> None:
    with as_rank() as (_, out, (nvme,)):
        twin = {name: train_twin(seeded(build)) for name, build in MODELS.items()}
        torch.save(
            {
                name: run(case, Path(nvme)) | {"twin": twin[case.model]}
                for name, case in CASES.items()
            },
            out,
        )


def train_twin(plain: nn.Module) -> list[float]:
    model = DistributedDataParallel(plain, find_unused_parameters=True)
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    return train_steps(model, optim, [dist.get_rank() + 100 * step for step in range(NUM_STEPS)])


def run(case: Case, nvme: Path) -> dict[str, Any]:
    """Trains a case; events and payloads are those of each step, from the end of the one before to
    the start of its own."""
    config = load_config(case.config(nvme))
    model = seeded(MODELS[case.model])
    engine, _, _, _ = tiermem.initialize(model=model, config=config)
    shards = engine.shards
    losses, steps, saved, seen = [], [], SavedBytes(shards), {}
    for step in range(NUM_STEPS):
        with saved:
            loss = loss_of(engine, dist.get_rank() + 100 * step)
        seen = {name: str(p.dtype) for name, p in model.named_parameters()} if step == 0 else seen
        engine.backward(loss)
        events = sorted(shards.store.recorder.events, key=lambda event: event.start_ns)
        payloads = list(shards.topology.traffic.payloads)
        steps.append({"events": events, "payloads": payloads})
        shards.store.recorder.forget()
        shards.topology.traffic.payloads.clear()
        engine.step()
        losses.append(loss.item())
    shards.prefetcher.empty()
    found = {
        "losses": losses,
        "head": model.state_dict()["head.weight"][0].tolist(),
        "steps": steps,
        "units": [
            [u.unit.name, str(u.unit.full_dtype), [s.numel for s in u.unit.shards]]
            for u in shards.units
        ],
        "rows": [[row.what, row.num_bytes] for row in shards.plan.rows],
        "peak_bytes": shards.store.arena.peak_bytes,
        "saved_bytes": saved.num_bytes,
        "dtypes_after_forward": seen,
        "dtypes_at_rest": {name: str(p.dtype) for name, p in model.named_parameters()},
    }
    engine.close()
    return found


class SavedBytes:
    """Bytes that autograd keeps from one forward to its backward, outside the units' own
    storages."""

    def __init__(self, shards: tiermem.Shards) -> None:
        self._own = {live.memory.full.untyped_storage()._cdata for live in shards.units}
        self._found: dict[int, int] = {}
        self.num_bytes = 0

    def __enter__(self) -> None:
        self._found.clear()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self.num_bytes = sum(self._found.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._found[storage._cdata] = storage.nbytes()
        return tensor


if __name__ == "__main__":
    main()
