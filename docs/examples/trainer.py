"""A Hugging Face Trainer

One import changes. With `tiermem="auto"`, the default, the states go to the fastest places that fit
the free memory. Here a policy sends all of them to NVMe. The model is a tiny Llama with random
weights, so that nothing is downloaded.

    pip install transformers accelerate         beside tiermem (docs/start.md)
    python trainer.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from tiermem import OffloadPolicy, Tier
from tiermem.integrations.huggingface import TiermemTrainer as Trainer  # the change

sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))
text = torch.tensor(list(b"Bytes rest in a tier, and are fetched before they are used. " * 50))
data = [{"input_ids": part, "labels": part} for part in text[:2048].view(-1, 64)]

args = TrainingArguments(
    "out",
    max_steps=10,
    per_device_train_batch_size=4,
    learning_rate=3e-3,
    logging_steps=5,
    save_steps=5,
    save_total_limit=1,
    report_to=[],
)
# Parameters of up to 100,000 elements stay in memory; all of this tiny model are smaller, so here
# that is 1000.
policy = OffloadPolicy(
    params=Tier.NVME, optim=Tier.NVME, paths=["."], host_bytes=512 << 20, persistence_numel=1000
)
trainer = Trainer(model, args, train_dataset=data, tiermem=policy)
trainer.train()  # resume_from_checkpoint=True goes on from the newest checkpoint
trainer.save_model("out/final")
trainer.close()  # the model's files on NVMe are removed
