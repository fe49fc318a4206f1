"""Does `train --tensorboard` write every step's figures, and say what to install where tensorboard
is missing?"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tiermem.tools.cli import main
from tiermem.tools.job.launcher import Sample
from tiermem.tools.record.reports import TensorBoardLog

SHAPE = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads: (step, value) of each figure."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    assert "tiermem/limited_by/text_summary" in found.Tags()["tensors"]
    return {
        tag: [(each.step, each.value) for each in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_every_step_has_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "planted").symlink_to(tmp_path)
    with pytest.raises(FileExistsError):
        TensorBoardLog(tmp_path / "planted")
    log = TensorBoardLog(tmp_path / "log")
    log.on_sample(Sample(0, 3 << 30, None))
    for step in (1, 2):
        message = {
            "kind": "step",
            "step": step,
            "loss": 2.0 / step,
            "tokens": 100,
            "grad_norm": 1.0,
            "lr": 0.5,
        }
        log.on_message(
            {**message, "forward_s": 1.0, "backward_s": 2.0, "step_s": 1.0, "limited_by": "disk"}
        )
    log.on_message({"kind": "done"})
    log.close()
    found = scalars(tmp_path / "log")
    assert found["train/loss"] == [(1, 2.0), (2, 1.0)]
    assert found["tiermem/tokens_per_s"] == [(1, 25.0), (2, 25.0)]
    assert found["tiermem/resident_gib"] == [(1, 3.0), (2, 3.0)]


def test_a_missing_package_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        main(["train", "--preset", "151m", "--tensorboard", "board"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "pip install tensorboard" in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(SHAPE))
    words = [
        "--model",
        "tiny.json",
        "--seq",
        "16",
        "--steps",
        "3",
        "--nvme",
        ".",
        "--json",
        "out.json",
    ]
    with pytest.raises(SystemExit) as end:
        main(["train", *words, "--tensorboard", "board"])
    assert not end.value.code
    [folder] = (tmp_path / "board").iterdir()
    losses = [value for _, value in scalars(folder)["train/loss"]]
    assert losses == pytest.approx(json.loads((tmp_path / "out.json").read_text())["losses"])
