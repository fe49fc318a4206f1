"""`tiermem import SRC OUT`: another system's checkpoint becomes a tiermem checkpoint.

DeepSpeed ZeRO-3 folders, torch.distributed.checkpoint folders, torch state dicts, safetensors. Nothing in them is executed.
What was written, and what had to stay behind, is said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from tiermem.tools.byte_size import format_bytes

if TYPE_CHECKING:
    from tiermem.checkpoint.interchange.foreign import Foreign

MADE_BY = "tiermem import"


def import_checkpoint(
    source: Path,
    out: Path,
    console: Console,
    tag: str | None = None,
    new_tag: str | None = None,
    optimizer: Path | None = None,
    shows_json: bool = False,
) -> int:
    """Writes OUT/<tag>/ and OUT/latest, and returns 0. Blocks; raises ValueError and OSError, and then nothing is left."""
    from tiermem.checkpoint.interchange.opening import read_foreign
    from tiermem.checkpoint.interchange.write import write_checkpoint

    foreign = read_foreign(source, tag, optimizer)
    with transfer_bar(console, "writing", total_bytes(foreign), is_shown=not shows_json) as progress:
        done = write_checkpoint(
            foreign, out, new_tag, lambda num_bytes: progress.advance(progress.task_ids[0], num_bytes)
        )
    if shows_json:
        shown = {"made_by": MADE_BY, "kind": foreign.kind, **done._asdict(), "folder": str(done.folder)}
        print(json.dumps(shown, indent=2))
        return 0
    has_moments = any(len(p.states) > 1 for p in foreign.parameters)
    what = "weights and optimizer states" if has_moments else "weights"
    sizes = f"{done.num_parameters} tensors, {format_bytes(done.num_bytes)}, step {done.step}"
    console.print(Text(f"{foreign.kind}: {what} of {sizes}  ->  {done.folder}"))
    for each in done.left_behind:
        console.print(Text(f"left behind: {each}", style="yellow"))
    console.print(Text(f'load it with engine.load_checkpoint("{out}")', style="dim"))
    return 0


def total_bytes(foreign: Foreign) -> int:
    """Of all states."""
    import math

    return sum(math.prod(p.shape) * state.dtype.itemsize for p in foreign.parameters for state in p.states.values())


def transfer_bar(console: Console, what: str, num_bytes: int, is_shown: bool = True) -> Progress:
    """A bar over so many bytes on a terminal, nothing elsewhere; its one task is progress.task_ids[0]."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal))
    progress.add_task(what, total=num_bytes)
    return progress
