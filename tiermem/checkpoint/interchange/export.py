"""Export: writes a saved step as safetensors, as torch files, or as a torch.distributed.checkpoint
folder, streamed."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from tiermem.checkpoint.interchange.foreign import STEP, torch_groups
from tiermem.checkpoint.interchange.write import new_folder
from tiermem.checkpoint.opening.source import Progress, Source, Weight, filled, weights_of
from tiermem.checkpoint.saving.publish import make_folder, remove_new
from tiermem.swap.disk import durable
from tiermem.swap.disk.direct import check_room
from tiermem.swap.disk.run_folder import remove
from tiermem.weights_io import MOST_AROUND_BYTES, SafetensorsFile, TorchFile, WeightEntry

logger = logging.getLogger("tiermem")
_TORCH_LOG = logging.getLogger("torch.distributed.checkpoint")

# ---- safetensors and torch files -----------------------------------------------------------------


class ExportShard(NamedTuple):
    """One file of an export, and the weights in it."""

    name: str
    weights: Sequence[Weight]
    extra: Mapping[str, Any]  # extra states of modules


def export_weights(
    weights: Sequence[Weight],
    out: Path,
    max_shard_bytes: int | None,
    is_safetensors: bool = True,
    config: str | None = None,
    progress: Progress | None = None,
) -> list[ExportShard]:
    """Writes shards, the index of several shards, and the model's config; returns the shards.
    Blocks.

        OUT/model.safetensors                       one shard
        OUT/model-00001-of-00003.safetensors ...    several shards, with model.safetensors.index.json
        OUT/pytorch_model*.bin                      the same in torch's format
        OUT/config.json                             the model's config, if it is given

    A shard is created in its full size and filled 16 MiB at a time, so memory use does not depend
    on its size. Files have random names until all are synced (swap/disk/durable.py); the index is
    renamed after the shards. What an export of the same names left that was killed is removed.

    The last shard of torch's format holds the extra states of modules. A warning names those that
    it cannot hold, and in safetensors all of them.

    Args:
        max_shard_bytes: a larger tensor gets a shard of its own. None: one file.
        config: the text of config.json.

    Raises FileExistsError when one of the files exists; nothing is changed then. Raises OSError
    when the disk is full or a state is damaged; then no new file and no new folder is left.
    """
    shards = deal(weights, max_shard_bytes, is_safetensors)
    texts = {} if config is None else {"config.json": config}
    if len(shards) > 1:
        texts[f"{'model.safetensors' if is_safetensors else 'pytorch_model.bin'}.index.json"] = (
            _index(shards, is_safetensors)
        )
    names = [*(shard.name for shard in shards), *texts]
    there = [name for name in names if durable.exists(out / name)]
    if there:
        raise FileExistsError(
            17, f"{', '.join(there)} there already; choose another folder", str(out)
        )
    with contextlib.ExitStack() as undoing, contextlib.ExitStack() as placing:
        make_folder(out, undoing)  # `undoing` removes it if it is empty
        remove_new(out, names)
        files = {name: undoing.enter_context(durable.NewFile(out / name)) for name in names}
        for shard in shards:
            _write_shard(files[shard.name], shard, is_safetensors, progress or (lambda _: None))
        for name, text in texts.items():
            durable.write_all(files[name].fd, text.encode(), files[name].name)
        for file in files.values():
            file.sync()
        for file in files.values():
            placing.callback(remove, file.path)
            file.place()
        durable.sync_folder(out)
        placing.pop_all()
    return shards


def deal(
    weights: Sequence[Weight], max_shard_bytes: int | None, is_safetensors: bool
) -> list[ExportShard]:
    """The shards, in the order of the model. Each takes weights until the next one does not fit."""
    dealt: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        num_bytes = _entry(weight).num_bytes
        if dealt[-1] and max_shard_bytes is not None and filled + num_bytes > max_shard_bytes:
            dealt.append([])
            filled = 0
        dealt[-1].append(weight)
        filled += num_bytes
    base, suffix = ("model", ".safetensors") if is_safetensors else ("pytorch_model", ".bin")
    numbers = [f"-{i:05d}-of-{len(dealt):05d}" for i in range(1, len(dealt) + 1)]
    names = [f"{base}{number if len(dealt) > 1 else ''}{suffix}" for number in numbers]
    shards = [ExportShard(name, part, {}) for name, part in zip(names, dealt, strict=True)]
    shards[-1] = shards[-1]._replace(extra=_extra_of(weights, is_safetensors))
    return shards


def _extra_of(weights: Sequence[Weight], is_safetensors: bool) -> dict[str, Any]:
    """The extra states of modules that a file can hold. A warning names the others."""
    saved = weights[0].source.extra_states() if weights else {}
    kept = {name: value for name, value in saved.items() if not is_safetensors and _is_plain(value)}
    if left := saved.keys() - kept.keys():
        logger.warning("left behind, as the format does not hold it: %s", ", ".join(sorted(left)))
    return kept


def _is_plain(value: Any) -> bool:
    """Whether `torch.load(weights_only=True)` reads a value; numpy's it does not."""
    file = io.BytesIO()
    torch.save(value, file)
    with contextlib.suppress(pickle.UnpicklingError):
        file.seek(0)
        torch.load(file, weights_only=True)
        return True
    return False


def _write_shard(
    new: durable.NewFile, shard: ExportShard, is_safetensors: bool, progress: Progress
) -> None:
    entries = [_entry(weight) for weight in shard.weights]
    with contextlib.closing(
        SafetensorsFile(new, entries) if is_safetensors else TorchFile(new, entries, shard.extra)
    ) as file:
        for weight, entry in zip(shard.weights, entries, strict=True):
            for start, values in weight.pieces():
                file.put(entry, start, values)
                progress(values.nbytes)


def _entry(weight: Weight) -> WeightEntry:
    return WeightEntry(weight.names, weight.parameter.shape, weight.dtype)


def _index(shards: Sequence[ExportShard], is_safetensors: bool) -> str:
    """The text of an index: the file of each tensor. For safetensors it lists only the first name
    of a tied tensor, as Hugging Face does."""
    file_of = {
        name: shard.name
        for shard in shards
        for names in [*(weight.names for weight in shard.weights), shard.extra]
        for name in (list(names)[:1] if is_safetensors else names)
    }
    sizes = (_entry(weight).num_bytes for shard in shards for weight in shard.weights)
    total = {"total_size": sum(sizes)}
    return json.dumps({"metadata": total, "weight_map": file_of}, indent=2, sort_keys=True) + "\n"


# ---- torch.distributed.checkpoint folders --------------------------------------------------------

Read = Callable[[], torch.Tensor]


def export_dcp(
    source: Source, out: Path, dtype: torch.dtype | None = None, progress: Progress = lambda _: None
) -> int:
    """Writes a new folder for dcp.load (FSDP2, DDP, plain torch); returns the bytes of its tensors.
    Blocks; not collective.

        model.<name>                        weights and buffers, under every name of a tensor; extra
                                            states of modules
        optim.state.<name>.exp_avg, .step   states in fp32, by the parameter's name
        optim.param_groups.<n>.lr, ...      the groups, with every setting of torch's own optimizer

    The layout is that of get_state_dict and set_state_dict. One tensor is in memory at a time.

    dtype: of the model's floating-point values; None: fp32 masters, as FSDP2 keeps them. Raises
        FileExistsError when `out` exists and is not an empty folder, or is a link or a mount point,
        which no new folder replaces. OSError when the disk is full or a state is damaged; then
        nothing is left.
    """
    if out.is_symlink() or out.is_mount():
        raise FileExistsError(
            17, "is a link or a mount point; name a new folder, below it for example", str(out)
        )
    if out.exists():
        durable.check_folder(out)
        if any(out.iterdir()):
            raise FileExistsError(17, "is there and not empty; choose another folder", str(out))
    planner = _ExportPlanner(progress)
    tensors = {
        name: planner.tensor(weight.parameter.shape, weight.dtype, weight.whole)
        for weight in weights_of(source, dtype or torch.float32)
        for name in weight.names
    }
    state: dict[str, Any] = {"model": {**tensors, **source.extra_states()}}
    optimizer = {"state": _optimizer(source, planner), "param_groups": torch_groups(source)}
    if any(optimizer.values()):  # groups alone before the first step, and of rules without moments
        state["optim"] = optimizer
    with contextlib.ExitStack() as undoing:
        with new_folder(out, undoing) as new:
            # torch's own error says less
            check_room(new, planner.num_bytes + MOST_AROUND_BYTES * (len(planner.reads) + 1))
            _save(state, new, planner)
        undoing.pop_all()
    return planner.num_bytes


def _save(state: dict[str, Any], folder: Path, planner: DefaultSavePlanner) -> None:
    """Calls torch's `save`. torch wraps errors in a BaseException; this raises the error itself."""
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as undoing:
            undoing.callback(_TORCH_LOG.setLevel, _TORCH_LOG.level)
            _TORCH_LOG.setLevel(logging.ERROR)  # its message that it saves in one process
            warnings.simplefilter("ignore")  # the warning that only one process saves
            save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    except CheckpointException as wrapper:
        error = next((error for error, _ in wrapper.failures.values()), wrapper)
        if isinstance(error, OSError) and error.filename is None:
            with durable.named(folder):
                raise error from None
        raise error from None


class _ExportPlanner(DefaultSavePlanner):
    """torch's planner for tensors without values: it reads the values of a tensor when that tensor
    is written."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.num_bytes = 0
        self._progress = progress
        # by the id of the tensor, which is kept alive
        self.reads: dict[int, tuple[torch.Tensor, Read]] = {}

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> torch.Tensor:
        """A tensor on the meta device. When it is written, `read` returns its values."""
        empty = torch.empty(shape, dtype=dtype, device="meta")
        self.reads[id(empty)] = empty, read
        self.num_bytes += empty.nbytes
        return empty

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if id(object) in self.reads:
            object = self.reads[id(object)][1]()
            self._progress(object.nbytes)
        return super().transform_object(write_item, object)


def _optimizer(source: Source, planner: _ExportPlanner) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for each in source.manifest.parameters:
        if each.group is None or each.role != "parameter":
            continue
        states = {}
        for name in source.moments(each.name):
            read = functools.partial(
                filled, each, torch.float32, functools.partial(source.fp32, each.name, name)
            )
            states[name] = planner.tensor(each.shape, torch.float32, read)
        if states:
            found[each.name] = {STEP: torch.tensor(float(each.num_steps)), **states}
    return found
