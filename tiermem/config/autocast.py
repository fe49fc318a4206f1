"""`torch_autocast`: the engine's forward runs under torch.autocast. Alone, or together with bf16 or fp16.

torch decides operation by operation what is computed in the lower dtype. lower_precision_safe_modules names module classes
whose own parameters lose nothing by it: their gradients cross ranks in the autocast dtype, and with stage 3 on several ranks
fp32 weights are cast to it before they are gathered (zero/weights/lowering.py), so that autograd keeps no copy of them.

On one rank weights are read straight into place in their own dtype, and with parameters in fp32 autograd keeps the lower copy
of every weight from forward to backward, 2 bytes per parameter that no budget counts: with offloaded parameters set
bf16.enabled as well, or checkpoint activations.
"""

from __future__ import annotations

import difflib
import importlib
from typing import ClassVar

import pydantic
from torch import nn

from tiermem.config.base import ConfigModel
from tiermem.config.dtypes import DtypeName

__all__ = ["AutocastConfig"]

_SAFE: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class AutocastConfig(ConfigModel):
    """`torch_autocast`: torch.autocast around forward."""

    section: ClassVar[str] = "torch_autocast"

    enabled: bool = False
    """Run forward under torch.autocast."""
    dtype: DtypeName | None = None
    """bf16 or fp16. Not set: what torch takes for the device. With fp16 the loss is scaled as section fp16 says."""
    lower_precision_safe_modules: tuple[str, ...] | None = None
    """Module classes, such as "torch.nn.Linear", whose parameters' gradients are reduced in this dtype, and which are gathered
    in it (those forwards then run under autocast only). Not set: torch.nn's Linear, Conv1d, Conv2d and Conv3d. []: none."""

    @pydantic.field_validator("dtype")
    @classmethod
    def _only_lower(cls, value: str | None) -> str | None:
        if value == "fp32":
            raise ValueError("fp32 given, but autocast lowers the precision; allowed are bf16 and fp16")
        return value

    @property
    def safe_classes(self) -> tuple[type[nn.Module], ...]:
        """The classes of lower_precision_safe_modules. Raises ValueError for a name that is none."""
        names = self.lower_precision_safe_modules
        return _SAFE if names is None else tuple(_class_of(name) for name in names)

    def contradictions(self) -> list[tuple[str, str]]:
        found = []
        for name in (self.lower_precision_safe_modules or ()) if self.enabled else ():
            try:
                _class_of(name)
            except ValueError as error:
                found.append(("lower_precision_safe_modules", str(error)))
        return found


def _class_of(path: str) -> type[nn.Module]:
    """The module class at a dotted path. Raises ValueError that names the nearest there is."""
    package, _, name = path.rpartition(".")
    if not package:
        raise ValueError(f"{path!r} given; allowed is the full path of a class, such as 'torch.nn.{path}'")
    try:
        module = importlib.import_module(package)
    except Exception as error:  # whatever the user's module raises when it is imported
        raise ValueError(f"{path!r} given, but {package} cannot be imported: {error}") from error
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    if found is not None:
        raise ValueError(f"{path!r} given, which is no class of modules but a {type(found).__name__}")
    there = [each for each, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)]
    near = difflib.get_close_matches(name, there, n=1)
    hint = f"; did you mean {package}.{near[0]}?" if near else ""
    raise ValueError(f"{path!r} given, but {package} has no {name}{hint}")
