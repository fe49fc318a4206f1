"""One layer of a mixture of experts

Trains one layer of a Qwen3-MoE whose weights, gradients and states are kept on the disk, then generates
with it. Where tokens choose few experts, only their rows are read. Each line has the tokens, the
bytes that the kernel counts, and the most memory so far.

    pip install transformers                beside tiermem (docs/start.md)
    python moe_layer.py                     a tiny layer
    python moe_layer.py 2048 768 128 8      a layer of 30B-A3B: its width, that of an expert, the number
                                            of experts, those of a token. It takes 9 GB of disk
"""

import json
import resource
import sys
import time

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.precision import PRESETS

names = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
given = [int(each) for each in sys.argv[1:]] or [64, 64, 16, 1]
heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
shape = dict(zip(names, given, strict=True)) | heads
config = Qwen3MoeConfig(**shape, num_hidden_layers=1, vocab_size=256)
homes = {"params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.NVME, "paths": ["."]}
# With one buffer no weight stays in memory, as in a model that is far larger than it.
sizes = {"persistence_numel": 100, "unit_buffers": 1, "precision": PRESETS["compact"]}
policy = OffloadPolicy(**homes, **sizes)


def kernel_bytes():
    with open("/proc/self/io") as lines:
        counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def measure(name, num_tokens, run):
    tokens = torch.randint(256, (1, num_tokens))
    begin_s, begin = time.monotonic(), kernel_bytes()
    run(tokens)
    read, written = (now - then for now, then in zip(kernel_bytes(), begin, strict=True))
    figures = {"seconds": time.monotonic() - begin_s, "read MB": read / 1e6}
    figures |= {"written MB": written / 1e6}
    figures |= {"most MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}
    print(name, num_tokens, json.dumps({key: round(value, 2) for key, value in figures.items()}))


torch.manual_seed(0)
with tiermem.zero.Init(policy=policy, dtype=torch.bfloat16):
    model = Qwen3MoeForCausalLM(config)
with tiermem.shard(model, policy, device="cpu") as shards:
    optim = tiermem.AdamW(model.parameters(), lr=1e-4)

    def train(tokens):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optim.step()
        optim.zero_grad()
        shards.steps.finish()

    for length in (512, 512, 4, 4):
        measure("training step", length, train)
    with torch.no_grad():
        for _ in range(3):
            measure("decode step", 1, model)
