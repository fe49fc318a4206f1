"""What the tests of floor 1 share: engines, small stores, mounts, patterns of bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from aio_events import aio_events
from lies import Lies
from mounts import mount as mount

from tiermem.swap.base.engines import ENGINES
from tiermem.swap.base.native import Fault, IoSettings, Queue
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.store.store import TensorStore


def _engine_or_skip(name: str) -> str:
    try:
        Queue(IoSettings(name)).close()
    except OSError as error:
        pytest.skip(f"{name} cannot run here: {error}")
    return name


@pytest.fixture(params=ENGINES[1:])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every engine that can run here."""
    with aio_events():
        yield _engine_or_skip(request.param)


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., TensorStore]]:
    """Makes stores below tmp_path and closes those that the test did not."""
    stores: list[TensorStore] = []

    def make(
        host_bytes: int = 8 << 20,
        engine: str = "auto",
        block_bytes: int = 65536,
        depth: int = 8,
        faults: tuple[Fault, ...] = (),
        disk_bytes: int | None = None,
        paths: Sequence[NvmePath] = (),
        num_slots: int = 1,
    ) -> TensorStore:
        io = IoSettings(engine, block_bytes, depth)
        stores.append(
            TensorStore(
                paths or tmp_path, host_bytes, io, disk_bytes, faults=faults, num_slots=num_slots
            )
        )
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(make_store: Callable[..., TensorStore]) -> TensorStore:
    """A small store with one path."""
    return make_store()


@pytest.fixture
def two_paths(tmp_path: Path) -> list[NvmePath]:
    """Two folders of equal weight."""
    paths = [NvmePath(tmp_path / name, weight=1.0) for name in ("a", "b")]
    for each in paths:
        each.path.mkdir()
    return paths


@pytest.fixture
def lies(tmp_path: Path) -> Iterator[Lies]:
    """A file system, mounted at `point`, that fails as it is told; skips the test where FUSE is not
    allowed."""
    point = tmp_path / "lying"
    point.mkdir()
    command = [sys.executable, "-S", str(Path(__file__).with_name("lying_disk.py")), str(point)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert (
            process.stdin is not None and process.stdout is not None and process.stderr is not None
        )
        if process.stdout.readline() != "mounted\n":
            pytest.skip(process.stderr.read().strip())
        yield Lies(point, process)
        process.stdin.close()
        if process.wait():  # the test killed it
            subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.fixture(scope="session")
def pattern() -> Callable[..., torch.Tensor]:
    """pattern(num_bytes, seed): bytes that differ from block to block and from seed to seed."""

    def make(num_bytes: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + num_bytes)
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)

    return make
