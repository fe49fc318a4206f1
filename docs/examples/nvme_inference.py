"""Inference from NVMe

The model's weights stay on the disk and are read layer by layer for each token, so a model needs
the memory of two layers. A batch of many prompts reads each layer once for all of them.

    pip install transformers accelerate         beside tiermem (docs/start.md)
    python nvme_inference.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiermem
from tiermem import OffloadPolicy, Tier

# A model on the disk: yours is there already.
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes)).save_pretrained(
    "model"
)

# Parameters of up to 100,000 elements stay in memory; all of this tiny model are smaller, so here
# that is 100.
policy = OffloadPolicy(params=Tier.NVME, paths=["."], host_bytes=256 << 20, persistence_numel=100)
model = tiermem.from_pretrained("model", policy=policy)
with tiermem.shard(model, policy, is_trained=False) as shards:
    prompts = torch.tensor([list(b"Bytes rest"), list(b"in a tier.")], device=shards.device)
    tokens = model.generate(prompts, max_new_tokens=8, do_sample=False, pad_token_id=0)
    print(tokens[:, prompts.shape[1] :].tolist())
    for row in shards.plan.rows:
        if row.num_bytes:
            print(f"{row.tier.name:6} {row.num_bytes:>10,} bytes  {row.what}")
