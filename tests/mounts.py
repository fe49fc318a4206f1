"""What tests with file systems and block devices of their own ask of the system; where it refuses,
they are skipped."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_FIBMAP = 1
SECTOR = 512
_FORMAT = {
    "ext2": ("-q", "-m", "0"),
    "ext4": ("-q", "-m", "0", "-O", "^has_journal"),
    "xfs": ("-q", "-m", "reflink=1"),
    "btrfs": ("-q",),
}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system of its own below tmp_path; skips the test where this is not allowed.

    Those of a disk lie in `MOUNTPOINT.image`, through a loop device, or on the device that is
    given. One that is mounted with `name` may have others of its kind beside it.
    """
    mounted: list[Path] = []

    def make(
        kind: str,
        num_bytes: int = 0,
        options: str = "",
        folder: Path = tmp_path,
        device: str = "",
        name: str = "",
    ) -> Path:
        point = tmp_path / (name or f"mounted {kind}")
        point.mkdir()
        command = ["mount", "-t", kind, "-o", options or "rw", kind, str(point)]
        if kind in _FORMAT:
            image = folder / f"{point.name}.image"
            if not device:
                image.touch()
                os.truncate(image, num_bytes)
            run_or_skip(f"mkfs.{kind}", *_FORMAT[kind], device or str(image))
            command = ["mount", "-o", options or "rw", device or str(image), str(point)]
            command[2] += "" if device else ",loop"
        run_or_skip(*command)
        mounted.append(point)
        return point

    yield make
    for point in reversed(mounted):
        subprocess.run(["umount", "-l", str(point)], check=True)


def run_or_skip(*command: str, stdin: str = "") -> str:
    """What a system program prints; skips the test, with the reason, when it is not there or not
    allowed."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"no {command[0]}: {error}")
    if done.returncode:
        pytest.skip(f"{command[0]} is not allowed here: {done.stderr.strip()}")
    return done.stdout.strip()


def device_of(point: Path) -> str:
    """The block device that is mounted there."""
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return next(device for device, where, *_ in lines if where == str(point).replace(" ", "\\040"))


def place_on_device(fd: int, offset: int) -> int:
    """Where a byte of a file lies on its device; offset is a multiple of 4096."""
    block_bytes = os.fstatvfs(fd).f_bsize
    try:
        answer = fcntl.ioctl(fd, _FIBMAP, struct.pack("i", offset // block_bytes))
    except OSError as error:
        pytest.skip(f"no FIBMAP: {os.strerror(error.errno or 0)}")
    (block,) = struct.unpack("i", answer)
    assert block
    return int(block) * block_bytes


def fill(folder: Path) -> Path:
    """Takes what is free on a file system with one file."""
    file = folder / "filler"
    with file.open("wb") as filler:
        held, more = 0, 1 << 30
        while more >= 4096:
            try:
                os.posix_fallocate(filler.fileno(), held, more)
                held += more
            except OSError:
                os.ftruncate(filler.fileno(), held)
                more //= 2
    return file
