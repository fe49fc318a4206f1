"""A plain training loop

`tiermem.shard` around a model and tiermem's AdamW are the whole change. Weights, gradients and
optimizer states are kept on NVMe, here in the current folder; each layer is fetched before it runs, and
released after.

    python plain_loop.py
"""

import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier

VOCABULARY = 256
WIDTH = 64


class Model(nn.Module):
    """A small language model over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask.to(x.dtype), is_causal=True)
        return self.head(x)


text = torch.tensor(list(b"Bytes rest in a tier, and are fetched before they are used. " * 50))
policy = OffloadPolicy(
    params=Tier.NVME, optim=Tier.NVME, paths=["."], host_bytes=512 << 20,
    # for a tiny model: parameters of up to 100,000 elements stay in memory otherwise
    persistence_numel=1000,
)  # fmt: skip

torch.manual_seed(0)
with tiermem.zero.Init(policy=policy, dtype=torch.bfloat16):
    model = Model()  # each layer goes to its tier when it has been built

with tiermem.shard(model, policy) as shards:
    optim = tiermem.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        start = torch.randint(len(text) - 65, (8,))
        batch = torch.stack([text[i : i + 65] for i in start.tolist()]).to(shards.device)
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    tiermem.checkpoint.save(shards, optim, "checkpoints")
