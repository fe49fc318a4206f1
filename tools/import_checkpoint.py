"""`tiermem import SRC OUT`: another system's checkpoint becomes a tiermem checkpoint.

DeepSpeed ZeRO-3 folders, torch.distributed.checkpoint folders, torch state dicts, safetensors. Nothing in them is executed.
What was written, and what had to stay behind, is said. With the model's config.json, given or beside the weights, `tiermem
train --resume` goes on from it as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from tiermem.tools.byte_size import format_bytes
from tiermem.tools.resumed import CLIENT_KEY, options_of_model

if TYPE_CHECKING:
    from tiermem.checkpoint.interchange.foreign import Foreign

MADE_BY = "tiermem import"
CONFIG_NAME = "config.json"


class ImportOptions(NamedTuple):
    """What the command was asked for."""

    source: Path
    out: Path
    tag: str | None = None
    new_tag: str | None = None
    optimizer: Path | None = None
    config: Path | None = None
    shows_json: bool = False


def import_checkpoint(options: ImportOptions, console: Console) -> int:
    """Writes OUT/<tag>/ and OUT/latest, and returns 0. Blocks; raises ValueError and OSError, and then nothing is left."""
    from tiermem.checkpoint.interchange.opening import read_foreign
    from tiermem.checkpoint.interchange.write import write_checkpoint

    foreign = read_foreign(options.source, options.tag, options.optimizer)
    shape = _model_config(options)
    if shape is not None:
        run = {CLIENT_KEY: options_of_model(options.source.resolve().name, shape)}
        foreign = dataclasses.replace(foreign, client_state={**foreign.client_state, **run})
    with transfer_bar(console, "writing", total_bytes(foreign), is_shown=not options.shows_json) as bar:
        done = write_checkpoint(
            foreign, options.out, options.new_tag, lambda num_bytes: bar.advance(bar.task_ids[0], num_bytes)
        )
    if options.shows_json:
        shown = {"made_by": MADE_BY, "kind": foreign.kind, **done._asdict(), "folder": str(done.folder)}
        print(json.dumps(shown, indent=2))
        return 0
    has_moments = any(len(p.states) > 1 for p in foreign.parameters)
    what = "weights and optimizer states" if has_moments else "weights"
    sizes = f"{done.num_parameters} tensors, {format_bytes(done.num_bytes)}, step {done.step}"
    console.print(Text(f"{foreign.kind}: {what} of {sizes}  ->  {done.folder}"))
    for each in done.left_behind:
        console.print(Text(f"left behind: {each}", style="yellow"))
    resumed = f", or tiermem train --resume {options.out}" if shape is not None else ""
    console.print(Text(f'load it with engine.load_checkpoint("{options.out}"){resumed}', style="dim"))
    return 0


def total_bytes(foreign: Foreign) -> int:
    """Of all states."""
    return sum(math.prod(p.shape) * state.dtype.itemsize for p in foreign.parameters for state in p.states.values())


def transfer_bar(console: Console, what: str, num_bytes: int, is_shown: bool = True) -> Progress:
    """A bar over so many bytes on a terminal, nothing elsewhere; its one task is progress.task_ids[0]."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal))
    progress.add_task(what, total=num_bytes)
    return progress


def _model_config(options: ImportOptions) -> dict[str, Any] | None:
    """The model's config.json: the file or folder given, or what lies beside the weights. Raises ValueError, OSError."""
    given = options.config if options.config is not None else options.source
    file = given / CONFIG_NAME if given.is_dir() else given
    if options.config is None and (file.name != CONFIG_NAME or not file.is_file()):
        return None
    try:
        found = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--config: {file} is no JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ValueError(f"--config: {file} is no model's config.json: model_type is missing")
    return found
