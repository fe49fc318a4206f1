"""Do ranks hear each other by datagrams, know who is silent and who ended in order, and ignore
those of strangers?"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tiermem.ranks.heartbeat import Heartbeat

INTERVAL_S = 0.02


def await_(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def pair() -> Iterator[list[Heartbeat]]:
    beats = [Heartbeat(rank, INTERVAL_S, lambda rank=rank: f"call of {rank}") for rank in (0, 1)]
    for rank, beat in enumerate(beats):
        beat.know(1 - rank, beats[1 - rank].address)
        beat.start()
    await_(lambda: all(beats[rank].call_of(1 - rank) for rank in (0, 1)))
    yield beats
    for beat in beats:
        beat.close()


def test_a_rank_hears_what_another_does(pair: list[Heartbeat]) -> None:
    assert pair[0].call_of(1) == "call of 1" and pair[1].call_of(0) == "call of 0"
    assert pair[0].silence_s(1) < 10.0


def test_a_rank_that_stops_without_a_word_is_silent(pair: list[Heartbeat]) -> None:
    pair[1]._send = lambda is_last: None  # type: ignore[method-assign]
    await_(lambda: pair[0].silence_s(1) > 10 * INTERVAL_S)


def test_a_rank_that_ended_in_order_is_not_silent(pair: list[Heartbeat]) -> None:
    pair[1].close()
    await_(lambda: pair[0].silence_s(1) == 0.0)
    time.sleep(5 * INTERVAL_S)
    assert pair[0].silence_s(1) == 0.0


def test_a_rank_that_was_never_heard_is_not_judged() -> None:
    beat = Heartbeat(0, INTERVAL_S, lambda: "")
    beat.know(1, ["token", 9, ["127.0.0.1"]])
    assert beat.silence_s(1) == 0.0
    beat.close()


def test_what_one_rank_found_dead_all_know(pair: list[Heartbeat]) -> None:
    pair[0].tell_dead([7])
    await_(lambda: pair[1].dead == {7})


def test_datagrams_of_strangers_are_ignored(pair: list[Heartbeat]) -> None:
    port = pair[0].address[1]
    notes = [
        b"",
        b"5",
        b"\xff",
        b"{}",
        b"[1, 2]",
        json.dumps(["no token", 1, "x", [5], True]).encode(),
    ]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for note in notes:
            stranger.sendto(note, ("127.0.0.1", port))
    calls = pair[0]._heard_s[1]
    await_(lambda: pair[0]._heard_s[1] > calls)  # its thread goes on
    assert pair[0].dead == set() and pair[0].call_of(1) == "call of 1"
