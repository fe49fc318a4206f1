"""Planned: runs the library's own plan and forecast for a described model, config and cluster.

    config.json -> model on the meta device -> divide -> make_plan -> forecast_step
    ds.json     -> policy ----------------------^            ^
    ranks, nodes, memory -----------------------------------/

Every size is the one that training would allocate. A setting that does not fit raises no error: it
is planned as if there were no limit, and `problems` says by how many bytes it is too large.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from tiermem.config import load_config, resolve_auto
from tiermem.config.optimizer import BatchSizes
from tiermem.forecast import Choice, Forecast, Placement, Rates, choose, forecast_step, uses_of
from tiermem.forecast.rates import Compute
from tiermem.integrations.diffusion import build_meta
from tiermem.integrations.models import class_of
from tiermem.layers.chunked_loss import CHUNK_BYTES
from tiermem.plans.budget import make_plan
from tiermem.plans.plan import ACTIVATION_CHUNK_BYTES, Plan, Row
from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import DTYPES, Precision
from tiermem.ranks.topology import Topology, plan_topology
from tiermem.tools.job.launcher import Job, compute_of
from tiermem.tools.measure.machine import DAY_S
from tiermem.tools.presets import OF_DIFFUSERS, ModelSizes
from tiermem.tools.words import Mistake, format_bytes
from tiermem.units.state_layout import StateLayout
from tiermem.units.unit import divide
from tiermem.weights.step_run import overlap_of

T = TypeVar("T")

PLACES = {
    Tier.DEVICE: "the GPU of a rank",
    Tier.HOST: "the memory of a node",
    Tier.NVME: "the disks of a node",
}
"""What a limit of a tier is a limit of."""


INTERPRETER = Row(
    "interpreter and libraries",
    Tier.HOST,
    360 << 20,
    "measured before any model, transformers included",
)
"""With torch and transformers imported, as measured on Linux with Python 3.11."""

# ---- the budget: host memory that the store may carve under a cap --------------------------------
#
#     cap  =  interpreter and libraries    measured, after the imports
#          +  activations                  a formula per token and layer, from what autograd saves for a Llama
#          +  gradients in autograd        of the largest unit, until the last of them has arrived, and of the block before
#          +  repacked weight              oneDNN copies a weight into its own layout during a product
#          +  allocator                    free pieces between live ones: a fraction of the bytes allocated from the heap
#          +  margin
#          +  host_bytes                   the rest: units, tiles, staging, resident states
#
# The formula was checked against what autograd saves (`saved_tensors_hooks`), to the byte per
# layer, and against the peak of a run. Other families are treated as a Llama of the same sizes.

MARGIN_BYTES = 32 << 20  # thread stacks, page tables, the queue, Python objects of a step
MARGIN_PART = 0.03
# measured at 24 and 48 layers of 1024: 9.5 MB of heap for 7.35 MB saved, glibc 2.36
HEAP_PART = 0.30
_HEAP_WHY = f"free pieces between live ones: {HEAP_PART:.0%} of activations, block and logits"


_LOGITS_WHOLE_BYTES = 256 << 20
"""Logits of more fp32 bytes are computed in chunks (tiermem.chunked_cross_entropy): before, a chunk
saves little."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """The arithmetic: the cap, what is taken from it, what is left."""

    cap_bytes: int
    terms: tuple[Row, ...]
    taker: str = "the store"
    """What gets the rest."""

    @property
    def left_bytes(self) -> int:
        """What is left for the taker; zero or less when nothing is."""
        return self.cap_bytes - sum(term.num_bytes for term in self.terms)

    def rows(self) -> list[Row]:
        """The lines to show: every term, then what is left."""
        return [
            *self.terms,
            Row("host memory of the store", Tier.HOST, self.left_bytes, "what the cap leaves"),
        ]

    def explain(self) -> str:
        """The arithmetic on one line."""
        parts = " - ".join(f"{format_bytes(term.num_bytes)} ({term.what})" for term in self.terms)
        return (
            f"{format_bytes(self.cap_bytes)} - {parts} = {format_bytes(self.left_bytes)} for "
            f"{self.taker}"
        )


def plan_budget(
    cap_bytes: int, resident_bytes: int, activations: ActivationBytes, home: Tier | None = None
) -> Budget:
    """The budget of a run: `resident_bytes` measured after imports; home: of the inputs of
    checkpointed blocks."""
    margin = max(MARGIN_BYTES, int(MARGIN_PART * cap_bytes))
    terms = (
        Row(
            "interpreter and libraries",
            Tier.HOST,
            resident_bytes,
            "resident after the imports, measured",
        ),
        *(row for row in activations.rows(home) if row.tier is Tier.HOST),
        Row("margin", Tier.HOST, margin, "stacks, page tables, Python objects"),
    )
    return Budget(cap_bytes, terms)


def check_cap(job: Job, resident_bytes: int, is_gpu: bool) -> Budget | None:
    """The budget of a job under its cap; None where it has no cap, or a config that names
    `host_bytes`.

    resident_bytes: of the process with everything imported.
    Raises Mistake when the cap is too small for the job's plan, with the arithmetic and the
    smallest cap that is not. Where the job leaves recomputation open, `settle_by_cap` (card.py)
    comes first.
    """
    if job.memory_limit_bytes is None or "host_bytes" in job.config.get("tiermem", {}):
        return None
    budget = budget_of(job, job.memory_limit_bytes, resident_bytes, is_gpu)
    if fits_budget(job, budget, is_gpu):
        return budget
    small = job.memory_limit_bytes
    enough = 2 * job.memory_limit_bytes
    while not fits_budget(job, budget_of(job, enough, resident_bytes, is_gpu), is_gpu):
        small = enough
        enough = 2 * enough
        if enough > _NO_CAP_BYTES:  # something else is wrong: the start says what
            return budget
    while enough - small > _CAP_STEP_BYTES:
        middle = (small + enough) // 2
        fits = fits_budget(job, budget_of(job, middle, resident_bytes, is_gpu), is_gpu)
        small, enough = (small, middle) if fits else (middle, enough)
    least = f"--memory {-(-enough // _CAP_STEP_BYTES) * (_CAP_STEP_BYTES >> 20)}MiB"
    smaller = f"{'' if job.is_checkpointing else '--checkpointing or '}a shorter --seq"
    raise Mistake(
        f"--memory {format_bytes(job.memory_limit_bytes)} is too small for this model, and {least} "
        "is the smallest that works, "
        f"or a smaller one with {smaller} ({budget.explain()})",
        {"--memory": least},
    )


_CAP_STEP_BYTES = 10 << 20
_NO_CAP_BYTES = 1 << 44


def budget_of(job: Job, cap_bytes: int, resident_bytes: int, is_gpu: bool) -> Budget:
    """The budget of a job under a cap, with the inputs of checkpointed blocks where its config has
    them."""
    activations = ActivationBytes.of(job, is_gpu)
    home = resolve_auto(load_config(job.config), activations.sizes.hidden).policy().activations
    return plan_budget(cap_bytes, resident_bytes, activations, home)


def fits_budget(job: Job, budget: Budget, is_gpu: bool) -> bool:
    """Whether the plan of a job fits what a rank's budget leaves for its store."""
    if budget.left_bytes <= 0:
        return False
    loaded = resolve_auto(load_config(job.config), ModelSizes.of(job.shape).hidden)
    policy = dataclasses.replace(loaded.policy(), host_bytes=budget.left_bytes * job.ranks_on_node)
    topology = plan_topology(job.num_ranks, policy, job.ranks_on_node)
    division = divide(meta_model(job.shape, loaded.precision), policy, topology.num_shards)
    try:
        make_plan(division, policy, topology, is_gpu, job.ranks_on_node)
    except ValueError:
        return False
    return True


def has_chunked_loss(sizes: ModelSizes, num_tokens: int) -> bool:
    """Whether training computes the loss of so many tokens chunk by chunk."""
    return sizes.is_llama and 4 * num_tokens * sizes.vocabulary > _LOGITS_WHOLE_BYTES


class ActivationBytes(NamedTuple):
    """A micro-batch's activations on one rank: their memory, where block inputs may rest, and what
    that leaves to the plan."""

    sizes: ModelSizes
    num_tokens: int
    precision: str
    """Of weights and their gradients: "bf16", "fp16" or "fp32"."""
    compute: str
    """Of products and activations."""
    is_checkpointing: bool
    is_gpu: bool
    at_once: int | None = None
    """Micro-batches that go through the model block by block (accumulation "layers"); None: one
    after the other."""
    is_adapted: bool = False
    """Whether only adapters get gradients."""

    @staticmethod
    def of(job: Job, is_gpu: bool) -> ActivationBytes:
        """Those of a run. Raises ValueError for a shape that lacks a size."""
        sizes = ModelSizes.of(job.shape)
        kept = bool(job.is_checkpointing) or job.at_once is not None
        return ActivationBytes(
            sizes, job.batch * job.seq, job.precision, job.compute, kept, is_gpu, job.at_once
        )

    @property
    def input_bytes(self) -> int:
        """Of the inputs of one checkpointed block, of all micro-batches at once; 0: nothing is
        recomputed."""
        return (self.at_once or 1) * self._hidden_bytes if self.is_checkpointing else 0

    @property
    def inputs_bytes(self) -> int:
        """Of the inputs of all checkpointed blocks."""
        return self.sizes.num_layers * self.input_bytes

    @property
    def _hidden_bytes(self) -> int:
        return self.num_tokens * self.sizes.hidden * DTYPES[self.compute].itemsize

    def moves_inputs(self, home: Tier | None) -> bool:
        """Whether inputs of checkpointed blocks leave the place of the maths for this home
        (`OffloadPolicy.activations`)."""
        return self.is_checkpointing and (home is Tier.NVME or (home is Tier.HOST and self.is_gpu))

    def rows(self, home: Tier | None = None) -> list[Row]:
        """The rows of a forward and backward at their peak, on the tier where the maths runs; home:
        see `moves_inputs`."""
        sizes = self.sizes
        num_tokens = self.num_tokens
        tier = Tier.DEVICE if self.is_gpu else Tier.HOST
        element = DTYPES[self.compute].itemsize
        at_rest = DTYPES[self.precision].itemsize
        saved = saved_bytes_per_token(sizes, self.compute)
        block = num_tokens * saved
        if self.is_checkpointing:
            num_here = (
                min(_INPUTS_HERE, sizes.num_layers) if self.moves_inputs(home) else sizes.num_layers
            )
            kept = num_here * self.input_bytes
            each = f"{self.at_once} x " * ((self.at_once or 1) > 1)
            kept_why = (
                f"{num_here} block inputs of {each}{num_tokens} x {sizes.hidden} x {element} B"
            )
        else:
            kept = sizes.num_layers * block
            kept_why = (
                f"{sizes.num_layers} layers x {num_tokens} tokens x {saved} B saved by autograd"
            )
        working = 2 * block if self.is_checkpointing else block
        logits, loss_why = self._loss()
        of_block = 0 if self.is_adapted else sizes.block_numel * at_rest
        of_largest = 0 if self.is_adapted else sizes.unit_numel * at_rest
        terms = [("activations", kept, kept_why)]
        if self.is_gpu:  # whose allocator gives the memory of the one peak to the other
            peaks = {"one block": working + of_block, "logits and loss": logits + of_largest}
            most, least = sorted(peaks, key=peaks.__getitem__, reverse=True)
            most_why = (
                f"{most}, with gradients in autograd; {least} before or after: "
                f"{format_bytes(peaks[least])}"
            )
            terms.append(("at work", peaks[most], most_why))
            terms.append(
                (
                    "gradients leaving",
                    max(2 * of_block, of_largest),
                    "of two blocks, or of the largest unit",
                )
            )
        else:
            terms += [
                (
                    "one block at work",
                    working,
                    "recomputed and " * self.is_checkpointing + "turned into gradients",
                ),
                ("logits and loss", logits, loss_why),
                (
                    "gradients in autograd",
                    of_largest,
                    f"largest unit: {sizes.unit_numel} x {at_rest} B",
                ),
                (
                    "repacked weight",
                    sizes.weight_numel * element,
                    "the largest weight, as the matrix product wants it",
                ),
                (
                    "gradients before",
                    of_block,
                    "the last block's: freed, kept by the C library's heap",
                ),
                ("allocator", int(HEAP_PART * (kept + working + logits)), _HEAP_WHY),
            ]
        if self.at_once is not None:
            why = f"hidden states, later gradients, of {self.at_once} micro-batches and one"
            terms.append(("between blocks", self.input_bytes + self._hidden_bytes, why))
        if self.compute != self.precision:
            wide_why = (
                f"the largest weight's in {self.compute}, before it is rounded to {self.precision}"
            )
            terms.append(("wide gradient", sizes.weight_numel * element, wide_why))
        return [Row(what, tier, num_bytes, why) for what, num_bytes, why in terms]

    def placements(
        self,
        policy: OffloadPolicy,
        device_bytes: int | None,
        host_bytes: int | None,
        ranks_on_node: int = 1,
    ) -> list[Placement]:
        """The homes that inputs may have under a policy, each with what it leaves to the plan; the
        one in use first.

        device_bytes: of an accelerator, for the plan and activations together; host_bytes: of a
            node, for the plan beside the
        activations as the policy has them; None: no limit, or not to be changed.
        """
        homes = [policy.activations]
        if policy.activations is None and self.is_gpu and self.is_checkpointing:
            homes += [Tier.HOST, *([Tier.NVME] if policy.paths else [])]
        elif (
            policy.activations is None and self.input_bytes >= _ALWAYS_MAPPED_BYTES and policy.paths
        ):
            homes += [Tier.NVME]
        chunks = -(-self.input_bytes // ACTIVATION_CHUNK_BYTES)
        at_home = self.sizes.num_layers * chunks * ACTIVATION_CHUNK_BYTES
        here = {home: sum(row.num_bytes for row in self.rows(home)) for home in homes}
        found = []
        for home in homes:
            on_device = (
                max(1, device_bytes - here[home])
                if self.is_gpu and device_bytes is not None
                else None
            )
            on_host = None
            if not self.is_gpu and host_bytes is not None and len(homes) > 1:
                on_host = host_bytes + (here[policy.activations] - here[home]) * ranks_on_node
            found.append(
                Placement(home, at_home if self.moves_inputs(home) else None, on_device, on_host)
            )
        return found

    def _loss(self) -> tuple[int, str]:
        """Bytes of logits and loss, and the reason."""
        sizes = self.sizes
        num_tokens = self.num_tokens
        element = DTYPES[self.compute].itemsize
        if not has_chunked_loss(sizes, num_tokens):
            why = f"{num_tokens} x {sizes.vocabulary}: in {self.compute}, float, softmax, gradient"
            return num_tokens * sizes.vocabulary * (2 * element + 12), why
        # than the gradient that autograd gets
        is_wider = self.compute == "fp16" or self.compute != self.precision
        head = (
            sizes.vocabulary * sizes.hidden * (4 if self.compute == "fp16" else element) * is_wider
        )
        chunks = CHUNK_BYTES // 4 * (2 * element + 12)
        why = (
            f"chunks of {CHUNK_BYTES} B in float"
            + "; the head's gradient, before it is rounded" * is_wider
        )
        return chunks + head + num_tokens * sizes.hidden * element, why


_INPUTS_HERE = 2
"""Inputs that are where the maths runs although others rest elsewhere: the one in use, and one on
its way."""

_ALWAYS_MAPPED_BYTES = 32 << 20
"""glibc maps blocks from this size on, always: the memory of an input that leaves the CPU's heap is
free then, and no gap."""


def saved_bytes_per_token(sizes: ModelSizes, precision: str) -> int:
    """What autograd saves per token in one Llama block (attention fused, SwiGLU), in bytes.

    In the compute precision: inputs of the six projections' three distinct places, queries,
    attention's output, both norms' outputs and inputs (six of hidden); keys and values; four of
    intermediate. In float: both norms' inputs once more when the precision is lower, attention's
    log-sum-exp per head, two reciprocal roots. With fp32 the norms' inputs are saved at two more
    places instead of their casts. Of each expert that a token chooses: its input and its output as
    well.
    """
    if sizes.saved_places is not None:
        return sizes.saved_places * sizes.hidden * DTYPES[precision].itemsize
    hidden_places, float_places = (8, 0) if precision == "fp32" else (6, 2)
    hidden_places += 2 * sizes.num_chosen
    element = DTYPES[precision].itemsize
    in_precision = hidden_places * sizes.hidden + 2 * sizes.key_value + 4 * sizes.intermediate
    return in_precision * element + (float_places * sizes.hidden + sizes.num_heads + 2) * 4


def state_bytes(num_params: int, precision: str, states: Precision | None = None) -> int:
    """What a model and its AdamW must keep between steps: the weight, the master that lies beside
    it and two moments.

    precision: of the weights, "bf16", "fp16" or "fp32"; states: of the rest, default fp32.
    """
    layout = StateLayout(DTYPES[precision], states or Precision(), num_moments=2)
    return num_params * DTYPES[precision].itemsize + sum(
        part.num_bytes(num_params) for part in layout.parts
    )


# ---- a scenario and its plan ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where a model is to be trained. Memory is what may be used of it; None: no limit."""

    num_nodes: int
    ranks_per_node: int
    gpu_bytes: int | None = None  # of each rank's GPU; None: the maths runs on the CPU
    host_bytes: int | None = None  # of each node
    nvme_bytes: int | None = None  # of each node
    gpu_others: tuple[Row, ...] = ()  # what neither a plan nor activations may take of a GPU

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
    """Measured, for one micro-batch of the scenario's size on one rank; or the operations a second
    that a rank reaches."""
    seq: int
    is_checkpointing: bool = False
    lora_rank: int | None = None
    """Of adapters, which alone are trained (`meta_model`); None: everything is."""

    @property
    def recomputing(self) -> Scenario:
        """The same with blocks computed again in backward; measured maths was measured without
        that."""
        compute = self.compute.recomputing() if isinstance(self.compute, Compute) else self.compute
        return dataclasses.replace(self, compute=compute, is_checkpointing=True)

    def compute_of(self, num_tokens: int, is_by_layer: bool) -> Compute:
        """The seconds of the maths of a micro-batch of so many tokens. is_by_layer: with
        accumulation "layers"."""
        if isinstance(self.compute, Compute):
            return self.compute._replace(num_tokens=num_tokens)
        return Compute.of_peak(self.compute, num_tokens, self.is_checkpointing or is_by_layer)

    def activations_of(self, num_tokens: int, at_once: int | None) -> ActivationBytes:
        """The activations of a micro-batch of so many tokens; at_once: see Activations. Raises
        ValueError for a shape that lacks a size."""
        sizes = ModelSizes.of(self.shape)
        is_gpu = self.cluster.gpu_bytes is not None
        precision = resolve_auto(load_config(self.config), sizes.hidden).precision
        compute = compute_of(self.config, precision)
        is_checkpointing = self.is_checkpointing or at_once is not None
        return ActivationBytes(
            sizes,
            num_tokens,
            precision,
            compute,
            is_checkpointing,
            is_gpu,
            at_once,
            self.lora_rank is not None,
        )


class Overlapped(NamedTuple):
    """A scenario with another `overlap`."""

    forecast: Forecast
    extra_disk_bytes: int
    """Disk bytes of a rank beyond those of overlap "none"."""
    extra_host_bytes: int
    """The same of host memory; 0 where a budget is filled in any case."""


class PlanProblem(NamedTuple):
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
    play: Callable[[], Forecast]
    """Plays a step, once; raises ValueError when a module needs more units at once than the plan
    has buffers for."""
    batch: BatchSizes
    given: OffloadPolicy
    """The policy before the choice."""
    activations: ActivationBytes
    choice: Choice | None = None
    """How what a budget leaves open was settled; None: by rule."""
    recomputation: str | None = None
    """Whether blocks are recomputed, and why, where that was chosen (card.py)."""

    @property
    def forecast(self) -> Forecast:
        """The step as it is predicted; see `play`."""
        return self.play()

    @property
    def tokens_per_s(self) -> float:
        """Of the whole cluster."""
        tokens = (
            self.batch.micro
            * self.scenario.seq
            * self.batch.accumulation
            * self.scenario.cluster.num_ranks
        )
        return tokens / self.forecast.total_s if self.forecast.total_s else 0.0

    @property
    def written_bytes_day(self) -> float:
        """Bytes that a node writes to its disks in a day of steps."""
        written = self.forecast.edge_bytes("HOST -> NVME") * self.scenario.cluster.ranks_per_node
        return DAY_S * written / self.forecast.total_s if self.forecast.total_s else 0.0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of HOST memory that one rank registers with its accelerator's driver, which may
        have a limit on them."""
        is_pinned = self.scenario.cluster.gpu_bytes is not None and self.policy.pin_memory
        return self.plan.link_bytes if is_pinned else 0

    def tier_bytes(self, tier: Tier) -> int:
        """Bytes of a tier that one rank takes."""
        return sum(line.num_bytes for line in self.lines if line.tier is tier)

    @property
    def problems(self) -> list[PlanProblem]:
        """The tiers that are too small; empty when it fits."""
        cluster = self.scenario.cluster
        found = []
        for tier, limit_bytes in cluster.limits.items():
            needed_bytes = self.tier_bytes(tier) * (
                1 if tier is Tier.DEVICE else cluster.ranks_per_node
            )
            if limit_bytes and needed_bytes > limit_bytes:
                found.append(PlanProblem(PLACES[tier], needed_bytes, limit_bytes))
        return found


def plan_scenario(scenario: Scenario, chooses: bool = True) -> Planned:
    """Plans a scenario; with `chooses`, what its budget leaves open is settled by predicted time
    (forecast/forecast.py).

    Steps begin under backward only where the disk has room for it. Raises ValueError for a config
    or model that cannot be: what a real start would refuse too.
    """
    planned = _planned(scenario, chooses)
    plan = planned.plan
    most_bytes = planned.policy.disk_bytes
    is_full = any(problem.where == PLACES[Tier.NVME] for problem in planned.problems)
    if plan.attempt_disk_bytes and (
        is_full or (most_bytes is not None and plan.disk_bytes > most_bytes)
    ):
        return _planned(scenario, chooses, overlap="forward")
    return planned


def _planned(scenario: Scenario, chooses: bool, **fields: Any) -> Planned:
    cluster = scenario.cluster
    loaded = resolve_auto(load_config(scenario.config), ModelSizes.of(scenario.shape).hidden)
    model = meta_model(scenario.shape, loaded.precision, scenario.lora_rank)
    batch = loaded.batch(cluster.num_ranks)
    is_gpu = cluster.gpu_bytes is not None
    num_tokens = batch.micro * scenario.seq
    policy = loaded.policy(**fields)
    is_host_open = False
    activations = scenario.activations_of(
        num_tokens, batch.accumulation if policy.accumulation == "layers" else None
    )
    # the store has what a node's memory leaves
    if policy.host_bytes is None and cluster.host_bytes is not None:
        outside = [INTERPRETER, *activations.rows(policy.activations)]
        outside_bytes = sum(row.num_bytes for row in outside if row.tier is Tier.HOST)
        left = cluster.host_bytes - outside_bytes * cluster.ranks_per_node
        policy = dataclasses.replace(policy, host_bytes=max(1, left))
        is_host_open = True
    topology = plan_topology(cluster.num_ranks, policy, cluster.ranks_per_node)
    choice = None
    num_ranks = cluster.num_ranks
    per_node = cluster.ranks_per_node
    open_bytes = policy.host_bytes if is_host_open else None
    given = policy
    card_bytes = cluster.gpu_bytes
    if card_bytes is not None:
        card_bytes = max(1, card_bytes - sum(row.num_bytes for row in cluster.gpu_others))
    placements = activations.placements(policy, card_bytes, open_bytes, per_node)
    try:
        if chooses and (policy.host_bytes is not None or is_gpu):
            compute = scenario.compute_of(num_tokens, policy.accumulation == "layers")
            more: dict[str, Any] = {
                "placements": placements,
                "input_bytes": activations.input_bytes,
            }
            choice = choose(
                model,
                policy,
                scenario.rates,
                compute,
                num_ranks,
                per_node,
                is_gpu,
                batch.accumulation,
                **more,
            )
            policy = choice.policy
            plan = choice.chosen.plan
        else:
            policy, plan = placed(model, policy, placements, topology, is_gpu, per_node)
    except ValueError:  # not even the rule's plan fits
        plan, policy = _plan(model, policy, topology, is_gpu, per_node)
    return Planned(
        scenario=scenario,
        num_params=sum(p.numel() for p in model.parameters()),
        policy=policy,
        plan=plan,
        lines=(*plan.rows, INTERPRETER, *cluster.gpu_others, *activations.rows(policy.activations)),
        play=functools.cache(functools.partial(_forecast, scenario, model, plan, policy, batch)),
        batch=batch,
        given=given,
        activations=activations,
        choice=choice,
    )


def overlaps_of(planned: Planned) -> dict[str, Overlapped]:
    """The scenario with each `overlap` that changes a step of it, the first is "none". Otherwise it
    is planned alike."""
    scenario = planned.scenario
    found = dict[str, Overlapped]()
    cluster = scenario.cluster
    batch = planned.batch
    is_gpu = cluster.gpu_bytes is not None
    precision = resolve_auto(load_config(scenario.config), 1).precision
    model = meta_model(scenario.shape, precision, scenario.lora_rank)
    for overlap in ("none", "forward", "backward"):
        if overlap != "none" and planned.policy.step_in_backward:
            continue  # its steps end in backward
        changed = dataclasses.replace(planned.policy, overlap=overlap)
        topology = plan_topology(cluster.num_ranks, changed, cluster.ranks_per_node)
        plan, changed = _plan(model, changed, topology, is_gpu, cluster.ranks_per_node)
        if overlap == "none":
            none = plan
        elif overlap_of(changed, plan, is_gpu) != overlap:
            continue
        forecast = _forecast(scenario, model, plan, changed, batch)
        found[overlap] = Overlapped(
            forecast, plan.disk_bytes - none.disk_bytes, plan.host_bytes - none.host_bytes
        )
    return found


def _forecast(
    scenario: Scenario, model: nn.Module, plan: Plan, policy: OffloadPolicy, batch: BatchSizes
) -> Forecast:
    cluster = scenario.cluster
    num_tokens = batch.micro * scenario.seq
    at_once = batch.accumulation if policy.accumulation == "layers" else None
    topology = plan_topology(cluster.num_ranks, policy, cluster.ranks_per_node)
    return forecast_step(
        plan.division,
        plan,
        policy,
        topology,
        uses_of(model, plan.division, scenario.compute_of(num_tokens, at_once is not None)),
        scenario.rates,
        cluster.gpu_bytes is not None,
        cluster.ranks_per_node,
        batch.accumulation,
        input_bytes=scenario.activations_of(num_tokens, at_once).input_bytes,
    )


def meta_model(shape: Mapping[str, Any], precision: str, lora_rank: int | None = None) -> nn.Module:
    """The model without memory.

    lora_rank: of PEFT's adapters, which alone are trained, beside every nn.Linear but the head.
        Fused experts and their routers are none, and get no adapter.

    Raises ValueError for a model type that transformers does not know, ImportError without peft or
    diffusers.
    """
    with torch.device("meta"):
        model: Any
        if OF_DIFFUSERS in shape:
            model = build_meta(shape)[0]
        else:
            config = hf_config(shape)
            causal = transformers().AutoModelForCausalLM
            is_causal = type(config) in causal._model_mapping
            model = causal.from_config(config) if is_causal else class_of(config)(config)
        model = nn.Module.to(model, DTYPES[precision])  # diffusers' own warns
        if lora_rank is not None:
            peft = importlib.import_module("peft")
            head = None if OF_DIFFUSERS in shape else model.get_output_embeddings()
            linear = [
                name
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear) and module is not head
            ]
            model = peft.get_peft_model(model, peft.LoraConfig(r=lora_rank, target_modules=linear))
    return cast("nn.Module", model)


def hf_config(shape: Mapping[str, Any]) -> Any:
    """The transformers config of a shape. Raises ValueError for a model type that transformers does
    not know."""
    return transformers().AutoConfig.for_model(**shape)


def of_every_rank(value: T) -> list[T]:
    """The value that each rank gives, in their order. Collective; blocks."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def transformers() -> Any:
    """The package, imported; typed as Any, since it is typed in parts only. Raises ImportError
    where it is not installed."""
    return importlib.import_module("transformers")


def placed(
    model: nn.Module,
    policy: OffloadPolicy,
    placements: Sequence[Placement],
    topology: Topology,
    is_gpu: bool,
    ranks_on_node: int,
) -> tuple[OffloadPolicy, Plan]:
    """The policy with the first placement whose plan fits, and that plan. Raises ValueError where
    none fits."""
    division = divide(model, policy, topology.num_shards)
    for placement in placements:
        changed = dataclasses.replace(policy, **placement.fields(policy))
        with contextlib.suppress(ValueError):
            plan = make_plan(division, changed, topology, is_gpu, ranks_on_node)
            if placement.device_bytes is None or plan.device_bytes <= placement.device_bytes:
                return changed, plan
    raise ValueError("no placement of activations leaves room for a plan")


def _plan(
    model: nn.Module, policy: OffloadPolicy, topology: Topology, is_gpu: bool, ranks_on_node: int
) -> tuple[Plan, OffloadPolicy]:
    """The plan within the budget, or, when nothing fits it, the smallest there is without one."""
    division = divide(model, policy, topology.num_shards)
    try:
        return make_plan(division, policy, topology, is_gpu, ranks_on_node), policy
    except ValueError:
        if policy.host_bytes is None:
            raise
    free = dataclasses.replace(policy, host_bytes=None, resident_bytes=policy.resident_bytes or 0)
    division = divide(model, free, topology.num_shards)
    return make_plan(division, free, topology, is_gpu, ranks_on_node), free
