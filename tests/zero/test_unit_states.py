"""Does a unit, and the gradient of a parameter, go from state to state along the arrows alone, and
do attributes follow?"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs.models import Tower
from programs.twins import seeded

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.units.gradient_state import Factor, Gradient, GradientState
from tiermem.weights.unit_state import UnitState
from tiermem.zero import ZeroParamStatus


def test_a_unit_goes_along_its_arrows_and_an_illegal_one_names_both_states(tmp_path: Path) -> None:
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.HOST, paths=[tmp_path], persistence_numel=100
    )
    with tiermem.shard(seeded(Tower), policy) as shards:
        live = shards.units[0]
        param = live.unit.shards[0].param

        def seen() -> tuple[UnitState, bool, ZeroParamStatus]:
            return live.state, live.is_present, param.ds_status  # type: ignore[attr-defined]

        assert seen() == (UnitState.HOME, False, ZeroParamStatus.NOT_AVAILABLE)
        with pytest.raises(
            RuntimeError, match=f"unit '{live.unit.name}' cannot go from HOME to PRESENT"
        ):
            live.land()
        live.read(is_urgent=True)
        assert seen() == (UnitState.READING, False, ZeroParamStatus.INFLIGHT)
        with pytest.raises(RuntimeError, match="from READING to READING"):
            live.read(is_urgent=True)
        live.land()
        assert seen() == (UnitState.PRESENT, True, ZeroParamStatus.AVAILABLE)
        for arrow, to in (
            (live.copy, "COPYING"),
            (live.gather, "GATHERING"),
            (live.land, "PRESENT"),
        ):
            with pytest.raises(RuntimeError, match=f"from PRESENT to {to}"):
                arrow()
        live.drop()
        assert seen() == (UnitState.HOME, False, ZeroParamStatus.NOT_AVAILABLE)


def test_a_unit_that_is_dropped_while_it_is_read_can_be_read_again(tmp_path: Path) -> None:
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.HOST, paths=[tmp_path], persistence_numel=100
    )
    with tiermem.shard(seeded(Tower), policy) as shards:
        live = shards.units[0]
        wanted = shards.weight(live.unit.shards[0].param)
        for _ in range(3):
            live.read(is_urgent=False)
            live.drop()
        live.read(is_urgent=True)
        live.land()
        assert live.memory.views[0].equal(wanted)
        live.drop()


def test_a_gradient_is_added_to_once_it_has_arrived_and_counts_once_it_is_confirmed() -> None:
    gradient = Gradient()
    assert (gradient.is_there, gradient.takes_more) == (False, False)
    gradient.arrive([1.0])
    assert gradient.state is GradientState.ARRIVED
    assert (gradient.is_there, gradient.takes_more) == (False, True)
    gradient.confirm()
    gradient.scale(Factor(lambda: 0.5, None))
    assert (gradient.is_there, gradient.takes_more, gradient.factor) == (True, True, 0.5)
    gradient.clear()
    assert (gradient.is_zero, gradient.takes_more, gradient.factor) == (True, False, 1.0)
    gradient.arrive([2.0])
    assert gradient.state is GradientState.HOME
    gradient.forget()
    gradient.clear()
    assert gradient.state is GradientState.NONE
