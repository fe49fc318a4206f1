"""Loss scale: fp16 gradients are multiplied so that small ones survive, and divided again inside the step.

    static    the scale given
    dynamic   halves when a step overflows (after `hysteresis` overflows), doubles after `window` steps in a row without

A step that overflows is skipped and leaves every state untouched; this class only decides what the next scale is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tiermem.config.precision import Fp16Config


class LossScaler:
    """The scale of an fp16 run.

    Args:
        config: the section `fp16`.
        is_on: whether gradients pass through fp16; else the scale is 1 for ever. Default: what the section says.
    """

    def __init__(self, config: Fp16Config, is_on: bool | None = None) -> None:
        is_on = config.enabled if is_on is None else is_on
        self._config = config
        self._is_dynamic = is_on and config.is_dynamic
        self.scale = 1.0
        if is_on:
            self.scale = float(2**config.initial_scale_power) if config.is_dynamic else float(config.loss_scale)
        self._hysteresis_left = config.hysteresis
        self._num_good = 0  # steps since the last overflow or doubling

    @property
    def loss_scale(self) -> float:
        """The scale, under the reference's name."""
        return self.scale

    cur_scale = loss_scale

    def state_dict(self) -> dict[str, float | int]:
        """What the next scales depend on."""
        return {"scale": self.scale, "hysteresis_left": self._hysteresis_left, "num_good": self._num_good}

    def load_state_dict(self, state_dict: Mapping[str, float | int]) -> None:
        """Goes on from what `state_dict` returned; a scale that does not change stays as the config says.

        Raises ValueError for what is no such state.
        """
        scale, left, good = (state_dict.get(name) for name in ("scale", "hysteresis_left", "num_good"))
        if not isinstance(scale, float) or not 0 < scale < math.inf or type(left) is not int or type(good) is not int:
            raise ValueError(f"a loss scale's state has scale, hysteresis_left and num_good; given {dict(state_dict)}")
        if self._is_dynamic:
            self.scale, self._hysteresis_left, self._num_good = scale, left, good

    def update(self, has_overflowed: bool) -> None:
        """Takes note of a step and sets the scale of the next."""
        if not self._is_dynamic:
            return
        if has_overflowed:
            self._num_good = 0
            self._hysteresis_left -= 1
            if self._hysteresis_left <= 0:
                self.scale = max(self.scale / 2, float(self._config.min_loss_scale))
            self._hysteresis_left = max(self._hysteresis_left, 1)
            return
        self._num_good += 1
        if self._config.consecutive_hysteresis:
            self._hysteresis_left = self._config.hysteresis
        if self._num_good % self._config.loss_scale_window == 0:
            self.scale *= 2
            self._hysteresis_left = self._config.hysteresis
