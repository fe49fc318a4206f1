"""TRL: supervised fine-tuning

Every trainer that inherits from transformers' Trainer takes the mixin: put it before the trainer's
own class. DPOTrainer and GRPOTrainer work in the same way.

    pip install trl peft         beside tiermem (docs/start.md)
    python trl_sft.py
"""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tiermem import OffloadPolicy, Tier
from tiermem.integrations.huggingface import TiermemTrainer


class ShardedSFTTrainer(TiermemTrainer.mixin, SFTTrainer):
    """SFTTrainer with the argument `tiermem`."""


sentence = "bytes rest in a tier and are fetched before they are used"
words = {
    word: number for number, word in enumerate(["<pad>", "<end>", *sorted(set(sentence.split()))])
}
own = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=own, pad_token="<pad>", eos_token="<end>", unk_token="<pad>"
)

sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=len(words), max_position_embeddings=64, pad_token_id=0, **sizes)
)

# Parameters of up to 100,000 elements stay in memory; all of this tiny model are smaller, so here
# that is 1000.
policy = OffloadPolicy(
    params=Tier.NVME, optim=Tier.NVME, paths=["."], host_bytes=512 << 20, persistence_numel=1000
)
trainer = ShardedSFTTrainer(
    model,
    args=SFTConfig(
        "out",
        max_steps=10,
        learning_rate=3e-3,
        max_length=16,
        logging_steps=5,
        bf16=False,
        report_to=[],
    ),
    train_dataset=Dataset.from_dict({"text": [sentence] * 64}),
    processing_class=tokenizer,
    tiermem=policy,
)
trainer.train()
trainer.close()
