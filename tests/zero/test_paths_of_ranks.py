"""Do the ranks of a node share what its paths may hold, and does a policy take paths in any
spelling?"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks import topology
from tiermem.ranks.topology import paths_of_rank
from tiermem.swap.disk.paths import NvmePath

MIB = 1 << 20


@pytest.mark.parametrize(
    "paths", ["/a", Path("/a"), ["/a"], NvmePath(Path("/a")), (NvmePath(Path("/a")),)]
)
def test_policy_takes_one_path_in_any_spelling(
    paths: str | Path | list[str] | NvmePath | tuple[NvmePath, ...],
) -> None:
    assert OffloadPolicy(optim=Tier.NVME, paths=paths).paths == (NvmePath(Path("/a")),)


def test_policy_keeps_caps_and_weights() -> None:
    given = (NvmePath(Path("/a"), 5 * MIB, 1.5), NvmePath(Path("/b"), None, 0.5))
    assert OffloadPolicy(optim=Tier.NVME, paths=given).paths == given


def test_caps_are_divided_by_the_ranks_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "ranks_per_node", lambda: 4)
    given = [
        NvmePath(Path("/a"), 10 * MIB, 2.0),
        NvmePath(Path("/b"), weight=1.0),
        NvmePath(Path("/c"), 3, 1.0),
    ]
    assert paths_of_rank(given) == (
        NvmePath(Path("/a"), 10 * MIB // 4, 2.0),
        NvmePath(Path("/b"), None, 1.0),
        NvmePath(Path("/c"), 1, 1.0),
    )


def test_one_process_has_the_whole_cap() -> None:
    assert paths_of_rank("/a") == (NvmePath(Path("/a")),)
    assert paths_of_rank(NvmePath(Path("/a"), MIB)) == (NvmePath(Path("/a"), MIB),)


def test_states_within_the_caps_are_dealt_over_both_paths(tmp_path: Path) -> None:
    paths = [
        NvmePath(tmp_path / name, max_bytes, 1.0)
        for name, max_bytes in (("a", 64 * MIB), ("b", None))
    ]
    for each in paths:
        each.path.mkdir()
    policy = OffloadPolicy(params=Tier.NVME, paths=paths, persistence_numel=0)
    with tiermem.shard(nn.Sequential(*[nn.Linear(300, 300) for _ in range(4)]), policy) as shards:
        assert all(path.used_bytes > 0 for path in shards.store.stats().paths)
    assert all(list(each.path.iterdir()) == [] for each in paths)


def test_dealing_over_paths_changes_no_bit(tmp_path: Path) -> None:
    def train(paths: list[NvmePath]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(70, 70) for _ in range(4)])
        policy = OffloadPolicy(
            params=Tier.NVME, optim=Tier.NVME, paths=paths, persistence_numel=0, tile_numel=1000
        )
        with tiermem.shard(model, policy) as shards:
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            losses = []
            for _ in range(3):
                loss = model(torch.ones(2, 70)).square().mean()
                loss.backward()
                optim.step()
                optim.zero_grad()
                losses.append(loss.detach())
            num_used = sum(path.written_bytes > 0 for path in shards.store.stats().paths)
            assert num_used == len(paths)
            return [*losses, *(shards.weight(param) for param in model.parameters())]

    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    alone = train([NvmePath(folders[0])])
    dealt = train(
        [
            NvmePath(folders[0], weight=1.0),
            NvmePath(folders[1], 256 << 10, 5.0),
            NvmePath(folders[2], weight=2.0),
        ]
    )
    assert all(torch.equal(one, other) for one, other in zip(alone, dealt, strict=True))


def test_caps_below_the_plan_are_refused_before_any_weight_moves(tmp_path: Path) -> None:
    policy = OffloadPolicy(params=Tier.NVME, paths=NvmePath(tmp_path, 4096), persistence_numel=0)
    model = nn.Linear(300, 300)
    before = model.weight.detach().clone()
    with pytest.raises(OSError, match="the paths' caps leave 4096") as refusal:
        tiermem.shard(model, policy)
    assert refusal.value.errno == errno.ENOSPC
    assert (model.weight == before).all()
    assert list(tmp_path.iterdir()) == []
