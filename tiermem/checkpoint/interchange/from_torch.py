"""Reads plain torch state dicts and safetensors as a Foreign. No code in the files is executed."""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import io
import math
import os
import re
import resource
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tiermem.checkpoint.format.manifest import WEIGHT
from tiermem.checkpoint.interchange.foreign import (
    STATES,
    STEP_KEYS,
    Foreign,
    ForeignParameter,
    ForeignState,
    check_state,
    global_steps_of,
    is_buffer_like,
    is_extra,
    of_tensor,
    states_in,
    steps_of,
    tie,
)
from tiermem.swap.disk import durable
from tiermem.swap.store.stream import FileReader
from tiermem.weights_io import (
    INDEX_NAME,
    StoredTensor,
    check_listed,
    files_in,
    find_files,
    find_index,
    read_header,
    read_ties,
)

# ---- files of torch.save -------------------------------------------------------------------------
#
# A pickle is a program. torch's weights-only unpickler runs it: it makes tensors and containers,
# and refuses everything else. Objects of other systems' classes become `Attributes`, which have
# their attributes and none of their code. Tensors are memory-mapped if the file format allows it.
# No tensor is larger than its storage in the file. During unpickling this process may allocate 10
# times the file's size and 64 MiB, because a hostile pickle may call bytearray(6 << 30).

_NAMED = re.compile(
    r"(?:GLOBAL |Unsupported class |forbidden to load |unsupported |disallowed )`?([A-Za-z_][\w.]*\.\w+)"
)
_MAX_PICKLE_BYTES = 256 << 20  # of a file's pickles, without tensor values
_MEMORY_TIMES = 10
_SPARE_BYTES = 64 << 20
_SPARE_VALUES = 1 << 16


class Attributes:
    """Stands for an object whose class is not imported: its attributes, and the arguments of its
    constructor."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def load_torch(path: Path, foreign: Sequence[str] = ()) -> Any:
    """The content of a file that torch.save wrote. Tensors are on the CPU and memory-mapped where
    possible. Blocks.

    Args:
        foreign: dotted names of classes whose objects come back as `Attributes`. For a member of an
            enumeration, some Python releases pickle the class and the member's name instead of its
            value.

    Raises ValueError when the file has another format, is damaged, or would execute code; OSError
    when it cannot be read.
    """
    os.close(durable.open_regular(path, follows=True))
    size = os.stat(path).st_size
    return _load(path, size, str(path), foreign, _check_zip(path, size))


def load_bytes(data: bytes, what: str) -> Any:
    """`load_torch` for bytes in memory; `what` names them in errors. Tensors are not mapped."""
    return _load(io.BytesIO(data), len(data), what, (), False)


def tensors_in(found: Any, num_bytes: int, what: str) -> Iterator[torch.Tensor]:
    """Every tensor in nested dicts, lists and tuples, and in the attributes of `Attributes`, once
    for each place.

    Raises ValueError where a file of `num_bytes` places the same lists in one another so often that
    they unfold to more than 10 values for each byte.
    """
    left = [found]
    num_values = 0
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple | Attributes):
            value = vars(value) if isinstance(value, Attributes) else value
            num_values += len(value)
            if num_values > _MEMORY_TIMES * num_bytes + _SPARE_VALUES:
                raise ValueError(
                    f"{what}: its {num_bytes} bytes unfold to {num_values} values: no checkpoint's "
                    "do"
                )
            left += value.values() if isinstance(value, dict) else value


def _load(
    file: Path | io.BytesIO, size: int, what: str, foreign: Sequence[str], is_mapped: bool
) -> Any:
    # Early releases of Python 3.11 pickle an enumeration's member as getattr(class, name). A
    # stand-in keeps both arguments.
    names = [*foreign, "builtins.getattr"] if foreign else []
    stand_ins = [(type(name.rpartition(".")[2], (Attributes,), {}), name) for name in names]
    with _bounded(size, what):
        try:
            with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():  # type: ignore[arg-type]  # pairs too
                warnings.simplefilter("ignore")  # about a pickle protocol that torch then refuses
                found = torch.load(
                    file, map_location="cpu", mmap=is_mapped or None, weights_only=True
                )
        except (OSError, MemoryError):
            raise
        except Exception as error:  # a damaged or hostile file may cause any error inside torch
            raise ValueError(f"{what}: {_reason(error)}") from None
    for tensor in tensors_in(found, size, what):
        _check_tensor(what, tensor)
    return found


@contextlib.contextmanager
def _bounded(num_bytes: int, what: str) -> Iterator[None]:
    """Within the block this process may allocate 10 times `num_bytes` and 64 MiB. Raises ValueError
    if that is too little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    most = used + _MEMORY_TIMES * num_bytes + _SPARE_BYTES
    resource.setrlimit(
        resource.RLIMIT_DATA, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard)
    )
    try:
        yield
    except MemoryError:
        raise ValueError(
            f"{what}: its {num_bytes} bytes ask for more memory than {_MEMORY_TIMES} times as many "
            f"and {_SPARE_BYTES >> 20} MiB: no weights do"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    named = _NAMED.search(text)
    if named is not None:
        return (
            f"it holds {named[1]}, which is code, or an object that code would make; only "
            "tensors and plain values are read"
        )
    if "Weights only load failed" in text:
        return "its pickle does more than make tensors and plain values; only those are read"
    return (
        f"not a file that torch.save wrote, or a damaged one ({type(error).__name__}: {text[:200]})"
    )


def _check_zip(path: Path, size: int) -> bool:
    """Whether the file is a zip, as torch.save writes since 1.6. Raises ValueError when its entries
    claim too many bytes, or differ from their checksums."""
    try:
        with open(path, "rb") as file:
            head = file.read(4)
            if not zipfile.is_zipfile(file):
                if head == b"PK\x03\x04":
                    raise ValueError("the end is missing")
                return False
            opened = zipfile.ZipFile(file)
            for entry in opened.infolist():
                is_data = "/data/" in entry.filename
                if entry.file_size > size or (not is_data and entry.file_size > _MAX_PICKLE_BYTES):
                    raise ValueError(f"{entry.filename} claims {entry.file_size} bytes")
                if entry.CRC:  # it was taken: torch.serialization.set_crc32_options
                    with opened.open(entry) as data:  # raises for bytes that differ from it
                        while data.read(_READ_BYTES):
                            continue
    except OSError:
        raise
    except Exception as error:  # a damaged or hostile file may cause any error inside zipfile
        raise ValueError(
            f"{path}: not a file that torch.save wrote, or a damaged one of {size} bytes ({error})"
        ) from None
    return True


def _check_tensor(what: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor that is not dense, or has more elements than its storage (a
    stride of 0)."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{what}: a tensor is {tensor.layout} and {tensor.dtype}; only dense ones are read"
        )
    needed = tensor.nbytes
    there = tensor.untyped_storage().nbytes()
    if needed > there:
        raise ValueError(
            f"{what}: a tensor of shape {tuple(tensor.shape)} stands on {there} bytes, not on "
            f"{needed}"
        )


# ---- weights and an optimizer's states -----------------------------------------------------------
#
#     model.safetensors · a folder of them with an index · pytorch_model.bin, with or without an
#     index · model.pt
#     {"model": {...}, "optimizer": {...}, "step": 7}    also module, state_dict, model_state_dict; optim, optimizer_state_dict
#
# torch numbers an optimizer's parameters group by group, and saves their names only if it was given
# `named_parameters()`. Without names, each group is matched with the model's parameters by order
# and shape:
#
#     optimizer   0: [13, 7]   1: [7]           2: [11, 7]
#     model       embed.weight norm.weight      hidden.weight       every group in the order of the model
#
# The safetensors library writes by dtype and name: there a shape must occur once.
#
# A match that is impossible or not unique raises ValueError with advice.

MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict")
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")
BIN_NAME = "pytorch_model.bin"
BIN_INDEX_NAME = "pytorch_model.bin.index.json"
_READ_BYTES = 16 << 20
_MOST_VIEWS = 8  # limit of (bytes of all tensors on a storage) / (bytes of the storage)

State = Mapping[str, Any]


def read_torch(path: Path, optimizer: Path | None = None) -> Foreign:
    """Opens a file or a folder of weights, and an optimizer's state dict in the same file or in
    another file.

    Raises ValueError when the content is not understood, does not match or would execute code;
    OSError when a file cannot be read.
    """
    rest: dict[str, Any] = {}
    has_safetensors = path.is_dir() and (
        (path / INDEX_NAME).is_file() or any(path.glob("*.safetensors"))
    )
    if path.suffix == ".safetensors" or has_safetensors:
        kind = "safetensors"
        parameters = _safetensors(path)
    else:
        kind = "torch state dict"
        weights: dict[str, Any] = {}
        for file in _bin_files(path):
            own, others = _split(file, load_torch(file))
            weights.update(own)
            rest.update(others)
        if (path / BIN_INDEX_NAME).is_file():
            check_listed(path / BIN_INDEX_NAME, {**rest, **weights})
        parameters = _tensors(path, weights)
    kept = _optimizer_in(rest) if optimizer is None else _optimizer_file(optimizer)
    groups = []
    left_behind = [
        f"{str(key)!r} of the file" for key in rest if key not in (*OPTIMIZER_KEYS, *STEP_KEYS)
    ]
    if kept is not None:
        names = _names_of(parameters, kept, str(optimizer or path), kind != "safetensors")
        parameters, more = _with_states(parameters, kept, names, str(optimizer or path))
        groups = [
            {**group, "params": [names[key] for key in group["params"]]}
            for group in kept["param_groups"]
        ]
        left_behind += more
    global_steps = global_steps_of(rest, parameters, str(path))
    return Foreign(kind, parameters, groups, global_steps, left_behind=left_behind)


def _safetensors(path: Path) -> list[ForeignParameter]:
    found: list[ForeignParameter] = []
    of_name: dict[str, Path] = {}
    for file in find_files(path):
        own = []
        for stored in read_header(file):
            state = ForeignState(stored.dtype, functools.partial(_pieces_of, file, stored))
            own.append(
                ForeignParameter(
                    stored.name,
                    stored.shape,
                    {WEIGHT: state},
                    is_buffer=is_buffer_like(stored.name, stored.dtype),
                )
            )
        tied = tie(own, read_ties(file))
        found += tied
        for name in (name for p in tied for name in (p.name, *p.aliases)):
            if name in of_name:
                raise ValueError(f"{file}: {name} is in {of_name[name]} too: a model has it once")
            of_name[name] = file
    index = find_index(path)
    if index is not None:
        check_listed(index, of_name)
    return found


def _pieces_of(file: Path, stored: StoredTensor) -> Iterator[torch.Tensor]:
    with FileReader(file) as reader:
        for offset in range(0, stored.num_bytes, _READ_BYTES):
            num_bytes = min(_READ_BYTES, stored.num_bytes - offset)
            yield reader.read(stored.start + offset, num_bytes).view(stored.dtype)


def _bin_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / BIN_INDEX_NAME
    if index.is_file():
        return files_in(index)
    if (path / BIN_NAME).is_file():
        return [path / BIN_NAME]
    raise FileNotFoundError(
        2, "no checkpoint that is known: no tiermem.json, manifest, *_optim_states.pt, .metadata, *.safetensors, "
        f"{BIN_NAME}", str(path)
    )  # fmt: skip


def _split(file: Path, found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of a loaded file, and its other entries; extra states of modules are no
    weights."""
    if not isinstance(found, dict):
        raise ValueError(
            f"{file}: holds {type(found).__name__}; a state dict is due, or a dict with one under "
            f"{MODEL_KEYS}"
        )
    key = next((key for key in MODEL_KEYS if isinstance(found.get(key), dict)), None)
    weights = found if key is None else found[key]
    rest = {} if key is None else {other: value for other, value in found.items() if other != key}
    rest |= {name: weights[name] for name in weights if is_extra(name)}
    return {name: weights[name] for name in weights if not is_extra(name)}, rest


def _tensors(path: Path, weights: Mapping[str, Any]) -> list[ForeignParameter]:
    """The tensors of a state dict; tied tensors have their first name and aliases."""
    first: dict[tuple[Any, ...], str] = {}
    found: list[ForeignParameter] = []
    ties: dict[str, str] = {}
    of_storage = collections.Counter[int]()  # bytes of the tensors on each storage
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{path}: {name!r:.80} is {type(value).__name__}; a state dict of weights holds "
                f"tensors, under {MODEL_KEYS} or alone"
            )
        if not isinstance(name, str):
            raise ValueError(f"{path}: a tensor is called {name!r:.80}; names are strings")
        memory = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and memory in first:
            ties[name] = first[memory]
            continue
        first[memory] = name
        found.append(
            ForeignParameter(
                name,
                tuple(value.shape),
                {WEIGHT: of_tensor(value)},
                is_buffer=is_buffer_like(name, value.dtype),
            )
        )
        storage = value.untyped_storage()
        of_storage[storage.data_ptr()] += value.nbytes
        if of_storage[storage.data_ptr()] > _MOST_VIEWS * storage.nbytes():
            raise ValueError(
                f"{path}: {name!r:.80} and others are {of_storage[storage.data_ptr()]} bytes of "
                f"tensors that all stand on the same {storage.nbytes()} bytes: no weights do"
            )
    return tie(found, ties)


def _optimizer_in(rest: Mapping[str, Any]) -> State | None:
    key = next((key for key in OPTIMIZER_KEYS if rest.get(key) is not None), None)
    return None if key is None else _checked(rest[key], key)


def _optimizer_file(file: Path) -> State:
    found = load_torch(file)
    kept = _optimizer_in(found) if isinstance(found, dict) else None
    return kept if kept is not None else _checked(found, str(file))


def _checked(kept: Any, what: str) -> State:
    if not isinstance(kept, dict) or not isinstance(kept.get("state"), dict):
        raise ValueError(
            f"{what}: not an optimizer's state dict: a dict with state and param_groups is due"
        )
    groups = kept.get("param_groups")
    is_list = isinstance(groups, list) and all(
        isinstance(g, dict)
        and isinstance(g.get("params"), list)
        and all(isinstance(p, int | str) for p in g["params"])
        for g in groups
    )
    if not is_list or not all(isinstance(entry, dict) for entry in kept["state"].values()):
        raise ValueError(
            f"{what}: an optimizer's state dict holds param_groups, each with params, and a dict "
            "for each state"
        )
    return kept


def _names_of(
    parameters: Sequence[ForeignParameter], kept: State, what: str, is_ordered: bool
) -> dict[Any, str]:
    """The parameter's name for each key in the groups' `params`. Raises ValueError.

    is_ordered: the parameters are in the order of the model.
    """
    known = {name for p in parameters for name in (p.name, *p.aliases)}
    own = [p for p in parameters if not p.is_buffer]
    positions = _positions(own), _positions(own[::-1])
    names: dict[Any, str] = {}
    for group in kept["param_groups"]:
        keys = group["params"]
        said = group.get("param_names")
        if all(isinstance(key, str) for key in keys):
            names |= {key: key for key in keys}
        elif (
            isinstance(said, list)
            and len(said) == len(keys)
            and all(isinstance(name, str) for name in said)
        ):
            names |= dict(zip(keys, said, strict=True))
        else:
            shapes = [_shape_of(kept["state"].get(key)) for key in keys]
            found = _match(positions, len(own), shapes, what, is_ordered)
            names |= {key: own[position].name for key, position in zip(keys, found, strict=True)}
    lost = [str(key) for key in kept["state"] if key not in names]
    if lost:
        raise ValueError(
            f"{what}: the optimizer has states of {', '.join(lost[:5])}, which no param_groups list"
        )
    unknown = [name for name in names.values() if name not in known]
    if unknown:
        raise ValueError(
            f"{what}: the optimizer has states of {', '.join(map(str, unknown[:5]))}, which the "
            "weights lack"
        )
    if len(set(names.values())) < len(names):
        raise ValueError(f"{what}: two states of the optimizer are of one parameter; {_ADVICE}")
    return names


_ADVICE = (
    "make the optimizer with model.named_parameters() (torch 2.6 and newer then saves names), or "
    "save with torch.distributed.checkpoint"
)


_Positions = Mapping[tuple[int, ...], Sequence[int]]


def _positions(parameters: Sequence[ForeignParameter]) -> _Positions:
    """The indices of the parameters of each shape, in order."""
    found = collections.defaultdict[tuple[int, ...], list[int]](list)
    for position, p in enumerate(parameters):
        found[p.shape].append(position)
    return found


def _match(
    positions: tuple[_Positions, _Positions],
    num: int,
    wanted: Sequence[tuple[int, ...] | None],
    what: str,
    is_ordered: bool,
) -> list[int]:
    """The index of the parameter for each shape of a group. Raises ValueError unless there is
    exactly one match.

    positions: of the `num` parameters in order, and in reverse order.
    """
    early = _earliest(wanted, positions[0], num, is_ordered)
    late = _earliest(wanted[::-1], positions[1], num, is_ordered)
    if early is None or late is None:
        how = "do not follow the model's parameters in order and shape"
    elif early != [num - 1 - each for each in reversed(late)]:
        how = "go with the model's parameters in more than one way"
    else:
        return early
    raise ValueError(f"{what}: the optimizer's states {how}; {_ADVICE}")


def _shape_of(entry: State | None) -> tuple[int, ...] | None:
    """The parameter's shape, which its states share; None if it has no states."""
    return next(
        (
            tuple(v.shape)
            for k, v in (entry or {}).items()
            if k in STATES and isinstance(v, torch.Tensor)
        ),
        None,
    )


def _earliest(
    wanted: Sequence[tuple[int, ...] | None], positions: _Positions, num: int, is_ordered: bool
) -> list[int] | None:
    """For every shape its first position; if ordered, the first one after the previous shape's.
    None if there is none."""
    found = []
    position = 0
    for shape in wanted:
        options = range(num) if shape is None else positions.get(shape, ())
        number = bisect.bisect_left(options, position)
        if number == len(options):
            return None
        found.append(options[number])
        position = options[number] + 1 if is_ordered else 0
    return found


def _with_states(
    parameters: Sequence[ForeignParameter], kept: State, names: Mapping[Any, str], what: str
) -> tuple[list[ForeignParameter], list[str]]:
    key_of = {name: key for key, name in names.items()}
    group_of = {
        key: number for number, group in enumerate(kept["param_groups"]) for key in group["params"]
    }
    left_behind: set[str] = set()
    found = []
    for p in parameters:
        key = next((key_of[name] for name in (p.name, *p.aliases) if name in key_of), None)
        if key is None:
            found.append(p._replace(is_trainable=p.is_trainable and not kept["param_groups"]))
            continue
        states = dict(p.states)
        entry = kept["state"].get(key, {})
        for name, value in states_in(entry, left_behind).items():
            if value is not None:
                states[name] = of_tensor(check_state(p.name, name, value, math.prod(p.shape)))
        steps = steps_of(entry, kept["param_groups"][group_of[key]], f"{what}: {p.name}")
        found.append(
            p._replace(states=states, num_steps=steps, group=group_of[key], is_buffer=False)
        )
    return found, sorted(left_behind)
