"""Do transfers notice signals? The process may be struck at any moment, stopped and continued, and
no byte differs.

A queue's threads block every signal, so a handler interrupts only whoever waits; but nothing can
block SIGSTOP, after which the kernel lets some sleeps of any thread end in EINTR.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tiermem.swap.base.tier import Tier
from tiermem.swap.store.store import TensorStore

NUM_BYTES = 3 << 20

_CHILD = """
import sys, torch
from tiermem.swap.base.native import IoSettings
from tiermem.swap.store.store import TensorStore
from tiermem.swap.base.tier import Tier
engine, folder = sys.argv[1:]
with TensorStore(folder, 32 << 20, IoSettings(engine, 65536, 8)) as store:
    print("open", flush=True)
    for seed in range(30):
        expected = torch.full((3 << 20,), seed, dtype=torch.uint8)
        expected[seed::4099] = 255 - seed
        store.put("x", expected, Tier.NVME)
        assert torch.equal(store.fetch("x").wait(), expected)
        store.drop("x")
"""


@pytest.fixture
def rain() -> Iterator[list[int]]:
    """SIGALRM every 200 microseconds, handled; gives the list that each one is written to."""
    drops: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: drops.append(number))
    signal.siginterrupt(signal.SIGALRM, True)
    signal.setitimer(signal.ITIMER_REAL, 200e-6, 200e-6)
    yield drops
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_signals_that_rain_on_the_process_change_no_byte(
    make_store: Callable[..., TensorStore],
    engine: str,
    pattern: Callable[..., torch.Tensor],
    rain: list[int],
) -> None:
    store = make_store(host_bytes=32 << 20, engine=engine)
    while len(rain) < 50:
        for seed in range(4):
            store.put("x", pattern(NUM_BYTES, seed=seed), Tier.NVME)
            assert torch.equal(store.fetch("x").wait(), pattern(NUM_BYTES, seed=seed))
            store.drop("x")


def test_threads_of_a_queue_block_every_signal(
    make_store: Callable[..., TensorStore], engine: str
) -> None:
    store = make_store(engine=engine)
    before = _threads()
    store.put("x", torch.ones(1000), Tier.NVME).wait()
    native = _threads() - before
    assert native
    for thread in native:
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        if "iou-wrk" in status.splitlines()[0]:
            continue  # the kernel's own
        blocked = int(status.split("SigBlk:")[1].split()[0], 16)
        for number in (signal.SIGINT, signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD):
            assert blocked >> (number - 1) & 1, signal.Signals(number).name


@pytest.mark.slow
def test_process_that_is_stopped_and_continued_loses_no_byte(engine: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, engine, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "open\n", child.stderr.read()
        errors: list[str] = []
        reader = threading.Thread(
            target=lambda: errors.append(child.stderr.read() if child.stderr else "")
        )
        reader.start()
        num_stops = 0
        while num_stops < 200:
            os.kill(child.pid, signal.SIGSTOP)
            _, status = os.waitpid(child.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                child.returncode = os.waitstatus_to_exitcode(status)
                break
            num_stops += 1
            os.kill(child.pid, signal.SIGCONT)
        child.wait()
        reader.join()
    assert (child.returncode, errors) == (0, [""])
    assert num_stops >= 10
    assert list(tmp_path.iterdir()) == []


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))
