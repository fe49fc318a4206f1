"""Whatever the sequence of calls, does the store hold the bytes that a dict would, within its budget, on every engine?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiermem.swap.arena import BudgetError
from tiermem.swap.native import Fault
from tiermem.swap.settings import IoSettings
from tiermem.swap.store import TensorStore
from tiermem.swap.tier import Tier

HOST_BYTES = 256 << 10
SIZES = (0, 1, 4095, 4096, 4097, 70_000)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "fetch", "look", "change", "release", "write", "drop", "settle", "cancel"]),
        st.integers(0, 3),
        st.sampled_from(SIZES),
        st.booleans(),
    ),
    max_size=40,
)
FAULTS = st.lists(  # a read that is given nothing at all means the end of the file, so a short one gives something
    st.builds(
        Fault,
        serial=st.integers(0, 60),
        kind=st.sampled_from(["short", "late", "refused"]),
        value=st.integers(1, 9000),
        repeat=st.integers(1, 3),
    ),
    max_size=6,
)


class Model:
    """What the store must hold: a dict, and which of its names are known to be in memory."""

    def __init__(self, store: TensorStore, pattern: Callable[..., torch.Tensor]) -> None:
        self.store = store
        self.bytes: dict[str, torch.Tensor] = {}
        self._pattern = pattern
        self._seed = 0

    def step(self, what: str, name: str, num_bytes: int, is_nvme: bool) -> None:
        """Does one thing to both."""
        if what == "settle":
            self.store.settle()
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


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, faults=FAULTS)
def test_store_holds_what_a_dict_would(
    tmp_path: Path,
    engine: str,
    pattern: Callable[..., torch.Tensor],
    steps: list[tuple[str, int, int, bool]],
    faults: list[Fault],
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        io = IoSettings(engine, block_bytes=8192, depth=4)
        with TensorStore([folder], HOST_BYTES, io, faults=faults) as store:
            model = Model(store, pattern)
            for what, number, num_bytes, is_nvme in steps:
                model.step(what, str(number), num_bytes, is_nvme)
                assert store.arena.carved_bytes <= HOST_BYTES
            store.settle()
            for name, expected in model.bytes.items():
                if store.is_present(name) and store.home_of(name) is Tier.NVME:
                    store.release(name)
                assert torch.equal(store.fetch(name).wait(), expected)
                store.release(name)
            for name in model.bytes:
                store.drop(name)
            assert store.arena.carved_bytes == store.stats().nvme_bytes == 0
        assert list(Path(folder).iterdir()) == []


@pytest.mark.parametrize("num_paths", [1, 3])
def test_bytes_survive_on_several_paths(tmp_path: Path, pattern: Callable[..., torch.Tensor], num_paths: int) -> None:
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
