"""`tiermem export DIR OUT`: a tiermem checkpoint's weights, or all of it, as others open them.

    (default)    Hugging Face safetensors shards with an index, and config.json where it is known
    --pytorch    pytorch_model.bin
    --dcp        a torch.distributed.checkpoint folder, optimizer states included

Streamed: memory does not grow with the model. What is read is verified; a damaged state ends the export and leaves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from tiermem.tools.byte_size import format_bytes
from tiermem.tools.import_checkpoint import CONFIG_NAME, transfer_bar
from tiermem.tools.resumed import CLIENT_KEY

if TYPE_CHECKING:
    from tiermem.checkpoint.opening.source import Source

MADE_BY = "tiermem export"


class ExportOptions(NamedTuple):
    """What the command was asked for."""

    where: Path
    out: Path
    tag: str | None = None
    dtype: str | None = None
    is_pytorch: bool = False
    is_dcp: bool = False
    max_shard_bytes: int | None = None
    exclude_frozen: bool = False
    config: Path | None = None
    shows_json: bool = False


def export_checkpoint(options: ExportOptions, console: Console) -> int:
    """Writes OUT and returns 0. Blocks; raises ValueError and OSError, and then nothing of ours is left there."""
    from tiermem.checkpoint.opening.source import Source
    from tiermem.checkpoint.zero_to_fp32 import dtype_of

    if options.is_pytorch and options.is_dcp:
        raise ValueError("--pytorch and --dcp are given; choose one")
    if options.max_shard_bytes is not None and options.max_shard_bytes < 1:
        raise ValueError(f"--max-shard-size is {options.max_shard_bytes}; give a size of 1 byte or more, such as 5GB")
    dtype = None if options.dtype is None else dtype_of(options.dtype)
    with Source.open(options.where, options.tag) as source:
        files, num_bytes = (_export_dcp if options.is_dcp else _export_weights)(options, source, dtype, console)
        step, excluded = source.manifest.step, source.manifest.excluded
    if options.shows_json:
        shown = {"made_by": MADE_BY, "step": step, "files": files, "num_bytes": num_bytes, "folder": str(options.out)}
        print(json.dumps(shown, indent=2))
        return 0
    console.print(Text(f"step {step}: {format_bytes(num_bytes)} in {len(files)} files  ->  {options.out}"))
    if excluded:
        console.print(Text(f"not in the checkpoint, frozen when it was saved: {', '.join(excluded)}", style="yellow"))
    return 0


def _export_weights(options: ExportOptions, source: Source, dtype: Any, console: Console) -> tuple[list[str], int]:
    from tiermem.checkpoint.interchange.to_weights import export_weights
    from tiermem.checkpoint.interchange.weights_of import weights_of

    weights = weights_of(source, dtype, options.exclude_frozen)
    total = sum(weight.parameter.numel * weight.dtype.itemsize for weight in weights)
    config = _config_text(options.config, source)
    with transfer_bar(console, "writing", total, is_shown=not options.shows_json) as bar:
        shards = export_weights(
            weights,
            options.out,
            options.max_shard_bytes,
            not options.is_pytorch,
            config,
            lambda num_bytes: bar.advance(bar.task_ids[0], num_bytes),
        )
    return [shard.name for shard in shards], sum(shard.num_bytes for shard in shards)


def _export_dcp(options: ExportOptions, source: Source, dtype: Any, console: Console) -> tuple[list[str], int]:
    from tiermem.checkpoint.interchange.to_dcp import export_dcp

    with transfer_bar(console, "writing", source.num_bytes, is_shown=not options.shows_json) as bar:
        num_bytes = export_dcp(source, options.out, dtype, lambda done: bar.advance(bar.task_ids[0], done))
    return sorted(file.name for file in options.out.iterdir()), num_bytes


def _config_text(given: Path | None, source: Source) -> str | None:
    """The model's config.json: the file given, or what the run that saved said of its model."""
    if given is not None:
        file = given / CONFIG_NAME if given.is_dir() else given
        if not file.is_file():
            raise FileNotFoundError(2, "--config: there is no such file", str(file))
        return file.read_text("utf-8")
    said = source.manifest.client_state
    run = said.get(CLIENT_KEY) if isinstance(said, Mapping) else None
    shape = run.get("shape") if isinstance(run, Mapping) else None
    return json.dumps(shape, indent=2) + "\n" if isinstance(shape, dict) and "model_type" in shape else None
