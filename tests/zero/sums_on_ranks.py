"""Trains with states on NVMe and writes each rank's bytes of them with their checksums; run by
test_checksums.py.

sums_on_ranks.py OUT NVME      writes OUT/<rank>.pt: {preset: what `summed` found}
"""

from __future__ import annotations

from pathlib import Path

import torch
from launch import as_rank
from summed_states import model, policy, summed, train

import tiermem

TILES = {"compact": 20480, "tiny": 8192}

if __name__ == "__main__":
    with as_rank() as (rank, out, words):
        found = {}
        for preset, tile_numel in TILES.items():
            wide = model()
            with tiermem.shard(
                wide, policy(Path(words[0]), preset, tile_numel=tile_numel)
            ) as shards:
                optim = tiermem.AdamW(wide.parameters(), lr=1e-2)
                train(wide, optim, 2, seed=rank)
                found[preset] = {
                    key: [tuple(each) for each in several]
                    for key, several in summed(shards).items()
                }
        torch.save(found, out)
