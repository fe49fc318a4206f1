"""A DeepSpeed config

Keep the config and replace the import. Every key is honoured, computed and reported, or refused
with the reason; `tiermem check --config ds.json` says which.

    python deepspeed_json.py
"""

import json
from pathlib import Path

import torch
from torch import nn

import tiermem

config = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "."},
        "offload_optimizer": {"device": "nvme", "nvme_path": "."},
        "stage3_param_persistence_threshold": 100,
    },
}
Path("ds.json").write_text(json.dumps(config))

torch.manual_seed(0)
with tiermem.zero.Init(config_dict_or_path="ds.json"):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1)
    )
inputs = torch.randn(64, 64)
data = list(zip(inputs, inputs.sum(1, keepdim=True), strict=True))

engine, optimizer, loader, scheduler = tiermem.initialize(
    model=model, config="ds.json", training_data=data
)
for number, (x, y) in enumerate(loader):
    x = x.to(engine.device, torch.bfloat16)
    y = y.to(engine.device)
    loss = nn.functional.mse_loss(engine(x).float(), y)
    engine.backward(loss)
    engine.step()  # steps at every second micro-batch, as the config says
    print(f"micro-batch {number + 1}: loss {loss.item():.3f}")
engine.save_checkpoint("checkpoints")
engine.close()
