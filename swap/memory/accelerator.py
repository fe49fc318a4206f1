"""Accelerator: all code about devices other than the CPU. No other module names a type of device.

    which      is_accelerator, find_device, kind_of_device, activate    one per rank: torchrun's LOCAL_RANK chooses it
    context    open_context                                make it before what is resident is measured
    order      new_stream, current_stream, new_event, record    streams and events, which order work on the device
               is_capturing
    copies     to_device, ToHost                                small tensors, without a wait of the host
    memory     free_and_total, usage, num_out_of_memory, give_back_cached, reset_peak    bytes, as torch counts them
    pinning    PageLock                                         pinned host memory, for asynchronous copies
    random     rng_state, set_rng_state; generators, set_generators    the device's; all of this process
    the rest   facts_of, backends_of, control_device

It is written on torch.accelerator and the device's own module (`torch.cuda`, `torch.xpu`, ...), so
that CUDA, ROCm, XPU and devices of extensions take one path. Asking which kind of device there is
takes none of it: a run on the CPU makes no context and pins nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from tiermem.swap.base.ranges import ByteRange

logger = logging.getLogger("tiermem")

_HOST = ("cpu", "meta")
_CHUNK_BYTES = 8 << 30
"""Of host memory that is registered in one call: some drivers refuse very large ones."""
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context, not that of the calling thread alone."""


# ---- devices -------------------------------------------------------------------------------------


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has memory of its own beside HOST."""
    return device.type not in _HOST


def runs_triton(device: torch.device) -> bool:
    """Whether Triton divides and takes roots exactly there: on CUDA and ROCm, which torch names
    alike."""
    return device.type == "cuda"


def find_device(asked: torch.device | str | None = None) -> torch.device:
    """The device that this process computes on: the one asked for, else its accelerator, else the
    CPU.

    A rank that a launcher has started takes the accelerator of its LOCAL_RANK; ranks share them
    where there are fewer. Raises ValueError for a device that is not there, and when nothing is
    asked for and torch cannot use its accelerator because the driver is too old: the CPU would be
    many times slower. CUDA_VISIBLE_DEVICES that is empty asks for the CPU.
    """
    device = kind_of_device() if asked is None else torch.device(asked)
    if not is_accelerator(device):
        if asked is None and device.type == "cpu" and (fault := _fault_of_driver()):
            raise ValueError(
                f"{fault}. Update the driver, install a torch that was built for it, or compute on "
                "the CPU: device='cpu', or CUDA_VISIBLE_DEVICES= in the environment"
            )
        return device
    module = getattr(torch, device.type, None)
    count = int(module.device_count()) if module is not None and module.is_available() else 0
    if device.index is None and count:
        return torch.device(device.type, _own_index(device))
    if device.index is None or device.index >= count:
        there = torch.accelerator.current_accelerator(check_available=True)
        has = (
            "no accelerator"
            if there is None
            else f"{torch.accelerator.device_count()} of type {there.type!r}"
        )
        fault = f" ({_fault_of_driver()})" if there is None and _fault_of_driver() else ""
        raise ValueError(
            f"device {str(asked)!r} is not there: this machine has {has}{fault}. Name one of "
            "those, or device='cpu'"
        )
    return device


def _fault_of_driver() -> str:
    """Why torch finds no accelerator of the kind that it was built for, if the driver is too old
    for it; else empty."""
    kind = torch.accelerator.current_accelerator()  # also of devices that are not there
    if kind is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    try:
        _module_of(kind).init()
    except (AttributeError, AssertionError, RuntimeError) as error:
        said = str(error).split(". ")[0].strip().rstrip(".")
        return f"{said} for torch {torch.__version__}" if "too old" in said else ""
    return ""


def kind_of_device() -> torch.device:
    """The kind of this process's accelerator, without a number, or the CPU. Makes no context."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu" if found is None else found.type)


def activate(device: torch.device) -> None:
    """Makes a device the current one of this thread; does nothing for the CPU."""
    if is_accelerator(device):
        _module_of(device).set_device(device.index)


def open_context(device: torch.device) -> int:
    """Makes this process's context on a device; does nothing for the CPU, or if there is one.
    Blocks.

    Returns the bytes of host memory that the process took for it, which it keeps: whole MiB.
    """
    if not is_accelerator(device):
        return 0
    before = _resident_bytes()
    activate(device)
    _module_of(device).mem_get_info(device)
    return max(0, _resident_bytes() - before) >> 20 << 20


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _own_index(device: torch.device) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"]) % int(_module_of(device).device_count())
    return torch.accelerator.current_device_index()


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)


# ---- streams and events --------------------------------------------------------------------------
#
# Streams and events are of the device module's classes. torch.Event ignores `blocking` on CUDA: a
# thread that waits for it spins. And torch.Stream does not wait for an event of the module's class,
# without a word (torch/csrc/cuda/Event.h: the CUDA event lies beside the one of torch.Event, which
# torch.Stream.wait_event reads).


def new_stream(device: torch.device) -> torch.Stream:
    """A stream beside the current one."""
    stream: torch.Stream = _module_of(device).Stream(device=device)
    return stream


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that this thread's work goes to."""
    stream: torch.Stream = _module_of(device).current_stream(device)
    return stream


def new_event(device: torch.device, enable_timing: bool = False) -> torch.Event:
    """An event that has not been recorded. A thread that waits for it sleeps, and leaves its core
    to kernels of the CPU."""
    make = _module_of(device).Event
    event: torch.Event = make(enable_timing=enable_timing, **_words_for_sleep(make))
    return event


@functools.cache
def _words_for_sleep(make: Any) -> dict[str, bool]:
    """What makes a thread sleep that waits for an event of this class, if the class can."""
    return {"blocking": True} if "blocking" in inspect.signature(make).parameters else {}


def record(stream: torch.Stream) -> torch.Event:
    """An event that comes when all that has been given to a stream until now has ended."""
    event = new_event(stream.device)
    event.record(stream)
    return event


def is_capturing(device: torch.device) -> bool:
    """Whether this thread's work on a device is captured as a graph (torch.cuda.graph) instead of
    being done."""
    ask = getattr(_module_of(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


# ---- small copies --------------------------------------------------------------------------------


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor of the CPU on a device, through torch's pinned memory: no thread waits. On the
    CPU: the tensor itself."""
    return (
        _pinned_like(values).copy_(values).to(device, non_blocking=True)
        if is_accelerator(device)
        else values
    )


class ToHost:
    """A small tensor's copy to the CPU, which is started at once, on the current stream."""

    def __init__(self, values: torch.Tensor) -> None:
        self._copy = _pinned_like(values)
        self._copy.copy_(values, non_blocking=True)
        self._copied: torch.Event | None = record(current_stream(values.device))

    def wait(self) -> torch.Tensor:
        """Blocks until the copy has ended and returns it."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        self._copied = None
        return self._copy

    def number(self) -> float:
        """Blocks as `wait` and returns the one element."""
        return float(self.wait())


def _pinned_like(values: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the CPU, in pinned memory unless the driver refuses."""
    try:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(values.shape, dtype=values.dtype)


# ---- memory --------------------------------------------------------------------------------------


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes that can still be allocated, torch's cached blocks among them, and bytes of the whole
    device."""
    module = _module_of(device)
    free, total = module.mem_get_info(device)
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return int(free) + int(cached), int(total)


class Usage(NamedTuple):
    """Bytes of a device that this process has: in tensors, and reserved for them by torch; now and
    at most so far."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def usage(device: torch.device) -> Usage:
    """What this process has of a device's memory; peaks are since the start, or since
    `reset_peak`."""
    stats = torch.accelerator.memory_stats(device)
    kinds = (
        f"{what}_bytes.all.{when}"
        for when in ("current", "peak")
        for what in ("allocated", "reserved")
    )
    return Usage(*(int(stats.get(kind, 0)) for kind in kinds))


def num_out_of_memory(device: torch.device) -> int:
    """How often this device had no memory for what this process asked for."""
    return int(torch.accelerator.memory_stats(device).get("num_ooms", 0))


def give_back_cached(device: torch.device) -> None:
    """Returns torch's cached blocks to the driver, for other processes; does nothing for the CPU.
    Waits for the device."""
    if is_accelerator(device):
        torch.accelerator.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Returns torch's cached blocks to the driver and begins to count peaks anew. Waits for the
    device: for tools."""
    give_back_cached(device)
    torch.accelerator.reset_peak_memory_stats(device)


# ---- pinning -------------------------------------------------------------------------------------


class PageLock:
    """Host memory that is registered with a device's driver, so that copies to and from it run
    asynchronously.

    Args:
        slots: memory that is copied whole, in the order of addresses. Those that lie one behind the
            other are registered in one call, of 8 GiB or one slot at most: no copy crosses the end
            of a registration.

    Where the device registers no host memory, or the driver refuses, the slots from there on are
    not pinned, and a warning says how many bytes that are and what it costs. `num_bytes` are
    pinned: the first slots, since a limit of the driver leaves room for those.
    """

    def __init__(self, device: torch.device, slots: Sequence[ByteRange]) -> None:
        self._device = device
        self._registered: list[int] = []
        self.num_bytes = 0
        wanted = sum(size for _, size in slots)
        try:
            for chunk in _chunks(slots):
                self._take(chunk)
        except RuntimeError as error:
            logger.warning(
                "host memory is not pinned (%d of %d bytes: %s): copies to and from %s there block "
                "the thread that starts them and run at a part of the link's rate. Raise the limit "
                "on locked memory (ulimit -l), or lower the budget",
                wanted - self.num_bytes,
                wanted,
                str(error).splitlines()[0],
                device,
            )

    def _take(self, slots: Sequence[ByteRange]) -> None:
        """Registers slots that lie one behind the other; if the driver refuses them together, as
        many of them as it takes."""
        size = sum(each for _, each in slots)
        try:
            _register(self._device, slots[0].offset, size)
        except RuntimeError:
            _forget_error(self._device)
            if len(slots) == 1:
                raise
            half = len(slots) // 2
            self._take(slots[:half])
            self._take(slots[half:])
        else:
            self._registered.append(slots[0].offset)
            self.num_bytes += size

    def close(self) -> None:
        """Takes the registrations back; twice does nothing. No copy may be under way."""
        self.num_bytes = 0
        while self._registered:
            _unregister(self._device, self._registered.pop())


def _chunks(slots: Sequence[ByteRange]) -> list[list[ByteRange]]:
    """The slots in groups that lie one behind the other, of _CHUNK_BYTES or one slot at most."""
    chunks: list[list[ByteRange]] = []
    for slot in slots:
        last = chunks[-1] if chunks else []
        if last and sum(last[-1]) == slot.offset and sum(slot) - last[0].offset <= _CHUNK_BYTES:
            last.append(slot)
        else:
            chunks.append([slot])
    return chunks


def _register(device: torch.device, address: int, num_bytes: int) -> None:
    module = _module_of(device)
    if hasattr(module, "cudart"):
        runtime = module.cudart()
        code = runtime.cudaHostRegister(address, num_bytes, _PORTABLE)
        if int(code):  # torch's check_error knows the names of some errors only
            raise RuntimeError(f"{runtime.cudaGetErrorString(code)} (error {int(code)})")
    elif hasattr(module, "host_register"):
        module.host_register(address, num_bytes)
    else:
        raise RuntimeError(f"{device.type} registers no host memory")


def _forget_error(device: torch.device) -> None:
    """Takes away the error that a refusal leaves in this thread: torch would raise it at the
    thread's next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _unregister(device: torch.device, address: int) -> None:
    module = _module_of(device)
    if hasattr(module, "cudart"):
        module.cudart().cudaHostUnregister(address)
    else:
        module.host_unregister(address)


# ---- the rest ------------------------------------------------------------------------------------


def facts_of(device: torch.device) -> dict[str, int | float | str]:
    """What a device says of itself: its name, and whatever of torch's properties is a number or a
    text."""
    properties = _module_of(device).get_device_properties(device)
    found = {key: getattr(properties, key) for key in dir(properties) if not key.startswith("_")}
    facts = {key: value for key, value in found.items() if isinstance(value, (int, float, str))}
    return {**facts, "name": str(_module_of(device).get_device_name(device))}


def pci_addresses(device: torch.device, num_ranks: int) -> list[str | None]:
    """Where the devices of this node's ranks sit on the PCI bus, as sysfs writes it (0000:3b:00.0).

    Rank i takes device i, as in find_device; a rank alone has `device`. None for the CPU, and if
    torch does not say.
    """
    if not is_accelerator(device):
        return [None] * num_ranks
    count = int(_module_of(device).device_count())
    devices = (
        [device]
        if num_ranks == 1
        else [torch.device(device.type, rank % count) for rank in range(num_ranks)]
    )
    return [_pci_address(device) for device in devices]


def _pci_address(device: torch.device) -> str | None:
    properties = _module_of(device).get_device_properties(device)
    numbers = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return None if min(numbers) < 0 else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def rng_state(device: torch.device) -> torch.Tensor:
    """The state of a device's generator: uint8, on the CPU."""
    state: torch.Tensor = _module_of(device).get_rng_state(device)
    return state


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Puts a generator's state back."""
    _module_of(device).set_rng_state(state, device)


def generators(device: torch.device) -> dict[str, Any]:
    """The states of this process's random generators: Python's, numpy's, torch's, and under its
    name that of an accelerator."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if is_accelerator(device):
        found[device.type] = rng_state(device)
    return found


def set_generators(device: torch.device, states: dict[str, Any]) -> None:
    """Puts the states of `generators` back; those of another accelerator are left out. Raises
    KeyError, TypeError, ValueError or RuntimeError for other values."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if is_accelerator(device) and device.type in states:
        set_rng_state(device, states[device.type])


def backends_of(device: torch.device) -> str:
    """What torch.distributed is asked for: gloo for tensors on the CPU, and the device's own for
    those on it."""
    if not is_accelerator(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def device_taken(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """A device whose tensors a group exchanges: this one, else the CPU."""
    is_taken = group is not None and device.type in {each.type for each in group._device_types}
    return device if is_taken else torch.device("cpu")


def control_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where small tensors must lie that the ranks of a device exchange: on the CPU if the group
    takes them there.

    Raises ValueError for a group that takes no tensors of the device.
    """
    takes = {each.type for each in group._device_types}
    if device.type not in takes:
        raise ValueError(
            f"the process group exchanges tensors of {', '.join(sorted(takes))}, and the model is "
            f"on {device}: make the group with init_process_group({backends_of(device)!r}), leave "
            "it to tiermem, or shard with device='cpu'"
        )
    return torch.device("cpu") if "cpu" in takes else device


def on(stream: torch.Stream | None) -> contextlib.AbstractContextManager[None]:
    """Inside, this thread's work on the stream's device goes to it; None: nothing changes."""
    return _HERE if stream is None else _on(stream)


_HERE = contextlib.nullcontext()


@contextlib.contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
