"""MemoryLimit: a cap on the memory of one child process and its descendants, in force before its
program is loaded.

Four kinds are tried in this order; `why` says which one is in force and why the earlier ones
failed:

    cgroup-v1      <memory hierarchy>/<own cgroup>/tiermem-<pid>-<n>: limit_in_bytes, memsw (no swap), swappiness 0
    cgroup-v2      the same below a cgroup whose memory controller is delegated: memory.max, memory.swap.max 0
    systemd-scope  `systemd-run --user --scope -p MemoryMax= -p MemorySwapMax=0`
    watch          the kernel enforces no cap; the launcher samples the process tree and kills it: a run may exceed the cap
                   between two samples

A child joins the cgroup by writing its own pid before exec, so the first page of its program counts
already. The kernel also charges page cache to a cgroup: `peak_bytes` includes it, `anonymous_bytes`
does not. `close()` removes the cgroup. The next launcher removes the cgroups of killed launchers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.swap.base.proc import own_cgroup, read_word
from tiermem.swap.memory.free import free_host_bytes
from tiermem.tools.words import format_bytes, parse_bytes

KINDS = ("cgroup-v1", "cgroup-v2", "systemd-scope", "watch")
_PREFIX = "tiermem-"
_serial = itertools.count()


class Charge(NamedTuple):
    """What the kernel says of a capped group; None where it says nothing."""

    usage_bytes: int | None = None  # charged now, page cache included
    peak_bytes: int | None = None  # the most ever charged
    anonymous_bytes: int | None = None  # now: not page cache
    num_kills: int | None = None  # processes the kernel killed for memory
    # times the cap was reached (mostly answered by dropping page cache)
    num_hits: int | None = None


class MemoryLimit(contextlib.AbstractContextManager["MemoryLimit"]):
    """No limit, and the base of those that are one.

    Use as a context manager, or `close()`; the child must have ended by then, what is left of it is
    killed.
    """

    kind = "none"

    def __init__(self, limit_bytes: int | None = None, why: str = "no cap was asked for") -> None:
        self.limit_bytes = limit_bytes
        self.why = why

    def __exit__(self, *error: object) -> None:
        self.close()

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command line that puts `command` under the cap before its first instruction."""
        return list(command)

    def attach(self, pid: int) -> None:
        """Tells which process was started, for kinds that find their cgroup by it."""

    def charge(self, in_full: bool) -> Charge:
        """The kernel's counts now: every field that the kernel can fill if `in_full`, else usage
        and peak, which cost less."""
        return Charge()

    def is_over(self, resident_bytes: int) -> bool:
        """Whether the launcher must stop the run: only where a watch of the process tree is the
        cap."""
        return (
            self.kind == "watch"
            and self.limit_bytes is not None
            and resident_bytes > self.limit_bytes
        )

    def close(self) -> None:
        """Removes what was made for the cap. Calling it twice does nothing."""


class CgroupLimit(MemoryLimit):
    """A memory cgroup of either version, made in `parent`.

    Raises:
        OSError: it cannot be made, limited or joined here.
    """

    _limit_file = ""
    """Of the cap."""
    _other_files: tuple[tuple[str, str], ...] = ()
    """Name and value, "{}" for the cap; kernels may lack them."""

    def __init__(self, parent: Path, limit_bytes: int, why: str) -> None:
        super().__init__(limit_bytes, why)
        _remove_dead(parent)
        self.folder = parent / f"{_PREFIX}{os.getpid()}-{next(_serial)}"
        self.folder.mkdir()
        try:
            self._set(self._limit_file, str(limit_bytes))
            for name, value in self._other_files:
                with contextlib.suppress(OSError):
                    self._set(name, value.format(limit_bytes))
            subprocess.run(self.wrap(["true"]), check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise OSError(f"{self.folder} cannot hold a process under a cap: {error}") from error

    def wrap(self, command: Sequence[str]) -> list[str]:
        join = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", join, str(self.folder / "cgroup.procs"), *command]

    def close(self) -> None:
        deadline = time.monotonic() + 5.0
        while self.folder.is_dir():
            try:
                self.folder.rmdir()
            except OSError:
                _kill_members(self.folder)
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _set(self, name: str, value: str) -> None:
        file = self.folder / name
        if not file.exists():
            raise OSError(f"{file} does not exist")
        file.write_text(value)


class CgroupV1Limit(CgroupLimit):
    """A cgroup of the version 1 memory hierarchy."""

    kind = "cgroup-v1"
    _limit_file = "memory.limit_in_bytes"
    _other_files = (("memory.memsw.limit_in_bytes", "{}"), ("memory.swappiness", "0"))

    def charge(self, in_full: bool) -> Charge:
        charge = Charge(
            _number(self.folder / "memory.usage_in_bytes"),
            _number(self.folder / "memory.max_usage_in_bytes"),
        )
        if not in_full:
            return charge
        kernel = _number(self.folder / "memory.kmem.usage_in_bytes") or 0
        anonymous = _table(self.folder / "memory.stat").get("total_rss")
        return charge._replace(
            anonymous_bytes=None if anonymous is None else anonymous + kernel,
            num_kills=_table(self.folder / "memory.oom_control").get("oom_kill"),
            num_hits=sum(
                _number(self.folder / f"memory.{name}failcnt") or 0 for name in ("", "memsw.")
            ),
        )


class CgroupV2Limit(CgroupLimit):
    """A cgroup of the unified hierarchy, where a memory controller is delegated to this user."""

    kind = "cgroup-v2"
    _limit_file = "memory.max"
    _other_files = (("memory.swap.max", "0"), ("memory.oom.group", "1"))

    def charge(self, in_full: bool) -> Charge:
        return _charge_v2(self.folder, in_full)


class SystemdScopeLimit(MemoryLimit):
    """A transient scope of the user's systemd.

    Raises:
        OSError: there is no user's systemd, or it cannot limit memory.
    """

    kind = "systemd-scope"

    def __init__(self, limit_bytes: int, why: str) -> None:
        super().__init__(limit_bytes, why)
        self._folder: Path | None = None
        self._last = Charge()
        self._unit = ""
        shown = self._try_out()
        if shown != str(limit_bytes):
            raise OSError(f"systemd-run --user --scope holds no cap: memory.max is {shown!r}")

    def wrap(self, command: Sequence[str]) -> list[str]:
        self._unit = f"{_PREFIX}{os.getpid()}-{next(_serial)}.scope"
        return [
            "systemd-run",
            "--user",
            "--scope",
            "--quiet",
            f"--unit={self._unit}",
            "-p",
            f"MemoryMax={self.limit_bytes}",
            "-p",
            "MemorySwapMax=0",
            "--",
            *command,
        ]

    def attach(self, pid: int) -> None:
        """Finds the scope's cgroup, which systemd-run enters before it execs the command."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            own = own_cgroup("", pid)
            if own is not None and own.name == self._unit:
                self._folder = own
                return
            time.sleep(0.01)

    def charge(self, in_full: bool) -> Charge:
        """The scope's folder goes with its last process: systemd remembers whether that was killed
        for memory."""
        if self._folder:
            now = _charge_v2(self._folder, in_full)
            self._last = Charge(
                *(new if new is not None else old for new, old in zip(now, self._last, strict=True))
            )
        if (
            in_full
            and not self._last.num_kills
            and self._systemctl("show", "--property=Result", "--value") == "oom-kill"
        ):
            self._last = self._last._replace(num_kills=1)
        return self._last

    def close(self) -> None:
        if self._unit:
            for verb in ("stop", "reset-failed"):
                self._systemctl(verb)
            self._unit = ""

    def _systemctl(self, *words: str) -> str:
        """What systemctl prints about the scope; empty where it fails."""
        command = ["systemctl", "--user", *words, self._unit]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=10, check=False
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    def _try_out(self) -> str:
        if shutil.which("systemd-run") is None:
            raise OSError("systemd-run is not installed")
        look = "cat /sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/memory.max"
        command = self.wrap(["/bin/sh", "-c", look])
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except subprocess.SubprocessError as error:
            raise OSError(f"systemd-run --user: {error}") from error
        finally:
            self.close()
        if done.returncode:
            raise OSError(
                f"systemd-run --user: {(done.stderr.strip() or 'failed').splitlines()[-1]}"
            )
        return done.stdout.strip()


class WatchLimit(MemoryLimit):
    """The launcher's own eyes: it kills the run when a sample of the process tree is over the
    cap."""

    kind = "watch"


def open_limit(limit_bytes: int | None) -> MemoryLimit:
    """The strongest cap that this machine grants; None: no limit."""
    if limit_bytes is None:
        return MemoryLimit()
    refusals: list[str] = []
    for kind in KINDS:
        against = f" ({'; '.join(refusals)})" if refusals else ""
        try:
            return _open(kind, limit_bytes, f"{kind} holds {format_bytes(limit_bytes)}{against}")
        except OSError as error:
            refusals.append(f"{kind}: {error}")
    raise AssertionError("a watch is always possible")


FREE_PART = 0.9
"""Of the memory that is free here: what a cap or a plan takes where no size is named."""


def parse_memory(text: str) -> int:
    """A size, or "auto": nine tenths of what is free now. Raises ValueError."""
    if text.strip().lower() != "auto":
        return parse_bytes(text)
    return int(FREE_PART * free_host_bytes()) & -(1 << 20)


def _open(kind: str, limit_bytes: int, why: str) -> MemoryLimit:
    if kind == "watch":
        return WatchLimit(limit_bytes, why)
    if kind == "systemd-scope":
        return SystemdScopeLimit(limit_bytes, why)
    if kind == "cgroup-v1":
        own = own_cgroup("memory")
        if own is None:
            raise OSError("the version 1 memory hierarchy is not mounted")
        return CgroupV1Limit(own, limit_bytes, why)
    refusals = []
    for parent in _parents_v2():
        try:
            return CgroupV2Limit(parent, limit_bytes, why)
        except OSError as error:
            refusals.append(str(error))
    raise OSError(
        "; ".join(refusals) or "no cgroup whose memory controller is delegated to this process"
    )


def _parents_v2() -> list[Path]:
    """Cgroups whose children have the memory controller: the own one (only if it may hold no
    process), or its parent."""
    own = own_cgroup("")
    if own is None:
        return []
    return [p for p in (own, own.parent) if "memory" in _words(p / "cgroup.subtree_control")]


def _charge_v2(folder: Path, in_full: bool) -> Charge:
    charge = Charge(_number(folder / "memory.current"), _number(folder / "memory.peak"))
    if not in_full:
        return charge
    stat = _table(folder / "memory.stat")
    events = _table(folder / "memory.events")
    anonymous = None if "anon" not in stat else stat["anon"] + stat.get("kernel", 0)
    return charge._replace(
        anonymous_bytes=anonymous, num_kills=events.get("oom_kill"), num_hits=events.get("max")
    )


def _remove_dead(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _kill_members(folder: Path) -> None:
    for pid in _words(folder / "cgroup.procs"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _number(file: Path) -> int | None:
    words = _words(file)
    return int(words[0]) if words and words[0].isdigit() else None


def _table(file: Path) -> dict[str, int]:
    words = _words(file)
    return {
        name: int(value)
        for name, value in zip(words[::2], words[1::2], strict=False)
        if value.isdigit()
    }


def _words(file: Path) -> list[str]:
    return read_word(file).split()
