"""Pictures of the first page: draws docs/pictures from the folders of three runs of one training.

    tiermem train --preset 419m --offload nvme --memory 1250MiB --steps 10       runs/A
    make bench RUN="peers --preset 419m --offload cpu --steps 10"                runs/B, plain PyTorch in a folder of it
    python docs/draw_pictures.py runs/A runs/B runs/B/PEER                       loss.png, memory.png, timeline.png

The first run is the one on NVMe, whose memory and whose step are drawn; the losses of all are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tiermem.tools.record.plots import draw_memory, draw_timeline, new_figure
from tiermem.tools.record.run_record import read_spans

FOLDER = Path(__file__).with_name("pictures")
NAMES = ("states on NVMe, under a cap", "all in host memory", "plain PyTorch, in memory")
STYLES = (
    {"marker": "o", "markersize": 9, "fillstyle": "none"},
    {"marker": "x", "markersize": 6},
    {"linestyle": ":", "linewidth": 3},
)


def draw_losses(runs: list[dict[str, Any]]) -> Any:
    """The losses of all runs over each other; the title says which are equal to the bit, and how
    far the others are."""
    figure, [ax] = new_figure(8, 4.2)
    first = runs[0]["losses"]
    for name, run, style in zip(NAMES, runs, STYLES, strict=False):
        losses = run["losses"]
        apart = max((abs(a - b) for a, b in zip(first, losses, strict=False)), default=0.0)
        said = (
            ""
            if run is runs[0]
            else ": equal to the bit"
            if losses == first
            else f": {apart:.1e} apart at most"
        )
        ax.plot(range(1, len(losses) + 1), losses, label=f"{name}{said}", **style)
    ax.set(xlabel="step", ylabel="loss (nats per token)")
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    size = runs[0]["name"].split()[-1].partition("-")[0]
    figure.suptitle(f"a Llama of {size} parameters: the same training in three places", fontsize=12)
    return figure


def main(folders: list[Path]) -> None:
    runs = [json.loads((folder / "run.json").read_text("utf-8")) for folder in folders]
    FOLDER.mkdir(exist_ok=True)
    drawn = {
        "loss": draw_losses(runs),
        "memory": draw_memory(runs[0]),
        "timeline": draw_timeline(runs[0], read_spans(folders[0] / "events.jsonl")),
    }
    for name, figure in drawn.items():
        width, height = figure.get_size_inches()
        figure.set_size_inches(10, min(height * 10 / width, 9))
        figure.savefig(FOLDER / f"{name}.png", dpi=100)


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])
