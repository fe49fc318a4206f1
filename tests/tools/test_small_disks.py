"""Are folders in memory, and disks without room to be measured, named, and the rest done?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from mounts import mount  # noqa: F401  (a fixture)

pytest.importorskip("_tiermem_native")
pytest.importorskip("transformers")

from tiermem.swap.disk.direct import file_system_of
from tiermem.tools.cli import main
from tiermem.tools.presets import preset

TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY |= {"num_key_value_heads": 4, "vocab_size": 300}
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def in_memory() -> Iterator[Path]:
    shm = Path("/dev/shm")
    if not shm.is_dir() or file_system_of(shm) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    with TemporaryDirectory(dir=shm) as folder:
        yield Path(folder)


def said_by(words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command that ends well prints, on one line."""
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as ended:
        main(words)
    found = capsys.readouterr()
    assert not ended.value.code, found.out + found.err
    return " ".join(found.out.split())


@pytest.mark.slow
def test_check_names_a_folder_in_memory_and_does_the_rest(
    in_memory: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_by(["check", "--path", str(in_memory), "--seconds", "0.2"], capsys, monkeypatch)
    assert f"{in_memory} (tmpfs), in memory (tmpfs)" in said
    assert "name a folder on a disk: what rests here takes memory" in said
    assert f"not measured: {in_memory} lies in memory (tmpfs)" in said
    assert "engine" in said and "products" in said


@pytest.mark.slow
def test_train_under_a_cap_names_a_folder_in_memory_and_trains(
    in_memory: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(preset("151m") | TINY))
    words = [
        "train",
        "--model",
        "tiny.json",
        "--steps",
        "2",
        "--seq",
        "32",
        "--memory",
        "600MiB",
        "--json",
        "out.json",
    ]
    words += ["--offload", "nvme"]
    said = said_by([*words, "--nvme", str(in_memory)], capsys, monkeypatch)
    assert (
        f"the disk is not measured, so nothing is predicted: {in_memory} lies in memory (tmpfs)"
        in said
    )
    run = json.loads((tmp_path / "out.json").read_text())
    assert len(run["losses"]) == 2
    # the kernel counts no bytes there, and no drive wears
    assert run["nvme_written_bytes"] > 0
    assert run["kernel_written_bytes"] is None and run["paths"] == []
    assert "kernel" not in said and "TBW" not in said


def test_steps_in_memory_are_timed_without_wear_and_the_kernels_counts(
    in_memory: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    words = ["bench", "step", "--preset", "exact", "--params", "1M", "--loops", "1"]
    said = said_by([*words, "--path", str(in_memory), "--json", str(out)], capsys, monkeypatch)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["written_bytes"] > 12 * 10**6
    assert "TBW" not in said and "the kernel" not in said
    assert f"{in_memory} lies in memory (tmpfs): its figures are not a disk's" in said


def test_check_on_a_small_disk_says_what_was_not_measured(
    mount: Callable[..., Path],  # noqa: F811
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = mount("ext4", 40 << 20)
    said = said_by(["check", "--path", str(small), "--seconds", "0.2"], capsys, monkeypatch)
    # a long path is cut over lines
    assert f"not measured: {small} has".replace(" ", "") in said.replace(" ", "")
    assert "and a file of 64.0 MiB is needed" in said
    assert "products" in said


@pytest.mark.slow
def test_bench_io_leaves_out_a_disk_without_room_and_measures_the_others(
    mount: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large, out = mount("ext4", 8 << 20), tmp_path / "large", tmp_path / "io.json"
    large.mkdir()
    words = [
        "bench",
        "io",
        "--size",
        "16MiB",
        "--block",
        "1MiB",
        "--depth",
        "1",
        "--mode",
        "read",
        "--loops",
        "1",
    ]
    paths = ["--path", str(small), "--path", str(large)]
    said = said_by([*words, *paths, "--json", str(out)], capsys, monkeypatch)
    assert f"not measured: {small} has" in said
    assert [each["path"] for each in json.loads(out.read_text())["machine"]["paths"]] == [
        str(large)
    ]
