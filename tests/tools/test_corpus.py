"""Is the data the same for whoever asks, and bounded?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiermem.tools.corpus import Corpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_bytes(b"bbbbbbbb")
    (tmp_path / "a.txt").write_bytes(b"aaaaaaaa")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_bytes(b"cccccccc")
    (tmp_path / "picture.bin").write_bytes(b"\0\1\2\3")
    return tmp_path


def windows(corpus: Corpus) -> list[bytes]:
    return [corpus.window(i) for i in range(len(corpus))]


def test_text_files_are_read_in_the_order_of_their_names(folder: Path) -> None:
    corpus = Corpus([folder], seq=8, seed=0)
    assert sorted(windows(corpus)) == [b"aaaaaaaa", b"bbbbbbbb", b"cccccccc"]
    assert sorted(windows(Corpus([folder / "b.txt", folder / "a.txt"], seq=16, seed=0))) == [
        b"bbbbbbbbaaaaaaaa"
    ]


def test_a_seed_decides_the_order_and_windows_repeat_at_the_end(folder: Path) -> None:
    text = folder / "long.txt"
    text.write_bytes(bytes(range(1, 201)))
    first, again, other = (Corpus([text], seq=4, seed=seed) for seed in (1, 1, 2))
    assert windows(first) == windows(again)
    assert windows(first) != windows(other)
    assert sorted(windows(first)) == sorted(windows(other))
    assert first.window(len(first) + 3) == first.window(3)


def test_reading_stops_at_the_bound(folder: Path) -> None:
    assert len(Corpus([folder], seq=1, seed=0, max_bytes=10)) == 10


@pytest.mark.slow
def test_python_itself_is_the_default() -> None:
    corpus = Corpus([], seq=128, seed=0, max_bytes=1 << 16)
    assert len(corpus) == 512
    assert windows(corpus) == windows(Corpus([], seq=128, seed=0, max_bytes=1 << 16))


def test_a_dataset_gives_tokens_as_torch_wants_them(folder: Path) -> None:
    corpus = Corpus([folder], seq=4, seed=3)
    assert len(corpus) == 6
    batch = corpus.batch(1, 2, torch.device("cpu"))
    assert batch["input_ids"].dtype == torch.int64
    assert batch["labels"].tolist() == [list(corpus.window(2)), list(corpus.window(3))]


def test_data_that_is_not_there_or_too_short_is_refused(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        Corpus([folder / "nothing-here"], seq=4, seed=0)
    with pytest.raises(ValueError, match="24 bytes of text are fewer than one sequence of 100"):
        Corpus([folder], seq=100, seed=0)


RECORDS = ["chats.jsonl", "chats.NDJSON", "part-0.parquet", "data.arrow", "chats.jsonl.gz"]
PERHAPS_RECORDS = ["alpaca.json", "chats.csv", "alpaca.json.zst"]
"""Beside sources they may be no data."""


@pytest.mark.parametrize("name", RECORDS + PERHAPS_RECORDS)
def test_files_of_records_are_refused(folder: Path, name: str) -> None:
    (folder / name).write_text('{"text": "a record"}\n' * 100)
    with pytest.raises(ValueError, match=rf"{name} holds records.*tiermem sft"):
        Corpus([folder / name], seq=4, seed=0)


@pytest.mark.parametrize("name", RECORDS)
def test_a_folder_with_records_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text('{"text": "a record"}\n' * 100)
    with pytest.raises(ValueError, match=rf"{name} holds records"):
        Corpus([folder], seq=4, seed=0)


def test_what_was_read_is_said(folder: Path) -> None:
    said = Corpus([folder / "a.txt", folder / "b.txt"], seq=1, seed=0, max_bytes=10).source
    assert said.startswith(
        f"data: the first 10 B of the 16 B of {folder}/a.txt, {folder}/b.txt, a byte is a token"
    )
    assert Corpus([folder], seq=1, seed=0).source.startswith(
        f"data: all 24 B of the 24 B of {folder}, "
    )
