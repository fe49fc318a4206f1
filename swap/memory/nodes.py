"""Memory nodes (NUMA): which cores a rank works on, and which memory is near to them.

    node 0   cores 0-15, memory, accelerators 0 1        ranks 0 1 share cores 0-15, their arenas lie in node 0
    node 1   cores 16-31, memory, accelerators 2 3       ranks 2 3 share cores 16-31, in node 1

A rank with an accelerator works on the accelerator's node; ranks without one are dealt over the
nodes in order. Nodes are read from sysfs. On a machine with one node, or without sysfs, nothing
changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

SYSFS = Path("/sys")


def read_nodes(sysfs: Path) -> dict[int, frozenset[int]]:
    """The cores of every node that has cores, by the node's number. Empty when the kernel does not
    say."""
    found = {}
    for folder in sysfs.glob("devices/system/node/node[0-9]*"):
        try:
            cores = parse_cores((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


def parse_cores(text: str) -> frozenset[int]:
    """The cores of a list such as "0-3,8". Raises ValueError."""
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(
        core for first, _, last in parts for core in range(int(first), int(last or first) + 1)
    )


def node_of_pci(address: str | None, sysfs: Path) -> int | None:
    """The node of a PCI device; None when the kernel does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / str(address) / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def deal_cores(
    cores: Iterable[int],
    nodes: Mapping[int, frozenset[int]],
    wanted: Sequence[int | None],
    rank: int,
) -> tuple[int, ...]:
    """The cores of one of the ranks that share `cores`; no core has two ranks. Empty with fewer
    cores than ranks.

    wanted: the node of each rank's accelerator; None where one is not known, then nobody's counts.
    """
    near = sorted(cores, key=lambda core: (node_of_cores([core], nodes) or 0, core))
    index = rank
    ranks = len(wanted)
    by_node = {node: [core for core in near if core in held] for node, held in nodes.items()}
    if all(
        node is not None and len(by_node.get(node, ())) >= wanted.count(node) for node in wanted
    ):
        near = next(held for node, held in by_node.items() if node == wanted[rank])
        index = wanted[:rank].count(wanted[rank])
        ranks = wanted.count(wanted[rank])
    share = len(near) // ranks
    return tuple(near[index * share : (index + 1) * share])


def node_of_cores(cores: Iterable[int], nodes: Mapping[int, frozenset[int]]) -> int | None:
    """The node that holds all of the cores; None for no cores, for cores of several nodes, and on a
    machine of one node."""
    wanted = frozenset(cores)
    holders = [node for node, held in nodes.items() if wanted and wanted <= held]
    return holders[0] if holders and len(nodes) > 1 else None
