"""MemoryErrors: what the error says when an accelerator has no memory left amid a forward or backward.

    in a forward, also one that a backward computes again    the words are added to the error
    in a backward that the engine calls                      the words are added to the error
    in any other backward                                    the words are logged: torch shows no hook this error

`tiermem train` says the same, with its own options in place of a policy's fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from tiermem.plans.plan import Plan, Row, format_mib
from tiermem.policy import OffloadPolicy, Tier
from tiermem.swap.memory.accelerator import (
    free_and_total,
    is_accelerator,
    num_out_of_memory,
    usage,
)

logger = logging.getLogger("tiermem")

_SAYS = "has no memory left in"


@dataclasses.dataclass(eq=False)
class MemoryErrors:
    """Those of a sharded model.

    Args:
        model, device: of it.
        of_now: gives its policy and its plan.
    """

    _model: nn.Module
    _device: torch.device
    _of_now: Callable[[], tuple[OffloadPolicy, Plan]]
    _is_explained: bool = dataclasses.field(default=False, init=False)  # inside `explained`

    @contextlib.contextmanager
    def explained(self, phase: str) -> Iterator[None]:
        """Inside, an error of the device's memory gets the words."""
        self._is_explained = True
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.explain(error, phase)
            raise
        finally:
            self._is_explained = False

    def explain(self, error: BaseException | None, phase: str) -> None:
        """Adds the words to an error of the device's memory, once; leaves any other as it is."""
        if isinstance(error, torch.OutOfMemoryError) and _SAYS not in str(error):
            error.args = (f"{error}\n{self._words(phase, str(error))}",)

    def of_backward(self) -> Callable[[object], None]:
        """What to call if an exception ends the backward that begins: it logs the words if the
        device's memory is why, and its caller does not add them to the error. Torch may call it
        after it has raised the error, and in another thread."""
        if self._is_explained or not is_accelerator(self._device):
            return lambda _: None
        num_before = num_out_of_memory(self._device)

        def log(_: object) -> None:
            if num_out_of_memory(self._device) > num_before:
                logger.error(self._words("backward", ""))

        return log

    def _words(self, phase: str, refusal: str) -> str:
        policy, plan = self._of_now()
        remedy = one_of(_remedies(self._model, policy, plan))
        return words_of(refusal, self._device, phase, plan.rows, remedy)


def words_of(
    refusal: str,
    device: torch.device,
    phase: str,
    rows: Sequence[Row],
    remedy: str,
) -> str:
    """One sentence: what was asked for and when, what is reserved, what the plan has on DEVICE,
    what to change.

    Args:
        refusal: torch's words; empty if they are not known.
        rows: of the plan; none where there is no plan yet.
    """
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", refusal)
    wanted = f"{asked[1]} more were wanted" if asked else "more was wanted"
    free, total = map(format_mib, free_and_total(device))
    now = usage(device)
    there = [row for row in rows if row.tier is Tier.DEVICE and row.num_bytes]
    rests = ""
    if there:
        planned = format_mib(sum(row.num_bytes for row in there))
        parts = ", ".join(f"{row.what} {format_mib(row.num_bytes)}" for row in there)
        rests = f"; the plan keeps {planned} on DEVICE ({parts})"
    return (
        f"{device} {_SAYS} {phase}: {wanted}, torch has reserved {format_mib(now.reserved_bytes)} "
        f"of {total} ({format_mib(now.allocated_bytes)} in tensors) and {free} are free{rests}: "
        f"{remedy}"
    )


def one_of(remedies: Sequence[str]) -> str:
    """What to give: "give a, b or c"."""
    *others, last = remedies
    return f"give {', '.join(others)} or {last}" if others else f"give {last}"


def _remedies(model: nn.Module, policy: OffloadPolicy, plan: Plan) -> list[str]:
    """What would take less of the device's memory than this policy does."""
    found = ["a smaller micro-batch", "shorter inputs"]
    # as the models of transformers and diffusers say it
    if not any(getattr(each, "gradient_checkpointing", False) for each in model.modules()):
        found.append("checkpointing of the blocks")
    elif policy.activations is None:
        found.append("activations=Tier.HOST")
    if policy.params is Tier.DEVICE:
        found.append("params=Tier.HOST")
    if plan.states is Tier.DEVICE:
        found.append("optim=Tier.HOST")
    elif policy.optim_ratio < 1:
        found.append(f"an optim_ratio above {policy.optim_ratio:.2f}")
    return found
