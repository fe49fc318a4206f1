"""`tiermem sft`: the launcher's side of a fine-tuning with TRL.

options, TRL's arguments -> Job -> launcher (cap) -> fine_tuning.py -> RunRecord -> run.json,
lines, --json, trace.json, PNGs
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import os
import secrets
import tempfile
from pathlib import Path

from rich.console import Console

from tiermem.tools.job.launcher import Job
from tiermem.tools.job.train_job import num_ranks
from tiermem.tools.options import YAML, SftOptions
from tiermem.tools.train.train import report, run_one, status_of, trainer_of
from tiermem.tools.words import read_json


def sft(options: SftOptions, console: Console) -> int:
    """Runs the fine-tuning, reports, and returns the exit status, as `train` does.

    Raises ValueError and OSError for options that cannot be met, and for arguments that TRL does
    not take.
    """
    if importlib.util.find_spec("trl") is None:
        raise ValueError("trl is not installed: pip install 'tiermem[sft]'")
    is_first = num_ranks() == 1 or os.environ.get("RANK", "0") == "0"
    with contextlib.ExitStack() as stack:
        folder = (
            options.runs / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-sft-{secrets.token_hex(2)}"
        )
        if not is_first:  # rank 0 reports
            console = Console(quiet=True)
            options = dataclasses.replace(options, tensorboard=None)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiermem-sft-")))
        job = _job_of(options, folder if is_first else None)
        folder.mkdir(parents=True, exist_ok=True)
        console.print(f"run {folder}")
        run = run_one(job, trainer_of(folder), options.MADE_BY, folder, options, console)
        if is_first:
            report(run, folder, options, console)
            options.save_json(run)
        return status_of(run, options.MADE_BY)


def _job_of(options: SftOptions, folder: Path | None) -> Job:
    """The job, as far as it is known without an import of TRL. folder: of its events; None: nobody
    reads them."""
    arguments = [*options.arguments]
    config = {}
    if options.config is not None and options.config.suffix in YAML:
        arguments += ["--config", str(options.config)]
    elif options.config is not None:
        config = read_json(options.config)
    return Job(
        options.MADE_BY,
        config=config,
        memory_limit_bytes=options.memory_bytes,
        nvme_paths=[str(path.absolute()) for path in options.nvme],
        events_file=None if folder is None else str(folder / "events.jsonl"),
        num_ranks=num_ranks(),
        ranks_on_node=int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks())),
        sft={
            "arguments": arguments,
            **{name: getattr(options, name) for name in ("offload", "states", "tbw_bytes")},
        },
    )
