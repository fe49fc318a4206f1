"""`optimizer`: which optimizer the engine builds, and its settings.

Adam and AdamW exist. As in the reference, "Adam" means AdamW (decoupled weight decay) unless `adam_w_mode` is false.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import Field, ValidationInfo

from tiermem.config.base import ConfigModel, Number

__all__ = ["AdamParams", "OptimizerConfig"]

_KNOWN = {"adam": "Adam", "adamw": "AdamW"}

Beta = Annotated[Number, Field(lt=1.0)]
"""A decay rate in [0, 1)."""


class AdamParams(ConfigModel):
    """`optimizer.params` of Adam and AdamW."""

    section: ClassVar[str] = "optimizer.params"

    lr: Number = 1e-3
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: Number = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Number = 0.0
    """Weight decay per step: times lr on the weight (AdamW), or added to the gradient (adam_w_mode false)."""
    bias_correction: bool = True
    """Divide the moments by 1 - beta**step."""
    adam_w_mode: bool = True
    """Whether weight decay is decoupled."""
    torch_adam: bool = False
    """Use torch's own Adam; does not exist for sharded states."""
    amsgrad: bool = False
    """Use the largest second moment so far; does not exist here."""
    fp32_optimizer_states: bool = True
    """Keep moments in fp32; always so here."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _point_to_clipping(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("max_grad_norm") is not None:
            raise ValueError(
                f'max_grad_norm is not a setting of the optimizer; set "gradient_clipping": {raw["max_grad_norm"]} at '
                "the top of the config instead"
            )
        return raw


class OptimizerConfig(ConfigModel):
    """`optimizer`: its type and settings."""

    section: ClassVar[str] = "optimizer"

    type: str
    """Adam or AdamW, in any case."""
    params: AdamParams = AdamParams()
    """Settings of the optimizer."""
    legacy_fusion: bool = False
    """Fused optimizer of old; does not exist here."""

    @pydantic.field_validator("type")
    @classmethod
    def _know_type(cls, value: str) -> str:
        if value.lower() not in _KNOWN:
            raise ValueError(
                f"{value!r} given; allowed are {' and '.join(_KNOWN.values())}, in any case: other optimizers do not "
                "exist here yet"
            )
        return _KNOWN[value.lower()]

    @pydantic.field_validator("params", mode="before")
    @classmethod
    def _read_params_of_known_types_only(cls, value: Any, info: ValidationInfo) -> Any:
        return value if "type" in info.data else {}

    @property
    def is_decoupled(self) -> bool:
        """Whether weight decay acts on the weight (AdamW) rather than on the gradient."""
        return self.type == "AdamW" or self.params.adam_w_mode

    def contradictions(self) -> list[tuple[str, str]]:
        if self.type == "AdamW" and not self.params.adam_w_mode:
            return [("params.adam_w_mode", "false given, but AdamW decouples weight decay; set type to Adam")]
        return []
