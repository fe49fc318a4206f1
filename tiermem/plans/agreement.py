"""Agreement: before collectives begin, all ranks compare program point, model and policy; a
difference is an error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tiermem.plans.plan import Plan
from tiermem.policy import OffloadPolicy
from tiermem.ranks.collectives import exchange, exchange_digests
from tiermem.ranks.topology import Topology, ranks_per_node

# ---- comparing facts over ranks ------------------------------------------------------------------
#
# Ranks that disagree would wait for each other in collectives that do not match, or mix up their
# bytes. So the facts that decide the sequence of collectives are compared before they begin: when
# an engine starts, under zero.Init before each parameter is shared, when a model is sharded, and
# when its memory is planned. Every comparison begins with the same collective (a digest of 32 bytes
# from every rank), so ranks that are at different points find that out, too.

# fields of a policy that may differ between ranks
_OWN = {"paths", "disk_bytes", "pin_memory", "io", "timeout_s"}
_MOST_SHOWN = 4


def agree(topology: Topology, facts: Mapping[str, Any], where: str = "tiermem.shard") -> None:
    """Raises ValueError on every rank when a fact differs between ranks; the message names both.
    Collective; blocks.

    Ranks exchange digests first, and the facts themselves only when the digests differ.

    Args:
        facts: by name; values are compared as text, and the order is compared as well.
        where: the point of the program, which is compared first.
    """
    if topology.group is None:
        return
    text = json.dumps([where, {name: str(value) for name, value in facts.items()}])
    digests = exchange_digests(
        topology, hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    )
    if topology.watch is not None:
        topology.watch.meet()
    if len(set(digests)) == 1:
        return
    said = [json.loads(each) for each in exchange(topology, text)]
    for rank, theirs in enumerate(said):
        if theirs != said[0] or list(theirs[1]) != list(said[0][1]):
            raise ValueError(f"ranks disagree: {_difference(said[0], theirs, rank)}")
    raise AssertionError("digests differ, and what they are of does not")


def facts_of(model: nn.Module, policy: OffloadPolicy, device: torch.device) -> dict[str, Any]:
    """The facts that decide the sequence of collectives: policy fields, ranks on a node, device
    type, parameters in order."""
    facts = facts_of_policy(policy)
    # divides the budget; decides which ranks are near
    facts["ranks on a node (LOCAL_WORLD_SIZE)"] = ranks_per_node()
    facts["device"] = device.type
    for name, param in model.named_parameters():
        frozen = "" if param.requires_grad else ", frozen"
        facts[f"parameter {name}"] = f"{tuple(param.shape)} {param.dtype}{frozen}"
    return facts


def facts_of_policy(policy: OffloadPolicy) -> dict[str, Any]:
    """The fields of a policy that ranks share."""
    return {f"policy.{name}": value for name, value in vars(policy).items() if name not in _OWN}


def facts_of_plan(plan: Plan) -> dict[str, Any]:
    """The facts of a plan that decide the sequence of collectives: the units, and how many are
    present at once.

    Nodes with different memory or different numbers of ranks may plan different buffers, and would
    then keep different units.
    """
    facts: dict[str, Any] = {"unit buffers (policy.unit_buffers)": plan.units.num}
    for unit in plan.division.units:
        facts[f"unit {unit.name}"] = (
            f"{unit.full_numel} elements{', always present' if unit.is_resident else ''}"
        )
    return facts


def _difference(ours: Any, theirs: Any, rank: int) -> str:
    """Describes the difference between rank 0 and another rank in a few sentences."""
    (where, first), (elsewhere, other) = ours, theirs
    if where != elsewhere:
        return (
            f"rank 0 is at {where}{_shown(first)} and rank {rank} at {elsewhere}{_shown(other)}. "
            "Every rank has to go the same way through the program, and build the same model"
        )
    absent = "not there"
    found = [
        name for name in {**first, **other} if first.get(name, absent) != other.get(name, absent)
    ]
    if not found:
        number, (mine, its) = next(
            (number, pair)
            for number, pair in enumerate(zip(first, other, strict=True))
            if pair[0] != pair[1]
        )
        return (
            f"number {number} is {mine} on rank 0 and {its} on rank {rank}: the same in another "
            "order. Build the model in the same order on every rank"
        )
    told = [
        (
            f"{name} is {first.get(name, absent)} on rank 0 and {other.get(name, absent)} on rank "
            f"{rank}"
        )
        for name in found[:_MOST_SHOWN]
    ]
    more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return f"{'; '.join(told)}{more}. Build the same model with the same config on every rank"


def _shown(facts: Mapping[str, str]) -> str:
    """The single fact of a point that has exactly one, in parentheses; else empty."""
    return f" ({', '.join(facts.values())})" if len(facts) == 1 else ""
