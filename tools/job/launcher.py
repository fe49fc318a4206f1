"""Launcher: starts one process under a memory cap, sends its job, reads its channel, and reports
why it ended."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tiermem.swap.base.proc import bytes_in, read_table, read_word
from tiermem.tools.memory_limit import Charge, MemoryLimit
from tiermem.tools.words import format_bytes, handling, read_json, save_json

# ---- the job: one JSON file for a trainer process; peers' processes get the same file ------------


def num_ranks() -> int:
    """The ranks that a launcher such as torchrun has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_on_node() -> int:
    """Those of them on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks()))


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run: model, data, sizes. What has a default is not known of a fine-tuning before
    its process has read TRL's arguments."""

    name: str
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)  # a Hugging Face config.json
    checkpoint: str | None = None  # folder with safetensors to start from; None: from `seed`
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # DeepSpeed-style
    data: list[str] = dataclasses.field(default_factory=list)
    """Files and folders of text; empty: Python's own."""
    steps: int = 0
    seq: int = 1
    batch: int = 1
    seed: int = 0
    precision: str = "fp32"
    # whether blocks are recomputed in backward; None: the trainer chooses
    is_checkpointing: bool | None = None
    memory_limit_bytes: int | None = None
    threads: int | None = None  # None: what torch takes by itself
    nvme_paths: list[str] = dataclasses.field(default_factory=list)
    events_file: str | None = None  # where the trainer leaves its events
    resume: str | None = None  # the saved step to go on from
    save_dir: str | None = None  # where checkpoints go; None: none is saved
    save_every: int | None = None  # steps between two of them; None: at the end alone
    sustained: float | None = (
        None  # of what is free, to be written to get past the disks' fast caches; None: not at all
    )
    to_save: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What is saved of the job itself (train_job.py)."""
    num_ranks: int = dataclasses.field(default_factory=num_ranks)
    ranks_on_node: int = dataclasses.field(default_factory=ranks_on_node)
    sft: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of `tiermem sft` alone: TRL's arguments and what `SftOptions` says of places; the rest
    follows from these."""
    source: str = ""
    """What is read of `data`, on one line."""
    num_kept: int = 0
    """Blocks, the last ones, that keep their activations where the others are recomputed."""

    @property
    def compute(self) -> str:
        """The precision of products, once the config says it."""
        return compute_of(self.config, self.precision)

    @property
    def at_once(self) -> int | None:
        """Micro-batches that go through the model block by block; None: they go one after the
        other."""
        if (self.config.get("tiermem") or {}).get("accumulation") != "layers":
            return None
        return int(self.config.get("gradient_accumulation_steps") or 1)

    def save(self, file: Path) -> None:
        """Writes it."""
        save_json(file, dataclasses.asdict(self))

    @staticmethod
    def load(file: Path) -> Job:
        """Reads what `save` wrote."""
        return Job(**read_json(file))


def compute_of(config: Mapping[str, Any], precision: str) -> str:
    """The precision of products under a config, for weights of a precision."""
    return "fp32" if (config.get("tiermem") or {}).get("compute_dtype") == "fp32" else precision


# ---- the channel: one JSON object a line, over an inherited pipe ---------------------------------
#
#     {"kind": "phase", "name": "forward of step 3", "time_ns": ...}      before the phase begins: names the phase of a crash
#     {"kind": "step", "loss": ..., ...}                                   after each step
#     {"kind": "error", "type": "ValueError", "message": ..., "trace": ...}
#     {"kind": "done", ...}
#
# It is a pipe and not a file: it costs the writer no page cache and no I/O, and its messages
# survive the writer's end. When the launcher has ended, the writer gets BrokenPipeError, so a
# trainer ends at most one phase after its launcher.

Message = dict[str, Any]


class Channel:
    """The writing end. `fd` is inherited; None sends nowhere (a trainer run by hand)."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self.phase_name = "start"
        """What is under way."""

    def send(self, kind: str, **fields: Any) -> None:
        """Writes one message; blocks only while the launcher is 64 KiB behind."""
        if self._fd is None:
            return
        line = json.dumps({"kind": kind, "time_ns": time.monotonic_ns(), **fields}).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

    def phase(self, name: str, **fields: Any) -> None:
        """Says what begins now."""
        self.phase_name = name
        self.send("phase", name=name, **fields)


class LineReader:
    """The reading end of a pipe, line by line, never blocking."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.is_open = True
        self._rest = b""

    def lines(self) -> list[str]:
        """Complete lines that have arrived; at the end of the pipe, what is left as well, and
        nothing after that."""
        try:
            while chunk := os.read(self.fd, 65536):
                self._rest += chunk
        except BlockingIOError:
            pass
        else:
            self.is_open = False
        *complete, self._rest = self._rest.split(b"\n")
        if not self.is_open and self._rest:
            complete.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in complete]


# ---- the C heap of the trained process (glibc; elsewhere nothing changes) ------------------------
#
#     training    the heap keeps freed blocks of up to 32 MiB for reuse: new mappings would cost page faults for activations
#     building    blocks of 256 KiB or more get mappings of their own, which end when the blocks are freed
#
# A model larger than memory is built once, and each module's weights move to their home when the
# module is built. In the heap these weights would leave holes as large as the whole model. The
# holes' pages are given back, but training's blocks would later spread over the holes, so that the
# peak grows with the number of layers. Mappings leave no holes.

MAP_FROM_BYTES = 32 << 20
"""Blocks of this size and more are mapped while a model is trained: the largest that glibc
allows."""
KEEP_BYTES = 1 << 30
"""Free bytes at the heap's end that are kept."""

_MAP_FROM_BYTES_BUILDING = 256 << 10
# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@contextlib.contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Inside, blocks are treated as building wants it; afterwards as training does, and free pages
    are given back."""
    _set_threshold(_MAP_FROM_BYTES_BUILDING)
    try:
        yield
    finally:
        _set_threshold(MAP_FROM_BYTES)
        give_back_free_memory()


def give_back_free_memory() -> None:
    """Hands the heap's free pages back to the kernel, with those of objects that only the collector
    finds: memory freed after building is not counted during training."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)


def _set_threshold(num_bytes: int) -> None:
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, num_bytes)
        set_option(_M_TRIM_THRESHOLD, KEEP_BYTES)


# ---- resident memory of a process and its descendants, read from /proc ---------------------------
#
# VmRSS is the present resident memory, VmHWM its maximum so far. Pages that two processes share
# count twice, so the sum over a process tree is an upper bound. That is safe for a cap.

_SAMPLES_PER_WALK = 10


class Resident(NamedTuple):
    """Bytes that a process holds now, and the most that it ever held (VmRSS and VmHWM)."""

    now_bytes: int
    peak_bytes: int


def resident_of(pid: int | str = "self") -> Resident:
    """Reads the resident memory of a process, by default this one; zeros for a process that has
    ended."""
    table = read_table(f"/proc/{pid}/status")
    return Resident(bytes_in(table, "VmRSS"), bytes_in(table, "VmHWM"))


class ProcessTree:
    """Watches one process and what it starts. Descendants are looked for at every tenth sample."""

    def __init__(self, pid: int) -> None:
        self._root = pid
        self._pids = [pid]
        self._num_samples = 0
        self.peak_bytes = 0
        """The larger of the largest sum seen and the largest VmHWM of one process."""

    def sample(self) -> int:
        """Sums VmRSS over the tree, in bytes. A process that has ended counts nothing."""
        if self._num_samples % _SAMPLES_PER_WALK == 0:
            self._pids = _descendants(self._root)
        self._num_samples += 1
        found = [resident_of(pid) for pid in self._pids]
        now_bytes = sum(each.now_bytes for each in found)
        self.raise_peak(max(now_bytes, *(each.peak_bytes for each in found)))
        return now_bytes

    def raise_peak(self, num_bytes: int) -> None:
        """Takes note of a peak, such as a VmHWM that a process read of itself later than the last
        sample."""
        self.peak_bytes = max(self.peak_bytes, num_bytes)


def _descendants(root: int) -> list[int]:
    found = [root]
    for pid in found:  # grows while it is walked
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, read_word(children).split())
    return found


# ---- the launcher --------------------------------------------------------------------------------
#
#     launcher (small, not capped)                        child (capped, in a session of its own)
#       samples the tree's memory          <-- /proc
#       shows progress                     <-- channel      phases, steps, errors
#       keeps the child's output           <-- pipe         stdout and stderr
#       forwards Ctrl-C once, then kills   --> SIGINT       finishes its step and reports
#
# One thread waits for all of these, so there are no locks. Output that the child wrote before it
# was killed is still in its pipes. All measurements run outside the child, and the launcher's I/O
# does not count as the child's.

CHILD_ENVIRONMENT = {
    # Activations of a step come and go in sizes of 100 KiB to 32 MiB. Mapped anew each time they
    # cost page faults; kept in the heap they leave holes. Measured (24 layers of 1024 sharing one
    # block's weights, 128 tokens, 2 quiet cores, glibc 2.36), backward and peak above the imports:
    # mapped from 128 KiB on 1.24 s, 217 MiB; glibc's own moving threshold 0.72 s, 288 MiB; kept up
    # to 32 MiB and never trimmed 0.68 s, 294 MiB. The last does not depend on what was freed
    # before.
    "MALLOC_MMAP_THRESHOLD_": str(MAP_FROM_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(KEEP_BYTES),
    # A thread of OpenMP that waits for work keeps its core for 300,000 turns of libgomp, up to
    # 20 ms. 20,000 are long enough between two operations, and leave the core to a step that goes
    # on beside the maths. Measured (419m, exact, 128 tokens, overlap backward, 2 cores), medians of
    # 8 turns: an iteration takes 4.82 s instead of 5.55 s.
    "GOMP_SPINCOUNT": "20000",
}
"""What trainer and peers alike find in their environment, unless the user's has other values."""

CHANNEL_FD = "{channel}"
"""In a command line: stands for the number of the inherited descriptor that messages go to."""

_INTERVAL_S = 0.025
_WATCH_INTERVAL_S = 0.005
_SAMPLES_PER_FULL_CHARGE = 20


class Sample(NamedTuple):
    """Memory at one moment (CLOCK_MONOTONIC): resident in the tree, charged to the cgroup."""

    time_ns: int
    resident_bytes: int
    charged_bytes: int | None

    @property
    def held_bytes(self) -> int:
        """What the cap counts: bytes charged to the cgroup where one is the cap, else resident
        bytes."""
        return self.resident_bytes if self.charged_bytes is None else self.charged_bytes


class Observer:
    """What a launch tells its caller while it runs; every method may be overridden, none must
    block."""

    def on_message(self, message: Message) -> None:
        """A line of the channel."""

    def on_output(self, line: str) -> None:
        """A line of stdout or stderr."""

    def on_sample(self, sample: Sample) -> None:
        """A look at memory, some forty a second."""


@dataclasses.dataclass
class Outcome:
    """How a child ended and what it took; the launcher's loop completes it."""

    exit_code: int = 0  # as the shell counts: 128 + n for signal n
    phase: str = "start"  # the last one it named
    limit_kind: str = "none"
    limit_bytes: int | None = None
    is_killed_at_cap: bool = False
    is_stalled: bool = False  # killed because nothing was heard from it for too long
    is_interrupted: bool = False
    peak_rss_bytes: int = 0  # over the process tree: samples and VmHWM
    charge: Charge = dataclasses.field(default_factory=Charge)  # the kernel's counts at the end
    # largest sample of the cgroup's memory that is not page cache
    anonymous_peak_bytes: int | None = None
    wall_s: float = 0.0
    pid: int = 0  # it was, and the session of its children

    def describe(self) -> str:
        """One line: finished, or killed at the cap during which phase, by whose counters."""
        if self.is_killed_at_cap:
            cap = format_bytes(self.limit_bytes or 0)
            return (
                f"killed at the cap of {cap} during {self.phase} ({self.limit_kind}: "
                f"{self._evidence()})"
            )
        if self.is_stalled:
            return f"stopped: no progress during {self.phase}"
        if self.exit_code == 0:
            return "stopped as asked, cleanly" if self.is_interrupted else "finished"
        if self.exit_code > 128:
            with contextlib.suppress(ValueError):
                return f"ended by {signal.Signals(self.exit_code - 128).name} during {self.phase}"
        return f"ended with status {self.exit_code} during {self.phase}"

    def _evidence(self) -> str:
        if self.limit_kind == "watch":
            return f"the process tree held {format_bytes(self.peak_rss_bytes)}"
        parts = [f"oom_kill {self.charge.num_kills}"]
        if self.charge.num_hits:  # newer kernels leave the old hierarchy's count at 0
            parts.append(f"cap reached {self.charge.num_hits} times")
        if self.charge.peak_bytes is not None:
            parts.append(f"peak {format_bytes(self.charge.peak_bytes)}")
        return ", ".join(parts)


def launch(
    command: Sequence[str],
    limit: MemoryLimit,
    observers: Sequence[Observer] = (),
    environment: Mapping[str, str] | None = None,
    patience_s: float | None = None,
) -> Outcome:
    """Runs a command under `limit` to its end. Blocks; Ctrl-C goes to the child, a second one kills
    it.

    CHANNEL_FD in the command becomes the number of the descriptor for messages. `environment` is
    added to this process's, whose own values come first. A child that says nothing on its channel for `patience_s` is killed.
    The child and all it started are gone on return, also when this raises.

    Raises:
        OSError: the command cannot be started.
    """
    read_fd, write_fd = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, read_fd)
        try:
            child = subprocess.Popen(
                [str(write_fd) if word == CHANNEL_FD else word for word in limit.wrap(command)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd,),
                env={**(environment or {}), **os.environ},
                start_new_session=True,
            )
        finally:
            os.close(write_fd)
        stack.enter_context(child)  # closes the pipe and waits
        stack.callback(_kill, child)
        limit.attach(child.pid)
        watch = _Watch(child, limit, observers, LineReader(read_fd), patience_s)
        with handling({signal.SIGINT: watch.on_signal, signal.SIGTERM: watch.on_signal}):
            watch.run()
        return watch


class _Watch(Outcome):
    """The launcher's loop: selects on the child's end and its pipes, samples in between. The
    outcome is its state."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        limit: MemoryLimit,
        observers: Sequence[Observer],
        channel: LineReader,
        patience_s: float | None,
    ) -> None:
        assert child.stdout is not None
        super().__init__(limit_kind=limit.kind, limit_bytes=limit.limit_bytes, pid=child.pid)
        self._child = child
        self._limit = limit
        self._observers = observers
        self._channel = channel
        self._output = LineReader(child.stdout.fileno())
        self._tree = ProcessTree(child.pid)
        self._patience_s = patience_s
        self._heard = time.monotonic()
        self._num_samples = 0
        self._started = time.monotonic()

    def run(self) -> None:
        interval = _WATCH_INTERVAL_S if self.limit_kind == "watch" else _INTERVAL_S
        exit_fd = os.pidfd_open(self._child.pid)
        try:
            with selectors.DefaultSelector() as selector:
                for fd in (exit_fd, self._channel.fd, self._output.fd):
                    selector.register(fd, selectors.EVENT_READ)
                due = time.monotonic()
                while True:
                    ready = {key.fd for key, _ in selector.select(max(0.0, due - time.monotonic()))}
                    self._read(selector)
                    if exit_fd in ready:
                        break
                    if time.monotonic() >= due:
                        self._sample()
                        due = time.monotonic() + interval
        finally:
            os.close(exit_fd)
        # what it started and left behind; its own pid is still held by the kernel
        _kill(self._child)
        self._reap()
        self._read(None)
        self._conclude()

    def _reap(self) -> None:
        """Ends the child's entry with the kernel and learns its peak, which between fork and exec
        was the launcher's."""
        _, status, usage = os.wait4(self._child.pid, 0)
        self._child.returncode = os.waitstatus_to_exitcode(status)
        if usage.ru_maxrss * 1024 > resident_of().peak_bytes:
            self._tree.raise_peak(usage.ru_maxrss * 1024)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGINT and SIGTERM: the first goes to the child as SIGINT, the second kills
        it."""
        if self.is_interrupted:
            _kill(self._child)
        else:
            self.is_interrupted = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGINT)

    def _conclude(self) -> None:
        """Notes what is known once the child has ended."""
        self.charge = self._limit.charge(in_full=True)
        code = self._child.returncode
        # before it handled Ctrl-C, or after its last word
        if self.is_interrupted and code == -signal.SIGINT:
            code = 0
        self.exit_code = 128 - code if code < 0 else code
        self.is_killed_at_cap |= code != 0 and bool(self.charge.num_kills)
        self.peak_rss_bytes = self._tree.peak_bytes
        self.wall_s = time.monotonic() - self._started

    def _read(self, selector: selectors.BaseSelector | None) -> None:
        for line in self._channel.lines():
            try:
                message = json.loads(line)
            except json.JSONDecodeError:
                if self._channel.is_open:
                    raise
                continue  # the child was killed in the middle of its last line
            self._heard = time.monotonic()
            if message["kind"] == "phase":
                self.phase = message["name"]
            if peak := message.get("peak_rss_bytes"):
                self._tree.raise_peak(peak)
            for observer in self._observers:
                observer.on_message(message)
        for line in self._output.lines():
            for observer in self._observers:
                observer.on_output(line)
        if selector is not None:
            for reader in (self._channel, self._output):
                if not reader.is_open and reader.fd in selector.get_map():
                    selector.unregister(reader.fd)

    def _sample(self) -> None:
        resident = self._tree.sample()
        charge = self._limit.charge(in_full=self._num_samples % _SAMPLES_PER_FULL_CHARGE == 0)
        self._num_samples += 1
        if charge.anonymous_bytes is not None:
            self.anonymous_peak_bytes = max(self.anonymous_peak_bytes or 0, charge.anonymous_bytes)
        sample = Sample(time.monotonic_ns(), resident, charge.usage_bytes)
        for observer in self._observers:
            observer.on_sample(sample)
        self.is_killed_at_cap |= self._limit.is_over(resident)
        self.is_stalled = (
            self._patience_s is not None and time.monotonic() - self._heard > self._patience_s
        )
        if self.is_killed_at_cap or self.is_stalled:
            _kill(self._child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kills the child and what it started, unless its end was noted: its pid may be another
    process's by then."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
