"""Does the clock tell what a run takes? A deep model's iteration is predicted from its recording,
then run and timed.

The run is on the simulated device with a thread for each stream (schedule "threads"), so that each
lane of the recording is something that happens on this machine:

    compute               products, norms and the rest, in the stream's thread: one core, since torch has one thread
    to device, to host    a copy, in the stream's thread, which then sleeps until a link of LINK would be done
    cpu                   the kernels of a tile's step: native, on a thread of their own, on the other core

Lanes wait for each other as the library orders it, not the clock. What the CPU takes for an
operator and for an element of a step is measured on a shallow model without overlap; what an
operation takes beside that (Python, threads that wake each other) is what the clock lacks of that
model's iteration. Micro-batches go through the models block by block: norms of gradients, which
take turns with products, are ready in time then. The link to the host is slow, for a step longer
than a forward: then each window saves what can be told.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import tiermem.ranks.topology
from accelerator import clock
from accelerator.clock import Rate
from accelerator.iteration import NUM_BEFORE, NUM_RECORDED, Marks, Sizes, Training, record
from tiermem import Tier

NORMS = {"none": 1e-3, "forward": 1e-3, "backward": 0.0}
"""By overlap: the norm to which gradients are clipped; 0.0: they are not, as steps under backward
assume."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread of maths, and one of kernels."""
    monkeypatch.setattr(tiermem.ranks.topology, "fair_cores", lambda *_: ())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- what a run does, counted --------------------------------------------------------------------


@pytest.mark.sampled(12)
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("overlap", NORMS)
def test_a_recording_has_the_operations_and_tiles_of_a_run(
    overlap: str, by_layer: bool, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By lane, name, bytes and arithmetic. Streams with threads run them in another order, and no
    virtual time helps them.

    by_layer: three micro-batches go through the model block by block; else one. A run fetches some
        units once more: a unit that
    was fetched for one pass has left its buffer for another, as steps happened to end. That decides
    into how many pieces the copy of a unit is cut, too.
    """
    sizes = Sizes(width=160, layers=6, vocabulary=61, rows=210, tile_numel=8192)
    # with the padding of units; the last tile is a half
    numel, num_tiles = 6 * 7 * 4096 + 2 * 3 * 4096, 6 * 4 + 2 * 2
    num_micros, fields = (3, {"activations": Tier.HOST}) if by_layer else (1, {})
    with monkeypatch.context() as patch:
        marks = Marks(sim, patch)
        planned = record(sim, marks, sizes, overlap, NORMS[overlap], num_micros, by_layer, **fields)
    sim.set_schedule("threads")
    with Training(sizes, overlap, NORMS[overlap], by_layer, **fields) as training:
        for number in range(NUM_BEFORE + NUM_RECORDED):
            if number == NUM_BEFORE:
                training.quiet()
                sim.reset_counts()
                num_native, num_events = training.num_tiles, len(training.kernels)
                sim.record(True)
            training.iterate(num_micros)
        training.quiet()
        sim.record(False)
        assert training.shards.steps.num_redone == 0
        num_stepped, kernels, copied = (
            training.num_tiles - num_native,
            training.kernels[num_events:],
            sim.copies(),
        )
    steps = [entry for entry in planned if entry.get("lane") == "cpu"]
    assert len(steps) == len(kernels) == num_stepped == NUM_RECORDED * num_tiles
    assert sum(entry["flops"] for entry in steps) == NUM_RECORDED * numel
    assert (marks.num_attempted > 0) == (overlap == "backward")
    found = sim.recording()
    assert _operations(planned) == _operations(found)
    num_bytes = _bytes(found)
    assert _bytes(planned)["to device"] == pytest.approx(num_bytes["to device"], rel=0.2)
    assert num_bytes == {lane: copied[f"{lane.replace(' ', '_')}_bytes"] for lane in _LINK}
    # weights; five blocks' inputs
    least = 2 * (6 * 160 * 160 + 2 * 61 * 160) + by_layer * 3 * 5 * 2 * 210 * 160
    assert min(num_bytes.values()) >= NUM_RECORDED * least


_LINK = ("to device", "to host")


def _operations(entries: Sequence[Any]) -> Counter[Any]:
    """All but copies to the device."""
    return Counter(
        (entry["lane"], entry["name"], entry["bytes"], entry["flops"])
        for entry in entries
        if entry["kind"] == "operation" and entry["lane"] != "to device"
    )


def _bytes(entries: Sequence[Any]) -> dict[str, int]:
    """What crosses the link, each way."""
    return {
        lane: sum(entry["bytes"] for entry in entries if entry.get("lane") == lane)
        for lane in _LINK
    }


# ---- and how long it takes -----------------------------------------------------------------------

LINK = {"to device": 0.75e9, "to host": 0.0625e9}  # bytes a second
SHALLOW, DEEP = (
    Sizes(width=1408, layers=layers, vocabulary=97, rows=128, tile_numel=1_179_648)
    for layers in (3, 8)
)
"""A layer has a tile and a tail, which take 38 and 26 ms of the link."""
NUM_MICROS, NUM_TIMED = 4, 2
FEWEST_TURNS, MOST_TURNS = 2, 6
"""What else runs on this machine makes a turn longer, so the shortest ones count, and more are made
until they agree."""
Recorded = tuple[Sequence[Any], Sequence[int]]
"""Entries, and those that start steps."""


class Turn(NamedTuple):
    """Some iterations of one model, timed."""

    iteration_s: float
    operation_s: dict[str, float]  # by name, of a byte or of an arithmetic operation
    kernel_s: float  # of an element's step


def turn(sim: ModuleType, training: Training, is_calibration: bool) -> Turn:
    """One iteration in which what overlaps begins, then those that are timed."""
    training.iterate(NUM_MICROS)
    num_events = len(training.kernels)
    sim.record(is_calibration)
    start = time.perf_counter()
    for _ in range(NUM_TIMED):
        training.iterate(NUM_MICROS, is_apart=is_calibration)
    seconds = (time.perf_counter() - start) / NUM_TIMED
    training.quiet()
    sim.record(False)
    work, taken = defaultdict[str, float](float), defaultdict[str, float](float)
    for entry in sim.recording() if is_calibration else ():
        if entry.get("lane") == "compute":
            work[entry["name"]] += entry["flops"] or entry["bytes"]
            taken[entry["name"]] += entry["ran_s"]
    kernels = training.kernels[num_events:]
    kernel_s = (
        sum(event.end_ns - event.start_ns for event in kernels)
        * 1e-9
        / (NUM_TIMED * training.numel)
    )
    return Turn(seconds, {name: taken[name] / work[name] for name in work if work[name]}, kernel_s)


def predicted(recorded: Recorded, least: Turn, gap_s: float = 0.0) -> float:
    """Seconds of an iteration by the clock. gap_s: what each operation takes beside its work."""

    def seconds_of(entry: Any) -> tuple[float, float]:
        if entry["lane"] == "compute":
            return least.operation_s.get(entry["name"], 0.0) * (
                entry["flops"] or entry["bytes"]
            ), 0.0
        if entry["lane"] == "cpu":
            return least.kernel_s * entry["flops"], 0.0
        return entry["bytes"] / LINK[entry["lane"]], 0.0

    entries, starts = recorded
    lanes = dict.fromkeys(("compute", "cpu", *LINK), Rate(bytes_per_s=1.0, latency_s=gap_s))
    spans = clock.replay(entries, lanes, size_of=seconds_of).spans
    times = [spans[number][1] for number in starts]
    return times[-1] - times[-2]


def gap_of(recorded: Recorded, least: Turn) -> float:
    """What an operation takes beside its work, by the model whose iteration was measured."""
    entries, starts = recorded
    num_operations = sum(1 for entry in entries if entry.get("lane")) / len(starts)
    return max(0.0, least.iteration_s - predicted(recorded, least)) / num_operations


@pytest.mark.slow
def test_the_clock_tells_what_iterations_of_a_deep_model_take(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 10 %, for each overlap. Each saves about a tenth, and both the clock and the run show at
    least half of that."""
    recordings = dict[str, Recorded]()
    for name, sizes in {"calibration": SHALLOW, **dict.fromkeys(NORMS, DEEP)}.items():
        overlap = name if name in NORMS else "none"
        with monkeypatch.context() as patch:
            marks = Marks(sim, patch)
            entries = record(sim, marks, sizes, overlap, NORMS[overlap], NUM_MICROS, by_layer=True)
            recordings[name] = entries, list(marks.starts)
    sim.set_schedule("threads")
    for lane, bytes_per_s in LINK.items():
        sim.set_pace(lane, bytes_per_s)
    shallow, timed = list[Turn](), defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        calibrated = stack.enter_context(Training(SHALLOW, "none", NORMS["none"], by_layer=True))
        deep = {
            name: stack.enter_context(Training(DEEP, name, norm, by_layer=True))
            for name, norm in NORMS.items()
        }
        for training in (calibrated, *deep.values()):
            for _ in range(3):  # the order of units, states, and whether steps are attempted
                training.iterate(NUM_MICROS)
            training.quiet()
        for number in range(1, MOST_TURNS + 1):
            shallow.append(turn(sim, calibrated, is_calibration=True))
            for overlap, training in deep.items():
                timed[overlap].append(turn(sim, training, is_calibration=False).iteration_s)
            least = min(shallow, key=lambda each: each.iteration_s)
            gap_s = gap_of(recordings["calibration"], least)
            found = {overlap: predicted(recordings[overlap], least, gap_s) for overlap in NORMS}
            seen = {overlap: min(seconds) for overlap, seconds in timed.items()}
            if number >= FEWEST_TURNS and found == pytest.approx(seen, rel=0.10):
                break
        assert not any(training.shards.steps.num_redone for training in deep.values())
    assert found == pytest.approx(seen, rel=0.10)
    for times in (found, seen):
        assert (
            times["none"] > 1.05 * times["forward"] and times["forward"] > 1.05 * times["backward"]
        ), times
