"""Does `tiermem train` count what saves write to a drive?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("_tiermem_native")
pytest.importorskip("transformers")

from tiermem.tools.cli import main
from tiermem.tools.presets import preset

TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
TINY |= {"num_key_value_heads": 4, "vocab_size": 300}


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["nvme", "none"])
@pytest.mark.usefixtures("forked_python")
def test_a_run_that_saves_says_no_less_than_what_lies_on_the_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    offload: str,
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
        "--tbw",
        "600TB",
        "--json",
        "out.json",
    ]
    words += ["--offload", offload, "--memory", "1GiB", "--save", "ck", "--save-every", "1"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    run: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    (path,) = run["paths"]
    stores = [*tmp_path.glob("runs/*/tiermem-*/*"), *tmp_path.glob("ck/**/*")]
    lying = sum(file.stat().st_blocks * 512 for file in stores if file.is_file())
    assert run["nvme_written_bytes"] == 0  # all states stay in memory
    assert path["written_bytes"] == run["copied_bytes"] >= 0.9 * lying > 1 << 20
    assert "no wear" not in said
    assert "are copies that saves made" in said
