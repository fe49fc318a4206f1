"""Planned: runs the library's own plan and forecast for a described model, config and cluster.

    config.json -> model on the meta device -> divide -> make_plan -> forecast_step
    ds.json     -> policy ----------------------^            ^
    ranks, nodes, memory -----------------------------------/

Every size is the one that training would allocate. A setting that does not fit raises no error: it is planned as if there
were no limit, and `problems` says by how many bytes it is too large.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem.config import load_config, resolve_auto
from tiermem.forecast import Choice, Forecast, Rates, choose, forecast_step, uses_of
from tiermem.forecast.rates import Compute
from tiermem.policy import OffloadPolicy
from tiermem.precision import DTYPES
from tiermem.tools.train_job import ModelSizes, activation_terms
from tiermem.zero.plan import USUAL_ON_DEVICE, Plan, make_plan
from tiermem.zero.topology import Topology, plan_topology
from tiermem.zero.unit import Division, Unit, divide

Config = Mapping[str, Any]

INTERPRETER_BYTES = (
    360 << 20
)  # torch and transformers imported, before any model, as measured on Linux with Python 3.11
_HEAP_TERMS = ("repacked weight", "gradients before", "allocator")  # of the CPU's products and its C library


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where a model is to be trained. Memory is what may be used of it; None: no limit."""

    num_nodes: int
    ranks_per_node: int
    gpu_bytes: int | None = None  # of each rank's GPU; None: the maths runs on the CPU
    host_bytes: int | None = None  # of each node
    nvme_bytes: int | None = None  # of each node

    @property
    def num_ranks(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.ranks_per_node


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast it is; `compute` is of one sequence-batch of the scenario's size on one rank."""

    rates: Rates
    flops: float | None = None  # operations a second that a rank reaches; None: `compute` was measured
    compute: Compute | None = None

    def compute_of(self, num_tokens: int, is_checkpointing: bool) -> Compute:
        """What a micro-batch takes; a measured one is of its own size."""
        if self.flops is not None:
            return Compute.of_peak(self.flops, num_tokens, is_checkpointing)
        assert self.compute is not None
        return self.compute


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is to be planned."""

    shape: Mapping[str, Any]  # a Hugging Face config.json
    config: Config  # DeepSpeed-style
    cluster: Cluster
    speed: Speed
    seq: int
    is_checkpointing: bool = False


class Line(NamedTuple):
    """What takes how many bytes of a tier, per rank."""

    what: str
    tier: str
    num_bytes: int
    why: str


class Problem(NamedTuple):
    """A tier that is too small: bytes of one node, or of one GPU."""

    where: str
    needed_bytes: int
    limit_bytes: int


@dataclasses.dataclass(frozen=True)
class Planned:
    """A scenario with its figures."""

    scenario: Scenario
    num_params: int
    policy: OffloadPolicy
    plan: Plan
    lines: tuple[Line, ...]
    forecast: Forecast
    num_micro: int
    batch: int
    choice: Choice | None = None
    """How what a budget leaves open was settled; None: by rule."""

    @property
    def tokens_per_s(self) -> float:
        """Of the whole cluster."""
        tokens = self.batch * self.scenario.seq * self.num_micro * self.scenario.cluster.num_ranks
        return tokens / self.forecast.total_s if self.forecast.total_s else 0.0

    def tier_bytes(self, tier: str) -> int:
        """Bytes of a tier that one rank takes."""
        return sum(line.num_bytes for line in self.lines if line.tier == tier)

    @property
    def problems(self) -> list[Problem]:
        """The tiers that are too small; empty when it fits."""
        cluster = self.scenario.cluster
        found = [
            Problem("the GPU of a rank", self.tier_bytes("DEVICE"), cluster.gpu_bytes or 0),
            Problem("the memory of a node", self.tier_bytes("HOST") * cluster.ranks_per_node, cluster.host_bytes or 0),
            Problem("the disks of a node", self.tier_bytes("NVME") * cluster.ranks_per_node, cluster.nvme_bytes or 0),
        ]
        return [problem for problem in found if problem.limit_bytes and problem.needed_bytes > problem.limit_bytes]


def plan_scenario(scenario: Scenario, chooses: bool = True) -> Planned:
    """Plans a scenario; with `chooses`, what its budget leaves open is settled by predicted time (forecast/forecast.py).

    Raises ValueError for a config or model that cannot be: what a real start would refuse too.
    """
    cluster = scenario.cluster
    loaded = load_config(scenario.config)
    sizes = ModelSizes.of(scenario.shape)
    loaded = resolve_auto(loaded, sizes.hidden)
    model = meta_model(scenario.shape, loaded.precision)
    batch = loaded.batch(cluster.num_ranks)
    is_gpu = cluster.gpu_bytes is not None
    extra = _extra_lines(scenario, sizes, loaded.precision, batch.micro)
    policy = _within(loaded.policy(), cluster, sum(line.num_bytes for line in extra if line.tier == "HOST"))
    topology = plan_topology(cluster.num_ranks, policy, cluster.ranks_per_node)
    compute = scenario.speed.compute_of(batch.micro * scenario.seq, scenario.is_checkpointing)
    choice = None
    if chooses and policy.host_bytes is not None:
        rates, per_node = scenario.speed.rates, cluster.ranks_per_node
        with contextlib.suppress(ValueError):  # not even the rule's plan fits
            choice = choose(model, policy, rates, compute, cluster.num_ranks, per_node, is_gpu, batch.accumulation)
            policy = choice.policy
    division, plan, policy = _plan(model, policy, topology, is_gpu, cluster.ranks_per_node)
    lines = [Line(row.what, row.tier.name, row.num_bytes, row.why) for row in plan.rows]
    lines += passing_lines(plan.division.units, policy) if is_gpu else []
    uses = uses_of(model, division, compute)
    forecast = forecast_step(
        division, plan, policy, topology, uses, scenario.speed.rates, is_gpu, cluster.ranks_per_node, batch.accumulation
    )
    return Planned(
        scenario=scenario,
        num_params=sum(p.numel() for p in model.parameters()),
        policy=policy,
        plan=plan,
        lines=(*lines, *extra),
        forecast=forecast,
        num_micro=batch.accumulation,
        batch=batch.micro,
        choice=choice,
    )


def meta_model(shape: Mapping[str, Any], precision: str) -> nn.Module:
    """The model without memory. Raises ValueError for a model type that transformers does not know."""
    transformers = importlib.import_module("transformers")
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**shape))
    return model.to(DTYPES[precision])


def _plan(
    model: nn.Module, policy: OffloadPolicy, topology: Topology, is_gpu: bool, ranks_on_node: int
) -> tuple[Division, Plan, OffloadPolicy]:
    """The plan within the budget, or, when nothing fits it, the smallest there is without one."""
    division = divide(model, policy, topology.num_shards)
    try:
        return division, make_plan(division, policy, topology, is_gpu, ranks_on_node), policy
    except ValueError:
        if policy.host_bytes is None:
            raise
    free = dataclasses.replace(policy, host_bytes=None, resident_bytes=policy.resident_bytes or 0)
    division = divide(model, free, topology.num_shards)
    return division, make_plan(division, free, topology, is_gpu, ranks_on_node), free


def _within(policy: OffloadPolicy, cluster: Cluster, outside_bytes: int) -> OffloadPolicy:
    """The policy with the budget that a node's memory leaves to the store, unless it names one itself."""
    if policy.host_bytes is not None or cluster.host_bytes is None:
        return policy
    left = cluster.host_bytes - outside_bytes * cluster.ranks_per_node
    return dataclasses.replace(policy, host_bytes=max(1, left))


def _extra_lines(scenario: Scenario, sizes: ModelSizes, precision: str, batch: int) -> list[Line]:
    """What lies outside the store: the interpreter, and activations where the maths runs."""
    is_gpu = scenario.cluster.gpu_bytes is not None
    why = "measured before any model, transformers included"
    return [
        Line("interpreter and libraries", "HOST", INTERPRETER_BYTES, why),
        *activation_lines(sizes, batch * scenario.seq, precision, scenario.is_checkpointing, is_gpu),
    ]


def activation_lines(
    sizes: ModelSizes, num_tokens: int, precision: str, is_checkpointing: bool, is_gpu: bool
) -> list[Line]:
    """What a forward and backward of so many tokens takes where the maths runs."""
    terms = activation_terms(sizes, num_tokens, precision, is_checkpointing)
    place, on_cpu_only = ("DEVICE", _HEAP_TERMS) if is_gpu else ("HOST", ())
    return [Line(term.name, place, term.num_bytes, term.why) for term in terms if term.name not in on_cpu_only]


def passing_lines(units: Sequence[Unit], policy: OffloadPolicy) -> list[Line]:
    """Of a GPU: the units present at once beside those that stay."""
    streamed = [unit.full_bytes for unit in units if not unit.is_resident]
    num = min(policy.unit_buffers or USUAL_ON_DEVICE, len(streamed))
    lines = [
        Line(f"{num} units", "DEVICE", num * max(streamed, default=0), "in use and fetched ahead, of the largest size")
    ]
    return [line for line in lines if line.num_bytes]
