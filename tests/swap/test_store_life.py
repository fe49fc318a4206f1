"""Does a store own what it opened from its first moment to its last, whoever forgets, forks, fails
or interrupts?"""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import Inside, fork

from tiermem.swap.base.native import Fault, IoSettings, Queue, Workers, widen_part
from tiermem.swap.base.tier import Tier
from tiermem.swap.memory.arena import Arena
from tiermem.swap.store.move import Move
from tiermem.swap.store.store import TensorStore

MakeStore = Callable[..., TensorStore]
Pattern = Callable[..., torch.Tensor]


# ---- the end -------------------------------------------------------------------------------------


def test_nothing_is_left_after_close_with_everything_under_way(
    tmp_path: Path, engine: str, pattern: Pattern
) -> None:
    with TensorStore([tmp_path], 16 << 20, IoSettings(engine, 65536, 8)) as store:
        for i in range(6):
            store.put(f"x{i}", pattern(1 << 20, seed=i), Tier.NVME)
        store.fetch("x0")
        store.fetch("x1").wait()
        store.read([("x2", 0, store.arena.take(1 << 20).tensor)], "range")
    assert list(tmp_path.iterdir()) == []
    assert store.stats().nvme_written_bytes == 6 << 20


def test_close_twice_does_nothing_and_a_closed_store_refuses(store: TensorStore) -> None:
    store.put("x", torch.ones(1), Tier.HOST)
    store.close()
    store.close()
    for use in (
        lambda: store.put("y", torch.ones(1), Tier.HOST),
        lambda: store.fetch("x"),
        lambda: store.view("x"),
    ):
        with pytest.raises(RuntimeError, match="this store is closed"):
            use()


def test_tensor_fetched_before_close_keeps_its_bytes(store: TensorStore) -> None:
    store.put("x", torch.arange(1000), Tier.NVME)
    tensor = store.fetch("x").wait()
    store.close()
    assert torch.equal(tensor, torch.arange(1000))


@pytest.mark.parametrize("number_that_fails", [0, 1])
def test_close_raises_a_write_nobody_waited_for_and_frees_everything(
    tmp_path: Path, number_that_fails: int
) -> None:
    store = TensorStore(
        [tmp_path], 1 << 20, faults=(Fault(number_that_fails, "error", errno.ENOSPC),)
    )
    for i in range(2):
        store.put(f"x{i}", torch.ones(5), Tier.NVME)
    with pytest.raises(
        OSError, match="the file system is full: free some space or add a path"
    ) as failure:
        store.close()
    assert failure.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_interrupted_close_still_ends_transfers_before_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: Pattern
) -> None:
    def interrupt(self: Move) -> None:
        raise KeyboardInterrupt

    store = TensorStore([tmp_path], 16 << 20)
    store.put("x", pattern(8 << 20), Tier.NVME)
    with monkeypatch.context() as patch:
        patch.setattr(Move, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.close()
    assert list(tmp_path.iterdir()) == []


def test_move_kept_beyond_its_store_says_what_became_of_it(
    store: TensorStore, pattern: Pattern
) -> None:
    written = store.put("x", pattern(1 << 20), Tier.NVME)
    store.put("y", pattern(1 << 20), Tier.NVME)
    store.fetch("y").wait()
    store.close()
    written.wait()
    assert not written.has_failed


def test_store_forgotten_without_close_leaves_no_file_thread_or_descriptor(
    tmp_path: Path, pattern: Pattern
) -> None:
    store = TensorStore([tmp_path], 16 << 20)
    for i in range(8):
        store.put(f"x{i}", pattern(1 << 20), Tier.NVME)
    store.fetch("x0")
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []  # the rest is held by the check around every test


@pytest.mark.slow
def test_process_that_ends_without_close_leaves_no_file(tmp_path: Path) -> None:
    script = (
        "import torch; from tiermem.swap.store.store import TensorStore; from "
        "tiermem.swap.base.tier import Tier\n"
        f"store = TensorStore([{str(tmp_path)!r}], 8 << 20)\n"
        "store.put('x', torch.ones(1 << 20), Tier.NVME); store.fetch('x')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


# ---- the beginning -------------------------------------------------------------------------------


def test_store_that_cannot_have_its_budget_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="host_bytes is 0; give a number of bytes"):
        TensorStore([tmp_path], host_bytes=0)
    with pytest.raises(OSError, match="reserving"):
        TensorStore([tmp_path], host_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_store_that_cannot_have_its_paths_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Arena] = []
    close = Arena.close

    def watch(self: Arena) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(Arena, "close", watch)
    with pytest.raises(FileNotFoundError):
        TensorStore([tmp_path, tmp_path / "missing"])
    assert len(closed) == 1
    assert list(tmp_path.iterdir()) == []


def test_put_without_a_path_is_refused() -> None:
    with TensorStore(host_bytes=1 << 20) as store:
        with pytest.raises(ValueError, match="no path was given"):
            store.put("x", torch.ones(1), Tier.NVME)
        assert "x" not in store


def test_engine_that_cannot_run_is_told_at_the_first_transfer(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSYS, "no I/O queue (engine 'uring')")

    store = make_store(engine="uring")
    store.put("h", torch.ones(1), Tier.HOST)
    store.reserve("n", (5,), torch.float32, Tier.NVME)
    with monkeypatch.context() as patch:
        patch.setattr("tiermem.swap.disk.queue.Queue", refuse)
        with pytest.raises(OSError, match="no I/O queue"):
            store.put("x", torch.ones(5), Tier.NVME)
        with pytest.raises(OSError, match="no I/O queue"):
            store.fetch("n")
    assert "x" not in store
    assert store._entries["n"].state.name == "HOME"
    assert store.arena.carved_bytes == 4096  # "h" alone
    store.fetch("n").wait()


# ---- settling ------------------------------------------------------------------------------------


def test_settle_registers_memory_carved_since_and_spares_fetches_under_way(
    make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store(host_bytes=64 << 20)
    store.put("x", pattern(1 << 20), Tier.NVME).wait()
    queues = store.queues
    store.flush()
    assert store.queues is queues  # nothing was carved since it was opened
    coming = store.fetch("x")
    buffer = store.arena.take(4 << 20).tensor
    ranged = store.read([("x", 0, buffer[: 1 << 20])], "range")
    store.flush()
    assert store.queues is not queues
    assert torch.equal(coming.wait(), pattern(1 << 20))
    assert torch.equal(ranged.wait()[0], pattern(1 << 20))
    assert store.stats().nvme_read_bytes == 2 << 20  # counters outlive their queue


def test_stats_say_where_bytes_are_and_which_engine_moves_them(
    make_store: MakeStore, engine: str
) -> None:
    store = make_store(engine=engine)
    assert store.stats().engine == "none yet"
    store.put("x", torch.ones(1024), Tier.NVME).wait()
    store.put("y", torch.ones(1024), Tier.HOST)
    stats = store.stats()
    assert (stats.nvme_bytes, stats.host_bytes, stats.host_peak_bytes) == (4096, 4096, 4096)
    assert stats.engine == engine
    assert stats.engine_why


def test_disk_reserved_for_a_run_is_refused_beyond_disk_bytes(make_store: MakeStore) -> None:
    store = make_store(disk_bytes=1 << 20)
    with pytest.raises(OSError, match="exceed disk_bytes"):
        store.reserve_disk((1 << 20) + 1)
    store.reserve_disk(1 << 20)


# ---- threads and forks ---------------------------------------------------------------------------


def test_threads_use_one_store_at_once(make_store: MakeStore, pattern: Pattern) -> None:
    store = make_store(host_bytes=4 << 20)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(30):
                name = f"{number}/{step}"
                store.put(name, pattern(100_000, seed=number), Tier.NVME)
                fetched = store.fetch(name).wait()
                assert torch.equal(fetched, pattern(100_000, seed=number))
                fetched.fill_(step)
                store.release(name, dirty=True)
                assert (store.fetch(name).wait() == step).all()
                store.drop(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.arena.carved_bytes == store.stats().nvme_bytes == 0


def test_threads_fetch_one_tensor_at_once(make_store: MakeStore, pattern: Pattern) -> None:
    store = make_store()
    store.put("x", pattern(1 << 20), Tier.NVME).wait()
    for _ in range(20):
        barrier = threading.Barrier(4)
        seen: list[int] = []

        def fetch(barrier: threading.Barrier = barrier, seen: list[int] = seen) -> None:
            barrier.wait()
            seen.append(store.fetch("x").wait().data_ptr())

        threads = [threading.Thread(target=fetch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 4
        assert len(set(seen)) == 1
        store.release("x")
    assert store.stats().nvme_read_bytes == 20 << 20


def test_forked_child_disturbs_nothing_and_deletes_nothing(
    store: TensorStore, tmp_path: Path, pattern: Pattern
) -> None:
    store.put("x", pattern(1 << 20), Tier.NVME)
    store.put("y", torch.ones(4), Tier.HOST)
    store.fetch("x")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            uses: list[Callable[[], object]] = [
                lambda: store.put("z", torch.ones(4), Tier.HOST),
                lambda: store.fetch("y"),
                lambda: store.release("x"),
                lambda: store.view("y"),
                lambda: store.drop("x"),
                lambda: store.reserve_disk(1 << 20),
                lambda: store.flush(),
            ]
            refused = 0
            for use in uses:
                try:
                    use()
                except RuntimeError as error:
                    refused += "forked child" in str(error)
            store.close()
            del store
            gc.collect()
            code = 0 if refused == len(uses) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(store.fetch("x").wait(), pattern(1 << 20))


def test_child_that_exits_by_itself_deletes_nothing(tmp_path: Path) -> None:
    script = (
        "import os, sys, torch; from tiermem.swap.store.store import TensorStore; from "
        "tiermem.swap.base.tier import Tier\n"
        f"store = TensorStore([{str(tmp_path)!r}], 8 << 20)\n"
        "store.put('x', torch.ones(1000), Tier.NVME).wait()\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.exit(0)\n"  # runs what is registered for the end of the process
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert store.fetch('x').wait().sum() == 1000\n"
        "store.close()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_settings_reach_the_queue(tmp_path: Path) -> None:
    with TensorStore(
        [tmp_path], 8 << 20, IoSettings("threads", block_bytes=4096, depth=2, threads=1)
    ) as store:
        store.put("x", torch.ones(8192, dtype=torch.uint8), Tier.NVME).wait()
        assert sum(each.blocks for each in store.queues.counters_by_path()) == 2


def test_a_forked_child_may_use_no_threads_queue_or_arena_of_its_parent(tmp_path: Path) -> None:
    workers, queue, arena = Workers(2), Queue(IoSettings("threads")), Arena(1 << 20)
    uses: list[Callable[[], object]] = [
        lambda: widen_part(workers, torch.zeros(9, dtype=torch.bfloat16)),
        queue.counters,
        lambda: arena.take(4096),
    ]

    def use_all(inside: Inside) -> None:
        for use in uses:
            with pytest.raises(RuntimeError, match="forked child may not use it"):
                use()
        workers.close()
        inside.say("refused")

    child = fork(use_all)
    said = child.hear()
    child.end()
    assert said == "refused"
    for use in uses:
        use()
    for each in (workers, queue, arena):
        each.close()
