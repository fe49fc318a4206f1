"""The ZeRO-Infinity paper's own arithmetic (arXiv 2104.07857): memory of models that may not exist yet, and bandwidth it takes.

A Transformer of `num_layers` layers of width `hidden`, all bytes counted as the paper counts them: 16-bit weights and
gradients, fp32 master, gradient, momentum and variance of Adam, 20 bytes for each parameter.

    section 3   what has to lie somewhere         parameters, model states, activations, checkpoints, working memory
    section 4   how fast it has to come           arithmetic intensity, efficiency = intensity x bandwidth /
                                                                                    (intensity x bandwidth + peak)

Sizes of tiermem's own are in `zero/plan.py`; they differ where tiermem keeps fewer bytes.
"""

from __future__ import annotations

import dataclasses

STATE_BYTES = 20  # per parameter: 2 weight, 2 gradient, 4 master, 4 momentum, 4 variance, 4 gradient in fp32
_HALF = 2  # bytes of a 16-bit number


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A model as the paper describes one.

    `checkpoint_interval` is the number of blocks between two activation checkpoints (the paper's ci).
    """

    num_layers: int
    hidden: int
    num_heads: int
    checkpoint_interval: int = 1

    @property
    def num_params(self) -> int:
        """Of the layers: four matrices of attention and two of 4 x hidden, 12 hidden^2 each layer."""
        return 12 * self.num_layers * self.hidden**2

    @property
    def state_bytes(self) -> int:
        """Model states: 240 bytes x layers x hidden^2."""
        return STATE_BYTES * self.num_params

    def checkpoint_bytes(self, batch: int, seq: int) -> int:
        """Activation checkpoints of a batch of sequences: one 16-bit vector per token and checkpoint."""
        return _HALF * batch * seq * self.hidden * self.num_layers // self.checkpoint_interval

    def activation_bytes(self, batch: int, seq: int) -> int:
        """All activations of a batch, without checkpoints."""
        return self._layer_activation_bytes(batch, seq) * self.num_layers

    @property
    def state_working_bytes(self) -> int:
        """Model state working memory: weights and gradients of the largest operator, hidden to 4 x hidden."""
        return 2 * _HALF * self.hidden * 4 * self.hidden

    def activation_working_bytes(self, batch: int, seq: int) -> int:
        """Activation working memory: what is recomputed between two checkpoints."""
        return self._layer_activation_bytes(batch, seq) * self.checkpoint_interval

    def operations(self, batch: int, seq: int) -> int:
        """Floating-point operations of an iteration: 2 per parameter and token forward, 2 recomputing, 4 backward."""
        return 8 * batch * seq * self.num_params

    def _layer_activation_bytes(self, batch: int, seq: int) -> int:
        """16 x hidden + 2 x heads x seq numbers a token.

        The paper's formula leaves the size of a number open; its table comes out with two bytes.
        """
        return _HALF * batch * seq * (16 * self.hidden + 2 * self.num_heads * seq)


PAPER_BATCH, PAPER_SEQ, PAPER_GPUS = 32, 1024, 16
"""The setting of the paper's table of memory (figure 2a): sequences of a node, tokens of each, GPUs of a node."""

PAPER_MODELS = (
    Transformer(80, 10 * 1024, 128),
    Transformer(100, 20 * 1024, 160),
    Transformer(128, 25 * 1024, 256),
    Transformer(195, 64 * 1024, 512),
    Transformer(315, 160 * 1024, 1024),
)
"""The models of that table, 0.1 to 100 trillion parameters."""


def weight_intensity(batch: int, seq: int) -> float:
    """Operations per byte of weights, loaded forward, recomputing and backward, and of gradients, stored once."""
    return float(seq * batch)


def optimizer_intensity(batch: int, seq: int) -> float:
    """Operations per byte of optimizer states: 16 bytes of each parameter are read, and written."""
    return seq * batch / 4


def activation_intensity(hidden: int, checkpoint_interval: int = 1) -> float:
    """Operations per byte of activation checkpoints, each written once and read once."""
    return 24.0 * hidden * checkpoint_interval


def efficiency(intensity: float, bandwidth_bytes_s: float, peak_flops: float) -> float:
    """Part of the peak that is reached when moving and computing do not overlap: 0 to 1."""
    reached = intensity * bandwidth_bytes_s
    return reached / (reached + peak_flops)


def bandwidth_for(intensity: float, wanted_efficiency: float, peak_flops: float) -> float:
    """Bytes per second that an efficiency takes. Raises ValueError unless it lies between 0 and 1."""
    if not 0 < wanted_efficiency < 1:
        raise ValueError(f"the efficiency is {wanted_efficiency}; it must lie between 0 and 1, both excluded")
    return wanted_efficiency / (1 - wanted_efficiency) * peak_flops / intensity
