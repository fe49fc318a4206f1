"""A loop of Accelerate

`prepare` takes the place of `accelerator.prepare`. The rest of the loop, and `save_state` and
`load_state`, stay.

    pip install transformers accelerate         beside tiermem (docs/start.md)
    python accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tiermem import OffloadPolicy, Tier
from tiermem.integrations.accelerate import prepare

sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))
text = torch.tensor(list(b"Bytes rest in a tier, and are fetched before they are used. " * 50))
data = [{"input_ids": part, "labels": part} for part in text[:2048].view(-1, 64)]

accelerator = Accelerator(gradient_accumulation_steps=2)
# Parameters of up to 100,000 elements stay in memory; all of this tiny model are smaller, so here
# that is 1000.
policy = OffloadPolicy(
    params=Tier.NVME, optim=Tier.NVME, paths=["."], host_bytes=512 << 20, persistence_numel=1000
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # `prepare` makes tiermem's of it
model, optimizer, loader = prepare(
    accelerator, model, optimizer, DataLoader(data, batch_size=2), policy=policy
)

for number, batch in enumerate(loader):
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if number % 4 == 3:
        print(f"micro-batch {number + 1}: loss {loss.item():.3f}")
accelerator.save_state("state")
