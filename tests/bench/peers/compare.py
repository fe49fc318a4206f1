"""`make bench RUN="peers ..."`: a training by tiermem, then by its peers, each in a process of its own, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.options import PeersOptions
from bench.peers.runs import Peer, list_peers
from tiermem.tools.job.launcher import Job
from tiermem.tools.record.reports import peers_table
from tiermem.tools.train.train import run_one, train
from tiermem.tools.words import save_json

_PATIENCE_S = 300.0  # a peer that hangs, or thrashes below its cap, is a result too


def bench_peers(options: PeersOptions, console: Console) -> int:
    """Trains as `tiermem train` does, then with each peer. Returns the exit status of ours. Raises as `train`."""
    return train(options, console, Peers(options, console))


class Peers:
    """The peers of one training."""

    def __init__(self, options: PeersOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._peers: Sequence[Peer] = ()

    def prepare(self, job: Job) -> None:
        """Lists the peers. Raises ValueError for a job that a peer cannot be given, OSError for a missing interpreter."""
        if job.num_ranks > 1:
            raise ValueError(f"peers train on one rank, and {job.num_ranks} were started")
        self._peers = list_peers(job, self._options.peer_python)

    def run(self, job: Job, folder: Path, ours: dict[str, Any]) -> dict[str, Any]:
        """Trains with each peer, and prints and saves all runs side by side."""
        runs = [ours]
        for peer in self._peers:
            runs += _run_peer(peer, job, folder, self._options, self._console)
        self._console.print(peers_table(runs))
        save_json(folder / "peers.json", {"runs": runs})
        return {"peers": runs[1:]}


def _run_peer(peer: Peer, job: Job, folder: Path, options: PeersOptions, console: Console) -> list[dict[str, Any]]:
    """A peer with each of its settings; the best one, the others printed. Its death is a result."""
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
            runs[-1] |= {"setting": setting.values, "is_like_ours": setting.is_like_ours}
            _tell_peer(runs[-1], console)
    finally:
        peer.clean(home)
    if len(runs) > 1:
        best = min(runs, key=_rank)
        console.print(f"{peer.name}: best of {len(runs)} settings is {best['name']}")
        return [best]
    return runs


def _rank(run: dict[str, Any]) -> tuple[bool, bool, int, float]:
    """Finished first, then with states on the tier where ours rest, then further, then faster."""
    return run["exit_code"] != 0, not run["is_like_ours"], -len(run["losses"]), -(run["tokens_per_s"] or 0.0)


def _tell_peer(run: dict[str, Any], console: Console) -> None:
    speed = f"{run['tokens_per_s']:.1f} tokens/s, " if run["tokens_per_s"] else ""
    reason = f": {run['error']['type']}: {run['error']['message'].splitlines()[0]}" if run["error"] else ""
    console.print(f"{run['name']}: {speed}peak {run['peak_rss_bytes'] / 2**20:.0f} MiB, {run['outcome']}{reason}")
