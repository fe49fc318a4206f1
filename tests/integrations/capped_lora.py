"""LoRA beside a frozen base of 6.7 B parameters in nf4 blocks on NVMe, under a cap: run by
test_memory.py.

capped_lora.py lora FOLDER     builds the model with random weights, trains three steps, writes FOLDER/lora.json

    {"losses", "peaks": most resident bytes so far by phase, "read": bytes that the kernel read in
    each step, "planned": bytes
     that a step reads by the forecast, "at rest": bytes on NVMe of the plan, "seconds": of each
     phase}
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from capped_llama import peak_bytes
from programs.adapters import adapted
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

import tiermem
from tiermem import OffloadPolicy, Shards, Tier
from tiermem.forecast import Rates, forecast_shards
from tiermem.forecast.phases import NVME_TO_HOST
from tiermem.forecast.rates import Compute

CONFIG = LlamaConfig(  # Llama-2 7B
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
NUM_TOKENS = 64
NUM_STEPS = 3


def read_bytes() -> int:
    """The bytes that the kernel has fetched from storage for this process."""
    return int(
        re.findall(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[0]
    )


def fill(model: torch.nn.Module) -> None:
    """Gives every parameter random values, one parameter in memory at a time."""
    pattern = (
        torch.randn((1 << 20) + 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        * 0.02
    )
    for param in model.parameters():
        with tiermem.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
            flat = param.view(-1)
            for start in range(0, flat.numel(), len(pattern)):
                piece = flat[start : start + len(pattern)]
                piece.copy_(pattern[: len(piece)] if param.dim() > 1 else torch.ones(len(piece)))


def build(policy: OffloadPolicy) -> torch.nn.Module:
    with tiermem.zero.Init(policy=policy), no_init_weights():
        model = LlamaForCausalLM._from_config(CONFIG, dtype=torch.bfloat16)
    fill(model)
    return adapted(model)


def flush(shards: Shards) -> None:
    """Waits until no read is under way."""
    shards.store.flush()
    while any(live.move is not None and not live.move.is_done() for live in shards.units):
        time.sleep(0.01)


def main() -> None:
    folder = Path(sys.argv[2])
    found: dict[str, Any] = {
        "losses": [],
        "read": [],
        "seconds": {},
        "peaks": {"imports": peak_bytes()},
    }
    clock = time.monotonic()

    def end(phase: str) -> None:
        nonlocal clock
        now = time.monotonic()
        found["seconds"][phase], clock = now - clock, now
        found["peaks"][phase] = peak_bytes()
        print(phase, f"{found['seconds'][phase]:.1f} s", found["peaks"][phase], flush=True)

    policy = OffloadPolicy(
        params=Tier.NVME,
        optim=Tier.HOST,
        paths=[folder],
        frozen_quant_type="nf4",
        compute_dtype="measured",
        unit_buffers=2,
        durability="none",
    )
    torch.manual_seed(0)
    model = build(policy)
    end("build")
    with tiermem.shard(model, policy) as shards:
        end("shard")
        found["compute"] = shards.compute.dtype
        found["at rest"] = shards.plan.disk_bytes
        found["host"] = shards.plan.host_bytes
        optim = tiermem.AdamW(
            [param for param in model.parameters() if param.requires_grad], lr=1e-2
        )
        words = torch.randint(
            0, 32000, (1, NUM_TOKENS + 1), generator=torch.Generator().manual_seed(1)
        )
        for step in range(NUM_STEPS):
            flush(shards)
            before = read_bytes()
            logits = model(words[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())
            loss.backward()
            optim.step()
            optim.zero_grad()
            flush(shards)
            found["read"].append(read_bytes() - before)
            found["losses"].append(loss.item())
            end(f"step {step}")
        forecast = forecast_shards(shards, Compute(1e-9, 2e-9), Rates(1e9, 1e9))
        found["planned"] = forecast.edge_bytes(NVME_TO_HOST)
        found["numel"] = sum(
            shard.numel for live, shard in shards.parameters() if live.unit.is_packed
        )
    (folder / "lora.json").write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
