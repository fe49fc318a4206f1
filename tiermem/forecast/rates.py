"""Rates: how fast one node moves bytes and one rank computes. Measured somewhere else; here they only get names.

disk       one node's paths together; its ranks share them. A shared disk moves one direction at a time (what a single
           queue of a virtual disk does); a duplex one both at once
link       between HOST and a rank's GPU, each way; no link where the maths runs on the CPU
network    what one rank sends or receives; near: to and from ranks of its own node
kernels    one rank's optimizer steps, in bytes of memory traffic a second; gradients: its passes over gradients, likewise

compute    seconds of maths, from what a block took (`Compute`), or from a peak (`Compute.of_peak`)
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Compute(NamedTuple):
    """How long the maths of one micro-batch takes a rank.

    The first two are for each parameter that multiplies. What lies outside every list of blocks (the head, the loss) takes
    `rest_*`; None: it is counted by its parameters like everything else.
    """

    forward_s: float
    backward_s: float
    rest_forward_s: float | None = None
    rest_backward_s: float | None = None

    def shared_by(self, num_ranks: int) -> Compute:
        """What it takes each of so many ranks that share the processor on which it was measured."""
        rest = (None if each is None else each * num_ranks for each in (self.rest_forward_s, self.rest_backward_s))
        return Compute(self.forward_s * num_ranks, self.backward_s * num_ranks, *rest)

    @staticmethod
    def of_peak(flops: float, num_tokens: int, is_checkpointing: bool = False) -> Compute:
        """From operations per second that are reached: 2 per parameter and token forward, 4 backward, 2 to recompute.

        Products of activations with each other (attention's scores) are left out: about seq / (6 x hidden) of the rest.
        """
        forward = 2 * num_tokens / flops
        return Compute(forward, forward * (3 if is_checkpointing else 2))


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes per second. Raises ValueError for one that is not positive."""

    disk_read_bytes_s: float
    disk_write_bytes_s: float
    link_bytes_s: float = 25e9
    network_bytes_s: float = 10e9
    kernel_bytes_s: float = 50e9
    is_disk_duplex: bool = False
    near_bytes_s: float | None = None
    """Between ranks of one node. None: as fast as the network."""
    gradient_bytes_s: float | None = None
    """Of gradients on their way home: read, added up and written. None: as fast as kernels."""
    sum_bytes_s: float | None = None
    """Checksums of what is read from the disk and written there. None: they cost nothing."""
    use_s: float = 150e-6
    """Seconds of bookkeeping around each module's forward, and each backward."""
    tile_s: float = 100e-6
    """Seconds of bookkeeping around each tile of a step."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_none = field.name in ("gradient_bytes_s", "near_bytes_s", "sum_bytes_s") and value is None
            if field.name != "is_disk_duplex" and not (
                may_be_none or value > 0 or (field.name in ("use_s", "tile_s") and value == 0)
            ):
                raise ValueError(f"{field.name} is {value}; it must be more than 0")

    def of_rank(self, ranks_on_node: int) -> Rates:
        """What one of so many ranks on a node has, all of them busy: its part of the disks."""
        return dataclasses.replace(
            self,
            disk_read_bytes_s=self.disk_read_bytes_s / ranks_on_node,
            disk_write_bytes_s=self.disk_write_bytes_s / ranks_on_node,
        )
