"""TrainJob: makes a config and the job from `tiermem train`'s options and a saved step, and finds
errors before it starts."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tiermem.swap.disk.direct import probe_path
from tiermem.tools.corpus import Corpus, check_bytes_suit
from tiermem.tools.job.launcher import Job, num_ranks
from tiermem.tools.measure.machine import memory_bytes
from tiermem.tools.options import DECIDED_BY_CONFIG, TrainOptions, check_one_model
from tiermem.tools.presets import (
    ModelShape,
    ModelSizes,
    check_shape,
    read_shape,
    shape_of,
    with_layers,
)
from tiermem.tools.words import Mistake, folders, format_bytes, numbered, read_json

# ---- the config ----------------------------------------------------------------------------------
#
# A setting that the config file contains cannot be given as an option, too.

Config = dict[str, Any]

DEFAULT_STEPS = 10
DEFAULT_SEQ = 128
DEFAULT_SEED = 0
CLIPPING = 1.0
DEFAULT_LR = 1e-4
MAY_USE_NVME = ("nvme", "auto")
"""Homes that may be on NVMe."""
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def make_config(options: TrainOptions, nvme_paths: Sequence[Path] = ()) -> Config:
    """AdamW with clipping; parameters and optimizer states at home on `offload`, on NVMe at
    `nvme_paths`. Raises ValueError."""
    is_of_nvme = options.resident_bytes is not None or options.durability == "step"
    offload = options.offload or ("nvme" if is_of_nvme else "auto")
    precision = options.precision or "auto"
    compute = options.compute
    if precision == "auto":
        precision = "bf16"
        compute = compute or "auto"
    if options.resident_bytes and offload != "nvme":
        raise Mistake(
            f"--resident keeps a part of what rests on NVMe in memory; with --offload {offload} "
            "all is",
            {"--resident": ""},
        )
    target: Config = {"device": offload}
    if offload in MAY_USE_NVME and nvme_paths:
        target["nvme_path"] = [str(path) for path in nvme_paths]
    lr = DEFAULT_LR if options.lr is None else options.lr
    config: Config = {
        "train_micro_batch_size_per_gpu": options.batch or 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}},
        "gradient_clipping": CLIPPING,
        "zero_optimization": {
            "stage": 3,
            "offload_param": dict(target),
            "offload_optimizer": dict(target),
        },
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp32" or compute == "storage":
        compute = None
    elif compute == "auto":
        compute = "measured"
    own: Config = {
        name: getattr(options, name) for name in ("resident_bytes", "durability", "keep", "overlap")
    }
    own |= {"precision": options.states, "compute_dtype": compute}
    own = {key: value for key, value in own.items() if value is not None}
    return {**config, "tiermem": own} if own else config


def read_config(file: Path, batch: int) -> Config:
    """A user's config file, with a micro-batch where it names none. Raises OSError, or ValueError
    for a file that is not JSON."""
    config = read_json(file)
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object")
    if not any(key in config for key in _BATCH_KEYS):
        config["train_micro_batch_size_per_gpu"] = batch
    return config


def nvme_folders(config: Config) -> list[str]:
    """Folders that states may rest in, in every form that a config has for them; each once. For a
    config not yet checked."""
    zero = config.get("zero_optimization")
    sections = (
        [zero.get(name) for name in ("offload_param", "offload_optimizer")]
        if isinstance(zero, dict)
        else []
    )
    in_use = [
        each for each in sections if isinstance(each, dict) and each.get("device") in MAY_USE_NVME
    ]
    own = own_folders(config)
    if own and in_use:
        return own
    return list(
        dict.fromkeys(folder for each in in_use for folder in _folders(each.get("nvme_path")))
    )


def own_folders(config: Config) -> list[str]:
    """The folders of `tiermem.paths`."""
    own = config.get("tiermem")
    return _folders(own.get("paths")) if isinstance(own, dict) else []


def with_host_bytes(config: Config, host_bytes: int) -> Config:
    """The config with a budget of host memory, unless it names one itself."""
    own = {"host_bytes": host_bytes, **config.get("tiermem", {})}
    return {**config, "tiermem": own}


def micro_batch_of(config: Config, default: int, num_ranks: int) -> int:
    """The sequences of a micro-batch, also where a config not yet checked has those of a whole step
    alone; `default` where the config names none, or "auto"."""
    whole, micro, accumulation = map(config.get, _BATCH_KEYS)
    if isinstance(micro, int):
        return micro
    if not isinstance(whole, int):
        return default
    num_micro = accumulation if isinstance(accumulation, int) else 1
    return max(whole // max(num_micro * num_ranks, 1), 1)


def with_key(config: Mapping[str, Any], path: Sequence[str], value: Any) -> Config:
    """The config with one key set, or taken out where the value is None; `path` names its sections
    and then the key."""
    changed: Any = copy.deepcopy(dict(config))
    *sections, key = path
    target = changed
    for section in sections:
        target = target.setdefault(section, {})
    if value is None:
        target.pop(key, None)
    else:
        target[key] = value
    return dict(changed)


_YES = ("true", "t", "1", "1.0", "yes", "y", "on")
"""What a config's switches take for true, as text."""


def precision_of(config: Config) -> str:
    """What the model computes in, of a config not yet checked."""
    for name, aliases in (("bf16", ("bf16", "bfloat16")), ("fp16", ("fp16",))):
        sections = map(config.get, aliases)
        said = [each.get("enabled") for each in sections if isinstance(each, Mapping)]
        if any(str(each).lower() in _YES for each in said):
            return name
    return "fp32"


def _folders(paths: object) -> list[str]:
    several = paths if isinstance(paths, list) else [paths]
    found = [each.get("path") if isinstance(each, dict) else each for each in several]
    return [each for each in found if isinstance(each, str)]


# ---- resuming ------------------------------------------------------------------------------------
#
#     DIR          the folder of `--save`, one of its tags, a run's folder (runs/<id>) or a store's: its newest durable step
#     options      of the run that saved it: data, sizes, precision, learning rate, homes ...; options given now replace them
#     shape        of the saved model; weights and states come from the step
#
# The trainer saves them beside the states, as the client state, under CLIENT_KEY.

CLIENT_KEY = "tiermem train"
CHECKPOINTS = "checkpoints"
"""The folder in a run's own that checkpoints go to unless `--save` names another."""

LIST_OF_STEPS = "?"
"""What `--resume` without a value stands for: show what there is to go on from."""

_PATHS = ("data", "nvme")
_FOLDER_KEYS = ("nvme_path", "paths", "path")
"""Of a config."""
_ADDED = ("compute", "overlap")  # older runs have no such options
_CARRIED = (
    *DECIDED_BY_CONFIG,
    "data",
    "steps",
    "seq",
    "seed",
    "memory_bytes",
    "threads",
    "save_every",
)


class Resumed(NamedTuple):
    """A durable step to go on from."""

    path: Path  # what load_checkpoint is given
    step: int
    name: str  # of the run
    shape: ModelShape
    config: Config | None  # of a run that was given one
    options: dict[str, Any]
    compute_dtype: str  # in which its products were made
    streamed_part: float  # of its tiles elsewhere: those that an accelerator stepped
    is_saved: bool  # whether the run had a --save or --save-every, and saved at its end


def options_to_save(
    options: TrainOptions, name: str, shape: ModelShape, config: Config | None
) -> dict[str, Any]:
    """What a run saves of itself, as JSON."""
    kept = {field: getattr(options, field) for field in _CARRIED}
    kept |= {field: [str(path.absolute()) for path in kept[field]] for field in _PATHS}
    return {
        "name": name,
        "shape": shape,
        "config": _absolute(config),
        "is_checkpointing": options.is_checkpointing,
        **kept,
    }


def _absolute(value: Any, is_folder: bool = False) -> Any:
    """A config, or a value in it, with absolute folders: a resume may begin in another one."""
    if isinstance(value, dict):
        return {key: _absolute(each, key in _FOLDER_KEYS) for key, each in value.items()}
    if isinstance(value, list):
        return [_absolute(each, is_folder) for each in value]
    return str(Path(value).absolute()) if is_folder and isinstance(value, str) else value


def find_resumed(where: Path) -> Resumed:
    """The newest durable step in a folder. Raises OSError when there is none; ValueError for one
    that is not whole, or that another program saved."""
    from tiermem.checkpoint.opening.source import Source  # imports torch

    found: list[tuple[Path, Any]] = []
    for path in _holders_of_steps(where):
        with Source.open(path) as source:
            found.append((source.place, source.manifest))
    path, manifest = max(found, key=lambda each: each[1].step)
    saved = (
        manifest.client_state.get(CLIENT_KEY) if isinstance(manifest.client_state, dict) else None
    )
    if not isinstance(saved, dict):
        raise ValueError(
            f"--resume: {path} was not saved by tiermem train, so it does not say how to go on: "
            "`tiermem sft` goes on with --resume_from_checkpoint true, a loop of your own with "
            "engine.load_checkpoint"
        )
    try:
        told = dict.fromkeys(_ADDED) | saved
        options = {field: told[field] for field in (*_CARRIED, "is_checkpointing")}
        return Resumed(
            path,
            manifest.step,
            str(saved["name"]),
            dict(saved["shape"]),
            saved["config"],
            options,
            manifest.compute_dtype,
            manifest.streamed_part,
            bool(saved.get("is_saved")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--resume: {path}: what tiermem train saved of itself is not complete: {error}"
        ) from error


def with_saved(options: TrainOptions, resumed: Resumed) -> TrainOptions:
    """The options, those that were not given taken from the run that saved. Raises ValueError when
    no step is left."""
    names = set(_CARRIED)
    if options.config is not None or resumed.config is not None:
        names -= set(DECIDED_BY_CONFIG)
    if options.offload is not None:
        names -= {"offload", "nvme", "resident_bytes"}
    taken: dict[str, Any] = {}
    for name in names:
        saved = resumed.options[name]
        if getattr(options, name) in (None, ()) and saved is not None:
            taken[name] = tuple(Path(each) for each in saved) if name in _PATHS else saved
    if options.is_checkpointing is None:
        taken["is_checkpointing"] = resumed.options["is_checkpointing"]
    found = dataclasses.replace(options, **taken)
    steps = found.steps or DEFAULT_STEPS
    if steps <= resumed.step:
        raise ValueError(
            f"--resume: {resumed.path} has {numbered(resumed.step, 'step')} behind it, and --steps counts "
            f"from the first: give more than {resumed.step}, not {steps}"
        )
    return found


def _holders_of_steps(where: Path) -> list[Path]:
    """What may hold a durable step there."""
    from tiermem.checkpoint.format.finding import NothingSaved, find

    if not where.exists():
        raise Mistake(f"--resume: there is no folder {where}", {"--resume": "--resume"})

    def holds_steps(path: Path) -> bool:
        with contextlib.suppress(NothingSaved):
            return bool(find(path))
        return False

    stores = [
        each for each in sorted(where.glob("tiermem-*")) if each.is_dir() and holds_steps(each)
    ]
    if len(stores) > 1:
        names = ", ".join(each.name for each in stores)
        raise ValueError(f"--resume: {where} holds the stores of several runs: name one of {names}")
    found = [
        each for each in (where, where / CHECKPOINTS) if each.exists() and holds_steps(each)
    ] + stores
    if not found:
        find(where)  # raises what is missing there
    return found


# ---- the job -------------------------------------------------------------------------------------
#
#     options  ->  shape, config, folders, data  ->  Job
#
# A job that resumes from a saved step takes options that are not given from that step.


def make_job(options: TrainOptions, name: str, folder: Path, resumed: Resumed | None = None) -> Job:
    """The job that options describe, `with_saved` ones when it goes on from a saved step.

    Raises ValueError or OSError for options that contradict or name what is not there.
    """
    shape, checkpoint = _shape(options, resumed)
    check_shape(shape)
    if options.save is not None:
        probe_path(_existing(options.save.absolute()))
    batch = options.batch or 1
    seq = options.seq or DEFAULT_SEQ
    config, own = _config(options, resumed, folder, batch)
    if resumed is not None:
        config = _with_kept(config, resumed)
    nvme = [Path(path) for path in nvme_folders(config)]
    for path in nvme:
        if path != folder:
            probe_path(path)
    _check_room(shape, [_existing(path.absolute()) for path in nvme])
    seed = options.seed if options.seed is not None else DEFAULT_SEED
    corpus = Corpus(options.data, seq, seed)  # raises for what cannot be read
    saves = options.save is not None or options.save_every is not None
    saves |= resumed is not None and resumed.is_saved
    return Job(
        name=name,
        shape=shape,
        checkpoint=str(checkpoint) if checkpoint else None,
        config=config,
        data=[str(path) for path in options.data],
        steps=options.steps or DEFAULT_STEPS,
        seq=seq,
        batch=micro_batch_of(config, batch, num_ranks()),
        seed=seed,
        precision=precision_of(config),
        is_checkpointing=recomputes_blocks(options.is_checkpointing, config),
        memory_limit_bytes=options.memory_bytes,
        threads=options.threads,
        nvme_paths=[str(path) for path in nvme],
        events_file=str(folder / "events.jsonl"),
        resume=str(resumed.path) if resumed is not None else None,
        save_dir=str((options.save or folder / CHECKPOINTS).absolute()) if saves else None,
        save_every=options.save_every,
        sustained=options.sustained,
        to_save=options_to_save(options, name, shape, own) | {"is_saved": saves},
        source=corpus.source,
    )


def recomputes_blocks(is_asked: bool | None, config: Config) -> bool | None:
    """Whether blocks are recomputed in backward: as asked, but layer by layer always; None: that is
    to be chosen.

    Raises Mistake where a config of layer by layer is not to recompute them.
    """
    if (config.get("tiermem") or {}).get("accumulation") != "layers":
        return is_asked
    if is_asked is False:
        raise Mistake(
            '--no-checkpointing with accumulation "layers", which computes blocks again in '
            "backward",
            {"--no-checkpointing": ""},
        )
    return True


def _with_kept(config: Config, resumed: Resumed) -> Config:
    """The config with what this machine would choose as the saved run had it, because it may change
    bits."""
    own = config.get("tiermem") or {}
    if own.get("compute_dtype") == "measured":
        config = with_key(config, ("tiermem", "compute_dtype"), resumed.compute_dtype)
    if own.get("streamed_ratio") is None:
        config = with_key(config, ("tiermem", "streamed_ratio"), resumed.streamed_part)
    return config


def _config(
    options: TrainOptions, resumed: Resumed | None, folder: Path, batch: int
) -> tuple[Config, Config | None]:
    """The config, and the config again if it was given and not made here."""
    tuned = _with_tuned({}, options.tuned)
    if options.config is not None:
        given = read_config(options.config, batch)
        if given.get("optimizer") in (None, "auto"):
            raise ValueError(
                f"{options.config} names no optimizer, which train steps: add "
                '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}'
            )
    elif resumed is not None and resumed.config is not None:
        if decided := options.given(*DECIDED_BY_CONFIG):
            raise ValueError(
                f"{', '.join(decided)}: {resumed.path} was saved with a config, which decides this"
            )
        given = resumed.config
    else:
        return _with_tuned(make_config(options, _nvme_of(options, tuned, folder)), tuned), None
    config = _with_tuned(given, tuned)
    return config, config


def _with_tuned(config: Config, tuned: Path | Mapping[str, Any] | None) -> Config:
    if not tuned:
        return config
    from tiermem.config.load import with_tuned  # imports torch, which the launcher does without

    return with_tuned(config, tuned)


def _nvme_of(options: TrainOptions, tuned: Config, folder: Path) -> list[Path]:
    """The folders that states rest in: those of --nvme, or those that were tuned; both when they
    are the same."""
    if options.offload not in (None, *MAY_USE_NVME):
        if options.nvme:
            raise Mistake(
                f"--nvme names folders, but with --offload {options.offload} nothing rests there",
                {"--offload": "--offload nvme"},
            )
        return []
    found = [Path(folder) for folder in own_folders(tuned)]
    if not options.nvme:
        return found or [folder]
    folders("--nvme", options.nvme)
    if found and {*map(Path.resolve, options.nvme)} != {*map(Path.resolve, found)}:
        raise ValueError(
            f"--nvme is {', '.join(map(str, options.nvme))}, but {options.tuned} was made for "
            f"{', '.join(map(str, found))}: leave --nvme out, or tune these folders"
        )
    return found or list(options.nvme)


def _shape(options: TrainOptions, resumed: Resumed | None) -> tuple[ModelShape, Path | None]:
    model = options.model
    if resumed is not None and options.preset is None and model is None:
        return resumed.shape, None
    check_one_model(options, "419m")
    if model is None or model.suffix == ".json":
        shape = shape_of(options.preset, model)
        return (with_layers(shape, options.layers) if options.layers is not None else shape), None
    check_bytes_suit(model)
    for needed in ("config.json", "*.safetensors"):
        if not any(model.glob(needed)):
            raise FileNotFoundError(
                f"--model: {model} has no {needed}: give a local folder with config.json and "
                "safetensors, or a config.json, whose weights are made at random; nothing is downloaded"
            )
    if options.layers is not None:
        raise ValueError("--layers changes the shape, but --model brings weights of its own shape")
    return read_shape(model / "config.json"), model


def _check_room(shape: ModelShape, nvme: list[Path]) -> None:
    """Raises ValueError for a model whose weights alone, in two bytes each, exceed all disks and
    the memory."""
    try:
        sizes = ModelSizes.of(shape)
    # a model that the budget does not know, which the trainer builds as it is
    except (ValueError, TypeError):
        return
    num_bytes = 2 * (sizes.num_layers * sizes.block_numel + sizes.vocabulary * sizes.hidden)
    disks = {facts.device: facts.free_bytes for facts in map(probe_path, nvme)}
    there = sum(disks.values()) + memory_bytes()
    if num_bytes > there:
        raise ValueError(
            f"the model's weights alone are {format_bytes(num_bytes)} ({sizes.num_layers} layers "
            f"of {sizes.hidden}, vocabulary {sizes.vocabulary}); memory and free disk are "
            f"{format_bytes(there)}: take a smaller model, or name a larger disk with --nvme"
        )


def _existing(path: Path) -> Path:
    """The folder itself, or the one above it that is there. Raises NotADirectoryError where a file
    is in its place."""
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file: name a folder", str(there))
    return there
