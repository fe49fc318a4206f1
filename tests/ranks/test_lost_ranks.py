"""When a rank dies, raises, hangs or strays, do all stop long before the time-out, name it, and
leave nothing behind?

One run of lose_ranks.py holds every world that is asked for; the time-out of the ranks is 60 seconds, that of the run
90.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fork_server
import pytest
from launch import asked

SCRIPT = Path(__file__).parent / "lose_ranks.py"
DEATHS = [
    "1 of 2 dies in forward, nvme",
    "0 of 2 dies in backward, nvme",
    "1 of 3 dies in step, nvme",
    "0 of 3 dies in forward, memory",
    "2 of 3 dies between steps, memory",
    "1 of 2 dies with a child, memory",
    "1 of 2 dies seeing gather, nvme",
    "0 of 2 dies seeing reduce, memory",
    "1 of 2 dies seeing compute, nvme",
    "1 of 2 dies amid a message, memory",
    "0 of 2 dies amid a message, memory",
    "1 of 2 dies building, nvme",
    "0 of 2 dies building, memory",
    "1 of 2 dies before, memory",
    "1 of 2 dies agreeing, memory",
    "1 of 3 dies in step, far from 2, memory",
]
STRAYS = [
    "1 of 2 turns, memory",
    "1 of 3 skips, nvme",
    "1 of 3 skips, 1 asks late, memory",
    "0 of 3 repeats, memory",
]
ALONE = ["1 of 2 raises, nvme", "1 of 2 hangs, memory", "0 of 2 saves alone, memory"]
Found = tuple[dict[str, list[dict[str, Any]]], Path]


def run(out: Path, *words: str | int) -> Found:
    done = fork_server.run([str(SCRIPT), str(out), *map(str, words)], 150)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "found.json").read_text()), out


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    deaths, strays = asked(request, "death"), asked(request, "world")
    return run(tmp_path_factory.mktemp("worlds"), *deaths, *strays, *ALONE)


def assert_survivors_name(ranks: list[dict[str, Any]], who: int) -> None:
    assert ranks[who]["how"] == "killed"
    for rank, ended in enumerate(ranks):
        if rank != who:
            assert (ended["how"], ended["kind"]) == ("raised", "RankLost"), ended["trace"]
            assert f"rank {who} (" in ended["message"]
            assert "is gone" in ended["message"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("death", DEATHS)
def test_survivors_of_a_killed_rank_name_it(death: str, found: Found) -> None:
    assert_survivors_name(found[0][death], int(death[0]))


def test_survivors_of_a_rank_that_raises_name_it(found: Found) -> None:
    first, second = found[0]["1 of 2 raises, nvme"]
    assert (second["how"], second["kind"], second["message"]) == (
        "raised",
        "LookupError",
        "this rank's own trouble",
    )
    assert first["kind"] == "RankLost"
    assert "rank 1" in first["message"]


def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_policy_says(found: Found) -> None:
    assert "one was slower than timeout_s" in found[0]["1 of 2 hangs, memory"][0]["message"]


@pytest.mark.parametrize("world", STRAYS)
def test_ranks_that_use_other_layers_are_told_where_they_parted(world: str, found: Found) -> None:
    calls = set()
    for rank in found[0][world]:
        assert (rank["how"], rank["kind"]) == ("raised", "RanksDiffer")
        difference = rank["message"].partition("ranks have gone different ways: ")[2]
        said = dict(re.findall(r"'(\w+ \S+) \(\w+\)' on rank (\d)", difference))
        assert len(said) == 2  # with one that went the same way, whoever said so first
        assert world[0] in said.values()
        assert "tiermem.utils.set_z3_leaf_modules" in difference
        calls.add(frozenset(said))
    assert len(calls) == 1
    assert "layers." in str(calls)


def test_a_rank_that_saves_alone_is_named(found: Found) -> None:
    for rank in found[0]["0 of 2 saves alone, memory"]:
        assert (rank["how"], rank["kind"]) == ("raised", "RanksDiffer")
        assert "'comparing what ranks were given (all_gather_object)' on rank 0" in rank["message"]


def test_survivors_leave_no_thread_and_no_descriptor(found: Found) -> None:
    left = {
        f"{world}, rank {rank}": e["left"]
        for world, ended in found[0].items()
        for rank, e in enumerate(ended)
    }
    assert {place: names for place, names in left.items() if names} == {}


def test_survivors_leave_no_folder(found: Found) -> None:
    """What a killed rank had on the path stays, for the next run there to name; nothing of the
    others does."""
    for number, (world, ended) in enumerate(found[0].items()):
        killed = sum(rank["how"] == "killed" for rank in ended)
        assert len(list((found[1] / str(number) / "nvme").glob("tiermem-*"))) <= killed, world


@pytest.mark.slow
def test_survivors_of_a_rank_killed_at_a_random_moment_name_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for first in (0, 8, 16):
        worlds, _ = run(tmp_path_factory.mktemp("worlds"), *range(first, first + 8))
        for ranks in worlds.values():
            (who,) = (rank for rank, ended in enumerate(ranks) if ended["how"] == "killed")
            assert_survivors_name(ranks, who)
