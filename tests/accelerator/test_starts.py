"""Does what a user starts run whole on a machine with an accelerator: the command, the README's
lines, a Hugging Face model?

The device is the simulated one, as late as may be, found by torch as an installed plugin of a
device is.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from on_simulated import python

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip

LINES = """
import torch, tiermem
from torch import nn
from tiermem import OffloadPolicy, Tier

class MyLargeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.head = nn.Linear(64, 50)
        self.register_buffer("scale", torch.ones(64))
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale.to(x.dtype)
        return self.head(x)

def loss_of(logits, y):
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())

policy = OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, paths=[{folder!r}], host_bytes=512 << 20)
with tiermem.zero.Init(policy=policy, dtype=torch.bfloat16):
    model = MyLargeModel()
with tiermem.shard(model, policy) as shards:
    optim = tiermem.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(8):
        x = torch.arange(16, device=shards.device).view(2, 8)
        loss = loss_of(model(x), x)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    assert str(shards.device) == "sim:0" and losses[-1] < losses[0], losses

config = {{"train_micro_batch_size_per_gpu": 2, "bf16": {{"enabled": True}}, "gradient_clipping": 1.0,
          "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}},
          "zero_optimization": {{"stage": 3, "offload_param": {{"device": "cpu"}}, "offload_optimizer": {{"device": "cpu"}},
                                "stage3_param_persistence_threshold": 100}}}}
with tiermem.zero.Init(config_dict_or_path=config):
    model = MyLargeModel()
data = [(torch.arange(8) + i, torch.arange(8)) for i in range(8)]
engine, optimizer, loader, _ = tiermem.initialize(model=model, config=config, training_data=data)
for x, y in loader:
    loss = loss_of(engine(x.to(engine.device)), y.to(engine.device))
    engine.backward(loss)
    engine.step()
engine.save_checkpoint({folder!r} + "/saved")
engine.load_checkpoint({folder!r} + "/saved")
engine.close()

from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
llama = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
prompt = torch.tensor([[1, 2, 3]])
expected = llama.generate(prompt, max_new_tokens=5, do_sample=False)
inference = {{"train_micro_batch_size_per_gpu": 1, "zero_optimization": config["zero_optimization"]}}
del inference["zero_optimization"]["offload_optimizer"]
engine = tiermem.initialize(model=llama, config=inference)[0]
made = engine.module.generate(prompt.to(engine.device), max_new_tokens=5, do_sample=False)
with tiermem.zero.unwrap_model_for_generation(engine) as held:
    again = held.module.generate(prompt.to(engine.device), max_new_tokens=5, do_sample=False)
assert made.tolist() == again.tolist() == expected.tolist()
engine.close()
print("all ran")
"""


@pytest.mark.slow
def test_the_readmes_lines_init_with_initialize_and_generate_run_whole(
    sim: ModuleType, tmp_path: Path
) -> None:
    assert "all ran" in python(
        "-c", LINES.format(folder=str(tmp_path)), TIERMEM_SIM_SCHEDULE="late"
    )


@pytest.mark.slow  # tests/gpu/test_train_command.py trains in `make test`
@pytest.mark.parametrize("offload", ["nvme", "cpu"])
def test_train_and_resume_run_whole(offload: str, sim: ModuleType, tmp_path: Path) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(SHAPE))
    train = ["-m", "tiermem.tools.cli", "train", "--runs", str(tmp_path / "runs"), "--seq", "32"]
    folder = ["--nvme", str(tmp_path)] if offload == "nvme" else []
    first = [*train, "--model", str(shape), "--offload", offload, *folder]
    save, late = (
        ["--save", str(tmp_path / "saved"), "--json", str(tmp_path / "first.json")],
        {"TIERMEM_SIM_SCHEDULE": "late"},
    )
    rest = [
        "--resume",
        str(tmp_path / "saved"),
        "--steps",
        "4",
        "--json",
        str(tmp_path / "rest.json"),
    ]
    python(*first, "--steps", "4", "--json", str(tmp_path / "whole.json"), **late)
    python(*first, "--steps", "2", *save, TIERMEM_SIM_SCHEDULE="random:3")
    python(*train, *rest, **late)
    whole, begun, rest = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "first", "rest")
    )
    assert [*begun["losses"], *rest["losses"]] == whole["losses"]
    assert whole["device"] == "sim:0"
