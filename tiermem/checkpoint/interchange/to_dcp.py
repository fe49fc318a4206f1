"""A saved step as a torch.distributed.checkpoint folder, which FSDP2, DDP and plain torch open with dcp.load.

    model.<name>                        weights and buffers, under every name that a tensor has
    optim.state.<name>.exp_avg, .step   states in fp32, by the parameter's name
    optim.param_groups.<n>.lr, ...      the groups, with every setting that torch's own optimizer has

as get_state_dict makes and set_state_dict takes them. Floats of the model are masters in fp32, as FSDP2 keeps them, unless a
dtype is asked for. torch's planner is given tensors without values and asks for each when it is written: one tensor is in
memory at a time.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import MASTER, WEIGHT, Parameter
from tiermem.checkpoint.interchange.foreign import STEP
from tiermem.checkpoint.interchange.groups import torch_groups
from tiermem.checkpoint.interchange.weights_of import Weight, weights_of
from tiermem.checkpoint.opening.source import CHUNK_NUMEL, Source
from tiermem.swap import durable
from tiermem.swap.direct import check_room
from tiermem.weight_files import MOST_AROUND_BYTES

Read = Callable[[], torch.Tensor]
Progress = Callable[[int], None]
"""Told how many bytes more have been written."""


def export_dcp(source: Source, out: Path, dtype: torch.dtype | None = None, progress: Progress | None = None) -> int:
    """Writes a new folder and returns the bytes of its tensors. Blocks; not collective.

    dtype: of the model's floats; None: fp32, masters where there are some. Raises FileExistsError when `out` is there, OSError
    when the disk is full or a state is damaged; then nothing is left.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(17, "is there and not empty; choose another folder", str(out))
    lazy = _Lazy(progress or (lambda _: None))
    state: dict[str, Any] = {"model": _model(source, lazy, dtype or torch.float32)}
    if any(_states(source, each) for each in source.manifest.parameters):
        state["optim"] = {"state": _optimizer(source, lazy), "param_groups": torch_groups(source)}
    new = out.with_name(f"{out.name}{durable.NEW_SUFFIX}")
    durable.make_folder(out.parent)
    with durable.named(new):
        new.mkdir()
    with contextlib.ExitStack() as undoing:
        undoing.callback(_remove, new)
        check_room(new, lazy.num_bytes + MOST_AROUND_BYTES * (lazy.num_tensors + 1))  # torch tells less well
        _save(state, new, _Planner(lazy))
        durable.sync_folder(new)
        with contextlib.suppress(FileNotFoundError):
            out.rmdir()
        undoing.callback(_remove, out)
        durable.rename(new, out)
        durable.sync_folder(out.parent)
        undoing.pop_all()
    return lazy.num_bytes


def _save(state: dict[str, Any], folder: Path, planner: DefaultSavePlanner) -> None:
    """torch's own `save`. Raises what it failed with, where torch raises a BaseException that tells of it."""
    try:
        with warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")  # that there is one process
            save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    except CheckpointException as wrapper:
        error = next((error for error, _ in wrapper.failures.values()), wrapper)
        if isinstance(error, OSError) and error.filename is None:
            with durable.named(folder):
                raise error from None
        raise error from None


class _Lazy:
    """Tensors without values, and how each one's values are read when they are due."""

    def __init__(self, progress: Progress) -> None:
        self.num_bytes = 0
        self._progress = progress
        self._reads: dict[int, Read] = {}
        self._kept: list[torch.Tensor] = []  # so that no id is used twice

    @property
    def num_tensors(self) -> int:
        """So far."""
        return len(self._kept)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> torch.Tensor:
        """A tensor on the meta device that stands for what `read` returns."""
        empty = torch.empty(shape, dtype=dtype, device="meta")
        self._reads[id(empty)] = read
        self._kept.append(empty)
        self.num_bytes += empty.nbytes
        return empty

    def read(self, empty: Any) -> Any:
        """The values of a tensor that came from here; anything else as it is."""
        read = self._reads.get(id(empty))
        if read is None:
            return empty
        value = read()
        self._progress(value.nbytes)
        return value


class _Planner(DefaultSavePlanner):
    """torch's own, which asks for the values of one tensor when it is written."""

    def __init__(self, lazy: _Lazy) -> None:
        super().__init__()
        self._lazy = lazy

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return super().transform_object(write_item, self._lazy.read(object))


def _model(source: Source, lazy: _Lazy, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {}
    for weight in weights_of(source, dtype):
        read = _reader(weight)
        for name in weight.names:
            found[name] = lazy.tensor(weight.parameter.shape, weight.dtype, read)
    return found


def _reader(weight: Weight) -> Read:
    def read() -> torch.Tensor:
        return _filled(weight.parameter, weight.dtype, weight.read)

    return read


def _optimizer(source: Source, lazy: _Lazy) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for each in source.manifest.parameters:
        if each.group is None or each.role != "parameter":
            continue
        states = {
            name: lazy.tensor(each.shape, torch.float32, _state(source, each, name)) for name in _states(source, each)
        }
        if states:
            steps = float(each.num_steps)
            found[each.name] = {STEP: torch.tensor(steps), **states}
    return found


def _state(source: Source, parameter: Parameter, state: str) -> Read:
    def part(start: int, numel: int) -> torch.Tensor:
        return source.fp32(parameter.name, state, start, numel)

    return lambda: _filled(parameter, torch.float32, part)


def _states(source: Source, parameter: Parameter) -> list[str]:
    """The moments of a parameter, without what belongs to its weight."""
    names = source.states(parameter.name)
    return [name for name in names if name not in (WEIGHT, MASTER) and kinds.SCALES not in name and ".rank" not in name]


def _filled(parameter: Parameter, dtype: torch.dtype, part: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """A whole tensor, read in pieces."""
    value = torch.empty(parameter.shape, dtype=dtype)
    flat = value.view(-1)
    for start in range(0, parameter.numel, CHUNK_NUMEL):
        stop = min(start + CHUNK_NUMEL, parameter.numel)
        flat[start:stop] = part(start, stop - start)
    return value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own word that it saves in one process."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _remove(folder: Path) -> None:
    """What was made here a moment ago, if it is there; what cannot be removed is left: the first error is told."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
