"""Fork server: scripts run in forks of one process that has imported torch and tiermem, without the
seconds that takes.

    run(["script.py", "word"], timeout_s=60)     as subprocess.run; a script may also be "-c" and its lines
    with start(["script.py"], RANK="0") as script: script.wait(60)      several at once

The server is started when it is first asked, has computed nothing and has no threads. It ends with
the process that started it. A script sees its own words, environment, session and output, as if
Python had been started for it; differences are that PYTHONPATH comes too late, that `tests` is in
sys.path, and that functions registered with atexit do not run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
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


class Started:
    """A script that runs in a fork of the server. Leaving the context ends it and all of its
    session."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self._words = words
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._server = _connected()
        request = json.dumps(
            {"words": words, "environment": environment, "folder": os.getcwd()}
        ).encode()
        descriptors = [self._out.fileno(), self._err.fileno()]
        socket.send_fds(self._server, [len(request).to_bytes(4, "little")], descriptors)
        self._server.sendall(request)

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


def start(words: list[str], **variables: str) -> Started:
    """Starts a script with these words, in this environment and `variables`. Does not block once
    the server is there."""
    return Started([str(word) for word in words], os.environ | variables)


def run(
    words: list[str], timeout_s: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end. Blocks. Raises subprocess.TimeoutExpired, after which nothing of it
    is left."""
    with start(words, **variables) as script:
        status = script.wait(timeout_s)
        return subprocess.CompletedProcess(words, status, script.stdout(), script.stderr())


def _text(file: Any) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _connected() -> socket.socket:
    """A connection to the server of this process, which is started when there is none."""
    if _server.get("pid") != os.getpid():
        _start_server()
    connection, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + _STARTS_WITHIN_S
    while True:
        try:
            connection.connect(_server["address"])
            return connection
        except ConnectionRefusedError:
            if _server["process"].poll() is not None or time.monotonic() > deadline:
                connection.close()
                raise
            time.sleep(0.01)


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
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    _import_everything()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")  # which leaves no file
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks that answer
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


def _answer(connection: socket.socket) -> None:
    """Runs one script, says how it ended, and kills its session when the other side has gone or has
    read that."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, outputs, _, _ = socket.recv_fds(connection, 4, 2)
    length, request = int.from_bytes(size, "little"), b""
    while len(request) < length:
        request += connection.recv(length - len(request))
    told = json.loads(request)
    pid = forked(lambda: _be_script(connection, outputs, **told))
    ended = os.pidfd_open(pid)
    if ended in select.select([connection, ended], [], [])[0]:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.sendall(status.to_bytes(4, "little", signed=True))
        connection.recv(1)  # nothing, when the other side has gone
    else:
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _be_script(
    connection: socket.socket,
    outputs: list[int],
    words: list[str],
    environment: dict[str, str],
    folder: str,
) -> None:
    connection.close()
    os.setsid()
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output, descriptor)
        os.close(output)
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    try:
        if words[0] == "-c":
            sys.argv, main = ["-c", *words[2:]], types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(words[1], "<string>", "exec"), vars(main))
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
