"""Do two and three ranks reduce gradients as the policy says, and does the way they do it change
nothing else?"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from launch import asked, launch
from programs.twins import assert_near
from ways_to_reduce import ALWAYS, CASES, NUM_MICRO, SAME_BITS

HERE = Path(__file__).parent
Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(3, marks=pytest.mark.slow)],
    ids=lambda ranks: f"{ranks} ranks",
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
    stages = asked(request, "stage")
    held = [f"{how}, stage {stage}" for how in ("accumulated", "no_sync") for stage in stages]
    words = [str(nvme), *ALWAYS, *asked(request, "case"), *held]
    found = launch(HERE / "grads_on_ranks.py", request.param, out, *words)
    assert not list(nvme.iterdir())
    return found


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "case", [name for name in CASES if "error" not in name or name == "used is no error"]
)
def test_ranks_train_as_the_twin_whatever_the_way(case: str, found: Found) -> None:
    for rank in found:
        mine, twin = rank[case], rank[case]["twin"]
        assert "error" not in mine
        assert mine["losses"] == pytest.approx(twin["losses"], rel=1e-5)
        assert_near(mine["weights"], twin["weights"], rel=1e-4, least=2e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", SAME_BITS)
def test_no_bit_depends_on_tier_overlap_buckets_or_packing(case: str, found: Found) -> None:
    expected = found[0]["stage 3"]
    for rank in found:
        assert rank[case]["weights"] == expected["weights"]
        if "backward" not in case:
            assert rank[case]["norm"] == expected["norm"]


def test_models_of_one_group_step_in_any_order(found: Found) -> None:
    assert all(rank["together"]["weights"] == rank["stage 3"]["weights"] for rank in found)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", CASES)
def test_ranks_end_with_the_same_weights(case: str, found: Found) -> None:
    assert all(rank[case]["weights"] == found[0][case]["weights"] for rank in found)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "case", [name for name in CASES if "error" not in name and "broken" not in name]
)
def test_a_step_takes_one_exchange_and_gathers_nothing_ahead(case: str, found: Found) -> None:
    """Gradients that a rank has left in `p.grad` take another exchange, after which norms are added
    up again."""
    num_sums = (
        0
        if "step in backward" in case
        else 2
        if case in ("left to the step, stage 0", "left to the step, stage 1")
        else 1
    )
    for rank in found:
        calls = [what for what in rank[case]["in step"] if not what.startswith("reducing ")]
        updates = [
            what.removeprefix("gathering ") for what in calls if what.startswith("gathering ")
        ]
        assert set(updates) <= set(rank[case]["resident"])
        assert len(calls) - len(updates) == max(num_sums, 1)
        assert calls.count("adding up norms") == num_sums


def test_gradients_of_parameters_that_are_added_later_are_means_or_sums(found: Found) -> None:
    total = 2 * sum(range(1, len(found) + 1))  # of two micro-batches
    for rank in found:
        assert rank["added"] == [
            [[total / by] * 3, [2 * number / by for number in range(4)]] for by in (len(found), 1)
        ]


# ---- payloads ------------------------------------------------------------------------------------


def payloads(found: Found, case: str) -> list[list[Any]]:
    """(collective, unit, bytes) of the last step's reductions; the same on every rank."""
    for rank in found:
        assert rank[case]["payloads"] == found[0][case]["payloads"]
    return [
        [op, what.removeprefix("reducing "), size] for op, what, size in found[0][case]["payloads"]
    ]


def shares(found: Found, case: str) -> dict[str, int]:
    """Elements of each unit's share: the sum of ceil(numel / shards) over its parameters."""
    return dict(found[0][case]["units"])


@pytest.mark.parametrize(
    "case",
    [
        *("stage 1", "stage 2", "stage 3", "stage 3, nvme"),
        "graphs kept by one rank, stage 3",
        "graphs kept by one rank, one unit streamed",
    ],
)
def test_a_unit_is_one_reduce_scatter_of_ranks_times_its_share(case: str, found: Found) -> None:
    expected = {unit: len(found) * share * 4 for unit, share in shares(found, case).items()}
    sent = payloads(found, case)
    assert {unit: size for _, unit, size in sent} == expected
    assert len(sent) == len(expected)
    assert {op for op, _, _ in sent} == {"all_to_all_single"}  # between CPUs; see wires/reduce.py


def test_stage_0_is_one_all_reduce_of_the_unit(found: Found) -> None:
    expected = [["all_reduce", unit, numel * 4] for unit, numel in shares(found, "stage 0").items()]
    assert sorted(payloads(found, "stage 0")) == sorted(expected)


@pytest.mark.parametrize(
    ("case", "whole"), [("buckets of 1000", "stage 3"), ("buckets of 64, stage 2", "stage 2")]
)
def test_no_bucket_is_larger_than_asked_and_the_payload_is_the_same(
    case: str, whole: str, found: Found
) -> None:
    limit = int(case.split()[2].rstrip(","))
    room = limit // len(found) * len(found) * 4
    sent = payloads(found, case)
    assert max(size for _, _, size in sent) == room
    assert sum(size for _, _, size in sent) == sum(size for _, _, size in payloads(found, whole))
    for unit, share in shares(found, case).items():
        sizes = [size for _, name, size in sent if name.split()[0] == unit]
        assert len(sizes) == -(-share // (limit // len(found)))
        assert all(size == room for size in sizes[:-1])


def test_two_buffers_hold_both_sides_of_the_largest_bucket(found: Found) -> None:
    largest = len(found) * max(shares(found, "stage 3").values()) * 4
    assert found[0]["stage 3"]["buffers"] == [2, -(-largest // 64) * 64 + largest]


# ---- weights after the step ----------------------------------------------------------------------


def updates(found: Found, case: str) -> list[list[Any]]:
    """(collective, unit, bytes) of what brought the last step's weights to all ranks, where all
    weights stay present."""
    for rank in found:
        assert rank[case]["updates"] == found[0][case]["updates"]
    return [
        [op, what.removeprefix("gathering "), size] for op, what, size in found[0][case]["updates"]
    ]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_unit_s_new_weights_are_one_all_gather(stage: int, found: Found) -> None:
    assert updates(found, f"stage {stage}") == [
        ["all_gather", unit, len(found) * share * 4]
        for unit, share in shares(found, f"stage {stage}").items()
    ]


@pytest.mark.parametrize(
    ("case", "stage"), [("updates of 1000, stage 1", 1), ("updates of 70, stage 2", 2)]
)
def test_allgather_bucket_size_bounds_what_comes_in_one_call(
    case: str, stage: int, found: Found
) -> None:
    room = int(case.split()[2].rstrip(",")) // len(found) * len(found) * 4
    sent = updates(found, case)
    assert max(size for _, _, size in sent) == room
    assert sum(size for _, _, size in sent) == sum(
        size for _, _, size in updates(found, f"stage {stage}")
    )
    for unit, end in found[0][case]["ends"].items():
        spans = -(-end * 4 * len(found) // room)
        # what holds padding alone is not sent
        assert len([size for _, name, size in sent if name == unit]) <= spans
        assert len([size for _, name, size in sent if name == unit]) > spans // 2


# ---- order and overlap ---------------------------------------------------------------------------


def spans(found: Found, case: str) -> list[tuple[str, int, int]]:
    return [(name, start, end) for _, name, start, end, _ in found[0][case]["events"]]


@pytest.mark.parametrize("case", ["stage 1", "stage 2", "stage 3", "buckets of 1000", "stage 0"])
def test_a_reduction_is_under_way_when_the_next_begins(case: str, found: Found) -> None:
    each = spans(found, case)
    assert all(later[1] < earlier[2] for earlier, later in itertools.pairwise(each))


def test_units_are_reduced_as_backward_answers_them(found: Found) -> None:
    layers = [f"layers.{i}" for i in (2, 1, 0)]
    assert [name for name, _, _ in spans(found, "stage 3")] == [
        "head",
        *layers,
        "embed",
        "persistent",
    ]
    assert [name for name, _, _ in spans(found, "stage 2")] == ["head", *layers, "embed"]


# ---- accumulation --------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", range(4))
def test_no_sync_reduces_once_where_gradients_have_a_place(stage: int, found: Found) -> None:
    """Below stage 2 in `p.grad`; above there is room for a rank's own part alone, so every
    micro-batch is reduced."""
    every, held = (
        payloads(found, f"accumulated, stage {stage}"),
        payloads(found, f"no_sync, stage {stage}"),
    )
    assert len(every) == NUM_MICRO * len(held) if stage < 2 else every == held


# ---- parameters without gradients ----------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [name for name in CASES if "differ" in name])
def test_what_no_rank_used_is_not_stepped_and_what_one_used_is(case: str, found: Found) -> None:
    for rank in found:
        steps = rank[case]["steps"]
        assert steps == found[0][case]["steps"]
        is_used = {name: not name.split("ways.")[-1].startswith("3") for name in steps}
        if len(found) == 2:
            is_used = {
                name: used and not name.split("ways.")[-1].startswith("2")
                for name, used in is_used.items()
            }
        if "ranks" not in case:
            is_used = {
                name: used and not name.startswith("ways.") for name, used in is_used.items()
            }
        assert {name: num_steps > 0 for name, num_steps in steps.items()} == is_used


def test_unused_parameters_end_training_on_all_ranks_with_their_names(found: Found) -> None:
    for case, first in (
        ("unused is an error", "block.0.ways."),
        ("unused is an error, stage 3", "block.0.ways."),
    ):
        errors = {rank[case]["error"] for rank in found}
        assert len(errors) == 1
        (error,) = errors
        assert "took no part in the loss on any rank" in error
        assert f"{first}3" in error
        assert f"{first}0" not in error
        assert "ignore_unused_parameters" in error
