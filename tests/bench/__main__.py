"""The command line of the instruments: `make bench RUN="overlap --path DIR"`, or `python -m bench`
in the folder of tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from bench import options
from tiermem.tools.cli import register, run_app
from tiermem.tools.job.launcher import CHILD_ENVIRONMENT

_STOPPED = "stopped; nothing is left on the paths"
_UNWRITTEN = "stopped; nothing was written"

app = typer.Typer(
    help="Judge tiermem beside peers and yardsticks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
register(app, options.OverlapBenchOptions, "bench.overlap.bench_overlap", _STOPPED)
register(app, options.RanksBenchOptions, "bench.ranks.bench_ranks", _UNWRITTEN)
register(app, options.CurvesOptions, "bench.curves.bench_curves", _UNWRITTEN)
register(app, options.PeersOptions, "bench.peers.compare.bench_peers", None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs an instrument; ends the process with its exit status."""
    run_app(app, "bench", sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    if CHILD_ENVIRONMENT.keys() - os.environ.keys():  # what is compared has it, too
        environment = {**CHILD_ENVIRONMENT, **os.environ}
        os.execve(sys.executable, [sys.executable, "-m", "bench", *sys.argv[1:]], environment)
    main()
