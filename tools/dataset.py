"""TokenDataset: a corpus as torch sees it, for any loader that takes a map-style dataset."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from tiermem.tools.corpus import Corpus

Example = dict[str, torch.Tensor]


class TokenDataset(Dataset[Example]):
    """{"input_ids", "labels"} of one window each, int64; a Hugging Face model shifts the labels itself."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    def __len__(self) -> int:
        return len(self._corpus)

    def __getitem__(self, index: int) -> Example:
        tokens = torch.frombuffer(bytearray(self._corpus.window(index)), dtype=torch.uint8).long()
        return {"input_ids": tokens, "labels": tokens}

    def batch(self, index: int, size: int, device: torch.device) -> Example:
        """The index-th batch of `size` windows, stacked, on `device`."""
        examples = [self[index * size + i] for i in range(size)]
        tokens = torch.stack([example["input_ids"] for example in examples]).to(device)
        return {"input_ids": tokens, "labels": tokens}
