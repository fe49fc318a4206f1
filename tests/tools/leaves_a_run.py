"""Run by test_fsck.py: two runs of one process, one that saves and one that does not; says so, and
waits to be killed.

leaves_a_run.py SAVES UNSAVED     two paths; the tag goes to the first
"""

from __future__ import annotations

import contextlib
import sys
import time

import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.checkpoint import save

with contextlib.ExitStack() as opened:
    for path in sys.argv[1:]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 33))
        policy = OffloadPolicy(
            params=Tier.NVME, optim=Tier.NVME, paths=[path], host_bytes=64 << 20, resident_bytes=0
        )
        shards = opened.enter_context(tiermem.shard(model, policy))
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(torch.randn(4, 33)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if path == sys.argv[1] and step == 1:
                save(shards, optimizer, path)
    print("ready", flush=True)
    time.sleep(600)
