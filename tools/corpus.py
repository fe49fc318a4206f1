"""Corpus: text files as tokens. Each byte is a token, 0 to 255, so no tokenizer is needed.

This is data for demonstrations: a model that has a tokenizer is not trained on it, and files of
records are refused.

Files are read in the order of their paths, up to a bounded number of bytes. The text is cut into
windows of the sequence length, and a seed shuffles the windows. The same files and seed give the
same batches to the trainer, plain PyTorch and DeepSpeed.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tiermem.tools.words import format_bytes

if TYPE_CHECKING:
    import torch

DEFAULT_BYTES = 4 << 20
_RECORDS = {".jsonl", ".ndjson", ".parquet", ".arrow"}
"""Endings of files of records, whose syntax is no text to train on."""
# a folder of sources has files of these that are no data
_NAMED_RECORDS = _RECORDS | {".json", ".csv", ".tsv"}
_PACKED = {".gz", ".bz2", ".xz", ".zst"}
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
_INSTEAD = "`tiermem sft` trains on tokens: --model_name_or_path MODEL --dataset_name DATA"
_SKIPPED_FOLDERS = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
}


class Corpus:
    """Windows of `seq` tokens over text files.

    Args:
        paths: files and folders; empty: Python's documentation topics and standard library on this
            machine.
        seq: tokens of one window.
        seed: of the order.
        max_bytes: reading stops there.

    Raises:
        OSError: a path does not exist or cannot be read.
        ValueError: fewer bytes than one window, or a file of records, such as jsonl or parquet.
    """

    def __init__(
        self, paths: Sequence[Path], seq: int, seed: int, max_bytes: int = DEFAULT_BYTES
    ) -> None:
        self.seq = seq
        self._text, whole_bytes = _read(_files(paths) if paths else _python_files(), max_bytes)
        names = ", ".join(map(str, paths)) or "Python's own files"
        if len(self._text) < seq:
            raise ValueError(
                f"{names}: {len(self._text)} bytes of text are fewer than one sequence of {seq}"
            )
        read = "all" if whole_bytes == len(self._text) else "the first"
        self.source = (
            f"data: {read} {format_bytes(len(self._text))} of the {format_bytes(whole_bytes)} of "
            f"{names}, a byte is a token: "
            "this shows memory and speed, and makes no model to use"
        )
        """One line: what was read, and what for."""
        self._order = list(range(len(self._text) // seq))
        random.Random(seed).shuffle(self._order)

    def __len__(self) -> int:
        """Windows before the first repeats."""
        return len(self._order)

    def window(self, index: int) -> bytes:
        """The tokens of the index-th window in the shuffled order, which repeats at its end."""
        start = self._order[index % len(self._order)] * self.seq
        return self._text[start : start + self.seq]

    def batch(self, index: int, size: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The index-th batch of `size` windows on `device`, int64. A Hugging Face model shifts the
        labels itself."""
        import torch  # the launcher, which looks at the data first, does without

        text = b"".join(self.window(index * size + i) for i in range(size))
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        tokens = tokens.view(size, self.seq).to(device)
        return {"input_ids": tokens, "labels": tokens}


def check_bytes_suit(model: Path) -> None:
    """Raises ValueError for a model's folder that holds a tokenizer: bytes are no tokens of that
    model."""
    found = next((name for name in _TOKENIZERS if (model / name).is_file()), None)
    if found is not None:
        raise ValueError(
            f"--model: {model} has a tokenizer ({found}), and `tiermem train` gives bytes of text "
            f"to a model as its tokens, which would spoil this one: {_INSTEAD}"
        )


def _read(files: Iterable[Path], max_bytes: int) -> tuple[bytes, int]:
    """The text, and the bytes that all files have."""
    text = bytearray()
    whole_bytes = 0
    for file in files:
        whole_bytes += file.stat().st_size
        if len(text) < max_bytes:
            with open(file, "rb") as stream:
                text += stream.read(max_bytes - len(text))
    return bytes(text), whole_bytes


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"--data: there is no {path}")
        if path.is_file():
            _check_text(path, _NAMED_RECORDS)
            yield path
            continue
        for file in sorted(path.rglob("*")):
            if file.is_file():
                _check_text(file, _RECORDS)
                if _is_text(file):
                    yield file


def _check_text(file: Path, records: set[str]) -> None:
    endings = [each for each in map(str.lower, file.suffixes) if each not in _PACKED]
    if records.intersection(endings[-1:]):
        raise ValueError(
            f"--data: {file} holds records, and `tiermem train` reads text, each byte of which is "
            f"a token: {_INSTEAD}"
        )


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
