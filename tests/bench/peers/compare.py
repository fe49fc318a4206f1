"""`make bench RUN="peers ..."`: a training by tiermem, then by its peers, each in a process of its
own, side by side."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.options import PeersOptions
from bench.peers.runs import Peer, list_peers
from tiermem.config import load_config
from tiermem.tools.job.launcher import Job
from tiermem.tools.record.reports import table
from tiermem.tools.record.run_record import PHASES, median_after_warm_up
from tiermem.tools.train.train import Run, run_one, train
from tiermem.tools.words import format_bytes, save_json

_PATIENCE_S = 300.0  # a peer that hangs, or thrashes below its cap, is a result too


def bench_peers(options: PeersOptions, console: Console) -> int:
    """Trains as `tiermem train` does, then with each peer. Returns the exit status of ours. Raises
    as `train`."""

    def peers_of(job: Job) -> Callable[[Job, Path, Run], Run]:
        """Trains with each peer of the job, and prints and saves all runs side by side. Raises
        ValueError for a job that a peer cannot be given, OSError for a missing interpreter."""
        if job.num_ranks > 1:
            raise ValueError(f"peers train on one rank, and {job.num_ranks} were started")
        if load_config(job.config).moved:
            raise ValueError("peers need homes that are named: give --offload none, cpu or nvme")
        return functools.partial(_run_peers, list_peers(job, options.peer_python), options, console)

    return train(options, console, peers_of)


def _run_peers(
    peers: Sequence[Peer],
    options: PeersOptions,
    console: Console,
    job: Job,
    folder: Path,
    ours: Run,
) -> Run:
    runs = [ours]
    for peer in peers:
        runs += _run_peer(peer, job, folder, options, console)
    console.print(peers_table(runs))
    save_json(folder / "peers.json", {"runs": runs})
    return {"peers": runs[1:]}


def peers_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """The same training by different means, side by side."""
    has_device = any(run.get("device_memory") for run in runs)
    figures = (
        ">loss",
        ">forward s",
        ">backward s",
        ">step s",
        ">tokens/s",
        ">peak RSS",
        *(">peak GPU",) * has_device,
    )
    shown = table("side by side (same model, data, seed, threads, cap)", "run", *figures, "outcome")
    for run in runs:
        losses = run["losses"]
        loss = f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else "-"
        medians = [median_after_warm_up(run[f"{phase}_s"]) for phase in PHASES]
        times = ["-" if median is None else f"{median:.3f}" for median in medians]
        speed = f"{run['tokens_per_s']:.1f}" if run["tokens_per_s"] else "-"
        peaks = [run["peak_rss_bytes"]]
        if has_device:
            peaks.append((run.get("device_memory") or {}).get("peak_allocated_bytes"))
        sizes = ["-" if peak is None else format_bytes(peak) for peak in peaks]
        shown.add_row(run["name"], loss, *times, speed, *sizes, run["outcome"])
    return shown


def _run_peer(
    peer: Peer, job: Job, folder: Path, options: PeersOptions, console: Console
) -> list[dict[str, Any]]:
    """A peer with each of its settings; the best one and its defaults, the others printed. Its
    death is a result."""
    home = folder / peer.name
    home.mkdir()
    runs = []
    try:
        peer.prepare(job, home, console)
        for setting in peer.settings:
            console.print(f"{peer.name} with {setting.describe()}")
            place = home / setting.name
            place.mkdir()
            command = peer.command(job, setting, place)
            peer_job = dataclasses.replace(job, name=peer.name, events_file=None)
            title = f"{peer.name} {setting.name}"
            runs.append(run_one(peer_job, command, title, place, options, console, _PATIENCE_S))
            runs[-1] |= {
                "setting": setting.values,
                "is_like_ours": setting.is_like_ours,
                "is_default": setting.is_default,
            }
            _tell_peer(runs[-1], console)
    finally:
        peer.clean(home)
    shown = best_and_defaults(runs)
    if len(runs) > 1:
        console.print(f"{peer.name}: best of {len(runs)} settings is {shown[0]['name']}")
        console.print_json(data=shown[0]["setting"])
    return shown


def best_and_defaults(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best run first, then that with the peer's own defaults, where it is another."""
    best = min(runs, key=_rank)
    return [best, *(run for run in runs if run["is_default"] and run is not best)]


def _rank(run: dict[str, Any]) -> tuple[bool, bool, int, float]:
    """Finished first, then with states on the tier where ours rest, then further, then faster."""
    return (
        run["exit_code"] != 0,
        not run["is_like_ours"],
        -len(run["losses"]),
        -(run["tokens_per_s"] or 0.0),
    )


def _tell_peer(run: dict[str, Any], console: Console) -> None:
    speed = f"{run['tokens_per_s']:.1f} tokens/s, " if run["tokens_per_s"] else ""
    reason = (
        f": {run['error']['type']}: {run['error']['message'].splitlines()[0]}"
        if run["error"]
        else ""
    )
    console.print(
        f"{run['name']}: {speed}peak {run['peak_rss_bytes'] / 2**20:.0f} MiB, "
        f"{run['outcome']}{reason}"
    )
