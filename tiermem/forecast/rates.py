"""Rates of a node; the arithmetic of the ZeRO-Infinity paper (arXiv 2104.07857)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

# ---- rates ---------------------------------------------------------------------------------------


class Compute(NamedTuple):
    """The seconds of maths that a rank needs for one micro-batch.

    `forward_s` and `backward_s` are seconds per element of the parameters that multiply. `rest_*`
    are the seconds of all modules outside the lists of blocks (the head, the loss); None: those are
    computed from their parameters, too.
    """

    forward_s: float
    backward_s: float
    rest_forward_s: float | None = None
    rest_backward_s: float | None = None
    num_tokens: int | None = None
    """Of the micro-batch; None: not known, so that all experts are expected to be used."""

    def shared_by(self, num_ranks: int) -> Compute:
        """Returns the seconds of each of num_ranks ranks that share the processor on which these
        were measured."""
        *measured, num_tokens = self
        return Compute._make([*(s and s * num_ranks for s in measured), num_tokens])

    def recomputing(self, part: float) -> Compute:
        """Returns the seconds of the same maths with the forward of a part of the blocks made again
        in backward; less than 0: of a part no longer."""
        return self._replace(backward_s=self.backward_s + part * self.forward_s)

    @staticmethod
    def of_peak(flops: float, num_tokens: int, recomputed: float = 0.0) -> Compute:
        """Computes seconds from operations per second: 2 per parameter and token forward, 4
        backward, 2 in the part of the blocks that is recomputed.

        Products of activations with each other (attention scores) are left out: about seq / (6 x
        hidden) of the rest.
        """
        forward = 2 * num_tokens / flops
        return Compute(forward, forward * 2, num_tokens=num_tokens).recomputing(recomputed)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates in bytes per second, and two overheads in seconds. Raises ValueError for a rate that is
    not positive."""

    disk_read_bytes_s: float
    """Of all paths of a node together; its ranks share them."""
    disk_write_bytes_s: float
    """Of all paths of a node together."""
    link_bytes_s: float = 25e9
    """Between HOST and one rank's GPU, each direction; unused when the CPU computes."""
    network_bytes_s: float = 10e9
    """That one rank sends or receives."""
    kernel_bytes_s: float = 50e9
    """Memory traffic of one rank's optimizer steps."""
    host_memory_bytes_s: float = 65e9
    """Of HOST's memory, for kernels and copies over the link together."""
    is_disk_duplex: bool = False
    """A duplex disk reads and writes at once; any other does one at a time, like the single queue
    of a virtual disk."""
    near_bytes_s: float | None = None
    """Between ranks of one node. None: as fast as the network."""
    gradient_bytes_s: float | None = None
    """Of gradients on their way home: read, added up and written. None: as fast as kernels."""
    sum_bytes_s: float | None = None
    """Checksums of what is read from the disk and written there. None: they cost nothing."""
    use_s: float = 150e-6
    """Seconds of bookkeeping around each module's forward, and each backward."""
    tile_s: float = 25e-6
    """Seconds of bookkeeping around each tile of a step: 0.16 s were measured for 6,400."""
    device_memory_bytes_s: float = 800e9
    """Of an accelerator's memory, reading and writing together."""
    step_passes: float | None = None
    """Passes of an accelerator's optimizer step over states, weight and gradient, and of a norm
    over gradients. None: as torch operations make."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_none = field.default is None and value is None
            if field.name != "is_disk_duplex" and not (
                may_be_none or value > 0 or (field.name in ("use_s", "tile_s") and value == 0)
            ):
                raise ValueError(f"{field.name} is {value}; it must be more than 0")

    def of_rank(self, ranks_on_node: int) -> Rates:
        """Returns the rates of one rank when all ranks of a node are busy: the disk rates divided
        by the ranks."""
        return dataclasses.replace(
            self,
            disk_read_bytes_s=self.disk_read_bytes_s / ranks_on_node,
            disk_write_bytes_s=self.disk_write_bytes_s / ranks_on_node,
        )


# ---- arithmetic of the ZeRO-Infinity paper -------------------------------------------------------
#
# Section 3 of the paper (arXiv 2104.07857) counts the bytes of parameters, model states,
# activations, checkpoints and working memory: 16-bit weights and gradients, fp32 master, gradient,
# momentum and variance of Adam, 20 bytes per parameter. tiermem's own sizes are in `plans/plan.py`;
# they are smaller where tiermem keeps fewer bytes.

# per parameter: 2 weight, 2 gradient, 4 master, 4 momentum, 4 variance, 4 gradient in fp32
STATE_BYTES = 20
_HALF = 2  # bytes of a 16-bit number


class Transformer(NamedTuple):
    """A Transformer as the paper describes it: `num_layers` layers of width `hidden`, each with an
    activation checkpoint (the paper's ci is 1)."""

    num_layers: int
    hidden: int
    num_heads: int

    @property
    def num_params(self) -> int:
        """Parameters of the layers: 12 x hidden^2 each, four attention matrices and two matrices of
        hidden x 4 hidden."""
        return 12 * self.num_layers * self.hidden**2

    @property
    def state_bytes(self) -> int:
        """Model states: 240 bytes x layers x hidden^2."""
        return STATE_BYTES * self.num_params

    def checkpoint_bytes(self, batch: int, seq: int) -> int:
        """Activation checkpoints of a batch of sequences: one 16-bit vector per token and
        checkpoint."""
        return _HALF * batch * seq * self.hidden * self.num_layers

    def activation_bytes(self, batch: int, seq: int) -> int:
        """All activations of a batch, without checkpoints."""
        return self.activation_working_bytes(batch, seq) * self.num_layers

    @property
    def state_working_bytes(self) -> int:
        """Model state working memory: weights and gradients of the largest operator, hidden to 4 x
        hidden."""
        return 2 * _HALF * self.hidden * 4 * self.hidden

    def activation_working_bytes(self, batch: int, seq: int) -> int:
        """Activation working memory: the activations of a layer, which are recomputed between two
        checkpoints: 16 x hidden + 2 x heads x seq numbers per token.

        The paper's formula does not give the size of a number; 2 bytes reproduce its table.
        """
        return _HALF * batch * seq * (16 * self.hidden + 2 * self.num_heads * seq)


PAPER_BATCH = 32
PAPER_SEQ = 1024
PAPER_GPUS = 16
"""The setting of the paper's table of memory (figure 2a): sequences of a node, tokens of each, GPUs
of a node."""

PAPER_MODELS = (
    Transformer(80, 10 * 1024, 128),
    Transformer(100, 20 * 1024, 160),
    Transformer(128, 25 * 1024, 256),
    Transformer(195, 64 * 1024, 512),
    Transformer(315, 160 * 1024, 1024),
)
"""The models of that table, with 0.1 to 100 trillion parameters."""
