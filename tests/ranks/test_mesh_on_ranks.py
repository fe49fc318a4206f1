"""Do ranks that share copies of the states in groups (MiCS) train as a DistributedDataParallel twin, wherever states rest?

One launch of four processes runs every case (mesh_on_ranks.py); the tests look at what it wrote.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hosts
import pytest
from mesh_cases import MICS, RANKS

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*command, str(HERE / "mesh_on_ranks.py"), str(out), str(nvme)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list(nvme.glob("*/*"))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", ["all ranks none", *MICS])
def test_ranks_train_as_the_twin(case: str, launched: list[dict[str, Any]]) -> None:
    for found in launched:
        assert found[case]["losses"] == pytest.approx(found["twin"]["losses"], rel=1e-6)
        for name, values in found["twin"]["weights"].items():
            assert found[case]["weights"][name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("case", MICS)
def test_every_rank_ends_with_the_same_bits(case: str, launched: list[dict[str, Any]]) -> None:
    assert all(found[case]["weights"] == launched[0][case]["weights"] for found in launched)


def test_where_states_rest_changes_no_bit(launched: list[dict[str, Any]]) -> None:
    for found in launched:
        results = [
            (found[f"mics 2 {tier}"]["losses"], found[f"mics 2 {tier}"]["weights"]) for tier in ("none", "cpu", "nvme")
        ]
        assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    ("case", "num_shards"), [("mics 2 none", 2), ("mics 1 none", 1), ("mics 4 two stages nvme", 4)]
)
def test_states_are_divided_among_as_many_ranks_as_asked(
    case: str, num_shards: int, launched: list[dict[str, Any]]
) -> None:
    for found in launched:
        assert found[case]["num_shards"] == num_shards
        for shards in found[case]["units"].values():
            assert all(shard_numel == -(-numel // num_shards) for numel, shard_numel in shards)


def test_gathers_stay_within_the_group_and_gradients_cross_to_copies_once(launched: list[dict[str, Any]]) -> None:
    for found in launched:
        case = found["mics 2 none"]
        assert case["mesh"] == ["replica", "shard"]
        phases = case["payloads"][3:6]  # of the second step
        assert {among_of(phase, "gathering") for phase in phases} <= {frozenset(), frozenset({"shard"})}
        assert among_of(phases[0], "gathering") == {"shard"}
        assert among_of(phases[1], "reducing") == {"shard", "replica"}
        scattered = bytes_of(phases[1], "reducing", "shard")  # a rank's part of the sum is half of what was scattered
        assert bytes_of(phases[1], "reducing", "replica") == scattered // 2


def test_two_stage_gathers_cross_nodes_with_one_part_each(launched: list[dict[str, Any]]) -> None:
    for found in launched:
        case = found["mics 4 two stages nvme"]
        assert case["mesh"] == ["across", "within"]
        for phase in case["payloads"][3:5]:
            assert among_of(phase, "gathering") == {"across", "within"}
            # across brings num_across parts here, within fills all num_shards of them
            assert bytes_of(phase, "gathering", "within") == 2 * bytes_of(phase, "gathering", "across")


@pytest.mark.slow
def test_two_hosts_give_the_bits_of_one(launched: list[dict[str, Any]], tmp_path: Path) -> None:
    cases = ["mics 2 nvme", "mics 4 two stages nvme"]
    for one, two in zip(launched, on_two_hosts(tmp_path, cases, ranks_per_host=2), strict=True):
        for case in (*cases, "twin"):
            assert two[case] == one[case]


def test_two_hosts_train_as_the_twin(tmp_path: Path) -> None:
    for found in on_two_hosts(tmp_path, ["mics 1 nvme", "all ranks nvme"], ranks_per_host=1):
        for case in ("mics 1 nvme", "all ranks nvme"):
            assert found[case]["ranks_on_node"] == 1
            assert found[case]["losses"] == found["twin"]["losses"]  # sums of two numbers round the same in any order
            assert found[case]["weights"] == found["twin"]["weights"]


def on_two_hosts(tmp_path: Path, cases: list[str], ranks_per_host: int) -> list[dict[str, Any]]:
    """What every rank wrote; each host had a folder of its own on NVMe and left nothing in it."""
    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)
    out, nvme = tmp_path / "out", tmp_path / "nvme"
    out.mkdir()
    nvme.mkdir()
    script = HERE / "mesh_on_ranks.py"
    for code, error in hosts.launch(script, str(out), str(nvme), *cases, ranks_per_host=ranks_per_host, timeout_s=240):
        assert code == 0, error[-4000:]
    assert sorted(node.name for node in nvme.iterdir()) == ["node0", "node1"]
    assert not list(nvme.glob("*/*"))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2 * ranks_per_host)]


def among_of(phase: list[Any], what: str) -> frozenset[str]:
    """Which ranks took part in the calls of a phase that were for something."""
    return frozenset(each[3] for each in phase if each[1].startswith(what))


def bytes_of(phase: list[Any], what: str, among: str) -> int:
    return sum(each[2] for each in phase if each[1].startswith(what) and each[3] == among)
