"""What a sitting changes in a trainer's process, from outside; Python imports this file at its
start where PYTHONPATH has it.

always                    weights are copied from one drawn block: torch draws 8 G numbers for minutes
TIERMEM_DRAW=1            they are drawn as always: for the seconds of a start
TIERMEM_TRACE_STEP=N      step N runs under torch's profiler; the share of copies under kernels goes to /tmp/hidden-*.json
SITTING_PEERS=NAME        of the peers only this one is trained
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _copy_weights(module: ModuleType) -> None:
    if os.environ.get("TIERMEM_DRAW") == "1":
        return
    block: list[Any] = []

    def normal_(tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
        import torch

        with torch.no_grad():
            if tensor.is_meta:
                return tensor
            if not block:
                block.append(
                    torch.randn(1 << 22, generator=torch.Generator().manual_seed(1), device="cpu")
                )
            for part in tensor.view(-1).split(1 << 22):
                part.copy_(block[0][: part.numel()].mul(std))
        return tensor

    module.normal_ = normal_
    module.kaiming_uniform_ = lambda tensor, *a, **k: normal_(tensor, 0.0, 0.02)


def _trace_a_step(module: ModuleType) -> None:
    traced = int(os.environ.get("TIERMEM_TRACE_STEP", "0"))
    if not traced:
        return
    import torch
    from bench.gpu_trace import hidden_share

    report = module.Trainer._report_step
    profilers: list[Any] = []

    def report_step(trainer: Any, engine: Any, step: int, *rest: Any) -> None:
        report(trainer, engine, step, *rest)
        if step == traced - 1:
            profilers.append(
                torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            )
            profilers[0].start()
        elif step == traced:
            profilers[0].stop()
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                profilers[0].export_chrome_trace(file.name)
                with open(file.name, encoding="utf-8") as whole:
                    events = json.load(whole)["traceEvents"]
            with open(f"/tmp/hidden-{os.getpid()}.json", "w", encoding="utf-8") as found:
                json.dump({"job": sys.argv, **hidden_share(events)}, found)

    module.Trainer._report_step = report_step


def _choose_peers(module: ModuleType) -> None:
    chosen = os.environ.get("SITTING_PEERS")
    if chosen is None:
        return
    list_all = module.list_peers
    module.list_peers = lambda job, python: [
        peer for peer in list_all(job, python) if peer.name == chosen
    ]


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "torch.nn.init": _copy_weights,
    "bench.peers.runs": _choose_peers,
    "tiermem.tools.train.training": _trace_a_step,
}


class _After(importlib.abc.MetaPathFinder):
    """Changes a module as soon as it has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _CHANGES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _CHANGES[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _After())
