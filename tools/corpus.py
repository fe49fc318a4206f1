"""Corpus: text files as tokens. Each byte is a token, 0 to 255, so no tokenizer is needed.

Files are read in the order of their paths, up to a bounded number of bytes. The text is cut into windows of the sequence
length, and a seed shuffles the windows. The same files and seed give the same batches to the trainer,
plain PyTorch and DeepSpeed.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEFAULT_BYTES = 4 << 20
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


Example = dict[str, "torch.Tensor"]


class Corpus:
    """Windows of `seq` tokens over text files.

    Any loader of map-style datasets takes it: an item is {"input_ids", "labels"} of one window, int64. A Hugging Face model
    shifts the labels itself.

    Args:
        paths: files and folders; empty: Python's documentation topics and standard library on this machine.
        seq: tokens of one window.
        seed: of the order.
        max_bytes: reading stops there.

    Raises:
        OSError: a path does not exist or cannot be read.
        ValueError: fewer bytes than one window.
    """

    def __init__(self, paths: Sequence[Path], seq: int, seed: int, max_bytes: int = DEFAULT_BYTES) -> None:
        self.seq = seq
        self._text = _read(_files(paths) if paths else _python_files(), max_bytes)
        if len(self._text) < seq:
            names = ", ".join(map(str, paths)) or "Python's own files"
            raise ValueError(f"{names}: {len(self._text)} bytes of text are fewer than one sequence of {seq}")
        self._order = list(range(len(self._text) // seq))
        random.Random(seed).shuffle(self._order)

    def __len__(self) -> int:
        """Windows before the first repeats."""
        return len(self._order)

    def window(self, index: int) -> bytes:
        """The tokens of the index-th window in the shuffled order, which repeats at its end."""
        start = self._order[index % len(self._order)] * self.seq
        return self._text[start : start + self.seq]

    def __getitem__(self, index: int) -> Example:
        import torch  # the launcher, which looks at the data first, does without

        tokens = torch.frombuffer(bytearray(self.window(index)), dtype=torch.uint8).long()
        return {"input_ids": tokens, "labels": tokens}

    def batch(self, index: int, size: int, device: torch.device) -> Example:
        """The index-th batch of `size` windows, stacked, on `device`."""
        import torch

        tokens = torch.stack([self[index * size + i]["input_ids"] for i in range(size)]).to(device)
        return {"input_ids": tokens, "labels": tokens}


def _read(files: Iterable[Path], max_bytes: int) -> bytes:
    text = bytearray()
    for file in files:
        with open(file, "rb") as stream:
            text += stream.read(max_bytes - len(text))
        if len(text) >= max_bytes:
            break
    return bytes(text)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"--data: there is no {path}")
        if path.is_file():
            yield path
        else:
            yield from (file for file in sorted(path.rglob("*")) if file.is_file() and _is_text(file))


def _python_files() -> Iterator[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    topics = library / "pydoc_data" / "topics.py"
    if topics.exists():
        yield topics
    for file in sorted(library.rglob("*.py")):
        if file != topics and not _SKIPPED_FOLDERS.intersection(file.relative_to(library).parts):
            yield file


def _is_text(file: Path) -> bool:
    with open(file, "rb") as stream:
        return b"\0" not in stream.read(1024)
