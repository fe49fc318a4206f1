"""Does `tiermem train` keep bytes of text from a model with a tokenizer, and say what it reads?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("_tiermem_native")
pytest.importorskip("transformers")

from tiermem.tools.cli import main
from tiermem.tools.presets import preset

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY |= {"num_key_value_heads": 4, "vocab_size": 300}


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--steps", "1", "--seq", "32", "--offload", "none"])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.mark.parametrize("tokenizer", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("data", [["--data", "text.txt"], []])
def test_a_model_with_a_tokenizer_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tokenizer: str,
    data: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(preset("151m") | TINY))
    (tmp_path / "model" / tokenizer).write_text("{}")
    (tmp_path / "text.txt").write_text("the tier keeps every byte of a state. " * 100)
    status, _, errors = answer(["--model", "model", *data], capsys)
    assert status == 2
    assert f"--model: model has a tokenizer ({tokenizer})" in errors
    assert "tiermem sft" in errors
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_run_on_bytes_says_how_much_it_read_and_that_it_shows_memory_and_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(preset("151m") | TINY))
    (tmp_path / "text.txt").write_text("the tier keeps every byte of a state. " * 200_000)
    words = ["--model", "tiny.json", "--data", "text.txt", "--json", "out.json"]
    status, said, errors = answer(words, capsys)
    assert status == 0, said + errors
    line = next(each for each in said.splitlines() if each.startswith("data: "))
    assert line.startswith(
        "data: the first 4.0 MiB of the 7.2 MiB of text.txt, a byte is a token: "
    )
    assert line.endswith("this shows memory and speed, and makes no model to use")
    assert json.loads((tmp_path / "out.json").read_text())["data"] == line
