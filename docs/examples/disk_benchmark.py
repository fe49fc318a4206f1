"""Benchmark a disk

Measures how fast a folder's disk is read and written through tiermem's queue, and which settings
suit it. The commands are `tiermem bench io` and `tiermem tune`; their figures are JSON, so a
program can decide by them.

    python disk_benchmark.py [FOLDER]
"""

import json
import subprocess
import sys
from pathlib import Path

folder = sys.argv[1] if len(sys.argv) > 1 else "."
# on a real disk: leave these out
sizes = ["--size", "32MiB", "--block", "1MiB,4MiB", "--depth", "8", "--loops", "2"]
tiermem = [sys.executable, "-m", "tiermem.tools.cli"]  # or the program `tiermem`

subprocess.run(
    [
        *tiermem,
        "bench",
        "io",
        "--path",
        folder,
        "--mode",
        "read,write",
        "--json",
        "io.json",
        *sizes,
    ],
    check=True,
)
for name, best in json.loads(Path("io.json").read_text())["best"].items():
    print(name, best)

subprocess.run(
    [
        *tiermem,
        "tune",
        "--path",
        folder,
        "--out",
        "tiermem.json",
        "--size",
        "32MiB",
        "--seconds",
        "5",
    ],
    check=True,
)
print(
    json.dumps(json.loads(Path("tiermem.json").read_text())["aio"])
)  # tiermem.with_tuned("ds.json", "tiermem.json") takes it
