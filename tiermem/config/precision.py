"""`bf16` and `fp16`: the precision that the model computes in. fp32 when neither is on; never both.

fp16 gradients are scaled so that small ones survive. `loss_scale` 0 is dynamic: start at 2**initial_scale_power, halve
(after `hysteresis` overflows, not below min_loss_scale) when a step overflows, double after `loss_scale_window` steps
without.
"""

from __future__ import annotations

from typing import ClassVar

from tiermem.config.base import ConfigModel, Count, Number, PositiveCount, Whole

__all__ = ["Bf16Config", "Fp16Config"]


class Bf16Config(ConfigModel):
    """`bf16` (also `bfloat16`): compute in bfloat16, keep masters and moments in fp32."""

    section: ClassVar[str] = "bf16"

    enabled: bool = False
    """Compute in bfloat16."""
    immediate_grad_update: bool = False
    """Reduce a gradient as soon as it is final; always so here."""
    check_grad_overflow: bool = True
    """Do not apply a step whose gradients hold NaN or infinity; always so here (tiermem.on_nonfinite)."""
    bf16_master_weights_and_grads: bool = False
    """Keep masters in bfloat16, too; does not exist yet."""
    bf16_optimizer_states: bool = False
    """Keep moments in bfloat16, too; does not exist yet."""


class Fp16Config(ConfigModel):
    """`fp16`: compute in float16 with a loss scale, keep masters and moments in fp32."""

    section: ClassVar[str] = "fp16"

    enabled: bool = False
    """Compute in float16."""
    auto_cast: bool = False
    """Cast inputs to float16; does not exist here."""
    loss_scale: Number = 0.0
    """Static scale; 0 is dynamic."""
    initial_scale_power: Count = 16
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: Whole = 1000
    """Steps without overflow after which the dynamic scale doubles."""
    hysteresis: PositiveCount = 2
    """Overflows after which the dynamic scale halves."""
    consecutive_hysteresis: bool = False
    """Count only overflows in a row: a step without overflow refills the hysteresis."""
    min_loss_scale: Whole = 1
    """The dynamic scale never falls below this."""
    fp16_master_weights_and_grads: bool = False
    """Keep masters in float16, too; does not exist yet."""

    @property
    def is_dynamic(self) -> bool:
        """Whether the loss scale follows the overflows."""
        return self.loss_scale == 0

    def contradictions(self) -> list[tuple[str, str]]:
        if not (self.enabled and self.is_dynamic):
            return []
        return [
            (name, f"{getattr(self, name)} given; allowed with a dynamic loss scale is a whole number, 1 or more")
            for name in ("loss_scale_window", "min_loss_scale")
            if getattr(self, name) <= 0
        ]
