"""A run that never was: what run.json and events.jsonl hold, for pictures and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MS = 1_000_000
MIB = 1 << 20
DEVICE_FIELDS: dict[str, Any] = {
    "device_memory": {
        "device": "cuda:0",
        "allocated_bytes": 100 * MIB,
        "reserved_bytes": 300 * MIB,
        "peak_allocated_bytes": 200 * MIB,
        "peak_reserved_bytes": 400 * MIB,
        "free_bytes": 19 << 30,
        "total_bytes": 20 << 30,
    }
}
"""Of a message of a run on an accelerator."""


def write_run(
    folder: Path, num_steps: int = 3, device_fields: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Writes a run of steps of 300 ms each into `folder`; returns what run.json holds."""
    steps, spans, phases, samples = [], [], [], []
    for index in range(num_steps):
        begin = (1000 + 300 * index) * MS
        for lane, start, end in (("forward", 0, 60), ("backward", 60, 150), ("step", 150, 300)):
            spans.append([lane, f"micro-batch {index}", begin + start * MS, begin + end * MS, 0])
            name = f"{lane} of step {index + 1}"
            phase = {"kind": "phase", "name": name, "time_ns": begin + start * MS}
            phases.append(
                {**phase, "host_bytes": 300 * MIB, "nvme_bytes": 6 << 30, **(device_fields or {})}
            )
        for tile in range(10):
            start = begin + (150 + 14 * tile) * MS
            spans.append(["read", f"tile {tile}", start - 10 * MS, start, 12 * MIB])
            spans.append(["compute", f"tile {tile}", start, start + 3 * MS, 0])
            spans.append(["write", f"tile {tile}", start + 3 * MS, start + 12 * MS, 12 * MIB])
            spans.append(["wait", f"tile {tile}", start - 4 * MS, start, 0])
        step = {
            "kind": "step",
            "step": index + 1,
            "start_ns": begin,
            "end_ns": begin + 300 * MS,
            "tokens": 128,
        }
        step |= {
            "loss": 9.0 - index / 3,
            "forward_s": 0.06,
            "backward_s": 0.09,
            "step_s": 0.15,
            "time_ns": begin,
        }
        steps.append(
            {**step, "host_bytes": 300 * MIB, "nvme_bytes": 6 << 30, "waits": {"tile": 0.04}}
        )
    for at in range(0, 1000 + 300 * num_steps, 25):
        samples.append([at * MS, min(900, 300 + at) * MIB, min(800, 250 + at) * MIB])
    run = {
        "name": "tiermem fake",
        "memory_limit_bytes": 1250 * MIB,
        "limit_kind": "cgroup-v1",
        "peak_rss_bytes": 900 * MIB,
        "disk": {"read_bytes_s": 3e9, "write_bytes_s": 7e9},
        "pictures": {
            "samples": samples,
            "phases": phases,
            "steps": steps,
            "plan": [],
            "budget": [],
        },
    }
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "events.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    return run
