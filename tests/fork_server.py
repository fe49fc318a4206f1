"""Fork server: scripts run in forks of one process that has imported torch and tiermem, without the
seconds that takes.

    run(["script.py", "word"], timeout_s=60)     as subprocess.run; also "-c" and lines, or "-m" and a module
    with start(["script.py"], RANK="0") as script: script.wait(60)      several at once

The server is started when it is first asked, has computed nothing and has no threads. It ends with
the process that started it. Scripts that name Hugging Face's packages are forks of a second process,
which has imported these too. A script sees its own words, environment, session and output, as if
Python had been started for it; differences are that PYTHONPATH comes too late and that `tests` is in
sys.path.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

from forks import forked

_PR_SET_PDEATHSIG = 1
_STARTS_WITHIN_S = 120.0
_MODELS_TOO = "-models"
_STANDS_FOR_PYTHON = "TIERMEM_TESTS_PYTHON"


class Started:
    """A script that runs in a fork of the server. Leaving the context ends it and all of its
    session."""

    def __init__(self, words: list[str], environment: dict[str, str], folder: Path) -> None:
        self._words = words
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._server = _connected(_names_models(words))
        _ask(
            self._server, words, environment, folder, {1: self._out.fileno(), 2: self._err.fileno()}
        )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        # the fork's parent kills what is left of the session, and answers
        self._server.shutdown(socket.SHUT_WR)
        self._server.settimeout(None)
        self._server.recv(1)
        for file in (self._server, self._out, self._err):
            file.close()

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit status; negative for a signal. Blocks. Raises subprocess.TimeoutExpired."""
        self._server.settimeout(timeout_s)
        try:
            return int.from_bytes(self._server.recv(4), "little", signed=True)
        except TimeoutError:
            raise subprocess.TimeoutExpired(
                self._words, timeout_s or 0.0, self.stdout(), self.stderr()
            ) from None

    def stdout(self) -> str:
        return _text(self._out)

    def stderr(self) -> str:
        return _text(self._err)


def start(words: list[str], folder: Path | None = None, **variables: str) -> Started:
    """Starts a script with these words, in this environment and `variables`. Does not block once
    the server is there."""
    return Started([str(word) for word in words], os.environ | variables, folder or Path.cwd())


def run(
    words: list[str],
    timeout_s: float | None = None,
    folder: Path | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end. Blocks. Raises subprocess.TimeoutExpired, after which nothing of it
    is left."""
    with start(words, folder, **variables) as script:
        status = script.wait(timeout_s)
        return subprocess.CompletedProcess(words, status, script.stdout(), script.stderr())


def write_python(folder: Path) -> dict[str, str]:
    """Writes programs `python` and `tiermem` whose processes are forks, with the descriptors and
    signals of these. Returns the variables by which a fork starts them for sys.executable."""
    _connected(False).close()  # the server is there
    python = folder / "python"
    command = f"{sys.executable} -SE {__file__} --as {_server['address'][1:]}"
    for file, words in ((python, command), (folder / "tiermem", f"{python} -m tiermem.tools.cli")):
        file.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        file.chmod(0o755)
    return {_STANDS_FOR_PYTHON: str(python), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def _text(file: Any) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def end_with_parent() -> None:
    """The kernel kills this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_shared() -> None:
    """Starts the server of this process and of those forked from it."""
    _start_server()
    _server["is_shared"] = True


_MODELS = re.compile(
    r"transformers|huggingface|tiny_models|peft|trl|accelerate|tiermem.tools.train"
)


def _names_models(words: list[str]) -> bool:
    files = [Path(word) for word in words if word.endswith(".py")]
    texts = [*words[:2], *(file.read_text("utf-8") for file in files if file.is_file())]
    if any("as_deepspeed" in text for text in texts):
        return False  # which comes before these packages
    return words[0] == "-" or any(_MODELS.search(text) for text in texts)


def _connected(with_models: bool) -> socket.socket:
    """A connection to the server of this process, which is started when there is none."""
    if _server.get("pid") != os.getpid() and not _server.get("is_shared"):
        _start_server()
    address = _server["address"] + (_MODELS_TOO if with_models else "")
    connection, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + _STARTS_WITHIN_S
    while True:
        try:
            connection.connect(address)
            return connection
        except ConnectionRefusedError:
            if _server["process"].poll() is not None or time.monotonic() > deadline:
                connection.close()
                raise
            time.sleep(0.01)


def _ask(
    server: socket.socket,
    words: list[str],
    environment: dict[str, str],
    folder: Path,
    descriptors: dict[int, int],
) -> None:
    """Asks for a script; `descriptors` by their numbers there."""
    numbers = list(descriptors)
    told = {"words": words, "environment": environment, "folder": str(folder), "numbers": numbers}
    request = json.dumps(told).encode()
    socket.send_fds(server, [len(request).to_bytes(4, "little")], list(descriptors.values()))
    server.sendall(request)


_server: dict[str, Any] = {}  # the one of this process


def _start_server() -> None:
    name = f"tiermem-tests-{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        [sys.executable, __file__, name],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    _server.update(pid=os.getpid(), address=f"\0{name}", process=process)
    atexit.register(_end_server, os.getpid(), process)


def _end_server(pid: int, process: subprocess.Popen[bytes]) -> None:
    if os.getpid() == pid:
        process.kill()
        process.wait()


# ---- in the server -------------------------------------------------------------------------------


def _serve(name: str) -> None:
    """Answers each connection in a fork, until the process that started this one ends."""
    end_with_parent()
    faulthandler.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks that answer
    listeners = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    for listener, which in zip(listeners, ("", _MODELS_TOO), strict=True):
        listener.bind(f"\0{name}{which}")  # which leaves no file
        listener.listen(64)
    _import_everything()
    listener, others = listeners
    if os.fork() == 0:
        end_with_parent()
        others, listener = listeners
        select.select([listener], [], [])  # until somebody asks
        _import_models()
    others.close()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _answer(connection)
            os._exit(0)
        connection.close()


def _import_everything() -> None:
    # The first optimizer of a process imports it, which takes a second.
    import torch._dynamo  # noqa: F401

    # Before there is a group, which it would hold: ranks/joining.py.
    import tiermem.engine
    import tiermem.optim  # noqa: F401


def _import_models() -> None:
    with contextlib.suppress(ImportError):
        from transformers import LlamaForCausalLM, Trainer  # noqa: F401

        import tiermem.integrations.huggingface  # noqa: F401
    with contextlib.suppress(ImportError):
        import peft  # noqa: F401
        from trl import SFTConfig, SFTTrainer  # noqa: F401
    gc.freeze()  # no fork's collection copies their pages


def _answer(connection: socket.socket) -> None:
    """Runs one script, says how it ended, and kills its session when the other side has gone or has
    read that."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(connection, 4, 99)
    length, request = int.from_bytes(size, "little"), b""
    while len(request) < length and (received := connection.recv(length - len(request))):
        request += received
    if not length or len(request) < length:
        return  # whoever connected has gone
    told = json.loads(request)
    pid = forked(lambda: _be_script(connection, files, **told))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)
    while connection in select.select([connection, ended], [], [])[0] and (
        sent := connection.recv(1)
    ):
        os.kill(pid, sent[0])
    if ended in select.select([connection, ended], [], [])[0]:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(ConnectionError):  # the other side has gone without reading
            connection.sendall(status.to_bytes(4, "little", signed=True))
            connection.recv(1)
    else:
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _be_script(
    connection: socket.socket,
    files: list[int],
    numbers: list[int],
    words: list[str],
    environment: dict[str, str],
    folder: str,
) -> None:
    connection.close()
    os.setsid()
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 200) for file in files]  # above all numbers
    for file in files:
        os.close(file)
    for number, file in zip(numbers, high, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ |= environment
    sys.executable = environment.get(_STANDS_FOR_PYTHON, sys.executable)
    os.chdir(folder)
    try:
        if words[0] in ("-", "-c"):
            text = words.pop(1) if words[0] == "-c" else sys.stdin.read()
            sys.argv, main = words, types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(text, "<string>", "exec"), vars(main))
        elif words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, folder)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


# ---- in what stands for Python -------------------------------------------------------------------


def _be_python(name: str, words: list[str]) -> None:
    """Asks the server, passes signals on, and ends as the script does."""
    if words[0] == "-I":  # isolated from an environment that the server has, too
        words = words[1:]
    with socket.socket(socket.AF_UNIX) as server:
        numbers = map(int, os.listdir("/proc/self/fd"))  # the listing's own has gone
        there = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]
        given = {number: number for number in there if number != server.fileno()}
        server.connect(f"\0{name}{_MODELS_TOO if _names_models(words) else ''}")
        _ask(server, words, dict(os.environ), Path.cwd(), given)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
        status = int.from_bytes(server.recv(4), "little", signed=True)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "--as":
        _be_python(sys.argv[2], sys.argv[3:])
    _serve(sys.argv[1])
