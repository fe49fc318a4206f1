"""The command line of what works on checkpoints: import. See cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
