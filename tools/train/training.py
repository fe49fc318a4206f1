"""Training: the training loop of the capped process, and the counts and sentences that it sends to
the launcher.

    imports -> budget -> disk's ceiling -> build under zero.Init -> initialize -> steps -> close ->
    counts -> events

It sends phases and the figures of each step to the launcher over the channel. It writes no file
until the counts are closed; then it writes its events to the file that the job names, one on each
line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import tiermem
import tiermem.run.init
from tiermem.checkpoint.format.kinds import name_of
from tiermem.engine import Engine
from tiermem.integrations.pretrained import load_pretrained_weights
from tiermem.run.memory_errors import one_of, words_of
from tiermem.run.shards import Shards
from tiermem.swap.disk import durable
from tiermem.swap.disk.queue import Meter
from tiermem.swap.memory.accelerator import (
    find_device,
    free_and_total,
    is_accelerator,
    open_context,
    reset_peak,
    usage,
)
from tiermem.swap.store.store import TensorStore
from tiermem.tools.corpus import Corpus
from tiermem.tools.job.launcher import (
    Channel,
    Job,
    give_back_free_memory,
    large_blocks_mapped,
    resident_of,
)
from tiermem.tools.job.train_job import CLIENT_KEY, Config
from tiermem.tools.measure.files import memory_backed, why_unmeasured
from tiermem.tools.measure.sustained import measure_disks
from tiermem.tools.plan.budget import Budget, plan_budget, state_bytes
from tiermem.tools.plan.planned import meta_model, of_every_rank, transformers
from tiermem.tools.plan.prediction import (
    MeasuredRates,
    build_model,
    measure,
    predict,
    settle_compute,
    timed,
    warn_of_compute,
    warn_of_disk,
)
from tiermem.tools.plan.settle import (
    NO_OTHER_WAY,
    choose_config,
    scenario_of_job,
    settle_by_room,
)
from tiermem.tools.record.run_record import (
    PHASES,
    Figures,
    IoCounts,
    OutOfDeviceMemory,
    kernel_counts,
)
from tiermem.tools.words import Stop

_CEILING_S = 0.4
_ARRIVAL_S = 0.2
_STATS = (
    "nvme_read_bytes",
    "nvme_written_bytes",
    "nvme_bytes",
    "host_bytes",
    "engine",
    "engine_why",
)


class Trainer:
    """One job from imports to counts; every attribute is what a later phase needs of an earlier
    one."""

    def __init__(self, job: Job, channel: Channel, stop: Stop) -> None:
        self._job = job
        self._channel = channel
        self._stop = stop
        self._budget: Budget | None = None
        self._compute: str | None = None  # how the dtype of products was chosen
        self._choice: str | None = None  # how what the budget leaves open was settled
        self._placement: list[str] = []  # what was chosen for an accelerator, with the arithmetic
        self._recomputation: list[str] = []  # whether blocks are recomputed, and why
        # bytes of checkpoints that the kernel counts and the store does not
        self._beside = IoCounts(0, 0)

    def run(self) -> None:
        """Trains and reports. Raises what goes wrong, the store closed; what an accelerator refuses
        as OutOfDeviceMemory."""
        job = self._job
        resident_bytes = load_model_classes(job)
        if job.num_ranks > 1:
            resident_bytes = self._join(resident_bytes)
        asked = self._settle_compute(self._job)
        job, self._budget = settle_by_room(asked, resident_bytes)
        self._job = job
        is_open = asked.is_checkpointing is None
        if job.is_checkpointing and is_open:
            self._recomputation = [NO_OTHER_WAY]
        ceiling = measure_ceiling(job, self._channel)
        self._channel.phase("measuring the maths")
        room_bytes = self._budget.left_bytes if self._budget is not None else None
        measured = of_every_rank(measure(job, room_bytes, ceiling))[0]
        give_back_free_memory()
        forget_peak()
        config, measured = self._choose(measured, resident_bytes, is_open)
        job = self._job
        if not job.nvme_paths:
            ceiling = None
        with self._explaining_out_of_memory(), large_blocks_mapped():
            self._channel.phase("building the model")
            model = build_model(job, config_dict_or_path=config)
            self._channel.phase("initialize")
            engine = tiermem.initialize(model=model, config=config)[0]
        with closed_on_error(engine.close), self._explaining_out_of_memory(engine):
            if job.checkpoint is not None:
                self._channel.phase("loading the checkpoint")
                load_pretrained_weights(model, Path(job.checkpoint))
            if job.resume is not None:
                self._resume(engine, job.resume)
            engine.step_client_state = {CLIENT_KEY: job.to_save}
            give_back_free_memory()
            predicted = predict(
                engine.shards,
                engine.gradient_accumulation_steps(),
                job,
                measured,
                ceiling,
                resident_bytes,
            )
            self._channel.send(
                "ready",
                **ready_fields(engine.shards, job, self._budget, ceiling, predicted),
                batch_size=engine.train_batch_size(),
                choice=self._choice,
                placement=[*self._placement, *self._recomputation],
                compute=self._compute,
            )
            self._warn(warn_of_disk(predicted))
            before = counts_of(engine.shards)
            kernel = kernel_counts()
            self._stop.may_unwind = False
            self._train(engine)
        self._finish(engine, before, kernel)
        if job.num_ranks > 1:
            dist.destroy_process_group()

    def _join(self, resident_bytes: int) -> int:
        """Meets the other ranks, takes rank 0's job, and returns the most bytes that are resident
        in one of them. Collective.

        What a rank measures of itself differs, and would give each another plan: rank 0's figures
        and the largest need count.
        """
        self._channel.phase("waiting for the other ranks")
        tiermem.init_distributed()
        job = of_every_rank(self._job)[0]
        self._job = dataclasses.replace(job, events_file=self._job.events_file)
        for path in job.nvme_paths:  # the run's folder, which rank 0 has made on its own node
            Path(path).mkdir(parents=True, exist_ok=True)
        return max(of_every_rank(resident_bytes))

    @contextlib.contextmanager
    def _explaining_out_of_memory(self, engine: Engine | None = None) -> Iterator[None]:
        """Inside, an accelerator's refusal of memory becomes one sentence, made of what it holds at
        that moment."""
        try:
            yield
        except Exception as error:
            refusal = out_of_memory_in(error)
            if refusal is None:
                raise
            device, rows = find_device(), []
            if engine is not None:
                device, rows = engine.device, engine.shards.plan.rows
            remedy = remedy_of(self._job, is_made=engine is not None)
            phase = self._channel.phase_name
            raise OutOfDeviceMemory(words_of(str(refusal), device, phase, rows, remedy)) from error

    # ---- before training -------------------------------------------------------------------------

    def _settle_compute(self, job: Job) -> Job:
        """The job with the dtype of products in its config; a warning is sent where the one asked
        for is far slower."""
        self._channel.phase("measuring products")
        config, choice = of_every_rank(settle_compute(job.config, job.shape))[0]
        if choice.is_measured:
            self._compute = choice.why
        else:
            self._warn(warn_of_compute(config, job.shape))
        return dataclasses.replace(job, config=config)

    def _warn(self, text: str | None) -> None:
        if text is not None:
            self._channel.send("warning", text=text)

    def _choose(
        self, measured: MeasuredRates | str, resident_bytes: int, is_open: bool
    ) -> tuple[Config, MeasuredRates | str]:
        """The config with what the budgets leave open chosen, recomputation too where that is open,
        and the maths as it is then."""
        job = self._job
        speed = None if isinstance(measured, str) else measured
        scenario = scenario_of_job(job, resident_bytes, speed, is_open)
        try:
            chosen = choose_config(scenario, speed is not None)
        except ValueError as error:
            raise ValueError(
                f"{error}: {remedy_of(job, is_made=True)}, or name tiermem.device_bytes in a config "
                "to try it"
            ) from error
        self._choice = chosen.how
        self._placement = chosen.placement
        if (planned := chosen.planned) is None:
            return chosen.config, measured
        activations = planned.activations
        if is_open:
            more = activations.recomputed_part - float(bool(job.is_checkpointing))
            if speed is not None:
                measured = speed._replace(compute=speed.compute.recomputing(more))
            job = dataclasses.replace(
                job,
                is_checkpointing=activations.is_checkpointing,
                num_kept=activations.num_kept,
            )
            if activations.num_kept:
                self._recomputation = [
                    f"checkpointing: {activations.num_recomputed} of "
                    f"{activations.sizes.num_layers} blocks are recomputed in backward; memory has "
                    "room for what the others keep"
                ]
        if not planned.policy.uses_nvme:
            job = dataclasses.replace(job, nvme_paths=[])
        self._job = job
        if self._budget is not None:  # inputs may rest elsewhere now
            home = planned.policy.activations
            self._budget = plan_budget(self._budget.cap_bytes, resident_bytes, activations, home)
        return chosen.config, measured

    def _resume(self, engine: Engine, place: str) -> None:
        self._channel.phase("opening the saved step")
        started = time.monotonic()
        engine.load_checkpoint(place)
        self._channel.send("resumed", step=engine.global_steps, seconds=time.monotonic() - started)

    # ---- training --------------------------------------------------------------------------------

    def _train(self, engine: Engine) -> None:
        job = self._job
        dataset = Corpus([Path(path) for path in job.data], job.seq, job.seed)
        store = engine.shards.store
        size = engine.train_micro_batch_size_per_gpu()
        accumulation = engine.gradient_accumulation_steps()
        rank = dist.get_rank() if job.num_ranks > 1 else 0
        for step in range(engine.global_steps + 1, job.steps + 1):
            started = time.monotonic_ns()
            meter = Meter(store.recorder, store.stats)
            seconds = dict.fromkeys((*PHASES, "whole"), 0.0)
            timed_phase = functools.partial(self._timed, engine, seconds, step)
            losses: list[torch.Tensor] = []
            first = (step - 1) * accumulation  # each micro-batch is one for every rank
            numbers = [(first + i) * job.num_ranks + rank for i in range(accumulation)]
            micros = (dataset.batch(number, size, engine.device) for number in numbers)
            if job.at_once is not None:
                with timed_phase("whole"):
                    losses.append(engine.train_batch(micros))
                _divide_by_phase(engine, started, seconds)
            for batch in micros:
                with timed_phase("forward"):
                    loss = engine(**batch).loss
                with timed_phase("backward"):
                    engine.backward(loss)
                losses.append(loss.detach())
                del loss
                with timed_phase("step"):
                    engine.step()
            mean = float(torch.stack(losses).float().mean())
            # ranks stop together
            told = of_every_rank((mean, self._stop.is_asked))
            mean = sum(each[0] for each in told) / len(told)
            is_stopped = any(each[1] for each in told)
            self._channel.send(
                "step",
                step=step,
                loss=mean,
                **step_fields(engine.shards, meter, started),
                **{f"{phase}_s": seconds[phase] for phase in PHASES},
                tokens=size * accumulation * job.num_ranks * job.seq,
                grad_norm=float(engine.get_global_grad_norm()),
                lr=engine.get_lr()[0],
                skipped_steps=engine.skipped_steps,
            )
            is_last = step == job.steps or is_stopped
            if job.save_dir is not None and (
                is_last or (job.save_every and step % job.save_every == 0)
            ):
                self._save(engine, job.save_dir, step)
            if is_last:
                break

    def _save(self, engine: Engine, folder: str, step: int) -> None:
        """A checkpoint; what the kernel counts of it beside the store's own is not the
        training's."""
        self._channel.phase(f"saving step {step}")
        started = time.monotonic()
        ours = counts_at_rest(engine.shards.store)
        kernel = kernel_counts()
        engine.save_checkpoint(folder, client_state={CLIENT_KEY: self._job.to_save})
        engine.wait_checkpoint()
        moved = counts_at_rest(engine.shards.store).since(ours)
        by_kernel = kernel_counts().since(kernel)
        self._beside = IoCounts.total((self._beside, by_kernel.since(moved)))
        self._channel.send("saved", step=step, seconds=time.monotonic() - started, folder=folder)

    @contextlib.contextmanager
    def _timed(
        self, engine: Engine, seconds: dict[str, float], step: int, name: str
    ) -> Iterator[None]:
        self._channel.phase(f"{name} of step {step}", **held_fields(engine.shards))
        with timed(engine.device, seconds, name):
            yield

    # ---- after training --------------------------------------------------------------------------

    def _finish(self, engine: Engine, before: Counts, kernel: IoCounts) -> None:
        """Lets what is under way arrive, takes both counts, closes; only then writes a file."""
        self._channel.phase("close")
        is_copy = not self._job.nvme_paths or engine.shards.policy.durability == "none"
        place = str(self._job.save_dir) if is_copy else self._job.nvme_paths[0]
        copied = {os.path.abspath(place): max(0, self._beside.written_bytes)}
        done = done_fields(engine.shards, before, copied)
        moved_by_kernel = kernel_counts().since(kernel).since(self._beside)._asdict()
        if any(memory_backed(Path(path)) for path in self._job.nvme_paths):
            moved_by_kernel = {}  # the kernel counts no bytes of a folder in memory
        engine.close()
        self._channel.send(
            "done",
            **done,
            **{f"kernel_{key}": each for key, each in moved_by_kernel.items()},
            copied_bytes=self._beside.written_bytes,
            is_every_step_durable=engine.shards.policy.durability == "step",
            is_interrupted=self._stop.is_asked,
        )
        save_events(engine.shards, self._job.events_file)


def load_model_classes(job: Job) -> int:
    """Imports the model's own modules, makes the accelerator's context and sets the threads.

    Returns the bytes that are resident then: the part of the interpreter, the libraries and the
    driver.
    """
    transformers().logging.set_verbosity_error()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    meta_model(job.shape, job.precision)
    open_context(find_device())
    return resident_of().now_bytes


@contextlib.contextmanager
def closed_on_error(close: Callable[[], object]) -> Iterator[None]:
    """A block after whose error a model is closed. The error is the one that is told."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            close()
        raise


def _divide_by_phase(engine: Engine, started_ns: int, seconds: dict[str, float]) -> None:
    """Divides the seconds of a `train_batch` into phases: forward and backward as recorded, the
    rest is the step."""
    for event in engine.shards.store.recorder.events:
        if event.lane in PHASES[:2] and event.start_ns >= started_ns:
            seconds[event.lane] += (event.end_ns - event.start_ns) * 1e-9
    seconds["step"] = max(0.0, seconds.pop("whole") - seconds["forward"] - seconds["backward"])


def measure_ceiling(job: Job, channel: Channel) -> Figures | None:
    """The rates of the disks that a job's states rest on, as rank 0 measures them, in their own
    short-lived memory: far below what training takes. None: no disk, or one that cannot be
    measured. Collective; blocks."""
    found = None
    folders = [Path(path) for path in job.nvme_paths]
    if folders and (not dist.is_initialized() or dist.get_rank() == 0):
        channel.phase("measuring the disk")
        if (why := why_unmeasured(folders)) is not None:
            channel.send(
                "warning", text=f"the disk is not measured, so nothing is predicted: {why}"
            )
        else:
            found = measure_disks(folders, job.sustained, _CEILING_S)._asdict()
    return of_every_rank(found)[0]


# ---- what a trainer sends ------------------------------------------------------------------------


def ready_fields(
    shards: Shards,
    job: Job,
    budget: Budget | None,
    ceiling: Figures | None,
    predicted: Figures,
) -> Figures:
    """What is known before the first step."""
    params = [*shards.model.parameters()]
    precision = name_of(params[0].dtype)
    trained = sum(each.numel() for each in params if each.requires_grad)
    return {
        "num_params": sum(each.numel() for each in params),
        "state_bytes": state_bytes(trained, precision, shards.policy.precision),
        "threads": torch.get_num_threads(),
        "device": str(shards.device),
        "plan": [(row.what, row.tier.name, row.num_bytes, row.why) for row in shards.plan.rows],
        "budget": [[row.what, row.num_bytes, row.why] for row in budget.rows()] if budget else [],
        "ceiling": ceiling,
        "predicted": predicted,
        "is_checkpointing": bool(job.is_checkpointing),
        "num_kept": job.num_kept,
        "versions": {
            "tiermem": tiermem.__version__,
            "torch": torch.__version__,
            "transformers": transformers().__version__,
            "python": platform.python_version(),
        },
        **store_counts(shards.store)._asdict(),
        **device_fields(shards.device),
    }


def held_fields(shards: Shards) -> Figures:
    """What is held now on every tier, for the message of a phase."""
    stats = shards.store.stats()
    return {
        "host_bytes": stats.host_bytes,
        "nvme_bytes": stats.nvme_bytes,
        **device_fields(shards.device),
    }


def step_fields(shards: Shards, meter: Meter, started_ns: int) -> Figures:
    """When a step began and ends, and what the store has done since a meter began or looked, for
    the message of the step."""
    seen = meter.look()
    stats = shards.store.stats()
    return {
        **seen.as_logged(),
        "limits_s": seen.limits_s,
        "waits": dict(itertools.islice(seen.waits_s.items(), 5)),
        "start_ns": started_ns,
        "end_ns": time.monotonic_ns(),
        **{key: getattr(stats, key) for key in _STATS},
        **device_fields(shards.device),
    }


def done_fields(shards: Shards, before: Counts, copied: Mapping[str, int]) -> Figures:
    """What a training took since `before`, once what is under way has arrived. Collective; blocks.

    copied: bytes that this rank wrote beside the store, by path.
    """
    shards.check_whole()  # the last step may be under way
    moved = counts_at_rest(shards.store).since(before.moved)
    since_made = written_by_path(shards.store)
    for path, num_bytes in copied.items():
        if num_bytes:
            since_made[path] += num_bytes
    here = since_made.copy()
    here.subtract(before.written)
    told = of_every_rank((here, since_made))
    return {
        **{f"nvme_{key}": each for key, each in moved._asdict().items()},
        "paths": [
            [path, *(sum(each[which][path] for each in told) for which in (0, 1))]
            for path in since_made
            if not memory_backed(Path(path))  # no drive wears
        ],
        "host_peak_bytes": shards.store.stats().host_peak_bytes,
        "steps_early": shards.steps.num_early,
        "steps_redone": shards.steps.num_redone,
        "redone_bytes": shards.program.dropped_bytes,
        "peak_rss_bytes": resident_of().peak_bytes,
        **device_fields(shards.device),
    }


def save_events(shards: Shards, file: str | None) -> None:
    """Writes what the recorder of a closed model holds, an event on each line; None: nowhere."""
    if file is not None:
        with open(durable.create_anew(Path(file)), "w", encoding="utf-8") as lines:
            lines.writelines(f"{json.dumps(event)}\n" for event in shards.store.recorder.events)


# ---- counts of bytes, and the accelerator's memory -----------------------------------------------


class Counts(NamedTuple):
    """What a store had moved when a training began."""

    moved: IoCounts
    written: Counter[str]  # by path


def counts_of(shards: Shards) -> Counts:
    """The counts now."""
    return Counts(store_counts(shards.store), written_by_path(shards.store))


def store_counts(store: TensorStore) -> IoCounts:
    """Bytes that the store has moved so far."""
    stats = store.stats()
    return IoCounts(stats.nvme_read_bytes, stats.nvme_written_bytes)


def written_by_path(store: TensorStore) -> Counter[str]:
    """Bytes written to each path since the store was made."""
    return Counter({str(each.path): each.written_bytes for each in store.stats().paths})


def counts_at_rest(store: TensorStore) -> IoCounts:
    """Counts with nothing under way: writes are waited for, reads ahead of a step that never comes
    arrive by themselves."""
    store.flush()
    before = IoCounts(-1, -1)
    while (counts := store_counts(store)) != before:
        time.sleep(_ARRIVAL_S)
        before = counts
    return counts


def device_fields(device: torch.device) -> dict[str, Figures]:
    """`device_memory` and its figures, for a message; empty on the CPU."""
    if not is_accelerator(device):
        return {}
    free, total = free_and_total(device)
    return {
        "device_memory": {
            **usage(device)._asdict(),
            "free_bytes": free,
            "total_bytes": total,
            "device": str(device),
        }
    }


def forget_peak() -> None:
    """Gives back what a measurement has cached on the accelerator, so that peaks are those of what
    comes now."""
    device = find_device()
    if is_accelerator(device):
        gc.collect()
        reset_peak(device)


def out_of_memory_in(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The device's refusal that an error is, or was raised because of; None for any other error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def remedy_of(job: Job, is_made: bool) -> str:
    """What would take less: of activations too, once the model is made."""
    smaller = [f"a --batch below {job.batch}"] if is_made and job.batch > 1 else []
    smaller += [f"a --seq below {job.seq}"] if is_made else ["a smaller model"]
    smaller += ["--checkpointing"] if is_made and not job.is_checkpointing else []
    zero = job.config.get("zero_optimization") or {}
    offloads = [zero.get(f"offload_{what}") or {} for what in ("param", "optimizer")]
    if not all(section.get("device") in ("cpu", "nvme") for section in offloads):
        smaller += ["--offload cpu"]
    return one_of(smaller)
