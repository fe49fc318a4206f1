"""Everyday: the programs that do the same in plain PyTorch, to the bit, by name."""

from __future__ import annotations

from programs import adapters, hugging_face, layers, loops, passing, towers
from programs.faces import Program

PROGRAMS: dict[str, Program] = {
    **towers.PROGRAMS,
    **layers.PROGRAMS,
    **loops.PROGRAMS,
    **passing.PROGRAMS,
    **adapters.PROGRAMS,
    **hugging_face.PROGRAMS,
}
