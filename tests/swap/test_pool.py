"""Is a pool sized at once, and are its buffers handed out one by one?"""

from __future__ import annotations

import pytest

from tiermem.swap.memory.arena import PAGE_BYTES, Arena, BudgetError, Pool


def test_pool_carves_all_its_buffers_at_once() -> None:
    arena = Arena(16 * PAGE_BYTES)
    pool = Pool(arena, PAGE_BYTES + 1, 3, "tiles")
    assert arena.carved_bytes == 3 * 2 * PAGE_BYTES
    slots = [pool.take() for _ in range(3)]
    assert len({slot.offset for slot in slots if slot is not None}) == 3
    assert pool.take() is None
    arena.close()


def test_warmest_buffer_is_handed_out_first() -> None:
    arena = Arena(16 * PAGE_BYTES)
    pool = Pool(arena, PAGE_BYTES, 3, "tiles")
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    pool.give_back(second)
    pool.give_back(first)
    assert pool.take() is first
    arena.close()


def test_pool_that_does_not_fit_takes_nothing_and_says_which_buffer() -> None:
    arena = Arena(4 * PAGE_BYTES)
    with pytest.raises(BudgetError, match="buffer 3 of 3 for tiles needs 8192 bytes"):
        Pool(arena, 2 * PAGE_BYTES, 3, "tiles")
    assert arena.carved_bytes == 0
    arena.close()


def test_buffer_given_back_twice_is_refused() -> None:
    arena = Arena(4 * PAGE_BYTES)
    pool = Pool(arena, PAGE_BYTES, 2, "tiles")
    slot = pool.take()
    assert slot is not None
    pool.give_back(slot)
    with pytest.raises(RuntimeError, match="given back twice"):
        pool.give_back(slot)
    arena.close()


def test_close_returns_the_memory_and_refuses_while_a_buffer_is_out() -> None:
    arena = Arena(4 * PAGE_BYTES)
    pool = Pool(arena, PAGE_BYTES, 2, "tiles")
    slot = pool.take()
    assert slot is not None
    with pytest.raises(RuntimeError, match="1 of 2 slots are still in use"):
        pool.close()
    pool.give_back(slot)
    pool.close()
    assert arena.carved_bytes == 0
    assert pool.take() is None
    arena.close()
