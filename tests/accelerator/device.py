"""The module of the simulated device: `torch.sim`, what torch and people ask of a device's module.

    load()      builds the simulator if needed and makes the device type "sim", before the process's first backward
    torch.sim   this module, with the names that torch.cuda uses, and the simulator's own:

        set_schedule("at_once" | "late" | "random:SEED" | "main_first" | "side_first" | "threads")    how late streams run
        set_pace(lane, bytes_per_s)                         how fast they may copy, for measured times
        pending()                                           operations that are issued and not done
        host_waits(), copies()                              waits by thread; bytes each way, pageable copies
        undeferred()                                        operators that ran at once, for want of a Meta kernel
        reset_counts()                                      of these three
        set_capacity(bytes, device)                         for torch.OutOfMemoryError
        set_segments_like_cudas(bool)                       whether segments are 2 MiB, 20 MiB or multiples of 2 MiB
        set_strict_frees(bool)                              whether freed memory is overwritten at once, as it is
        host_register(address, bytes), host_unregister(address), registered(),
        set_register_limit(bytes)
        record(True), recording(), mark(...)                what clock.py replays
        was_touched()                                       whether this process has a context
        plug(), unplug(), reset()                           for tests that share a process: fixture.py

Environment: TIERMEM_SIM_DEVICES (2), TIERMEM_SIM_SCHEDULE (at_once), TIERMEM_SIM_CAPACITY (bytes;
    16 GiB).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import build, group

SCHEDULES = [
    "at_once",
    "late",
    "main_first",
    "side_first",
    *(f"random:{seed}" for seed in range(20)),
]
"""A correct program computes the same under each of them."""

_Device = torch.device | str | int | None
_sim: Any = None  # the C++ module, once loaded
_is_plugged = True
_CAPACITY = int(os.environ.get("TIERMEM_SIM_CAPACITY", 16 << 30))


def load() -> ModuleType:
    """Makes the device type "sim"; returns torch.sim. Blocks while the simulator is built, the
    first time.

    Raises build.NoCompilerError where it cannot be built.
    """
    global _sim
    module = sys.modules[__name__]
    if _sim is not None:
        return module
    library = build.built()
    torch.utils.rename_privateuse1_backend("sim")
    spec = importlib.util.spec_from_file_location("_sim", library)
    assert spec and spec.loader
    _sim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_sim)
    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    group.register(_sim)
    reset()
    return module


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # read by torch.utils.checkpoint
        return is_initialized()
    if name == "default_generators":
        return tuple(_sim.default_generator(index) for index in range(device_count()))
    raise AttributeError(f"module 'torch.sim' has no attribute {name!r}")


# ---- devices -------------------------------------------------------------------------------------


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    """Returns the number of devices; makes no context."""
    return _sim.device_count() if _is_plugged else 0


def unplug() -> None:
    """Makes torch see no device (is_available, device_count), so that other tests of the process
    run as without one."""
    global _is_plugged
    _is_plugged = False


def plug() -> None:
    global _is_plugged
    _is_plugged = True


def is_initialized() -> bool:
    """Whether this process has a context: it has allocated, created a stream or registered
    memory."""
    return _sim.has_context()


was_touched = is_initialized


def init() -> None:
    _sim.use_context()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return _sim.is_bad_fork()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_index(device))


def get_device_name(device: _Device = None) -> str:
    return f"simulated device {_index(device)}"


class _Properties(NamedTuple):
    name: str
    total_memory: int


def get_device_properties(device: _Device = None) -> _Properties:
    return _Properties(get_device_name(device), mem_get_info(device)[1])


@contextlib.contextmanager
def device(index: _Device) -> Iterator[None]:
    """Makes a device the current one inside. None or a negative index: changes nothing."""
    before = current_device()
    if index is not None and (not isinstance(index, int) or index >= 0):
        set_device(index)
    try:
        yield
    finally:
        set_device(before)


def _exchange_device(index: int) -> int:
    return torch._C._accelerator_exchangeDevice(index)


def _maybe_exchange_device(index: int) -> int:
    return torch._C._accelerator_maybeExchangeDevice(index)


def _index(device: _Device) -> int:
    if isinstance(device, int):
        return device
    if device is None:
        return current_device()
    device = torch.device(device)
    if device.type != "sim":
        raise ValueError(f"expected a sim device, not {device}")
    return current_device() if device.index is None else device.index


# ---- streams and events --------------------------------------------------------------------------


def Stream(device: _Device = None, priority: int = 0) -> torch.Stream:  # noqa: N802
    return torch.Stream(device=torch.device("sim", _index(device)), priority=priority)


class Event(torch.Event):
    """As torch.cuda.Event: a thread that waits for it sleeps if it is `blocking`, else it spins."""

    blocking: bool

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        made = super().__new__(cls, "sim", enable_timing=enable_timing)
        made.blocking = blocking
        return made


def current_stream(device: _Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _Device = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=20)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return stream if stream is not None else contextlib.nullcontext()


def synchronize(device: _Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


# ---- memory --------------------------------------------------------------------------------------


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def memory_stats(device: _Device = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: _Device = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: _Device = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: _Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Returns the bytes that are free and the device's bytes."""
    return torch._C._accelerator_getMemoryInfo(_index(device))


def set_segments_like_cudas(are_alike: bool) -> None:
    """Sets whether segments have the sizes of CUDA's. Call it while nothing is allocated or
    cached."""
    _sim.set_segments_like_cudas(are_alike)


def set_capacity(num_bytes: int, device: _Device = None) -> None:
    """Sets the bytes that a device can reserve. Fewer than are reserved: the next new segment
    fails."""
    _sim.set_capacity(_index(device), num_bytes)


def set_strict_frees(is_strict: bool) -> None:
    """Overwrites freed memory in the order of its stream at once (the start), or when its stream
    allocates it again.

    CUDA does the latter: FSDP2 frees gradients that another stream still reads, and has the owner
    wait before it goes on.
    """
    _sim.set_strict_frees(is_strict)


# ---- random numbers ------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    _sim.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(_sim.device_count()):
        _sim.default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _sim.default_generator(current_device()).initial_seed()


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """Returns the state of a device's default generator, as bytes on the CPU."""
    return _sim.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: _Device = None) -> None:
    _sim.default_generator(_index(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: Sequence[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


# ---- mixed precision -----------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# ---- the simulator's own -------------------------------------------------------------------------


def reset() -> None:
    """Finishes what is pending, then restores the schedule, capacities, limits, counts and current
    devices of the start.

    Errors of pending operations are dropped. Memory that tensors hold stays theirs.
    """
    record(False)
    if is_initialized():
        for index in range(_sim.device_count()):
            with contextlib.suppress(Exception):
                synchronize(index)
            set_stream(default_stream(index))
        set_device(0)
        empty_cache()
    for index in range(_sim.device_count()):
        _sim.set_capacity(index, _CAPACITY)
        if is_initialized():
            reset_peak_memory_stats(index)
    set_register_limit(None)
    set_strict_frees(True)
    set_segments_like_cudas(False)
    set_schedule(os.environ.get("TIERMEM_SIM_SCHEDULE", "at_once"))
    for lane in ("to device", "to host"):
        set_pace(lane, 0.0)
    manual_seed_all(0)
    reset_counts()


def set_schedule(schedule: str) -> None:
    """Runs streams "at_once", as "late" as a thread waits, or at "random:SEED". What is pending
    stays pending.

    "main_first": the default streams at once, all others late; "side_first": the other way round.
        "threads": each stream has
    a thread, which runs its operations while the host goes on, so that times can be measured.
    """
    kind, _, seed = schedule.partition(":")
    kinds = {name.lower(): value for name, value in _sim.Schedule.__members__.items()}
    if kind not in kinds or (seed and not seed.isdecimal()):
        raise ValueError(
            f"schedule {schedule!r}: at_once, late, main_first, side_first, threads or random:SEED"
        )
    _sim.set_schedule(kinds[kind], int(seed or 0))


def set_pace(lane: str, bytes_per_s: float) -> None:
    """Makes operations of a lane that are issued from now on take no less time than their bytes at
    this rate. 0: no bound.

    They sleep for what is left of it, so that a slow link takes no core. Lanes: see clock.py.
    """
    _sim.set_pace(lane, bytes_per_s)


def pending() -> int:
    """Returns the number of operations that are issued and not done."""
    return _sim.num_pending()


def host_waits() -> dict[str, int]:
    """Returns how often the host waited for a device, by thread: main, autograd, other."""
    return _sim.host_waits()


def copies() -> dict[str, int]:
    """Returns to_device_bytes, to_host_bytes and between_devices_bytes of the copies issued, and
    num_pageable copies."""
    return _sim.copy_counts()


def reset_counts() -> None:
    """Sets host_waits(), copies() and undeferred() to zero."""
    _sim.reset_host_waits()
    _sim.reset_copy_counts()
    _sim.reset_undeferred()


def undeferred() -> dict[str, int]:
    """Returns the operators that ran at once, because no Meta kernel tells their shapes, and how
    often."""
    return _sim.undeferred()


def host_register(address: int, num_bytes: int) -> None:
    """Page-locks a range of host memory. Raises RuntimeError if it overlaps one or the driver's
    limit refuses it."""
    _sim.host_register(address, num_bytes)


def host_unregister(address: int) -> None:
    """Ends a registration. Raises RuntimeError if there is none, or if a copy of the range is
    pending."""
    _sim.host_unregister(address)


def set_register_limit(num_bytes: int | None) -> None:
    """Makes the driver refuse to page-lock more bytes than these; 0 refuses everything, None
    nothing."""
    _sim.set_register_limit(num_bytes)


class Registered(NamedTuple):
    num_ranges: int
    num_bytes: int


def registered() -> Registered:
    """Returns what is page-locked, torch's pinned tensors included."""
    return Registered(_sim.num_registered(), _sim.registered_bytes())


def record(is_on: bool) -> None:
    """Starts a recording, without what was recorded before, or stops it."""
    _sim.record(is_on)


def recording() -> list[dict[str, Any]]:
    """Returns what was recorded, in the order in which the host issued it; clock.py describes the
    entries."""
    return _sim.recording()


def mark(
    name: str,
    lane: str = "",
    num_bytes: int = 0,
    flops: float = 0.0,
    needs: Sequence[int] = (),
    blocks: bool = False,
) -> int:
    """Adds host work (a disk read, a CPU kernel) to the recording, which starts after the entries
    `needs`.

    blocks: the thread goes on when the work is done; else at once. With needs and no lane: the
        thread's wait for them.
    Returns the entry's number, -1 while nothing is recorded.
    """
    return _sim.add_host_work(
        name, lane, num_bytes, flops, [need for need in needs if need >= 0], blocks
    )
