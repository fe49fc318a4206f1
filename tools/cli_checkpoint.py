"""The command line of what works on checkpoints: import and export. See cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiermem.tools.byte_size import parse_bytes
from tiermem.tools.refusal import refusing

checkpoints = typer.Typer()


@checkpoints.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="a DeepSpeed ZeRO-3 or DCP folder, a torch file, safetensors")],
    out: Annotated[Path, typer.Argument(help="the folder of checkpoints to write into")],
    tag: Annotated[str | None, typer.Option(help="which of a DeepSpeed folder's [default: its latest]")] = None,
    new_tag: Annotated[str | None, typer.Option(help="of what is written [default: global_step<N>]")] = None,
    optimizer: Annotated[Path | None, typer.Option(help="a file with a torch optimizer's state dict")] = None,
    shows_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Make a tiermem checkpoint of another system's: weights, masters, moments, steps, loss scale."""
    from tiermem.tools.import_checkpoint import import_checkpoint
    from tiermem.tools.reports import open_console

    with refusing("import", debug, "stopped by Ctrl-C; nothing was written"):
        status = import_checkpoint(source, out, open_console(), tag, new_tag, optimizer, shows_json)
    raise typer.Exit(status)


@checkpoints.command("export")
def export(
    where: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of checkpoints, a tag's, or a run's folder")],
    out: Annotated[Path, typer.Argument(help="the folder to write into")],
    tag: Annotated[str | None, typer.Option(help="which of the folder's [default: its latest]")] = None,
    dtype: Annotated[str | None, typer.Option(help="of floats: fp32, bf16 or fp16 [default: as stored]")] = None,
    fp32: Annotated[bool, typer.Option("--fp32", help="the fp32 masters")] = False,
    pytorch: Annotated[bool, typer.Option("--pytorch", help="pytorch_model.bin instead of safetensors")] = False,
    dcp: Annotated[
        bool, typer.Option("--dcp", help="a torch.distributed.checkpoint folder, optimizer states included")
    ] = False,
    max_shard_size: Annotated[str, typer.Option(help="of a file")] = "5GB",
    exclude_frozen: Annotated[bool, typer.Option("--exclude-frozen", help="leave frozen parameters out")] = False,
    config: Annotated[Path | None, typer.Option(help="the model's config.json, to lie beside the weights")] = None,
    shows_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Write a checkpoint's weights as Hugging Face or torch files, or all of it for torch.distributed.checkpoint."""
    from tiermem.tools.export_checkpoint import ExportOptions, export_checkpoint
    from tiermem.tools.reports import open_console

    with refusing("export", debug, "stopped by Ctrl-C; nothing was written"):
        if fp32 and dtype is not None:
            raise ValueError("--fp32 and --dtype are given; --fp32 is --dtype fp32")
        options = ExportOptions(
            where=where,
            out=out,
            tag=tag,
            dtype="fp32" if fp32 else dtype,
            is_pytorch=pytorch,
            is_dcp=dcp,
            max_shard_bytes=parse_bytes(max_shard_size),
            exclude_frozen=exclude_frozen,
            config=config,
            shows_json=shows_json,
        )
        status = export_checkpoint(options, open_console())
    raise typer.Exit(status)
