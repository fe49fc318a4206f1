"""Budget: how much host memory the store may carve under a cap, by arithmetic, before anything is built.

    cap  =  interpreter and libraries    measured, after the imports
         +  activations                  a formula per token and layer, from what autograd saves for a Llama
         +  gradients in autograd        of the largest unit, until the last of them has arrived, and of the block before
         +  repacked weight              oneDNN copies a weight into its own layout for the length of a product
         +  allocator                    free pieces between live ones: a part of what passes through the heap
         +  margin
         +  host_bytes                   the rest: units, tiles, staging, resident states

The formula was checked against what autograd saves (`saved_tensors_hooks`), to the byte per layer, and against the peak
of a run. Other families are treated as a Llama of the same sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tiermem.tools.byte_size import format_bytes

if TYPE_CHECKING:
    from tiermem.precision import Precision

MARGIN_BYTES = 32 << 20  # thread stacks, page tables, the queue, Python objects of a step
MARGIN_PART = 0.03
HEAP_PART = 0.30  # measured at 24 and 48 layers of 1024: 9.5 MB of heap for 7.35 MB saved, glibc 2.36
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class Term(NamedTuple):
    """One line of the arithmetic."""

    name: str
    num_bytes: int
    why: str


class ModelSizes(NamedTuple):
    """What the formulas need of a model's shape."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    key_value: int  # width of keys, and of values
    vocabulary: int

    @staticmethod
    def of(shape: Mapping[str, Any]) -> ModelSizes:
        """Reads a Hugging Face config. Raises ValueError that names the key it lacks."""
        hidden = _key(shape, "hidden_size", "n_embd", "d_model")
        num_heads = _key(shape, "num_attention_heads", "n_head", "num_heads")
        head_dim = shape.get("head_dim") or hidden // num_heads
        return ModelSizes(
            hidden=hidden,
            intermediate=shape.get("intermediate_size") or shape.get("n_inner") or 4 * hidden,
            num_layers=_key(shape, "num_hidden_layers", "n_layer", "num_layers"),
            num_heads=num_heads,
            key_value=head_dim * (shape.get("num_key_value_heads") or num_heads),
            vocabulary=_key(shape, "vocab_size"),
        )

    @property
    def block_numel(self) -> int:
        """Parameters of one block."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.key_value
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def unit_numel(self) -> int:
        """Parameters of the largest unit: a block, or the embedding."""
        return max(self.block_numel, self.vocabulary * self.hidden)

    @property
    def weight_numel(self) -> int:
        """Elements of the largest weight."""
        return self.hidden * max(self.intermediate, self.vocabulary)


@dataclasses.dataclass(frozen=True)
class Budget:
    """The arithmetic: the cap, what is taken from it, what is left."""

    cap_bytes: int
    terms: tuple[Term, ...]

    @property
    def host_bytes(self) -> int:
        """What is left for the store; zero or less when nothing is."""
        return self.cap_bytes - sum(term.num_bytes for term in self.terms)

    def rows(self) -> list[Term]:
        """The lines to show: every term, then what is left."""
        return [*self.terms, Term("host memory of the store", self.host_bytes, "what the cap leaves")]

    def explain(self) -> str:
        """The arithmetic on one line."""
        parts = " - ".join(f"{format_bytes(term.num_bytes)} ({term.name})" for term in self.terms)
        return f"{format_bytes(self.cap_bytes)} - {parts} = {format_bytes(self.host_bytes)} for the store"

    def check(self, least_bytes: int = 0) -> None:
        """Raises ValueError with the arithmetic when less than `least_bytes` is left, or nothing."""
        if self.host_bytes >= max(least_bytes, 1):
            return
        enough = self.cap_bytes - self.host_bytes + max(least_bytes, 64 << 20)
        raise ValueError(
            f"a cap of {format_bytes(self.cap_bytes)} is too small: {self.explain()}; {format_bytes(least_bytes)} are "
            f"needed. Give --memory {-(-enough // (1 << 20))}MiB, a shorter --seq, a smaller --batch or --checkpointing"
        )


def plan_budget(
    cap_bytes: int,
    resident_bytes: int,
    shape: Mapping[str, Any],
    num_tokens: int,
    precision: str,
    is_checkpointing: bool,
) -> Budget:
    """The budget of a run: `resident_bytes` measured after imports, `num_tokens` of one micro-batch."""
    sizes = ModelSizes.of(shape)
    terms = (
        Term("interpreter and libraries", resident_bytes, "resident after the imports, measured"),
        *activation_terms(sizes, num_tokens, precision, is_checkpointing),
        Term("margin", max(MARGIN_BYTES, int(MARGIN_PART * cap_bytes)), "stacks, page tables, Python objects"),
    )
    return Budget(cap_bytes, terms)


def activation_terms(sizes: ModelSizes, num_tokens: int, precision: str, is_checkpointing: bool) -> tuple[Term, ...]:
    """What a forward and backward of so many tokens takes beside the store, at its peak."""
    element = ELEMENT_BYTES[precision]
    saved = saved_bytes_per_token(sizes, precision)
    block = num_tokens * saved
    if is_checkpointing:
        kept = sizes.num_layers * num_tokens * sizes.hidden * element
        kept_why = f"{sizes.num_layers} block inputs of {num_tokens} x {sizes.hidden} x {element} B"
    else:
        kept = sizes.num_layers * block
        kept_why = f"{sizes.num_layers} layers x {num_tokens} tokens x {saved} B saved by autograd"
    working = 2 * block if is_checkpointing else block
    logits = num_tokens * sizes.vocabulary * (2 * element + 12)
    gradients = sizes.unit_numel * element
    heap = int(HEAP_PART * (kept + working + logits))
    return (
        Term("activations", kept, kept_why),
        Term("one block at work", working, "recomputed and " * is_checkpointing + "turned into gradients"),
        Term("logits and loss", logits, f"{num_tokens} x {sizes.vocabulary}: in {precision}, float, softmax, gradient"),
        Term("gradients in autograd", gradients, f"largest unit: {sizes.unit_numel} x {element} B"),
        Term("repacked weight", sizes.weight_numel * element, "the largest weight, as the matrix product wants it"),
        Term("gradients before", sizes.block_numel * element, "the last block's: freed, kept by the C library's heap"),
        Term("allocator", heap, f"free pieces between live ones: {HEAP_PART:.0%} of activations, block and logits"),
    )


def saved_bytes_per_token(sizes: ModelSizes, precision: str) -> int:
    """What autograd saves per token in one Llama block (attention fused, SwiGLU), in bytes.

    In the compute precision: inputs of the six projections' three distinct places, queries, attention's output, both
    norms' outputs and inputs (six of hidden); keys and values; four of intermediate. In float: both norms' inputs once
    more when the precision is lower, attention's log-sum-exp per head, two reciprocal roots. With fp32 the norms'
    inputs are saved at two more places instead of their casts.
    """
    hidden_places, float_places = (8, 0) if precision == "fp32" else (6, 2)
    element = ELEMENT_BYTES[precision]
    in_precision = hidden_places * sizes.hidden + 2 * sizes.key_value + 4 * sizes.intermediate
    return in_precision * element + (float_places * sizes.hidden + sizes.num_heads + 2) * 4


def state_bytes(num_params: int, precision: str, states: Precision | None = None) -> int:
    """What a model and its AdamW must keep between steps: the weight, the master that lies beside it and two moments.

    precision: of the weights, "bf16", "fp16" or "fp32"; states: of the rest, default fp32.
    """
    from tiermem.optim.layout import StateLayout  # both import torch, which the command line does without
    from tiermem.precision import DTYPES, Precision

    layout = StateLayout(DTYPES[precision], states or Precision(), num_moments=2)
    return num_params * ELEMENT_BYTES[precision] + sum(part.num_bytes(num_params) for part in layout.parts)


def _key(shape: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(shape.get(name), int):
            return int(shape[name])
    raise ValueError(f"the model's config has no {names[0]}: --memory needs it to tell activations by arithmetic")
