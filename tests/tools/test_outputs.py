"""Is a file overwritten only by the command that made it?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiermem.tools.words import check_outputs, csv_mark

MADE_BY = "tiermem bench step"


def write_png(file: Path, made_by: str) -> None:
    from matplotlib.figure import Figure

    Figure(figsize=(1, 1)).savefig(file, metadata={"Software": made_by})


def test_what_is_not_there_and_what_is_not_asked_for_pass(tmp_path: Path) -> None:
    check_outputs([tmp_path / "a.json", None, tmp_path / "a.png", None], MADE_BY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["json", "csv", "png"])
def test_our_own_file_may_be_overwritten_and_another_commands_not(
    tmp_path: Path, kind: str
) -> None:
    file = tmp_path / f"out.{kind}"
    if kind == "json":
        file.write_text(json.dumps({"made_by": MADE_BY, "rows": []}))
    elif kind == "csv":
        file.write_text(csv_mark(MADE_BY) + "\na,b\n")
    else:
        write_png(file, MADE_BY)
    check_outputs([file], MADE_BY)
    with pytest.raises(FileExistsError, match="not made by 'tiermem bench io'"):
        check_outputs([file], "tiermem bench io")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"{}"),
        ("a.json", b"[1]"),
        ("a.json", b"not json"),
        ("a.json", b"\xff\xfe"),
        ("a.csv", b""),
        ("a.csv", b"x\n# made by tiermem bench step\n"),
        ("a.csv", b"# made by tiermem bench step too\n"),
        ("a.png", b"tEXtSoftware\0tiermem bench step"),
        ("a.txt", b"thesis"),
    ],
)
def test_a_file_without_our_mark_stays(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(FileExistsError, match="move it, or name another"):
        check_outputs([None, file], MADE_BY)
    assert file.read_bytes() == content


def test_a_folder_and_a_dangling_link_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "nowhere")
    for name in ("folder.json", "link.json"):
        with pytest.raises(FileExistsError):
            check_outputs([tmp_path / name], MADE_BY)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"make it first, or correct a\.json.*nowhere"):
        check_outputs([tmp_path / "nowhere" / "a.json"], MADE_BY)


def test_one_file_for_two_outputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two outputs are one file"):
        check_outputs([tmp_path / "a", tmp_path / "." / "a"], MADE_BY)
