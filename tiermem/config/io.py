"""The sections about tiers, paths and transfers: `aio`, `offload_param`, `offload_optimizer`,
paths, GPUDirect Storage."""

from __future__ import annotations

import enum
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from tiermem.policy import IoSettings, NvmePath
from tiermem.section import Bytes, ConfigModel, Count, Number, PositiveCount, Problems
from tiermem.swap.memory.accelerator import find_device

# ---- paths ---------------------------------------------------------------------------------------
#
# `nvme_path` and `tiermem.paths` take one folder or several, each with an optional cap and weight:
#
#     "/mnt/nvme0"
#     ["/mnt/nvme0", "/mnt/nvme1"]
#     [{"path": "/mnt/nvme0", "max_bytes": "200GiB", "weight": 2.5}, {"path": "/mnt/nvme1",
#     "weight": 1}]
#
# A cap is for all ranks of a node together. All paths have weights or none has; if none has, the
# store measures them when it opens. The store also checks then that the folders exist and are
# writable.

_ALLOWED = (
    'allowed is the path of a folder, or {"path": "/mnt/nvme0", "max_bytes": "200GiB", '
    '"weight": 2.5}'
)


class PathConfig(ConfigModel):
    """One folder on an NVMe file system; a plain string is a folder without cap and weight."""

    section: ClassVar[str] = "tiermem.paths"

    path: Annotated[Path, AfterValidator(Path.absolute)]
    """The folder; relative to the working directory when the config is read."""
    max_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    """Most bytes to take there, all ranks of the node together. Not set: what is free."""
    weight: Annotated[Number, Field(gt=0.0)] | None = None
    """Its part of the bytes, relative to the other paths. Not set: measured when there are
    several."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _accept_plain_folders(cls, raw: Any) -> Any:
        given = raw if isinstance(raw, dict) else {"path": raw}
        folder = given.get("path", Path())  # pydantic finds that it is missing
        if isinstance(folder, (str, Path)) and str(folder).strip():
            return given
        raise ValueError(
            f"{'an empty path' if isinstance(folder, str) else repr(folder)} given; {_ALLOWED}"
        )

    @property
    def value(self) -> NvmePath:
        """The same as an NvmePath, for the policy."""
        return NvmePath(self.path, self.max_bytes, self.weight)

    @property
    def written(self) -> str | dict[str, Any]:
        """The shortest form of the same value in a config."""
        extra = {"max_bytes": self.max_bytes, "weight": self.weight}
        given = {name: value for name, value in extra.items() if value is not None}
        return {"path": str(self.path), **given} if given else str(self.path)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, Path, dict)) else value


Paths = Annotated[tuple[PathConfig, ...], BeforeValidator(_as_list), Field(min_length=1)]
"""One path or several; several share the load."""


def united(paths: Sequence[PathConfig]) -> tuple[NvmePath, ...]:
    """Every folder once, in order."""
    return tuple(dict.fromkeys(each.value for each in paths))


def clashes(paths: Sequence[PathConfig]) -> str:
    """What keeps these from being one list: a folder with two caps or weights, weights for some
    alone; empty if nothing."""
    values = united(paths)
    folders = [value.path for value in values]
    for folder in folders:
        if folders.count(folder) > 1:
            given = " and ".join(
                str(each.written) for each in dict.fromkeys(paths) if each.path == folder
            )
            return f"{folder} is given as {given}; give it one cap and one weight"
    bare = [str(value.path) for value in values if value.weight is None]
    if bare and len(bare) < len(values):
        return (
            f"{', '.join(bare)} without a weight beside paths that have one; give all a weight, "
            "or none to measure them"
        )
    return ""


# ---- GPUDirect Storage ---------------------------------------------------------------------------


def why_not() -> str:
    """Returns why `aio.use_gds` cannot be honoured here, as a clause that fits after "..., but ",
    with what to do.

        a GPU that torch can use -> kvikio installed -> the cuFile driver reads without a detour ->
        tiermem uses it

    The first missing step is the reason. kvikio is imported only when a config has the key.
    """
    if find_device().type != "cuda":
        return (
            "there is no GPU here that torch can use, and GPUDirect Storage reads straight into "
            "one; remove the key"
        )
    if importlib.util.find_spec("kvikio") is None:
        return (
            "kvikio is not installed: install the one for your CUDA (kvikio-cu12, kvikio-cu13), "
            "or remove the key"
        )
    detour = _detour()
    if detour:
        return (
            f"{detour}, so reads would pass through host memory all the same; see gdscheck, or "
            "remove the key"
        )
    return (
        "GPUDirect is not used yet, although it works here: NVMe is read into pinned host "
        "memory; remove the key"
    )


def _detour() -> str:
    """Returns why kvikio or cuFile would read through host memory; empty when they would not."""
    try:
        driver = importlib.import_module("kvikio.cufile_driver")
        defaults = importlib.import_module("kvikio.defaults")
        if defaults.is_compat_mode_preferred():
            return (
                "kvikio runs in compatibility mode (KVIKIO_COMPAT_MODE, or libcufile cannot be "
                "used)"
            )
        if not driver.get("is_gds_available"):
            return (
                "the cuFile driver runs in compatibility mode (nvidia-fs is not loaded, or the "
                "file system refuses)"
            )
    except (ImportError, AttributeError, RuntimeError, OSError, ValueError) as error:
        # kvikio's own words are the reason
        return f"kvikio cannot reach the cuFile driver ({type(error).__name__}: {error})"
    return ""


# ---- aio -----------------------------------------------------------------------------------------
#
# One key has three spellings: `intra_op_parallelism` (DeepSpeed's code), `thread_count` (its
# documentation) and `num_threads` (its tuner). They mean the same here.
#
# In DeepSpeed each of n threads keeps queue_depth requests in flight. Here one queue per path keeps
# all of them:
#
#     requests in flight   queue_depth * n             io_uring, Linux AIO; at most 4096
#     threads              n                           the threads engine; a thread serves one request at a time
#
# If only n is set, the depth is the queue's default or DeepSpeed's 8 * n, whichever is larger.

_SPELLINGS = ("intra_op_parallelism", "thread_count", "num_threads")
_MAX_DEPTH = 4096


class AioConfig(ConfigModel):
    """`aio`: block size, depth and threads of the queue."""

    section: ClassVar[str] = "aio"

    block_size: PositiveCount = 1 << 20
    """Bytes of one request to the device."""
    queue_depth: PositiveCount = 8
    """Requests in flight for each of intra_op_parallelism threads. Not set: the queue's own, larger
    default."""
    intra_op_parallelism: Count = 1
    """Multiplies queue_depth; the number of threads of the threads engine. Not set: that engine
    chooses."""
    thread_count: Count | None = None
    """The same as intra_op_parallelism."""
    num_threads: Count | None = None
    """The same as intra_op_parallelism."""
    single_submit: bool = False
    """Hand requests to the kernel one by one. Not set: all that are ready at once."""
    overlap_events: bool = True
    """Submit while earlier requests are in flight; false: only when all of those have ended."""
    use_gds: bool = False
    """GPUDirect Storage; refused with the reason that a look at the machine gives."""

    @property
    def threads(self) -> int | None:
        """Threads that the user asked for, under whichever spelling; None when not set."""
        return next(iter(self._given_threads().values()), None)

    def _given_threads(self) -> dict[str, int]:
        given = {name: getattr(self, name) for name in _SPELLINGS if self.is_set(name)}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def depth(self) -> int | None:
        """Requests in flight in all; None when the queue's own depth stands."""
        threads = self.threads or 1
        if self.is_set("queue_depth"):
            return self.queue_depth * threads
        return max(IoSettings.depth, self.queue_depth * threads) if threads > 1 else None

    @pydantic.field_validator("use_gds", mode="after")
    @classmethod
    def _refuse_gds(cls, value: bool) -> bool:
        if value:
            raise ValueError(f"true given, but {why_not()}")
        return value

    def contradictions(self) -> Problems:
        given = self._given_threads()
        if len(set(given.values())) > 1:
            shown = ", ".join(f"{name} {value}" for name, value in given.items())
            yield (
                "intra_op_parallelism",
                f"{shown} given; the three names mean the same, so keep one",
            )
        depth = self.depth or 0
        if depth > _MAX_DEPTH:
            product = f"queue_depth {self.queue_depth}"
            if self.threads and self.threads > 1:
                product += f" * intra_op_parallelism {self.threads} = {depth}"
            yield (
                "queue_depth",
                f"{product} requests in flight, but allowed are at most {_MAX_DEPTH}; lower it",
            )


# ---- offload_param and offload_optimizer ---------------------------------------------------------
#
# `device` is the name of a tier. The counts are the user's caps. The plan computes a key that is
# not set; the defaults below are DeepSpeed's, and reach the policy only when the config contains
# them. `tiermem.paths` may name the folders instead of `nvme_path`; translate.py checks that one of
# the two does.

STATES_PER_TILE = 4
"""DeepSpeed's buffers that one Adam tile corresponds to: parameter, gradient, momentum,
variance."""


class OffloadDevice(str, enum.Enum):
    """Where offloaded state rests: none (the device), cpu (host memory) or nvme."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadState(str, enum.Enum):
    """What `Engine.offload_states` can be asked to move off the device.

    optim_states: moments; hp_params: fp32 masters; lp_params: weights; lp_grads: gradients;
    contiguous_grad_buffer: their buffer.
    """

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class _OffloadConfig(ConfigModel):
    """What both offload sections share."""

    device: OffloadDevice = OffloadDevice.none
    """Tier that the states rest on: none leaves them on the device, cpu is host memory, nvme is
    files. With auto the free memory decides."""
    nvme_path: Paths | None = None
    """Folder on the NVMe file system, or a list of folders on several, each with an optional cap
    and weight; needed when device is nvme and tiermem.paths is not given."""
    pin_memory: bool = False
    """Register host memory with the GPU driver. Not set: yes where there is a GPU. One arena serves
    both sections."""


class OffloadParamConfig(_OffloadConfig):
    """`zero_optimization.offload_param`: parameters that rest off the device. Needs stage 3."""

    section: ClassVar[str] = "zero_optimization.offload_param"

    device: OffloadDevice = OffloadDevice.none
    """Tier that the parameters rest on: none leaves them on the device, cpu is host memory, nvme is
    files. With auto the free memory decides."""
    buffer_count: Count = 5
    """Units of parameters present at once when they rest on NVMe, at least; with
    `tiermem.sizes_are_least` false as many, on any tier. 0: as if not set."""
    buffer_size: Count = 100_000_000
    """Most elements of one unit when parameters rest on NVMe; with `tiermem.strict` a larger unit
    is refused. 0: as if not set."""
    max_in_cpu: Count = 1_000_000_000
    """Elements of parameters that stay in host memory although their home is NVMe. Not set: 0."""


class OffloadOptimizerConfig(_OffloadConfig):
    """`zero_optimization.offload_optimizer`: optimizer states that rest off the device. Needs stage
    1, 2 or 3; nvme is nvme in all of them, where the reference takes it for cpu below stage 3."""

    section: ClassVar[str] = "zero_optimization.offload_optimizer"

    buffer_count: Count = 4
    """Buffers for states on NVMe, counted as the reference does: 4 are one tile of Adam's states in
    flight. At least so many; with `tiermem.sizes_are_least` false as many, on any tier. 0: as if
    not set."""
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    """Make states in place on NVMe; always so here."""
    ratio: Annotated[Number, Field(le=1.0)] = 1.0
    """Part of the states that rests on this section's device and is stepped on the CPU; the rest
    stays on the GPU, if there is one, and is stepped there."""
    super_offload: bool = False
    """Asynchronous CPU step of the reference system; does not exist here."""
    cpuadam_cores_perc: Annotated[Number, Field(le=1.0)] = 0.8
    """Part of the cores for super_offload; does not exist here."""

    def contradictions(self) -> Problems:
        if self.device is OffloadDevice.nvme and 0 < self.buffer_count < STATES_PER_TILE:
            yield (
                "buffer_count",
                f"{self.buffer_count} given, but one tile of Adam takes {STATES_PER_TILE} "
                f"(parameter, gradient, momentum, variance): {self.buffer_count} // "
                f"{STATES_PER_TILE} = 0 tiles; set at least {STATES_PER_TILE}, or "
                f"{2 * STATES_PER_TILE} with pipeline_read or pipeline_write, "
                f"{3 * STATES_PER_TILE} with both, or 0 to have it planned",
            )
