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
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem.config import load_config, resolve_auto
from tiermem.config.optimizer import BatchSizes
from tiermem.forecast import Choice, Forecast, Rates, choose, forecast_step, uses_of
from tiermem.forecast.rates import Compute
from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import DTYPES, Precision
from tiermem.tools.launcher import Job, compute_of
from tiermem.tools.presets import ModelSizes
from tiermem.tools.words import Mistake, format_bytes
from tiermem.zero.budget import make_plan
from tiermem.zero.chunked_loss import CHUNK_BYTES
from tiermem.zero.plan import Plan, Row
from tiermem.zero.state_layout import StateLayout
from tiermem.zero.topology import Topology, plan_topology
from tiermem.zero.unit import Division, divide

PLACES = {Tier.DEVICE: "the GPU of a rank", Tier.HOST: "the memory of a node", Tier.NVME: "the disks of a node"}
"""What a limit of a tier is a limit of."""


INTERPRETER = Row("interpreter and libraries", Tier.HOST, 360 << 20, "measured before any model, transformers included")
"""With torch and transformers imported, as measured on Linux with Python 3.11."""

# ---- the budget: host memory that the store may carve under a cap ----------------------------------------------------
#
#     cap  =  interpreter and libraries    measured, after the imports
#          +  activations                  a formula per token and layer, from what autograd saves for a Llama
#          +  gradients in autograd        of the largest unit, until the last of them has arrived, and of the block before
#          +  repacked weight              oneDNN copies a weight into its own layout during a product
#          +  allocator                    free pieces between live ones: a fraction of the bytes allocated from the heap
#          +  margin
#          +  host_bytes                   the rest: units, tiles, staging, resident states
#
# The formula was checked against what autograd saves (`saved_tensors_hooks`), to the byte per layer, and against the
# peak of a run. Other families are treated as a Llama of the same sizes.

MARGIN_BYTES = 32 << 20  # thread stacks, page tables, the queue, Python objects of a step
MARGIN_PART = 0.03
HEAP_PART = 0.30  # measured at 24 and 48 layers of 1024: 9.5 MB of heap for 7.35 MB saved, glibc 2.36


_LOGITS_WHOLE_BYTES = 256 << 20
"""Logits of more fp32 bytes are computed in chunks (tiermem.chunked_cross_entropy): before, a chunk saves little."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """The arithmetic: the cap, what is taken from it, what is left."""

    cap_bytes: int
    terms: tuple[Row, ...]

    @property
    def host_bytes(self) -> int:
        """What is left for the store; zero or less when nothing is."""
        return self.cap_bytes - sum(term.num_bytes for term in self.terms)

    def rows(self) -> list[Row]:
        """The lines to show: every term, then what is left."""
        return [*self.terms, Row("host memory of the store", Tier.HOST, self.host_bytes, "what the cap leaves")]

    def explain(self) -> str:
        """The arithmetic on one line."""
        parts = " - ".join(f"{format_bytes(term.num_bytes)} ({term.what})" for term in self.terms)
        return f"{format_bytes(self.cap_bytes)} - {parts} = {format_bytes(self.host_bytes)} for the store"


def plan_budget(
    cap_bytes: int,
    resident_bytes: int,
    sizes: ModelSizes,
    num_tokens: int,
    precision: str,
    is_checkpointing: bool,
    compute: str | None = None,
) -> Budget:
    """The budget of a run: `resident_bytes` measured after imports, `num_tokens` of one micro-batch."""
    margin = max(MARGIN_BYTES, int(MARGIN_PART * cap_bytes))
    terms = (
        Row("interpreter and libraries", Tier.HOST, resident_bytes, "resident after the imports, measured"),
        *activation_rows(sizes, num_tokens, precision, is_checkpointing, is_gpu=False, compute=compute),
        Row("margin", Tier.HOST, margin, "stacks, page tables, Python objects"),
    )
    return Budget(cap_bytes, terms)


def check_cap(job: Job, resident_bytes: int, is_gpu: bool) -> Budget | None:
    """The budget of a job under its cap; None where it has no cap, or a config that names `host_bytes`.

    resident_bytes: of the process with everything imported.
    Raises Mistake when the cap is too small for the job's plan, with the arithmetic and the smallest cap that is not.
    """
    if job.memory_limit_bytes is None or "host_bytes" in job.config.get("tiermem", {}):
        return None
    budget = _budget(job, job.memory_limit_bytes, resident_bytes)
    if _fits(job, budget, is_gpu):
        return budget
    small, enough = job.memory_limit_bytes, 2 * job.memory_limit_bytes
    while not _fits(job, _budget(job, enough, resident_bytes), is_gpu):
        small, enough = enough, 2 * enough
        if enough > _NO_CAP_BYTES:  # something else is wrong: the start says what
            return budget
    while enough - small > _CAP_STEP_BYTES:
        middle = (small + enough) // 2
        fits = _fits(job, _budget(job, middle, resident_bytes), is_gpu)
        small, enough = (small, middle) if fits else (middle, enough)
    least = f"--memory {-(-enough // _CAP_STEP_BYTES) * (_CAP_STEP_BYTES >> 20)}MiB"
    raise Mistake(
        f"--memory {format_bytes(job.memory_limit_bytes)} is too small for this model, and {least} is the smallest that works, "
        f"or a smaller one with --checkpointing or a shorter --seq ({budget.explain()})",
        {"--memory": least},
    )


_CAP_STEP_BYTES = 10 << 20
_NO_CAP_BYTES = 1 << 44


def _budget(job: Job, cap_bytes: int, resident_bytes: int) -> Budget:
    sizes, tokens = ModelSizes.of(job.shape), job.batch * job.seq
    return plan_budget(cap_bytes, resident_bytes, sizes, tokens, job.precision, job.is_checkpointing, job.compute)


def _fits(job: Job, budget: Budget, is_gpu: bool) -> bool:
    """Whether the plan of a job on one rank fits what a budget leaves for the store."""
    if budget.host_bytes <= 0:
        return False
    loaded = resolve_auto(load_config(job.config), ModelSizes.of(job.shape).hidden)
    policy = dataclasses.replace(loaded.policy(), host_bytes=budget.host_bytes)
    topology = plan_topology(1, policy, 1)
    division = divide(meta_model(job.shape, loaded.precision), policy, topology.num_shards)
    try:
        make_plan(division, policy, topology, is_gpu, 1)
    except ValueError:
        return False
    return True


def has_chunked_loss(sizes: ModelSizes, num_tokens: int) -> bool:
    """Whether training computes the loss of so many tokens chunk by chunk."""
    return sizes.is_llama and 4 * num_tokens * sizes.vocabulary > _LOGITS_WHOLE_BYTES


def activation_rows(
    sizes: ModelSizes,
    num_tokens: int,
    precision: str,
    is_checkpointing: bool,
    is_gpu: bool,
    compute: str | None = None,
) -> list[Row]:
    """Returns the rows of a forward and backward of `num_tokens`, at their peak, on the tier where the maths runs.

    precision: of weights and their gradients; compute: of products and activations, where it is another.
    """
    compute = compute or precision
    element, tier = DTYPES[compute].itemsize, Tier.DEVICE if is_gpu else Tier.HOST
    at_rest = DTYPES[precision].itemsize
    saved = saved_bytes_per_token(sizes, compute)
    block = num_tokens * saved
    if is_checkpointing:
        kept = sizes.num_layers * num_tokens * sizes.hidden * element
        kept_why = f"{sizes.num_layers} block inputs of {num_tokens} x {sizes.hidden} x {element} B"
    else:
        kept = sizes.num_layers * block
        kept_why = f"{sizes.num_layers} layers x {num_tokens} tokens x {saved} B saved by autograd"
    working = 2 * block if is_checkpointing else block
    logits = num_tokens * sizes.vocabulary * (2 * element + 12)
    loss_why = f"{num_tokens} x {sizes.vocabulary}: in {compute}, float, softmax, gradient"
    if has_chunked_loss(sizes, num_tokens):
        head = sizes.vocabulary * sizes.hidden * 2 * max(element, 4 if compute == "fp16" else element)
        logits = CHUNK_BYTES // 4 * (2 * element + 12) + head + num_tokens * sizes.hidden * element
        loss_why = f"chunks of {CHUNK_BYTES} B in float; the head's gradient, twice"
    heap = int(HEAP_PART * (kept + working + logits))
    heap_why = f"free pieces between live ones: {HEAP_PART:.0%} of activations, block and logits"
    terms = [
        ("activations", kept, kept_why),
        ("one block at work", working, "recomputed and " * is_checkpointing + "turned into gradients"),
        ("logits and loss", logits, loss_why),
        ("gradients in autograd", sizes.unit_numel * at_rest, f"largest unit: {sizes.unit_numel} x {at_rest} B"),
    ]
    if compute != precision:
        wide = sizes.weight_numel * element
        terms.append(("wide gradient", wide, f"the largest weight's in {compute}, before it is rounded to {precision}"))
    on_cpu_only = [
        ("repacked weight", sizes.weight_numel * element, "the largest weight, as the matrix product wants it"),
        ("gradients before", sizes.block_numel * at_rest, "the last block's: freed, kept by the C library's heap"),
        ("allocator", heap, heap_why),
    ]
    return [Row(what, tier, num_bytes, why) for what, num_bytes, why in (*terms, *([] if is_gpu else on_cpu_only))]


def saved_bytes_per_token(sizes: ModelSizes, precision: str) -> int:
    """What autograd saves per token in one Llama block (attention fused, SwiGLU), in bytes.

    In the compute precision: inputs of the six projections' three distinct places, queries, attention's output, both
    norms' outputs and inputs (six of hidden); keys and values; four of intermediate. In float: both norms' inputs once
    more when the precision is lower, attention's log-sum-exp per head, two reciprocal roots. With fp32 the norms'
    inputs are saved at two more places instead of their casts.
    """
    hidden_places, float_places = (8, 0) if precision == "fp32" else (6, 2)
    element = DTYPES[precision].itemsize
    in_precision = hidden_places * sizes.hidden + 2 * sizes.key_value + 4 * sizes.intermediate
    return in_precision * element + (float_places * sizes.hidden + sizes.num_heads + 2) * 4


def state_bytes(num_params: int, precision: str, states: Precision | None = None) -> int:
    """What a model and its AdamW must keep between steps: the weight, the master that lies beside it and two moments.

    precision: of the weights, "bf16", "fp16" or "fp32"; states: of the rest, default fp32.
    """
    layout = StateLayout(DTYPES[precision], states or Precision(), num_moments=2)
    return num_params * DTYPES[precision].itemsize + sum(part.num_bytes(num_params) for part in layout.parts)


# ---- a scenario and its plan -------------------------------------------------------------------------------------------


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

    @property
    def limits(self) -> dict[Tier, int | None]:
        """Bytes of each tier that may be used, of one GPU or of one node; None: no limit."""
        return {Tier.DEVICE: self.gpu_bytes, Tier.HOST: self.host_bytes, Tier.NVME: self.nvme_bytes}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is to be planned."""

    shape: Mapping[str, Any]  # a Hugging Face config.json
    config: Mapping[str, Any]  # DeepSpeed-style
    cluster: Cluster
    rates: Rates
    compute: Compute | float
    """Measured, for one micro-batch of the scenario's size on one rank; or the operations a second that a rank reaches."""
    seq: int
    is_checkpointing: bool = False


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
    lines: tuple[Row, ...]
    forecast: Forecast
    batch: BatchSizes
    choice: Choice | None = None
    """How what a budget leaves open was settled; None: by rule."""

    @property
    def tokens_per_s(self) -> float:
        """Of the whole cluster."""
        tokens = self.batch.micro * self.scenario.seq * self.batch.accumulation * self.scenario.cluster.num_ranks
        return tokens / self.forecast.total_s if self.forecast.total_s else 0.0

    def tier_bytes(self, tier: Tier) -> int:
        """Bytes of a tier that one rank takes."""
        return sum(line.num_bytes for line in self.lines if line.tier is tier)

    @property
    def problems(self) -> list[Problem]:
        """The tiers that are too small; empty when it fits."""
        cluster, found = self.scenario.cluster, []
        for tier, limit_bytes in cluster.limits.items():
            needed_bytes = self.tier_bytes(tier) * (1 if tier is Tier.DEVICE else cluster.ranks_per_node)
            if limit_bytes and needed_bytes > limit_bytes:
                found.append(Problem(PLACES[tier], needed_bytes, limit_bytes))
        return found


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
    num_tokens = batch.micro * scenario.seq
    extra = [
        INTERPRETER,
        *activation_rows(
            sizes,
            num_tokens,
            loaded.precision,
            scenario.is_checkpointing,
            is_gpu,
            compute_of(scenario.config, loaded.precision),
        ),
    ]
    policy = loaded.policy()
    if policy.host_bytes is None and cluster.host_bytes is not None:  # the store has what a node's memory leaves
        outside_bytes = sum(row.num_bytes for row in extra if row.tier is Tier.HOST)
        left = cluster.host_bytes - outside_bytes * cluster.ranks_per_node
        policy = dataclasses.replace(policy, host_bytes=max(1, left))
    topology = plan_topology(cluster.num_ranks, policy, cluster.ranks_per_node)
    compute = scenario.compute
    if not isinstance(compute, Compute):
        compute = Compute.of_peak(compute, num_tokens, scenario.is_checkpointing)
    choice = None
    if chooses and policy.host_bytes is not None:
        num_ranks, per_node = cluster.num_ranks, cluster.ranks_per_node
        with contextlib.suppress(ValueError):  # not even the rule's plan fits
            choice = choose(model, policy, scenario.rates, compute, num_ranks, per_node, is_gpu, batch.accumulation)
            policy = choice.policy
    division, plan, policy = _plan(model, policy, topology, is_gpu, cluster.ranks_per_node)
    uses = uses_of(model, division, compute)
    forecast = forecast_step(
        division, plan, policy, topology, uses, scenario.rates, is_gpu, cluster.ranks_per_node, batch.accumulation
    )
    return Planned(
        scenario=scenario,
        num_params=sum(p.numel() for p in model.parameters()),
        policy=policy,
        plan=plan,
        lines=(*plan.rows, *extra),
        forecast=forecast,
        batch=batch,
        choice=choice,
    )


def meta_model(shape: Mapping[str, Any], precision: str) -> nn.Module:
    """The model without memory. Raises ValueError for a model type that transformers does not know."""
    with torch.device("meta"):
        model: nn.Module = transformers().AutoModelForCausalLM.from_config(hf_config(shape))
    return model.to(DTYPES[precision])


def hf_config(shape: Mapping[str, Any]) -> Any:
    """The transformers config of a shape. Raises ValueError for a model type that transformers does not know."""
    return transformers().AutoConfig.for_model(**shape)


def transformers() -> Any:
    """The package, imported; typed as Any, since it is typed in parts only. Raises ImportError where it is not installed."""
    return importlib.import_module("transformers")


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
