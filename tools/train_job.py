"""TrainJob: the job that `tiermem train`'s options stand for, and everything about them that can be wrong before it starts.

    options  ->  shape, config, folders, data  ->  Job

What goes on from a saved step takes from there what is not given (resumed.py).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tiermem.swap.probe import probe_path
from tiermem.tools.budget import ModelSizes
from tiermem.tools.byte_size import format_bytes
from tiermem.tools.corpus import Corpus
from tiermem.tools.job import Job
from tiermem.tools.machine import memory_bytes, num_cores
from tiermem.tools.presets import ModelShape, check_shape, preset, read_shape, with_layers
from tiermem.tools.resumed import CHECKPOINTS, Resumed, options_to_save
from tiermem.tools.train_config import DEFAULT_LR, make_config, nvme_folders, own_folders, precision_of, read_config
from tiermem.tools.train_options import DEFAULT_SEED, DEFAULT_SEQ, DEFAULT_STEPS, TrainOptions
from tiermem.tuned import with_tuned

_LEAST_MEMORY_BYTES = 32 << 20


def make_job(options: TrainOptions, name: str, folder: Path, resumed: Resumed | None = None) -> Job:
    """The job that options describe, `with_saved` ones when it goes on from a saved step.

    Raises ValueError or OSError for options that contradict or name what is not there.
    """
    shape, checkpoint = _shape(options, resumed)
    check_shape(shape)
    _check_sizes(options)
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
    tuned = with_tuned({}, options.tuned) if options.tuned is not None else {}
    if options.deepspeed_config is not None:
        given = read_config(options.deepspeed_config, _decided_by_config(options), batch)
    elif resumed is not None and resumed.config is not None:
        decided = _decided_by_config(options)
        if decided:
            raise ValueError(f"{', '.join(decided)}: {resumed.place} was saved with a config, which decides this")
        given = resumed.config
    else:
        made, nvme = _made_config(options, tuned, folder, batch)
        return with_tuned(made, tuned), nvme, None
    config = with_tuned(given, tuned)
    return config, [Path(path) for path in nvme_folders(config)], config


def _made_config(
    options: TrainOptions, tuned: dict[str, Any], folder: Path, batch: int
) -> tuple[dict[str, Any], list[Path]]:
    offload = options.offload or "nvme"
    nvme = (_nvme_beside(options, tuned) or [folder]) if offload == "nvme" else list(options.nvme)
    if options.nvme and offload != "nvme":
        raise ValueError(f"--nvme names folders, but with --offload {offload} nothing rests there: use --offload nvme")
    made = make_config(
        offload,
        options.precision or "bf16",
        options.lr if options.lr is not None else DEFAULT_LR,
        batch,
        nvme,
        options.resident_bytes,
        options.states,
        options.durability,
        options.keep,
    )
    return made, nvme


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
    shape = preset(options.preset) if options.preset is not None else read_shape(_file(options.config))
    return (with_layers(shape, options.layers) if options.layers is not None else shape), None


def _file(path: Path | None) -> Path:
    assert path is not None
    if not path.is_file():
        raise FileNotFoundError(f"--config: there is no file {path}")
    return path


def _check_sizes(options: TrainOptions) -> None:
    for name in ("steps", "seq", "batch", "layers", "threads", "save_every", "keep"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if options.lr is not None and not 0 <= options.lr < math.inf:
        raise ValueError(f"--lr is {options.lr}; it must be a number of 0 or more")
    if options.seed is not None and not 0 <= options.seed < 1 << 63:
        raise ValueError(f"--seed is {options.seed}; allowed are whole numbers of 0 to {(1 << 63) - 1}")
    if options.threads is not None and options.threads > num_cores():
        raise ValueError(f"--threads is {options.threads}; allowed are 1 to {num_cores()}, the cores of this process")
    if options.memory_bytes is not None and options.memory_bytes < _LEAST_MEMORY_BYTES:
        raise ValueError(
            f"--memory is {options.memory_bytes} bytes, which Python alone exceeds: give {_LEAST_MEMORY_BYTES >> 20}MiB or "
            "more, with the unit"
        )
    if options.peer_python is not None and not options.has_peers:
        raise ValueError("--peer-python names an interpreter for --peers, which is not given")


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


def _decided_by_config(options: TrainOptions) -> list[str]:
    values = {
        "--offload": options.offload,
        "--nvme": list(options.nvme) or None,
        "--lr": options.lr,
        "--precision": options.precision,
        "--batch": options.batch,
        "--resident": options.resident_bytes,
        "--states": options.states,
        "--durability": options.durability,
        "--keep": options.keep,
    }
    return [name for name, value in values.items() if value is not None]


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
