"""Do import, export, inspect and fsck work from the command line, and is bad input one line and
exit status 2?"""

from __future__ import annotations

import json
import os
import pickle
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from called import call
from saved_by_hand import write
from torch import nn

from tiermem.tools import checkpoints
from tiermem.tools.cli import main
from tiermem.tools.job.train_job import find_resumed


def tiermem(*words: str | Path) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    done = call(Path.cwd(), *words)
    return done.returncode, done.stdout, done.stderr


def a_model(folder: Path) -> dict[str, torch.Tensor]:
    """A torch file with a model and its optimizer, two steps old."""
    torch.manual_seed(0)
    net = nn.Linear(33, 17)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(2):
        net(torch.randn(3, 33)).square().mean().backward()
        optimizer.step()
    torch.save(
        {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1},
        folder / "a.pt",
    )
    return net.state_dict()


def test_in_and_out_again(tmp_path: Path) -> None:
    expected = a_model(tmp_path)
    status, out, _ = tiermem("import", tmp_path / "a.pt", tmp_path / "ours")
    assert status == 0
    assert "torch state dict: weights and optimizer states of 2 tensors" in out
    assert "left behind: 'epoch' of the file" in out
    status, out, _ = tiermem("inspect", tmp_path / "ours", "--json")
    assert status == 0
    assert [tensor["num_steps"] for tensor in json.loads(out)["tensors"]] == [2, 2]
    status, out, _ = tiermem("fsck", tmp_path / "ours", "--verify", "--json")
    assert status == 0
    assert [step["state"] for step in json.loads(out)["steps"]] == ["whole"]
    status, out, _ = tiermem("export", tmp_path / "ours", tmp_path / "pt", "--pytorch", "--json")
    assert status == 0
    assert json.loads(out)["files"] == ["pytorch_model.bin"]
    found = torch.load(tmp_path / "pt" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    status, _, _ = tiermem("export", tmp_path / "ours", tmp_path / "dcp", "--dcp")
    assert status == 0
    status, out, _ = tiermem("import", tmp_path / "dcp", tmp_path / "again", "--json")
    assert status == 0
    assert json.loads(out)["kind"] == "torch.distributed.checkpoint"
    data = [
        next((tmp_path / each / "global_step2").glob("data-*.bin")).read_bytes()
        for each in ("ours", "again")
    ]
    assert data[0] == data[1]


def test_an_interrupt_says_what_has_been_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_model(tmp_path)
    out = tmp_path / "ours"

    def stopped(step: str, is_late: bool, *words: str) -> str:
        act = getattr(checkpoints, step)

        def interrupted(*given: Any) -> Any:
            done = act(*given) if is_late else None
            signal.raise_signal(signal.SIGINT)
            return done

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, step, interrupted)
            with pytest.raises(SystemExit) as ended:
                main(words)
        assert ended.value.code == 130
        return capsys.readouterr().err.partition("stopped; ")[2]

    words = "import", str(tmp_path / "a.pt"), str(out)
    assert stopped("write_checkpoint", False, *words) == "nothing was written\n"
    assert stopped("write_checkpoint", True, *words) == f"{out} had been written\n"
    assert stopped("survey", True, "fsck", str(out)) == "nothing was changed\n"
    assert "changed in part" in stopped("repair", True, "fsck", str(out), "--repair")


def test_a_models_config_makes_it_one_to_resume_from(tmp_path: Path) -> None:
    a_model(tmp_path)
    shape = {"model_type": "llama", "hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert tiermem("import", tmp_path / "a.pt", tmp_path / "ours", "--model", tmp_path)[0] == 0
    resumed = find_resumed(tmp_path / "ours")
    assert (resumed.step, resumed.name, resumed.shape) == (2, "a.pt", shape)
    assert not any(resumed.options.values())
    assert tiermem("export", tmp_path / "ours", tmp_path / "hf")[0] == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == shape


class Runs:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.folder,)


def hostile_file(folder: Path) -> Path:
    torch.save({"model": {"w": torch.ones(3)}, "x": Runs(folder / "pwned")}, folder / "bad.pt")
    return folder / "bad.pt"


def hostile_legacy_file(folder: Path) -> Path:
    torch.save(
        {"x": Runs(folder / "pwned")}, folder / "bad.pt", _use_new_zipfile_serialization=False
    )
    return folder / "bad.pt"


def bare_pickle(folder: Path) -> Path:
    (folder / "bad.bin").write_bytes(pickle.dumps(Runs(folder / "pwned")))
    return folder / "bad.bin"


def hostile_dcp(folder: Path) -> Path:
    (folder / "dcp").mkdir()
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(Runs(folder / "pwned")))
    return folder / "dcp"


def hostile_deepspeed(folder: Path) -> Path:
    (folder / "ds").mkdir()
    for kind in ("model", "optim"):
        torch.save(
            Runs(folder / "pwned"), folder / "ds" / f"zero_pp_rank_0_mp_rank_00_{kind}_states.pt"
        )
    return folder / "ds"


def a_tar(folder: Path) -> Path:
    """What torch wrote before 0.4 was a tar file with pickles in it."""
    (folder / "pickle").write_bytes(pickle.dumps(Runs(folder / "pwned")))
    with tarfile.open(folder / "bad.pt", "w") as tar:
        tar.add(folder / "pickle", "pickle")
    return folder / "bad.pt"


def cut_file(folder: Path) -> Path:
    a_model(folder)
    (folder / "a.pt").write_bytes((folder / "a.pt").read_bytes()[:-100])
    return folder / "a.pt"


def bad_safetensors(folder: Path) -> Path:
    (folder / "m.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    return folder / "m.safetensors"


@pytest.mark.parametrize(
    "make",
    [
        hostile_file, hostile_legacy_file, bare_pickle, hostile_dcp, hostile_deepspeed, a_tar, cut_file, bad_safetensors,
        lambda folder: folder / "nowhere", lambda folder: folder,
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_one_line(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    source = make(tmp_path)
    status, _, said = tiermem("import", source, tmp_path / "out")
    assert status == 2
    assert said.startswith("tiermem import: ")
    assert str(source) in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path / "out").exists()


def nothing(folder: Path) -> list[Any]:
    return ["export", folder, folder / "out"]


def no_part_of_dcp(folder: Path) -> list[Any]:
    return ["export", folder, folder / "out", "--dcp", "--exclude-frozen"]


def both_formats(folder: Path) -> list[Any]:
    write(folder, {"w": {"weight": torch.ones(3)}})
    return ["export", folder, folder / "out", "--dcp", "--pytorch"]


def bad_dtype(folder: Path) -> list[Any]:
    write(folder, {"w": {"weight": torch.ones(3)}})
    return ["export", folder, folder / "out", "--dtype", "int8"]


def bad_size(folder: Path) -> list[Any]:
    write(folder, {"w": {"weight": torch.ones(3)}})
    return ["export", folder, folder / "out", "--max-shard-size", "huge"]


def no_tag(folder: Path) -> list[Any]:
    write(folder, {"w": {"weight": torch.ones(3)}})
    return ["inspect", folder, "--tag", "t9"]


def damaged(folder: Path) -> list[Any]:
    file = next(write(folder, {"w": {"weight": torch.ones(3)}}).glob("manifest*"))
    file.write_bytes(file.read_bytes().replace(b'"step":1', b'"step":2'))
    return ["inspect", folder]


def no_folder(folder: Path) -> list[Any]:
    return ["fsck", folder / "nowhere"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (nothing, "holds no file named latest"),
        (both_formats, "two of --pytorch, --dcp and --whole are given"),
        (no_part_of_dcp, "--dcp writes all parameters and no config"),
        (bad_dtype, "the dtype is 'int8'; allowed are fp32"),
        (bad_size, "'huge' is not a size"),
        (no_tag, "there is no tag 't9' here; those there are: step1"),
        (damaged, "it is damaged"),
        (no_folder, "no such folder"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, make: Callable[[Path], list[Any]], reason: str
) -> None:
    words = make(tmp_path)
    status, _, said = tiermem(*words)
    assert status == 2
    assert said.startswith(f"tiermem {words[0]}: ")
    assert reason in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
