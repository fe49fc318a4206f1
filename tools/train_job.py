"""TrainJob: makes the job from `tiermem train`'s options, computes its memory budget, and finds errors before it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiermem.swap.direct import probe_path
from tiermem.tools.corpus import Corpus
from tiermem.tools.launcher import Job
from tiermem.tools.machine import memory_bytes
from tiermem.tools.options import TrainOptions
from tiermem.tools.presets import ModelShape, check_shape, read_shape, shape_of, with_layers
from tiermem.tools.train_options import (
    CHECKPOINTS,
    DEFAULT_LR,
    DEFAULT_SEED,
    DEFAULT_SEQ,
    DEFAULT_STEPS,
    Resumed,
    decided_by_config,
    make_config,
    nvme_folders,
    options_to_save,
    own_folders,
    precision_of,
    read_config,
)
from tiermem.tools.words import format_bytes

if TYPE_CHECKING:
    from tiermem.precision import Precision


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
    from tiermem.precision import DTYPES, Precision
    from tiermem.zero.state_layout import StateLayout  # both import torch, which the command line does without

    layout = StateLayout(DTYPES[precision], states or Precision(), num_moments=2)
    return num_params * ELEMENT_BYTES[precision] + sum(part.num_bytes(num_params) for part in layout.parts)


def _key(shape: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(shape.get(name), int):
            return int(shape[name])
    raise ValueError(f"the model's config has no {names[0]}: --memory needs it to tell activations by arithmetic")


# ---- the job ---------------------------------------------------------------------------------------------------------
#
#     options  ->  shape, config, folders, data  ->  Job
#
# A job that resumes from a saved step takes options that are not given from that step (train_options.py).


def make_job(options: TrainOptions, name: str, folder: Path, resumed: Resumed | None = None) -> Job:
    """The job that options describe, `with_saved` ones when it goes on from a saved step.

    Raises ValueError or OSError for options that contradict or name what is not there.
    """
    shape, checkpoint = _shape(options, resumed)
    check_shape(shape)
    if options.save is not None:
        probe_path(_existing(options.save.absolute()))
    batch, seq = options.batch or 1, options.seq or DEFAULT_SEQ
    config, nvme, own = _config(options, resumed, folder, batch)
    for path in nvme:
        if path != folder:
            probe_path(path)
    _check_room(shape, [_existing(path.absolute()) for path in nvme])
    seed = options.seed if options.seed is not None else DEFAULT_SEED
    Corpus(options.data, seq, seed)  # raises for what cannot be read
    saves = options.save is not None or options.save_every is not None
    return Job(
        name=name,
        shape=shape,
        checkpoint=str(checkpoint) if checkpoint else None,
        config=config,
        data=[str(path) for path in options.data],
        steps=options.steps or DEFAULT_STEPS,
        seq=seq,
        batch=int(config.get("train_micro_batch_size_per_gpu", batch)) if _is_number(config, batch) else batch,
        seed=seed,
        lr=_lr_of(config),
        precision=precision_of(config),
        is_checkpointing=options.is_checkpointing,
        memory_limit_bytes=options.memory_bytes,
        threads=options.threads,
        nvme_paths=[str(path) for path in nvme],
        events_file=str(folder / "events.jsonl"),
        resume=str(resumed.place) if resumed is not None else None,
        save_dir=str((options.save or folder / CHECKPOINTS).absolute()) if saves else None,
        save_every=options.save_every,
        to_save=options_to_save(options, name, shape, own),
    )


def _config(
    options: TrainOptions, resumed: Resumed | None, folder: Path, batch: int
) -> tuple[dict[str, Any], list[Path], dict[str, Any] | None]:
    """The config, the folders that states rest in, and the config again if it was given and not made here."""
    tuned = _with_tuned({}, options.tuned)
    if options.deepspeed_config is not None:
        given = read_config(options.deepspeed_config, decided_by_config(options), batch)
    elif resumed is not None and resumed.config is not None:
        decided = decided_by_config(options)
        if decided:
            raise ValueError(f"{', '.join(decided)}: {resumed.place} was saved with a config, which decides this")
        given = resumed.config
    else:
        made, nvme = _made_config(options, tuned, folder)
        return _with_tuned(made, tuned), nvme, None
    config = _with_tuned(given, tuned)
    return config, [Path(path) for path in nvme_folders(config)], config


def _with_tuned(config: dict[str, Any], tuned: Path | Mapping[str, Any] | None) -> dict[str, Any]:
    if not tuned:
        return config
    from tiermem.config.load import with_tuned  # imports torch, which the launcher does without

    return with_tuned(config, tuned)


def _made_config(options: TrainOptions, tuned: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[Path]]:
    is_on_nvme = (options.offload or "nvme") == "nvme"
    if options.nvme and not is_on_nvme:
        raise ValueError(
            f"--nvme names folders, but with --offload {options.offload} nothing rests there: use --offload nvme"
        )
    nvme = (_nvme_beside(options, tuned) or [folder]) if is_on_nvme else []
    return make_config(options, nvme), nvme


def _shape(options: TrainOptions, resumed: Resumed | None) -> tuple[ModelShape, Path | None]:
    given = {"--preset": options.preset, "--config": options.config, "--model": options.model}
    named = [option for option, value in given.items() if value is not None]
    if resumed is not None and not named:
        return resumed.shape, None
    if len(named) != 1:
        what = f"{' and '.join(named)} are given" if named else "none is given"
        raise ValueError(f"a model is named by exactly one of --preset, --config and --model; {what}")
    if options.model is not None:
        if not (options.model / "config.json").is_file():
            raise FileNotFoundError(f"--model: {options.model} has no config.json")
        if options.layers is not None:
            raise ValueError("--layers changes the shape, but --model brings weights of its own shape")
        return read_shape(options.model / "config.json"), options.model
    shape = shape_of(options.preset, options.config, "--config")
    return (with_layers(shape, options.layers) if options.layers is not None else shape), None


def _check_room(shape: ModelShape, nvme: list[Path]) -> None:
    """Raises ValueError for a model whose weights alone, in two bytes each, exceed all disks and the memory."""
    try:
        sizes = ModelSizes.of(shape)
    except (ValueError, TypeError):  # a model that the budget does not know, which the trainer builds as it is
        return
    num_bytes = 2 * (sizes.num_layers * sizes.block_numel + sizes.vocabulary * sizes.hidden)
    disks = {facts.device: facts.free_bytes for facts in map(probe_path, nvme)}
    there = sum(disks.values()) + memory_bytes()
    if num_bytes > there:
        raise ValueError(
            f"the model's weights alone are {format_bytes(num_bytes)} ({sizes.num_layers} layers of {sizes.hidden}, vocabulary "
            f"{sizes.vocabulary}); memory and free disk are {format_bytes(there)}: take a smaller model, or name a larger disk "
            "with --nvme"
        )


def _existing(path: Path) -> Path:
    """The folder itself, or the one above it that is there."""
    return next(each for each in (path, *path.parents) if each.is_dir())


def _nvme_beside(options: TrainOptions, tuned: dict[str, Any]) -> list[Path]:
    """The folders of --nvme, or those that were tuned; both when they are the same."""
    found = [Path(folder) for folder in own_folders(tuned)]
    if options.nvme and found and {path.resolve() for path in options.nvme} != {path.resolve() for path in found}:
        raise ValueError(
            f"--nvme is {', '.join(map(str, options.nvme))}, but {options.tuned} was made for "
            f"{', '.join(map(str, found))}: leave --nvme out, or tune these folders"
        )
    return found or list(options.nvme)


def _lr_of(config: dict[str, Any]) -> float:
    lr = (config.get("optimizer") or {}).get("params", {}).get("lr", DEFAULT_LR)
    return float(lr) if isinstance(lr, (int, float)) else DEFAULT_LR


def _is_number(config: dict[str, Any], default: int) -> bool:
    return isinstance(config.get("train_micro_batch_size_per_gpu", default), int)
