"""The command line of the instruments: `make bench RUN="overlap --path DIR"`, or `python -m bench`
in the folder of tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from bench import options
from tiermem.tools.cli import register, run_app

_STOPPED = "stopped; nothing is left on the paths"

app = typer.Typer(
    help="Judge tiermem beside peers and yardsticks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
register(
    app, "overlap", options.OverlapBenchOptions, "bench.overlap.bench_overlap", _STOPPED, "bench"
)
register(
    app,
    "ranks",
    options.RanksBenchOptions,
    "bench.ranks.bench_ranks",
    "stopped; nothing was written",
    "bench",
)
register(
    app,
    "curves",
    options.CurvesOptions,
    "bench.curves.bench_curves",
    "stopped; nothing was written",
    "bench",
)
register(app, "peers", options.PeersOptions, "bench.peers.compare.bench_peers", None, "bench")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs an instrument; ends the process with its exit status."""
    run_app(app, "bench", sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
