"""Which cores does each rank get on a machine of several memory nodes, and where does its memory
lie?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("_tiermem_native")

from tiermem.ranks import topology
from tiermem.ranks.topology import fair_cores, near_workers
from tiermem.swap.memory.arena import Arena
from tiermem.swap.memory.nodes import (
    deal_cores,
    node_of_cores,
    node_of_pci,
    parse_cores,
    read_nodes,
)

TWO = {0: frozenset(range(8)), 1: frozenset(range(8, 16))}
WOVEN = {0: frozenset(range(0, 16, 2)), 1: frozenset(range(1, 16, 2))}
ALL = range(16)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two nodes that share this process's cores, a node without cores, and an accelerator on the
    second."""
    mine = sorted(os.sched_getaffinity(0))
    half = max(1, len(mine) // 2)
    lists = {0: mine[:half], 1: mine[half:] or [4095], 2: []}
    for node, cores in lists.items():
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, cores)) + "\n")
    for address, node in (("0000:3b:00.0", 1), ("0000:3c:00.0", -1)):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_nodes_are_read_from_sysfs(sysfs: Path, tmp_path: Path) -> None:
    assert list(read_nodes(sysfs)) == [0, 1]  # a node of memory alone has no cores to give
    assert read_nodes(tmp_path / "absent") == {}
    assert parse_cores("0-3,8\n") == {0, 1, 2, 3, 8}
    assert node_of_pci("0000:3b:00.0", sysfs) == 1
    assert node_of_pci("0000:3c:00.0", sysfs) is None  # the kernel does not say
    assert node_of_pci("0000:3d:00.0", sysfs) is None
    assert node_of_pci(None, sysfs) is None


@pytest.mark.parametrize(
    ("nodes", "wanted", "shares"),
    [
        ({}, [None, None], [range(8), range(8, 16)]),
        ({0: frozenset(ALL)}, [0, 0], [range(8), range(8, 16)]),
        (TWO, [None], [ALL]),
        (TWO, [None, None], [range(8), range(8, 16)]),
        (WOVEN, [None, None], [range(0, 16, 2), range(1, 16, 2)]),
        (TWO, [1], [range(8, 16)]),
        (TWO, [1, 0], [range(8, 16), range(8)]),
        (TWO, [0, 0, 1, 1], [range(4), range(4, 8), range(8, 12), range(12, 16)]),
        (TWO, [0, 0, 1], [range(4), range(4, 8), range(8, 16)]),
        (TWO, [0, None], [range(8), range(8, 16)]),  # one is not known: dealt in order
        (TWO, [7, 7], [range(8), range(8, 16)]),
        (TWO, [0] * 16, [[core] for core in ALL]),  # more ranks than the node has cores
    ],
)
def test_ranks_work_on_their_accelerators_node_and_share_no_core(
    nodes: dict[int, frozenset[int]], wanted: list[int | None], shares: list[list[int]]
) -> None:
    assert [deal_cores(ALL, nodes, wanted, rank) for rank in range(len(wanted))] == [
        tuple(share) for share in shares
    ]


def test_too_few_cores_are_dealt_to_nobody() -> None:
    assert deal_cores([3], TWO, [None, None], 1) == ()


def test_a_node_is_named_only_where_there_are_several() -> None:
    assert node_of_cores([8, 9], TWO) == 1
    assert node_of_cores([7, 8], TWO) is None
    assert node_of_cores([], TWO) is None
    assert node_of_cores([1, 2], {0: frozenset(ALL)}) is None


def test_a_lone_rank_takes_the_cores_of_its_accelerators_node(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "pci_addresses", lambda device, ranks: ["0000:3b:00.0"] * ranks)
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) == 1:
        pytest.skip("one core cannot be shared by two nodes")
    assert fair_cores(torch.device("cpu"), sysfs) == tuple(mine[len(mine) // 2 :])


def test_memory_prefers_the_node_of_the_cores(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    monkeypatch.setattr(Arena, "bind", lambda arena, node: bound.append(node))
    arena, nodes = Arena(1 << 20), read_nodes(sysfs)
    for cores in (nodes[0], nodes[1], nodes[0] | nodes[1]):  # of several nodes: none is preferred
        monkeypatch.setattr(
            topology, "fair_cores", lambda device, sysfs=None, cores=cores: tuple(cores)
        )
        open_workers(arena, sysfs)
    open_workers(arena, sysfs / "absent")
    assert bound == [0, 1]
    arena.close()


def test_a_kernel_that_refuses_a_node_is_no_error(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena(1 << 20)
    folder = sysfs / "devices/system/node/node1000"  # no machine has it: the kernel answers EINVAL
    folder.mkdir()
    (folder / "cpulist").write_text("4000\n")
    monkeypatch.setattr(topology, "fair_cores", lambda device, sysfs=None: (4000,))
    with caplog.at_level("INFO", "tiermem"):
        open_workers(arena, sysfs)
    assert "node 1000" in caplog.text
    slot = arena.take(4096)
    slot.tensor.fill_(3)
    arena.give_back(slot)
    arena.close()


def open_workers(arena: Arena, sysfs: Path) -> None:
    """What near_workers does to the arena; no thread is started, since the cores are not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "Workers", lambda threads, cores: None)
        near_workers(torch.device("cpu"), arena, sysfs)
