"""Which ranks share a copy of the states, which hold copies, and which are near? The arithmetic,
without processes."""

from __future__ import annotations

import itertools

import pytest

from tiermem import OffloadPolicy
from tiermem.ranks.topology import Layout, Topology, arrange, plan_layout

MICS = OffloadPolicy(shard_group_size=4)
MICS_TWO_STAGES = OffloadPolicy(shard_group_size=4, two_stage_gather=True)
HPZ = OffloadPolicy(secondary_group_size=4)
PAIRS_IN_FOURS = OffloadPolicy(shard_group_size=4, secondary_group_size=2)


@pytest.mark.parametrize(
    ("policy", "ranks_on_node", "expected"),
    [
        (OffloadPolicy(stage=0), 8, Layout(8, 1, 1)),
        (OffloadPolicy(stage=1), 4, Layout(1, 1, 8)),
        (OffloadPolicy(), 4, Layout(1, 1, 8)),
        (OffloadPolicy(shard_group_size=8), 4, Layout(1, 1, 8)),
        (OffloadPolicy(shard_group_size=1), 4, Layout(8, 1, 1)),
        (MICS, 4, Layout(2, 1, 4)),
        (MICS, 2, Layout(2, 1, 4)),
        (MICS_TWO_STAGES, 2, Layout(2, 2, 2)),
        (MICS_TWO_STAGES, 4, Layout(2, 1, 4)),
        (MICS_TWO_STAGES, 8, Layout(2, 1, 4)),
        (MICS_TWO_STAGES, 3, Layout(2, 1, 4)),
        (MICS_TWO_STAGES, 1, Layout(2, 4, 1)),
        (HPZ, 8, Layout(1, 2, 4)),
        (PAIRS_IN_FOURS, 8, Layout(2, 2, 2)),
        (OffloadPolicy(quantised_reduction=True), 2, Layout(1, 4, 2)),
    ],
)
def test_eight_ranks_are_laid_out(
    policy: OffloadPolicy, ranks_on_node: int, expected: Layout
) -> None:
    assert plan_layout(8, policy, ranks_on_node) == expected


def test_peers_of_eight_ranks_are_a_literal_table() -> None:
    layout = Layout(2, 2, 2)
    assert [layout.peers(0, d) for d in ("replica", "across", "within", "shard")] == [
        [0, 4],
        [0, 2],
        [0, 1],
        [0, 1, 2, 3],
    ]
    assert [layout.peers(7, d) for d in ("replica", "across", "within", "shard")] == [
        [3, 7],
        [5, 7],
        [6, 7],
        [4, 5, 6, 7],
    ]
    assert layout.coordinates(6) == (1, 1, 0)


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 3), repeat=3)))
def test_every_dimension_splits_the_ranks_into_groups_that_agree(
    sizes: tuple[int, int, int],
) -> None:
    layout, world = Layout(*sizes), sizes[0] * sizes[1] * sizes[2]
    for dimension, size in zip(
        ("replica", "across", "within", "shard"), (*sizes, layout.num_shards), strict=True
    ):
        for rank in range(world):
            peers = layout.peers(rank, dimension)
            assert len(peers) == size and rank in peers and peers == sorted(peers)
            assert all(layout.peers(other, dimension) == peers for other in peers)
    assert sorted(layout.coordinates(rank) for rank in range(world)) == [
        layout.coordinates(rank) for rank in range(world)
    ]


@pytest.mark.parametrize(
    ("world", "policy", "said"),
    [
        (8, OffloadPolicy(shard_group_size=3), "8 = 2 x 3 + 2. Allowed are 1, 2, 4, 8"),
        (4, OffloadPolicy(shard_group_size=8), "does not divide the 4 data-parallel ranks"),
        (6, OffloadPolicy(secondary_group_size=4), "6 = 1 x 4 + 2. Allowed are 1, 2, 3, 6"),
        (
            8,
            OffloadPolicy(shard_group_size=4, secondary_group_size=8),
            "the 4 ranks that share the parameters",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_arithmetic(
    world: int, policy: OffloadPolicy, said: str
) -> None:
    with pytest.raises(ValueError, match="does not divide") as caught:
        plan_layout(world, policy, 2)
    assert said in str(caught.value)


def test_a_world_of_one_refuses_a_group_of_two_and_makes_no_group() -> None:
    alone = Topology(None, 0, 1, 1, 0)
    assert arrange(alone, OffloadPolicy(), 1) is alone
    with pytest.raises(ValueError, match="mics_shard_size in a config"):
        arrange(alone, OffloadPolicy(shard_group_size=2), 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stage": 2, "shard_group_size": 2}, "shard_group_size=2 with stage 2"),
        ({"stage": 1, "secondary_group_size": 2}, "secondary_group_size=2 with stage 1"),
        ({"stage": 2, "quantised_gather": True}, "quantised_gather=True with stage 2"),
        ({"stage": 1, "quantised_reduction": True}, "gradients are sharded in stages 2 and 3"),
        ({"two_stage_gather": True}, "two_stage_gather=True without shard_group_size"),
        ({"shard_group_size": 0}, "1 or more"),
        ({"secondary_group_size": True}, "number of ranks"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OffloadPolicy(**fields)  # type: ignore[arg-type]
