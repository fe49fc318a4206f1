"""A tiny pretrained model: a tokenizer with a chat template, and a Llama trained until it completes
a text."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "bytes rest in a tier and are fetched before they are used and released after"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' <end> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_QUESTIONS = ("where", "when", "what", "who")
_ANSWERS = ("in a tier", "before they are used", "bytes", "and released after")
_MOST_STEPS = 300


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the words of the text and of the chats."""
    words = ["<pad>", "<end>", "user", "assistant", *_QUESTIONS, *TEXT.split()]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    own = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<pad>",
        chat_template=TEMPLATE,
    )


def pretrained(folder: Path) -> Path:
    """Writes model and tokenizer into a new folder; returns it."""
    words = tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, **_SIZES))
    ids = words(TEXT, return_tensors="pt").input_ids
    optim = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(_MOST_STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        if loss < 0.02:
            break
    assert completes(model, words, 4)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def completes(model: LlamaForCausalLM, words: PreTrainedTokenizerFast, num_given: int) -> bool:
    """Whether a model says the text, given its first words."""
    ids = words(TEXT, return_tensors="pt").input_ids
    said = model.generate(
        ids[:, :num_given], max_new_tokens=ids.shape[1] - num_given, do_sample=False
    )
    return bool(torch.equal(said, ids))


def write_chats(file: Path, num_rows: int = 24) -> Path:
    """Writes chats of different lengths as jsonl; returns the file."""
    rows = []
    for row in range(num_rows):
        chat = []
        for turn in range(1 + row % 3):
            which = (row + turn) % len(_QUESTIONS)
            chat.append({"role": "user", "content": _QUESTIONS[which]})
            chat.append({"role": "assistant", "content": _ANSWERS[which]})
        rows.append(json.dumps({"messages": chat}))
    file.write_text("\n".join(rows) + "\n")
    return file
