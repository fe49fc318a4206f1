"""Does `tiermem check --config` say what becomes of each key, and everything that is wrong at
once?"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiermem.tools.check import check_config
from tiermem.tools.options import CheckOptions


def checked(
    config: Any, folder: Path, shows_all: bool = False, saves: Path | None = None
) -> tuple[int, str]:
    file = folder / "ds.json"
    file.write_text(json.dumps(config))
    console = Console(width=200, record=True, file=io.StringIO())
    status = check_config(CheckOptions(shows_all=shows_all, json_file=saves), file, console)
    return status, console.export_text()


def row_of(text: str, key: str) -> str:
    (row,) = (line for line in text.splitlines() if line.startswith(f"{key} "))
    return " ".join(row.split())


def test_keys_that_are_set_are_listed_with_what_becomes_of_them(tmp_path: Path) -> None:
    zero = {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "elastic_checkpoint": True,
        "stage3_prefetch_bucket_size": 7,
    }
    status, text = checked({"zero_optimization": zero, "gradient_clipping": 0.5}, tmp_path)
    assert status == 0
    assert row_of(text, "gradient_clipping") == "gradient_clipping 0.5 honoured"
    device = "zero_optimization.offload_param.device"
    assert row_of(text, device) == f"{device} cpu honoured"  # as it is written in a file
    assert row_of(text, "zero_optimization.stage3_prefetch_bucket_size").endswith("7 honoured")
    assert "True computed what is saved opens" in row_of(
        text, "zero_optimization.elastic_checkpoint"
    )
    assert "aio.block_size" not in text
    assert "not set: at defaults" in text


def test_all_lists_every_key(tmp_path: Path) -> None:
    _, text = checked({}, tmp_path, shows_all=True)
    assert "computed the queue's default" in row_of(text, "aio.block_size")
    assert "not set: at defaults" not in text


def test_everything_that_is_wrong_is_listed_with_its_reason(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 3, "legacy_stage1": True},
        "optimiser": {},
        "pipeline": {"stages": 2},
    }
    status, text = checked(config, tmp_path)
    assert status == 2
    assert "the old stage 1 does not exist here" in row_of(text, "zero_optimization.legacy_stage1")
    assert "did you mean optimizer?" in row_of(text, "optimiser")
    assert "pipeline parallelism does not exist here" in row_of(text, "pipeline")


def test_deprecated_keys_are_named(tmp_path: Path) -> None:
    status, text = checked({"zero_optimization": {"stage": 2, "cpu_offload": True}}, tmp_path)
    assert status == 0
    assert "deprecated: zero_optimization.cpu_offload is deprecated; use offload_optimizer" in text
    assert row_of(text, "zero_optimization.offload_optimizer.device").endswith("honoured")


def test_what_is_not_deprecated_is_a_note(tmp_path: Path) -> None:
    zero = {"stage": True, "sub_group_size": 9}
    for _ in range(2):  # Python shows a warning once
        status, text = checked({"zero_optimization": zero}, tmp_path, saves=tmp_path / "out.json")
        assert status == 0
        assert "deprecated: zero_optimization.stage: True is deprecated" in text
        assert "note: more than these small numbers is taken where memory allows" in text
        found = json.loads((tmp_path / "out.json").read_text())
        assert [each[:9] for each in found["deprecated"]] == ["zero_opti"]
        assert [each[:9] for each in found["notes"]] == ["more than"]


def test_inert_keys_have_a_row(tmp_path: Path) -> None:
    profiled = {"flops_profiler": {"enabled": True}, "wandb": {"enabled": False}}
    status, text = checked(profiled, tmp_path)
    assert status == 0
    assert row_of(text, "flops_profiler") == (
        "flops_profiler {'enabled': True} inert there is no FLOPS profiler; use torch.profiler and "
        "remove the section"
    )
    assert "wandb" not in text


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_config(CheckOptions(), tmp_path / "nowhere.json", Console())
