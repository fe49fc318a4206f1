"""`tiermem tune`: the settings of the queue that suit some paths, found in under a minute and written as a config section.

    prepare   an unnamed file on each path, written once                                            a tenth of the time
    search    engine x block size x depth, by successive halving (halving.py, step_mix.py)          most of it
    verify    the winner against the defaults, in fresh loops that alternate                        a quarter
    write     {"aio": {...}, "tiermem": {"engine", "paths", "measured"}}; weights are the paths' rates while all were used

The winner is taken when it beats the defaults by a hundredth in the median of the pairs, and in more of them than chance would
give once in twenty; else the defaults are written, and that is said. Not searched: `single_submit` and `overlap_events`, which
only cost, and sizes of tiles and units, which follow from the memory at hand. The file's form and use: tuned_file.py.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tiermem.swap.native import ENGINES
from tiermem.swap.paths import NvmePath
from tiermem.swap.probe import probe_path
from tiermem.swap.settings import IoSettings
from tiermem.tools.byte_size import format_bytes
from tiermem.tools.halving import LEAST_TURN_S, MOST_TURN_S, Standing, halve, thin
from tiermem.tools.io_grid import candidates_of, default_of, describe, engines_that_run
from tiermem.tools.machine import machine_facts
from tiermem.tools.run_record import save_json
from tiermem.tools.step_mix import Refused, StepMix, Turn
from tiermem.tools.tuned_file import MADE_BY, check_out, section_of

_LEAST_FILE_BYTES = 8 << 20
_PREPARE_PART, _SEARCH_PART, _VERIFY_PART = 0.1, 0.6, 0.25
_LEAST_PAIRS, _MOST_PAIRS = 5, 20
_LEAST_GAIN, _MOST_CHANCE = 1.01, 0.05
_NUM_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """What was asked for. Raises ValueError for what cannot be."""

    paths: Sequence[Path]
    out: Path
    seconds: float = 50.0
    size_bytes: int = 1 << 30
    engines: Sequence[str] = ("auto",)

    def __post_init__(self) -> None:
        if not self.paths:
            raise ValueError("--path is missing: name a folder on each disk")
        resolved = [path.resolve() for path in self.paths]
        if len(set(resolved)) < len(resolved):
            raise ValueError(f"--path names a folder twice: {', '.join(map(str, self.paths))}")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"--seconds is {self.seconds}; it must be more than 0")
        if self.size_bytes < _LEAST_FILE_BYTES:
            least = format_bytes(_LEAST_FILE_BYTES)
            raise ValueError(f"--size is {format_bytes(self.size_bytes)}; it must be at least {least}")
        unknown = [name for name in self.engines if name not in ENGINES]
        if unknown or not self.engines:
            raise ValueError(f"--engine is {', '.join(self.engines) or 'empty'}; allowed are {', '.join(ENGINES)}")


class Verdict(NamedTuple):
    """What the pairs said."""

    default: Turn  # medians of its turns
    tuned: Turn
    gains: tuple[float, ...]  # cost of the defaults / cost of the winner, pair by pair

    @property
    def gain(self) -> float:
        """Their median; above 1 the winner is faster."""
        return statistics.median(self.gains)

    @property
    def is_better(self) -> bool:
        """Whether that is more than noise: a hundredth in the median, and more pairs won than chance gives once in twenty."""
        return self.gain >= _LEAST_GAIN and self.chance <= _MOST_CHANCE

    @property
    def chance(self) -> float:
        """How often two equals would be this far apart, or further: the sign test, one-sided."""
        pairs, won = len(self.gains), sum(gain > 1 for gain in self.gains)
        return float(sum(math.comb(pairs, more) for more in range(won, pairs + 1)) / 2**pairs)


class Found(NamedTuple):
    """The outcome: what was tried, best first, what the winner was held to, and whether it is taken."""

    standings: Sequence[Standing[IoSettings]]
    default: IoSettings
    verdict: Verdict

    @property
    def winner(self) -> IoSettings:
        """The best of the search; may be the defaults."""
        return self.standings[0].candidate

    @property
    def is_taken(self) -> bool:
        """Whether the winner is written rather than the defaults."""
        return self.winner != self.default and self.verdict.is_better

    @property
    def io(self) -> IoSettings:
        """What is written."""
        return self.winner if self.is_taken else self.default

    @property
    def turn(self) -> Turn:
        """Its rates."""
        return self.verdict.tuned if self.is_taken else self.verdict.default


def tune(options: TuneOptions, console: Console) -> int:
    """Measures, writes the file, says what it found; returns 0. Blocks; raises OSError and ValueError before it measures."""
    check_out(options.out)
    for path in options.paths:
        probe_path(path)
    found = _find(options, console)
    section = section_of(found.io, weighed(options.paths, found.turn), _notes(options, found))
    save_json(options.out, section)
    _print(found, options.out, section["tiermem"]["paths"], console)
    return 0


def verify(mix: StepMix, winner: IoSettings, default: IoSettings, seconds: float) -> Verdict:
    """Both in pairs, each going first in turn, for about `seconds`. Blocks; raises OSError."""
    turn_s = min(2 * MOST_TURN_S, max(LEAST_TURN_S, seconds / (2 * _MOST_PAIRS)))
    deadline = time.monotonic() + seconds
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    while len(turns[True]) < _LEAST_PAIRS or (len(turns[True]) < _MOST_PAIRS and time.monotonic() < deadline):
        is_first = len(turns[True]) % 2 == 0
        for is_winner in (is_first, not is_first):
            turns[is_winner].append(mix.turn(winner if is_winner else default, turn_s))
    pairs = zip(turns[False], turns[True], strict=True)
    return Verdict(_median(turns[False]), _median(turns[True]), tuple(d.cost_ns / w.cost_ns for d, w in pairs))


def weighed(paths: Sequence[Path], turn: Turn) -> list[NvmePath]:
    """The paths, each with its mixed rate while all were used as its weight; the slowest weighs 1, a single one nothing."""
    if len(paths) == 1:
        return [NvmePath(paths[0].absolute())]
    slowest = min(turn.mixed_gbps)
    rates = zip(paths, turn.mixed_gbps, strict=True)
    return [NvmePath(path.absolute(), weight=round(rate / slowest, 3)) for path, rate in rates]


def _find(options: TuneOptions, console: Console) -> Found:
    engines = engines_that_run(options.engines)
    default = default_of(engines)
    with (
        console.status("writing the files to measure on") as status,
        StepMix(options.paths, options.size_bytes, default, options.seconds * _PREPARE_PART) as mix,
    ):
        for path, is_direct in zip(options.paths, mix.is_direct, strict=True):
            if not is_direct:
                console.print(f"{path} takes no direct I/O: the page cache is measured as well")
        grid = candidates_of(engines, mix.file_bytes, default)
        standings = _search(mix, grid, options.seconds * _SEARCH_PART, status.update)
        winner = standings[0].candidate
        status.update(f"verifying {describe(winner)}")
        return Found(standings, default, verify(mix, winner, default, options.seconds * _VERIFY_PART))


def _search(
    mix: StepMix, grid: Sequence[IoSettings], seconds: float, say: Callable[[str], None]
) -> list[Standing[IoSettings]]:
    """Ranks what of the grid the time allows to try; its last, the defaults, are always among them."""
    few = thin(grid[:-1], lambda io: mix.turn_s(io, LEAST_TURN_S), seconds / 2)

    def measure(io: IoSettings, turn_s: float) -> float:
        try:
            return mix.turn(io, turn_s).cost_ns
        except Refused:
            return math.inf

    def on_round(number: int, num_rounds: int, num_left: int) -> None:
        say(f"round {number} of {num_rounds}: {num_left} settings left")

    return halve([*few, grid[-1]], measure, seconds, on_round)


def _notes(options: TuneOptions, found: Found) -> dict[str, Any]:
    """What is kept beside the settings; the library never acts on it."""
    return {
        "made_by": MADE_BY,
        "machine": machine_facts(options.paths),
        "size_bytes": options.size_bytes,
        "num_settings": len(found.standings),
        "winner": {**dataclasses.asdict(found.winner), **_facts_of(found.verdict.tuned)},
        "default": {**dataclasses.asdict(found.default), **_facts_of(found.verdict.default)},
        "gain": round(found.verdict.gain, 4),
        "num_pairs": len(found.verdict.gains),
        "is_default_kept": not found.is_taken,
    }


def _facts_of(turn: Turn) -> dict[str, Any]:
    return {
        "mixed_gbps": [round(rate, 3) for rate in turn.mixed_gbps],
        "read_gbps": [round(rate, 3) for rate in turn.read_gbps],
        "ns_per_param": round(turn.cost_ns, 3),
    }


def _median(turns: Sequence[Turn]) -> Turn:
    mixed = zip(*(turn.mixed_gbps for turn in turns), strict=True)
    read = zip(*(turn.read_gbps for turn in turns), strict=True)
    return Turn(tuple(map(statistics.median, mixed)), tuple(map(statistics.median, read)))


def _print(found: Found, out: Path, paths: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"{len(found.standings)} settings tried", title_justify="left", box=None, pad_edge=False)
    table.add_column("settings", no_wrap=True)
    for name in ("disk ns per parameter", "read+write GB/s", "read GB/s"):
        table.add_column(name, justify="right")
    for standing in found.standings[:_NUM_SHOWN]:
        table.add_row(describe(standing.candidate), f"{standing.cost:.3f}", "", "")
    table.add_section()
    for name, turn in (
        ("the winner, verified", found.verdict.tuned),
        ("the defaults, verified", found.verdict.default),
    ):
        mixed, read = f"{sum(turn.mixed_gbps):.2f}", f"{sum(turn.read_gbps):.2f}"
        table.add_row(name, f"{turn.cost_ns:.3f}", mixed, read)
    console.print(table)
    console.print(_sentence(found))
    if len(paths) > 1:
        console.print("weights: " + ", ".join(f"{each['path']} {each['weight']:g}" for each in paths))
    console.print(f"{out} holds them: tiermem train --tuned {out}, or in Python")
    console.print(f'tiermem.initialize(model=model, config=tiermem.with_tuned(config, "{out}"))')


def _sentence(found: Found) -> str:
    gains = found.verdict.gains
    spread = f"{min(gains):.3f} to {max(gains):.3f} in {len(gains)} pairs"
    if found.is_taken:
        return f"{describe(found.winner)}: {found.verdict.gain:.3f} times as fast as the defaults ({spread})"
    if found.winner == found.default:
        return f"the defaults ({describe(found.default)}) are the fastest, and are written"
    why = f"not faster beyond noise: {found.verdict.gain:.3f} times ({spread})"
    return f"{describe(found.winner)} is {why}; the defaults ({describe(found.default)}) are written"
