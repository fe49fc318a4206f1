"""Job: what a trainer process is told, as one JSON file. The same for our trainer and for the peers'."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tiermem.swap import durable


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run: model, data, sizes."""

    name: str
    shape: dict[str, Any]  # a Hugging Face config.json
    checkpoint: str | None  # folder with safetensors to start from; None: from `seed`
    config: dict[str, Any]  # DeepSpeed-style
    data: list[str]  # files and folders of text; empty: Python's own
    steps: int
    seq: int
    batch: int
    seed: int
    lr: float
    precision: str
    is_checkpointing: bool
    memory_limit_bytes: int | None
    threads: int | None  # None: what torch takes by itself
    nvme_paths: list[str]
    events_file: str | None  # where the trainer leaves its events
    resume: str | None = None  # the saved step to go on from
    save_dir: str | None = None  # where checkpoints go; None: none is saved
    save_every: int | None = None  # steps between two of them; None: at the end alone
    to_save: dict[str, Any] = dataclasses.field(default_factory=dict)  # what is saved of the job itself (resumed.py)

    def save(self, file: Path) -> None:
        """Writes it."""
        with durable.named(file):
            file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(file: Path) -> Job:
        """Reads what `save` wrote."""
        return Job(**json.loads(file.read_text(encoding="utf-8")))
