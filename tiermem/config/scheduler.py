"""`scheduler`: which learning-rate schedule the engine builds and steps, once per optimizer step.

The five documented schedules and those of torch.optim.lr_scheduler; `tiermem/schedule.py` holds and builds them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pydantic
from pydantic import Field, ValidationInfo

from tiermem.config.base import CombinedError, ConfigModel
from tiermem.config.keys import is_auto
from tiermem.schedule import check_params, schedule_class

__all__ = ["SchedulerConfig"]


class SchedulerConfig(ConfigModel):
    """`scheduler`: its type and settings."""

    section: ClassVar[str] = "scheduler"

    type: str
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class of torch.optim.lr_scheduler."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the schedule, by name; those that are "auto" are left out."""

    @pydantic.field_validator("type")
    @classmethod
    def _know_type(cls, value: str) -> str:
        schedule_class(value)
        return value

    @pydantic.field_validator("params")
    @classmethod
    def _know_params(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        params = {name: inner for name, inner in value.items() if not is_auto(inner)}
        problems = check_params(info.data["type"], params) if "type" in info.data else []
        if problems:
            raise CombinedError(problems)
        return params
