"""Cards: a named accelerator in the options of a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

from tiermem.forecast.cards import CARDS
from tiermem.tools.options import PlanOptions


def with_card(options: PlanOptions) -> tuple[PlanOptions, list[str]]:
    """The options with what a named card says of those that are not given, and a line on it."""
    if options.gpu is None:
        return options, []
    card = CARDS[options.gpu]
    facts: dict[str, Any] = {
        "gpu_bytes": card.memory_gib << 30,
        "flops": card.part * card.flops,
        "link_bytes_s": card.link_bytes_s,
        "gpu_memory_bytes_s": card.memory_bytes_s,
    }
    open_ones = {name: value for name, value in facts.items() if getattr(options, name) is None}
    said = (
        f"GPU: {options.gpu}: {card.memory_gib} GiB, {card.memory_bytes_s / 1e9:.0f} GB/s, link "
        f"{card.link_bytes_s / 1e9:.3g} GB/s each way, {card.part:.0%} of {card.flops / 1e12:.0f} "
        f"TFLOPS ({card.source})"
    )
    return dataclasses.replace(options, **open_ones), [said]
