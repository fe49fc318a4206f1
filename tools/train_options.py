"""TrainOptions: what `tiermem train` was asked for, before anything is looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

DEFAULT_STEPS, DEFAULT_SEQ, DEFAULT_SEED = 10, 128, 0


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """What was asked for on the command line; None where nothing was given."""

    preset: str | None = None
    config: Path | None = None
    model: Path | None = None
    data: Sequence[Path] = ()
    offload: str | None = None
    nvme: Sequence[Path] = ()
    memory_bytes: int | None = None
    deepspeed_config: Path | None = None
    tuned: Path | None = None
    tbw_bytes: int | None = None
    steps: int | None = None
    seq: int | None = None
    batch: int | None = None
    seed: int | None = None
    lr: float | None = None
    precision: str | None = None
    states: str | None = None
    is_checkpointing: bool = False
    layers: int | None = None
    resident_bytes: int | None = None
    threads: int | None = None
    resume: Path | None = None
    save: Path | None = None
    save_every: int | None = None
    durability: str | None = None
    keep: int | None = None
    json_file: Path | None = None
    runs: Path = Path("runs")
    has_peers: bool = False
    peer_python: Path | None = None
    is_debug: bool = False
    command: Sequence[str] = ()
