"""Runs cases of programs/random_calls.py on every rank: so many, or until time is up, as rank 0 says. Words:
first case, cases, seconds."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from launch import as_rank
from programs.random_calls import Case


def main() -> None:
    with as_rank() as (rank, out, (first, most, seconds)):
        deadline, number, operations = time.monotonic() + float(seconds), int(first), 0
        while True:
            is_due = torch.tensor(
                [number - int(first) < float(most) and time.monotonic() < deadline]
            )
            dist.broadcast(is_due, 0)
            if not is_due.item():
                break
            folder = Path(out.parent, f"{number}-{rank}")
            folder.mkdir()
            operations += Case(number, folder, rank, dist.get_world_size()).run()
            number += 1
        torch.save({"cases": number - int(first), "operations": operations}, out)


if __name__ == "__main__":
    main()
