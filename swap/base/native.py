"""The binding: the only Python file that imports `_tiermem_native`.

It turns the C API of native/tiermem.h into three objects with a lifetime (Map, Queue, Workers) and
functions that call kernels with tensors (parts.py describes the optimizer's). tile_program.py does
so for step programs. Here -errno becomes OSError, and a failed transfer becomes TransferError,
which has path, offset and length. cffi releases the GIL during every call.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from _tiermem_native import ffi as ffi
from _tiermem_native import lib as lib

from tiermem.swap.base.engines import ENGINES as ENGINES
from tiermem.swap.base.errors import remedy
from tiermem.swap.base.parts import (
    MOMENTS,
    SPLIT,
    Dither,
    Moment,
    Packed,
    Quantised,
    StepParts,
    StepRule,
    check_moment,
    check_part,
    check_parts,
)
from tiermem.swap.base.ranges import ALIGNMENT, ByteRange

_MAX_BLOCK_BYTES = 1 << 30  # below what one system call transfers
FAULTS = {"error": lib.TM_FAULT_ERROR, "short": lib.TM_FAULT_SHORT}
FAULTS |= {"late": lib.TM_FAULT_LATE, "refused": lib.TM_FAULT_REFUSED}
NORM_BLOCK = int(lib.TM_NORM_BLOCK)
NUM_LATENCY_BUCKETS = int(lib.TM_LATENCY_BUCKETS)
READ = int(lib.TM_READ)
WRITE = int(lib.TM_WRITE)
SYNC = int(lib.TM_SYNC)
URGENT = int(lib.TM_URGENT)
NORMAL = int(lib.TM_NORMAL)
BACKGROUND = int(lib.TM_BACKGROUND)

_NUMPY_NAMES = {"uint64_t": np.uint64, "int64_t": np.int64, "int32_t": np.int32}
_VERBS = {READ: "reading", WRITE: "writing", SYNC: "syncing"}
_RULES = {name: getattr(lib, f"TM_{name.upper()}") for name in MOMENTS}
# fields of StepRule by the same names
SCALARS = tuple(name for name, _ in ffi.typeof("tm_step_scalars").fields)
_DTYPES = {
    None: lib.TM_NONE,
    torch.float32: lib.TM_F32,
    torch.bfloat16: lib.TM_BF16,
    torch.float16: lib.TM_F16,
}


class TransferError(OSError):
    """A failed transfer of a block, with errno, filename, offset, length and advice."""

    def __init__(self, code: int, kind: int, path: str, offset: int, length: int) -> None:
        refused = "the file system refuses this alignment or O_DIRECT"
        advice = refused if code == errno.EINVAL else remedy(code) or "see the kernel log"
        what = (
            f"{_VERBS.get(kind, 'moving')} {length} bytes at offset {offset} failed: "
            f"{os.strerror(code)} ({advice})"
        )
        super().__init__(code, what, path)
        self.kind = kind
        self.offset = offset
        self.length = length

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            type(self),
            (self.errno, self.kind, self.filename, self.offset, self.length),
            self.__dict__,
        )


@dataclasses.dataclass(frozen=True)
class IoSettings:
    """How the queue of each path moves blocks. Raises ValueError for what no engine takes."""

    engine: str = "auto"
    """A name of swap/base/engines.py."""
    block_bytes: int = 1 << 20
    """Transfers are split into blocks of this size."""
    depth: int = 64
    """Blocks in flight, on each path, of reads and writes together."""
    threads: int = 0
    """Of the threads engine; 0 lets it choose."""
    single_submit: bool = False
    """Hand each block to the kernel by itself, instead of all that are ready at once."""
    overlap_events: bool = True
    """Hand over new blocks while earlier ones are in flight; False: only when all of those have
    ended."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine is {self.engine!r}; allowed are {', '.join(ENGINES)}")
        blocks = range(ALIGNMENT, _MAX_BLOCK_BYTES + 1, ALIGNMENT)
        if self.block_bytes not in blocks:
            raise ValueError(
                f"block_bytes is {self.block_bytes!r}; allowed are multiples of {ALIGNMENT} up to "
                f"{_MAX_BLOCK_BYTES}"
            )
        if self.depth not in range(1, 4097):
            raise ValueError(f"depth is {self.depth!r}; allowed are 1 to 4096 blocks in flight")
        if self.threads not in range(1025):
            raise ValueError(
                f"threads is {self.threads!r}; allowed are 0 (the engine chooses) to 1024"
            )


_USUAL = IoSettings()


class Op(NamedTuple):
    """One transfer between memory and a file; the memory belongs to the queue until its tag is
    answered."""

    kind: int
    fd: int
    address: int
    length: int
    offset: int


class Blocks(NamedTuple):
    """Many transfers of one length between memory and one file: int64 arrays of addresses and file
    offsets."""

    kind: int
    fd: int
    addresses: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    length: int


class Answer(NamedTuple):
    """The result of a tag; times are CLOCK_MONOTONIC nanoseconds, error is 0 or an errno."""

    error: int
    fd: int
    kind: int
    offset: int
    length: int
    num_bytes: int
    submitted_ns: int
    started_ns: int
    finished_ns: int


class Fault(NamedTuple):
    """A fault that the fault-injecting engine produces, for tests: see native/tiermem.h."""

    serial: int
    kind: str
    value: int
    repeat: int = 1


class Counters(NamedTuple):
    """Totals of a queue, counted from the kernel's completions."""

    read_bytes: int
    written_bytes: int
    blocks: int
    resumed: int
    kernel_entries: int
    busy_ns: int
    """Nanoseconds with at least one block in flight."""
    wanted_ns: int = 0
    """Nanoseconds with at least one unanswered tag; equal to busy_ns if the disk never pauses."""
    cpu_ns: int = 0
    """CPU time, user and system, of the queue's own threads, in nanoseconds."""


def error_of(answer: Answer, files: Mapping[int, str]) -> TransferError | None:
    """The error that an answer holds, if any; `files` names the file behind each descriptor."""
    if not answer.error:
        return None
    path = files.get(answer.fd, f"descriptor {answer.fd}")
    return TransferError(answer.error, answer.kind, path, answer.offset, answer.length)


def check(code: int, what: str) -> int:
    """Returns a non-negative code; turns -errno into OSError that says what was tried."""
    if code < 0:
        raise OSError(-code, f"{what}: {os.strerror(-code)}")
    return code


def check_process(owner: int, what: str) -> None:
    """Raises RuntimeError in a fork of the process that opened something: threads and arena memory
    are not in the child."""
    if os.getpid() != owner:
        raise RuntimeError(
            f"{what} belongs to the process that opened it; a forked child may not use it. Open "
            "one in the child, or start it with spawn"
        )


class Map:
    """Address space, with huge pages if the system has them; only committed ranges are resident. A
    fork does not inherit it.

    is_nan: it holds NaN in each format of floating-point numbers instead, takes no memory until it
        is written, and a fork inherits it.
    """

    def __init__(self, num_bytes: int, is_nan: bool = False) -> None:
        base = ffi.new("void **")
        open_map = lib.tm_map_nan if is_nan else lib.tm_map_open
        check(open_map(num_bytes, base), f"reserving {num_bytes} bytes of address space")
        self._base = ffi.gc(
            base[0], functools.partial(_unmap, num_bytes=num_bytes, owner=os.getpid()), num_bytes
        )
        self.num_bytes = num_bytes
        self.address = int(ffi.cast("uintptr_t", self._base))

    def bind(self, node: int) -> None:
        """Prefers a memory node for pages that are not resident yet. Raises OSError where the
        kernel refuses."""
        check(
            lib.tm_map_bind(self._base, self.num_bytes, node), f"preferring memory of node {node}"
        )

    def commit(self, offset: int, num_bytes: int) -> None:
        """Makes a page-aligned range resident. Raises OSError (ENOMEM) when the system has none
        left."""
        check(
            lib.tm_map_commit(self._base + offset, num_bytes),
            f"committing {num_bytes} bytes of memory",
        )

    def release(self, offset: int, num_bytes: int) -> None:
        """Gives the pages of a range back to the kernel; their content is lost."""
        check(
            lib.tm_map_release(self._base + offset, num_bytes),
            f"releasing {num_bytes} bytes of memory",
        )

    def tensor(self) -> torch.Tensor:
        """The whole range as one uint8 tensor, which keeps it mapped."""
        return torch.frombuffer(ffi.buffer(self._base, self.num_bytes), dtype=torch.uint8)

    def close(self) -> None:
        """Gives the memory up: it is unmapped when the last tensor that uses it is gone. May be
        called twice."""
        self._base = ffi.NULL


class Queue:
    """A native I/O queue with its own thread.

    Args:
        io: engine, block size and depth.
        files: descriptors and their files' names, for errors. Those that it holds now are
            registered with the kernel where that allows, and stay open until the queue is closed.
        regions: memory to register with the kernel where it allows.
        faults: lies for tests.

    Raises:
        OSError: a named engine cannot run here; the message says why.
    """

    def __init__(
        self,
        io: IoSettings = _USUAL,
        files: Mapping[int, str] = MappingProxyType({}),
        regions: Sequence[ByteRange] = (),
        faults: Sequence[Fault] = (),
    ) -> None:
        self._files = files
        self._owner = os.getpid()
        self._tags = itertools.count(1)  # its next() is one step, whichever thread asks
        self._queue = ffi.NULL
        starts = ffi.new("void *[]", [ffi.cast("void *", address) for address, _ in regions])
        sizes = ffi.new("uint64_t[]", [size for _, size in regions])
        rules = ffi.new(
            "tm_fault[]", [(f.serial, f.value, FAULTS[f.kind], f.repeat) for f in faults]
        )
        descriptors = ffi.new("int32_t[]", list(files))
        in_order = lib.TM_QUEUE_NO_OVERLAP * (not io.overlap_events)
        options = {
            "engine": getattr(lib, f"TM_ENGINE_{io.engine.upper()}"),
            "depth": io.depth,
            "threads": io.threads,
            "block_bytes": io.block_bytes,
            "num_regions": len(regions),
            "regions": starts,
            "region_bytes": sizes,
            "num_faults": len(faults),
            "faults": rules,
            "num_files": len(files),
            "files": descriptors,
            "flags": lib.TM_QUEUE_SINGLE_SUBMIT * io.single_submit | in_order,
        }
        queue = ffi.new("tm_queue **")
        chosen = ffi.new("int32_t *")
        why = ffi.new("char[]", 2048)
        try:
            code = lib.tm_queue_open(
                ffi.new("tm_queue_options *", options), queue, chosen, why, 2048
            )
            self.why = ffi.string(why).decode(errors="replace")
            if code < 0:
                raise OSError(
                    -code, f"no I/O queue (engine {io.engine!r}): {os.strerror(-code)}; {self.why}"
                )
            self.engine = ENGINES[chosen[0]]
            self._queue = queue[0]
        except BaseException:
            if queue[0] != ffi.NULL:
                lib.tm_queue_close(queue[0])
            raise

    def new_tag(self) -> int:
        """A tag that no transfer has."""
        return next(self._tags)

    def submit(self, ops: Sequence[Op], priority: int = NORMAL, tag: int | None = None) -> int:
        """Starts transfers and returns the one tag that answers for all of them. Never waits.
        Raises OSError.

        tag: a `new_tag`, for a caller that has to know it also when the call is interrupted; None:
            a new one.
        """
        tag = next(self._tags) if tag is None else tag
        cast = ffi.cast
        rows = [
            (cast(_VOID, op.address), op.length, op.offset, tag, op.fd, op.kind, priority, 0)
            for op in ops
        ]
        batch = ffi.new("tm_op[]", rows)
        check(
            lib.tm_queue_submit(self.handle, batch, len(rows)), f"submitting {len(rows)} transfers"
        )
        return tag

    def submit_blocks(self, blocks: Blocks, priority: int = NORMAL, tag: int | None = None) -> int:
        """Starts many transfers of one length, and returns the one tag that answers for all. Never
        waits.

        addresses[i] in memory goes to or comes from offsets[i] in the file; nothing is done per
        block in Python, so that small ones are cheap. Raises ValueError for arrays of different
        lengths, OSError when a block is malformed.
        """
        kind, fd, addresses, offsets, length = blocks
        if addresses.ndim != 1 or addresses.shape != offsets.shape:
            raise ValueError(
                f"addresses and offsets are two rows of one length; given {addresses.shape}, "
                f"{offsets.shape}"
            )
        tag = next(self._tags) if tag is None else tag
        ops = np.zeros(len(addresses), _OP_DTYPE)
        ops["buffer"] = addresses
        ops["offset"] = offsets
        ops["length"] = length
        ops["tag"] = tag
        ops["fd"] = fd
        ops["kind"] = kind
        ops["priority"] = priority
        batch = ffi.cast("tm_op *", ops.ctypes.data)
        check(lib.tm_queue_submit(self.handle, batch, len(ops)), f"submitting {len(ops)} transfers")
        return tag

    def new_answer(self) -> Any:
        """Room for the answer of one tag, for `wait`."""
        return ffi.new("tm_answer *")

    def wait(self, tag: int, timeout_s: float | None = None, into: Any = None) -> Answer | None:
        """Blocks until a tag is answered; None after timeout_s. The answer may hold an error: see
        `raise_for`.

        into: a `new_answer`, which keeps the answer when the call is interrupted, for the next
            call; None: nothing does.
        """
        answer = self.new_answer() if into is None else into
        timeout_ns = -1 if timeout_s is None else int(timeout_s * 1e9)
        code = lib.tm_queue_wait(self.handle, tag, timeout_ns, answer)
        if code == -errno.ETIMEDOUT:
            return None
        # else an interrupted call has taken it
        if code != -errno.ENOENT or not answer.submitted_ns:
            check(code, f"waiting for tag {tag}")
        a = answer[0]
        return Answer(
            a.error,
            a.fd,
            a.kind,
            a.offset,
            a.length,
            a.bytes,
            a.submitted_ns,
            a.started_ns,
            a.finished_ns,
        )

    def raise_for(self, answer: Answer) -> None:
        """Raises TransferError when the answer holds an error."""
        if (error := error_of(answer, self._files)) is not None:
            raise error

    def finish(self, tag: int) -> None:
        """Blocks until a tag is answered; raises TransferError when the answer holds an error."""
        answer = self.wait(tag)
        assert answer is not None  # no time-out was given
        self.raise_for(answer)

    def promote(self, tag: int, priority: int = URGENT) -> None:
        """Raises the priority of blocks that the kernel does not have yet."""
        check(lib.tm_queue_promote(self.handle, tag, priority), f"promoting tag {tag}")

    def cancel(self, tag: int) -> None:
        """Drops blocks that the kernel does not have yet. The caller must still wait for the
        tag."""
        check(lib.tm_queue_cancel(self.handle, tag), f"cancelling tag {tag}")

    def counters(self) -> Counters:
        """Totals so far."""
        c = ffi.new("tm_counters *")
        check(lib.tm_queue_counters(self.handle, c), "reading the queue's counters")
        return Counters(*(getattr(c, name) for name in Counters._fields))

    def latencies(self, kind: int) -> npt.NDArray[np.uint64]:
        """How many blocks of a kind (READ, WRITE) took how long, by bucket: see `latency_edges`."""
        counts = np.zeros(NUM_LATENCY_BUCKETS, np.uint64)
        pointer = ffi.cast("uint64_t *", counts.ctypes.data)
        check(lib.tm_queue_latencies(self.handle, kind, pointer), "reading the queue's latencies")
        return counts

    def close(self) -> int:
        """Finishes what was submitted, stops the thread; returns how many errors were not waited
        for."""
        queue = self._queue
        self._queue = ffi.NULL
        if queue == ffi.NULL:
            return 0
        code = int(lib.tm_queue_close(queue))
        return 0 if code == -errno.EPIPE else check(code, "closing the queue")

    @property
    def handle(self) -> Any:
        """The native queue. Raises OSError when it is closed, RuntimeError in a forked child."""
        if self._queue == ffi.NULL:
            raise OSError(errno.ESHUTDOWN, "this I/O queue is closed")
        check_process(self._owner, "this I/O queue")
        return self._queue


def latency_edges() -> npt.NDArray[np.float64]:
    """The least latency of each bucket, in microseconds, and the end of the last one."""
    return np.array([lib.tm_latency_floor_ns(i) for i in range(NUM_LATENCY_BUCKETS + 1)]) / 1e3


class Workers:
    """Threads that the kernels share; `num_threads` counts the caller.

    cores: where they may run, one each and off the caller's own, num_threads of them at least;
        none: anywhere.
    """

    def __init__(self, num_threads: int, cores: Sequence[int] = ()) -> None:
        workers = ffi.new("tm_workers **")
        check(lib.tm_workers_open(num_threads, workers), f"starting {num_threads} threads")
        self._handle = workers[0]
        self._owner = os.getpid()
        self.num_threads = num_threads
        if cores:
            code = lib.tm_workers_pin(self.handle, ffi.new("int32_t[]", list(cores)), len(cores))
            if code < 0 and code != -errno.ENOTSUP:
                self.close()
                check(code, f"pinning {num_threads} threads to cores {list(cores)}")

    @property
    def handle(self) -> Any:
        """For kernels. Raises RuntimeError in a forked child: neither the threads nor what the
        kernels work on are there."""
        check_process(self._owner, "this pool of threads")
        return self._handle

    def close(self) -> None:
        """Stops the threads; calling it twice does nothing, nor does calling it in a forked
        child."""
        handle = self._handle
        self._handle = ffi.NULL
        if handle != ffi.NULL and os.getpid() == self._owner:
            check(lib.tm_workers_close(handle), "stopping threads")


def optimizer_step(
    workers: Workers,
    rule: StepRule,
    parts: StepParts,
    dither: Dither | None = None,
    start_moments: bool = False,
) -> None:
    """Steps master and moments in place in one pass, and writes the weight the model sees. Blocks;
    GIL free.

    With `dither` every part of the state below fp32 is rounded stochastically, else to nearest
    even. start_moments: moments start at zero (adagrad: at rule.initial) without being read. Raises
    ValueError for parts that do not fit together. Formulas and sources: tm_optimizer_step in native/tiermem.h.
    """
    numbers = StepNumbers(rule, 0 if dither is None else dither.step)
    run_steps(
        workers,
        [step_struct(rule, parts, numbers, dither, start_moments)],
        f"{rule.name} step",
    )


def run_steps(workers: Workers, structs: Iterable[Any], what: str) -> None:
    """Runs steps of `step_struct`, one after the other. Blocks; GIL free. Raises OSError; `what`
    begins its message."""
    handle = workers.handle
    for struct in structs:
        check(lib.tm_optimizer_step(handle, struct), what)


class StepNumbers:
    """The scalars and the number of a parameter's step, at which the native steps of all its tiles
    point."""

    def __init__(self, rule: StepRule, number: int) -> None:
        self.struct = ffi.new("tm_step_numbers *")
        self.set(rule, number)

    def set(self, rule: StepRule, number: int) -> None:
        """Goes on to another step. A run that has been given steps keeps the numbers of that
        time."""
        self.struct.scalars = step_scalars(rule)
        self.struct.step = number


def step_struct(
    rule: StepRule,
    parts: StepParts,
    numbers: StepNumbers,
    dither: Dither | None,
    start_moments: bool,
) -> Any:
    """The tm_step of `optimizer_step`; it points at the numbers and into the parts, which the
    caller keeps alive. Raises ValueError."""
    check_parts(rule, parts)
    step = ffi.new("tm_step *")
    step.n = parts.grad.numel()
    step.rule = _RULES[rule.name]
    _set_part(step.weight, parts.weight)
    _set_part(step.master, parts.master)
    _set_part(step.grad, parts.grad)
    for slot, kind, moment in zip(step.moments, MOMENTS[rule.name], parts.moments, strict=False):
        _set_part(slot, moment, kind.is_positive)
    if parts.source is not None:
        _set_sources(step, parts, parts.source)
    if dither is not None:
        step.rounding = lib.TM_STOCHASTIC
        step.key = dither.key
        step.first_element = dither.first_element
    step.flags = (
        start_moments * lib.TM_STEP_START_MOMENTS
        | rule.maximize * lib.TM_STEP_MAXIMIZE
        | rule.nesterov * lib.TM_STEP_NESTEROV
    )
    step.numbers = numbers.struct
    return step


@functools.lru_cache(maxsize=16)
def step_scalars(rule: StepRule) -> Any:
    """The scalars of a rule, as tm_step_numbers has them."""
    return ffi.new("tm_step_scalars *", {field: getattr(rule, field) for field in SCALARS})[0]


def widen_part(
    workers: Workers, part: Moment, weight: torch.Tensor | None = None, is_positive: bool = False
) -> torch.Tensor:
    """Returns a part in fp32, exactly: a moment, a weight, or a split master (int16, uint16) read
    with its bf16 weight.

    is_positive: of 8-bit codes, whether they are those of a moment that is never negative. Blocks;
        raises ValueError.
    """
    numel = check_part(part, weight)
    values = torch.empty(numel)
    code = lib.tm_part_widen(
        workers.handle, numel, _part(part, is_positive), _pointer(weight), _pointer(values)
    )
    check(code, "widening a part")
    return values


def narrow_part(
    workers: Workers,
    values: torch.Tensor,
    part: Moment,
    weight: torch.Tensor | None = None,
    is_positive: bool = False,
) -> None:
    """Writes fp32 values into a part, rounded to nearest even; a split master writes its bf16
    weight too, exactly.

    Blocks; raises ValueError. See `widen_part`.
    """
    numel = check_part(part, weight)
    values = values.to(torch.float32)
    check_moment("values", values, numel)
    code = lib.tm_part_narrow(
        workers.handle, numel, _pointer(values), _part(part, is_positive), _pointer(weight)
    )
    check(code, "narrowing to a part")


def pack_blocks(workers: Workers | None, bits: int, values: torch.Tensor, packed: Packed) -> None:
    """Writes the blocks of values, with codes of 8 or 4 bits: see tm_blocks_pack in
    native/tiermem.h.

    Flat contiguous CPU tensors; values in fp32, bf16 or fp16. workers: None: the caller alone.
    Blocks; GIL free.
    """
    numel = values.numel()
    codes = _pointer(packed.codes)
    scales = ffi.cast("float *", packed.scales.data_ptr())
    code = lib.tm_blocks_pack(
        handle_of(workers), bits, numel, _pointer(values), _DTYPES[values.dtype], codes, scales
    )
    check(code, "packing blocks")


def unpack_blocks(workers: Workers | None, bits: int, packed: Packed, values: torch.Tensor) -> None:
    """Writes the values of blocks; as `pack_blocks`."""
    numel = values.numel()
    codes = _pointer(packed.codes)
    scales = ffi.cast("float *", packed.scales.data_ptr())
    code = lib.tm_blocks_unpack(
        handle_of(workers), bits, numel, codes, scales, _pointer(values), _DTYPES[values.dtype]
    )
    check(code, "unpacking blocks")


def handle_of(workers: Workers | None) -> object:
    """What native code takes for workers; none: the caller alone works."""
    return ffi.NULL if workers is None else workers.handle


def _part(part: Moment | None, is_positive: bool) -> Any:
    slot = ffi.new("tm_part *")
    _set_part(slot, part, is_positive)
    return slot


def _set_part(slot: Any, part: Moment | None, is_positive: bool = False) -> None:
    """Fills a tm_part; one of zeros stays that of an absent part."""
    if isinstance(part, Quantised):
        slot.data = _pointer(part.codes)
        slot.scales = ffi.cast("uint8_t *", part.scales.data_ptr())
        slot.dtype = lib.TM_Q8_POSITIVE if is_positive else lib.TM_Q8
    elif part is not None:
        slot.data = _pointer(part)
        slot.dtype = lib.TM_SPLIT if part.dtype in SPLIT else _DTYPES[part.dtype]


def _set_sources(step: Any, parts: StepParts, source: StepParts) -> None:
    """Sets where the parts of a tm_step are read that are not stepped in place."""
    for number, pair in enumerate(zip(parts.stepped, source.stepped, strict=True)):
        own, other = (_part(each, False) for each in pair)
        if own.data != other.data:
            step.sources[number] = other.data
            step.source_scales[number] = other.scales


def store_gradient(
    workers: Workers,
    dst: torch.Tensor | None,
    src: torch.Tensor,
    first_element: int = 0,
    accumulate: bool = False,
) -> list[float]:
    """Copies or adds `src` into `dst` (None: only measures) and returns the sum of squares of each
    norm block.

    Flat contiguous CPU tensors of one length, fp32, bf16 or fp16. `first_element` is the index of
    src[0] in its whole parameter: blocks of NORM_BLOCK elements are cut there, so that the sums do
    not depend on tiles or threads. A sum is finite if and only if every element is. Blocks; GIL
    free.
    """
    if src.numel() == 0:
        return []
    num_blocks = (first_element + src.numel() - 1) // NORM_BLOCK - first_element // NORM_BLOCK + 1
    sums = ffi.new("double[]", num_blocks)
    code = lib.tm_gradient_store(
        workers.handle,
        src.numel(),
        _pointer(dst),
        _DTYPES[None if dst is None else dst.dtype],
        _pointer(src),
        _DTYPES[src.dtype],
        accumulate,
        first_element,
        sums,
    )
    check(code, "storing a gradient")
    return list(sums)


def crc32c_of(
    addresses: npt.NDArray[np.uint64],
    num_bytes: npt.NDArray[np.uint64],
    workers: Workers | None = None,
) -> npt.NDArray[np.uint32]:
    """The CRC-32C of num_bytes[i] bytes at addresses[i], which the caller keeps alive. Flat arrays.
    Blocks; GIL free."""
    if addresses.ndim != 1 or addresses.shape != num_bytes.shape:
        raise ValueError(
            f"addresses and lengths are two rows of one length; given {addresses.shape}, "
            f"{num_bytes.shape}"
        )
    addresses = np.ascontiguousarray(addresses, np.uint64)
    num_bytes = np.ascontiguousarray(num_bytes, np.uint64)
    crcs = np.empty(len(addresses), np.uint32)
    rows = rows_of(
        ("const void *const *", "const uint64_t *", "uint32_t *"), addresses, num_bytes, crcs
    )
    check(
        lib.tm_crc32c(handle_of(workers), len(addresses), *rows),
        f"checksums of {len(addresses)} pieces",
    )
    return crcs


def file_alignment(fd: int) -> tuple[int, int] | None:
    """What O_DIRECT asks of an open file: bytes of memory, and of offsets and lengths. (0, 0): it
    refuses; None: unknown."""
    memory = ffi.new("uint32_t *")
    offset = ffi.new("uint32_t *")
    code = lib.tm_file_alignment(fd, memory, offset)
    return None if code < 0 else (memory[0], offset[0])


def trim_heap() -> None:
    """Gives memory that was freed back to the kernel, holes in the heap included (glibc). Blocks
    for milliseconds."""
    check(lib.tm_heap_trim(), "trimming the heap")


def choose_isa(isa: int = -1) -> str:
    """Chooses the kernels' instruction set (-1: the best here; 0, 1, 2: plain C, AVX2, AVX-512) and
    names it."""
    return str(
        ffi.string(
            lib.tm_isa_name(check(lib.tm_isa_choose(isa), f"instruction set {isa}"))
        ).decode()
    )


def _unmap(base: object, num_bytes: int, owner: int) -> None:
    # a forked child never had it, and may have mapped something else there
    if os.getpid() == owner:
        check(lib.tm_map_close(base, num_bytes), "unmapping the arena")


def mirror(struct: str) -> np.dtype[Any]:
    """The numpy type with the memory layout of a C struct of pointers, integers and arrays of
    integers."""
    fields = dict(ffi.typeof(struct).fields)
    formats = [_format_of(field.type) for field in fields.values()]
    offsets = [f.offset for f in fields.values()]
    return np.dtype(
        {
            "names": list(fields),
            "formats": formats,
            "offsets": offsets,
            "itemsize": ffi.sizeof(struct),
        }
    )


def _format_of(ctype: Any) -> Any:
    if ctype.kind == "array":
        return _format_of(ctype.item), ctype.length
    return np.uintp if ctype.kind == "pointer" else np.dtype(_NUMPY_NAMES[ctype.cname])


_OP_DTYPE = mirror("tm_op")
_VOID = ffi.typeof("void *")


def rows_of(kinds: Sequence[str], *arrays: npt.NDArray[Any]) -> list[object]:
    """Pointers to flat contiguous arrays, which the caller keeps alive."""
    return [ffi.cast(kind, array.ctypes.data) for kind, array in zip(kinds, arrays, strict=True)]


def _pointer(tensor: torch.Tensor | None) -> object:
    return ffi.NULL if tensor is None else ffi.cast("void *", tensor.data_ptr())
