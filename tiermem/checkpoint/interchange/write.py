"""Writes a checkpoint of another system as a tiermem checkpoint: a complete copy of one rank."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.fields import Json, encode
from tiermem.checkpoint.format.finding import (
    Found,
    NothingSaved,
    copy_name,
    find,
    plain_tag,
    read_manifest,
)
from tiermem.checkpoint.format.manifest import (
    LATEST_FILE,
    Manifest,
    Parameter,
    Part,
    check_parameters,
)
from tiermem.checkpoint.interchange.foreign import (
    Foreign,
    ForeignParameter,
    ForeignState,
    check_moments,
    optimizer_of,
)
from tiermem.checkpoint.interchange.from_dcp import is_dcp, read_dcp
from tiermem.checkpoint.interchange.from_deepspeed import (
    deepspeed_tags,
    is_deepspeed,
    read_deepspeed,
)
from tiermem.checkpoint.interchange.from_torch import read_torch
from tiermem.checkpoint.opening.source import Progress, Source
from tiermem.checkpoint.saving.pieces import CHUNK_BYTES, Resting, Stretch, in_memory, write_data
from tiermem.checkpoint.saving.publish import (
    Content,
    SavingInto,
    alone,
    make_folder,
    manifest_of,
    replace,
    said_of,
    write_part,
)
from tiermem.ranks.collectives import exchange
from tiermem.ranks.topology import Topology
from tiermem.swap.disk import durable
from tiermem.swap.disk.run_folder import is_of_one_host

logger = logging.getLogger("tiermem")

# ---- reading a checkpoint of any known system ----------------------------------------------------


def read_foreign(path: Path, tag: str | None = None, optimizer: Path | None = None) -> Foreign:
    """Opens a checkpoint of another system; weights are read later. Its files tell the system:

        .metadata                             torch.distributed.checkpoint
        latest, *_optim_states.pt             DeepSpeed
        *.safetensors, *.bin, any other file  safetensors, torch state dicts

    Args:
        tag: of a DeepSpeed folder; default: the tag that its `latest` names.
        optimizer: a file with a torch optimizer's state dict, if the weights are in files of their
            own.

    Raises ValueError when it is not understood, is damaged, would execute code, or is a tiermem
    checkpoint; OSError when it cannot be read.
    """
    if not path.is_dir():
        os.close(durable.open_regular(path, follows=True))
    if path.is_dir() and _is_ours(path, tag):
        raise ValueError(
            f"{path} is a tiermem checkpoint: it is loaded as it is, on any number of ranks"
        )
    if optimizer is not None and (is_dcp(path) or is_deepspeed(path)):
        raise ValueError(
            f"{path} has optimizer states of its own; --optimizer goes with a file of weights"
        )
    try:
        found = _read_any(path, tag, optimizer)
    except _OF_OTHER_TYPES as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path}: something in it is not what is due there ({type(error).__name__}: {reason})"
        ) from error
    if not found.parameters:
        raise ValueError(f"{path}: there are no weights in it")
    check_moments(found, str(path))
    return found


def _read_any(path: Path, tag: str | None, optimizer: Path | None) -> Foreign:
    if is_dcp(path):
        return read_dcp(path)
    if path.is_dir() and is_deepspeed(path if tag is None else path / tag):
        return read_deepspeed(path, tag)
    if tag is None and deepspeed_tags(path):
        return read_deepspeed(path)  # says why not
    if tag is not None:
        raise ValueError(f"{path}: no DeepSpeed checkpoint with a tag {tag!r}")
    return read_torch(path, optimizer)


_OF_OTHER_TYPES = (AttributeError, KeyError, IndexError, TypeError, OverflowError, RuntimeError)
"""Errors in a reader when a value has another type than expected: a tensor or a list in place of a
name or a number."""


def _is_ours(path: Path, tag: str | None) -> bool:
    try:
        return bool(find(path, tag))
    except (NothingSaved, ValueError):
        return False


@contextlib.contextmanager
def in_own_format(
    topology: Topology, load_dir: Path, tag: str | None
) -> Iterator[tuple[Path, str | None]]:
    """Yields the folder and the tag that `load` opens: those given, or of a DeepSpeed checkpoint a
    copy, removed afterwards.

    Rank 0 writes the copy into load_dir, which takes as much disk space as the checkpoint, and logs
    what it leaves behind.
    Collective; blocks. Raises the errors of `read_foreign` and `write_checkpoint`: on the other
    ranks a ValueError that quotes rank 0's.
    """
    if not is_deepspeed(load_dir if tag is None else load_dir / tag):
        yield load_dir, tag
        return
    error: ValueError | OSError | None = None
    with contextlib.ExitStack() as removing:
        made = ""
        if topology.rank == 0:
            try:
                _remove_dead(load_dir.glob(f"{_COPY}*"))
                made = tempfile.mkdtemp(prefix=_COPY, dir=load_dir)
                removing.callback(shutil.rmtree, made, ignore_errors=True)
                removing.enter_context(contextlib.closing(SavingInto(Path(made), removing)))
                copied = write_checkpoint(read_foreign(load_dir, tag), Path(made))
                for each in copied.left_behind:
                    logger.warning("%s: left behind: %s", load_dir, each)
            except (ValueError, OSError) as found:
                error = found
        said, made = exchange(topology, ("" if error is None else str(error), made))[0]
        if error is not None or said:
            raise error or ValueError(
                f"rank 0 could not read the DeepSpeed checkpoint {load_dir}: {said}"
            )
        yield Path(made), None
        exchange(topology, "")  # every rank has read


_COPY = "tiermem-copy-"


def _remove_dead(folders: Iterable[Path]) -> None:
    """Removes those of the folders that killed processes left, where their locks are visible."""
    for each in folders:
        if is_of_one_host(each) and not each.is_symlink():
            with contextlib.suppress(OSError), alone(each) as is_alone:
                if is_alone:
                    shutil.rmtree(each, ignore_errors=True)


# ---- scalars -------------------------------------------------------------------------------------


def scalars_of(foreign: Foreign) -> tuple[dict[str, Json], list[str]]:
    """The scalars as fields of a Manifest, and descriptions of the values that JSON cannot hold."""
    lost: list[str] = []
    found = {
        "scheduler": None
        if foreign.scheduler is None
        else _kept(foreign.scheduler, "scheduler", lost),
        "optimizer": optimizer_of(foreign, lost),
        "loss_scaler": foreign.loss_scale,
        "engine": {
            name: getattr(foreign, name)
            for name in ("global_steps", "global_samples", "skipped_steps")
        },
        "client_state": _kept(foreign.client_state, "client_state", lost),
        "config": None,
    }
    return found, lost


def _kept(values: Mapping[str, Any], what: str, lost: list[str]) -> dict[str, Json]:
    found = {}
    for key, value in values.items():
        try:
            found[str(key)] = encode(value, f"{what}[{key!r}]")
        except TypeError as error:
            lost.append(str(error))
    return found


# ---- writing -------------------------------------------------------------------------------------

_COMMIT = 1


class Imported(NamedTuple):
    """The result of `write_checkpoint`."""

    folder: Path
    tag: str
    step: int
    num_parameters: int
    num_bytes: int  # of states
    left_behind: tuple[str, ...]


def write_checkpoint(
    foreign: Foreign, out: Path, tag: str | None = None, progress: Progress = lambda _: None
) -> Imported:
    """Writes OUT/<tag>/ and OUT/latest; any number of ranks can load it. Blocks; takes 8 MiB beside
    the reader's memory.

        OUT/<random>.<tag>.new/    data (preallocated)   part   manifest     each synced, in this order; named as a copy's
        OUT/<tag>/        the same folder, renamed
        OUT/latest        names the tag

    A folder named <tag> is whole: it has another name until it is synced, and it is removed after
    an error. Values are summed and written in chunks.

    Args:
        out: the folder of checkpoints, made if it is missing.
        tag: default: global_step<N>, as save_checkpoint names it.

    Raises FileExistsError when the tag exists, OSError when the disk is full or a file cannot be
    read, ValueError when values do not match their description or the checkpoint would not open;
    then nothing is left, and `latest` is as it was.
    """
    step = foreign.global_steps or max((p.num_steps for p in foreign.parameters), default=0)
    tag = plain_tag(f"global_step{step}" if tag is None else tag)
    parameters = tuple(_parameter(p) for p in foreign.parameters)
    check_parameters(parameters, ())
    folder = out / tag
    if folder.exists():
        raise FileExistsError(17, "is there already; choose another tag or folder", str(folder))
    run_id = secrets.token_hex(6)
    scalars, lost = scalars_of(foreign)
    manifest = Manifest(
        run_id=run_id,
        commit=_COMMIT,
        tag=tag,
        step=step,
        world=1,
        num_shards=1,
        parts=(),
        parameters=parameters,
        excluded=(),
        checksums={},
        choices={},
        **scalars,
    )
    own = Part(run_id, _COMMIT, 0, None, None, (), ())
    content = Content(manifest, own, None, False, Resting([]), list(_stretches(foreign)))
    data, part = (copy_name(run_id, _COMMIT, 0, suffix) for suffix in ("bin", "json"))
    file = copy_name(run_id, _COMMIT, None, "json")
    with contextlib.ExitStack() as undoing:
        with new_folder(folder, undoing) as new:
            placed = write_data(content.in_memory, new / data, 0, progress=progress)
            told = write_part(new / part, _COMMIT, content, [data], [placed])
            durable.write_file(new / file, manifest_of(content, _COMMIT, [told], new).dump())
            Source(read_manifest(Found(new / file))).close()  # raises if it would not open
        replace([out / LATEST_FILE], said_of(folder / file, out, tag), undoing)
        undoing.pop_all()
    return Imported(
        folder,
        tag,
        step,
        num_parameters=len(foreign.parameters),
        num_bytes=sum(each.num_bytes for each in content.in_memory),
        left_behind=(*foreign.left_behind, *lost),
    )


@contextlib.contextmanager
def new_folder(folder: Path, undoing: contextlib.ExitStack) -> Iterator[Path]:
    """Makes a folder under a temporary name. When the block ends, the folder gets its name; an
    empty folder of that name is replaced. Folders that killed processes left in the making of the
    same name are removed. Raises OSError.

    undoing: removes both names, and the parents that it made; a folder that cannot be removed is
        left.
    """
    new = durable.new_name(folder)
    make_folder(folder.parent, undoing)
    _remove_dead(durable.left_of(folder))
    undoing.callback(shutil.rmtree, new, ignore_errors=True)
    with contextlib.closing(SavingInto(new, undoing)):
        yield new
        durable.sync_folder(new)
        durable.rename(new, folder)
    undoing.callback(shutil.rmtree, folder, ignore_errors=True)
    durable.sync_folder(folder.parent)


def _parameter(p: ForeignParameter) -> Parameter:
    return Parameter(
        p.name,
        p.aliases,
        "buffer" if p.is_buffer else "parameter",
        p.shape,
        kinds.name_of(p.dtype),
        p.is_trainable and not p.is_buffer,
        p.num_steps,
        p.group,
    )


def _stretches(foreign: Foreign) -> Iterator[Stretch]:
    """All states, each as one stretch."""
    for p in foreign.parameters:
        for name, state in p.states.items():
            if numel := math.prod(p.shape):
                chunks = functools.partial(_chunks, f"{p.name}: {name}", state)
                yield Stretch(p.name, name, kinds.name_of(state.dtype), 0, numel, 0, chunks)


def _chunks(what: str, state: ForeignState) -> Iterator[torch.Tensor]:
    """The bytes of a state. Raises ValueError where the values have another dtype than
    `state.dtype`."""
    for values in state.pieces():
        if values.dtype != state.dtype:
            raise ValueError(f"{what} is {values.dtype}, not {state.dtype}")
        if values.numel():
            yield from in_memory(values.contiguous()).split(CHUNK_BYTES)
