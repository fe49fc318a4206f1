"""The files of torch.distributed.checkpoint, opened without executing any of them.

    DIR/.metadata        a pickle: for each key its size, dtype and chunks, and where each chunk lies
    DIR/__R_N.distcp     chunks one behind the other, each as torch.save writes it

torch's own reader runs whatever the pickle says. Here its classes are stand-ins with attributes and no code, made for one
reading; names other than theirs are refused. Chunks pass through torch's weights-only machine. One chunk is in memory at a
time, where chunks are cut along the first dimension, as FSDP2 and DDP cut them; else one whole tensor.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiermem.checkpoint.interchange.torch_files import Attributes, load_torch_bytes
from tiermem.swap import durable

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
    "builtins": ("getattr",),  # a member of an enumeration, as Python 3.11.0 to 3.11.3 pickle them; a stand-in gets nothing
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
}  # fmt: skip
_MAX_METADATA_BYTES = 1 << 30
_MAX_CHUNKS = 1 << 20

Path_ = tuple[Any, ...]


class Chunk(NamedTuple):
    """A box of a tensor, and where its bytes lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    length: int


class Tensor(NamedTuple):
    """A stored tensor."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def pieces(self) -> Iterator[torch.Tensor]:
        """Its elements in order, flat, a chunk at a time where that is possible. Raises ValueError, OSError."""
        if not math.prod(self.shape):
            return
        if all(chunk.sizes[1:] == self.shape[1:] for chunk in self.chunks):
            for chunk in self.chunks:
                yield self._load(chunk).reshape(-1)
            return
        whole, is_there = torch.empty(self.shape, dtype=self.dtype), torch.zeros(self.shape, dtype=torch.bool)
        for chunk in self.chunks:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            if is_there[box].any():
                raise ValueError(f"{chunk.file}: chunks of {self.key} overlap")
            whole[box], is_there[box] = self._load(chunk), True
        yield whole.view(-1)

    def _load(self, chunk: Chunk) -> torch.Tensor:
        what = f"{chunk.file}: {self.key}"
        value = load_torch_bytes(_bytes_of(chunk.file, chunk.offset, chunk.length), what)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != chunk.sizes or value.dtype != self.dtype:
            raise ValueError(f"{what} is not the {chunk.sizes} of {self.dtype} that {METADATA} says")
        return value.detach()


class Plain(NamedTuple):
    """A stored value that is no tensor."""

    key: str
    file: Path
    offset: int
    length: int

    def load(self) -> Any:
        """The value. Raises ValueError when it is not made of plain values and tensors, OSError."""
        return load_torch_bytes(_bytes_of(self.file, self.offset, self.length), f"{self.file}: {self.key}")


Stored = dict[Path_, Tensor | Plain]


def read_stored(folder: Path) -> Stored:
    """What a folder holds, by the path of keys that leads to it in the state dict. Raises ValueError, OSError."""
    file = folder / METADATA
    size = file.stat().st_size
    if size > _MAX_METADATA_BYTES:
        raise ValueError(f"{file}: {size} bytes are too many for a checkpoint's metadata")
    try:
        return _Metadata(folder, _unpickle(file)).stored()
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{file}: not the metadata of torch.distributed.checkpoint ({reason})") from None


class _Metadata:
    """The unpickled metadata, on its way to what it says."""

    def __init__(self, folder: Path, found: Any) -> None:
        self._folder = folder
        self._file = folder / METADATA
        self._found = found
        self._sizes: dict[Path, int] = {}
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
            stored[path] = self._tensor(key, what) if hasattr(what, "chunks") else self._plain(key)
        return stored

    def _index(self, index: Any) -> tuple[str, tuple[int, ...] | None]:
        offset = getattr(index, "offset", None)
        return index.fqn, None if offset is None else tuple(offset)

    def _plain(self, key: str) -> Plain:
        return Plain(key, *self._place(key, None))

    def _tensor(self, key: str, what: Any) -> Tensor:
        dtype, shape = what.properties.arguments_dtype(), _size(what.size)
        chunks = []
        for chunk in what.chunks:
            offsets, sizes = _size(chunk.offsets), _size(chunk.sizes)
            place = self._place(key, offsets) if math.prod(sizes) else (self._file, 0, 0)
            chunks.append(Chunk(offsets, sizes, *place))
        chunks = sorted(chunk for chunk in chunks if math.prod(chunk.sizes))
        for chunk in chunks:
            if math.prod(chunk.sizes) * dtype.itemsize > chunk.length:
                raise ValueError(f"{self._file}: {key}: {chunk.sizes} of {dtype} do not lie in {chunk.length} bytes")
        self._check_boxes(key, shape, chunks)
        return Tensor(key, dtype, shape, tuple(chunks))

    def _check_boxes(self, key: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
        """The chunks fill the tensor, once."""
        is_inside = all(
            len(chunk.sizes) == len(chunk.offsets) == len(shape)
            and all(o + n <= most for o, n, most in zip(chunk.offsets, chunk.sizes, shape, strict=True))
            for chunk in chunks
        )
        if not is_inside or len(chunks) > _MAX_CHUNKS or sum(math.prod(c.sizes) for c in chunks) != math.prod(shape):
            raise ValueError(f"{self._file}: the chunks of {key} do not make up its shape {shape}")
        rows = [chunk for chunk in chunks if chunk.sizes[1:] == shape[1:]]
        if any(
            a.offsets[:1] == b.offsets[:1] or a.offsets[0] + a.sizes[0] > b.offsets[0]
            for a, b in itertools.pairwise(rows)
        ):
            raise ValueError(f"{self._file}: chunks of {key} overlap")

    def _place(self, key: str, offset: tuple[int, ...] | None) -> tuple[Path, int, int]:
        info = self._places.get((key, offset))
        if info is None:
            raise ValueError(f"{self._file}: says of {key} {offset or ''} not where it lies")
        name, start, length = info.relative_path, info.offset, info.length
        if not isinstance(name, str) or Path(name).name != name or getattr(info, "transform_descriptors", None):
            raise ValueError(
                f"{self._file}: {key} lies in {name!r}; files of the same folder, not compressed, are read"
            )
        file = self._folder / name
        if file not in self._sizes:
            self._sizes[file] = file.stat().st_size
        if type(start) is not int or type(length) is not int or not 0 <= start <= start + length <= self._sizes[file]:
            raise ValueError(f"{file} has {self._sizes[file]} bytes; {key} takes {length} from {start} on: it was cut")
        return file, start, length


def _size(value: Any) -> tuple[int, ...]:
    size = tuple(value)
    if not all(type(n) is int and n >= 0 for n in size):
        raise TypeError(f"a size of {size}")
    return size


def _bytes_of(file: Path, offset: int, length: int) -> bytes:
    with open(durable.open_regular(file, follows=True), "rb") as opened:
        opened.seek(offset)
        return opened.read(length)


# ---- the pickle, without its code -----------------------------------------------------------------------------------------


class _Properties(Attributes):
    """TensorProperties: a tuple of state, or attributes, by version."""

    def __setstate__(self, state: Any) -> None:
        self.kept = state

    def arguments_dtype(self) -> torch.dtype:
        dtype = self.kept["dtype"] if isinstance(self.kept, dict) else self.kept[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"a dtype of {dtype!r}")
        return dtype


class _Unpickler(pickle._Unpickler):
    """Python's own machine written in Python: a hostile memo takes no more memory than the file has bytes."""

    dispatch = {  # noqa: RUF012 - as in the class above. BYTEARRAY8 takes what it claims before it reads
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._stand_ins: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None) if _is_word(name) else None, torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return type("Size", (tuple,), {})
        if (module, name) == ("collections", "OrderedDict"):
            return type("OrderedDict", (dict,), {})
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is code, or an object that code would make")
        base = _Properties if name == "TensorProperties" else Attributes
        return self._stand_ins.setdefault((module, name), type(name, (base,), {}))


def _is_word(name: str) -> bool:
    return re.fullmatch(r"[a-z]\w*", name) is not None


def _unpickle(file: Path) -> Any:
    try:
        return _Unpickler(durable.read_file(file, _MAX_METADATA_BYTES, follows=True)).load()
    except (OSError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file}: {error}") from None
    except Exception as error:  # whatever a damaged or hostile pickle leads the machine into is the file's fault
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{file}: not the metadata of torch.distributed.checkpoint ({reason})") from None
