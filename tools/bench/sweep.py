"""Sweep: every setting of a benchmark measured in turn, loop after loop.

    for each mode:  loop 1: A B C w(A) ...   loop 2: A B C w(A) ...        A, B, C settings; w a witness of the same file

The rate of a disk drifts, and so does that of a host that others use. Settings of one mode are comparable because they take
turns, and their medians are compared. Witnesses (fio, a bare loop, a peer) are measured in the same loops, after the settings
with their block and depth.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tiermem.tools.bench.files import BenchFiles
from tiermem.tools.bench.io_ranks import CannotRun, Job, Outcome, Ranks
from tiermem.tools.options import SEQUENTIAL, IoBenchOptions

_RANDOM_BLOCKS = 2048  # of a pass, for each block in flight
_MOST_RANDOM_DEPTH = 32


class Setting(NamedTuple):
    """What a row is about. `places` are the indices of the paths that take part, `path` is how the row calls them."""

    mode: str
    engine: str
    block_bytes: int
    depth: int
    ranks: int
    path: str
    places: tuple[int, ...]

    def describe(self) -> str:
        """The setting on one line."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.mode} {self.engine}, {self.block_bytes >> 10} KiB x {self.depth}, {ranks}, {self.path}"


def bytes_of(setting: Setting, options: IoBenchOptions) -> int:
    """Bytes that one rank moves in a pass: each way when it goes both ways. Whole blocks."""
    block = setting.block_bytes
    if setting.mode == "sustained":
        return options.sustained_bytes // block * block
    if setting.mode == "random":
        most = _RANDOM_BLOCKS * min(setting.depth, _MOST_RANDOM_DEPTH) * block
        return min(most, options.size_bytes // block * block)
    if setting.mode == "mixed":  # one half of the file is read while the other is written
        return max(block, options.size_bytes // 2 // block * block)
    return options.size_bytes // block * block


class Witness:
    """Another program that measures the same pattern on the same file. It keeps a figure of each loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.notes: list[str] = []
        self._figures: dict[Any, list[float]] = collections.defaultdict(list)

    def measure(self, setting: Setting, num_bytes: int, loop: int) -> None:
        """Measures once where it can; what it cannot it leaves out, and says so in its notes."""
        raise NotImplementedError

    def _series(self, setting: Setting, kind: str = "") -> list[float]:
        """What was measured of a setting so far. The engine and the ranks are ours: a witness has neither."""
        return self._figures[kind, setting.mode, setting.block_bytes, setting.depth, setting.places[0]]


@dataclasses.dataclass
class Measured:
    """What came of one setting: an outcome per rank and loop, or why there is none."""

    setting: Setting
    is_direct: bool
    outcomes: list[list[Outcome]] = dataclasses.field(default_factory=list)
    error: str | None = None

    def gbps(self) -> list[float]:
        """The total rate of each loop, all ranks and both directions together, from the first start to the last end."""
        return [
            sum(o.read_bytes + o.written_bytes for o in ranks)
            / (max(o.end_s for o in ranks) - min(o.start_s for o in ranks))
            / 1e9
            for ranks in self.outcomes
        ]


def settings_of(options: IoBenchOptions) -> list[Setting]:
    """Every setting, those of one block and depth together. Several paths: each alone, then "all" at once.

    "random" has its own block; "sustained" is measured once per path, on one rank, with the largest block and depth.
    """
    places = [(str(path), (number,)) for number, path in enumerate(options.paths)]
    everywhere = [("all", tuple(range(len(places))))] if len(places) > 1 else []
    found = []
    for mode, (path, where) in itertools.product(options.modes, [*places, *everywhere]):
        sizes, depths, ranks, engines = options.blocks, options.depths, options.ranks, options.engines
        if mode == "sustained":
            sizes, depths, ranks, engines = [max(sizes)], [max(depths)], [1], engines[:1]
        elif mode == "random":
            sizes = [options.random_block_bytes]
        found += [
            Setting(mode, engine, block, depth, num_ranks, path, where)
            for block, depth, num_ranks, engine in itertools.product(sizes, depths, ranks, engines)
        ]
    return found


def sweep(
    settings: Sequence[Setting],
    options: IoBenchOptions,
    files: BenchFiles,
    ranks: Ranks,
    witnesses: Sequence[Witness] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Measures every setting in every loop ("sustained": once). Blocks; raises OSError when a transfer fails.

    A setting whose engine cannot run gets its reason and is not tried again.
    """
    measured = {setting: Measured(setting, files.is_direct(setting.places)) for setting in settings}
    for setting, witness, loop in _turns(settings, options.loops, witnesses):
        if witness is not None:
            progress(f"{witness.name}, {setting.describe()}")
            witness.measure(setting, bytes_of(setting, options), loop)
            continue
        progress(setting.describe())
        found = measured[setting]
        if found.error is None:
            try:
                found.outcomes.append(ranks.run(jobs_of(setting, options, files, loop)))
            except CannotRun as refusal:
                found.error = str(refusal)
    return list(measured.values())


def count_passes(settings: Sequence[Setting], loops: int, witnesses: Sequence[Witness]) -> int:
    """How often `progress` will be called."""
    return sum(1 for _ in _turns(settings, loops, witnesses))


def _turns(
    settings: Sequence[Setting], loops: int, witnesses: Sequence[Witness]
) -> Iterator[tuple[Setting, Witness | None, int]]:
    """Whose turn it is: a setting's own, or a witness's of it, and in which loop."""
    for mode, of_mode in itertools.groupby(settings, key=lambda each: each.mode):
        rows = list(of_mode)
        for loop in range(1 if mode == "sustained" else loops):
            for _, group in itertools.groupby(rows, key=lambda each: (each.path, each.block_bytes, each.depth)):
                together = list(group)
                yield from ((setting, None, loop) for setting in together)
                judged = next(filter(is_witnessed, together), None)
                if judged is not None:
                    yield from ((judged, witness, loop) for witness in witnesses)


def is_witnessed(setting: Setting) -> bool:
    """Whether witnesses can measure the same: one process on one file."""
    return setting.ranks == 1 and len(setting.places) == 1 and setting.mode in (*SEQUENTIAL, "random")


def jobs_of(setting: Setting, options: IoBenchOptions, files: BenchFiles, seed: int = 0) -> list[Job]:
    """The job of each rank."""
    return [
        Job(
            mode=setting.mode,
            engine=setting.engine,
            block_bytes=setting.block_bytes,
            depth=setting.depth,
            threads=options.threads,
            files=tuple(files.name(place, rank, setting.mode) for place in setting.places),
            folders=tuple(files.folder(place) for place in setting.places),
            file_bytes=files.file_bytes(setting.mode),
            num_bytes=bytes_of(setting, options),
            is_direct=files.is_direct(setting.places),
            sync=options.sync and setting.mode in ("write", "mixed", "sustained"),
            seed=seed * 1000 + rank,
            seconds=options.sustained_s if setting.mode == "sustained" else None,
        )
        for rank in range(setting.ranks)
    ]
