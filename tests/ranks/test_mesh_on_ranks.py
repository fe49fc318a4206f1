"""Do ranks train as a DistributedDataParallel twin with MiCS, hpZ and quantised communication, and
send what was promised?

One launch of four processes runs every case (mesh_on_ranks.py); the tests look at what it wrote.
"""

from __future__ import annotations

import collections
import itertools
import json
from pathlib import Path
from typing import Any

import hosts
import pytest
from launch import launch_ranks
from mesh_cases import CASES, HPZ, MICS, QUANTISED, RANKS
from programs.twins import assert_near

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
    launch_ranks(HERE / "mesh_on_ranks.py", RANKS, str(out), str(nvme), timeout_s=300)
    assert not list(nvme.glob("*/*"))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", ["all ranks none", *MICS])
def test_ranks_train_as_the_twin(case: str, launched: list[dict[str, Any]]) -> None:
    for found in launched:
        assert found[case]["losses"] == pytest.approx(found["twin"]["losses"], rel=1e-6)
        assert_near(found[case]["weights"], found["twin"]["weights"], rel=1e-4, least=1e-6)


@pytest.mark.parametrize("case", MICS)
def test_every_rank_ends_with_the_same_bits(case: str, launched: list[dict[str, Any]]) -> None:
    assert all(found[case]["weights"] == launched[0][case]["weights"] for found in launched)


def test_where_states_rest_changes_no_bit(launched: list[dict[str, Any]]) -> None:
    for found in launched:
        results = [
            (found[f"mics 2 {tier}"]["losses"], found[f"mics 2 {tier}"]["weights"])
            for tier in ("none", "cpu", "nvme")
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


def test_gathers_stay_within_the_group_and_gradients_cross_to_copies_once(
    launched: list[dict[str, Any]],
) -> None:
    for found in launched:
        case = found["mics 2 none"]
        assert case["mesh"] == ["replica", "shard"]
        phases = case["payloads"][3:6]  # of the second step
        assert {among_of(phase, "gathering") for phase in phases} <= {
            frozenset(),
            frozenset({"shard"}),
        }
        assert among_of(phases[0], "gathering") == {"shard"}
        assert among_of(phases[1], "reducing") == {"shard", "replica"}
        # a rank's part of the sum is half of what was scattered
        scattered = bytes_of(phases[1], "reducing", "shard")
        assert bytes_of(phases[1], "reducing", "replica") == scattered // 2


def test_two_stage_gathers_cross_nodes_with_one_part_each(launched: list[dict[str, Any]]) -> None:
    for found in launched:
        case = found["mics 4 two stages nvme"]
        assert case["mesh"] == ["across", "within"]
        both = [
            call for phase in case["payloads"][3:5] for call in phase
        ]  # a unit may cross in forward, land in backward
        assert among_of(both, "gathering") == {"across", "within"}
        # across brings num_across parts here, within fills all num_shards of them
        assert bytes_of(both, "gathering", "within") == 2 * bytes_of(both, "gathering", "across")


@pytest.mark.parametrize("case", HPZ)
def test_a_second_copy_changes_no_bit(case: str, launched: list[dict[str, Any]]) -> None:
    for found in launched:
        assert found[case]["losses"] == found["all ranks none"]["losses"]
        assert found[case]["weights"] == found["all ranks none"]["weights"]


@pytest.mark.parametrize("case", [*HPZ, "qwz qgz hpz cpu"])
def test_with_a_second_copy_no_gather_of_backward_leaves_the_node(
    case: str, launched: list[dict[str, Any]]
) -> None:
    for found in launched:
        forward, backward = found[case]["payloads"][3:5]
        # beside what is gathered ahead for backward
        assert "shard" in among_of(forward, "gathering")
        assert among_of(backward, "gathering") == {"within"}
        plain = found["all ranks none"]["payloads"][4]
        assert bytes_of(backward, "gathering", "within") == bytes_of(plain, "gathering", "shard")


def test_a_second_copy_is_of_the_weights_that_were_loaded_amid_gathers(
    launched: list[dict[str, Any]],
) -> None:
    for found in launched:
        assert found["loaded amid gathers"] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_a_second_copy_is_planned_where_it_is_kept(launched: list[dict[str, Any]]) -> None:
    for found in launched:
        rows = {
            what: num_bytes
            for what, _, num_bytes in found["hpz 2 nvme"]["rows"]
            if what == "secondary copies"
        }
        second = sum(
            sum(-(-2 * shard // 64) * 64 * 4 for _, shard in unit)
            for unit in found["hpz 2 nvme"]["units"].values()
        )
        assert (
            second
            <= rows["secondary copies"]
            <= second + 4 * 4096 * len(found["hpz 2 nvme"]["units"])
        )
        assert not any(what == "secondary copies" for what, _, _ in found["all ranks none"]["rows"])


@pytest.mark.parametrize(
    ("case", "plain"), [("qwz none", "all ranks none"), ("qwz bf16 nvme", "all ranks bf16 nvme")]
)
def test_quantised_gathers_send_a_byte_per_element_and_a_scale_per_block(
    case: str, plain: str, launched: list[dict[str, Any]]
) -> None:
    for found in launched:
        units = found[case]["units"].values()
        blocks = sum(-(-shard // 64) for unit in units for _, shard in unit)
        elements = sum(shard for unit in units for _, shard in unit)
        item_bytes = 2 if "bf16" in case else 4
        assert bytes_of_units(found[case]) == RANKS * blocks * 68
        assert bytes_of_units(found[plain]) == RANKS * elements * item_bytes


def test_quantised_reductions_send_within_the_node_and_then_across(
    launched: list[dict[str, Any]],
) -> None:
    for found in launched:
        plain, packed = found["all ranks none"]["payloads"][4], found["qgz none"]["payloads"][4]
        assert among_of(packed, "reducing") == {"within", "across"}
        sent = {among: bytes_of(packed, "reducing", among) for among in ("within", "across")}
        whole = bytes_of(plain, "reducing", "shard")
        assert sent["within"] < whole * 0.3  # 1.0625 bytes of 4, and blocks that are not full
        assert sent["across"] < sent["within"] * 0.6  # one node's sum instead of every rank's


@pytest.mark.parametrize("case", CASES)
def test_a_forecast_hands_collectives_what_a_step_does(
    case: str, launched: list[dict[str, Any]]
) -> None:
    for found in launched:
        said = {among: sum(phases.values()) for among, phases in found[case]["forecast"].items()}
        sent: collections.Counter[str] = collections.Counter()
        # of the third step
        for _, what, num_bytes, among in itertools.chain(*found[case]["payloads"][6:9]):
            if what.startswith(("gathering", "reducing")):
                sent[among] += num_bytes
        assert said == sent and sum(sent.values()) > 0


@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_training_converges_as_the_plain_one(
    case: str, launched: list[dict[str, Any]]
) -> None:
    plain = "all ranks bf16 nvme" if "bf16" in case else "all ranks none"
    for found in launched:
        losses = found[case]["losses"]
        assert losses != found[plain]["losses"]
        assert losses == sorted(losses, reverse=True)
        assert losses == pytest.approx(found[plain]["losses"], rel=0.01)
        assert found[case]["weights"] == launched[0][case]["weights"]


@pytest.mark.slow
def test_two_hosts_give_the_bits_of_one(launched: list[dict[str, Any]], tmp_path: Path) -> None:
    cases = ["mics 2 nvme", "mics 4 two stages nvme"]
    for one, two in zip(launched, on_two_hosts(tmp_path, cases, ranks_per_host=2), strict=True):
        for case in (*cases, "twin"):
            assert two[case] == one[case]


@pytest.mark.slow
def test_two_hosts_train_as_the_twin(tmp_path: Path) -> None:
    """Slow: one host that is told to be two nodes takes the same way, above; torchrun's agents take
    most of the time."""
    for found in on_two_hosts(tmp_path, ["mics 1 nvme", "all ranks nvme"], ranks_per_host=1):
        for case in ("mics 1 nvme", "all ranks nvme"):
            assert found[case]["ranks_on_node"] == 1
            # sums of two numbers round the same in any order
            assert found[case]["losses"] == found["twin"]["losses"]
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
    for code, error in hosts.launch(
        script, str(out), str(nvme), *cases, ranks_per_host=ranks_per_host, timeout_s=240
    ):
        assert code == 0, error[-4000:]
    assert sorted(node.name for node in nvme.iterdir()) == ["node0", "node1"]
    assert not list(nvme.glob("*/*"))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2 * ranks_per_host)]


def among_of(phase: list[Any], what: str) -> frozenset[str]:
    """Which ranks took part in the calls of a phase that were for something."""
    return frozenset(each[3] for each in phase if each[1].startswith(what))


def bytes_of(phase: list[Any], what: str, among: str) -> int:
    return sum(each[2] for each in phase if each[1].startswith(what) and each[3] == among)


def bytes_of_units(case: dict[str, Any]) -> int:
    """What gathering every streamed unit once takes: of the second step, whose first gathers the
    step before has begun."""
    calls = [
        call for phase in case["payloads"][2:6] for call in phase if call[1].startswith("gathering")
    ]
    return sum({call[1]: call[2] for call in calls if call[1] != "gathering persistent"}.values())
