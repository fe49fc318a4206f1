"""Heartbeat: datagrams by which ranks know that the others run, beside the collectives and without
the store.

    every interval    rank, newest call, ranks found dead    -->  every other rank
    at the end        the same, marked as the last one

A rank that was heard once and is silent for longer than the limit is gone: its process or host has
died or stopped, or the network is cut. A rank that said its last datagram ended in order. One that
was never heard is not judged: a firewall may drop datagrams. Each datagram carries the token that
its receiver has posted, so those of other programs are ignored. A thread sends and hears; it takes
the interpreter's lock for microseconds at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from tiermem.swap.base.side_threads import start_thread

_MOST_BYTES = 4096
_MOST_CALL = 300  # characters


class Heartbeat:
    """Sends and hears datagrams from `start` to `close`.

    Args:
        me: this rank.
        interval_s: seconds between two datagrams to a rank.
        newest_call: says what this rank does; called by the thread.

    Raises OSError where this machine makes no such socket.
    """

    def __init__(self, me: int, interval_s: float, newest_call: Callable[[], str]) -> None:
        self._me = me
        self._interval_s = interval_s
        self._newest_call = newest_call
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(("", 0))
        self._token = secrets.token_hex(8)
        # by rank: its token, where it may be
        self._peers: dict[int, tuple[str, set[tuple[str, int]]]] = {}
        self._heard_s: dict[int, float] = {}
        self._calls: dict[int, str] = {}
        self._ended: set[int] = set()
        self._dead: set[int] = set()  # as this rank and others have found
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tiermem heartbeat", daemon=True)

    @property
    def address(self) -> list[Any]:
        """What other ranks need to reach this one: its token, port and addresses."""
        return [self._token, self._socket.getsockname()[1], _addresses()]

    @property
    def dead(self) -> set[int]:
        """Ranks whose processes some rank on their host has found dead."""
        return set(self._dead)

    @property
    def ended(self) -> set[int]:
        """Ranks that have ended in order."""
        return set(self._ended)

    def start(self) -> None:
        """Starts the thread. Does not block."""
        start_thread(self._thread)

    def know(self, rank: int, address: list[Any]) -> None:
        """Sends to a rank from now on."""
        token, port, hosts = address
        self._peers[rank] = token, {(host, port) for host in hosts}

    def knows(self, rank: int) -> bool:
        """Whether a rank's address is known."""
        return rank in self._peers

    def tell_dead(self, ranks: Iterable[int]) -> None:
        """Tells the other ranks that these are dead."""
        self._dead.update(ranks)

    def silence_s(self, rank: int) -> float:
        """Seconds since a rank was heard; 0 for one that was never heard, or that has ended in
        order."""
        heard_s = self._heard_s.get(rank)
        return 0.0 if heard_s is None or rank in self._ended else time.monotonic() - heard_s

    def call_of(self, rank: int) -> str:
        """What a rank did when it was heard last; empty if it was not."""
        return self._calls.get(rank, "")

    def close(self) -> None:
        """Says the last datagram and ends the thread. Blocks for at most an interval; twice does
        nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            # wakes the thread
            self._socket.sendto(b"", ("127.0.0.1", self._socket.getsockname()[1]))
        if self._thread.is_alive():
            self._thread.join()
        self._send(is_last=True)
        self._socket.close()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._is_closed:
            now_s = time.monotonic()
            if now_s >= due_s:
                self._send(is_last=False)
                due_s = now_s + self._interval_s
            self._socket.settimeout(max(due_s - now_s, 0.001))
            with contextlib.suppress(OSError):  # a time-out among them
                self._hear(*self._socket.recvfrom(_MOST_BYTES))

    def _send(self, is_last: bool) -> None:
        call = self._newest_call()[:_MOST_CALL]
        for token, addresses in list(self._peers.values()):
            note = [token, self._me, call, sorted(self._dead)[:100], is_last]
            for address in list(addresses):
                # an address that cannot be reached, or a full buffer
                with contextlib.suppress(OSError):
                    self._socket.sendto(json.dumps(note).encode(), socket.MSG_DONTWAIT, address)

    def _hear(self, data: bytes, address: tuple[str, int]) -> None:
        try:
            token, rank, call, dead, is_last = json.loads(data)
        except (ValueError, TypeError):
            return
        if token != self._token or rank not in self._peers:
            return
        self._heard_s[rank] = time.monotonic()
        self._calls[rank] = str(call)
        self._dead.update(int(each) for each in dead)
        self._peers[rank][1].add(address)  # where it can be reached for certain
        if is_last:
            self._ended.add(rank)


def _addresses() -> list[str]:
    """Addresses at which ranks of this host and of others may reach this process."""
    found = ["127.0.0.1"]
    with (
        contextlib.suppress(OSError, ValueError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect(
            (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")) or 9)
        )  # sends nothing
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys(found))
