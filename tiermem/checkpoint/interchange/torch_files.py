"""What torch.save wrote, opened without executing any of it.

A pickle is a program. torch's own weights-only machine runs it here: it makes tensors and containers, and refuses the rest.
Classes that other systems pickle along are looked at through `Attributes`, which has their attributes and none of their code.
Tensors are mapped, not read, where the file allows that; none is larger than the bytes it stands on. While the machine runs,
this process gets no more memory than 10 times the file and 64 MiB: what it may call includes bytearray(6 << 30).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tiermem.swap import durable

_NAMED = re.compile(
    r"(?:GLOBAL |Unsupported class |forbidden to load |unsupported |disallowed )`?([A-Za-z_][\w.]*\.\w+)"
)
_MAX_PICKLE_BYTES = 256 << 20  # of a file's structure, without the values
_MEMORY_TIMES, _SPARE_BYTES = 10, 64 << 20


_MEMBER = "builtins.getattr"
"""What early Pythons 3.11 pickle a member of an enumeration as: called with its class and its name. A stand-in gets nothing."""


class Attributes:
    """Stands for an object of a class that is not imported: its attributes, and what it was called with."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def load_torch(path: Path, foreign: Sequence[str] = ()) -> Any:
    """The content of a file that torch.save wrote; its tensors are on the CPU and stay in the file until they are looked at.

    Args:
        foreign: dotted names of classes that come back as `Attributes`; of an enumeration's member some Pythons write the
            class and the name of the member in place of its value.

    Raises ValueError when it is no such file, is damaged, or would execute something; OSError when it cannot be read.
    """
    os.close(durable.open_regular(path, follows=True))
    size = os.stat(path).st_size
    is_zip = _check_structure(path, size)
    with _bounded(size, str(path)):
        found = _load(path, str(path), foreign, is_zip)
    for tensor in tensors_in(found):
        _check_tensor(path, tensor)
    return found


def load_torch_bytes(data: bytes, what: str) -> Any:
    """The same for bytes in memory; `what` names them in errors."""
    with _bounded(len(data), what):
        found = _load(io.BytesIO(data), what, (), False)
    for tensor in tensors_in(found):
        _check_tensor(what, tensor)
    return found


def tensors_in(found: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested dicts, lists and tuples, and in the attributes of `Attributes`."""
    seen: set[int] = set()
    left = [found]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple | Attributes) and id(value) not in seen:
            seen.add(id(value))
            left += (
                value
                if isinstance(value, list | tuple)
                else (value if isinstance(value, dict) else vars(value)).values()
            )


def _load(file: Path | io.BytesIO, what: str, foreign: Sequence[str], is_mapped: bool) -> Any:
    names = [*foreign, _MEMBER] if foreign else []
    stand_ins = [(type(name.rpartition(".")[2], (Attributes,), {}), name) for name in names]
    try:
        with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():  # type: ignore[arg-type]  # pairs too
            warnings.simplefilter("ignore")  # of a protocol that it then refuses
            return torch.load(file, map_location="cpu", mmap=is_mapped or None, weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever a damaged or hostile file leads torch into is the file's fault
        raise ValueError(f"{what}: {_reason(error)}") from None


@contextlib.contextmanager
def _bounded(num_bytes: int, what: str) -> Iterator[None]:
    """Within the block this process may take 10 times so many bytes, and 64 MiB. Raises ValueError where that is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    most = used + _MEMORY_TIMES * num_bytes + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    try:
        yield
    except MemoryError:
        raise ValueError(
            f"{what}: its {num_bytes} bytes ask for more memory than {_MEMORY_TIMES} times as many and {_SPARE_BYTES >> 20} "
            "MiB: no weights do"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    named = _NAMED.search(text)
    if named is not None:
        return f"it holds {named[1]}, which is code, or an object that code would make; only tensors and plain values are read"
    if "Weights only load failed" in text:
        return "its pickle does more than make tensors and plain values; only those are read"
    return f"not a file that torch.save wrote, or a damaged one ({type(error).__name__}: {text[:200]})"


def _check_structure(path: Path, size: int) -> bool:
    """Whether the file is a zip, as torch.save writes since 1.6; its structure must fit in memory."""
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            if file.read(4) == b"PK\x03\x04":
                raise ValueError(f"{path}: the end is missing: {size} bytes are not the whole file")
        return False
    try:
        with zipfile.ZipFile(path) as opened:
            entries = opened.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a file that torch.save wrote, or a damaged one ({error})") from None
    for entry in entries:
        is_data = "/data/" in entry.filename
        if entry.file_size > size or (not is_data and entry.file_size > _MAX_PICKLE_BYTES):
            raise ValueError(f"{path}: {entry.filename} claims {entry.file_size} bytes in a file of {size}")
    return True


def _check_tensor(what: object, tensor: torch.Tensor) -> None:
    """A few bytes must not say that they are terabytes."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{what}: a tensor is {tensor.layout} and {tensor.dtype}; only dense ones are read")
    needed, there = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if needed > there:
        raise ValueError(f"{what}: a tensor of shape {tuple(tensor.shape)} stands on {there} bytes, not on {needed}")
