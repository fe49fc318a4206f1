"""Launched by test_everyday_models_on_ranks.py: runs programs on all ranks, plain and sharded, and says what differs.

run_on_ranks.py FOLDER NVME [peft] NAME...     every rank writes {(program, home): what differs}
"""

from __future__ import annotations

import importlib
from pathlib import Path

import compiled_programs
import torch
from faces import Plain, Sharded, compare, run
from launch import as_rank
from program_list import HOMES, PROGRAMS, policy_of


def main() -> None:
    programs = PROGRAMS | compiled_programs.PROGRAMS
    with as_rank() as (_, out, (nvme, *names)):
        if names[0] == "peft":
            programs, names = importlib.import_module("peft_programs").PROGRAMS, names[1:]
        found: dict[tuple[str, str], list[str]] = {}
        for name in names:
            print("running", name, flush=True)  # seen when a rank fails
            expected = run(programs[name], Plain())
            for home in HOMES:
                found[name, home] = compare(run(programs[name], Sharded(policy_of(home, Path(nvme)))), expected)
        torch.save(found, out)


if __name__ == "__main__":
    main()
