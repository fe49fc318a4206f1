"""SmallTraining: one small model trained with its weights and states in each place, so that the
places can be compared.

    cpu       all in memory, the maths on the CPU: the twin           host   weights, gradients and states on HOST
    weights   weights on DEVICE, states on HOST                       nvme   weights, gradients and states on NVMe
    device    weights and states on DEVICE, which steps them

`weights`, `host` and `nvme` compute the same in the same places, so their losses are equal to the
bit. `cpu` and `device` do their sums elsewhere, in another order. The model is bf16 with fp32
masters; data are noise. Needs torch and tiermem alone.

`python -m bench.small_training --folder F --json J` trains in some places in a process of its own,
so that a sanitizer, or the driver's environment variables, see a whole process (gpu_passes.py).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import tiermem
from bench.gpu_trace import profiled
from bench.phases import clock_of, timed
from tiermem.policy import OffloadPolicy, Tier
from tiermem.swap.memory.accelerator import is_accelerator, reset_peak, usage
from tiermem.tools.record.run_record import PHASES
from tiermem.tools.words import parse_list, save_json

PLACES: dict[str, tuple[Tier, Tier]] = {
    "cpu": (Tier.HOST, Tier.HOST),
    "weights": (Tier.DEVICE, Tier.HOST),
    "host": (Tier.HOST, Tier.HOST),
    "nvme": (Tier.NVME, Tier.NVME),
    "device": (Tier.DEVICE, Tier.DEVICE),
}
"""(home of parameters, home of states)"""
SAME = ("weights", "host", "nvme")
"""Places whose losses are equal to the bit."""
MOST_APART = 0.02
"""Of losses in bf16 whose sums were made in another order."""
_NUM_CLASSES = 1000
_NUM_BATCHES = 2


class Sizes(NamedTuple):
    """Of the model and its training: `blocks` of 8 x width^2 parameters each."""

    width: int = 1024
    blocks: int = 8
    samples: int = 256
    steps: int = 6


class Block(nn.Module):
    """Two matrices of a transformer's feed-forward shape, with a residual: 8 x width^2
    parameters."""

    def __init__(
        self, width: int, activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        y: torch.Tensor = self.down(self._activation(self.up(self.norm(x))))
        return x + y


class Tower(nn.Module):
    """Modules one after the other."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the last module makes of it."""
        for layer in self.layers:
            x = layer(x)
        return x


def train_in(
    place: str, sizes: Sizes, folder: Path, after_step: Callable[[], object] | None = None
) -> dict[str, Any]:
    """Trains in one of PLACES; returns losses, seconds of each phase (medians, the first step left
    out) and bytes. Blocks.

    Each phase waits for the device, so that its time is its own. With `after_step`, which is called
    after every step, nothing waits before the end: the steps overlap as in a training, and the
    seconds are those of starting the work.
    """
    params, optim = PLACES[place]
    paths = [folder] if Tier.NVME in (params, optim) else []
    torch.manual_seed(0)
    blocks = [Block(sizes.width) for _ in range(sizes.blocks)]
    model = Tower([*blocks, nn.Linear(sizes.width, _NUM_CLASSES)]).bfloat16()
    matrices_come_and_go = 8 * sizes.width
    policy = OffloadPolicy(
        params=params, optim=optim, paths=paths, persistence_numel=matrices_come_and_go
    )
    num_params = sum(param.numel() for param in model.parameters())
    losses: list[torch.Tensor] = []
    seconds: list[dict[str, float]] = []
    with tiermem.shard(model, policy, device="cpu" if place == "cpu" else None) as shards:
        device = shards.device
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        if is_accelerator(device):
            reset_peak(device)
        clock = clock_of(device) if after_step is None else time.monotonic
        batches = [_batch(sizes, number, device) for number in range(_NUM_BATCHES)]
        for step in range(sizes.steps):
            x, y = batches[step % _NUM_BATCHES]
            loss, taken = timed(clock, functools.partial(_loss_of, model, x, y), optimizer.step)
            optimizer.zero_grad()
            losses.append(loss.detach())
            seconds.append(taken)
            if after_step is not None:
                after_step()
        stats = shards.store.stats()
        return {
            "device": str(device),
            "losses": [each.item() for each in losses],
            **{
                f"{phase}_s": statistics.median(each[phase] for each in seconds[1:] or seconds)
                for phase in PHASES
            },
            "num_params": num_params,
            "host_peak_bytes": stats.host_peak_bytes,
            "nvme_read_bytes": stats.nvme_read_bytes,
            "nvme_written_bytes": stats.nvme_written_bytes,
            "plan_device_bytes": shards.plan.device_bytes,
            **(usage(device)._asdict() if is_accelerator(device) else {}),
        }


def compare(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Whether the places that must be equal are, and how far the others are from `host`, as a part
    of its losses."""
    same = [runs[place]["losses"] for place in SAME if place in runs]
    apart = {
        place: _apart(runs[place]["losses"], runs["host"]["losses"])
        for place in ("cpu", "device")
        if place in runs
    }
    is_equal = all(losses == same[0] for losses in same)
    return {
        "is_equal_to_the_bit": is_equal,
        "apart": apart,
        "passed": is_equal and all(distance <= MOST_APART for distance in apart.values()),
    }


def _apart(losses: list[float], wanted: list[float]) -> float:
    """The largest difference, as a part; a loss that is NaN is infinitely far."""
    distances = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    return max((each if each == each else float("inf") for each in distances), default=0.0)


def _batch(sizes: Sizes, number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(sizes.samples, sizes.width, generator=generator).bfloat16()
    y = torch.randint(0, _NUM_CLASSES, (sizes.samples,), generator=generator)
    return x.to(device), y.to(device)


def _loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).float(), y)


# ---- the program ---------------------------------------------------------------------------------
#
# Algorithms are deterministic where torch has such (CUBLAS_WORKSPACE_CONFIG is the caller's to
# set); torch's warnings about others are kept. A place that fails is told with its traceback, and
# the others are trained.


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as the options say and writes {"runs", "failures", "warnings"}; 0 unless a place
    failed."""
    given = _parser().parse_args(arguments)
    sizes = Sizes(given.width, given.blocks, given.samples, given.steps)
    runs: dict[str, Any] = {}
    failures: dict[str, str] = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    vars(torch.utils)["deterministic"].fill_uninitialized_memory = given.fill
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for place in parse_list("--places", given.places):
            with (
                tempfile.TemporaryDirectory(dir=given.folder) as home,
                noting_failure(failures, place),
            ):
                train = functools.partial(train_in, place, sizes, Path(home))
                runs[place] = (
                    train() if given.trace is None else profiled(train, sizes.steps, given.trace)
                )
    said = {str(each.message).splitlines()[0] for each in warned}
    found = sorted(each for each in said if "deterministic" in each)
    save_json(given.json, {"runs": runs, "failures": failures, "warnings": found})
    return 1 if failures else 0


@contextlib.contextmanager
def noting_failure(failures: dict[str, str], part: str) -> Iterator[None]:
    """Inside, an error is kept with its traceback, and the code after it goes on."""
    try:
        yield
    except Exception as error:
        failures[part] = "".join(traceback.format_exception(error))
        print(failures[part], file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.small_training")
    parser.add_argument("--places", default=",".join(PLACES))
    for name, value in Sizes._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", type=Path, required=True, help="for states on NVMe")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--fill", action="store_true", help="fill new memory with NaN")
    parser.add_argument("--trace", type=Path, help="trace the last steps, and write a Chrome trace")
    return parser


if __name__ == "__main__":
    sys.exit(main())
