"""`tiermem tune`: finds the best settings of the queue for some paths in under a minute, and writes
them as a config."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from rich.console import Console

from tiermem.swap.base.native import IoSettings, Queue
from tiermem.swap.disk.direct import probe_path
from tiermem.swap.disk.passes import Passes
from tiermem.swap.disk.paths import NvmePath
from tiermem.tools.measure.files import BenchFiles, check_room, say_memory
from tiermem.tools.measure.machine import machine_facts, try_engines
from tiermem.tools.measure.sustained import measure_disks
from tiermem.tools.options import TuneOptions
from tiermem.tools.record.reports import table
from tiermem.tools.words import check_outputs, format_bytes, read_json, save_json

# ---- successive halving: each round drops the worse half of the candidates -----------------------
#
#     round 1    64 candidates, one turn each     -> 32 remain
#     round 2    32 candidates, some turns each   -> 16 remain
#     ...                                            1
#
# The time is divided over the rounds at the start. Each sweep of a round measures all candidates
# once, in another order, so that drift affects all of them alike. A candidate's cost is the median
# of its turns in all rounds, so one bad turn does not drop it.

T = TypeVar("T")
R = TypeVar("R")

LEAST_TURN_S = 0.04
MOST_TURN_S = 0.25
_TURNS_OF_ROUND = 3  # aimed at: a turn is a third of what a round leaves to a candidate


@dataclasses.dataclass(frozen=True)
class Standing(Generic[T]):
    """A candidate and what its turns cost; infinite for one that cannot run."""

    candidate: T
    costs: list[float]

    @property
    def cost(self) -> float:
        """The median; infinite before the first turn."""
        return statistics.median(self.costs) if self.costs else math.inf


def halve(
    candidates: Sequence[T],
    measure: Callable[[T, float], float],
    seconds: float,
    say: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Standing[T]]:
    """Ranks the candidates, the winner first, then those that stayed longest.

    Every candidate has at least one turn; after that the time is kept to, but for the turn under
    way when it ends.

    Args:
        measure: gives a candidate a turn of about so many seconds and returns its cost, less is
            better.
        seconds: for all of it.
        say: told the round, their number and the candidates left, before each begins.
        clock: seconds; a test brings its own.
    """
    if not candidates:
        raise ValueError("no candidates")
    shuffler = random.Random(0)
    left = [Standing(each, []) for each in candidates]
    dropped = list[Standing[T]]()
    deadline = clock() + seconds

    def play(round_s: float) -> None:
        """One round: sweeps over the candidates until its time is over, so that all have the same
        number of turns."""
        turn_s = min(MOST_TURN_S, max(LEAST_TURN_S, round_s / (_TURNS_OF_ROUND * len(left))))
        start = clock()
        sweep_s = 0.0
        while not all(standing.costs for standing in left) or clock() - start + sweep_s <= round_s:
            began = clock()
            for standing in shuffler.sample(left, len(left)):
                if standing.costs and clock() >= deadline:
                    return
                standing.costs.append(measure(standing.candidate, turn_s))
            sweep_s = clock() - began

    num_rounds = math.ceil(math.log2(len(candidates)))
    for number in range(num_rounds):
        say(f"round {number + 1} of {num_rounds}: {len(left)} settings left")
        play((deadline - clock()) / (num_rounds - number))
        ranked = sorted(left, key=lambda standing: standing.cost)
        half = -(-len(ranked) // 2)
        left = ranked[:half]
        dropped = ranked[half:] + dropped
    return left + dropped


def thin(candidates: Sequence[T], turn_s: Callable[[T], float], seconds: float) -> list[T]:
    """Every second candidate, as often as needed until a turn for each fits; at least two, in their
    order."""
    kept = list(candidates)
    while len(kept) > 3 and sum(map(turn_s, kept)) > seconds:
        kept = kept[::2]
    return kept


# ---- StepMix: the disk time of an optimizer step's bytes, for given paths and settings of the queue -----------------
#
#     a parameter of a bf16 model trained with fp32 states, everything on NVMe, per step:
#
#         read     fp32 master 4 + momentum 4 + variance 4                      = 12 bytes  |  at once, tile by tile:
#         written  fp32 master 4 + momentum 4 + variance 4 + bf16 weight 2      = 14 bytes  |  the mixed pass
#         read     bf16 weight 2 in forward + 2 in backward                     =  4 bytes     the read pass
#
#         cost = 26 bytes / mixed rate + 4 bytes / read rate                    nanoseconds of disk per parameter and step
#
# Several paths are used at once, as in training: each moves its own bytes, and the rates add up.
# The files have no names, so none is left behind. They are written once at the start, because reads
# of unwritten blocks do not reach the disk.
#

STEP_BYTES = 26
FETCH_BYTES = 4
_MIXED_PART = 0.7  # of a turn's time; the rest reads
_FIRST_BYTES = 64 << 20  # written to see how fast a path is


class Turn(NamedTuple):
    """GB (1e9 bytes) per second of each path in one turn, all paths at once; mixed counts both
    directions."""

    mixed_gbps: tuple[float, ...]
    read_gbps: tuple[float, ...]

    @property
    def cost_ns(self) -> float:
        """Nanoseconds of disk per parameter and step."""
        return STEP_BYTES / sum(self.mixed_gbps) + FETCH_BYTES / sum(self.read_gbps)


class Refused(OSError):
    """These settings cannot run here, as the queue says: too many requests for Linux AIO, an engine
    that is forbidden."""


class StepMix(AbstractContextManager["StepMix"]):
    """Turns on an unnamed file on each path; for one thread. A context manager: the files are gone
    at its end.

    Making it writes the files. Blocks; raises OSError: a path is not writable or has no room.

    Args:
        paths: existing folders.
        file_bytes: of each file.
        io: settings to write the files with and to have the first turn.
        seconds: that writing them may take, about: on a slow path a part of the file is used.
    """

    def __init__(
        self, paths: Sequence[Path], file_bytes: int, io: IoSettings, seconds: float
    ) -> None:
        check_room(paths, [("a file to measure on (--size)", file_bytes)])
        with contextlib.ExitStack() as opened:
            files = opened.enter_context(BenchFiles(paths, [file_bytes]))
            self._fds = [files.descriptor(index) for index in range(len(paths))]
            # says how many bytes settings move in the time of a turn
            self._latest: dict[IoSettings, Turn] = {}
            self._file_bytes = self._on_all(
                lambda i: _write_once(self._fds[i], file_bytes, io, seconds)
            )
            self._first = Turn((0.0,) * len(paths), (0.0,) * len(paths))
            self._first = self.turn(io, 0.0)
            self._opened = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def file_bytes(self) -> int:
        """What is used of the smallest file."""
        return min(self._file_bytes)

    def turn(self, io: IoSettings, seconds: float) -> Turn:
        """Moves bytes for about `seconds`, and never fewer than fill the queue. Blocks; raises
        Refused and OSError."""
        window = io.block_bytes * io.depth
        known = self._latest.get(io, self._first)
        mixed_bytes = [
            max(window, int(rate * 5e8 * seconds * _MIXED_PART)) for rate in known.mixed_gbps
        ]
        read_bytes = [
            max(window, int(rate * 1e9 * seconds * (1 - _MIXED_PART))) for rate in known.read_gbps
        ]
        with contextlib.ExitStack() as closing:
            try:
                passes = [
                    closing.enter_context(Passes(fd, size, io))
                    for fd, size in zip(self._fds, self._file_bytes, strict=True)
                ]
            except OSError as error:
                raise Refused(error.errno, error.strerror or str(error)) from error
            mixed = self._on_all(lambda i: passes[i].run("mixed", mixed_bytes[i]).gbps)
            read = self._on_all(lambda i: passes[i].run("read", read_bytes[i]).gbps)
        self._latest[io] = Turn(tuple(mixed), tuple(read))
        return self._latest[io]

    def turn_s(self, io: IoSettings, seconds: float) -> float:
        """How long a turn of about `seconds` would take with these settings, at the rates of the
        first."""
        window = io.block_bytes * io.depth
        rates = zip(self._first.mixed_gbps, self._first.read_gbps, strict=True)
        return max(
            max(seconds * _MIXED_PART, 2e-9 * window / m) + 1e-9 * window / r for m, r in rates
        )

    def _on_all(self, work: Callable[[int], R]) -> list[R]:
        """On every path at once; waits for all, also after an error or an interrupt: none may close
        what another still uses."""
        with ThreadPoolExecutor(len(self._fds)) as pool:
            return list(pool.map(work, range(len(self._fds))))


def _write_once(fd: int, file_bytes: int, io: IoSettings, seconds: float) -> int:
    """Writes the file, or so much of it as the time allows; returns how much."""
    first_bytes = min(file_bytes, _FIRST_BYTES)
    with Passes(fd, file_bytes, io) as passes:
        first = passes.run("write", first_bytes)
        most = int(seconds * first.written_bytes / first.seconds)
        used = min(file_bytes, max(first_bytes, most))
        if used > first_bytes:
            passes.run("write", used)
        return used


# ---- the grid: settings of the queue that are worth trying ---------------------------------------
#
# Bytes in flight, block size x depth, are kept between 2 and 64 MiB. Fewer bytes do not keep a disk
# busy; more do not make it faster and take memory from the training. For the threads engine the
# depth is its number of threads: each serves one block at a time.

BLOCKS = tuple(256 << 10 << power for power in range(6))  # 256 KiB to 8 MiB
DEPTHS = (4, 8, 16, 32, 64, 128)
_MOST_THREADS = 32
_LEAST_WINDOW_BYTES = 2 << 20
_MOST_WINDOW_BYTES = 64 << 20


def engines_that_run(asked: Sequence[str]) -> list[str]:
    """The engines to try: those named, or for "auto" all that run here. Raises OSError for a named
    one that does not."""
    found = []
    for name, (can_run, why) in try_engines().items():
        if not can_run and name in asked:
            raise OSError(f"--engine: {name} cannot run here: {why}")
        if can_run and name != "auto" and {name, "auto"} & set(asked):
            found.append(name)
    return found


def default_of(engines: Sequence[str]) -> IoSettings:
    """The settings without tuning, on the engine they would take, or on the first that was asked
    for."""
    queue = Queue(IoSettings("auto"))
    queue.close()
    return IoSettings() if queue.engine in engines else IoSettings(engine=engines[0])


def candidates_of(engines: Sequence[str], file_bytes: int, default: IoSettings) -> list[IoSettings]:
    """The grid: what a disk may like, engine by engine; the defaults are the last."""
    grid = [
        IoSettings(engine, block, depth, threads=depth if engine == "threads" else 1)
        for engine in engines
        for block in BLOCKS
        for depth in DEPTHS
        if _LEAST_WINDOW_BYTES <= block * depth <= min(_MOST_WINDOW_BYTES, file_bytes // 2)
        and (engine != "threads" or depth <= _MOST_THREADS)
    ]
    taken = default.engine if default.engine != "auto" else engines[0]
    twin = IoSettings(taken, default.block_bytes, default.depth, threads=1)
    return [*(each for each in grid if each != twin), default]


def describe(io: IoSettings) -> str:
    """Settings in a few words."""
    threads = f", {io.threads} threads" if io.engine == "threads" and io.threads else ""
    return f"{io.engine}, {format_bytes(io.block_bytes)} x {io.depth}{threads}"


# ---- the file ------------------------------------------------------------------------------------
#
#     {
#         "aio": {"block_size", "queue_depth", "intra_op_parallelism", "single_submit",
#         "overlap_events"}, "tiermem": {"engine", "paths": [{"path", "weight"}, ...], "measured":
#         {"made_by": "tiermem tune", ...}}
#     }
#
# `measured` may have "sustained", and "runs", which runs add (seen.py).
#
# These are two sections of a config. `load_config` reads the file as it is, and
# `tiermem.with_tuned` adds it to another config; `measured` has no effect. The command overwrites a
# file only if all its content is this command's: a config that a user made from it is the user's.

MADE_BY = "tiermem tune"
_OWN_KEYS = {"engine", "paths", "measured"}


def section_of(
    io: IoSettings, paths: Sequence[NvmePath], measured: dict[str, Any]
) -> dict[str, Any]:
    """The config section that reads back as these settings and paths."""
    threads = {"intra_op_parallelism": io.threads} if io.threads else {}
    return {
        "aio": {
            "block_size": io.block_bytes,
            # of each thread, as the documentation counts
            "queue_depth": io.depth // max(1, io.threads),
            **threads,
            "single_submit": io.single_submit,
            "overlap_events": io.overlap_events,
        },
        "tiermem": {
            "engine": io.engine,
            "paths": [
                {
                    "path": str(each.path),
                    **({"weight": each.weight} if each.weight is not None else {}),
                }
                for each in paths
            ],
            "measured": measured,
        },
    }


def check_out(file: Path) -> None:
    """Sees that the file can be written: it is missing, or holds what this command wrote and
    nothing else.

    Raises FileExistsError, FileNotFoundError or PermissionError.
    """
    if not _is_ours(file):
        check_outputs([file], MADE_BY)


def _is_ours(file: Path) -> bool:
    """Whether a file is there, was made by this command and holds nothing that it does not
    write."""
    try:
        content = read_json(file)
        own = content["tiermem"]
        is_marked = own["measured"]["made_by"] == MADE_BY
    except (OSError, ValueError, KeyError, TypeError):  # not there, not readable, or something else
        return False
    return bool(is_marked and set(content) == {"aio", "tiermem"} and set(own) == _OWN_KEYS)


# ---- the command ---------------------------------------------------------------------------------
#
#     prepare   an unnamed file on each path, written once                                            a tenth of the time
#     search    engine x block size x depth, by successive halving (halve, StepMix)          most of it
#     verify    the winner against the defaults, in fresh loops that alternate                        a quarter
#     write     {"aio": {...}, "tiermem": {"engine", "paths", "measured"}}; weights are the paths' rates while all were used
#
# The winner is written when it is 1 % faster than the defaults in the median of the pairs, and wins
# in more pairs than chance would give once in twenty runs. Else the defaults are written, with a
# message. The search leaves out `single_submit` and `overlap_events`, which only cost time, and
# sizes of tiles and units, which depend on the memory.

_PREPARE_PART = 0.1
_SEARCH_PART = 0.6
_VERIFY_PART = 0.25
_LEAST_PAIRS = 5
_MOST_PAIRS = 20
_LEAST_GAIN = 1.01
_MOST_CHANCE = 0.05
_NUM_SHOWN = 5


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
        """Whether that is more than noise: a hundredth in the median, and more pairs won than
        chance gives once in twenty."""
        return self.gain >= _LEAST_GAIN and self.chance <= _MOST_CHANCE

    @property
    def chance(self) -> float:
        """How often two equals would be this far apart, or further: the sign test, one-sided."""
        pairs = len(self.gains)
        won = sum(gain > 1 for gain in self.gains)
        return float(sum(math.comb(pairs, more) for more in range(won, pairs + 1)) / 2**pairs)


class TuneResult(NamedTuple):
    """The outcome: what was tried, best first, what the winner was held to, and whether it is
    taken."""

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


def tune(options: TuneOptions, console: Console) -> int:
    """Measures, writes the file, says what it found; returns 0. Blocks; raises OSError and
    ValueError before it measures."""
    check_out(options.out)
    for path in options.paths:
        probe_path(path)
    say_memory(options.paths, console)
    found = _find(options, console)
    verdict = found.verdict
    io, turn = (found.winner, verdict.tuned) if found.is_taken else (found.default, verdict.default)
    notes = _notes(options, found)
    if options.sustained is not None:
        with console.status("writing past the fast caches"):
            past = measure_disks(options.paths, options.sustained)
        notes["sustained"] = past._asdict()
        figures = f"{past.read_bytes_s / 1e9:.2f} GB/s read, {past.write_bytes_s / 1e9:.2f} written"
        console.print(f"sustained: {figures} ({past.sustained})")
    section = section_of(io, weighed(options.paths, turn), notes)
    save_json(options.out, section)
    _print(found, options.out, section["tiermem"]["paths"], console)
    options.save_json({"out": options.out, "section": section})
    return 0


def verify(mix: StepMix, winner: IoSettings, default: IoSettings, seconds: float) -> Verdict:
    """Both in pairs, each going first in turn, for about `seconds`. Blocks; raises OSError."""
    turn_s = min(2 * MOST_TURN_S, max(LEAST_TURN_S, seconds / (2 * _MOST_PAIRS)))
    deadline = time.monotonic() + seconds
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    while len(turns[True]) < _LEAST_PAIRS or (
        len(turns[True]) < _MOST_PAIRS and time.monotonic() < deadline
    ):
        is_first = len(turns[True]) % 2 == 0
        for is_winner in (is_first, not is_first):
            turns[is_winner].append(mix.turn(winner if is_winner else default, turn_s))
    pairs = zip(turns[False], turns[True], strict=True)
    return Verdict(
        _median(turns[False]), _median(turns[True]), tuple(d.cost_ns / w.cost_ns for d, w in pairs)
    )


def weighed(paths: Sequence[Path], turn: Turn) -> list[NvmePath]:
    """The paths, each with its mixed rate while all were used as its weight; the slowest weighs 1,
    a single one nothing."""
    if len(paths) == 1:
        return [NvmePath(paths[0].absolute())]
    slowest = min(turn.mixed_gbps)
    rates = zip(paths, turn.mixed_gbps, strict=True)
    return [NvmePath(path.absolute(), weight=round(rate / slowest, 3)) for path, rate in rates]


def _find(options: TuneOptions, console: Console) -> TuneResult:
    engines = engines_that_run(options.engines)
    default = default_of(engines)
    with (
        console.status("writing the files to measure on") as status,
        StepMix(options.paths, options.size_bytes, default, options.seconds * _PREPARE_PART) as mix,
    ):
        for path in options.paths:
            if not probe_path(path).is_direct:
                console.print(f"{path} takes no direct I/O: the page cache is measured as well")
        grid = candidates_of(engines, mix.file_bytes, default)
        standings = _search(mix, grid, options.seconds * _SEARCH_PART, status.update)
        winner = standings[0].candidate
        status.update(f"verifying {describe(winner)}")
        return TuneResult(
            standings, default, verify(mix, winner, default, options.seconds * _VERIFY_PART)
        )


def _search(
    mix: StepMix, grid: Sequence[IoSettings], seconds: float, say: Callable[[str], None]
) -> list[Standing[IoSettings]]:
    """Ranks what of the grid the time allows to try; its last, the defaults, are always among
    them."""
    few = thin(grid[:-1], lambda io: mix.turn_s(io, LEAST_TURN_S), seconds / 2)

    def measure(io: IoSettings, turn_s: float) -> float:
        try:
            return mix.turn(io, turn_s).cost_ns
        except Refused:
            return math.inf

    return halve([*few, grid[-1]], measure, seconds, say)


def _notes(options: TuneOptions, found: TuneResult) -> dict[str, Any]:
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
    return Turn(*map(tuple, np.median(turns, axis=0).tolist()))


def _print(found: TuneResult, out: Path, paths: Sequence[dict[str, Any]], console: Console) -> None:
    shown = table(
        f"{len(found.standings)} settings tried",
        "settings",
        ">disk ns per parameter",
        ">read+write GB/s",
        ">read GB/s",
    )
    for standing in found.standings[:_NUM_SHOWN]:
        shown.add_row(describe(standing.candidate), f"{standing.cost:.3f}", "", "")
    shown.add_section()
    names = ("the winner, verified", "the defaults, verified")
    if found.winner == found.default:
        names = ("the defaults, verified", "the same, verified again")
    for name, turn in zip(names, (found.verdict.tuned, found.verdict.default), strict=True):
        shown.add_row(
            name,
            f"{turn.cost_ns:.3f}",
            f"{sum(turn.mixed_gbps):.2f}",
            f"{sum(turn.read_gbps):.2f}",
        )
    console.print(shown)
    console.print(_sentence(found))
    if len(paths) > 1:
        console.print(
            "weights: " + ", ".join(f"{each['path']} {each['weight']:g}" for each in paths)
        )
    named = shlex.quote(str(out))
    console.print(f"{out} holds them: tiermem train --tuned {named}, or in Python")
    console.print(f'tiermem.initialize(model=model, config=tiermem.with_tuned(config, "{out}"))')


def _sentence(found: TuneResult) -> str:
    gains = found.verdict.gains
    spread = f"{min(gains):.3f} to {max(gains):.3f} in {len(gains)} pairs"
    if found.is_taken:
        return (
            f"{describe(found.winner)}: {found.verdict.gain:.3f} times as fast as the defaults "
            f"({spread})"
        )
    if found.winner == found.default:
        return (
            f"the defaults ({describe(found.default)}) are the fastest, and are written; measured "
            f"twice they differ by {spread}"
        )
    return (
        f"{describe(found.winner)} is not faster beyond noise: {found.verdict.gain:.3f} times "
        f"({spread}); the defaults ({describe(found.default)}) are written"
    )
