"""Whatever the sequence of calls, does the store hold the bytes that a dict would, within its
budget, on every engine?"""

from __future__ import annotations

import contextlib
import errno
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import fork_server
import pytest
import torch
from drawn import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiermem.swap.base.native import Fault, IoSettings
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.memory.arena import BudgetError
from tiermem.swap.store.store import TensorStore

HOST_BYTES = 256 << 10
DISK_BYTES = 768 << 10
NUM_NAMES = 8
SIZES = st.one_of(
    st.sampled_from([0, 1, 4095, 4096, 4097, 70_000]),
    st.floats(0, 17).map(lambda exponent: int(2**exponent)),  # as many of every order of magnitude
)
STEP = st.tuples(
    st.sampled_from(
        ["put", "put", "fetch", "look", "change", "release", "write", "drop", "flush", "cancel"]
    ),
    st.integers(0, NUM_NAMES - 1),
    SIZES,
    st.booleans(),
)
STEPS = st.one_of(st.lists(STEP, max_size=40), st.lists(STEP, min_size=100, max_size=300))
# a read that is given nothing at all means the end of the file, so a short one gives something
FAULTS = st.lists(
    st.builds(
        Fault,
        serial=st.integers(0, 60),
        kind=st.sampled_from(["short", "late", "refused"]),
        value=st.integers(1, 9000),
        repeat=st.integers(1, 3),
    ),
    max_size=6,
)

RUNS = [  # tensors, bytes of the largest, paths
    pytest.param(400, 1 << 20, 2, id="400 up to 1 MiB on 2 paths"),
    pytest.param(10_000, 64 << 20, 1, id="10000 up to 64 MiB", marks=pytest.mark.slow),
    pytest.param(10_000, 64 << 20, 2, id="10000 up to 64 MiB on 2 paths", marks=pytest.mark.slow),
]


class Model:
    """What the store must hold: a dict, and which of its names are known to be in memory."""

    def __init__(self, store: TensorStore, pattern: Callable[..., torch.Tensor]) -> None:
        self.store = store
        self.bytes: dict[str, torch.Tensor] = {}
        self._pattern = pattern
        self._seed = 0

    def step(self, what: str, name: str, num_bytes: int, is_nvme: bool) -> None:
        """Does one thing to both."""
        if what == "flush":
            self.store.flush()
        elif name not in self.bytes:
            if what == "put":
                self._put(name, num_bytes, Tier.NVME if is_nvme else Tier.HOST)
        elif what == "drop":
            self.store.drop(name)
            del self.bytes[name]
        elif what in ("fetch", "look", "change", "cancel"):
            self._fetch(what, name)
        elif what in ("release", "write") and self.store.is_present(name):
            self.store.release(name, dirty=what == "write")

    def _new_bytes(self, num_bytes: int) -> torch.Tensor:
        self._seed += 1
        return self._pattern(num_bytes, seed=self._seed)

    def _put(self, name: str, num_bytes: int, home: Tier) -> None:
        tensor = self._new_bytes(num_bytes)
        try:
            self.store.put(name, tensor, home)
        except BudgetError:
            assert name not in self.store
            return
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # extents are whole pages
            assert self.store.stats().nvme_bytes + num_bytes > DISK_BYTES - 4096
            assert name not in self.store
            return
        self.bytes[name] = tensor

    def _fetch(self, what: str, name: str) -> None:
        was_present = self.store.is_present(name)
        try:
            move = self.store.fetch(name)
        except BudgetError:
            return
        if what == "cancel":
            move.cancel()
        elif what != "fetch":
            assert torch.equal(move.wait(), self.bytes[name])
        if what == "change":
            self.bytes[name] = self._new_bytes(len(self.bytes[name]))
            move.wait().copy_(self.bytes[name])
            self.store.release(name, dirty=True)
        assert not was_present or move.is_done()


@pytest.mark.sampled(12)
@settings(max_examples=drawn(30), suppress_health_check=list(HealthCheck))
@given(steps=STEPS, faults=FAULTS, num_paths=st.integers(1, 2))
def test_store_holds_what_a_dict_would(
    tmp_path: Path,
    engine: str,
    pattern: Callable[..., torch.Tensor],
    steps: list[tuple[str, int, int, bool]],
    faults: list[Fault],
    num_paths: int,
) -> None:
    with contextlib.ExitStack() as folders:
        made = [
            Path(folders.enter_context(tempfile.TemporaryDirectory(dir=tmp_path)))
            for _ in range(num_paths)
        ]
        paths = [NvmePath(folder, weight=1.0) for folder in made]
        io = IoSettings(engine, block_bytes=8192, depth=4)
        with TensorStore(paths, HOST_BYTES, io, DISK_BYTES, faults=faults) as store:
            model = Model(store, pattern)
            for what, number, num_bytes, is_nvme in steps:
                model.step(what, str(number), num_bytes, is_nvme)
                assert store.arena.peak_bytes <= HOST_BYTES
                assert store.stats().nvme_bytes <= DISK_BYTES
            store.flush()
            on_nvme = [name for name in model.bytes if store.home_of(name) is Tier.NVME]
            for name in filter(store.is_present, on_nvme):
                store.release(name)
            # what rests in memory would leave no room
            for name in sorted(model.bytes, key=on_nvme.__contains__):
                assert torch.equal(store.fetch(name).wait(), model.bytes[name])
                store.release(name)
                store.drop(name)
            assert store.arena.carved_bytes == store.stats().nvme_bytes == 0
        assert [file for folder in made for file in folder.iterdir()] == []


@pytest.mark.parametrize("num_paths", [1, 3])
def test_bytes_survive_on_several_paths(
    tmp_path: Path, pattern: Callable[..., torch.Tensor], num_paths: int
) -> None:
    paths = [tmp_path / str(i) for i in range(num_paths)]
    for path in paths:
        path.mkdir()
    with TensorStore(paths, 4 << 20) as store:
        for i in range(12):
            store.put(str(i), pattern(200_000, seed=i), Tier.NVME)
        for i in range(12):
            assert torch.equal(store.fetch(str(i)).wait(), pattern(200_000, seed=i))
            store.release(str(i))
        assert all(len(list(path.iterdir())) == 1 for path in paths)
    assert all(list(path.iterdir()) == [] for path in paths)


@pytest.mark.parametrize(("num_tensors", "largest", "num_paths"), RUNS)
def test_thousands_of_tensors_of_mixed_sizes_come_back_as_they_were_within_the_budget(
    tmp_path: Path, engine: str, num_tensors: int, largest: int, num_paths: int
) -> None:
    host_bytes = 2 * largest  # so that it is full again and again
    paths = [tmp_path / str(i) for i in range(num_paths)]
    for path in paths:
        path.mkdir()
    settings = [engine, *map(str, (num_tensors, largest, host_bytes, num_paths)), *map(str, paths)]
    script = Path(__file__).with_name("use_at_random.py")
    done = fork_server.run([str(script), *settings])
    assert done.returncode == 0, done.stderr
    used = json.loads(done.stdout)
    assert used["num_put"] == used["num_dropped"] == num_tensors
    assert used["num_looked"] > num_tensors // 2
    assert min(used["num_changed"], used["num_cancelled"]) > num_tensors // 100
    assert used["num_refused"] > 0
    assert used["host_peak_bytes"] <= host_bytes
    assert used["peak_rss_bytes"] - used["rss_before_bytes"] <= host_bytes + (
        48 << 20
    )  # queues, tables, the interpreter
    assert min(used["read_bytes"], used["written_bytes"]) > num_tensors * 4096
    assert all(list(path.iterdir()) == [] for path in paths)
