"""Notebook: a process that is stopped by Ctrl-C at random moments and goes on with the next cell, many times.

A timer in another thread sends SIGINT after a seeded time. The loop catches KeyboardInterrupt as a notebook does, keeps the
traceback as `sys.last_traceback` does, and calls zero_grad and the next step. A state is known by the digest of its weights.
After each interrupt the model is in the state before or after the interrupted step of an undisturbed run, or an error says that
it is torn; then a checkpoint is opened.

    python notebook.py FOLDER --totals totals.json --seed 1 --settings 1 --count 200
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import torch
from forks import forked
from interrupts import LONGEST_S, SETTINGS, Run, arguments, open_files, says_torn, threads_left

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


def trained(run: Run) -> list[tuple[str, str]]:
    """The loss of each of the next steps, and the digest after it."""
    return [(run.train().hex(), run.digest()) for _ in range(NUM_STEPS)]


def built_anew(run: Run, place: Path) -> Run:
    """What follows a torn model: an engine opens a checkpoint; without one it is closed and another model built."""
    if run.setting.has_engine:
        return run
    run.close()
    anew = Run(place, run.setting)
    anew.build()
    anew.train()
    anew.weights, anew.kept = run.weights, run.kept
    return anew


def cell(run: Run, after_s: float) -> str:
    """Steps that Ctrl-C ends at some moment; returns what came of it."""
    try:
        with Stop(after_s):
            for _ in range(NUM_STEPS):
                run.train()
    except KeyboardInterrupt as error:
        sys.last_value = error
        return "interrupted"
    return "ended"


def loop(place: Path, setting: int, seed: int, count: int) -> dict[str, int]:
    """Goes through the cells. Raises AssertionError for wrong bits and for an exception that says nothing."""
    chosen, found = random.Random(f"{seed} {setting}"), Counter[str]()
    run = Run(place, SETTINGS[setting])
    run.build()
    for _ in range(2):
        run.train()
    run.keep()
    first = run.digest()
    started = time.monotonic()
    due = trained(run)
    longest_s = time.monotonic() - started
    states = {first: 0} | {digest: number for number, (_, digest) in enumerate(due, 1)}
    run.load()
    for number in range(count):
        found[outcome := cell(run, chosen.uniform(0.0, longest_s))] += 1
        try:
            run.optim.zero_grad()
            at = states.get(run.digest())
            assert at is not None, f"cell {number}, {outcome}: the weights are of no step"
            for loss, digest in due[at:]:
                made = run.train().hex(), run.digest()
                assert made == (loss, digest), f"cell {number}, {outcome}: wrong bits after step {at}"
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


def main() -> int:
    """Goes through the cells of the settings that it is asked for, and writes what came of them."""
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=200, help="interrupts of a setting")
    args = parser.parse_args()
    told: dict[str, Any] = {}
    status = 0
    for setting in args.settings:
        place = args.folder / f"setting-{setting}"
        shutil.rmtree(place, ignore_errors=True)
        (place / "nvme").mkdir(parents=True)

        def be(place: Path = place, setting: int = setting) -> None:
            torch.set_num_threads(1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.dump_traceback_later(LONGEST_S + args.count, exit=True)
            found = loop(place, setting, args.seed, args.count)
            (place / "found.json").write_text(json.dumps(found))
            faulthandler.cancel_dump_traceback_later()

        pid = forked(be, place / "printed")
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(FileNotFoundError):
            told[str(setting)] = json.loads((place / "found.json").read_text())
        if ended:
            status = 1
            told[str(setting)] = (place / "printed").read_text()[-6000:]
            print(f"setting {setting}, seed {args.seed}: {told[str(setting)]}", file=sys.stderr)
    cases = sum(args.count for found in told.values() if isinstance(found, dict))
    args.totals.write_text(json.dumps({"seed": args.seed, "cases": cases, "settings": told}, indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
