"""Planned: runs the library's own plan and forecast for a described model, config and cluster.

    config.json -> model on the meta device -> choose: divide -> make_plan -> forecast_step
    ds.json     -> policy -------------------------^               ^
    ranks, nodes, memory, ways to keep activations ----------------/

Every size is the one that training would allocate. A setting that does not fit raises no error: it
is planned as if there were no limit, and `problems` says by how many bytes it is too large.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import math
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
from tiermem.plans.plan import Plan, Row
from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import DTYPES
from tiermem.swap.memory.accelerator import free_and_total, is_accelerator
from tiermem.tools.job.launcher import compute_of
from tiermem.tools.measure.machine import DAY_S
from tiermem.tools.plan.budget import INTERPRETER, ActivationBytes, Budget, Picture
from tiermem.tools.presets import OF_DIFFUSERS, ModelSizes
from tiermem.tools.words import closest

T = TypeVar("T")

LIMITS = {
    Tier.DEVICE: "the GPU of a rank",
    Tier.HOST: "the memory of a node",
    Tier.NVME: "the disks of a node",
}
"""What a limit of a tier limits, in words."""
WEAR = "what a node's disks may be written in a day"


# ---- an accelerator's memory ----------------------------------------------------------------------
#
#     card - in use - torch's part - activations, by the home of block inputs  =  room for the plan

_TORCHS_PART = 0.05
_CONTEXT_BYTES = 512 << 20  # of a driver's context and its kernels, where it cannot be measured


class Card(NamedTuple):
    """An accelerator's memory."""

    total_bytes: int
    others: tuple[Row, ...]
    """What neither a plan nor activations may take."""

    @staticmethod
    def here(device: torch.device) -> Card | None:
        """The device as it is now; None: the CPU."""
        if not is_accelerator(device):
            return None
        free, total = free_and_total(device)
        return Card(
            total,
            (
                Row("in use", Tier.DEVICE, total - free, "by the context and others, now"),
                _gaps(total),
            ),
        )

    @staticmethod
    def elsewhere(total_bytes: int) -> Card:
        """A card that is not in this machine."""
        context = Row(
            "context", Tier.DEVICE, min(_CONTEXT_BYTES, total_bytes), "of the driver, assumed"
        )
        return Card(total_bytes, (context, _gaps(total_bytes)))

    @property
    def room_bytes(self) -> int:
        """What a plan and activations may take together."""
        return max(1, self.total_bytes - sum(row.num_bytes for row in self.others))

    def budget(self, activations: ActivationBytes, home: Tier | None) -> Budget:
        """The arithmetic: what is left for a plan with the inputs of checkpointed blocks in a
        home."""
        return Budget(self.total_bytes, (*self.others, *activations.rows(home)), "the plan")


def _gaps(total_bytes: int) -> Row:
    part = int(_TORCHS_PART * total_bytes)
    return Row(
        "torch",
        Tier.DEVICE,
        part,
        f"{_TORCHS_PART:.0%}: libraries' workspaces, gaps between torch's blocks",
    )


class Cluster(NamedTuple):
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
    free_bytes: int | None = None  # of each node's host memory, where host_bytes is not known

    @property
    def num_ranks(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def limits(self) -> dict[Tier, int | None]:
        """Bytes of each tier that may be used, of one GPU or of one node; None: no limit."""
        return {Tier.DEVICE: self.gpu_bytes, Tier.HOST: self.host_bytes, Tier.NVME: self.nvme_bytes}

    @property
    def card(self) -> Card | None:
        """Each rank's; None: the maths runs on the CPU."""
        return None if self.gpu_bytes is None else Card(self.gpu_bytes, self.gpu_others)

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


class Scenario(NamedTuple):
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
        precision = load_config(self.config).precision
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


class Planned(NamedTuple):
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
    choice: Choice | None
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
        """By what factors tiers are too small, multiplied; 1 when all fit."""
        return math.prod(each.needed_bytes / max(1, each.limit_bytes) for each in self.problems)

    @property
    def problems(self) -> list[PlanProblem]:
        """The tiers that are too small; empty when it fits."""
        cluster = self.scenario.cluster
        plan, given, per_node = self.plan, self.given, cluster.ranks_per_node
        tiers = (
            (LIMITS[tier], self.tier_bytes(tier) * (1 if tier is Tier.DEVICE else per_node), limit)
            for tier, limit in cluster.limits.items()
        )
        needs = (
            *tiers,
            ("host_bytes of the config", plan.host_bytes * per_node, given.host_bytes),
            ("device_bytes of the config", plan.device_bytes, given.device_bytes),
            ("the config's room on disks", plan.disk_bytes * per_node, given.most_disk_bytes),
            ("the pinned memory of a node", self.pinned_bytes * per_node, cluster.pinned_bytes),
            (
                WEAR,
                self.written_bytes_day,
                cluster.written_bytes_day,
            ),
        )
        return [
            PlanProblem(where, int(needed), int(limit))
            for where, needed, limit in needs
            if limit is not None and needed > limit
        ]


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
    asked = loaded.policy()
    far = Tier.NVME if asked.paths else Tier.HOST
    homes: dict[str, Any] = dict.fromkeys(scenario.moved, far)
    given = dataclasses.replace(asked, **homes)  # where they take the least memory
    per_node = cluster.ranks_per_node
    is_gpu = cluster.gpu_bytes is not None
    card_bytes = None if cluster.card is None else cluster.card.room_bytes
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
        return choose(
            model,
            policy,
            scenario.rates,
            Compute(0.0, 0.0),  # each placement has its own
            cluster.num_ranks,
            per_node,
            is_gpu,
            batch.accumulation,
            among,
            free_bytes=cluster.free_bytes,
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
        return made(tried._replace(placement=placement))

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

    Raises ValueError for a model type that transformers does not know and for a config of which it
    cannot build a model, ImportError without peft or diffusers.
    """
    with torch.device("meta"):
        model: Any
        model = build_meta(shape)[0] if OF_DIFFUSERS in shape else _of_transformers(shape)
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


def _of_transformers(shape: Mapping[str, Any]) -> Any:
    config = hf_config(shape)
    causal = transformers().AutoModelForCausalLM
    is_causal = type(config) in causal._model_mapping
    with _told_of(shape):
        model = causal.from_config(config) if is_causal else class_of(config)(config)
    for name, param in model.named_parameters():
        if param.dim() > 2 and not len(param):
            raise ValueError(f"{name} of this {shape['model_type']} has no experts: give it some")
    return model


def hf_config(shape: Mapping[str, Any]) -> Any:
    """The transformers config of a shape. Raises ValueError for a model type that transformers does
    not know, and for values that it refuses."""
    kind = shape["model_type"]
    known = transformers().CONFIG_MAPPING
    if kind not in known:
        raise ValueError(
            f"model_type is {kind!r}, which this transformers does not know; the nearest that it "
            f"does is {closest(str(kind), known)!r}"
        )
    with _told_of(shape):
        return transformers().AutoConfig.for_model(**shape)


@contextlib.contextmanager
def _told_of(shape: Mapping[str, Any]) -> Iterator[None]:
    """Inside, what transformers or torch raise of a config becomes ValueError."""
    try:
        yield
    except (ValueError, ImportError):
        raise
    except Exception as error:  # of any kind, from the model's own code
        raise ValueError(
            f"no {shape['model_type']} can be built of the model's config: "
            f"{type(error).__name__}: {error}"
        ) from error


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
