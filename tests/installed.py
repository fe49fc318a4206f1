"""Installed: the wheel, built from the sources, in an empty environment on a machine without a
compiler, as a user finds it."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """The wheel as pip builds it from the sources. Workers of one session share it."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if pytestconfig.option.workers else own) / "wheel"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("tiermem-*.whl")):
            command = [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "--wheel-dir",
                str(folder),
                str(ROOT),
            ]
            subprocess.run(command, check=True, timeout=900)
    (made,) = folder.glob("tiermem-*.whl")
    return made


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; what the wheel needs is this environment's, seen through a
    path."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    command = [str(found), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, timeout=300)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


def run(python: Path, folder: Path, *arguments: str) -> str:
    """What a program says on a machine without a compiler: PATH holds the environment's programs
    alone."""
    environment = {"PATH": str(python.parent), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    assert not any(
        shutil.which(name, path=environment["PATH"])
        for name in ("cc", "c++", "gcc", "g++", "clang", "cmake")
    )
    done = subprocess.run(
        [str(python), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
