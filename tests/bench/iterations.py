"""Iterations: a training under a memory cap that makes a turn of iterations whenever it is asked,
for `bench overlap`.

    python -m bench.iterations JOB          JOB is a file that launcher.Job wrote
    us -> facts                it -> what the plan and the least bytes are
    us -> turn 3               it -> seconds of the last two of three iterations, and what all three moved
    us -> quit

Answers are lines of JSON, or begin with "error". stdout is theirs alone; what else the process
prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tiermem
from tiermem.engine import Engine
from tiermem.forecast.loads import Use, still_buffered, uses_of
from tiermem.forecast.rates import Compute
from tiermem.optim.base import NativeOptimizer
from tiermem.optim.sharded import ShardedModel
from tiermem.optim.tentative import TentativeStep
from tiermem.optim.tile import Tile
from tiermem.plans.plan import Plan
from tiermem.policy import Tier
from tiermem.run.shards import Shards
from tiermem.swap.base.tile_program import TileProgram
from tiermem.swap.disk.queue import Meter
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.swap.program.program import Program
from tiermem.swap.store.checksum import Sums
from tiermem.tools.corpus import Corpus
from tiermem.tools.job.launcher import Job, large_blocks_mapped, resident_of
from tiermem.tools.job.train_job import with_host_bytes
from tiermem.tools.plan.prediction import build_model
from tiermem.tools.plan.settle import settle_by_room
from tiermem.tools.record.run_record import PHASES, IoCounts, kernel_counts, median_limits
from tiermem.tools.train.training import counts_at_rest, load_model_classes, store_counts
from tiermem.tools.words import message_of
from tiermem.units.unit import Unit
from tiermem.weights.step_run import overlap_of

# ---- the least bytes that an iteration moves -----------------------------------------------------
#
# Of one rank, one micro-batch an iteration, with the plan's memory: what rests there moves no byte,
# and a unit buffer that is full at the end of forward needs no read in backward.
#
#     what                  read                                        written
#     optimizer states      those that rest on NVMe                     the same
#     weights, forward      all; under a step: those it does not step,  -
#                           and those it has written in backward
#     weights, backward     all but those that the unit buffers hold    -
#                           and those of embeddings
#     weights, step         where the master is made with them          the stepped ones
#     gradients             what backward has written, but for what     all, where they rest on NVMe
#                           it has stepped and its buffers still hold


class Least(NamedTuple):
    """The least bytes of an iteration, by what they are."""

    states: IoCounts
    forward: IoCounts
    backward: IoCounts
    step: IoCounts
    gradients: IoCounts

    @property
    def total(self) -> IoCounts:
        """All of them."""
        return IoCounts.total(self)

    def with_steps_in_backward(self, written_bytes: int) -> Least:
        """The least bytes when so much is written during backward.

        Weights that were stepped there are fetched again; their gradients were in memory.
        """
        stepped = max(0, written_bytes - self.gradients.written_bytes)
        part = min(1.0, stepped / max(1, self.step.written_bytes + self.states.written_bytes))
        again, (num_read, num_written) = round(part * self.step.written_bytes), self.gradients
        return self._replace(
            forward=IoCounts(self.forward.read_bytes + again, 0),
            gradients=IoCounts(round((1 - part) * num_read), num_written),
        )


def least_bytes(plan: Plan, uses: Sequence[Use], tiles: Sequence[Tile], overlap: str) -> Least:
    """The least bytes of an iteration with this plan.

    Args:
        uses: the modules of a forward, in order.
        tiles: of the optimizer.
        overlap: what a step runs beside; "backward": under the next forward what backward has left.
    """
    on_nvme = [unit for unit in plan.division.units if plan.unit_homes.get(unit.index) is Tier.NVME]
    states = sum(tile.state_bytes for tile in tiles if tile.state_home is Tier.NVME)
    stepped = [tile for tile in tiles if plan.unit_homes.get(tile.live.unit.index) is Tier.NVME]
    fetched = on_nvme if overlap == "none" else [unit for unit in on_nvme if not unit.is_trainable]
    used = dict.fromkeys(index for use in reversed(uses) for index in use.units)  # the last first
    held = [index for index in used if index in plan.unit_homes][: plan.units.num]
    again = {index for use in uses if use.reads_again for index in use.units}.difference(held)
    gradients = sum(tile.grad_bytes for tile in tiles) if plan.grads is Tier.NVME else 0
    buffered = still_buffered(plan, uses, bool(plan.on_device))
    in_memory = sum(tile.grad_bytes for tile in tiles if tile.live.unit.index in buffered)
    return Least(
        states=IoCounts(states, states),
        forward=IoCounts(_bytes_of(fetched), 0),
        backward=IoCounts(_bytes_of([unit for unit in on_nvme if unit.index in again]), 0),
        step=IoCounts(
            sum(tile.slice_bytes for tile in stepped if tile.layout.reads_weight),
            sum(tile.slice_bytes for tile in stepped),
        ),
        gradients=IoCounts(gradients - in_memory, gradients),
    )


def _bytes_of(units: Sequence[Unit]) -> int:
    return sum(unit.shard_bytes for unit in units)


# ---- Python in steps -----------------------------------------------------------------------------

_CALLS: Sequence[tuple[type, str]] = (
    (ShardedModel, "step"),
    (TentativeStep, "begin_backward"),
    (TentativeStep, "receive"),
    (Program, "_attempt"),  # in a thread of its own
    (Program, "read"),  # of new weights, for the next forward
    (Program, "finish"),
)


class StepPython:
    """Counts the CPU time of Python in optimizer steps: of the calls that make them, in every
    thread, without native work.

    Making it wraps these calls for the rest of the process.
    """

    def __init__(self) -> None:
        self._spent: list[float] = []
        self._thread = threading.local()
        for owner, name in _CALLS:
            self._wrap(owner, name, is_native=False)
        self._wrap(Sums, "_sum", is_native=True)  # of bytes that were read
        self._wrap(TileProgram, "take", is_native=True)  # copies new weights

    @property
    def seconds(self) -> float:
        """So far."""
        return sum(self._spent)

    def _wrap(self, owner: type, name: str, is_native: bool) -> None:
        call = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            is_inside = getattr(self._thread, "is_inside", False)
            # a call in a counted one, or native work outside of them
            if is_inside is not is_native:
                return call(*args, **kwargs)
            self._thread.is_inside, start_s = True, time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._thread.is_inside = is_inside
                self._spent.append((time.thread_time() - start_s) * (-1.0 if is_native else 1.0))

        setattr(owner, name, counted)


# ---- the training --------------------------------------------------------------------------------


class Turn(NamedTuple):
    """What a turn took. Seconds are of an iteration, counts are of the whole turn, with nothing
    under way at either end."""

    # the mean of all but the first: begin of a forward to begin of the next, while steps may go on
    iteration_s: float
    # of an iteration as the program sees it, the median of all but the first
    phases_s: dict[str, float]
    # for which resources were busy in an iteration, the median of all but the first
    limits_s: dict[str, float] | None
    python_s: float  # of steps, in an iteration, the median of all but the first
    written_in_backward_bytes: int  # of an iteration, the median of all but the first
    store: IoCounts
    kernel: IoCounts
    by_path: list[IoCounts]
    peak_rss_bytes: int
    loss: float


class Training(contextlib.AbstractContextManager["Training"]):
    """An engine with its data. A context manager: nothing is left on the paths at its end.

    Raises what building it raises; see `training.Trainer`.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._data = Corpus([Path(path) for path in job.data], job.seq, job.seed)
        self._num_batches = 0
        resident_bytes = load_model_classes(job)
        job, budget = settle_by_room(job, resident_bytes)
        config = job.config if budget is None else with_host_bytes(job.config, budget.left_bytes)
        with large_blocks_mapped():
            model = build_model(job, config_dict_or_path=config)
            self._engine: Engine = tiermem.initialize(model=model, config=config)[0]
        self._python = StepPython()

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    @property
    def shards(self) -> Shards:
        """Of the engine."""
        return self._engine.shards

    def facts(self) -> dict[str, Any]:
        """What the benchmark shows of the plan; `least` has the bytes of an iteration by what they
        are."""
        shards = self.shards
        overlap = overlap_of(shards.policy, shards.plan, is_accelerator(shards.device))
        assert isinstance(self._engine.optimizer, NativeOptimizer)
        tiles = self._engine.optimizer.tiles_of(shards).tiles
        uses = uses_of(shards.model, shards.plan.division, Compute(0.0, 0.0))
        return {
            "overlap": overlap,
            "num_params": sum(shard.numel for _, shard in shards.parameters()),
            "threads": torch.get_num_threads(),
            "least": least_bytes(shards.plan, uses, tiles, overlap)._asdict(),
            "plan_host_bytes": shards.plan.host_bytes,
            "resident_state_bytes": sum(
                tile.state_bytes for tile in tiles if tile.state_home is Tier.HOST
            ),
            "engine": shards.store.stats().engine,
        }

    def turn(self, count: int) -> Turn:
        """Makes iterations one after the other, and ends what the last one has begun. Blocks;
        raises what training raises."""
        store = self.shards.store
        counts_at_rest(store)
        ours = store_counts(store)
        kernel = kernel_counts()
        by_path = self._by_path()
        steps = [self._iterate() for _ in range(count)]
        self.shards.check_whole()
        moved = counts_at_rest(store).since(ours)
        moved_by_kernel = kernel_counts().since(kernel)
        timed = steps[1:]
        return Turn(
            iteration_s=(steps[-1]["end_ns"] - steps[0]["end_ns"]) * 1e-9 / max(1, len(timed)),
            phases_s={
                f"{name}_s": statistics.median(each[f"{name}_s"] for each in timed or steps)
                for name in PHASES
            },
            limits_s=median_limits(steps),
            python_s=statistics.median(each["python_s"] for each in timed or steps),
            written_in_backward_bytes=round(
                statistics.median(each["written_bytes"] for each in timed or steps)
            ),
            store=moved,
            kernel=moved_by_kernel,
            by_path=[now.since(then) for now, then in zip(self._by_path(), by_path, strict=True)],
            peak_rss_bytes=resident_of().peak_bytes,
            loss=steps[-1]["loss"],
        )

    def _iterate(self) -> dict[str, Any]:
        engine = self._engine
        job = self._job
        batch = self._data.batch(self._num_batches, job.batch, engine.device)
        self._num_batches += 1
        store = self.shards.store
        times = [time.monotonic_ns()]
        meter = Meter(store.recorder, store.stats)
        python_s = self._python.seconds
        loss = engine(**batch).loss
        times.append(time.monotonic_ns())
        before = store.stats().nvme_written_bytes
        engine.backward(loss)
        written = store.stats().nvme_written_bytes - before
        times.append(time.monotonic_ns())
        engine.step()
        times.append(time.monotonic_ns())
        seconds = {
            f"{name}_s": (end - start) * 1e-9
            for name, start, end in zip(PHASES, times, times[1:], strict=False)
        }
        figures = {
            "limits_s": meter.look().limits_s,
            "loss": float(loss.detach()),
            "written_bytes": written,
            **seconds,
        }
        figures["python_s"] = self._python.seconds - python_s
        return {"start_ns": times[0], "end_ns": times[-1], **figures}

    def _by_path(self) -> list[IoCounts]:
        return [
            IoCounts(each.read_bytes, each.written_bytes)
            for each in self.shards.store.stats().paths
        ]


# ---- the program ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _answers_alone() -> Iterator[int]:
    """A descriptor of what was stdout; what others print goes to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        yield answers
    finally:
        os.close(answers)


def main() -> int:
    """Builds the training of the job that the first argument names, and answers until it is told to
    quit."""
    with _answers_alone() as answers:

        def answer(text: str) -> None:
            os.write(answers, text.encode() + b"\n")

        try:
            with Training(Job.load(Path(sys.argv[1]))) as training:
                for line in sys.stdin:
                    match line.split():
                        case ["facts"]:
                            answer(json.dumps(training.facts()))
                        case ["turn", count]:
                            answer(json.dumps(training.turn(int(count))._asdict()))
                        case _:
                            return 0
        except Exception as error:
            answer("error " + " ".join(message_of(error).split()))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
