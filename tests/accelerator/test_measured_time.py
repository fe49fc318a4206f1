"""Does the clock tell what a run takes? A deep model's iteration is predicted from its recording, then run and timed.

The run is on the simulated device with a thread for each stream (schedule "threads"), so that each lane of the recording is
something that happens on this machine:

    compute               products, norms and the rest, in the stream's thread: one core, since torch has one thread
    to device, to host    a copy, in the stream's thread, which then sleeps until a link of LINK would be done
    cpu                   the kernels of a tile's step: native, on a thread of their own, on the other core

Lanes wait for each other as the library orders it, not the clock. What the CPU takes for an operator and for an element of a
step is measured on a shallow model without overlap. On a plain CPU there would be no link and no gradients that rest elsewhere,
so its graph is not that of test_iteration_time.py. The link to the host is slow, for steps as long as two forwards, which is
the case of 8B: then each window saves more than what the clock may be wrong by.
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

import tiermem.zero.topology
from accelerator import clock
from accelerator.clock import Rate
from accelerator.iteration import Marks, Sizes, Training, record

NORMS = {"none": 1e-3, "forward": 1e-3, "backward": 0.0}
"""By overlap: the norm to which gradients are clipped; 0.0: they are not, as steps under backward assume."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread of maths, and one of kernels."""
    monkeypatch.setattr(tiermem.zero.topology, "fair_cores", lambda *_: ())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- what a run does, counted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", NORMS)
def test_a_recording_has_the_operations_and_tiles_of_a_run(
    overlap: str, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By lane, name, bytes and arithmetic. Streams with threads run them in another order, and no virtual time helps them."""
    sizes = Sizes(width=160, layers=6, vocabulary=61, rows=8, tile_numel=8192)
    numel, num_tiles = 6 * 7 * 4096 + 2 * 3 * 4096, 6 * 4 + 2 * 2  # with the padding of units; the last tile is a half
    with monkeypatch.context() as patch:
        marks = Marks(sim, patch)
        planned = record(sim, marks, sizes, overlap, NORMS[overlap])
    sim.set_schedule("threads")
    with Training(sizes, overlap, NORMS[overlap]) as training:
        for number in range(6):
            if number == 3:
                training.quiet()
                sim.reset_counts()
                num_native, num_events = training.num_tiles, len(training.kernels)
                sim.record(True)
            training.iterate()
        training.quiet()
        sim.record(False)
        assert training.shards.steps.num_redone == 0
        num_stepped, kernels, copied = training.num_tiles - num_native, training.kernels[num_events:], sim.copies()
    steps = [entry for entry in planned if entry.get("lane") == "cpu"]
    assert len(steps) == len(kernels) == num_stepped == 3 * num_tiles
    assert sum(entry["flops"] for entry in steps) == 3 * numel
    assert (marks.num_attempted > 0) == (overlap == "backward")
    assert _operations(planned) == _operations(sim.recording())
    for lane in ("to device", "to host"):
        num_bytes = sum(entry["bytes"] for entry in planned if entry.get("lane") == lane)
        assert num_bytes == copied[f"{lane.replace(' ', '_')}_bytes"]
        assert num_bytes >= 3 * 2 * (6 * 160 * 160 + 2 * 61 * 160)


def _operations(entries: Sequence[Any]) -> Counter[Any]:
    return Counter(
        (entry["lane"], entry["name"], entry["bytes"], entry["flops"])
        for entry in entries
        if entry["kind"] == "operation"
    )


# ---- and how long it takes -------------------------------------------------------------------------------------------

LINK = {"to device": 1.5e9, "to host": 0.25e9}  # bytes a second
SHALLOW, DEEP = (Sizes(width=2048, layers=layers, vocabulary=97, rows=128, tile_numel=294_912) for layers in (3, 8))
"""A layer has 14 tiles and a tail."""
NUM_TURNS, NUM_TIMED = 6, 2


class Turn(NamedTuple):
    """Some iterations of one model, timed."""

    iteration_s: float
    operation_s: dict[str, float]  # by name, of a byte or of an arithmetic operation
    kernel_s: float  # of an element's step
    tile_s: float  # what the gradient of a tile takes beside its bytes on the link: threads that wake each other


def turn(sim: ModuleType, training: Training, is_calibration: bool) -> Turn:
    """One iteration in which what overlaps begins, then those that are timed."""
    training.iterate()
    num_events = len(training.kernels)
    sim.record(is_calibration)
    start, step_s = time.perf_counter(), 0.0
    for _ in range(NUM_TIMED):
        training.iterate(is_apart=is_calibration)
        step_s += training.step_s / NUM_TIMED
    seconds = (time.perf_counter() - start) / NUM_TIMED
    training.quiet()
    sim.record(False)
    work, taken = defaultdict[str, float](float), defaultdict[str, float](float)
    for entry in sim.recording() if is_calibration else ():
        if entry.get("lane") == "compute":
            work[entry["name"]] += entry["flops"] or entry["bytes"]
            taken[entry["name"]] += entry["ran_s"]
    kernels = training.kernels[num_events:]
    kernel_s = sum(event.end_ns - event.start_ns for event in kernels) * 1e-9 / (NUM_TIMED * training.numel)
    tile_s = (step_s - 2 * training.numel / LINK["to host"]) * NUM_TIMED / len(kernels)
    return Turn(seconds, {name: taken[name] / work[name] for name in work if work[name]}, kernel_s, tile_s)


def predicted(entries: Sequence[Any], starts: Sequence[int], least: Turn) -> float:
    """Seconds of an iteration by the clock, from a step's start to the next."""

    def seconds_of(entry: Any) -> tuple[float, float]:
        if entry["lane"] == "compute":
            return least.operation_s.get(entry["name"], 0.0) * (entry["flops"] or entry["bytes"]), 0.0
        if entry["lane"] == "cpu":
            return least.kernel_s * entry["flops"], 0.0
        is_tile = entry["name"] == "copy to host"
        return entry["bytes"] / LINK[entry["lane"]] + least.tile_s * is_tile, 0.0

    lanes = dict.fromkeys(("compute", "cpu", *LINK), Rate(bytes_per_s=1.0))
    spans = clock.replay(entries, lanes, size_of=seconds_of).spans
    times = [spans[number][1] for number in starts]
    return times[-1] - times[-2]


@pytest.mark.slow
def test_the_clock_tells_what_iterations_of_a_deep_model_take(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 10 %, for each overlap. Every overlap saves more than that, so that a clock that ignores one fails."""
    recordings = {}
    for overlap, max_norm in NORMS.items():
        with monkeypatch.context() as patch:
            marks = Marks(sim, patch)
            recordings[overlap] = record(sim, marks, DEEP, overlap, max_norm), list(marks.starts)
    sim.set_schedule("threads")
    for lane, bytes_per_s in LINK.items():
        sim.set_pace(lane, bytes_per_s)
    shallow, timed = list[Turn](), defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        calibrated = stack.enter_context(Training(SHALLOW, "none", NORMS["none"]))
        deep = {overlap: stack.enter_context(Training(DEEP, overlap, norm)) for overlap, norm in NORMS.items()}
        for training in (calibrated, *deep.values()):
            for _ in range(3):  # the order of units, states, and whether steps are attempted
                training.iterate()
            training.quiet()
        for _ in range(NUM_TURNS):
            shallow.append(turn(sim, calibrated, is_calibration=True))
            for overlap, training in deep.items():
                timed[overlap].append(turn(sim, training, is_calibration=False).iteration_s)
        assert not any(training.shards.steps.num_redone for training in deep.values())
    least = min(shallow, key=lambda each: each.iteration_s)
    found = {overlap: predicted(*recordings[overlap], least) for overlap in NORMS}
    seen = {overlap: min(seconds) for overlap, seconds in timed.items()}
    assert found == pytest.approx(seen, rel=0.10)
    for times in (found, seen):
        assert times["none"] > 1.1 * times["forward"] and times["forward"] > 1.1 * times["backward"], times
