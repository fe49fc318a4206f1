"""Notebook: a process that is stopped by Ctrl-C at random moments and goes on with the next cell,
many times; and commands.

A timer in another thread sends SIGINT after a seeded time. The loop catches KeyboardInterrupt as a
notebook does, keeps the traceback as `sys.last_traceback` does, and calls zero_grad and the next
step. A state is known by the digest of its weights. After each interrupt the model is in the state
before or after the interrupted step of an undisturbed run, or an error says that it is torn; then a
checkpoint is opened.

    steps      a cell makes steps of a model, or of an engine
    trainer    a cell calls `train` of a TiermemTrainer
    command    the trainer of `tiermem train` is stopped, each time a new one. It ends with status 0, has said the losses of an
               undisturbed run as far as it came, leaves nothing, and goes on from the step that it
               saved last

    python notebook.py FOLDER --totals totals.json --seed 1 --kinds steps --settings 1 --count 200
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import torch
from forks import forked
from interrupts import (
    LONGEST_S,
    SETTINGS,
    Run,
    arguments,
    end_step,
    go_on,
    open_files,
    says_torn,
    threads_left,
)
from small_run import Small

NUM_STEPS = 3
"""Steps from an opened checkpoint to the comparison; so the losses stay apart."""


class Stop:
    """Sends SIGINT to this process after a time, unless the block has ended before."""

    def __init__(self, after_s: float) -> None:
        self._timer = threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGINT))

    def __enter__(self) -> Stop:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        time.sleep(0)  # a signal that was sent arrives here at the latest


class TrainerRun(Run):
    """A TiermemTrainer, as a notebook has it."""

    def build(self) -> None:
        """Builds the model and its trainer, and makes the optimizer by one step."""
        from transformers import TrainingArguments

        from tiermem.integrations.huggingface import TiermemTrainer

        class OfTokens(TiermemTrainer):
            """Small has its own loss."""

            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
                return model(inputs["tokens"])

        torch.manual_seed(7)
        self.model = Small().to(getattr(torch, self.setting.dtype))
        args = TrainingArguments(
            output_dir=str(self._place / "out"), per_device_train_batch_size=2, learning_rate=0.01, use_cpu=True,
            max_grad_norm=self.setting.clipping, lr_scheduler_type="constant", remove_unused_columns=False,
            logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        data = [{"tokens": self._tokens[0]}] * 8  # equal, so that their order changes no bit
        self.trainer = OfTokens(self.model, args, train_dataset=data, tiermem=self.policy())
        self.train()
        self.shards, self.optim = self.trainer.shards, self.trainer.optimizer.optimizer

    def train(self, num_steps: int = 1) -> float:
        """A call of `train`; returns its mean loss."""
        self.trainer.args.max_steps = num_steps
        return float(self.trainer.train().training_loss)

    def train_all(self) -> None:
        """The steps of a cell in one call."""
        self.train(NUM_STEPS)

    def close(self) -> None:
        """Ends the sharding."""
        self.trainer.close()


class StepsRun(Run):
    """A model or an engine, as a notebook has it."""

    def train_all(self) -> None:
        """The steps of a cell."""
        for _ in range(NUM_STEPS):
            go_on(self)


AnyRun = StepsRun | TrainerRun


def trained(run: Run) -> list[tuple[str, str]]:
    """The loss of each of the next steps, and the digest after it."""
    return [(run.train().hex(), run.digest()) for _ in range(NUM_STEPS)]


def built_anew(run: AnyRun, place: Path) -> AnyRun:
    """What follows a torn model: an engine opens a checkpoint; without one it is closed and another
    model built."""
    if run.engine is not None:
        return run
    run.close()
    anew = type(run)(place, run.setting)
    anew.build()
    anew.train()
    anew.weights, anew.kept = run.weights, run.kept
    return anew


def cell(run: AnyRun, after_s: float) -> str:
    """Steps that Ctrl-C ends at some moment; returns what came of it."""
    try:
        with Stop(after_s):
            run.train_all()
    except KeyboardInterrupt as error:
        sys.last_value = error
        return "interrupted"
    return "ended"


def loop(kind: type[AnyRun], place: Path, setting: int, seed: int, count: int) -> dict[str, int]:
    """Goes through the cells. Raises AssertionError for wrong bits and for an exception that says
    nothing."""
    chosen, found = random.Random(f"{seed} {setting}"), Counter[str]()
    run = kind(place, SETTINGS[setting])
    run.build()
    for _ in range(2):
        run.train()
    run.keep()
    first = run.digest()
    due = trained(run)
    states = {first: 0} | {digest: number for number, (_, digest) in enumerate(due, 1)}
    run.load()
    started = time.monotonic()
    run.train_all()
    longest_s = time.monotonic() - started
    run.load()
    for number in range(count):
        found[outcome := cell(run, chosen.uniform(0.0, longest_s))] += 1
        try:
            run.optim.zero_grad()
            if run.setting.in_backward:
                with contextlib.suppress(RuntimeError):
                    end_step(run)
            at = states.get(run.digest())
            assert at is not None, f"cell {number}, {outcome}: the weights are of no step"
            for loss, digest in due[at:]:
                made = go_on(run).hex(), run.digest()
                assert made == (loss, digest), (
                    f"cell {number}, {outcome}: wrong bits after step {at}"
                )
            found["right"] += 1
        except RuntimeError as error:
            if not says_torn(error):
                raise
            found["told"] += 1
            run = built_anew(run, place)
        run.load()
        assert run.digest() == first, f"cell {number}: a load brings other weights"
    run.footprint()
    run.close()
    del run
    sys.last_value = None  # type: ignore[assignment]
    gc.collect()
    left = [*open_files(), *threads_left()]
    assert not left, f"left: {left}"
    return dict(found)


# ---- the command ---------------------------------------------------------------------------------

_SHAPE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
_NUM_STEPS = 6


def job_of(place: Path, *words: str) -> Path:
    """The job that `tiermem train` gives its trainer; it trains, too."""
    from tiermem.tools import cli

    def train() -> None:
        os.chdir(place)
        (place / "shape.json").write_text(json.dumps(_SHAPE))
        cli.main(
            [
                "train",
                *words,
                "--steps",
                str(_NUM_STEPS),
                "--batch",
                "1",
                "--save",
                str(place / "saved"),
            ]
        )

    ended = os.waitstatus_to_exitcode(os.waitpid(forked(train, place / "printed"), 0)[1])
    assert ended == 0, (place / "printed").read_text()[-3000:]
    return next(place.glob("runs/*/job.json"))


def trainer(
    place: Path, job: Path, after_s: float | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """A trainer of a job, stopped after a time; its exit status and what it has said."""
    from tiermem.tools.train import trainer

    def be() -> int:
        os.chdir(place)
        with (place / "channel").open("wb") as channel:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = trainer.main([str(job), "--channel", str(channel.fileno())])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it has said how it ended
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # as an interpreter does that ends
        return status

    # a signal before the trainer begins is lost
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    pid = forked(be, place / "printed")
    signal.signal(signal.SIGINT, before)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(pid, signal.SIGINT)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return ended, [json.loads(line) for line in (place / "channel").read_text().splitlines()]


def losses_of(said: list[dict[str, Any]]) -> list[float]:
    return [each["loss"] for each in said if each["kind"] == "step"]


def stop_commands(place: Path, seed: int, count: int) -> dict[str, int]:
    """Stops trainers. Raises AssertionError for wrong losses, for what is left behind, and for a
    run that does not go on."""
    import tiermem.tools.train.training  # noqa: F401  (here once, not in every trainer)

    chosen, found, saved = random.Random(f"{seed} command"), Counter[str](), place / "saved"
    words = (
        "--model",
        "shape.json",
        "--seq",
        "16",
        "--save-every",
        "2",
        "--offload",
        "nvme",
        "--durability",
        "step",
    )
    begins, goes_on = job_of(place, *words), place / "goes_on.json"
    again = {
        **json.loads(begins.read_text()),
        "resume": str(saved),
        "steps": _NUM_STEPS + 1,
        "events_file": None,
    }
    goes_on.write_text(json.dumps(again))
    shutil.rmtree(saved)
    started = time.monotonic()
    status, said = trainer(place, begins)
    longest_s, due = time.monotonic() - started, losses_of(said)
    assert status == 0 and len(due) == _NUM_STEPS, (
        said[-1:],
        (place / "printed").read_text()[-3000:],
    )
    for number in range(count):
        for old in [saved, *place.glob("runs/*/tiermem-*")]:
            shutil.rmtree(old, ignore_errors=True)
        after_s = chosen.uniform(0.0, longest_s)
        status, said = trainer(place, begins, after_s)
        shown = (
            f"trainer {number}, stopped after {after_s:.3f} s: "
            f"{said[-2:]}\n{(place / 'printed').read_text()[-4000:]}"
        )
        losses, last = losses_of(said), said[-1]
        assert status == 0 and last["kind"] in ("interrupted", "done"), shown
        assert losses == due[: len(losses)], f"wrong losses {losses}\n{shown}"
        assert losses or not list(place.glob("runs/*/tiermem-*")), f"left files\n{shown}"
        found[
            "interrupted" if last["kind"] == "interrupted" else f"ended after step {len(losses)}"
        ] += 1
        if losses:
            status, said = trainer(place, goes_on)
            went_on = losses_of(said)
            assert status == 0 and due[len(losses) :] == went_on[: _NUM_STEPS - len(losses)], (
                f"{went_on}, due {due}\n{shown}"
            )
    return dict(found)


KINDS = {"steps": StepsRun, "trainer": TrainerRun}


def main() -> int:
    """Goes through the cells of the settings that it is asked for, and writes what came of them."""
    parser = arguments(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "command"], default=["steps"])
    parser.add_argument("--count", type=int, default=200, help="interrupts of a setting")
    args = parser.parse_args()
    told: dict[str, Any] = {}
    status = 0
    settings = [each for each in args.settings if SETTINGS[each].world == 1]
    for kind, setting in itertools.product(args.kinds, settings):
        name = kind if kind == "command" else f"{kind}, setting {setting}"
        # a Trainer looks at gradients
        is_for_loops = SETTINGS[setting].has_engine or SETTINGS[setting].in_backward
        if name in told or (kind == "trainer" and is_for_loops):
            continue
        place = args.folder / name.replace(", ", "-").replace(" ", "-")
        shutil.rmtree(place, ignore_errors=True)
        (place / "nvme").mkdir(parents=True)

        def be(place: Path = place, setting: int = setting, kind: str = kind) -> None:
            torch.set_num_threads(1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.dump_traceback_later(
                LONGEST_S * (args.count if kind == "command" else 10), exit=True
            )
            if kind == "command":
                found = stop_commands(place.absolute(), args.seed, args.count)
            else:
                found = loop(KINDS[kind], place, setting, args.seed, args.count)
            (place / "found.json").write_text(json.dumps(found))
            faulthandler.cancel_dump_traceback_later()

        pid = forked(be, place / "printed.all")
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(FileNotFoundError):
            told[name] = json.loads((place / "found.json").read_text())
        if ended:
            status = 1
            told[name] = (place / "printed.all").read_text()[-6000:]
            print(f"{name}, seed {args.seed}: {told[name]}", file=sys.stderr)
    cases = sum(args.count for found in told.values() if isinstance(found, dict))
    args.totals.write_text(
        json.dumps({"seed": args.seed, "cases": cases, "settings": told}, indent=1)
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
