"""Does every command print one JSON object with --json, and nothing else on stdout?"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("_tiermem_native")
pytest.importorskip("transformers")

from tiermem.tools import options
from tiermem.tools.cli import main
from tiermem.tools.words import SCHEMA_VERSION, Options

KINDS = [
    each
    for each in vars(options).values()
    if isinstance(each, type) and issubclass(each, Options) and each.MADE_BY
]
COMMANDS = {
    "check --config ds.json --json": {"config", "is_accepted", "keys", "deprecated", "notes"},
    "check --json --config bad.json": {"config", "is_accepted", "problems"},
    "plan --preset 151m --offload cpu --flops 1T --json": {"node_bytes", "seconds", "fits"},
    "check --seconds 0.1 --json": {"findings"},
    "train --resume --json": {"steps"},
    "import a.pt ours --json": {"kind", "num_parameters", "num_bytes"},
    "inspect --json ours": {"step", "tensors", "totals"},
    "fsck ours --json": {"steps", "runs", "removed", "repaired"},
    "export ours out --json": {"step", "files", "num_bytes"},
}
DOCS = Path(__file__).parents[2] / "docs" / "json.md"


def said(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(command.split())
    return capsys.readouterr().out


def keys_in(found: Any) -> set[str]:
    """The keys of an object and of those inside it."""
    if isinstance(found, list):
        return set().union(*map(keys_in, found))
    if not isinstance(found, dict):
        return set()
    return {*found}.union(*map(keys_in, found.values()))


@pytest.mark.slow
def test_each_prints_one_object_with_the_keys_of_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    (tmp_path / "bad.json").write_text('{"zero_optimisation": {}}')
    torch.save({"weight": torch.ones(3, 5)}, tmp_path / "a.pt")
    given: dict[str, set[str]] = {}
    for command, keys in COMMANDS.items():
        found = json.loads(said(command, capsys))
        name = re.match(r"(bench )?\w+", command)
        assert name is not None and found["made_by"] == f"tiermem {name[0]}"
        assert found["schema_version"] == SCHEMA_VERSION
        assert keys <= found.keys(), command
        given.setdefault(found["made_by"], set()).update(keys_in(found))
    for name, row in re.findall(
        r"^\| `(tiermem \w+)` \|(.*)$", DOCS.read_text("utf-8"), re.MULTILINE
    ):
        if name in given and name != "tiermem train":
            assert set(re.findall(r"`(\w+)`", row)) <= given[name], name


def test_a_file_takes_the_same_object_and_the_text_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}")
    printed = json.loads(said("check --config ds.json --json", capsys))
    text = said("check --config ds.json --json found.json", capsys)
    assert json.loads((tmp_path / "found.json").read_text()) == printed
    assert text.startswith("ds.json: accepted")


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_has_the_option_and_a_row_of_the_page(kind: type[Options]) -> None:
    assert "json_file" in {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    assert f"| `{kind.MADE_BY}` |" in DOCS.read_text("utf-8")


def test_the_page_names_the_version() -> None:
    assert f"`schema_version` is {SCHEMA_VERSION}" in DOCS.read_text("utf-8")
