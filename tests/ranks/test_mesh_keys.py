"""Do the keys of a config about groups of ranks and what passes between them act through
`initialize`, on four ranks?

What each does in detail is seen in test_mesh_on_ranks.py and test_grads_on_ranks.py; here a JSON
config asks for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import launch

pytestmark = pytest.mark.slow  # the files named above are not
HERE = Path(__file__).parent
RANKS = 4
FORWARD, BACKWARD, STEP = 3, 4, 5  # of the second step
Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launch(HERE / "mesh_keys_on_ranks.py", RANKS, tmp_path_factory.mktemp("out"))


def sent(found: Found, case: str, phase: int, what: str, but: str = "persistent") -> dict[str, int]:
    """Bytes handed to collectives for something in a phase, by who took part; the same on every
    rank."""
    by_rank = []
    for rank in found:
        total: dict[str, int] = {}
        for _, purpose, num_bytes, among in rank[case]["phases"][phase]:
            if purpose.startswith(what) and not purpose.endswith(but):
                total[among] = total.get(among, 0) + num_bytes
        by_rank.append(total)
    assert all(total == by_rank[0] for total in by_rank)
    return by_rank[0]


def gathered_by_step(found: Found, case: str) -> int:
    """Bytes of gathers of the second step in all."""
    return sum(
        sum(sent(found, case, phase, "gathering").values()) for phase in (FORWARD, BACKWARD, STEP)
    )


def test_mics_shard_size_keeps_gathers_in_the_group_and_sends_sums_to_copies(found: Found) -> None:
    assert [rank["mics"]["num_shards"] for rank in found] == [2] * RANKS
    assert set(
        sent(found, "mics", FORWARD, "gathering") | sent(found, "mics", STEP, "gathering")
    ) == {"shard"}
    reduced = sent(found, "mics", BACKWARD, "reducing", but="nothing")
    assert reduced["replica"] == reduced["shard"] // 2


def test_mics_hierarchical_params_gather_crosses_nodes_first(found: Found) -> None:
    case = "mics in two stages"
    both = [sent(found, case, phase, "gathering") for phase in (FORWARD, BACKWARD, STEP)]
    across, within = (sum(each.get(among, 0) for each in both) for among in ("across", "within"))
    assert 0 < across * 2 == within
    assert not any(each.get("shard") for each in both)


def test_zero_hpz_partition_size_keeps_gathers_of_backward_on_the_node(found: Found) -> None:
    assert set(sent(found, "hpz", BACKWARD, "gathering")) == {"within"}
    assert (
        sent(found, "hpz", BACKWARD, "gathering")["within"]
        == sent(found, "plain", BACKWARD, "gathering")["shard"]
    )


def test_zero_quantized_weights_gathers_a_byte_for_four(found: Found) -> None:
    assert 0.26 < gathered_by_step(found, "qwz") / gathered_by_step(found, "plain") < 0.29


def test_zero_quantized_gradients_cross_nodes_as_one_sum_of_bytes(found: Found) -> None:
    plain = sent(found, "plain", BACKWARD, "reducing", but="nothing")
    packed = sent(found, "qgz", BACKWARD, "reducing", but="nothing")
    assert set(plain) == {"shard"}
    assert set(packed) == {"across", "within"}
    assert packed["within"] < plain["shard"] * 0.3
    assert packed["across"] < packed["within"] * 0.6


def test_zero_quantized_nontrainable_weights_are_gathered_as_they_rest(found: Found) -> None:
    units = {name for name in found[0]["plain, frozen"]["units"] if name.startswith("layers")}
    for rank in found:
        packed, plain = (
            of_units(rank[case], units) for case in ("quantised, frozen", "plain, frozen")
        )
        assert 0 < packed < plain * 0.29
        others = [
            of_units(rank[case], {"head", "embed"})
            for case in ("quantised, frozen", "plain, frozen")
        ]
        assert others[0] == others[1]


def test_allgather_bucket_size_bounds_each_gather_of_new_weights(found: Found) -> None:
    calls = found[0]["stage 2, updates of 2000"]["phases"][STEP]
    assert (
        max(call[2] for call in calls if call[1].startswith("gathering"))
        == 2000 // RANKS * RANKS * 4
    )


@pytest.mark.parametrize(
    ("case", "like", "rel"),
    [
        ("mics", "plain", 1e-6),
        ("mics in two stages", "plain", 0),
        ("hpz", "plain", 0),
        ("qwz", "plain", 0.02),
        ("qgz", "plain", 0.02),
        ("quantised, frozen", "plain, frozen", 0.02),
        ("stage 2", "plain", 0),
        ("stage 2, updates of 2000", "stage 2", 0),
    ],
)
def test_losses_are_those_of_plain_stage_3(case: str, like: str, rel: float, found: Found) -> None:
    for rank in found:
        assert rank[case]["losses"] == pytest.approx(rank[like]["losses"], rel=rel, abs=0)


def of_units(case: dict[str, Any], units: set[str]) -> int:
    """Bytes of the second step's gathers of some units."""
    calls = [call for phase in (FORWARD, BACKWARD, STEP) for call in case["phases"][phase]]
    return sum(
        call[2]
        for call in calls
        if call[1].startswith("gathering ") and call[1].split()[1] in units
    )
