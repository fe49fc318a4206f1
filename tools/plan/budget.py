"""Budget: what a process and a micro-batch's activations take of a memory, and what they leave to
the library's plan."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tiermem.forecast import Placement
from tiermem.forecast.rates import Compute
from tiermem.integrations.diffusion import build_meta, is_unet, unet_activations
from tiermem.layers.chunked_loss import CHUNK_BYTES
from tiermem.plans.plan import ACTIVATION_CHUNK_BYTES, Row
from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import DTYPES, Precision
from tiermem.tools.job.launcher import Job
from tiermem.tools.presets import ModelSizes
from tiermem.tools.words import format_bytes, numbered
from tiermem.units.state_layout import StateLayout

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


class Budget(NamedTuple):
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
    cap_bytes: int, process_bytes: int, activations: ActivationBytes, home: Tier | None = None
) -> Budget:
    """The budget of a run: `process_bytes` measured after imports; home: of the inputs of
    checkpointed blocks."""
    before, after = rows_of_process(cap_bytes, process_bytes)
    rows = (row for row in activations.rows(home) if row.tier is Tier.HOST)
    return Budget(cap_bytes, (before, *rows, after))


def rows_of_process(cap_bytes: int, process_bytes: int) -> tuple[Row, Row]:
    """What a rank's process takes under a cap beside the plan and activations."""
    why = "resident after the imports, measured"
    margin = max(MARGIN_BYTES, int(MARGIN_PART * cap_bytes))
    return (
        Row("interpreter and libraries", Tier.HOST, process_bytes, why),
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


# ---- a UNet on one picture: found by a run on tensors without values, as no formula tells it -------


class Picture(NamedTuple):
    """What one picture takes of a UNet."""

    num_positions: int
    """Of its latents."""
    kept_bytes: int
    """At the end of the forward, in 16 bits."""
    working_bytes: int
    """At most, beside those."""
    mean_tokens: int
    """By how many tokens a weight is multiplied, on average."""

    @staticmethod
    def of(shape: Mapping[str, Any], is_checkpointing: bool) -> Picture | None:
        """Takes seconds, once for a shape; None: the model is no UNet that could be run so."""
        return _picture(json.dumps(dict(shape)), is_checkpointing) if is_unet(shape) else None


@functools.cache
def _picture(shape: str, is_checkpointing: bool) -> Picture | None:
    config = json.loads(shape)
    model = build_meta(config)[0]
    found = unet_activations(model, is_checkpointing)
    if found is None:
        return None
    numel = sum(param.numel() for param in model.parameters() if param.dim() > 1)
    return Picture(
        num_positions=config["sample_size"] ** 2,
        kept_bytes=found.kept_bytes,
        working_bytes=found.peak_bytes - found.kept_bytes,
        mean_tokens=found.forward_flops // (2 * numel),
    )


# ---- activations ---------------------------------------------------------------------------------


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
        return self.num_tokens // self.picture.num_positions

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
        tier = Tier.DEVICE if self.is_gpu else Tier.HOST
        element = DTYPES[self.compute].itemsize
        at_rest = DTYPES[self.precision].itemsize
        kept, kept_why, working = self._kept(home)
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
            terms += [
                ("at work", peaks[most], most_why),
                (
                    "gradients leaving",
                    max(2 * of_block, of_largest),
                    "of two blocks, or of the largest unit",
                ),
            ]
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
        ranks_on_node: int,
        compute: Compute,
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

    def _kept(self, home: Tier | None) -> tuple[int, str, int]:
        """Bytes that are kept until backward, the reason, and bytes of a block at work; home: see
        `moves_inputs`."""
        if self.picture is not None:
            kept = self._of_pictures(self.picture.kept_bytes)
            why = f"{numbered(self._num_pictures, 'picture')}, by a run without values"
            return kept, why, self._of_pictures(self.picture.working_bytes)
        sizes = self.sizes
        num_tokens = self.num_tokens
        saved = saved_bytes_per_token(sizes, self.compute)
        block = num_tokens * saved
        if not self.is_checkpointing:
            why = f"{sizes.num_layers} layers x {num_tokens} tokens x {saved} B saved by autograd"
            return sizes.num_layers * block, why, block
        num_here = self.num_recomputed
        if self.moves_inputs(home):
            num_here = min(_INPUTS_HERE, num_here)
        kept = num_here * self.input_bytes
        each = f"{self.at_once} x " if (self.at_once or 1) > 1 else ""
        element = DTYPES[self.compute].itemsize
        why = f"{num_here} block inputs of {each}{num_tokens} x {sizes.hidden} x {element} B"
        if not self.num_kept:
            return kept, why, 2 * block
        # these are the last blocks: what they keep is gone when the first block is recomputed
        why += f"; {self.num_kept} blocks whole, {num_tokens} tokens x {saved} B"
        return kept + self.num_kept * block, why, block

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
