"""The two offload sections: where parameters and optimizer states rest, and the buffers they move through.

`device` is a tier's name. The counts are the user's caps: a key that is not set is computed by the plan, so the
documented defaults below stand for what the reference system does, and reach the policy only when they are written out.
Folders may stand in `tiermem.paths` instead (`paths.py`); that there are some is checked where both sections are known.
"""

from __future__ import annotations

import enum
import warnings
from typing import Annotated, ClassVar

import pydantic
import torch
from pydantic import Field

from tiermem.config.base import ConfigModel, Count, Number
from tiermem.config.paths import Paths

__all__ = ["STATES_PER_TILE", "OffloadDevice", "OffloadOptimizerConfig", "OffloadParamConfig", "OffloadState"]

STATES_PER_TILE = 4
"""Buffers of the reference system that one Adam tile takes: parameter, gradient, momentum, variance."""


class OffloadDevice(str, enum.Enum):
    """Where offloaded state rests."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadState(str, enum.Enum):
    """What `Engine.offload_states` can be asked to move off the device."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class _OffloadConfig(ConfigModel):
    """What both offload sections share."""

    device: OffloadDevice = OffloadDevice.none
    """Tier that the states rest on: none leaves them on the device, cpu is host memory, nvme is files."""
    nvme_path: Paths | None = None
    """Folder on the NVMe file system, or a list of folders on several, each with an optional cap and weight; needed when
    device is nvme and tiermem.paths is not given."""
    pin_memory: bool = False
    """Register host memory with the GPU driver. Not set: yes where there is a GPU. One arena serves both sections."""


class OffloadParamConfig(_OffloadConfig):
    """`zero_optimization.offload_param`: parameters that rest off the device. Needs stage 3."""

    section: ClassVar[str] = "zero_optimization.offload_param"

    buffer_count: Count = 5
    """Units of parameters present at once when they rest on NVMe; 0 as if not set."""
    buffer_size: Count = 100_000_000
    """Most elements of one unit when parameters rest on NVMe; a larger unit is refused. 0: as if not set."""
    max_in_cpu: Count = 1_000_000_000
    """Elements of parameters that stay in host memory although their home is NVMe. Not set: 0."""


class OffloadOptimizerConfig(_OffloadConfig):
    """`zero_optimization.offload_optimizer`: optimizer states that rest off the device. Needs stage 1, 2 or 3; nvme is nvme
    in all of them, where the reference takes it for cpu below stage 3."""

    section: ClassVar[str] = "zero_optimization.offload_optimizer"

    buffer_count: Count = 4
    """Buffers for states on NVMe, counted as the reference does: 4 are one tile of Adam's states in flight, 12 let reading,
    stepping and writing overlap. 0: as if not set."""
    pipeline_read: bool = False
    """Read the next tile while this one is stepped. Not set: on."""
    pipeline_write: bool = False
    """Write the previous tile while this one is stepped. Not set: on."""
    fast_init: bool = False
    """Make states in place on NVMe; always so here."""
    ratio: Annotated[Number, Field(le=1.0)] = 1.0
    """Part of the states stepped on the CPU, the rest on the GPU; only all of them here."""
    super_offload: bool = False
    """Asynchronous CPU step of the reference system; does not exist here."""
    cpuadam_cores_perc: Annotated[Number, Field(le=1.0)] = 0.8
    """Part of the cores for super_offload; does not exist here."""

    @pydantic.field_validator("ratio")
    @classmethod
    def _refuse_gpu_steps(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(f"{value} given, but {_why_no_gpu_steps(1.0 - value)}; allowed is 1.0, all on the CPU")
        return value

    def contradictions(self) -> list[tuple[str, str]]:
        if self.device is not OffloadDevice.nvme or not 0 < self.buffer_count < STATES_PER_TILE:
            return []
        return [
            (
                "buffer_count",
                f"{self.buffer_count} given, but one tile of Adam takes {STATES_PER_TILE} (parameter, gradient, "
                f"momentum, variance): {self.buffer_count} // {STATES_PER_TILE} = 0 tiles; set at least "
                f"{STATES_PER_TILE}, or {2 * STATES_PER_TILE} with pipeline_read or pipeline_write, "
                f"{3 * STATES_PER_TILE} with both, or 0 to have it planned",
            )
        ]

    @pydantic.model_validator(mode="after")
    def _warn_of_too_few_buffers(self) -> OffloadOptimizerConfig:
        tiles = self.buffer_count // STATES_PER_TILE
        at_once = 1 + sum(getattr(self, key) or not self.is_set(key) for key in ("pipeline_read", "pipeline_write"))
        if self.device is OffloadDevice.nvme and self.is_set("buffer_count") and 0 < tiles < at_once:
            what = "nothing overlaps" if tiles == 1 else "reading and writing take turns"
            warnings.warn(
                f"{self.path_of('buffer_count')} is {self.buffer_count}, which is {self.buffer_count} // {STATES_PER_TILE} = "
                f"{tiles} tile buffers, but what pipeline_read and pipeline_write ask for takes {at_once} at once: {what}. "
                f"Set {at_once * STATES_PER_TILE}, or remove the key to have it planned",
                stacklevel=2,
            )
        return self


def _why_no_gpu_steps(share: float) -> str:
    if not torch.accelerator.is_available():
        return f"there is no GPU here that could step the other {share:.0%} of the states"
    return f"stepping the other {share:.0%} of the states on the GPU is not built yet"
