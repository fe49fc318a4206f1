"""Forecast: predicts, before a run, the bytes that a training step moves and the seconds that it
takes.

Files in order: each imports only files before it.

    rates      rates of disk, links and arithmetic
    cards      memory and rates of named accelerators
    loads      modules and their units, bytes of tiles, payloads of collectives
    fetches    which units the real prefetcher fetches in a step
    phases     bytes per edge, and seconds per lane and phase
    choose     the choice of a plan by predicted time

The sizes are the plan's own: `plans/plan.py`, `units/unit.py` and `units/state_layout.py` compute
what a run allocates and cuts. The forecast adds times. It allocates no states, reads and sends
nothing, and calls no collective, except `agreed`.
"""

from __future__ import annotations

from tiermem.forecast.choose import Caps, Choice, Placement, agreed, choose, forecast_shards
from tiermem.forecast.loads import Use, uses_of
from tiermem.forecast.phases import Forecast, forecast_step
from tiermem.forecast.rates import Rates

__all__ = [
    "Caps",
    "Choice",
    "Forecast",
    "Placement",
    "Rates",
    "Use",
    "agreed",
    "choose",
    "forecast_shards",
    "forecast_step",
    "uses_of",
]
