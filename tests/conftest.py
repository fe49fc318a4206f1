"""The leak check around every test: what a test opened is closed when it ends.

After each test there is no file descriptor and no thread (native ones too) that was not there
before, no `tiermem-*` folder below its tmp_path, and no TensorStore that nobody closed. What is
found is looked at again for a moment, because the kernel ends an io_uring worker a little after its
ring; only what stays is a leak.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import drawn
import fork_server
import hypothesis
import pytest
import torch
from strips import cut_small_tiles
from workers import (
    pytest_addoption as pytest_addoption,
)
from workers import (
    pytest_runtestloop as pytest_runtestloop,
)
from workers import (
    pytest_sessionstart as pytest_sessionstart,
)

from tiermem.swap.base.native import Workers

# Torch's own, started when first needed and kept: pools of autograd and OpenMP, and those of CUDA's
# driver.
_TORCH_THREADS = ("pt_autograd", "pt_", "OMP", "libgomp", "cuda")
_LASTING_FILES = ("/dev/nvidia", "/dev/urandom", "/dev/null", "pipe:[hypothesis")
_GRACE_S = 10.0  # a thread that has ended may stay that long on a machine that is overloaded
_MOST_UNCOLLECTED_BYTES = 512 << 20  # which circles and tracebacks may hold

# An example takes as long as the machine lets it: no test is timed.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """How many examples a property is given depends on which tests were chosen."""
    drawn.note_marks(config.option.markexpr)
    examples = drawn.drawn(hypothesis.settings.default.max_examples)
    hypothesis.settings.register_profile("drawn", deadline=None, max_examples=examples)
    hypothesis.settings.load_profile("drawn")


# Until the first test: importing and finding tests makes no garbage, and collections took a seventh
# of that time in each worker. `warmed_up` enables them again.
gc.disable()


@pytest.fixture(scope="session", autouse=True)
def warmed_up() -> None:
    """Torch starts its thread pools now, and multiprocessing its tracker, so that no test is blamed
    for them; tqdm starts no thread. What is imported is not collected again. Small tiles have
    strips. Seeds are for the devices that are there.

    At the first `with torch.device(...)` of a process torch notes its constructors: before a test
    replaces one of them, which would allocate 7B of a "meta" model later."""
    a = torch.ones(512, 512, requires_grad=True)
    (a @ a).sum().backward()
    with torch.device("cpu"):
        torch.ones(1 << 20).add_(1).sum()
    cut_small_tiles()
    resource_tracker.ensure_running()
    for name, logger in logging.root.manager.loggerDict.items():
        # else pytest adds its two handlers to each of these fifty and removes them, thrice a test
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        # torch.manual_seed keeps the stack of each call for the day it starts: 2 ms
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None
    with contextlib.suppress(ImportError):
        import tqdm

        # no thread that watches progress bars; torch.compile makes some
        tqdm.tqdm.monitor_interval = 0
    gc.enable()
    gc.collect()
    gc.freeze()
    # collections took a twelfth of the time; `nothing_leaks` collects when it must
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """What a test starts can be interrupted, also where a shell makes what it runs behind ("&")
    ignore that."""
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest, warmed_up: None) -> Iterator[None]:
    """Compares what the process holds before and after the test."""
    tmp_path = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    before = _open_files(), _threads(), _live_stores()
    yield
    if _resident_bytes() > request.config.stash.get(_MOST_BYTES, 0):
        gc.collect()
        request.config.stash[_MOST_BYTES] = _resident_bytes() + _MOST_UNCOLLECTED_BYTES
    deadline = time.monotonic() + _GRACE_S
    while leaks := _leaks(*before, tmp_path):
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(leaks))
        time.sleep(0.005)


@pytest.fixture
def forked_python(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is started with sys.executable, or as `python` or `tiermem`, is a fork of
    fork_server.py's, without the imports' seconds. Its memory is not seen from outside."""
    folder = tmp_path_factory.mktemp("bin")
    for name, value in fork_server.write_python(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One thread of native arithmetic."""
    with contextlib.closing(Workers(1)) as workers:
        yield workers


_MOST_BYTES = pytest.StashKey[int]()
"""Resident bytes above which the next test ends with a collection."""


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _leaks(
    files: dict[str, str], threads: dict[int, str], stores: set[int], tmp_path: Path | None
) -> list[str]:
    found = [
        f"descriptor {fd} ({file})" for fd, file in _open_files().items() if files.get(fd) != file
    ]
    found += [f"thread {tid} ({name})" for tid, name in _threads().items() if tid not in threads]
    found += [f"{len(left)} live TensorStore" for left in [_live_stores() - stores] if left]
    if tmp_path is not None:
        runs = [
            (folder, files)
            for folder, _, files in os.walk(tmp_path)
            if Path(folder).name.startswith("tiermem-")
        ]
        found += [
            f"folder {folder}" for folder, files in runs if "lock" in files or not _has_saved(files)
        ]
    return found


def _has_saved(files: list[str]) -> bool:
    """Whether what a run has left says so: its rank has a part of a durable step."""
    return any(name.startswith("part-") for name in files)


def _open_files() -> dict[str, str]:
    files = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            file = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
        if not file.startswith(_LASTING_FILES):
            files[fd] = file
    return files


def _threads() -> dict[int, str]:
    names = {}
    for tid in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{tid}/comm") as file:
                name = file.read().strip()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if not name.startswith(_TORCH_THREADS):
            names[int(tid)] = name
    return names


def _live_stores() -> set[int]:
    """Stores whose finalizer has neither run nor been taken away: nobody closed them.

    The registry is copied in one go: a list of its items allocates, and so a collection may run
    finalizers meanwhile, which remove themselves."""
    registry: dict[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    return {
        id(finalizer)
        for finalizer, info in registry.copy().items()
        if getattr(info.func, "__qualname__", "") == "Resources.close"
        and info.weakref() is not None
    }


# ---- black-box tests -----------------------------------------------------------------------------

BLACK_BOX = (
    "accelerator/test_parity.py",
    "accelerator/test_ranks.py",
    "accelerator/test_training.py",
    "checkpoint/test_copies_that_share.py",
    "checkpoint/test_engine_saves.py",
    "checkpoint/test_export_saved.py",
    "checkpoint/test_interchange.py",
    "checkpoint/test_load_arguments.py",
    "checkpoint/test_resume.py",
    "checkpoint/test_resume_on_ranks.py",
    "checkpoint/test_save_in_memory.py",
    "checkpoint/test_save_on_nvme.py",
    "checkpoint/test_save_on_ranks.py",
    "checkpoint/test_saved_before.py",
    "checkpoint/test_superseded_steps.py",
    "checkpoint/test_unharmed.py",
    "config/test_config_*.py",
    "config/test_documented_keys.py",
    "crash/*",
    "documents/*",
    "engine/test_accumulation.py",
    "engine/test_engine*.py",
    "engine/test_state_access*.py",
    "models/*",
    "ranks/test_grads_on_ranks.py",
    "ranks/test_lost_ranks.py",
    "ranks/test_mesh_keys.py",
    "ranks/test_mesh_on_ranks.py",
    "ranks/test_twins.py",
    "test_public_names.py",
    "tools/test_checkpoint_commands.py",
    "tools/test_main_job.py",
    "tools/test_train.py",
    "tools/test_train_resume.py",
    "zero/test_any_calls.py",
    "zero/test_init_on_ranks.py",
    "zero/test_parity.py",
    "zero/test_tiers_change_no_bit.py",
    "zero/test_training_habits.py",
)
"""Files whose assertions stay as they are while the insides are redesigned: they see what a user
sees. What they import may move. `pytest -m black_box` runs them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of BLACK_BOX, and as slow what `sampled` leaves out; `-m` chooses
    afterwards."""
    here = Path(__file__).parent
    chosen = {
        path: any(path.relative_to(here).match(pattern) for pattern in BLACK_BOX)
        for path in {item.path for item in items}
    }
    for item in items:
        if chosen[item.path]:
            item.add_marker(pytest.mark.black_box)
    _sample(items)


def _drawn_by(item: pytest.Item) -> int:
    """A number of a case's own name alone: functions that look at the same cases draw the same
    ones, and one launch need not compute the others."""
    return zlib.crc32(item.name.partition("[")[2].encode())


def _sample(items: list[pytest.Item]) -> None:
    """Marks as slow, of each function marked `sampled(n)`, all but one in n of its cases that are
    not slow or soak anyway."""
    families: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        is_sampled = item.get_closest_marker("sampled") is not None
        if is_sampled and not any(map(item.get_closest_marker, ("slow", "soak"))):
            name = item.name.partition("[")[0]
            families.setdefault((item.path, name), []).append(item)
    for family in families.values():
        marker = family[0].get_closest_marker("sampled")
        assert marker is not None
        order = sorted(family, key=_drawn_by)
        for item in order[-(-len(order) // marker.args[0]) :]:
            item.add_marker(pytest.mark.slow)
