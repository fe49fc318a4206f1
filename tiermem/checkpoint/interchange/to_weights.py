"""Weights of a saved step as the files that everybody opens, in shards, streamed.

    OUT/model.safetensors                       all of it, where it fits one shard
    OUT/model-00001-of-00003.safetensors ...    else, with model.safetensors.index.json
    OUT/pytorch_model*.bin                      the same in torch's format
    OUT/config.json                             the model's, where it is known

A shard is laid out at its full size first, then filled 16 MiB at a time: memory does not grow with it. Files carry `.partial`
until all are synced; the index comes last. A file that is there already is refused and nothing is touched.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.checkpoint.interchange.weights_of import Weight
from tiermem.swap import durable
from tiermem.weight_files import SafetensorsFile, TorchFile, WeightEntry

Progress = Callable[[int], None]
"""Told how many bytes more have been written."""


class Shard(NamedTuple):
    """One file and what goes into it."""

    name: str
    weights: Sequence[Weight]

    @property
    def num_bytes(self) -> int:
        return sum(_entry(weight).num_bytes for weight in self.weights)


def export_weights(
    weights: Sequence[Weight],
    out: Path,
    max_shard_bytes: int | None,
    is_safetensors: bool = True,
    config: str | None = None,
    progress: Progress | None = None,
) -> list[Shard]:
    """Writes shards, the index of several and the model's config; returns the shards. Blocks.

    Args:
        max_shard_bytes: a tensor larger than it gets a shard of its own. None: one file.
        config: the text of config.json.

    Raises FileExistsError when one of the files is there, OSError when the disk is full or states are damaged; then
    nothing is left.
    """
    shards = deal(weights, max_shard_bytes, is_safetensors)
    texts = {} if config is None else {"config.json": config}
    if len(shards) > 1:
        texts[_index_name(is_safetensors)] = _index(shards)
    names = [*(shard.name for shard in shards), *texts]
    there = [name for name in names if (out / name).exists()]
    if there:
        raise FileExistsError(17, f"{', '.join(there)} there already; choose another folder", str(out))
    durable.make_folder(out)
    with contextlib.ExitStack() as undoing, contextlib.ExitStack() as placing:
        for name in names:
            undoing.callback(_remove, _partial(out, name))
        for shard in shards:
            _write_shard(out, shard, is_safetensors, progress or (lambda _: None))
        for name, text in texts.items():
            _write_text(_partial(out, name), text)
        for name in names:
            with open(_partial(out, name), "rb") as file:
                durable.sync(file.fileno(), _partial(out, name))
        for name in names:
            placing.callback(_remove, out / name)
            durable.rename(_partial(out, name), out / name)
        durable.sync_folder(out)
        placing.pop_all()
    return shards


def deal(weights: Sequence[Weight], max_shard_bytes: int | None, is_safetensors: bool = True) -> list[Shard]:
    """The shards, in the order of the model, each as full as it can be."""
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
    if len(dealt) == 1:
        return [Shard(f"{base}{suffix}", dealt[0])]
    return [Shard(f"{base}-{i:05d}-of-{len(dealt):05d}{suffix}", part) for i, part in enumerate(dealt, 1)]


def _write_shard(out: Path, shard: Shard, is_safetensors: bool, progress: Progress) -> None:
    kind = SafetensorsFile if is_safetensors else TorchFile
    file = kind(_partial(out, shard.name), [_entry(weight) for weight in shard.weights])
    try:
        for weight in shard.weights:
            entry = _entry(weight)
            for start, values in weight.pieces():
                file.put(entry, start, values)
                progress(values.nbytes)
    finally:
        file.close()


def _entry(weight: Weight) -> WeightEntry:
    return WeightEntry(weight.names, weight.parameter.shape, weight.dtype)


def _index_name(is_safetensors: bool) -> str:
    return "model.safetensors.index.json" if is_safetensors else "pytorch_model.bin.index.json"


def _index(shards: Sequence[Shard]) -> str:
    """Which tensor is in which file; tied names are in none, in safetensors as in Hugging Face's own."""
    is_safetensors = shards[0].name.endswith(".safetensors")
    place = {
        name: shard.name
        for shard in shards
        for weight in shard.weights
        for name in (weight.names[:1] if is_safetensors else weight.names)
    }
    total = {"total_size": sum(shard.num_bytes for shard in shards)}
    return json.dumps({"metadata": total, "weight_map": place}, indent=2, sort_keys=True) + "\n"


def _write_text(path: Path, text: str) -> None:
    with durable.named(path), open(path, "wb", buffering=0) as file:
        durable.write_all(file.fileno(), text.encode(), path)


def _remove(path: Path) -> None:
    """What this export has made; what cannot be removed is left: the first error is told."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _partial(out: Path, name: str) -> Path:
    return out / f"{name}.partial"
