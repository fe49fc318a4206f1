"""Weights: loads safetensors files into a model (plain, sharded, or built under `zero.Init`),
writes weight files, and gives a model's current weights to other programs."""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tiermem.optim.local import as_dtensor
from tiermem.precision import check_is_dtype
from tiermem.run.move_to_home import empty_buffers
from tiermem.run.shards import Shards, loading, owner_of
from tiermem.swap.base.grad_mode import call_with_grad
from tiermem.swap.disk import durable
from tiermem.swap.disk.direct import check_room, take_room
from tiermem.swap.store.stream import FileReader
from tiermem.units import registry
from tiermem.weights.absent import become

logger = logging.getLogger("tiermem")

# ---- writing weight files ------------------------------------------------------------------------
#
#     SafetensorsFile    the header first, then every tensor's bytes, in order and without holes
#     TorchFile          torch.save's layout without values; the values are written into their places later
#
# A file has its full size from the start and is filled in pieces, so no values stay in memory. A
# tied tensor is stored once, under its first name. safetensors metadata lists the other names; in
# torch's format each name has the same storage. `torch.load(weights_only=True)` reads a TorchFile;
# `load_safetensors` reads a SafetensorsFile.

MOST_AROUND_BYTES = 4096
"""Upper limit in bytes of what torch's formats store around one tensor: name, header, padding, its
part of the pickle."""


class WeightEntry(NamedTuple):
    """One tensor of a file: all its names, its shape, its dtype."""

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """Fills a new, empty file in the format of safetensors. Raises OSError when the disk has no
    space for all of it."""

    def __init__(self, new: durable.NewFile, entries: Sequence[WeightEntry]) -> None:
        ties = {alias: entry.names[0] for entry in entries for alias in entry.names[1:]}
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **ties}}
        offset = 0
        self._offsets: dict[str, int] = {}
        for entry in entries:
            self._offsets[entry.names[0]] = offset
            offsets = [offset, offset := offset + entry.num_bytes]
            header[entry.names[0]] = {
                "dtype": dtype_code(entry.dtype), "shape": list(entry.shape), "data_offsets": offsets,
            }  # fmt: skip
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self._new = new
        with durable.named(new.path):
            take_room(new.fd, 0, self._base + offset, new.path)
        self._write(memoryview(len(text).to_bytes(8, "little") + text), 0)

    def put(self, entry: WeightEntry, start: int, values: torch.Tensor) -> None:
        """Writes elements [start, start + numel) of an entry from a flat CPU tensor of its dtype.
        Blocks; raises OSError."""
        raw = values.contiguous().view(-1).view(torch.uint8).numpy().data
        self._write(raw, self._base + self._offsets[entry.names[0]] + start * entry.dtype.itemsize)

    def close(self) -> None:
        """Does nothing: every byte is written."""

    def _write(self, data: memoryview, offset: int) -> None:
        with durable.named(self._new.path):
            while data:
                done = os.pwrite(self._new.fd, data, offset)
                data = data[done:]
                offset = offset + done


class TorchFile:
    """Fills a new, empty file in torch's format, memory-mapped meanwhile. Raises OSError as
    SafetensorsFile.

    extra: values that are no weights, by name; `torch.load(weights_only=True)` must read them.
    """

    def __init__(
        self,
        new: durable.NewFile,
        entries: Sequence[WeightEntry],
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        layout: dict[str, Any] = dict(extra or {})
        for entry in entries:
            # its pages are never touched, so it takes no memory
            empty = torch.empty(entry.shape, dtype=entry.dtype)
            layout.update(dict.fromkeys(entry.names, empty))
        num_bytes = sum(entry.num_bytes for entry in entries)
        # torch's error says less
        check_room(new.path.parent, num_bytes + MOST_AROUND_BYTES * (len(layout) + 1))
        with torch.serialization.skip_data():
            torch.save(layout, new.by_descriptor)
        del layout
        with durable.named(new.path):
            # without it a full disk would raise SIGBUS
            take_room(new.fd, 0, os.fstat(new.fd).st_size, new.path)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            self._tensors: dict[str, Any] = torch.load(
                new.by_descriptor, mmap=True, weights_only=True
            )
        for name, value in (extra or {}).items():
            places = tree_leaves(self._tensors[name])
            for place, each in zip(places, tree_leaves(value), strict=True):
                if isinstance(each, torch.Tensor):
                    place.copy_(each)

    def put(self, entry: WeightEntry, start: int, values: torch.Tensor) -> None:
        """As SafetensorsFile.put."""
        self._tensors[entry.names[0]].view(-1)[start : start + values.numel()].copy_(values)

    def close(self) -> None:
        """Closes the file without a sync."""
        self._tensors.clear()


WeightFile = SafetensorsFile | TorchFile
"""A weight file that is being filled."""


# ---- loading safetensors -------------------------------------------------------------------------

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors", re.DOTALL)
INDEX_NAME = "model.safetensors.index.json"
_INDEX_NAMES = (INDEX_NAME, "diffusion_pytorch_model.safetensors.index.json")


class StoredTensor(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the file
    num_bytes: int

    def read(self, reader: FileReader) -> torch.Tensor:
        """The tensor's values. Blocks; raises OSError."""
        return reader.read(self.start, self.num_bytes).view(self.dtype).view(self.shape)


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
    """Fills a model's parameters and buffers from a safetensors file, or from a folder of such
    files.

    Each tensor is read into memory with O_DIRECT where possible, past the page cache, then copied
    to its place: one whole tensor is in memory at a time, never the whole model. All headers are
    validated before the first value is read.

    Args:
        model: any model; sharded parameters are filled on the tier where they rest.
        path: one file, or a folder with an index, or with one or several `.safetensors` files.
        strict: names that only the files or only the model has raise ValueError; tied parameters
            need only one name.

    Blocks; with several ranks every rank must call it. Raises ValueError (a shape or a name does
    not match; lists both sides' names) and OSError (a missing file). A file that is too short
    raises ValueError. Both are raised before any parameter is changed, except for errors while
    values are read. A warning names buffers on the meta device that no file fills.
    """
    files = find_files(Path(path))
    targets = tensors_of(model)
    found: dict[str, Path] = {}
    for file in files:
        for stored in read_header(file):
            found[stored.name] = file
            target = targets.get(stored.name)
            if target is not None and tuple(target.shape) != stored.shape:
                raise ValueError(
                    f"{file}: {stored.name} has shape {stored.shape}, the model wants "
                    f"{tuple(target.shape)}"
                )
    _check_names(model, found, targets, strict)
    due = [each for name, each in targets.items() if name in found]
    with loading(each for each in due if isinstance(each, nn.Parameter)):
        for file in files:
            with FileReader(file) as reader:
                for stored in read_header(file):
                    if (target := targets.get(stored.name)) is not None:
                        call_with_grad(False, put_value, target, stored.read(reader))
    if empty := empty_buffers(model):
        logger.warning(
            "%s: no file has values of these buffers, which stay on the meta device",
            ", ".join(empty),
        )


# ---- current weights, for another program --------------------------------------------------------


def export_weights(
    model: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every parameter's name and current whole value, then every saved buffer's: what an
    engine for rollouts loads.

        for name, weight in tiermem.export_weights(model, torch.bfloat16):
            rollouts.load(name, weight)

    Units come in the order of the model, and the next ones are fetched meanwhile: at any time one
    unit's copies are in memory beside the plan's buffers. A value is a copy where the maths runs,
    and belongs to the caller. A tied parameter comes once, under its first name.

    Args:
        model: sharded, an engine's, plain, or with DTensors.
        dtype: of floating-point parameters; None: that in which they rest. Buffers keep theirs.

    Collective: every rank takes every item. Blocks. Raises RuntimeError inside a forward or a
    backward, OSError when a read fails.
    """
    check_is_dtype(dtype)
    shards = owner_of(model)
    root = model
    if shards is not None:
        shards.check_whole()
        shards.check_gathers()
        if shards.may_lend:
            raise RuntimeError(
                "weights are exported inside a forward or a backward: wait until it has ended"
            )
        root = next((module for module in model.modules() if module is shards.model), model)
    names = {param: name for name, param in root.named_parameters()}
    for param, value in _current_weights(shards, names):
        is_cast = dtype is not None and value.is_floating_point()
        yield names[param], value.to(dtype) if is_cast else value
    saved = dict(saved_buffers(root))
    for name, buffer in root.named_buffers():
        if name in saved:
            yield name, buffer.detach().clone()


def _current_weights(
    shards: Shards | None, names: Mapping[nn.Parameter, str]
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    for param in names:
        if not isinstance(registry.owner_of(param), Shards):
            placed = as_dtensor(param)
            yield param, param.detach().clone() if placed is None else placed.full_tensor().detach()
    if shards is None:
        return
    shards.prefetcher.end_pass()
    for live in shards.units:
        asked = [
            (index, shard) for index, shard in enumerate(live.unit.shards) if shard.param in names
        ]
        if not asked:
            continue
        shards.hooks.acquire_whole(live)
        try:
            is_exact = live.unit.full_dtype.itemsize >= live.unit.dtype.itemsize
            views = live.memory.views
            copies = [
                views[i].detach().to(live.unit.dtype, copy=True) if is_exact else None
                for i, _ in asked
            ]
        finally:
            shards.prefetcher.release(live)
        for (_, shard), copy in zip(asked, copies, strict=True):
            yield shard.param, shards.weight(shard.param) if copy is None else copy
    shards.prefetcher.end_pass()


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of every parameter, by the parameter's id."""
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(name)
    return found


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under all their names."""
    params = dict[str, torch.Tensor](model.named_parameters(remove_duplicate=False))
    return params | dict(model.named_buffers(remove_duplicate=False))


def saved_buffers(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dict has, each under all its names."""
    for prefix, module in root.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def put_value(target: torch.Tensor, value: torch.Tensor) -> None:
    """Sets a parameter, where it rests, or a buffer to a value; every rank gives the whole tensor.
    Collective; blocks.

    A tensor on the meta device gets memory on the CPU.
    """
    owner = registry.owner_of(target) if isinstance(target, nn.Parameter) else None
    if owner is not None:
        owner.replace(target, value)
    elif target.is_meta:  # copy_ would do nothing
        become(target, value.to(target.dtype))
    else:
        target.data.copy_(value)


def dtype_code(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype. Raises ValueError for a dtype without one."""
    if dtype in _CODES:
        return _CODES[dtype]
    raise ValueError(
        f"safetensors files hold {', '.join(str(known) for known in _DTYPES.values())}, not {dtype}"
    )


def find_files(path: Path) -> list[Path]:
    """The safetensors files of a path; variants (`*.fp16.safetensors`) where there are no others.
    Raises FileNotFoundError that names missing files."""
    if path.is_file():
        return [path]
    index = find_index(path)
    if index is not None:
        files = files_in(index)
    else:
        found = sorted(path.glob("*.safetensors"))
        files = [file for file in found if "." not in file.stem] or found
        files += _lost_shards(files)
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise FileNotFoundError(
            2, f"no such file: {', '.join(missing) or 'no *.safetensors'}", str(path)
        )
    return files


def find_index(path: Path) -> Path | None:
    """The index of a folder of safetensors; None without one."""
    return next((path / name for name in _INDEX_NAMES if (path / name).is_file()), None)


def _lost_shards(files: Sequence[Path]) -> list[Path]:
    """The first file that is missing beside each `model-00001-of-00003.safetensors`."""
    lost = []
    for shard in filter(None, map(_SHARD.fullmatch, map(str, files))):
        names = (
            f"{shard[1]}-{i:05d}-of-{shard[2]}.safetensors" for i in range(1, int(shard[2]) + 1)
        )
        lost += [Path(name) for name in names if not Path(name).is_file()][:1]
    return sorted({*lost})


def read_header(file: Path) -> list[StoredTensor]:
    """Every tensor of a file, in the order of their bytes. Raises ValueError for a header that does
    not match the file."""
    header, base = _header_of(file)
    header.pop("__metadata__", None)
    found = sorted(
        _entries(file, header, base, file.stat().st_size), key=lambda stored: stored.start
    )
    end = 0
    for stored in found:
        if stored.start < end and stored.num_bytes:
            raise ValueError(
                f"{file}: {stored.name} overlaps another tensor at byte {stored.start}"
            )
        end = max(end, stored.start + stored.num_bytes)
    return found


def read_ties(file: Path) -> dict[str, str]:
    """{alias: name in the file} of tied tensors, from a file's metadata. Raises ValueError as
    read_header."""
    header, _ = _header_of(file)
    said = header.get("__metadata__")
    ties = said.items() if isinstance(said, dict) else ()
    return {
        alias: name
        for alias, name in ties
        if isinstance(name, str) and name in header and alias not in header
    }


def _header_of(file: Path) -> tuple[dict[str, Any], int]:
    """A file's header, and the offset of the first byte after it. Raises ValueError."""
    with open(durable.open_regular(file, follows=True), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{file}: not a safetensors file: {size} bytes, header of {length}")
        return _parse(file, stream.read(length), "the header"), 8 + length


def _entries(file: Path, header: dict[str, Any], base: int, size: int) -> Iterator[StoredTensor]:
    for name, entry in header.items():
        try:
            dtype = _DTYPES[entry["dtype"]]
            shape = tuple(_size(n) for n in entry["shape"])
            first, last = (_size(n) for n in entry["data_offsets"])
            if len(shape) > 64:  # torch's limit
                raise ValueError
        except (KeyError, TypeError, ValueError):
            described = reprlib.repr(entry)
            raise ValueError(
                f"{file}: {name} is described by {described}, which is not understood"
            ) from None
        numel = math.prod(shape)
        if last - first != numel * dtype.itemsize:
            raise ValueError(
                f"{file}: {name} of shape {shape} has {last - first} bytes, not "
                f"{numel * dtype.itemsize}"
            )
        if base + last > size:
            raise ValueError(
                f"{file} is truncated: {name} ends at byte {base + last}, the file has {size}"
            )
        yield StoredTensor(name, dtype, shape, base + first, last - first)


def files_in(index: Path) -> list[Path]:
    """The files that an index names. Raises ValueError as read_index."""
    return [index.with_name(name) for name in sorted(set(read_index(index).values()))]


def read_index(index: Path) -> dict[str, str]:
    """An index: the file's name for each tensor. Raises ValueError if it is not an index, or names
    files in other folders."""
    data = durable.read_file(index, _MAX_HEADER_BYTES, follows=True)
    if len(data) > _MAX_HEADER_BYTES:
        raise ValueError(f"{index}: more than {_MAX_HEADER_BYTES} bytes are too many for an index")
    names = _parse(index, data, "the index").get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(n, str) and n.isprintable() and n == os.path.basename(n) != ""
        for n in names.values()
    ):
        raise ValueError(
            f"{index}: weight_map must be a map from tensor names to names of files in the same "
            "folder"
        )
    return names


def check_listed(index: Path, names: Collection[str]) -> None:
    """Raises ValueError where an index lists a tensor that none of its files holds."""
    lost = [(name, file) for name, file in read_index(index).items() if name not in names]
    if lost:
        raise ValueError(
            f"{index} says that {lost[0][0]!r:.80} is in {lost[0][1]}; no file of the index holds "
            f"it ({len(lost)} in all): a file is damaged or of another model, fetch the files anew"
        )


def _parse(file: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {what} is no JSON: {error}; fetch the file anew") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: {what} is no JSON object but {reprlib.repr(found)}")
    return found


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values; for json.loads. Raises ValueError for a key that is
    there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _size(value: object) -> int:
    """A count or an offset from JSON. Raises ValueError unless it is a whole number from 0 to 2**63
    - 1."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError
    return value


def _check_names(
    model: nn.Module, found: dict[str, Path], targets: dict[str, Any], strict: bool
) -> None:
    tied = names_of(model).values()
    missing = [names[0] for names in tied if not any(name in found for name in names)]
    # nothing of it is sharded
    if not any(registry.owner_of(p) is not None for p in model.parameters()):
        saved = model.state_dict(keep_vars=True)
        missing += [n for n, _ in model.named_buffers() if n in saved and n not in found]
    extra = [name for name in found if name not in targets]
    if strict and (missing or extra):
        raise ValueError(
            f"the files do not fit the model. Missing in the files: {missing or 'none'}. Not in "
            f"the model: {extra or 'none'}. "
            "strict=False loads what fits"
        )
