"""Messages: what ranks on CPUs send each other directly where gloo's collectives would copy, or mistake one call for another.

    send_to_all    my piece to every other rank, theirs to me        an all-gather, received where each piece belongs
    swap_rows      row r of mine to rank r, row r from it            an all-to-all

gloo tells its collectives apart by counting them: where ranks have gone different ways it would match calls of different sizes,
which ends the process. A message carries a tag instead, made of what it is for, so that such ranks wait, and watch.py says
where they parted. Other backends do the collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tiermem.zero.ranks.collectives import Pending, explained, start
from tiermem.zero.ranks.topology import Topology

GATHER_TAG = 1 << 20  # users' own begin at 0
REDUCE_TAG = 1 << 29


def sends_directly(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether tensors of a device travel as messages in a group."""
    return group is not None and device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group)


def send_to_all(group: dist.ProcessGroup, me: int, pieces: Sequence[torch.Tensor], tag: int) -> list[Any]:
    """Starts messages of every rank's piece, between every two ranks of a group; returns what is to be waited for."""
    others = [(rank, piece) for rank, piece in enumerate(pieces) if rank != me]
    receives = [group.recv([piece], rank, tag) for rank, piece in others]
    return receives + [group.send([pieces[me]], rank, tag) for rank, _ in others]


def swap_rows(
    topology: Topology, what: str, received: torch.Tensor, sent: torch.Tensor, among: str, number: int
) -> Pending:
    """Starts sending each rank of a dimension its row, and getting one from each. Does not block. Raises RankLost.

    Args:
        received, sent: flat, of as many equal rows as there are ranks.
        number: of what it is for, the same on every rank and another for anything else.
    """
    group = topology.group_of(among)
    if not sends_directly(group, sent.device):
        return start(topology, what, dist.all_to_all_single, received, sent, among=among)
    me, mine, theirs = group.rank(), sent.view(group.size(), -1), received.view(group.size(), -1)
    others = [rank for rank in range(group.size()) if rank != me]
    tag = REDUCE_TAG + number
    try:
        works = [group.recv([theirs[rank]], rank, tag) for rank in others]
        works += [group.send([mine[rank]], rank, tag) for rank in others]
    except RuntimeError as error:
        raise explained(topology, what, error) from error
    theirs[me].copy_(mine[me])
    topology.traffic.add("all_to_all_single", what, sent.nbytes, among)
    return Pending(topology, what, [works], [received, sent])
