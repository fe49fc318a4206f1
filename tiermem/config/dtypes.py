"""DtypeName: a floating-point dtype as a key's value. Every spelling of the reference is taken; kept is the short one.

fp32    fp32, float32, float, torch.float32
bf16    bf16, bfloat16, torch.bfloat16
fp16    fp16, float16, half, torch.float16
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator

__all__ = ["DtypeName"]

_SPELLINGS = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def _short_name(value: Any) -> Any:
    """The short name of a spelling or a torch.dtype; anything else as it is, for the check that follows."""
    if not isinstance(value, (str, torch.dtype)):
        return value
    name = str(value).lower().removeprefix("torch.")
    return _SPELLINGS.get(name, name)


DtypeName = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_short_name)]
"""fp32, bf16 or fp16, under any of its spellings."""
