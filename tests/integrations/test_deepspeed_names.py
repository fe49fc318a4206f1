"""Is each of DeepSpeed's names answered, or declined with what to use instead? Holds the code, the
page and a list together.

deepspeed_names.txt                       the list: facts about DeepSpeed
tiermem.integrations.as_deepspeed.NAMES   answers
docs/from_deepspeed.md, "Declined"        the other names, and what to use instead
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
from pathlib import Path
from typing import NamedTuple

import fork_server
import pytest
import torch

import tiermem
from tiermem.integrations.as_deepspeed import NAMES, DeepSpeedCPULion, FusedAdam, FusedLion
from tiermem.zero.partition_parameters import is_zero_param

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = (ROOT / "docs" / "from_deepspeed.md").read_text("utf-8")
LISTED = [
    line
    for line in (HERE / "deepspeed_names.txt").read_text("utf-8").splitlines()
    if line and line[0] != "#"
]


class Row(NamedTuple):
    """A row of "Declined": patterns of names, and what to use instead."""

    patterns: list[str]
    instead: str


def rows() -> list[Row]:
    lines = [
        line for line in PAGE.partition("## Declined")[2].splitlines() if line.startswith("| ")
    ]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]
    return [Row(re.findall(r"`(deepspeed\.[^`]*)`", names), instead) for names, instead in cells]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The listed names that a script finds under `python -m tiermem.as_deepspeed`."""
    names = tmp_path_factory.mktemp("names") / "names"
    names.write_text("\n".join(LISTED), "utf-8")
    main = str(ROOT / "tiermem" / "as_deepspeed.py")
    done = fork_server.run([main, str(HERE / "answered_names.py"), str(names)], 120)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.split())


def is_declined(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for row in rows() for pattern in row.patterns)


def test_every_listed_name_is_answered_or_declined(answered: set[str]) -> None:
    assert [name for name in LISTED if name not in answered and not is_declined(name)] == []


def test_every_pattern_of_declined_is_of_a_name_without_an_answer(answered: set[str]) -> None:
    for row in rows():
        assert len(row.instead) > 10
        for pattern in row.patterns:
            found = fnmatch.filter(LISTED, pattern)
            assert set(found) - answered, f"{pattern} declines no listed name that is not answered"


def test_every_answered_name_is_listed() -> None:
    given = {
        f"{module}.{name}"
        for module, sources in NAMES.items()
        for names in sources.values()
        for name in (names if isinstance(names, (tuple, list)) else ())
    }
    assert sorted(given - set(LISTED)) == []


def test_what_the_page_says_of_answered_names_is_so(answered: set[str]) -> None:
    told = re.findall(r"`(deepspeed\.[\w.]+)`", PAGE.partition("## Declined")[0])
    assert len(told) >= 4
    assert [name for name in told if name not in answered] == []


def test_add_config_arguments_serves_initialize(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 4, "optimizer": {"type": "AdamW"}}), "utf-8"
    )
    parser = tiermem.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    assert args.deepspeed and parser.parse_args([]).deepspeed_config is None
    engine = tiermem.initialize(args, torch.nn.Linear(2, 2))[0]
    assert engine.train_batch_size() == 4
    engine.close()


def test_is_zero_param_tells_partitioned_from_ordinary_parameters() -> None:
    model = torch.nn.Linear(2, 2)
    assert not is_zero_param(model.weight)
    with tiermem.zero.Init():
        built = torch.nn.Linear(2, 2)
    assert is_zero_param(built.weight)
    with tiermem.shard(model):
        assert is_zero_param(model.weight)
    assert not is_zero_param(model.weight)


def test_fused_optimizers_are_tiermem_s_with_deepspeed_s_arguments() -> None:
    params = [torch.nn.Parameter(torch.zeros(2))]
    decoupled = FusedAdam(params, 0.5, True, (0.8, 0.9), 1e-6, True, 0.1)
    assert type(decoupled) is tiermem.AdamW
    group = decoupled.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        0.5,
        (0.8, 0.9),
        1e-6,
        0.1,
    )
    assert type(FusedAdam(params, adam_w_mode=False)) is tiermem.Adam
    with pytest.raises(ValueError, match="bias_correction=False is not done"):
        FusedAdam(params, bias_correction=False)
    lion = FusedLion(params, 0.5, weight_decay=0.1, set_grad_none=True)
    assert type(lion) is DeepSpeedCPULion and lion.param_groups[0]["weight_decay"] == 0.1


def test_set_train_micro_batch_size_changes_the_samples_of_a_step() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW"},
    }
    engine = tiermem.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (15, 5, 3)
    for _ in range(3):
        engine.backward(engine(torch.ones(5, 2)).sum())
        engine.step()
    assert (engine.global_steps, engine.global_samples) == (1, 15)
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        engine.set_train_micro_batch_size(0)
    engine.close()
