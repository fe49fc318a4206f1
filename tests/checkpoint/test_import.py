"""Is what was imported a whole checkpoint, equal to its source to the bit, and is nothing left when
it cannot be?"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint.deepspeed_folders import write_deepspeed
from checkpoint.test_deepspeed_import import values_of
from saved_by_hand import latest_of

from tiermem.checkpoint.interchange.foreign import (
    Foreign,
    ForeignParameter,
    ForeignState,
    of_tensor,
)
from tiermem.checkpoint.interchange.from_deepspeed import read_deepspeed
from tiermem.checkpoint.interchange.write import write_checkpoint
from tiermem.checkpoint.opening.source import Source
from tiermem.checkpoint.survey import repair, survey


def check(out: Path, foreign: Foreign) -> None:
    """Every state of a checkpoint equals the source's; opening verifies what is read."""
    with Source.open(out) as source:
        assert list(source.parameters) == [p.name for p in foreign.parameters]
        for p in foreign.parameters:
            opened = source.parameters[p.name]
            assert (opened.shape, opened.aliases, opened.num_steps) == (
                p.shape,
                p.aliases,
                p.num_steps,
            )
            assert source.states(p.name) == (tuple(p.states) if opened.numel else ())
            for state, value in values_of(p).items():
                if opened.numel:
                    assert torch.equal(
                        source.read(p.name, state, 0, opened.numel), value.view(-1)
                    ), (p.name, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_deepspeed_checkpoint_becomes_ours(
    tmp_path: Path, num_ranks: int, dtype: torch.dtype
) -> None:
    write_deepspeed(tmp_path / "ds", num_ranks, dtype)
    foreign = read_deepspeed(tmp_path / "ds")
    done = write_checkpoint(foreign, tmp_path / "out")
    assert (done.tag, done.step, done.folder) == (
        "global_step4",
        4,
        tmp_path / "out" / "global_step4",
    )
    assert latest_of(tmp_path / "out") == "global_step4"
    assert done.num_bytes == sum(
        v.nbytes for p in foreign.parameters for v in values_of(p).values()
    )
    assert list(done.left_behind) == []
    check(tmp_path / "out", foreign)


def test_sizes_around_blocks_and_buffers_are_whole(tmp_path: Path) -> None:
    """Pieces that do not divide a block of 1 MiB, states that end on one and beside one, empty and
    0-dim parameters."""
    mib = 1 << 18  # elements of fp32
    shapes = [(0,), (), (1,), (mib - 1,), (mib,), (mib + 1,), (16 * mib,), (17 * mib + 5,), (3, 0)]
    torch.manual_seed(0)

    def cut(value: torch.Tensor) -> ForeignState:
        def pieces() -> Iterator[torch.Tensor]:
            yield from value.view(-1).split(100_003)

        return ForeignState(value.dtype, pieces)

    parameters = [
        ForeignParameter(
            f"p{i}",
            shape,
            {"weight": cut(torch.randn(shape)), "exp_avg": of_tensor(torch.randn(shape).half())},
        )
        for i, shape in enumerate(shapes)
    ]
    told: list[int] = []
    done = write_checkpoint(Foreign("test", parameters), tmp_path, "a", told.append)
    assert sum(told) == done.num_bytes
    check(tmp_path, Foreign("test", parameters))


def test_a_tag_that_is_there_is_not_touched(tmp_path: Path) -> None:
    foreign = Foreign("test", [ForeignParameter("w", (3,), {"weight": of_tensor(torch.ones(3))})])
    write_checkpoint(foreign, tmp_path, "a")
    before = {file: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    with pytest.raises(FileExistsError, match="is there already; choose another tag or folder"):
        write_checkpoint(foreign, tmp_path, "a")
    assert {file: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
    write_checkpoint(foreign, tmp_path, "b")
    assert latest_of(tmp_path) == "b"


@pytest.mark.parametrize("tag", ["", "..", "a/../b", "/a"])
def test_a_tag_is_the_name_of_a_folder(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ValueError, match="tag is "):
        write_checkpoint(Foreign("test", []), tmp_path, tag)


def test_a_tag_may_name_a_folder_below_a_folder(tmp_path: Path) -> None:
    foreign = Foreign("test", [ForeignParameter("w", (3,), {"weight": of_tensor(torch.ones(3))})])
    done = write_checkpoint(foreign, tmp_path, "a/b")
    assert done.folder == tmp_path / "a" / "b"
    check(tmp_path, foreign)
    write_checkpoint(foreign, tmp_path, "c")
    found = survey(tmp_path)
    assert [(step.tag, step.state) for step in found.steps] == [("c", "whole"), ("a/b", "whole")]
    assert repair(found) == repair(survey(tmp_path / "a")) == []


@pytest.mark.parametrize("numel", [2, 4])
def test_values_that_are_not_as_announced_leave_nothing(tmp_path: Path, numel: int) -> None:
    parameter = ForeignParameter("w", (3,), {"weight": of_tensor(torch.ones(numel))})
    with pytest.raises(ValueError, match="w: weight has"):
        write_checkpoint(Foreign("test", [parameter]), tmp_path / "out", "a")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_met_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces() -> Iterator[torch.Tensor]:
        raise AssertionError("read")

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    parameter = ForeignParameter("w", (3,), {"weight": ForeignState(torch.float32, pieces)})
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(Foreign("test", [parameter]), tmp_path / "out", "a")
    assert not (tmp_path / "out").exists()


def test_moments_without_groups_have_the_optimizer_that_keeps_them(tmp_path: Path) -> None:
    one = of_tensor(torch.ones(3))
    moved = ForeignParameter("w", (3,), {"weight": one, "exp_avg": one})
    write_checkpoint(Foreign("test", [moved]), tmp_path)
    with Source.open(tmp_path) as source:
        assert source.manifest.optimizer == {"name": "Lion", "groups": []}


def test_what_is_no_plain_value_is_named(tmp_path: Path) -> None:
    foreign = Foreign("test", [], client_state={"epoch": 3, "args": object()})
    done = write_checkpoint(dataclasses.replace(foreign, left_behind=["x"]), tmp_path, "a")
    assert done.left_behind[0] == "x"
    assert "client_state['args'] is a builtins.object" in done.left_behind[1]
    with Source.open(tmp_path) as source:
        assert source.manifest.client_state == {"epoch": 3}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("", (3,)),
        ("a\0b", (3,)),
        ("\ud800", (3,)),
        ("w" * 5000, (3,)),
        ("w", (0, 1 << 62, 1 << 62)),
    ],
)
def test_what_would_not_open_again_is_not_imported(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    def pieces() -> Iterator[torch.Tensor]:
        raise AssertionError("it is refused before a value is read")

    foreign = Foreign(
        "test", [ForeignParameter(name, shape, {"weight": ForeignState(torch.float32, pieces)})]
    )
    with pytest.raises(ValueError, match=r"cannot be saved.*parameters\[0\]: (name|shape)"):
        write_checkpoint(foreign, tmp_path / "out")
    assert not (tmp_path / "out").exists()
