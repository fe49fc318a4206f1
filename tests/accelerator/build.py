"""Build: compiles simulator/*.cpp against the installed torch, once per state of the sources.

    build/accelerator/<hash of sources, torch, Python and compiler>/_sim.so

A file lock makes other processes wait while one builds. What an older state left is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent
_SOURCES = _HERE / "simulator"
_KEPT = _HERE.parent.parent / "build" / "accelerator"

_FLAGS = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]


class NoCompilerError(RuntimeError):
    """The simulator cannot be built on this machine; the message says what is missing."""


def missing_for_build() -> str | None:
    """Says what this machine lacks for the build, or nothing."""
    if _compiler() is None:
        return "no C++ compiler (g++, or CXX) to build the simulated device with"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "no Python headers (python3-dev) to build the simulated device with"
    return None


def built() -> Path:
    """Returns the library, which is built first if these sources have not been built. Blocks, for
    about half a minute.

    Raises NoCompilerError without a compiler or Python's headers, RuntimeError with the compiler's
    words if it fails.
    """
    if missing := missing_for_build():
        raise NoCompilerError(missing)
    folder = _KEPT / _key()
    library = folder / "_sim.so"
    if library.exists():
        return library
    _KEPT.mkdir(parents=True, exist_ok=True)
    with open(_KEPT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _remove_old(keep=folder.name)
            scratch = _KEPT / f"{folder.name}.part"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            _build(scratch)
            scratch.rename(folder)
    return library


def _build(folder: Path) -> None:
    """Compiles all files as one: torch's headers are most of the work, and are read once so."""
    whole = folder / "all.cpp"
    whole.write_text("".join(f'#include "{source}"\n' for source in sorted(_SOURCES.glob("*.cpp"))))
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    folders = [
        include,
        include / "torch" / "csrc" / "api" / "include",
        sysconfig.get_paths()["include"],
    ]
    flags = [
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{_SOURCES}",
    ]
    flags += [word for each in folders for word in ("-isystem", str(each))]
    library = torch_folder / "lib"
    libraries = [
        f"-L{library}",
        f"-Wl,-rpath,{library}",
        "-lc10",
        "-ltorch_cpu",
        "-ltorch",
        "-ltorch_python",
    ]
    command = [str(_compiler()), *flags, str(whole), *libraries, "-o", str(folder / "_sim.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"the simulated device does not compile: {' '.join(command)}\n{done.stderr[-8000:]}"
        )
    (folder / "warnings.txt").write_text(done.stderr)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _key() -> str:
    """A hash of everything that the library depends on."""
    known = hashlib.sha256()
    for source in sorted([*_SOURCES.iterdir(), Path(__file__)]):
        known.update(source.name.encode() + b"\0" + source.read_bytes())
    compiler = _compiler()
    facts = (
        torch.__version__,
        torch.__file__,
        sysconfig.get_config_var("SOABI"),
        compiler,
        os.stat(str(compiler)).st_mtime_ns,
    )
    known.update(repr(facts).encode())
    return known.hexdigest()[:16]


def _remove_old(keep: str) -> None:
    """Removes all but the three newest builds: other worktrees' Pythons may use one of them."""
    folders = sorted(
        (f for f in _KEPT.iterdir() if f.is_dir() and f.name != keep),
        key=lambda f: f.stat().st_mtime,
    )
    for folder in folders[:-3]:
        shutil.rmtree(folder, ignore_errors=True)
