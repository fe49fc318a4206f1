"""Launched by test_peft_copies.py: adapts models that rest on two ranks.

peft_copies_on_ranks.py OUT FOLDER     every rank writes {name of a case: losses}
"""

from __future__ import annotations

from pathlib import Path

import torch
from launch import as_rank
from test_peft_copies import CASES, ours

if __name__ == "__main__":
    with as_rank() as (rank, out, (folder,)):
        found = {}
        for name in CASES:
            torch.manual_seed(rank)  # draws of rank 0 count
            found[name] = ours(name, Path(folder) / name, Path(folder) / "nvme")
        torch.save(found, out)
