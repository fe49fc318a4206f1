"""What do three ranks gather for each key of stage 3, in which order, and how many bytes? One
launch, odd sizes, no divisors.

The tower: embed (61 x 31), four blocks of two matrices (97 x 31 each), head (61 x 31); what has at
most 100 elements persists.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from gather_cases import CASES, NUM_STEPS, RANKS
from launch import launch

HERE = Path(__file__).parent
UNITS = ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Found:
    out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
    found = launch(HERE / "gather_on_ranks.py", RANKS, out, str(nvme))
    assert not list(nvme.iterdir())
    return found


def whole_bytes(numels: list[int], itemsize: int = 4) -> int:
    """What an all-gather of some parameters fills: ceil(numel / ranks) elements of every rank."""
    return sum(-(-numel // RANKS) * RANKS * itemsize for numel in numels)


BYTES = {
    name: whole_bytes([61 * 31] if name in ("embed", "head") else [97 * 31, 31 * 97])
    for name in UNITS
}


def gathers(found: dict[str, Any], step: int) -> list[str]:
    """Names of the units gathered in a step, in the order in which the gathers began."""
    return [event[1] for event in found["steps"][step]["events"] if event[0] == "gather"]


def payloads(found: dict[str, Any], step: int) -> list[tuple[str, str, int]]:
    """(collective, unit, bytes) of every gather of a streamed unit in a step."""
    calls = [
        (op, what.removeprefix("gathering "), n)
        for op, what, n, _ in found["steps"][step]["payloads"]
    ]
    streamed = {name for name, _, _ in found["units"]} - {"persistent"}
    return [call for call in calls if call[1] in streamed]


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", CASES)
def test_no_key_changes_what_is_learnt(case: str, launched: Found) -> None:
    for found in (rank[case] for rank in launched):
        # sums of three numbers round, and Adam divides by small ones
        rel = 1e-4 if "autocast" not in case else 1e-2
        assert found["losses"] == pytest.approx(found["twin"], rel=rel)
    assert all(rank[case]["head"] == launched[0][case]["head"] for rank in launched)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if "autocast" not in c and "wandering" not in c and "persist" not in c],
)
def test_no_way_of_gathering_changes_a_bit(case: str, launched: Found) -> None:
    for rank in launched:
        assert rank[case]["losses"] == rank["base"]["losses"]
        assert rank[case]["head"] == rank["base"]["head"]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_gather_the_same_in_the_same_order(case: str, launched: Found) -> None:
    for step in range(NUM_STEPS):
        assert all(
            payloads(rank[case], step) == payloads(launched[0][case], step) for rank in launched
        )


# ---- payload -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["base", "nvme"])
def test_a_gather_is_one_call_and_fills_each_unit_once(case: str, launched: Found) -> None:
    for step in range(NUM_STEPS):
        for op, name, num_bytes in payloads(launched[0][case], step):
            assert (op, num_bytes) == ("all_gather", BYTES[name])


def test_single_parameters_are_gathered_one_by_one(launched: Found) -> None:
    calls = payloads(launched[0]["single"], 1)
    assert {n for _, _, n in calls} == {whole_bytes([61 * 31]), whole_bytes([97 * 31])}
    assert {name for _, name, _ in calls} == {
        "embed",
        "head",
        *(f"layers.{i}.{m}" for i in range(4) for m in ("up", "down")),
    }


def test_the_key_for_all_reduces_gathers_as_ever(launched: Found) -> None:
    assert payloads(launched[0]["all reduce"], 1) == payloads(launched[0]["base"], 1)


# ---- order ---------------------------------------------------------------------------------------

# of backward the embedding needs indices alone
NEXT_TO_A_BLOCK = ("forward embed", "gather head", "gather embed")
STEPS_OF_THE_TOWER = [
    *(
        "gather embed",
        "gather layers.0",
        "gather layers.1",
    ),  # as many as there are buffers; from step 2 on: by the step before
    *(
        "forward embed",
        "gather layers.2",
        "forward layers.0",
        "gather layers.3",
        "forward layers.1",
        "gather head",
    ),
    *(
        "forward layers.2",
        "forward layers.3",
        "forward head",
        "backward head",
        "gather layers.1",
        "backward layers.3",
    ),
    *(
        "gather layers.0",
        "backward layers.2",
        "backward layers.1",
        "backward layers.0",
        "backward embed",
    ),
]


def happenings(found: dict[str, Any], step: int) -> list[str]:
    """Gathers and uses of units in a step, in the order in which they began."""
    lanes = {"gather": "gather ", "unit": ""}
    return [
        lanes[event[0]] + event[1] for event in found["steps"][step]["events"] if event[0] in lanes
    ]


def num_hidden(found: dict[str, Any], step: int) -> tuple[int, int]:
    """(gathers that began before the use in front of theirs had ended, all gathers) of a step."""
    events = found["steps"][step]["events"]
    gathered = [(name, start) for lane, name, start, _, _ in events if lane == "gather"]
    uses = [
        (name.split(" ")[1], start, end) for lane, name, start, end, _ in events if lane == "unit"
    ]
    phase = next(start for lane, _, start, _, _ in events if lane == "forward")
    ends = [phase, *(end for _, _, end in uses)]  # of what is in front of each use
    hidden = 0
    for unit, began in gathered:
        index = next(
            i for i, (name, start, _) in enumerate(uses) if name == unit and start >= began
        )
        hidden += began <= ends[index]
    return hidden, len(gathered)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_two_steps_happen_in_this_order(step: int, launched: Found) -> None:
    for rank in launched:
        assert happenings(rank["base"], step) == STEPS_OF_THE_TOWER


@pytest.mark.parametrize(
    "case", ["base", "all reduce", "autocast", "nothing persists", "nvme", "autocast nvme"]
)
def test_every_gather_of_the_second_step_but_the_first_is_hidden(
    case: str, launched: Found
) -> None:
    for rank in launched:
        hidden, everything = num_hidden(rank[case], 1)
        assert hidden == everything - 1 > 5


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "count"), [("base", 3), ("prefetch of one", 2), ("no prefetch", 1), ("single", 1)]
)
def test_prefetch_bucket_size_says_how_much_is_gathered_ahead(
    case: str, count: int, launched: Found
) -> None:
    """With the first unit of a forward, which computes then; a step on CPUs begins no gather."""
    events = launched[0][case]["steps"][1]["events"]
    assert next(event[0] for event in events if event[0] in ("gather", "forward")) == "forward"
    first = next(start for lane, _, start, _, _ in events if lane == "unit")
    assert sum(lane == "gather" and start < first for lane, _, start, _, _ in events) == count


@pytest.mark.parametrize("case", ["no prefetch", "single"])
def test_without_prefetch_no_gather_is_hidden(case: str, launched: Found) -> None:
    assert num_hidden(launched[0][case], 1)[0] == 0


def test_max_live_parameters_keeps_two_blocks_from_being_live(launched: Found) -> None:
    """A block's layout is 8192 elements, embedding's and head's 4096: 13,000 hold one block with
    one of those."""
    for before, after in itertools.pairwise(happenings(launched[0]["few live"], 1)):
        # at once needed, or the embedding's use goes on beside it
        if before.startswith("gather layers"):
            assert after in (
                before.replace("gather", "forward"),
                before.replace("gather", "backward"),
                *NEXT_TO_A_BLOCK,
            )


def test_max_reuse_distance_of_zero_gives_every_unit_up_at_once(launched: Found) -> None:
    names = gathers(launched[0]["no reuse"], 1)
    # forward, backward
    assert {name: names.count(name) for name in UNITS} == dict.fromkeys(UNITS, 2) | {"embed": 1}
    assert len(gathers(launched[0]["base"], 1)) == 8  # the last two blocks and the head stay


@pytest.mark.parametrize(
    ("case", "persistent"),
    [
        ("base", [31] * 12 + [61] + [97] * 4),
        ("nothing persists", []),
        ("little persists", [31] * 9),
    ],
)
def test_persistence_thresholds_say_what_is_never_gathered(
    case: str, persistent: list[int], launched: Found
) -> None:
    assert (
        sorted(
            n
            for name, _, numels in launched[0][case]["units"]
            if name == "persistent"
            for n in numels
        )
        == persistent
    )
    streamed = {
        name: whole_bytes(numels)
        for name, _, numels in launched[0][case]["units"]
        if name != "persistent"
    }
    assert {name: n for _, name, n in payloads(launched[0][case], 1)} == streamed


# ---- memory --------------------------------------------------------------------------------------


def layout_bytes(numels: list[int], shards: int = 1) -> int:
    """A layout: every parameter on a multiple of 64 elements, the whole on one of 4096; fp32."""
    elements = sum(-(-(-(-numel // RANKS) * (RANKS // shards)) // 64) * 64 for numel in numels)
    return -(-elements // 4096) * 4096 * 4


def test_peak_is_shards_and_live_units_and_gradients_and_states(launched: Found) -> None:
    units = {name: numels for name, _, numels in launched[0]["base"]["units"]}
    shards = sum(layout_bytes(numels, RANKS) for numels in units.values())
    expected = (
        shards  # this rank's part of every parameter, the persistent ones' too
        + layout_bytes(units["persistent"])  # which are whole as well
        # one in use, two gathered ahead
        + 3 * max(layout_bytes(numels) for numels in units.values())
        + shards  # gradients, until the step
        # gradients on their way between ranks: two buckets
        + dict(launched[0]["base"]["rows"])["2 reduce buffers"]
        + 2 * shards  # two moments; the fp32 parameters are their own masters
    )
    for rank in launched:
        assert rank["base"]["peak_bytes"] == expected == sum(n for _, n in rank["base"]["rows"])


def test_single_gathers_live_in_two_buffers_of_one_matrix(launched: Found) -> None:
    """Gone: a buffer for what is fetched ahead, and the half of a block that is not in use."""
    rows = {case: dict(launched[0][case]["rows"]) for case in ("base", "single")}
    assert rows["base"]["3 unit buffers"] == 3 * layout_bytes([97 * 31, 31 * 97])
    assert rows["single"]["2 unit buffers"] == 2 * layout_bytes([97 * 31])
    assert launched[0]["single"]["peak_bytes"] == sum(rows["single"].values())


# ---- another order in every step -----------------------------------------------------------------


def test_an_order_that_changes_costs_only_gathers(launched: Found) -> None:
    for rank in launched:
        assert rank["wandering"]["losses"] == rank["wandering nvme"]["losses"]
        assert rank["wandering"]["head"] == rank["wandering nvme"]["head"]


# ---- cast before the gather ----------------------------------------------------------------------

LOWERED = ["layers.0", "layers.1", "layers.2", "layers.3", "head"]


@pytest.mark.parametrize("case", ["autocast", "autocast nvme"])
def test_weights_that_autocast_lowers_are_gathered_in_half_the_bytes(
    case: str, launched: Found
) -> None:
    for rank in launched:
        found = {name: num_bytes for _, name, num_bytes in payloads(rank[case], 1)}
        assert found == {name: n // 2 if name in LOWERED else n for name, n in BYTES.items()}


def test_casting_before_the_gather_changes_no_bit(launched: Found) -> None:
    for rank in launched:
        before, after = (
            rank["autocast, sent in bf16"],
            rank["autocast, no safe modules, sent in bf16"],
        )
        assert before["losses"] == after["losses"]
        assert before["head"] == after["head"]


def test_autograd_keeps_no_copy_of_a_lowered_weight(launched: Found) -> None:
    copies = 2 * (4 * 2 * 97 * 31 + 61 * 31)  # bf16: two matrices of each block, and the head
    for rank in launched:
        assert (
            rank["autocast, no safe modules"]["saved_bytes"] - rank["autocast"]["saved_bytes"]
            == copies
        )


def test_a_lowered_parameter_is_fp32_at_rest(launched: Found) -> None:
    found = launched[0]["autocast"]
    assert set(found["dtypes_at_rest"].values()) == {"torch.float32"}
    assert found["dtypes_after_forward"]["head.weight"] == "torch.bfloat16"
    assert found["dtypes_after_forward"]["layers.0.norm.weight"] == "torch.float32"


def test_a_weight_that_an_embedding_uses_too_is_not_lowered(launched: Found) -> None:
    dtypes = {name: dtype for name, dtype, _ in launched[0]["autocast tied"]["units"]}
    assert dtypes["embed"] == "torch.float32"
    assert dtypes["layers.0"] == "torch.bfloat16"
