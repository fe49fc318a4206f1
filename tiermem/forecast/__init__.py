"""Forecast: what a training step will move and how long it will take, before it runs, from one small model of events.

Files in order: each imports only files before it.

    rates      how fast this machine's disk, links and arithmetic are; tasks on lanes, played event by event
    loads      which units are read and when, what tiles move, what collectives take
    steps      a training step as tasks: reads, gathers, maths, tiles
    forecast   bytes per edge, seconds per phase, and plans chosen by them

The sizes are not modelled but planned: `zero/plan.py`, `zero/unit.py` and `zero/state_layout.py` say what is allocated and cut;
here they are only put on a clock. Nothing is allocated, read or sent, and no collective is called.
"""

from __future__ import annotations

from tiermem.forecast.forecast import Choice, Forecast, agreed, choose, forecast_shards, forecast_step
from tiermem.forecast.loads import Use, uses_of
from tiermem.forecast.rates import Rates, Task, Timeline, play

__all__ = [
    "Choice",
    "Forecast",
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
