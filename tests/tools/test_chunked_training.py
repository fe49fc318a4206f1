"""Does `tiermem train` compute a long sequence's loss in chunks, to the same value and gradients
but for rounding?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.layers import chunked_loss
from tiermem.tools.job.launcher import Job
from tiermem.tools.plan import budget
from tiermem.tools.plan.budget import ActivationBytes, has_chunked_loss
from tiermem.tools.plan.prediction import build_model
from tiermem.tools.presets import ModelSizes

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
}


def train(folder: Path, tied: bool) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, weights, and the most elements of what the model calls logits."""
    policy = OffloadPolicy(params=Tier.NVME, optim=Tier.HOST, paths=[folder], persistence_numel=0)
    shape = SHAPE | {"tie_word_embeddings": tied}
    job = Job("tied or not", shape, batch=2, seq=40, is_checkpointing=True)
    model = build_model(job, policy=policy)
    losses, widest = [], 0
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(step))
            output = model(input_ids=tokens, labels=tokens)
            output.loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(output.loss.item())
            widest = output.logits.shape[-1]
        return losses, list(model.state_dict().values()), widest


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_trains_with_a_loss_in_chunks(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, weights, widest = train(tmp_path, tied)
    assert widest == 300
    monkeypatch.setattr(budget, "_LOGITS_WHOLE_BYTES", 1000)
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 4 * 300 * 16)
    chunked, others, widest = train(tmp_path, tied)
    assert widest == 32  # hidden states: no logits of all tokens
    assert chunked == pytest.approx(whole, rel=1e-6)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(others, weights, strict=True))


def test_logits_of_a_long_sequence_take_a_chunk_of_the_plan() -> None:
    sizes = ModelSizes.of(SHAPE | {"vocab_size": 128_000})
    assert not has_chunked_loss(sizes, 512) and has_chunked_loss(sizes, 8192)
    # other heads may scale or cap their logits
    assert not has_chunked_loss(sizes._replace(is_llama=False), 8192)
    short, long = (
        next(
            row
            for row in ActivationBytes(sizes, num_tokens, "bf16", "bf16", True, False).rows()
            if row.what == "logits and loss"
        )
        for num_tokens in (512, 8192)
    )
    assert short.num_bytes == 512 * 128_000 * 16
    assert long.num_bytes == (64 << 20) * 4 + 8192 * 32 * 2
    assert "chunks" in long.why
