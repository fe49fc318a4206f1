"""Which durable step is still whole when bytes on the paths turn out to be wrong: the end of a CorruptionError.

A durable step is bytes in the same files, so what came wrong may be its own: the first step after it reads what it holds, and
frozen weights are never written again. A step is whole, as far as this is known, when none of those bytes are among its.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tiermem.swap.freeze import Freeze
from tiermem.swap.sums import Place


class DurableStep(Protocol):
    """What has to be known of one."""

    @property
    def commit(self) -> int:
        """Counts durable steps of a run upwards."""

    @property
    def step(self) -> int:
        """Optimizer steps."""

    @property
    def tag(self) -> str | None:
        """None: it was made durable without one."""

    @property
    def freeze(self) -> Freeze:
        """Its bytes on the paths."""

    @property
    def manifest(self) -> Path:
        """Says what it consists of."""


def advice_on(place: Place, steps: Iterable[DurableStep]) -> str:
    """What is best done about a corruption, in a sentence or two: the newest of these steps that does not hold the place."""
    newest_first = sorted(steps, key=lambda each: each.commit, reverse=True)
    if not newest_first:
        return "Nothing of this run has been saved where it rests: go back to a checkpoint or a copy"
    harmed = [each for each in newest_first if holds(each.freeze, place)]
    whole = next((each for each in newest_first if each not in harmed), None)
    said = [f"{_name(each)} holds these bytes as well" for each in harmed]
    said.append(
        "go back to a complete copy, or to a checkpoint of another run"
        if whole is None
        else f"{_name(whole)} is still whole: open {whole.manifest}"
    )
    text = "; ".join(said)
    return text[0].upper() + text[1:]


def holds(freeze: Freeze, place: Place) -> bool:
    """Whether any of these bytes are among those that a freeze holds."""
    if place.entry not in freeze.parts:
        return False
    files = [str(file) for file in freeze.files()]
    for frozen in freeze.ranges(place.entry, place.offset, place.num_bytes):
        start, stop = frozen.file_offset, frozen.file_offset + frozen.num_bytes
        if any(
            each.file == files[frozen.path_index] and each.offset < stop and start < each.offset + each.num_bytes
            for each in place.ranges
        ):
            return True
    return False


def _name(step: DurableStep) -> str:
    return f"step {step.step}" + (f" (tag {step.tag!r})" if step.tag else "")
