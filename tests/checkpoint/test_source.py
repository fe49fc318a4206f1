"""Does an opened durable step hand out what was saved, and nothing else?"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch
from drawn import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_by_hand import flip, pieces_of, write

from tiermem.checkpoint.format.fields import ManifestError
from tiermem.checkpoint.format.finding import NothingSaved
from tiermem.checkpoint.format.manifest import CHECKSUM_BYTES
from tiermem.checkpoint.opening.source import Source
from tiermem.checkpoint.opening.verified import DamagedState
from tiermem.checkpoint.saving.publish import said_of
from tiermem.swap.base.errors import CorruptionError
from tiermem.swap.base.native import Workers, widen_part

NUMEL = 3 * CHECKSUM_BYTES // 4 + 101  # fp32: three blocks and a tail


def states(numel: int = NUMEL) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    low = torch.randint(-(1 << 15), 1 << 15, (77,), generator=generator, dtype=torch.int16)
    return {
        "big": {
            "weight": torch.randn(numel, generator=generator).bfloat16(),
            "master": torch.randn(numel, generator=generator),
            "exp_avg": torch.randn(numel, generator=generator),
        },
        "small": {"weight": torch.randn(7, 11, generator=generator).bfloat16(), "master": low},
        "plain": {"weight": torch.randn(5, generator=generator)},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("three-ranks")
    write(where, states(), world=3, most_numel=100_003)
    return where


@settings(max_examples=drawn(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=st.lists(st.tuples(st.integers(0, NUMEL), st.integers(0, NUMEL)), min_size=1, max_size=6)
)
def test_any_range_is_what_was_saved_however_it_is_cut(
    folder: Path, ranges: list[tuple[int, int]]
) -> None:
    saved = states()["big"]
    with Source.open(folder) as source:
        for a, b in ranges:
            start, stop = min(a, b), max(a, b)
            for state in ("master", "weight"):
                found = source.read("big", state, start, stop - start)
                assert torch.equal(found, saved[state][start:stop]), (state, start, stop)


def test_fp32_is_exact_in_every_kind(folder: Path) -> None:
    saved, workers = states(), Workers(1)
    small = saved["small"]
    with Source.open(folder) as source:
        split = widen_part(workers, small["master"][3:70], small["weight"].view(-1)[3:70].clone())
        assert torch.equal(source.fp32("small", "master", 3, 67), split)
        assert torch.equal(source.fp32("small", "weight", 0, 77), small["weight"].view(-1).float())
        assert torch.equal(source.fp32("plain", "master", 0, 5), saved["plain"]["weight"])
        assert not source.fp32("plain", "exp_avg", 0, 5).any()
    workers.close()


def test_a_source_says_what_it_holds(folder: Path) -> None:
    with Source.open(folder) as source:
        assert source.states("big") == ("weight", "master", "exp_avg")
        assert source.kind("small", "master") == "split"
        assert source.kind("small", "exp_avg") is None
        assert source.find("small") == source.parameters["small"]
        assert source.find("nobody") is None
        assert source.num_bytes == sum(t.nbytes for own in states().values() for t in own.values())
        with pytest.raises(
            ValueError,
            match=re.escape("stored as torch.int16; it cannot be read into torch.float32"),
        ):
            source.read_into("small", "master", 0, torch.empty(3))


# ---- damage --------------------------------------------------------------------------------------


def two_tags(where: Path) -> None:
    write(where, states(), "old", world=2, commit=1, step=10)
    os.utime(where / "old" / "manifest-1.json", (1, 1))
    write(where, states(), "new", world=2, most_numel=70_001, commit=2, step=20)


def test_a_flipped_bit_is_named_and_the_older_step_is_whole(tmp_path: Path) -> None:
    two_tags(tmp_path)
    with Source.open(tmp_path) as source:
        part = source.parts[1]
        piece = next(p for p in pieces_of(part) if p.state == "exp_avg" and p.param == "big")
        file = tmp_path / "new" / part.files[piece.file]
    flip(file, piece.offset + 5 * 4 + 1)
    with Source.open(tmp_path) as source, pytest.raises(DamagedState) as caught:
        source.read("big", "exp_avg", piece.start, 10)
    error = caught.value
    assert isinstance(error, CorruptionError) and error.errno == errno.EIO
    assert (error.param, error.state, error.step) == ("big", "exp_avg", 20)
    # a block may begin in another rank's file
    assert Path(error.filename).parent.samefile(file.parent)
    with Source.open(tmp_path) as source:
        sums = source.manifest.checksums["big"]["exp_avg"]
    assert error.written in sums and error.seen != error.written
    assert error.start <= piece.start + 5 < error.stop
    assert "step 10" in str(error)
    assert "tag='old'" in str(error)
    with Source.open(tmp_path) as source:
        assert torch.equal(source.read("big", "master", 0, NUMEL), states()["big"]["master"])
    with Source.open(tmp_path, "old") as source:
        assert torch.equal(source.read("big", "exp_avg", 0, NUMEL), states()["big"]["exp_avg"])


def test_a_whole_block_is_verified_even_for_one_element(tmp_path: Path) -> None:
    folder = write(tmp_path, states())
    with Source.open(tmp_path) as source:
        piece = next(
            p for p in pieces_of(source.parts[0]) if (p.param, p.state) == ("big", "master")
        )
        flip(folder / source.parts[0].files[piece.file], piece.offset + CHECKSUM_BYTES - 1)
        with pytest.raises(DamagedState, match="elements 0 to 262144"):
            source.read("big", "master", 0, 1)
        source.read("big", "master", CHECKSUM_BYTES // 4, 10)


def damaged(what: str, folder: Path) -> None:
    if what == "the manifest is cut":
        file = folder / "manifest-2.json"
        file.write_bytes(file.read_bytes()[:-50])
    elif what == "a bit of the manifest":
        flip(folder / "manifest-2.json", 40)
    elif what == "a bit of a part":
        flip(folder / "part-2-1.json", 60)
    elif what == "a part is cut":
        file = folder / "part-2-0.json"
        file.write_bytes(file.read_bytes()[:100])
    elif what == "a part is gone":
        (folder / "part-2-1.json").unlink()
    elif what == "a data file is cut":
        os.truncate(folder / "data-0.bin", 1000)
    elif what == "a data file is gone":
        (folder / "more-1.bin").unlink()
    elif what == "the part of another step":
        (folder / "part-2-0.json").write_bytes(
            (folder.parent / "old" / "part-1-0.json").read_bytes()
        )


SAID = {
    "the manifest is cut": "do not end as a checkpoint's file does",
    "a bit of the manifest": "crc32c is",
    "a bit of a part": "its CRC-32C is not the one that",
    "a part is cut": "it was cut, or is another's",
    "a part is gone": "part-2-1.json",
    "a data file is cut": "data-0.bin: has 1000 bytes",
    "a data file is gone": "more-1.bin",
    "the part of another step": "part-2-0.json: has",
}


@pytest.mark.parametrize("what", SAID)
def test_what_is_not_whole_is_refused_and_the_older_step_opens(what: str, tmp_path: Path) -> None:
    two_tags(tmp_path)
    damaged(what, tmp_path / "new")
    with pytest.raises((ManifestError, OSError), match=re.escape(SAID[what])) as caught:
        Source.open(tmp_path)
    assert "step 10: open it with tag='old' or allow_older=True" in str(caught.value)
    with Source.open(tmp_path, allow_older=True) as source:
        assert source.manifest.step == 10
        assert torch.equal(source.read("big", "master", 0, NUMEL), states()["big"]["master"])


def test_without_an_older_step_the_error_says_so(tmp_path: Path) -> None:
    write(tmp_path, states(7))
    (tmp_path / "step1" / "part-1-0.json").unlink()
    with pytest.raises(FileNotFoundError, match="no other durable step that is whole"):
        Source.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        Source.open(tmp_path, allow_older=True)


def test_a_newer_version_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("tiermem.checkpoint.format.manifest.VERSION", 3)
        write(tmp_path, states(7))
    with pytest.raises(
        ManifestError, match="version 3 of the format; this tiermem reads version 2"
    ):
        Source.open(tmp_path)


# ---- finding -------------------------------------------------------------------------------------


def test_latest_is_what_opens_and_a_tag_what_is_asked_for(tmp_path: Path) -> None:
    two_tags(tmp_path)
    (tmp_path / "latest").write_bytes(
        said_of(tmp_path / "old" / "manifest-1.json", tmp_path, "old")
    )
    places = [(tmp_path, None, 10), (tmp_path, "new", 20), (tmp_path / "new", None, 20)]
    for where, tag, step in [*places, (tmp_path / "old" / "manifest-1.json", None, 10)]:
        with Source.open(where, tag) as source:
            assert source.manifest.step == step


def test_a_run_folder_opens_at_its_newest_commit(tmp_path: Path) -> None:
    folder = write(tmp_path, states(7), "run", commit=9)
    again = write(tmp_path, states(7), "again", commit=10)
    for name in ("manifest-10.json", "part-10-0.json"):
        (again / name).rename(folder / name)
    (tmp_path / "latest").unlink()  # the folder is a run's, no tag's
    with Source.open(folder) as source:
        assert source.manifest.commit == 10


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(NothingSaved, match="no file named latest"):
        Source.open(tmp_path)
    with pytest.raises(NothingSaved, match="no such checkpoint"):
        Source.open(tmp_path / "nowhere")
    write(tmp_path, states(7), "here")
    with pytest.raises(NothingSaved, match="no tag 'there' here; those there are: here"):
        Source.open(tmp_path, "there")
    with pytest.raises(ValueError, match="a folder below the checkpoint"):
        Source.open(tmp_path, "../other")
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(
        NothingSaved, match="latest names 'gone', which is not there; other tags: here"
    ):
        Source.open(tmp_path)
    (tmp_path / "latest").unlink()
    with pytest.raises(NothingSaved, match="name one of its tags: here"):
        Source.open(tmp_path)
    (tmp_path / "latest").write_bytes(b"\xff/../" * 100)
    with pytest.raises(ManifestError, match="is no tag"):
        Source.open(tmp_path)
