"""The command line of what works on checkpoints: fsck, inspect, import and export. See cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiermem.tools.words import parse_bytes, refusing

checkpoints = typer.Typer()


@checkpoints.command("fsck")
def fsck(
    where: Annotated[
        Path, typer.Argument(metavar="DIR", help="a store's path, a run's folder, a folder of checkpoints")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="read everything and compare checksums")] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="remove what killed runs left; only files that runs make")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="end removals and saves that were cut short, restore a lost `latest`")
    ] = False,
    shows_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Say what is in a store: runs live or dead, which steps are durable and whole, space, what is not ours.

    Exit status: 0 nothing is wrong, 1 a killed run has left its folder or a removal was cut short, 2 not all could be
    looked at, 3 something durable is broken or damaged.
    """
    from tiermem.tools.checkpoints import fsck as run_fsck
    from tiermem.tools.reports import open_console

    with refusing("fsck", debug, "stopped by Ctrl-C; nothing was changed"):
        status = run_fsck(where, open_console(), verify, shows_json, remove, repair)
    raise typer.Exit(status)


@checkpoints.command("inspect")
def inspect(
    where: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of checkpoints, a tag's, or a run's folder")],
    tag: Annotated[str | None, typer.Option(help="which of the folder's [default: its latest]")] = None,
    match: Annotated[
        list[str] | None, typer.Option(help="only names that a pattern matches, such as '*.weight'")
    ] = None,
    shows_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """List a durable step's tensors like `ls -l`: shapes, states and their formats, bytes, files."""
    from tiermem.tools.checkpoints import inspect_checkpoint
    from tiermem.tools.reports import open_console

    with refusing("inspect", debug):
        status = inspect_checkpoint(where, open_console(), tag, match or (), shows_json)
    raise typer.Exit(status)


@checkpoints.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="a DeepSpeed ZeRO-3 or DCP folder, a torch file, safetensors")],
    out: Annotated[Path, typer.Argument(help="the folder of checkpoints to write into")],
    tag: Annotated[str | None, typer.Option(help="which of a DeepSpeed folder's [default: its latest]")] = None,
    new_tag: Annotated[str | None, typer.Option(help="of what is written [default: global_step<N>]")] = None,
    optimizer: Annotated[Path | None, typer.Option(help="a file with a torch optimizer's state dict")] = None,
    config: Annotated[
        Path | None, typer.Option(help="the model's config.json, for train --resume [default: beside the weights]")
    ] = None,
    shows_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Make a tiermem checkpoint of another system's: weights, masters, moments, steps, loss scale."""
    from tiermem.tools.checkpoints import ImportOptions, import_checkpoint
    from tiermem.tools.reports import open_console

    with refusing("import", debug, "stopped by Ctrl-C; nothing was written"):
        options = ImportOptions(source, out, tag, new_tag, optimizer, config, shows_json)
        status = import_checkpoint(options, open_console())
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
    from tiermem.tools.checkpoints import ExportOptions, export_checkpoint
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
