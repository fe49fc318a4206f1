"""Forecast: predicts, before a run, the bytes that a training step moves and the seconds that it
takes.

Files in order: each imports only files before it.

    rates      rates of disk, links and arithmetic; a simulator of tasks on lanes
    loads      modules and their units, bytes of tiles, payloads of collectives
    course     what decides a training step; the units that are stepped under backward
    steps      a training step as tasks: reads, gathers, maths, tiles
    forecast   bytes per edge and seconds per phase; the choice of a plan by predicted time

The sizes are the plan's own: `plans/plan.py`, `units/unit.py` and `units/state_layout.py` compute
what a run allocates and cuts. The forecast adds times. It allocates no states, reads and sends
nothing, and calls no collective, except `agreed`.
"""

from __future__ import annotations

from tiermem.forecast.forecast import (
    Choice,
    Forecast,
    Placement,
    agreed,
    choose,
    forecast_shards,
    forecast_step,
)
from tiermem.forecast.loads import Use, uses_of
from tiermem.forecast.rates import Rates, Task, Timeline, play

__all__ = [
    "Choice",
    "Forecast",
    "Placement",
    "Rates",
    "Task",
    "Timeline",
    "Use",
    "agreed",
    "choose",
    "forecast_shards",
    "forecast_step",
    "play",
    "uses_of",
]
