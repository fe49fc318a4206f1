"""Fine-tuning: TRL's own script of supervised fine-tuning over a sharded model, in the capped
process.

    arguments -> TRL's parser -> TRL's script, with our trainer in the place of its SFTTrainer
    model's config -> plan, on the meta device -> weights streamed to their homes -> adapters, data
    -> sharded -> summary -> steps, each reported over the channel -> counts -> events

The script reads data, applies chat templates, packs, adds LoRA, evaluates, saves and resumes. The
process is its own, so the script's name for the trainer is set for all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, set_seed

import tiermem
from tiermem.integrations.huggingface import TiermemTrainer
from tiermem.swap.disk.queue import Meter
from tiermem.swap.memory.accelerator import find_device, is_accelerator
from tiermem.tools.job.launcher import Channel, Job, give_back_free_memory, resident_of
from tiermem.tools.plan.planned import of_every_rank
from tiermem.tools.plan.prediction import measure, predict, timed, without_frozen
from tiermem.tools.plan.pretrained import plan_pretrained
from tiermem.tools.record.reports import summary_lines
from tiermem.tools.train import training
from tiermem.tools.words import Stop

trl: Any = importlib.import_module("trl")  # of the extra [sft]


def fine_tune(job: Job, channel: Channel, stop: Stop) -> None:
    """Runs TRL's script on one job of `tiermem sft`. Raises what goes wrong; ValueError for
    arguments that TRL does not know."""

    def refuse(said: str) -> None:
        raise ValueError(f"{said}; `trl sft --help` lists TRL's arguments")

    sft = importlib.import_module("trl.scripts.sft")
    parser = sft.make_parser(prog="tiermem sft")
    parser.error = refuse
    parser.set_defaults(use_cpu=not is_accelerator(find_device()))
    script, args, model, mixture = parser.parse_args_and_config(job.sft["arguments"])
    file = Path(script.dataset_name or "")
    if file.is_file():
        if not file.stat().st_size:
            raise ValueError(f"{file} is empty: a line is an example, such as a chat")
        rows = {"path": str(file.absolute().parent), "data_files": file.name}
        mixture = dataclasses.replace(mixture, datasets=[rows])
        script.dataset_name = None
    folder = Path(model.model_name_or_path)
    if folder.is_dir() and not [*folder.glob("tokenizer*"), *folder.glob("*vocab*")]:
        raise ValueError(f"{folder} has no tokenizer: copy tokenizer.json and its config there")
    set_seed(args.seed)  # else the script divides the data otherwise on each rank and resume
    trl.SFTTrainer = functools.partial(SftTrainer, job=job, channel=channel, stop=stop)
    channel.phase("reading the data")
    sft.main(script, args, model, mixture)


class SftTrainer(TiermemTrainer.mixin, trl.SFTTrainer, TrainerCallback):  # type: ignore[misc, valid-type]
    """TRL's SFTTrainer over a sharded model, which tells a launcher what it does."""

    def __init__(
        self, model: str, *, args: Any, job: Job, channel: Channel, stop: Stop, **given: Any
    ) -> None:
        columns = given["train_dataset"].column_names or ()
        taken = {"messages", "conversations", "prompt", "input_ids", args.dataset_text_field}
        is_half = "prompt" in columns and "completion" not in columns
        if columns and (is_half or taken.isdisjoint(columns)):
            raise ValueError(
                f"the data's lines have {', '.join(map(repr, columns))}: give 'messages', 'text', "
                "or 'prompt' and 'completion'"
            )
        channel.phase("planning")
        self._resident_bytes = max(of_every_rank(resident_of().now_bytes))
        planned = plan_pretrained(job, model, args, given.get("peft_config"), self._resident_bytes)
        self._planned = planned
        self._seconds = {"forward": 0.0, "batches": 0.0}
        self._channel = channel
        self._stop = stop
        channel.phase("reading the weights")
        args.model_init_kwargs = None
        opened = tiermem.from_pretrained(model, planned.policy, **planned.settings)
        channel.phase("preparing the data")
        super().__init__(opened, args=args, tiermem=planned.asked, **given)
        self.add_callback(self)

    def train(self, *given: Any, **more: Any) -> Any:
        """Measures a few of the model's blocks and the disks, then trains. Collective; blocks."""
        rows = self.train_dataset.shuffle(self.args.seed).take(1000)  # tell the mean length
        lengths = [len(row.get("input_ids", ())) for row in rows]
        with training.closed_on_error(self.close):
            if not lengths:
                raise ValueError(
                    "no line of the data is left to train on: 'messages' are objects with a "
                    "'role' and a 'content', 'text' is not null"
                )
            mean = statistics.fmean(lengths)
            job = dataclasses.replace(self._planned.job, seq=max(1, round(mean)))
            self._planned = self._planned._replace(job=job)
            self._disk = training.measure_ceiling(job, self._channel)
            self._channel.phase("measuring the maths")
            room_bytes = job.memory_limit_bytes and job.memory_limit_bytes - resident_of().now_bytes
            with torch.random.fork_rng():  # the order of data and dropout stay as they are
                measured = of_every_rank(measure(job, room_bytes, self._disk))[0]
            self._measured = without_frozen(measured, self.model)
            return super().train(*given, **more)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Says what is to come. Collective; blocks."""
        job = self._planned.job
        num_micro = args.gradient_accumulation_steps
        give_back_free_memory()
        resident = resident_of()
        rest_bytes = resident.now_bytes - self.shards.store.stats().host_bytes
        most = of_every_rank((max(rest_bytes, self._resident_bytes), resident.peak_bytes))
        rest_bytes, before_bytes = map(max, zip(*most, strict=True))
        predicted = predict(self.shards, num_micro, job, self._measured, self._disk, rest_bytes)
        if predicted["peak_bytes"] is not None:  # reading weights and data may have taken more
            predicted["peak_bytes"] = max(predicted["peak_bytes"], before_bytes)
        ready = training.ready_fields(self.shards, job, self._planned.budget, self._disk, predicted)
        ready |= {"num_steps": state.max_steps, "num_ranks": job.num_ranks, "paths": job.nvme_paths}
        ready["placement"] = summary_lines(
            ready,
            num_steps=state.max_steps - state.global_step,
            num_rows=args.train_batch_size * num_micro * job.num_ranks,
            num_tokens=job.seq,
            tbw_bytes=job.sft["tbw_bytes"],
        )
        self._channel.send("ready", **ready)
        self._counts = training.counts_of(self.shards)
        self._stop.may_unwind = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the clocks of a step."""
        self._channel.phase(f"step {state.global_step + 1}", **training.held_fields(self.shards))
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._losses_of_step: list[torch.Tensor] = []
        self._num_tokens = self._total_train_tokens
        self._at_begin = Meter(self.shards.store.recorder, self.shards.store.stats)
        self._began_ns = time.monotonic_ns()

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        """As TRL's, timed. Collective; blocks."""
        with timed(self.args.device, self._seconds, "forward"):
            return super().compute_loss(*given, **more)

    def training_step(self, *given: Any, **more: Any) -> torch.Tensor:
        """As TRL's, timed. Collective; blocks."""
        with timed(self.args.device, self._seconds, "batches"):
            self._losses_of_step.append(super().training_step(*given, **more))
        return self._losses_of_step[-1]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reports a step; ends the training where a rank was asked to stop. Collective; blocks."""
        loss = float(torch.stack(self._losses_of_step).float().sum())
        told = of_every_rank((loss, self._stop.is_asked))
        self._channel.send(
            "step",
            step=state.global_step,
            loss=statistics.fmean(each for each, _ in told),
            tokens=int(self._total_train_tokens - self._num_tokens),
            forward_s=self._seconds["forward"],
            backward_s=self._seconds["batches"] - self._seconds["forward"],
            step_s=(time.monotonic_ns() - self._began_ns) * 1e-9 - self._seconds["batches"],
            **training.step_fields(self.shards, self._at_begin, self._began_ns),
        )
        if any(is_asked for _, is_asked in told):
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Says what was evaluated."""
        loss = more["metrics"].get("eval_loss", 0)
        self._channel.send("warning", text=f"step {state.global_step}: evaluated, loss {loss:.4f}")

    def end(self) -> None:
        """Counts and closes while there are ranks to ask. Collective; blocks."""
        shards = self.shards
        if self._stop.is_asked and self.args.save_strategy != "no":
            self._channel.send(
                "warning",
                text=f"step {self.state.global_step} is saved in {self.args.output_dir}: "
                "--resume_from_checkpoint true goes on from there",
            )
        self._channel.phase("close")
        done = training.done_fields(shards, self._counts, {})
        self.close()
        self._channel.send("done", **done, is_interrupted=self._stop.is_asked)
        training.save_events(shards, self._planned.job.events_file)
        super().end()
