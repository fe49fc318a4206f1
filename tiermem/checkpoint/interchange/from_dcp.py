"""Reads a torch.distributed.checkpoint folder as a Foreign. No code in the files is executed."""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiermem.checkpoint.format.fields import encode
from tiermem.checkpoint.format.manifest import WEIGHT
from tiermem.checkpoint.interchange.foreign import (
    STEP,
    STEP_KEYS,
    Foreign,
    ForeignParameter,
    ForeignState,
    global_steps_of,
    is_buffer_like,
    is_extra,
    states_in,
    steps_of,
)
from tiermem.checkpoint.interchange.from_torch import (
    MODEL_KEYS,
    OPTIMIZER_KEYS,
    Attributes,
    load_bytes,
    tensors_in,
)
from tiermem.swap.disk import durable

# ---- the files -----------------------------------------------------------------------------------
#
#     DIR/.metadata        a pickle: for each key its size, dtype and chunks, and the place of each chunk
#     DIR/__R_N.distcp     chunks one after another, each as torch.save writes it
#
# torch's own reader executes the pickle. This reader replaces its classes by stand-ins with
# attributes and without code, and refuses other names. Chunks pass through torch's weights-only
# unpickler. If chunks are cut along the first dimension, as FSDP2 and DDP do, one chunk is in
# memory at a time; else one whole tensor.

METADATA = ".metadata"
_ROOM = "torch.distributed.checkpoint."
_CLASSES = {
    f"{_ROOM}metadata": (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    f"{_ROOM}filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("memory_format",),
    # Python 3.11.0 to 3.11.3 pickle a member of an enumeration so; the stand-in calls nothing
    "builtins": ("getattr",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
}  # fmt: skip
_MAX_METADATA_BYTES = 1 << 30
_MAX_CHUNKS = 1 << 20

Path_ = tuple[Any, ...]


class Plain(NamedTuple):
    """A stored value that is not a tensor, or a chunk of one: its byte range in a file. It is read
    later."""

    file: Path
    offset: int
    length: int
    key: str

    def load(self) -> Any:
        """The value. Blocks. Raises OSError, and ValueError unless it consists of plain values and
        tensors."""
        with open(durable.open_regular(self.file, follows=True), "rb") as opened:
            opened.seek(self.offset)
            return load_bytes(opened.read(self.length), f"{self.file}: {self.key}")


class Chunk(NamedTuple):
    """A box of a tensor, and its place."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Plain


class Tensor(NamedTuple):
    """A stored tensor, whose values are read later."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def pieces(self) -> Iterator[torch.Tensor]:
        """The elements in order, flat, one chunk at a time if possible. Blocks. Raises ValueError,
        OSError."""
        if not math.prod(self.shape):
            return
        if all(chunk.sizes[1:] == self.shape[1:] for chunk in self.chunks):
            for chunk in self.chunks:
                yield self._load(chunk).reshape(-1)
            return
        whole = torch.empty(self.shape, dtype=self.dtype)
        is_there = torch.zeros(self.shape, dtype=torch.bool)
        for chunk in self.chunks:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            if is_there[box].any():
                raise ValueError(f"{chunk.place.file}: chunks of {self.key} overlap")
            whole[box], is_there[box] = self._load(chunk), True
        yield whole.view(-1)

    def _load(self, chunk: Chunk) -> torch.Tensor:
        value = chunk.place.load()
        if (
            not isinstance(value, torch.Tensor)
            or tuple(value.shape) != chunk.sizes
            or value.dtype != self.dtype
        ):
            raise ValueError(
                f"{chunk.place.file}: {self.key} is not the {chunk.sizes} of {self.dtype} that "
                f"{METADATA} says"
            )
        return value.detach()


Stored = dict[Path_, Tensor | Plain]


def read_stored(folder: Path) -> Stored:
    """The stored values of a folder, by their path of keys in the state dict. Raises ValueError,
    OSError."""
    file = folder / METADATA
    try:
        return _Metadata(folder, _unpickle(file)).stored()
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(
            f"{file}: not the metadata of torch.distributed.checkpoint ({reason})"
        ) from None


class _Metadata:
    """Turns the unpickled metadata into `Stored`, and validates it."""

    def __init__(self, folder: Path, found: Any) -> None:
        self._folder = folder
        self._file = folder / METADATA
        self._found = found
        self._used: list[Plain] = []
        self._places = {self._index(index): info for index, info in found.storage_data.items()}

    def stored(self) -> Stored:
        paths: Mapping[str, Any] = self._found.planner_data or {}
        stored: Stored = {}
        for key, what in self._found.state_dict_metadata.items():
            if not isinstance(key, str):
                raise TypeError("a key that is no string")
            path = tuple(paths.get(key, (key,)))
            if not path or not all(isinstance(each, str | int) for each in path):
                raise TypeError(f"{key} has a path of {path!r:.80}")
            is_tensor = hasattr(what, "chunks")
            stored[path] = self._tensor(key, what) if is_tensor else self._place(key, None)
        for a, b in itertools.pairwise(sorted(self._used)):
            if a.file == b.file and a.offset + a.length > b.offset:
                raise ValueError(
                    f"{self._file}: {a.key} and {b.key} lie on the same bytes of {a.file}"
                )
        return stored

    def _index(self, index: Any) -> tuple[str, tuple[int, ...] | None]:
        offset = getattr(index, "offset", None)
        return index.fqn, None if offset is None else tuple(offset)

    def _tensor(self, key: str, what: Any) -> Tensor:
        dtype = what.properties.arguments_dtype()
        shape = _size(what.size)
        chunks = []
        for chunk in what.chunks:
            offsets = _size(chunk.offsets)
            sizes = _size(chunk.sizes)
            if math.prod(sizes):
                place = self._place(key, offsets)
                if math.prod(sizes) * dtype.itemsize > place.length:
                    raise ValueError(
                        f"{self._file}: {key}: {sizes} of {dtype} do not lie in {place.length} "
                        "bytes"
                    )
                chunks.append(Chunk(offsets, sizes, place))
        chunks.sort()
        self._check_boxes(key, shape, chunks)
        return Tensor(key, dtype, shape, tuple(chunks))

    def _check_boxes(self, key: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
        """Raises ValueError unless the chunks lie inside the tensor and have as many elements. Also
        raises if chunks of whole rows overlap; `Tensor.pieces` checks other chunks."""
        is_inside = all(
            len(chunk.sizes) == len(chunk.offsets) == len(shape)
            and all(
                o + n <= most for o, n, most in zip(chunk.offsets, chunk.sizes, shape, strict=True)
            )
            for chunk in chunks
        )
        if (
            not is_inside
            or len(chunks) > _MAX_CHUNKS
            or sum(math.prod(c.sizes) for c in chunks) != math.prod(shape)
        ):
            raise ValueError(f"{self._file}: the chunks of {key} do not make up its shape {shape}")
        rows = [chunk for chunk in chunks if chunk.sizes[1:] == shape[1:]]
        if any(
            a.offsets[:1] == b.offsets[:1] or a.offsets[0] + a.sizes[0] > b.offsets[0]
            for a, b in itertools.pairwise(rows)
        ):
            raise ValueError(f"{self._file}: chunks of {key} overlap")

    def _place(self, key: str, offset: tuple[int, ...] | None) -> Plain:
        info = self._places.get((key, offset))
        if info is None:
            raise ValueError(f"{self._file}: says of {key} {offset or ''} not where it lies")
        name = info.relative_path
        start = info.offset
        length = info.length
        is_name = isinstance(name, str) and name.isprintable() and Path(name).name == name
        if not is_name or getattr(info, "transform_descriptors", None):
            raise ValueError(
                f"{self._file}: {key} lies in {name!r}; files of the same folder, not compressed, "
                "are read"
            )
        file = self._folder / name
        size = file.stat().st_size
        if (
            type(start) is not int
            or type(length) is not int
            or not 0 <= start <= start + length <= size
        ):
            raise ValueError(
                f"{file} has {size} bytes; {key} takes {length} from {start} on: it was cut"
            )
        self._used.append(Plain(file, start, length, key))
        return self._used[-1]


def _size(value: Any) -> tuple[int, ...]:
    size = tuple(value)
    if len(size) > 64 or not all(type(n) is int and n >= 0 for n in size):  # 64 is torch's limit
        raise TypeError(f"a size of {size!r:.80}")
    return size


# ---- the pickle, without its code ----------------------------------------------------------------


class _Properties(Attributes):
    """Stands for TensorProperties. Its pickled state is a tuple or a dict, by version of torch."""

    def __setstate__(self, state: Any) -> None:
        self.kept = state

    def arguments_dtype(self) -> torch.dtype:
        dtype = self.kept["dtype"] if isinstance(self.kept, dict) else self.kept[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"a dtype of {dtype!r}")
        return dtype


class _Unpickler(pickle._Unpickler):
    """The unpickler of the standard library that is written in Python: its memo cannot allocate
    more than the file's size."""

    dispatch = {  # noqa: RUF012 - as in the base class. Without BYTEARRAY8, which allocates its claimed size before it reads
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._stand_ins: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        is_word = re.fullmatch(r"[a-z]\w*", name) is not None
        if module == "torch" and is_word and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return type("Size", (tuple,), {})
        if (module, name) == ("collections", "OrderedDict"):
            return type("OrderedDict", (dict,), {})
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(
                f"it holds {module}.{name}, which is code, or an object that code would make"
            )
        base = _Properties if name == "TensorProperties" else Attributes
        return self._stand_ins.setdefault((module, name), type(name, (base,), {}))


def _unpickle(file: Path) -> Any:
    try:
        data = durable.read_file(file, _MAX_METADATA_BYTES, follows=True)
        if len(data) > _MAX_METADATA_BYTES:
            raise pickle.UnpicklingError(
                f"more than {_MAX_METADATA_BYTES} bytes are too many for a checkpoint's metadata"
            )
        found = _Unpickler(data).load()
        list(tensors_in(found, len(data), str(file)))
        return found
    except (OSError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file}: {error}") from None
    except Exception as error:  # a damaged or hostile pickle may cause any error
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(
            f"{file}: not the metadata of torch.distributed.checkpoint ({reason})"
        ) from None


# ---- weights, an optimizer's states and the rest -------------------------------------------------
#
#     model.<name>                          weights and buffers            ("model": get_model_state_dict(...))
#     optim.state.<name>.exp_avg, .step     states by name                 ("optim": get_optimizer_state_dict(...))
#     optim.param_groups.<n>.lr             groups; or by name, from flatten_optimizer_state_dict
#
# `model` and `optim` may have other names (from_torch.py), and a common first key ("app.model...").
# Without a model key all tensors outside the optimizer are weights. Where a key of one of them has a
# dot, a model's state dict was spread beside the rest, as torchtitan does: then only those with a
# single key are.

_SCHEDULER_KEYS = ("scheduler", "lr_scheduler", "sched")


def is_dcp(path: Path) -> bool:
    """Whether a folder is a torch.distributed.checkpoint."""
    return (path / METADATA).is_file()


def read_dcp(path: Path) -> Foreign:
    """Opens a folder. Reads sizes and scalars; weights are read later.

    Raises ValueError when it is damaged, not understood or would execute code; OSError when it
    cannot be read.
    """
    return _DcpReader(path, _without_common_key(read_stored(path))).foreign()


class _DcpReader:
    """Sorts stored values into weights, states, groups and others."""

    def __init__(self, path: Path, stored: Stored) -> None:
        self._path = path
        self._left_behind: set[str] = set()
        self._weights: dict[str, Tensor] = {}
        self._states: dict[str, dict[str, Tensor | Plain]] = {}
        # of groups, by the group's index or the parameter's name
        self._settings: dict[Any, dict[str, Any]] = {}
        self._rest: dict[Path_, Tensor | Plain] = {}
        has_model = any(keys[0] in MODEL_KEYS for keys in stored)
        is_spread = any(
            isinstance(value, Tensor) and len(keys) == 1 and "." in str(keys[0])
            for keys, value in stored.items()
        )
        for keys, value in stored.items():
            if keys[0] in OPTIMIZER_KEYS and len(keys) > 1:
                self._take_optimizer(keys[1:], value)
            elif has_model and keys[0] in MODEL_KEYS:
                self._take_weight(keys[1:], value)
            elif isinstance(value, Tensor) and not has_model and (len(keys) == 1 or not is_spread):
                self._take_weight(keys, value)
            else:
                self._rest[keys] = value

    def foreign(self) -> Foreign:
        unknown = [name for name in self._states if name not in self._weights]
        if unknown:
            raise ValueError(
                f"{self._path}: there are states of {', '.join(unknown[:5])}, which is no weight "
                "of it"
            )
        groups, group_of = self._groups()
        parameters = [
            self._parameter(name, weight, groups, group_of.get(name))
            for name, weight in self._weights.items()
        ]
        client = {}
        scheduler = {}
        for keys, value in self._rest.items():
            is_scheduler = len(keys) > 1 and keys[0] in _SCHEDULER_KEYS
            is_kept = isinstance(value, Plain) or math.prod(value.shape) == 1
            if is_kept and len(keys) == 1:
                client[keys[0]] = _number(value)
            elif is_kept and len(keys) == 2 and is_scheduler:
                scheduler[str(keys[1])] = _number(value)
            else:
                name = ".".join(map(str, keys[: 1 + is_scheduler]))
                self._left_behind.add(f"{name!r} of the checkpoint")
        return Foreign(
            kind="torch.distributed.checkpoint",
            parameters=parameters,
            groups=groups,
            global_steps=global_steps_of(client, parameters, str(self._path)),
            scheduler=scheduler or None,
            client_state={key: value for key, value in client.items() if key not in STEP_KEYS},
            left_behind=sorted(self._left_behind),
        )

    def _take_weight(self, keys: Path_, value: Tensor | Plain) -> None:
        name = ".".join(map(str, keys))
        if is_extra(keys[0]):
            self._left_behind.add(f"{keys[0]!r} of the model")
        elif isinstance(value, Tensor):
            self._weights[name] = value
        else:
            self._left_behind.add(f"{name!r} of the model, which is no tensor")

    def _take_optimizer(self, keys: Path_, value: Tensor | Plain) -> None:
        if len(keys) == 1:  # flattened: "state.<name>.exp_avg", "param_groups.<name>.lr"
            kind, _, rest = str(keys[0]).partition(".")
            name, _, key = rest.rpartition(".")
        elif len(keys) == 3:
            kind, name, key = keys
        else:
            kind = str(keys[0])
            name = ""
            key = ""
        if kind == "state" and name and key:
            self._states.setdefault(str(name), {})[str(key)] = value
        elif kind == "param_groups" and key:
            self._settings.setdefault(name, {})[str(key)] = _number(value)
        else:
            self._left_behind.add(f"{'.'.join(map(str, keys))!r} of the optimizer")

    def _groups(self) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
        """The groups, and the index of each parameter's group."""
        if all(isinstance(key, int) for key in self._settings):
            ordered: list[Mapping[str, Any]] = [
                {**group, "params": _names(group.get("params"))}
                for _, group in sorted(self._settings.items())
            ]
            group_of = {name: i for i, group in enumerate(ordered) for name in group["params"]}
            return ordered, group_of
        groups: dict[str, tuple[int, Mapping[str, Any]]] = {}  # by their text
        group_of = {}
        for name, settings in self._settings.items():
            text = json.dumps(
                encode(settings, f"{self._path}: the settings of {name}"), sort_keys=True
            )
            group_of[str(name)], _ = groups.setdefault(text, (len(groups), settings))
        return [settings for _, settings in groups.values()], group_of

    def _parameter(
        self,
        name: str,
        weight: Tensor,
        groups: Sequence[Mapping[str, Any]],
        group: int | None,
    ) -> ForeignParameter:
        states = {WEIGHT: ForeignState(weight.dtype, weight.pieces)}
        kept = self._states.get(name, {})
        for key, value in states_in(kept, self._left_behind).items():
            if not isinstance(value, Tensor) or math.prod(value.shape) != math.prod(weight.shape):
                shown = value.shape if isinstance(value, Tensor) else "no tensor"
                raise ValueError(
                    f"{self._path}: {key} of {name} is {shown} where {weight.shape} is due"
                )
            states[key] = ForeignState(value.dtype, value.pieces)
        counted = {key: _number(value) if key == STEP else value for key, value in kept.items()}
        return ForeignParameter(
            name,
            weight.shape,
            states,
            is_buffer=group is None and not kept and is_buffer_like(name, weight.dtype),
            is_trainable=bool(kept) or group is not None or not self._settings,
            num_steps=steps_of(
                counted, {} if group is None else groups[group], f"{self._path}: {name}"
            ),
            group=group,
        )


def _names(params: Any) -> list[str]:
    return [str(name) for name in params] if isinstance(params, list | tuple) else []


def _number(value: Tensor | Plain) -> Any:
    """A stored number, or a value that is no tensor. Raises ValueError for any other tensor."""
    if isinstance(value, Plain):
        return value.load()
    found = list(value.pieces()) if math.prod(value.shape) == 1 else []
    if len(found) != 1:
        raise ValueError(f"{value.key} is {value.shape} of {value.dtype} where a number is due")
    return found[0].item()


def _without_common_key(stored: Stored) -> Stored:
    """Removes a first key that all paths share, if the second key is a model or an optimizer:
    {"app": {"model": ...}}."""
    firsts = {keys[0] for keys in stored}
    if (
        len(firsts) != 1
        or firsts & {*MODEL_KEYS, *OPTIMIZER_KEYS}
        or any(len(keys) < 2 for keys in stored)
    ):
        return stored
    inner = {keys[1:]: value for keys, value in stored.items()}
    return inner if any(keys[0] in (*MODEL_KEYS, *OPTIMIZER_KEYS) for keys in inner) else stored
