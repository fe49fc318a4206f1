"""`tiermem`: the section for what the documented keys have no word for. Its keys are fields of the policy.

"tiermem": {"host_bytes": "2GiB", "paths": ["/mnt/nvme0", "/mnt/nvme1"], "precision": "compact"}
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tiermem.config.base import Bytes, ConfigModel, Count, Number
from tiermem.config.offload import OffloadDevice
from tiermem.config.paths import Paths
from tiermem.config.precision import PrecisionConfig

__all__ = ["OwnConfig"]


class OwnConfig(ConfigModel):
    """`tiermem`: budgets and choices that are this library's own. Sizes are bytes, or strings such as "2GiB"."""

    section: ClassVar[str] = "tiermem"

    host_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    """Budget of host memory per node, divided by the ranks on it. Not set: what the plan needs."""
    disk_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    """Most bytes to take on all NVMe paths together. Not set: what the plan needs."""
    paths: Paths | None = None
    """Folders on NVMe file systems, each with an optional cap and weight. Not set: those of nvme_path."""
    resident_bytes: Bytes | None = None
    """Optimizer state kept in host memory although its home is NVMe."""
    grads: OffloadDevice | None = None
    """Tier of reduced gradients between backward and step. Not set: cpu when the budget has room, else nvme."""
    step_in_backward: bool = False
    """Step each unit as its gradients appear and hold none: no clipping, no accumulation, non-finite raises."""
    on_nonfinite: Literal["skip", "raise", "apply"] = "skip"
    """A step whose gradients hold NaN or infinity: leave every state untouched and count it, raise, or apply it all the same
    (not clipped, since it has no norm). Not set, and bf16.check_grad_overflow false: apply."""
    precision: PrecisionConfig | None = None
    """What masters, moments and gradients are kept in: exact, compact, bf16 or tiny, or an object. Not set: exact, or what
    the switches in bf16 and fp16 say."""
    master_from: Literal["param", "init"] = "param"
    """fp32 masters start from the low-precision copy, or from the fp32 values that zero.Init saw."""
    durability: Literal["checkpoint", "step", "none"] = "checkpoint"
    """When what rests on NVMe becomes durable there: when a checkpoint is saved, after every step, or never. Each durable state
    takes its bytes on disk once more, and two of them with "step"; none halves the disk. With "step" a run that is closed
    leaves its last step in the store's folder."""
    keep: Annotated[Count, Field(ge=1)] = 1
    """Tags that stay on the NVMe paths; saving one more drops the oldest, with a warning. Each takes its bytes on disk."""
    verify: Literal["always", "sample", "resume"] = "always"
    """When checksums of what is read from NVMe are compared: at every read, at one in 16, or only when a run is resumed."""
    engine: Literal["auto", "uring", "aio", "threads"] = "auto"
    """How files are read and written; auto takes the first that works."""
    strict: bool = False
    """Refuse sections and switches that do nothing here, such as monitors and profilers; false: drop them with a warning."""
    measured: dict[str, Any] | None = None
    """What `tiermem tune` noted beside its settings: machine, date, rates."""
    timeout_s: Annotated[Number, Field(gt=0.0)] = 1800.0
    """Longest wait for another rank before the run stops with an error, in seconds."""
    join_timeout_s: Annotated[Number, Field(gt=0.0)] = 60.0
    """Longest wait for all ranks to start, in seconds, where the process group is made here; no more than timeout_s."""
