"""Would the check around every test see what a test leaves behind?"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tiermem.swap.base.native import IoSettings, Queue
from tiermem.swap.store.store import TensorStore


@pytest.fixture
def leaks(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], list[str]]:
    """What the check would say now."""
    check = request.config.pluginmanager.getplugin(str(Path(__file__).with_name("conftest.py")))
    assert check is not None
    before = check._open_files(), check._threads(), check._live_stores()
    return lambda: check._leaks(*before, tmp_path)


def test_nothing_is_seen_where_nothing_is(leaks: Callable[[], list[str]]) -> None:
    assert leaks() == []


def test_descriptor_is_seen(leaks: Callable[[], list[str]], tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_CREAT)
    assert leaks() == [f"descriptor {fd} ({tmp_path / 'file'})"]
    os.close(fd)


def test_python_and_native_threads_are_seen(leaks: Callable[[], list[str]]) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    queue = Queue(IoSettings("threads", depth=1))
    # Python's, the queue's, the engine's
    assert len([leak for leak in leaks() if leak.startswith("thread")]) == 3
    queue.close()
    stop.set()
    thread.join()


def test_store_and_its_folder_are_seen(leaks: Callable[[], list[str]], tmp_path: Path) -> None:
    with TensorStore([tmp_path], 1 << 20):
        found = leaks()
    assert "1 live TensorStore" in found
    assert any(leak.startswith(f"folder {tmp_path}/tiermem-") for leak in found)
