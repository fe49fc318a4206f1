"""Launched by test_everyday_models_on_ranks.py: runs programs on all ranks, plain and sharded, and
says what differs.

run_on_ranks.py FOLDER NVME [peft] NAME...     every rank writes {(program, home): what differs}
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from launch import as_rank
from programs import compiled
from programs.everyday import PROGRAMS
from programs.faces import Plain, Sharded, compare, run
from programs.homes import MAIN, policy_of


def main() -> None:
    programs, homes = PROGRAMS | compiled.PROGRAMS, list(MAIN)
    with as_rank() as (_, out, (nvme, *names)):
        if names[0] == "peft":
            of_peft, names = importlib.import_module("programs.peft_adapters"), names[1:]
            programs, homes = of_peft.PROGRAMS, of_peft.HOMES
        found: dict[tuple[str, str], list[str]] = {}
        for name in names:
            print("running", name, flush=True)  # seen when a rank fails
            expected = run(programs[name], Plain())
            for home in homes:
                found[name, home] = compare(
                    run(programs[name], Sharded(policy_of(home, Path(nvme)))), expected
                )
        torch.save(found, out)


if __name__ == "__main__":
    main()
