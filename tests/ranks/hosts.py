"""Two hosts on one machine: two network namespaces, joined by a cable (a veth pair), that see
nothing else.

Each is held open by a process that sleeps, so that nothing is left when it ends. Needs root and the
tools `unshare`, `nsenter` and `ip`; where the kernel does not allow it, `why_not` says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TOOLS = ("unshare", "nsenter", "ip")


def why_not() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    with contextlib.suppress(subprocess.SubprocessError, OSError), two_hosts():
        return ""
    return "network namespaces and veth pairs cannot be made here (they need root)"


@contextlib.contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """The commands that run what follows them on the first and on the second host: 10.77.0.1 and .2
    on device `cable`."""
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(_namespace()) for _ in range(2)]
        enter = [["nsenter", "-t", str(pid), "-n"] for pid in pids]
        _run(
            [
                "ip",
                "link",
                "add",
                "cable",
                "netns",
                str(pids[0]),
                "type",
                "veth",
                "peer",
                "cable",
                "netns",
                str(pids[1]),
            ]
        )
        for number, command in enumerate(enter, start=1):
            _run([*command, "ip", "address", "add", f"10.77.0.{number}/24", "dev", "cable"])
            _run([*command, "ip", "link", "set", "cable", "up"])
            _run([*command, "ip", "link", "set", "lo", "up"])
        yield enter


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """A process in a network namespace of its own; its id."""
    sleeper = subprocess.Popen(["unshare", "-n", "sleep", "600"])
    try:
        mine = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{sleeper.pid}/ns/net") == mine:
            if sleeper.poll() is not None:
                raise subprocess.SubprocessError("unshare -n failed")
        yield sleeper.pid
    finally:
        sleeper.kill()
        sleeper.wait()


def launch(
    script: Path, *args: str, ranks_per_host: int, timeout_s: float
) -> list[tuple[int, str]]:
    """Runs a script under torchrun on both hosts at once; (exit code, stderr) of each. Raises
    subprocess.TimeoutExpired."""
    with two_hosts() as enter:
        agents = [
            subprocess.Popen(
                [
                    *(
                        *command,
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        "--nnodes=2",
                        f"--node-rank={node}",
                    ),
                    *(
                        "--master-addr=10.77.0.1",
                        "--master-port=29500",
                        f"--nproc-per-node={ranks_per_host}",
                    ),
                    *(str(script), *args),
                ],
                env=os.environ | {"GLOO_SOCKET_IFNAME": "cable", "TP_SOCKET_IFNAME": "cable"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node, command in enumerate(enter)
        ]
        try:
            return [
                (agent.returncode, error)
                for agent in agents
                for _, error in [agent.communicate(timeout=timeout_s)]
            ]
        finally:
            for agent in agents:
                agent.terminate()  # it ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.communicate(timeout=20)
                agent.kill()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
