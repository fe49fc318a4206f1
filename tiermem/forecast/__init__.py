"""Forecast: what a training step will move and how long it will take, before it runs, from one small model of events.

Read in this order (imports go the same way, downward):

    rates       how fast this machine's disk, links and arithmetic are      timeline   tasks on lanes, played event by event
    uses        which modules a step runs, and what each computes           fetches    which units are read, and when
    wires       what collectives take, call by call
    steps       a training step as tasks: reads, gathers, maths, tiles      forecast   bytes per edge, seconds per phase
    choice      what a plan leaves open, settled by predicted time
    infinity    the ZeRO-Infinity paper's tables, by its own formulas

The sizes are not modelled but planned: `zero/plan.py`, `zero/unit.py` and `optim/layout.py` say what is allocated and cut,
here it is only put on a clock. Nothing is allocated, read or sent, and no collective is called.
"""

from __future__ import annotations

from tiermem.forecast.choice import Choice, agreed, choose
from tiermem.forecast.forecast import Forecast, forecast_shards, forecast_step
from tiermem.forecast.rates import Rates
from tiermem.forecast.timeline import Task, Timeline, play
from tiermem.forecast.uses import Use, uses_of

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
