"""Agreement: all ranks build the same model under the same policy, or stop and say what differs.

Ranks that disagree would wait for each other in collectives that do not fit. So what decides the sequence of collectives is
compared once, before the first: as a digest, and line by line when digests differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from tiermem.policy import OffloadPolicy
from tiermem.zero.collectives import exchange
from tiermem.zero.topology import Topology, ranks_per_node

_OWN = {"paths", "disk_bytes", "pin_memory", "io", "timeout_s"}  # fields of a policy that may differ between ranks


def agree(topology: Topology, facts: Mapping[str, Any]) -> None:
    """Raises ValueError on every rank when a fact is not the same on all, naming it. Collective; blocks."""
    if topology.group is None:
        return
    text = json.dumps({name: str(value) for name, value in facts.items()})
    if len(set(exchange(topology, hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    said = [json.loads(each) for each in exchange(topology, text)]
    for rank, theirs in enumerate(said):
        for name in {**said[0], **theirs}:
            mine, other = said[0].get(name, "not there"), theirs.get(name, "not there")
            if mine != other:
                raise ValueError(
                    f"ranks disagree: {name} is {mine} on rank 0 and {other} on rank {rank}. Build the same model with the "
                    "same config on every rank"
                )
    raise ValueError("ranks disagree about the order of the model's parameters: build it the same way on every rank")


def facts_of(model: nn.Module, policy: OffloadPolicy) -> dict[str, Any]:
    """What decides the sequence of collectives: policy, ranks on a node, the parameters' names, shapes and dtypes."""
    facts: dict[str, Any] = {f"policy.{name}": value for name, value in vars(policy).items() if name not in _OWN}
    facts["ranks on a node (LOCAL_WORLD_SIZE)"] = ranks_per_node()  # divides the budget and decides who is near
    for name, param in model.named_parameters():
        frozen = "" if param.requires_grad else ", frozen"
        facts[f"parameter {name}"] = f"{tuple(param.shape)} {param.dtype}{frozen}"
    return facts
