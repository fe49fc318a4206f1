"""LoRA: adapters on a frozen model that is kept on NVMe

The base model's weights are read from NVMe in forward and in backward, and never written. Gradients
and optimizer states exist for the adapters alone. `save_model` writes the adapters.

    pip install trl peft         beside tiermem (docs/start.md)
    python lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.integrations.huggingface import TiermemTrainer

# Parameters of up to 100,000 elements stay in memory; all of this tiny model are smaller, so here
# that is 1000.
policy = OffloadPolicy(
    params=Tier.NVME, optim=Tier.HOST, paths=["."], host_bytes=512 << 20, persistence_numel=1000
)

# A base model on the disk: yours is there already.
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes)).save_pretrained(
    "base"
)

model = tiermem.from_pretrained("base", policy=policy)  # streamed to NVMe, never whole in memory
model = get_peft_model(
    model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
)
model.print_trainable_parameters()

text = torch.tensor(list(b"Bytes rest in a tier, and are fetched before they are used. " * 50))
data = [{"input_ids": part, "labels": part} for part in text[:2048].view(-1, 64)]
args = TrainingArguments(
    "out",
    max_steps=10,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=5,
    report_to=[],
)
trainer = TiermemTrainer(model, args, train_dataset=data, tiermem=policy)
trainer.train()
trainer.save_model("out/adapter")
trainer.close()
