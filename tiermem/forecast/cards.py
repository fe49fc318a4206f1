"""Cards: the memory and the rates of named accelerators, for plans where nothing is measured."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiermem.forecast.rates import Rates
from tiermem.swap.memory.accelerator import facts_of, is_accelerator


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

_UNNAMED = CARDS["a100"]
_CPU_FLOPS = 5e11
_DISK_BYTES_S = 3e9


def assumed_speed(device: torch.device) -> tuple[float, Rates]:
    """The operations a second and the rates that are assumed of this machine, where nobody measures
    them: of the card that the device's name names, else of an A100; of a CPU 0.5 TFLOPS; of a disk
    3 GB/s each way."""
    if not is_accelerator(device):
        return _CPU_FLOPS, Rates(_DISK_BYTES_S, _DISK_BYTES_S)
    words = str(facts_of(device)["name"]).lower().replace(" ti", "ti")
    card = next((card for known, card in CARDS.items() if known in words), _UNNAMED)
    rates = Rates(
        _DISK_BYTES_S,
        _DISK_BYTES_S,
        link_bytes_s=card.link_bytes_s,
        device_memory_bytes_s=card.memory_bytes_s,
    )
    return card.part * card.flops, rates
