"""Opening whatever is given: which system wrote it is seen from its files.

.metadata                             torch.distributed.checkpoint
latest, *_optim_states.pt             DeepSpeed
*.safetensors, *.bin, any other file  safetensors, torch state dicts
"""

from __future__ import annotations

import os
from pathlib import Path

from tiermem.checkpoint.format.finding import NothingSaved, find
from tiermem.checkpoint.interchange.foreign import Foreign
from tiermem.checkpoint.interchange.from_dcp import is_dcp, read_dcp
from tiermem.checkpoint.interchange.from_deepspeed import is_deepspeed, read_deepspeed
from tiermem.checkpoint.interchange.from_torch import read_torch
from tiermem.swap import durable


def read_foreign(path: Path, tag: str | None = None, optimizer: Path | None = None) -> Foreign:
    """A checkpoint of another system; no weights are read yet.

    Args:
        tag: of a DeepSpeed folder; default: what its `latest` names.
        optimizer: a file with a torch optimizer's state dict, for weights that lie in files of their own.

    Raises ValueError when it is not understood, is damaged, would execute something, or is tiermem's own; OSError when it
    cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(2, "no such file or folder", str(path))
    if not path.is_dir():
        os.close(durable.open_regular(path, follows=True))
    if path.is_dir() and _is_ours(path, tag):
        raise ValueError(f"{path} is a tiermem checkpoint: it is loaded as it is, on any number of ranks")
    if optimizer is not None and (is_dcp(path) or is_deepspeed(path)):
        raise ValueError(f"{path} has optimizer states of its own; --optimizer goes with a file of weights")
    try:
        return _read(path, tag, optimizer)
    except _OF_OTHER_TYPES as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path}: something in it is not what is due there ({type(error).__name__}: {reason})"
        ) from error


_OF_OTHER_TYPES = (AttributeError, KeyError, IndexError, TypeError, OverflowError, RuntimeError)
"""What a reader meets in a value that is a tensor, a list or nothing where it looks for a name or a number."""


def _read(path: Path, tag: str | None, optimizer: Path | None) -> Foreign:
    if is_dcp(path):
        return read_dcp(path)
    if path.is_dir() and is_deepspeed(path if tag is None else path / tag):
        return read_deepspeed(path, tag)
    if tag is not None:
        raise ValueError(f"{path}: no DeepSpeed checkpoint with a tag {tag!r}")
    return read_torch(path, optimizer)


def _is_ours(path: Path, tag: str | None) -> bool:
    try:
        return bool(find(path, tag))
    except (NothingSaved, ValueError):
        return False
