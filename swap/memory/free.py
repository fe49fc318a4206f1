"""Free: memory that this process may still take, as the kernel tells it."""

from __future__ import annotations

from tiermem.swap.base.proc import bytes_in, own_cgroup, read_table, read_word


def free_host_bytes() -> int:
    """Bytes that can be had now without swapping: of the machine, and of every cgroup around this
    process, where files that nobody uses count as free."""
    left = [bytes_in(read_table("/proc/meminfo"), "MemAvailable")]
    for controller, limit, usage, cache in (
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ("", "memory.max", "memory.current", "inactive_file"),
    ):
        own = own_cgroup(controller)
        for folder in () if own is None else (own, *own.parents):
            most = read_word(folder / limit)
            used = read_word(folder / usage)
            if most.isdigit() and used.isdigit():
                stat = read_word(folder / "memory.stat")
                unused = dict(line.split() for line in stat.splitlines()).get(cache, 0)
                left.append(max(0, int(most) - int(used) + int(unused)))
    return min(left)
