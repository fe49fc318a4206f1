"""Workers: `pytest --workers 4` finds the tests once, and forks run them, a file at a time.

Finding the tests imports torch, transformers and whatever tests name: once here, instead of once a
worker. The servers of fork_server.py are shared too. A worker that dies ends the run, and the test
that it was at is named.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import signal
from collections.abc import Iterator
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import fork_server
import pytest
from forks import forked


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="forks that run the tests; 0: none")


def pytest_sessionstart(session: pytest.Session) -> None:
    """The servers import what they need while the tests are found."""
    if _is_wanted(session.config):
        fork_server.start_shared()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not _is_wanted(session.config) or session.testsfailed:
        return None
    with _started(session) as workers:
        at = dict.fromkeys(workers, "its first test")
        while at:
            for worker in wait(list(at)):
                assert isinstance(worker, Connection)
                try:
                    hook, told = worker.recv()
                except EOFError:
                    raise session.Interrupted(f"a worker died at {at[worker]}") from None
                if hook is None:
                    del at[worker]
                else:
                    at[worker] = _heard(session.config, hook, told) or at[worker]
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    return True


def _is_wanted(config: pytest.Config) -> bool:
    return bool(config.option.workers) and not config.option.collectonly


def _heard(config: pytest.Config, hook: str, told: Any) -> str | None:
    """Tells this process's plugins what a worker's were told; the test that began."""
    if hook == "warning":
        config.hook.pytest_warning_recorded.call_historic(kwargs=told)
    elif hook == "start":
        return str(told[0])
    elif hook == "finish":
        config.hook.pytest_runtest_logfinish(nodeid=told[0], location=told[1])
        config.get_terminal_writer().flush()  # a run that is killed has shown how far it came
    else:
        report = config.hook.pytest_report_from_serializable(config=config, data=told)
        config.hook.pytest_runtest_logreport(report=report)
    return None


@contextlib.contextmanager
def _started(session: pytest.Session) -> Iterator[list[Connection]]:
    """Workers, and what each says; they end with the context."""
    files = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
    queue, put = os.pipe()  # numbers of files, which whoever is free takes
    os.write(put, b"".join(number.to_bytes(4, "little") for number in range(len(files))))
    os.close(put)
    base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    capture: Any = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    # The first optimizer of a process imports it, which takes a second: once, not in each worker.
    import torch._dynamo  # noqa: F401

    gc.freeze()  # no worker's collection copies pages of what was found
    workers, pids = [], []
    try:
        for number in range(session.config.option.workers):
            mine, its = Pipe(duplex=False)
            work = functools.partial(_work, session, files, queue, its, base / f"worker{number}")
            pids.append(forked(work))
            its.close()
            workers.append(mine)
        capture.start_global_capturing()
        yield workers
    finally:
        os.close(queue)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for worker in workers:
            worker.close()


# ---- in a worker ---------------------------------------------------------------------------------


class _Reporter:
    """Sends what the terminal's reporter would print."""

    def __init__(self, config: pytest.Config, to: Connection) -> None:
        self._config, self._to = config, to

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._to.send(("start", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook.pytest_report_to_serializable
        self._to.send(("report", hook(config=self._config, report=report)))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._to.send(("finish", (nodeid, location)))

    def pytest_warning_recorded(
        self, warning_message: Any, when: Any, nodeid: str, location: Any
    ) -> None:
        warning_message.message = UserWarning(str(warning_message.message))
        warning_message.source = None
        told = {"warning_message": warning_message, "when": when, "nodeid": nodeid}
        self._to.send(("warning", told | {"location": location}))


def _work(
    session: pytest.Session, files: list[list[pytest.Item]], queue: int, to: Connection, base: Any
) -> None:
    fork_server.end_with_parent()
    random.seed()  # names of files are drawn
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(_Reporter(session.config, to))
    capture: Any = plugins.getplugin("capturemanager")
    capture.start_global_capturing()
    base.mkdir(mode=0o700)
    session.config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]

    def taken() -> list[pytest.Item]:
        number = os.read(queue, 4)
        return files[int.from_bytes(number, "little")] if number else []

    items = taken()
    while items:
        # looked at before the last one: what the next file does not share is torn down after it
        item = items.pop(0)
        items = items or taken()
        following = items[0] if items else None
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break
    to.send((None, None))
