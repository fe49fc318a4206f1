"""`tiermem sft`: the launcher's side of a fine-tuning with TRL.

options, TRL's arguments -> Job -> launcher (cap) -> fine_tuning.py -> RunRecord -> run.json,
lines, --json, trace.json, PNGs
"""

from __future__ import annotations

import importlib.util

from rich.console import Console

from tiermem.tools.job.launcher import Job
from tiermem.tools.options import YAML, SftOptions
from tiermem.tools.train.train import of_this_rank, run_reported, status_of
from tiermem.tools.words import read_json


def sft(options: SftOptions, console: Console) -> int:
    """Runs the fine-tuning, reports, and returns the exit status, as `train` does.

    Raises ValueError and OSError for options that cannot be met, and for arguments that TRL does
    not take.
    """
    if importlib.util.find_spec("trl") is None:
        raise ValueError("trl is not installed: pip install 'tiermem[sft]'")
    config = options.config
    is_yaml = config is not None and config.suffix in YAML
    words = ["--config", str(config)] if is_yaml else []
    with of_this_rank(options, "sft", console) as (folder, options, console, is_first):
        job = Job(
            options.MADE_BY,
            config=read_json(config) if config is not None and not is_yaml else {},
            memory_limit_bytes=options.memory_bytes,
            nvme_paths=[str(path.absolute()) for path in options.nvme],
            events_file=str(folder / "events.jsonl") if is_first else None,
            sft={
                "arguments": [*options.arguments, *words],
                **{
                    name: getattr(options, name)
                    for name in ("offload", "states", "frozen", "tbw_bytes")
                },
            },
        )
        run = run_reported(job, options.MADE_BY, folder, options, console, is_first)
        options.save_json(run)
        return status_of(run, options.MADE_BY)
