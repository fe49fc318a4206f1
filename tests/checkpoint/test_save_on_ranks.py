"""Do several ranks save one whole checkpoint, or all of them none?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import asked, launch
from save_on_ranks import CASES, FAULTS

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return launch(
        HERE / "save_on_ranks.py",
        2,
        tmp_path_factory.mktemp("ranks"),
        str(tmp_path_factory.mktemp("nvme")),
        *asked(request, "case"),
    )


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", CASES)
def test_every_state_of_every_rank_is_saved_once_and_stays(
    found: list[dict[str, Any]], case: str
) -> None:
    for each in found:
        assert (
            each[case]["wrong"] == []
            and each[case]["stays"]
            and each[case]["own"]
            and each[case]["is_other"]
        )
    assert found[0][case]["keys"] == found[1][case]["keys"]
    due = {
        ("layers.0.weight", "exp_avg"),
        ("scale", "exp_avg_sq"),
        ("frozen.bias", "weight"),
        ("norm.running_var", "weight.rank1"),
    }
    assert due <= set(found[0][case]["keys"])
    numels = found[0][case]["numels"]
    size = 2 if case in ("tiny", "initial masters") else 4
    assert numels["embed.weight", "weight"] == 37 * 13 * size
    if case == "tiny":  # 241 and 240 elements: blocks of 64 are counted on each rank
        assert (
            numels["embed.weight", "exp_avg"] == 481
            and numels["embed.weight", "exp_avg.scales"] == 4 + 4
        )
    if case == "frozen in 8 bits":
        assert numels["frozen.weight", "weight"] == 169


def test_checksums_of_blocks_that_tiles_and_ranks_cut_are_put_together(
    found: list[dict[str, Any]],
) -> None:
    for each in found:
        assert each["blocks"] == {"wrong": [], "moved": (0, 0), "bytes": 1031 * 523 * 4}


def test_an_error_on_one_rank_is_told_on_both_and_leaves_the_older_tag(
    found: list[dict[str, Any]],
) -> None:
    for rank, each in enumerate(found):
        *faults, wrong_after = each["faults"]
        assert wrong_after == []
        for number, ((failing, _, ending), (said, is_whole, files, left, same_room)) in enumerate(
            zip(FAULTS, faults, strict=True)
        ):
            assert said.startswith("28 ") and "No space left" in said, (ending, said)
            assert rank == failing or f"rank {failing}" in said
            assert is_whole and same_room, ending
            first = ["manifest-1.json"] if rank == 0 else []
            assert files == sorted(
                ["lock", "segment.bin", f"part-1-{rank}.json", "data-1.bin", *first]
            ), (
                number,
                ending,
            )
            assert left == ["first", "first/README.txt", "first/tiermem.json", "latest"], ending


def test_ranks_make_a_step_durable_together_at_the_next_backward(
    found: list[dict[str, Any]],
) -> None:
    first, second = (each["steps"] for each in found)
    assert first["two steps"] == first["looked at"] == ["manifest-1.json"]
    for number in (0, 1):
        assert first[f"a backward that fails on {number}"] == ["manifest-1.json"]
        for rank, each in enumerate((first, second)):
            assert "No space left" in each[f"error of {number}"]
            assert rank == number or f"rank {number}" in each[f"error of {number}"]
    assert first["waited"] == ["manifest-4.json"] and first["wrong"] == [[]]
    assert first["closed"] == ["manifest-5.json"]
    assert first["closed by an exception"] == ["manifest-1.json"]


def test_ranks_that_ask_for_different_things_are_told(found: list[dict[str, Any]]) -> None:
    warned, failed, latest, state, buffers, *files = found[0]["apart"]
    assert "the tag is 'tag0' on rank 0 and 'tag1' on rank 1: saved as 'tag0'" in warned
    assert "ValueError: the tag is 'tag0' on rank 0 and 'tag1' on rank 1" in failed
    assert "save_latest is True on rank 0 and False on rank 1" in latest
    assert "rank 1: TypeError" in state and "client_state['x']" in state
    assert "weight of seen: rank 0 has 3 elements of fp32, rank 1 has 4 elements of fp32" in buffers
    assert files == ["latest", "tag0"]
    assert found[1]["apart"][0] == "" and found[1]["apart"][3].startswith(
        "TypeError: client_state['x']"
    )


def test_codes_that_differ_between_ranks_keep_their_scales(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert {"exp_avg", "exp_avg_sq"} <= each["beside"].keys() and all(each["beside"].values())


def test_an_engine_validates_tags_as_its_config_says(found: list[dict[str, Any]]) -> None:
    for each in found:
        failed, saved = each["engine"]
        assert "the tag is 'tag0' on rank 0 and 'tag1' on rank 1" in failed and saved == "saved"
