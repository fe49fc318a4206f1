"""Phases: a run that trains and does something else in turns gives the device's memory back in between.

    engine.offload_states()     what lies on the device leaves it
    ...                         another engine, an inference server
    engine.reload_states()      it comes back

    optim_states, hp_params     rest in host memory or on NVMe always: nothing to move
    lp_grads, contiguous_grad_buffer    the same
    lp_params                   streamed units leave their buffers; on an accelerator resident ones free its memory too, and
                                the model cannot run until they are back. On a CPU those lie where they rest

States that are to leave host memory as well belong on NVMe from the start (`offload_optimizer`, `offload_param`): their home
does not change while a run lasts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from tiermem.config.offload import OffloadDevice, OffloadState
from tiermem.swap.accelerator import is_accelerator
from tiermem.zero.shards import Shards
from tiermem.zero.weights.residency import LiveUnit

logger = logging.getLogger("tiermem")


def states_to_offload(
    include: Iterable[OffloadState | str] | None, device: OffloadDevice | str
) -> Collection[OffloadState]:
    """Checks what was asked for; nothing is to be done when it is empty. Raises ValueError for other names and for NVMe."""
    device, known = OffloadDevice(device), [state.value for state in OffloadState]
    if device is OffloadDevice.nvme:
        raise ValueError(
            "offload_states to nvme: states have one home for a whole run. Set offload_optimizer or offload_param to "
            '{"device": "nvme"}, or offload to cpu'
        )
    if device is OffloadDevice.none:
        logger.warning("offload_states: device is none, so nothing is offloaded; allowed is cpu")
        return ()
    if include is None:
        return tuple(OffloadState)
    if isinstance(include, str):
        raise ValueError(f"offload_states: include is {include!r}; give a list of {', '.join(known)}")
    try:
        return tuple(OffloadState(state) for state in include)
    except ValueError as error:
        raise ValueError(f"offload_states: include holds {error}; allowed are {', '.join(known)}") from None


def offload(shards: Shards, states: Collection[OffloadState]) -> list[LiveUnit]:
    """Makes parameters leave the device; returns the resident units that did. Blocks."""
    if OffloadState.lp_params not in states:
        return []
    shards.residency.empty()
    away = [live for live in shards.units if live.unit.is_resident and live.shard is not live.memory.full]
    away = [live for live in away if is_accelerator(shards.device) and live.memory.is_present]
    for live in away:
        live.memory.leave()
    return away


def bring_back(shards: Shards, away: Iterable[LiveUnit]) -> None:
    """Makes those units present again. Collective; blocks in stream order."""
    for live in away:
        assert live.shard is not None
        live.memory.allocate()
        shards.values.regather(live.unit, live.shard, live.memory)
        live.memory.show()
