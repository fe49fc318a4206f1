"""What an engine does with whole weights on several ranks; run once per rank by
test_engine_on_ranks.py.

engine_on_ranks.py OUT NVME          writes OUT/<rank>.pt, and the files that rank 0 saves
engine_on_ranks.py OUT NVME away     rank 1 stays away from a full state: the others stop
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import as_rank
from programs import models
from programs.twins import seeded, train_engine

import tiermem
from tiermem.utils import safe_get_full_fp32_param
from tiermem.zero import unwrap_model_for_generation


def started(stage: int, nvme: Path, **own: Any) -> tiermem.Engine:
    on_nvme = {"device": "nvme", "nvme_path": str(nvme)}
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 50,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": on_nvme,
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero | ({"offload_param": on_nvme} if stage == 3 else {}),
        "tiermem": own,
    }
    engine = tiermem.initialize(model=seeded(models.tied_tower), config=config)[0]
    torch.set_num_threads(1)
    return engine


def weights_of(stage: int, out: Path, nvme: Path) -> dict[str, Any]:
    engine, found = started(stage, nvme), {}
    train_engine(engine, [0])
    for name in ("pytorch_model.bin", "model.safetensors"):
        assert engine.save_16bit_model(out / f"stage {stage}", name)
    found["consolidated"] = engine._consolidated_16bit_state_dict()
    found["whole"] = engine.module_state_dict()
    engine.offload_states()
    engine.reload_states()
    inputs = torch.arange(11).view(1, 11)
    with torch.no_grad(), unwrap_model_for_generation(engine):
        before = calls(engine)
        found["present"] = [engine(inputs) for _ in range(2)]
        found["calls while present"] = calls(engine) - before
    with torch.no_grad():
        found["streamed"] = engine(inputs)
    try:
        engine.save_16bit_model(out / f"stage {stage}" / "model.safetensors" / "below a file")
    except OSError as error:
        found["error"] = str(error)
    train_engine(engine, [1])
    found["after"] = engine.module_state_dict()
    engine.close()
    return found


def calls(engine: tiermem.Engine) -> int:
    """Gathers so far."""
    return sum(event.lane == "gather" for event in engine.shards.store.recorder.events)


def stay_away(nvme: Path) -> None:
    dist.init_process_group("gloo")
    engine = started(3, nvme, timeout_s=3.0)
    if dist.get_rank() == 1:
        time.sleep(60)
    for param in engine.module.parameters():
        safe_get_full_fp32_param(param)


if __name__ == "__main__":
    if sys.argv[3:] == ["away"]:
        stay_away(Path(sys.argv[2]))
    else:
        with as_rank() as (_, out, (nvme,)):
            torch.save(
                {f"stage {stage}": weights_of(stage, out.parent, Path(nvme)) for stage in (1, 3)},
                out,
            )
