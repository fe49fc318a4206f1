"""Run by a Python that has DeepSpeed: trains three steps of ZeRO-3 and writes its checkpoint, and
what is expected in it.

python deepspeed_writes.py FOLDER RANKS fp32|bf16 RANK     ->  FOLDER/ds, FOLDER/expected.pt
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    """Odd sizes; tied, frozen and one-element parameters; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.hidden = nn.Linear(7, 11)
        self.back = nn.Linear(11, 7, bias=False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(
            self.back(torch.tanh(self.hidden(self.frozen(self.embed(x))))) * self.scale
        )


def main(folder: Path, num_ranks: int, precision: str, rank: int) -> None:
    deepspeed: Any = importlib.import_module("deepspeed")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_SIZE=str(num_ranks)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks
    )
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    net = Net()
    wide = [p for p in net.parameters() if p.requires_grad and p.dim() > 1]
    flat = [p for p in net.parameters() if p.requires_grad and p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.1}, {"params": flat, "lr": 1e-4}], lr=1e-3
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
    }
    config["zero_optimization"] = {"stage": 3, "sub_group_size": 60}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    for _ in range(3):
        x = torch.randint(0, 13, (4,), generator=torch.Generator().manual_seed(rank))
        engine.backward(nn.functional.cross_entropy(engine(x).float(), x))
        engine.step()
    engine.save_checkpoint(str(folder / "ds"))
    expected = {name: _states(deepspeed, param) for name, param in net.named_parameters()}
    if rank == 0:
        torch.save(expected, folder / "expected.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # its threads outlive it otherwise, and end the process by a signal


def _states(deepspeed: Any, param: nn.Parameter) -> dict[str, torch.Tensor]:
    utils = deepspeed.utils
    with deepspeed.zero.GatheredParameters([param]):
        found = {"weight": param.detach().clone()}
    if param.requires_grad:
        if param.dtype != torch.float32:
            found["master"] = utils.safe_get_full_fp32_param(param)
        found |= {
            name: utils.safe_get_full_optimizer_state(param, name)
            for name in ("exp_avg", "exp_avg_sq")
        }
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
