"""The section `tiermem`: settings that DeepSpeed's keys do not cover.

Its keys are fields of OffloadPolicy, with their names, defaults, allowed words, ranges and
docstrings: a field without an annotation Key is set by the key of its name (config/__init__.py says
how to add one). Beside them stand engine, strict and measured. Sizes are bytes, or strings such as "2GiB".

    "tiermem": {"host_bytes": "2GiB", "paths": ["/mnt/nvme0", "/mnt/nvme1"], "precision": "compact"}
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from tiermem.config.io import OffloadDevice, Paths
from tiermem.config.precision import PrecisionConfig
from tiermem.policy import OffloadPolicy
from tiermem.precision import Range, marks_of, parts_of
from tiermem.section import SET_BY, Bytes, ConfigModel, Number, Whole
from tiermem.swap.base.engines import ENGINES

_WRITTEN_OTHERWISE = ("paths", "precision", "grads", "activations")
"""Fields whose values have a form of their own in a config; OwnConfig names their types."""


def _kind_of(field: str) -> Any:
    """The type of the key that sets a field: the field's words, or numbers in its range."""
    limits = dict(marks_of(OffloadPolicy, Range))
    bounds = _bounds_of(limits[field]) if field in limits else None
    numbers: dict[Any, Any] = {int: Bytes if field.endswith("_bytes") else Whole, float: Number}
    kinds = (
        Annotated[numbers[part], bounds] if part in numbers else part
        for part in parts_of(OffloadPolicy)[field]
    )
    return functools.reduce(operator.or_, kinds)


def _bounds_of(limit: Range) -> Any:
    high = None if math.isinf(limit.high) else limit.high
    is_open = limit.low == math.ulp(0.0)
    return Field(gt=0.0, le=high) if is_open else Field(ge=limit.low, le=high)


EngineName: Any = Literal[ENGINES]
_keys: dict[str, Any] = {
    setting.field: (_kind_of(setting.field), getattr(OffloadPolicy, setting.field))
    for path, setting in SET_BY.items()
    if path == f"tiermem.{setting.field}" and setting.field not in _WRITTEN_OTHERWISE
}
_KeysOfPolicy: Any = pydantic.create_model("_KeysOfPolicy", __base__=ConfigModel, **_keys)


class OwnConfig(_KeysOfPolicy, ConfigModel):  # type: ignore[misc]  # it is made above
    """`tiermem`: budgets and choices that are this library's own. Sizes are bytes, or strings such
    as "2GiB"."""

    section: ClassVar[str] = "tiermem"

    paths: Paths | None = None
    precision: PrecisionConfig | None = None
    grads: Literal["none", "cpu", "nvme", "device"] | None = None
    activations: OffloadDevice | None = None
    engine: EngineName = "auto"
    """How files are read and written; auto takes the first that works."""
    strict: bool = False
    """Refuse sections and switches that do nothing here, such as monitors and profilers; false:
    drop them with a warning."""
    measured: dict[str, Any] | None = None
    """What `tiermem tune` noted beside its settings: machine, date, rates."""

    @property
    def takes_more(self) -> bool:
        """Whether small sizes are least sizes."""
        return self.sizes_are_least if self.is_set("sizes_are_least") else not self.strict
