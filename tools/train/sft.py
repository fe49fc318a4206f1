"""`tiermem sft`: the launcher's side of a fine-tuning with TRL.

options, TRL's arguments -> Job -> launcher (cap) -> fine_tuning.py -> RunRecord -> run.json,
lines, --json, trace.json, PNGs
"""

from __future__ import annotations

import importlib.util
import os

from rich.console import Console

from tiermem.tools.job.launcher import Job
from tiermem.tools.job.train_job import num_ranks
from tiermem.tools.options import YAML, SftOptions
from tiermem.tools.train.train import of_this_rank, report, run_one, status_of, trainer_of
from tiermem.tools.words import read_json


def sft(options: SftOptions, console: Console) -> int:
    """Runs the fine-tuning, reports, and returns the exit status, as `train` does.

    Raises ValueError and OSError for options that cannot be met, and for arguments that TRL does
    not take.
    """
    if importlib.util.find_spec("trl") is None:
        raise ValueError("trl is not installed: pip install 'tiermem[sft]'")
    arguments = [*options.arguments]
    config = {}
    if options.config is not None and options.config.suffix in YAML:
        arguments += ["--config", str(options.config)]
    elif options.config is not None:
        config = read_json(options.config)
    with of_this_rank(options, "sft", console) as (folder, options, console, is_first):
        job = Job(
            options.MADE_BY,
            config=config,
            memory_limit_bytes=options.memory_bytes,
            nvme_paths=[str(path.absolute()) for path in options.nvme],
            events_file=str(folder / "events.jsonl") if is_first else None,
            num_ranks=num_ranks(),
            ranks_on_node=int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks())),
            sft={
                "arguments": arguments,
                **{name: getattr(options, name) for name in ("offload", "states", "tbw_bytes")},
            },
        )
        folder.mkdir(parents=True)
        console.print(f"run {folder}")
        run = run_one(job, trainer_of(folder), options.MADE_BY, folder, options, console)
        if is_first:
            report(run, folder, options, console)
            options.save_json(run)
        return status_of(run, options.MADE_BY)
