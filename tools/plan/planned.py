"""Planned: runs the library's own plan and forecast for a described model, config and cluster.

    config.json -> model on the meta device -> choose: divide -> make_plan -> forecast_step
    ds.json     -> policy -------------------------^               ^
    ranks, nodes, memory, ways to keep activations ----------------/

Every size is the one that training would allocate. A setting that does not fit raises no error: it
is planned as if there were no limit, and `problems` says by how many bytes it is too large.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from tiermem.config import load_config, resolve_auto
from tiermem.config.optimizer import BatchSizes
from tiermem.forecast import (
    Caps,
    Choice,
    Forecast,
    Placement,
    Rates,
    choose,
)
from tiermem.forecast.choose import Tried
from tiermem.forecast.rates import Compute
from tiermem.integrations.diffusion import build_meta
from tiermem.integrations.models import class_of
from tiermem.layers.chunked_loss import CHUNK_BYTES
from tiermem.plans.plan import ACTIVATION_CHUNK_BYTES, Plan, Row
from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import DTYPES, Precision
from tiermem.tools.job.launcher import Job, compute_of
from tiermem.tools.measure.machine import DAY_S
from tiermem.tools.plan.picture import Picture
from tiermem.tools.presets import OF_DIFFUSERS, ModelSizes
from tiermem.tools.words import format_bytes, numbered
from tiermem.units.state_layout import StateLayout

T = TypeVar("T")

PLACES = {
    Tier.DEVICE: "the GPU of a rank",
    Tier.HOST: "the memory of a node",
    Tier.NVME: "the disks of a node",
}
"""What a limit of a tier is a limit of."""
WEAR = "what a node's disks may be written in a day"


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
    before, after = rows_of_process(cap_bytes, resident_bytes)
    rows = (row for row in activations.rows(home) if row.tier is Tier.HOST)
    return Budget(cap_bytes, (before, *rows, after))


def rows_of_process(cap_bytes: int, resident_bytes: int) -> tuple[Row, Row]:
    """What a rank's process takes under a cap beside the plan and activations."""
    why = "resident after the imports, measured"
    margin = max(MARGIN_BYTES, int(MARGIN_PART * cap_bytes))
    return (
        Row("interpreter and libraries", Tier.HOST, resident_bytes, why),
        Row("margin", Tier.HOST, margin, "stacks, page tables, Python objects"),
    )


def least_cap(cap_bytes: int, needed_bytes: int) -> int:
    """The smallest cap for a rank that needs so many bytes under another one."""
    *_, margin = rows_of_process(cap_bytes, 0)
    without = needed_bytes - margin.num_bytes
    return max(without + MARGIN_BYTES, int(without / (1 - MARGIN_PART)) + 1)


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
    num_kept: int = 0
    """Blocks, the last ones, that keep their activations where the others are recomputed."""
    picture: Picture | None = None
    """Of a UNet."""

    @staticmethod
    def of(job: Job, is_gpu: bool) -> ActivationBytes:
        """Those of a run. Raises ValueError for a shape that lacks a size."""
        sizes = ModelSizes.of(job.shape)
        kept = bool(job.is_checkpointing) or job.at_once is not None
        return ActivationBytes(
            sizes,
            job.batch * job.seq,
            job.precision,
            job.compute,
            kept,
            is_gpu,
            job.at_once,
            num_kept=job.num_kept,
        )

    @property
    def input_bytes(self) -> int:
        """Of the inputs of one checkpointed block, of all micro-batches at once; 0: nothing is
        recomputed."""
        if not self.is_checkpointing:
            return 0
        if self.picture is not None:
            return self._of_pictures(self.picture.kept_bytes) // self.sizes.num_layers
        return (self.at_once or 1) * self._hidden_bytes

    @property
    def num_recomputed(self) -> int:
        """Blocks whose forward is made again in backward."""
        return self.sizes.num_layers - self.num_kept if self.is_checkpointing else 0

    @property
    def recomputed_part(self) -> float:
        """Of all blocks."""
        return self.num_recomputed / max(1, self.sizes.num_layers)

    @property
    def multiplied_tokens(self) -> int:
        """By how many tokens a weight is multiplied: a UNet's on average."""
        if self.picture is None:
            return self.num_tokens
        return self._num_pictures * self.picture.mean_tokens

    @property
    def inputs_bytes(self) -> int:
        """Of the inputs of all checkpointed blocks."""
        return self.num_recomputed * self.input_bytes

    @property
    def _hidden_bytes(self) -> int:
        return self.num_tokens * self.sizes.hidden * DTYPES[self.compute].itemsize

    @property
    def _num_pictures(self) -> int:
        assert self.picture is not None
        return self.num_tokens // self.picture.num_places

    def _of_pictures(self, num_bytes: int) -> int:
        """Bytes of a micro-batch, where one picture takes so many in 16 bits."""
        return self._num_pictures * num_bytes * DTYPES[self.compute].itemsize // 2

    def moves_inputs(self, home: Tier | None) -> bool:
        """Whether inputs of checkpointed blocks leave the place of the maths for this home
        (`OffloadPolicy.activations`). A UNet's are planned as if they stayed."""
        return (
            self.picture is None
            and self.is_checkpointing
            and (home is Tier.NVME or (home is Tier.HOST and self.is_gpu))
        )

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
        if self.picture is not None:
            kept = self._of_pictures(self.picture.kept_bytes)
            kept_why = f"{numbered(self._num_pictures, 'picture')}, by a run without values"
        elif self.is_checkpointing:
            num_here = self.num_recomputed
            if self.moves_inputs(home):
                num_here = min(_INPUTS_HERE, num_here)
            kept = num_here * self.input_bytes
            each = f"{self.at_once} x " * ((self.at_once or 1) > 1)
            kept_why = (
                f"{num_here} block inputs of {each}{num_tokens} x {sizes.hidden} x {element} B"
            )
            if self.num_kept:
                kept += self.num_kept * block
                kept_why += f"; {self.num_kept} blocks whole, {num_tokens} tokens x {saved} B"
        else:
            kept = sizes.num_layers * block
            kept_why = (
                f"{sizes.num_layers} layers x {num_tokens} tokens x {saved} B saved by autograd"
            )
        # blocks that keep theirs are the last ones: they are gone when the first is recomputed
        working = 2 * block if self.num_recomputed and not self.num_kept else block
        if self.picture is not None:
            working = self._of_pictures(self.picture.working_bytes)
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
        compute: Compute | None = None,
    ) -> list[Placement]:
        """The homes that inputs may have under a policy, each with what it leaves to the plan; the
        one in use first.

        device_bytes: of an accelerator, for the plan and activations together; host_bytes: of a
            node, for the plan beside the activations as the policy has them, less than 0 where
            these alone are too large; None: no limit, or not to be changed. compute: the seconds
            of the maths.
        """
        homes = [policy.activations]
        is_open = policy.activations is None and self.picture is None and not self.num_kept
        if is_open and self.is_gpu and self.is_checkpointing:
            homes += [Tier.HOST, *([Tier.NVME] if policy.paths else [])]
        elif is_open and self.input_bytes >= _ALWAYS_MAPPED_BYTES and policy.paths:
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
            if host_bytes is not None:
                moved_bytes = 0 if self.is_gpu else here[policy.activations] - here[home]
                on_host = max(1, host_bytes + moved_bytes * ranks_on_node)
            kept_bytes = at_home if self.moves_inputs(home) else None
            order = "batches" if self.at_once is None else "layers"
            found.append(
                Placement(
                    home,
                    kept_bytes,
                    on_device,
                    on_host,
                    compute,
                    self.input_bytes,
                    order,
                    num_kept=self.num_kept,
                )
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
    pinned_bytes: int | None = None  # of each node, that drivers may register
    written_bytes_day: float | None = None  # of each node, to its disks
    host_others: tuple[Row, ...] = (INTERPRETER,)  # as gpu_others, of each rank's host memory

    @property
    def num_ranks(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def limits(self) -> dict[Tier, int | None]:
        """Bytes of each tier that may be used, of one GPU or of one node; None: no limit."""
        return {Tier.DEVICE: self.gpu_bytes, Tier.HOST: self.host_bytes, Tier.NVME: self.nvme_bytes}

    @property
    def caps(self) -> Caps:
        """What a rank may take besides memory."""
        num = self.ranks_per_node
        return Caps(
            None if self.nvme_bytes is None else self.nvme_bytes // num,
            None if self.pinned_bytes is None else self.pinned_bytes // num,
            None if self.written_bytes_day is None else self.written_bytes_day / num,
        )


_KEPT_PARTS = tuple(part / 8 for part in range(1, 8))
"""Of the blocks, that may keep their activations where the others are recomputed."""


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
    is_checkpointing: bool | None = False
    """Whether blocks are recomputed in backward; None: none, some or all, as is fastest."""
    moved: Collection[str] = ()
    """Fields of the policy that may be chosen though they are set: of HOMES."""
    is_configured: bool = False
    """Whether the config is a user's, whose order of micro-batches stays, too; False: made of
    options."""
    lora_rank: int | None = None
    """Of adapters, which alone are trained (`meta_model`); None: everything is."""
    was_recomputing: bool = False
    """Whether measured maths recomputed all blocks."""

    def compute_of(self, num_tokens: int, recomputed: float) -> Compute:
        """The seconds of the maths of a micro-batch of so many tokens, a part of the blocks
        recomputed."""
        if not isinstance(self.compute, Compute):
            return Compute.of_peak(self.compute, num_tokens, recomputed)
        more = recomputed - float(self.was_recomputing)
        return self.compute.recomputing(more)._replace(num_tokens=num_tokens)

    def ways(
        self, policy: OffloadPolicy, batch: BatchSizes, chooses: bool
    ) -> Iterator[ActivationBytes]:
        """The activations of a micro-batch, for each way to keep them; chooses: those of some
        blocks among them. Raises ValueError for a shape that lacks a size."""
        sizes = ModelSizes.of(self.shape)
        is_gpu = self.cluster.gpu_bytes is not None
        precision = resolve_auto(load_config(self.config), sizes.hidden).precision
        by_layer = policy.accumulation == "layers"
        asked = self.is_checkpointing
        kinds = [(each, 0, False) for each in (False, True) if asked is None or each is asked]
        may_layer = self.moved and not self.is_configured
        may_layer = may_layer and sizes.is_llama and batch.accumulation > 1
        if by_layer or (may_layer and asked is not False):
            kinds = [*([] if by_layer else kinds), (True, 0, True)]
        may_keep = chooses and asked is None and policy.activations is None and not by_layer
        if may_keep and OF_DIFFUSERS not in self.shape:  # last: a search begins with the others
            kept = {int(part * sizes.num_layers) for part in _KEPT_PARTS} - {0}
            kinds += [(True, each, False) for each in sorted(kept)]
        for is_recomputing, num_kept, is_by_layer in kinds:
            yield ActivationBytes(
                sizes,
                batch.micro * self.seq,
                precision,
                compute_of(self.config, precision),
                is_recomputing,
                is_gpu,
                batch.accumulation if is_by_layer else None,
                self.lora_rank is not None,
                num_kept,
                Picture.of(self.shape, is_recomputing),
            )


class PlanProblem(NamedTuple):
    """A tier, or another limit, that is too small: bytes of one node, or of one GPU."""

    where: str
    needed_bytes: int
    limit_bytes: int


@dataclasses.dataclass(frozen=True)
class Planned:
    """A scenario with its figures."""

    scenario: Scenario
    model: nn.Module
    """On the meta device."""
    policy: OffloadPolicy
    plan: Plan
    lines: tuple[Row, ...]
    forecast: Forecast
    batch: BatchSizes
    given: OffloadPolicy
    """The policy before the choice."""
    activations: ActivationBytes
    choice: Choice | None = None
    """How what a budget leaves open was settled; None: by rule."""

    @property
    def num_params(self) -> int:
        """Elements of the model's parameters."""
        return sum(param.numel() for param in self.model.parameters())

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
    def written_bytes(self) -> int:
        """Bytes that a node writes to its disks in a step."""
        return self.forecast.edge_bytes("HOST -> NVME") * self.scenario.cluster.ranks_per_node

    @property
    def written_bytes_day(self) -> float:
        """Bytes that a node writes to its disks in a day of steps."""
        total_s = self.forecast.total_s
        return DAY_S * self.written_bytes / total_s if total_s else 0.0

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
    def excess(self) -> float:
        """By what factor the tightest tier is too small; 1 when all fit."""
        factors = (each.needed_bytes / each.limit_bytes for each in self.problems)
        return max(factors, default=1.0)

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
        pinned = self.pinned_bytes * cluster.ranks_per_node
        plan, given, per_node = self.plan, self.given, cluster.ranks_per_node
        for where, needed, limit in (
            ("host_bytes of the config", plan.host_bytes * per_node, given.host_bytes),
            ("device_bytes of the config", plan.device_bytes, given.device_bytes),
            ("the config's room on disks", plan.disk_bytes * per_node, given.most_disk_bytes),
            ("the pinned memory of a node", pinned, cluster.pinned_bytes),
            (
                WEAR,
                self.written_bytes_day,
                cluster.written_bytes_day,
            ),
        ):
            if limit is not None and needed > limit:
                found.append(PlanProblem(where, int(needed), int(limit)))
        return found


def plan_scenario(scenario: Scenario, chooses: bool = True, near: Planned | None = None) -> Planned:
    """Plans a scenario; with `chooses`, what is left open is settled by predicted time
    (forecast/choose.py). near: the plan of a scenario of the same model that differs little.

    Steps begin under backward only where the disk has room for it. Raises ValueError for a config
    or model that cannot be: what a real start would refuse too.
    """
    cluster = scenario.cluster
    loaded = resolve_auto(load_config(scenario.config), ModelSizes.of(scenario.shape).hidden)
    model = (
        near.model
        if near is not None
        else meta_model(scenario.shape, loaded.precision, scenario.lora_rank)
    )
    batch = loaded.batch(cluster.num_ranks)
    given = at_farthest(loaded.policy(), scenario.moved)
    per_node = cluster.ranks_per_node
    is_gpu = cluster.gpu_bytes is not None
    card_bytes = cluster.gpu_bytes
    if card_bytes is not None:
        card_bytes = max(1, card_bytes - sum(row.num_bytes for row in cluster.gpu_others))
    placements: dict[Placement, ActivationBytes] = {}
    for way in scenario.ways(given, batch, chooses):
        left = None
        if cluster.host_bytes is not None:  # the store has what a node leaves
            outside = [*cluster.host_others, *way.rows(given.activations)]
            outside_bytes = sum(row.num_bytes for row in outside if row.tier is Tier.HOST)
            left = cluster.host_bytes - outside_bytes * per_node
        compute = scenario.compute_of(way.multiplied_tokens, way.recomputed_part)
        for each in way.placements(given, card_bytes, left, per_node, compute):
            if way.num_kept and 1 in (each.device_bytes, each.host_bytes):
                continue  # activations alone are too large
            if each.host_bytes is not None and given.host_bytes is not None:
                rest = each.host_bytes // per_node
                each = each._replace(host_bytes=None, host_room_bytes=rest)
            placements[each] = way

    def chosen(policy: OffloadPolicy, among: Sequence[Placement], **more: Any) -> Choice:
        compute = Compute(0.0, 0.0)  # each placement has its own
        ranks = cluster.num_ranks, per_node
        return choose(
            model,
            policy,
            scenario.rates,
            compute,
            *ranks,
            is_gpu,
            batch.accumulation,
            among,
            **more,
        )

    def made(tried: Tried, choice: Choice | None = None) -> Planned:
        activations = placements[tried.placement]
        rows = activations.rows(tried.policy.activations)
        return Planned(
            scenario=scenario,
            model=model,
            policy=tried.policy,
            plan=tried.plan,
            lines=(*tried.plan.rows, *cluster.host_others, *cluster.gpu_others, *rows),
            forecast=tried.forecast,
            batch=batch,
            given=given,
            activations=activations,
            choice=choice,
        )

    def smallest(placement: Placement, **fields: Any) -> Planned:
        policy = dataclasses.replace(given, **{"host_bytes": None, "device_bytes": None} | fields)
        free = placement._replace(device_bytes=None, host_bytes=None, host_room_bytes=None)
        tried = chosen(policy, [free], searches=False).chosen
        return made(dataclasses.replace(tried, placement=placement))

    try:
        choice = chosen(
            given,
            list(placements),
            caps=cluster.caps,
            moved=scenario.moved,
            searches=chooses,
            near=near.choice if near is not None else None,
        )
    except ValueError:  # nothing fits
        return _nearest(scenario, given, list(placements), smallest)
    return made(choice.chosen, choice)


def at_farthest(policy: OffloadPolicy, moved: Collection[str]) -> OffloadPolicy:
    """The policy with the homes that may be chosen where they take the least memory."""
    far = Tier.NVME if policy.paths else Tier.HOST
    homes: dict[str, Any] = dict.fromkeys(moved, far)
    return dataclasses.replace(policy, **homes)


def _nearest(
    scenario: Scenario,
    policy: OffloadPolicy,
    placements: Sequence[Placement],
    smallest: Callable[..., Planned],
) -> Planned:
    """Of plans without a budget the one that comes nearest to the limits, with no more host memory
    than it needs. Raises ValueError for a policy that cannot be planned."""
    ways: list[dict[str, Any]] = [{"resident_bytes": policy.resident_bytes or 0}]
    if scenario.moved:
        far = Tier.NVME if policy.paths else Tier.HOST
        near = Tier.DEVICE if scenario.cluster.gpu_bytes is not None else Tier.HOST
        ways = [{**way, "grads": each} for way in ways for each in {near: 0, far: 0}]
    found: list[tuple[Planned, Placement, dict[str, Any]]] = []
    errors = []
    for placement, fields in itertools.product(placements, ways):
        try:
            found.append((smallest(placement, **fields), placement, fields))
        except ValueError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    best, placement, fields = min(found, key=lambda each: each[0].excess)
    enough, small = best.plan.host_bytes * scenario.cluster.ranks_per_node, 0
    while enough - small > _LEAST_STEP * enough:
        middle = (small + enough) // 2
        try:
            best = smallest(placement, **fields, host_bytes=middle)
            enough = middle
        except ValueError:
            small = middle
    return best


_LEAST_STEP = 0.002
"""To what part of it the host memory is known that a plan needs at least."""


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
