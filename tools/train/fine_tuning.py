"""Fine-tuning: TRL's own script of supervised fine-tuning over a sharded model, in the capped
process.

    arguments -> TRL's parser -> TRL's script, with our trainer in the place of its SFTTrainer
    model's config -> plan, on the meta device -> weights streamed to their homes -> adapters, data
    -> sharded -> summary -> steps, each reported over the channel -> counts -> events

The script reads data, applies chat templates, packs, adds LoRA, evaluates, saves and resumes. The
process is its own, so the script's name for the trainer is set for all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, set_seed

from tiermem.integrations.huggingface import TiermemTrainer
from tiermem.swap.disk.queue import Meter
from tiermem.swap.memory.accelerator import find_device, is_accelerator
from tiermem.tools.job.launcher import Channel, Job, resident_of
from tiermem.tools.measure.phases import PHASES
from tiermem.tools.plan.planned import of_every_rank
from tiermem.tools.plan.prediction import measure, predict, without_frozen
from tiermem.tools.plan.pretrained import plan_pretrained
from tiermem.tools.record.reports import summary_lines
from tiermem.tools.train import training
from tiermem.tools.words import Stop

trl: Any = importlib.import_module("trl")  # of the extra [sft]

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""What `datasets` reads a file of records with."""
_SAMPLE = 1000  # rows whose lengths are looked at


class FineTuning:
    """One job of `tiermem sft`, from TRL's arguments to counts."""

    def __init__(self, job: Job, channel: Channel, stop: Stop) -> None:
        self.job = job
        self.channel = channel
        self.stop = stop
        self.asked: dict[str, Any] = job.sft or {}
        self.resident_bytes = 0
        self.trainer: Any = None

    def run(self) -> None:
        """Runs TRL's script. Raises what goes wrong, the store closed."""
        script: Any = importlib.import_module("trl.scripts.sft")
        parsed = self._parsed(script.make_parser(prog="tiermem sft"))
        setattr(trl, "SFTTrainer", functools.partial(SftTrainer, run=self))  # noqa: B010
        try:
            self.channel.phase("reading the data")
            script.main(*parsed)
            self.trainer.finish()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self.trainer.close()
            raise

    def _parsed(self, parser: Any) -> Any:
        """TRL's dataclasses. Raises ValueError for arguments that it does not know."""

        def refuse(said: str) -> None:
            raise ValueError(f"{said}; `trl sft --help` lists TRL's arguments")

        parser.error = refuse
        words = self.asked["arguments"]
        if not is_accelerator(find_device()):
            words = ["--use_cpu", "true", *words]  # of a word that is given twice the last counts
        script, args, model, mixture, *unknown = parser.parse_args_and_config(words, True)
        if unknown and unknown[0]:
            refuse(f"there is no argument {unknown[0][0]}")
        file = Path(script.dataset_name or "")
        if file.suffix in _READERS and file.is_file():
            config = importlib.import_module("trl.scripts.utils").DatasetConfig
            mixture.datasets = [config(path=_READERS[file.suffix], data_files=str(file))]
            script.dataset_name = None
        if str(args.resume_from_checkpoint).lower() == "true":
            args.resume_from_checkpoint = True  # the newest in output_dir
        set_seed(args.seed)  # else the script divides the data otherwise on each rank and resume
        return script, args, model, mixture


class SftTrainer(TiermemTrainer.mixin, trl.SFTTrainer, TrainerCallback):  # type: ignore[misc, valid-type]
    """TRL's SFTTrainer over a sharded model, which tells a FineTuning what it does."""

    def __init__(self, model: str, *, args: Any, run: FineTuning, **given: Any) -> None:
        run.channel.phase("planning")
        run.resident_bytes = max(of_every_rank(resident_of().now_bytes))
        planned = plan_pretrained(
            run.job, model, args, given.get("peft_config"), run.resident_bytes
        )
        run.job = planned.job
        self._budget = planned.budget
        run.channel.phase("reading the weights")
        args.model_init_kwargs = None
        opened = planned.open(model)
        run.channel.phase("preparing the data")
        super().__init__(opened, args=args, tiermem=planned.asked, **given)
        self._run = run
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._losses: list[torch.Tensor] = []
        self._counts: Any = None
        run.trainer = self
        self.add_callback(self)

    def train(self, *given: Any, **more: Any) -> Any:
        """Measures a few of the model's blocks and the disks, then trains. Collective; blocks."""
        run = self._run
        data = self.train_dataset
        size = len(data) if hasattr(data, "__len__") else None
        rows = (
            data.take(_SAMPLE) if size is None else data.select(range(0, size, 1 + size // _SAMPLE))
        )
        self._mean = statistics.fmean(len(row.get("input_ids", ())) for row in rows)
        run.job = dataclasses.replace(run.job, seq=max(1, round(self._mean)))
        self._disk = training.measure_ceiling(run.job, run.channel)
        run.channel.phase("measuring the maths")
        cap_bytes = run.job.memory_limit_bytes
        room_bytes = None if cap_bytes is None else cap_bytes - resident_of().now_bytes
        with torch.random.fork_rng():  # the order of data and dropout stay as they are
            measured = of_every_rank(measure(run.job, room_bytes, self._disk))[0]
        self._measured = without_frozen(measured, self.model)
        return super().train(*given, **more)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Says what is to come. Collective; blocks."""
        run = self._run
        num_micro = args.gradient_accumulation_steps
        told = self.shards, num_micro, run.job, self._measured, self._disk, run.resident_bytes
        ready = {
            **training.ready_fields(self.shards, run.job, self._budget, self._disk, predict(*told)),
            "num_steps": state.max_steps,
            "num_ranks": args.world_size,
            "paths": run.job.nvme_paths,
        }
        sizes = args.train_batch_size * num_micro * args.world_size, self._mean
        to_come = state.max_steps - state.global_step
        ready["placement"] = summary_lines(ready, to_come, *sizes, run.asked["tbw_bytes"])
        run.channel.send("ready", **ready)
        self._counts = training.counts_of(self.shards)
        run.stop.may_unwind = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the clocks of a step."""
        store = self.shards.store
        step = f"step {state.global_step + 1}"
        self._run.channel.phase(step, **training.held_fields(self.shards))
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._losses = []
        self._began = (
            time.monotonic_ns(),
            Meter(store.recorder, store.stats),
            self._total_train_tokens,
        )

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        """As TRL's, timed. Collective; blocks."""
        started = time.monotonic()
        loss = super().compute_loss(*given, **more)
        self._seconds["forward"] += time.monotonic() - started
        return loss

    def training_step(self, *given: Any, **more: Any) -> torch.Tensor:
        """As TRL's, timed. Collective; blocks."""
        started = time.monotonic() - self._seconds["forward"]
        loss: torch.Tensor = super().training_step(*given, **more)
        self._losses.append(loss)
        self._ended = time.monotonic()
        self._seconds["backward"] += self._ended - started - self._seconds["forward"]
        return loss

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reports a step; ends the training where a rank was asked to stop. Collective; blocks."""
        started_ns, meter, num_tokens = self._began
        loss = float(torch.stack(self._losses).float().sum())
        self._seconds["step"] = time.monotonic() - self._ended
        told = of_every_rank((loss, self._run.stop.is_asked))
        self._run.channel.send(
            "step",
            step=state.global_step,
            loss=statistics.fmean(each for each, _ in told),
            tokens=int(self._total_train_tokens - num_tokens),
            start_ns=started_ns,
            end_ns=time.monotonic_ns(),
            **{f"{phase}_s": seconds for phase, seconds in self._seconds.items()},
            **training.step_fields(self.shards, meter),
        )
        if any(is_asked for _, is_asked in told):
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = (), **_: Any) -> None:
        """Says what was evaluated."""
        said = f"step {state.global_step}: evaluated, loss {dict(metrics).get('eval_loss', 0):.4f}"
        self._run.channel.send("warning", text=said)

    def end(self) -> None:
        """Counts and closes while there are ranks to ask. Collective; blocks."""
        self.finish()
        super().end()

    def finish(self) -> None:
        """Takes the counts and closes. A second call does nothing. Collective; blocks."""
        shards = self.shards
        if shards is not None and self._counts is not None:
            self._run.channel.phase("close")
            done = training.done_fields(shards, self._counts, {})
            self.close()
            is_stopped = self._run.stop.is_asked
            self._run.channel.send("done", **done, is_interrupted=is_stopped)
            training.save_events(shards, self._run.job.events_file)
