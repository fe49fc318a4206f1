"""Do adapters of the peft library train, merge and save sharded as in plain PyTorch? Skipped where
it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import launch
from programs.faces import Plain, Sharded, compare, run
from programs.homes import MAIN, policy_of

pytest.importorskip("peft")

from programs.peft_adapters import HOMES, PROGRAMS, adapted, train_all

import tiermem
from tiermem import OffloadPolicy, Tier

HERE = Path(__file__).parent
TELLING = ["lora", "dora_on_nf4", "adapters_added_after_sharding", "merged_and_unloaded"]
FEW_ON_RANKS = TELLING[:2]
OTHERS = [name for name in PROGRAMS if name not in FEW_ON_RANKS]
EVERY = [(name, home) for name in PROGRAMS for home in ("host", *MAIN)]
FEW = {
    (name, home) for name, home in EVERY if home == "nvme" or (name in TELLING and home in HOMES)
}
Differences = dict[tuple[str, str], list[str]]


def launched(names: list[str], factory: pytest.TempPathFactory) -> list[Differences]:
    nvme = factory.mktemp("nvme")
    found = launch(HERE / "run_on_ranks.py", 2, factory.mktemp("out"), str(nvme), "peft", *names)
    assert not list(nvme.iterdir())
    return found


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Differences]:
    return launched(FEW_ON_RANKS, tmp_path_factory)


@pytest.fixture(scope="module")
def others_on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Differences]:
    return launched(OTHERS, tmp_path_factory)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("name", "home"),
    [pytest.param(*pair, marks=[] if pair in FEW else [pytest.mark.slow]) for pair in EVERY],
)
def test_peft_adapters_do_as_in_plain_pytorch(name: str, home: str, tmp_path: Path) -> None:
    sharded = run(PROGRAMS[name], Sharded(policy_of(home, tmp_path)))
    assert compare(sharded, run(PROGRAMS[name], Plain())) == []


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", FEW_ON_RANKS)
def test_peft_adapters_do_so_on_two_ranks(
    name: str, home: str, on_two_ranks: list[Differences]
) -> None:
    for differences in on_two_ranks:
        assert differences[name, home] == []


@pytest.mark.slow
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", OTHERS)
def test_others_do_so_on_two_ranks(
    name: str, home: str, others_on_two_ranks: list[Differences]
) -> None:
    for differences in others_on_two_ranks:
        assert differences[name, home] == []


def test_merging_by_peft_alone_is_refused_with_the_alternative(tmp_path: Path) -> None:
    model = adapted()
    with (
        tiermem.shard(model, policy_of("nvme", tmp_path)),
        pytest.raises(
            RuntimeError,
            match=r"Write under tiermem.zero.GatheredParameters\(parameter, modifier_rank=0\)",
        ),
    ):
        model.merge_and_unload()


def test_adapters_and_their_states_stay_in_memory_beside_a_base_on_nvme(tmp_path: Path) -> None:
    # their matrices have at most 264 elements, those of the base 1,024
    model = adapted(target_modules="all-linear")
    policy = OffloadPolicy(
        params=Tier.NVME,
        optim=Tier.HOST,
        paths=[tmp_path],
        persistence_numel=300,
        frozen_quant_type="nf4",
    )
    with tiermem.shard(model, policy) as shards:
        found = {shard.name: live.unit for live, shard in shards.parameters()}
        assert {unit.is_packed for name, unit in found.items() if "_proj.base_layer" in name} == {
            True
        }
        assert {unit.is_resident for name, unit in found.items() if "lora_" in name} == {True}
        written = shards.store.stats().nvme_written_bytes
        assert written > 0
        train_all(Sharded(policy), model, range(3))
        assert shards.store.stats().nvme_written_bytes == written
