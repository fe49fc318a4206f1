"""Do adapters of the peft library train, merge and save sharded as in plain PyTorch? Skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from faces import Plain, Sharded, compare, run
from launch import launch
from program_list import HOMES, policy_of

pytest.importorskip("peft")

from peft_programs import PROGRAMS, adapted

import tiermem

HERE = Path(__file__).parent
Differences = dict[tuple[str, str], list[str]]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Differences]:
    nvme = tmp_path_factory.mktemp("nvme")
    found = launch(HERE / "run_on_ranks.py", 2, tmp_path_factory.mktemp("out"), str(nvme), "peft", *PROGRAMS)
    assert not list(nvme.iterdir())
    return found


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_peft_adapters_do_as_in_plain_pytorch(name: str, home: str, tmp_path: Path) -> None:
    sharded = run(PROGRAMS[name], Sharded(policy_of(home, tmp_path)))
    assert compare(sharded, run(PROGRAMS[name], Plain())) == []


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_peft_adapters_do_so_on_two_ranks(name: str, home: str, on_two_ranks: list[Differences]) -> None:
    for differences in on_two_ranks:
        assert differences[name, home] == []


def test_merging_by_peft_alone_is_refused_with_the_alternative(tmp_path: Path) -> None:
    model = adapted()
    with (
        tiermem.shard(model, policy_of("nvme", tmp_path)),
        pytest.raises(RuntimeError, match=r"Write under tiermem.zero.GatheredParameters\(parameter, modifier_rank=0\)"),
    ):
        model.merge_and_unload()
