"""When one rank has another config, model or way through the program, do all stop with an error
that names the difference?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fork_server
import pytest

SCRIPT = Path(__file__).parent / "disagree_ranks.py"
SAID = {
    "another policy": "policy.persistence_numel is 50 on rank 0 and 51 on rank 1",
    "another stage": "policy.stage is 3 on rank 0 and 2 on rank 1",
    "another model": "parameter embed.weight is (61, 31) torch.float32 on rank 0 and not there on rank 1",
    "other shapes": "parameter first.weight is (97, 31) torch.float32 on rank 0 and (96, 31) torch.float32 on rank 1",
    "another order": "is parameter first.weight on rank 0 and parameter second.weight on rank 1: the same in another order",
    "another dtype": "parameter embed.weight is (61, 31) torch.float32 on rank 0 and (61, 31) torch.bfloat16 on rank 1",
    "other frozen parameters": "parameter head.weight is (61, 31) torch.float32 on rank 0 and (61, 31) torch.float32, frozen",
    "another MiCS group": "policy.shard_group_size is None on rank 0 and 1 on rank 1",
    "another mesh": "policy.shard_group_size is 3 on rank 0 and 1 on rank 1",
    "a second copy": "policy.secondary_group_size is 1 on rank 0 and 3 on rank 1",
    "another way to gather": "policy.quantised_gather is False on rank 0 and True on rank 1",
    "another MiCS group in the config": "zero_optimization.mics_shard_size is 3 on rank 0 and 1 on rank 1",
    "another number of ranks on its node": "ranks on a node (LOCAL_WORLD_SIZE) is 3 on rank 0 and 1 on rank 1",
    "another accumulation": "gradient_accumulation_steps is 1 on rank 0 and 2 on rank 1",
    "another clipping": "gradient_clipping is 1.0 on rank 0 and 0.5 on rank 1",
    "another learning rate": "optimizer.params.lr is 0.001 on rank 0 and 0.1 on rank 1",
    "another schedule": "scheduler.params is {'warmup_num_steps': 10} on rank 0 and {'warmup_num_steps': 9} on rank 1",
    "other parameter groups": "parameter group of embed.weight is 0 on rank 0 and 1 on rank 1",
    "other shapes under Init": "parameter number 0 is (97, 31) torch.float32 on rank 0 and (96, 31) torch.float32 on rank 1",
    "fewer layers under Init": "and rank 1 at tiermem.shard",
    "no Init": "rank 0 is at parameter number 0 under zero.Init ((97, 31) torch.float32) and rank 1 at tiermem.shard",
}


@pytest.fixture(scope="module")
def worlds(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, list[dict[str, Any]]], Path]:
    out = tmp_path_factory.mktemp("worlds")
    done = fork_server.run([str(SCRIPT), str(out)], 150)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "found.json").read_text()), out


@pytest.fixture(scope="module")
def ended(
    worlds: tuple[dict[str, list[dict[str, Any]]], Path],
) -> tuple[list[dict[str, Any]], Path]:
    return worlds[0]["disagreeing"], worlds[1]


@pytest.mark.parametrize("case", SAID)
def test_every_rank_names_the_difference(
    case: str, ended: tuple[list[dict[str, Any]], Path]
) -> None:
    messages = [rank["result"][case] for rank in ended[0]]
    assert len(messages) == 3
    for message in messages:
        assert message.startswith("ValueError: ranks disagree: ")
        assert SAID[case] in message


def test_nothing_is_left_of_what_was_refused(ended: tuple[list[dict[str, Any]], Path]) -> None:
    assert [rank["how"] for rank in ended[0]] == ["returned"] * 3
    assert [rank["left"] for rank in ended[0]] == [[]] * 3
    assert not list((ended[1] / "0" / "nvme").iterdir())


def test_ranks_with_different_groups_say_so_long_before_the_time_out(
    worlds: tuple[dict[str, list[dict[str, Any]]], Path],
) -> None:
    for rank in worlds[0]["other groups"]:
        assert (rank["how"], rank["kind"]) == ("raised", "OtherGroups")
        assert "ranks disagree: rank " in rank["message"]
        assert "among ranks [0, 1, 2]" in rank["message"] or "among [0, 1, 2]" in rank["message"]
        assert "[0, 1]" in rank["message"]


def test_a_rank_that_is_late_is_waited_for(
    worlds: tuple[dict[str, list[dict[str, Any]]], Path],
) -> None:
    assert [(rank["how"], rank["message"]) for rank in worlds[0]["one is late"]] == [
        ("returned", "")
    ] * 3
