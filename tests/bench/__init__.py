"""Instruments: programs that judge tiermem itself, beside peers and yardsticks. `make bench
RUN="overlap --path DIR"` runs one.

overlap, iterations   an iteration whose step goes on under the next forward, beside a bare loop of its least bytes
ranks                 a step on several ranks beside FSDP2's
curves                losses of a small model with its states in several precisions
gpu, gpu_*            a machine's accelerator: `make gpu`
parity                docs/parity.md: `make report`
measure               docs/measured.md from docs/measured/*.json: `make measure`
peers/                the same training by other systems: `make bench RUN="peers --preset 151m"`
phases                the parts of a step, timed
small_training, gpu_trace   a small model in any place, and a training under torch's profiler
"""

import os
from pathlib import Path


def python_path() -> str:
    """PYTHONPATH of a process that is to import this package."""
    return os.pathsep.join(
        filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
    )
