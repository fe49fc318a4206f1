"""What the tests of floor 1 share: engines, small stores, mounts, patterns of bytes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tiermem.swap.native import Fault, Queue
from tiermem.swap.paths import NvmePath
from tiermem.swap.settings import IoSettings
from tiermem.swap.store import TensorStore

ENGINES = ("uring", "aio", "threads")


def _engine_or_skip(name: str) -> str:
    try:
        Queue(name).close()
    except OSError as error:
        pytest.skip(f"{name} cannot run here: {error}")
    return name


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Every engine that can run here."""
    return _engine_or_skip(request.param)


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
    ) -> TensorStore:
        io = IoSettings(engine, block_bytes, depth)
        stores.append(TensorStore(paths or tmp_path, host_bytes, io, disk_bytes, faults=faults))
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
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system of its own below tmp_path; skips the test where this is not allowed."""
    mounted: list[Path] = []

    def make(kind: str, num_bytes: int = 0) -> Path:
        point = tmp_path / f"mounted {kind}"
        point.mkdir()
        command = ["mount", "-t", kind, kind, str(point)]
        if kind == "ext4":
            image = tmp_path / "image"
            image.touch()
            with image.open("r+b") as file:
                file.truncate(num_bytes)
            made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)], capture_output=True)
            if made.returncode:
                pytest.skip(f"no small file system: {made.stderr.decode()}")
            command = ["mount", "-o", "loop", str(image), str(point)]
        try:
            done = subprocess.run(command, capture_output=True)
        except FileNotFoundError as error:
            pytest.skip(f"no mount: {error}")
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")
        mounted.append(point)
        return point

    yield make
    for point in mounted:
        subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.fixture(scope="session")
def pattern() -> Callable[..., torch.Tensor]:
    """pattern(num_bytes, seed): bytes that differ from block to block and from seed to seed."""

    def make(num_bytes: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + num_bytes)
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)

    return make
