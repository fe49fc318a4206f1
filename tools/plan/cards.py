"""Cards: the memory and the rates of named accelerators, for plans of machines that are not here."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from tiermem.tools.options import PlanOptions


class NamedCard(NamedTuple):
    """What a data sheet says of a card, and what of it a training reaches."""

    memory_gib: int
    memory_bytes_s: float
    link_bytes_s: float
    """Each way, both at once: 0.86 of what PCI Express carries, as an H200 was measured."""
    flops: float
    """Of dense 16-bit products that are added up in fp32."""
    part: float
    """Of these, in a training."""
    source: str


_PCIE_5 = 55e9
_PCIE_4 = 27e9
_MEASURED = "part reached: 8B on an H200 (docs/gpu.md)"
_OF_SERVERS = "part reached: assumed, as of an H200"
_OF_DESKTOPS = "part reached: assumed"

CARDS = {
    "h100": NamedCard(80, 3.35e12, _PCIE_5, 989e12, 0.53, f"NVIDIA H100 SXM sheet; {_OF_SERVERS}"),
    "h200": NamedCard(141, 4.8e12, _PCIE_5, 989e12, 0.53, f"NVIDIA H200 sheet; {_MEASURED}"),
    "a100": NamedCard(80, 2.04e12, _PCIE_4, 312e12, 0.53, f"NVIDIA A100 SXM sheet; {_OF_SERVERS}"),
    "l40s": NamedCard(48, 0.864e12, _PCIE_4, 362e12, 0.45, f"NVIDIA L40S sheet; {_OF_SERVERS}"),
    "5090": NamedCard(
        32, 1.79e12, _PCIE_5, 209e12, 0.7, f"NVIDIA RTX Blackwell white paper; {_OF_DESKTOPS}"
    ),
    "4090": NamedCard(24, 1.01e12, _PCIE_4, 165e12, 0.7, f"NVIDIA Ada white paper; {_OF_DESKTOPS}"),
    "3090": NamedCard(
        24, 0.936e12, _PCIE_4, 71e12, 0.8, f"NVIDIA GA102 white paper; {_OF_DESKTOPS}"
    ),
    "4060ti": NamedCard(
        16, 0.288e12, _PCIE_4 / 2, 44e12, 0.8, f"NVIDIA Ada white paper, 8 lanes; {_OF_DESKTOPS}"
    ),
}


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
