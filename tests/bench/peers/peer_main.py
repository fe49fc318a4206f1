"""The loop that every peer runs, as a script of its own: `python -I peer_main.py plain JOB TOKENS
--channel FD`.

It imports no tiermem, so that any environment with torch and transformers can run it: job and
tokens come as files, what it tells goes down the same channel as our trainer's. The peer itself is
peer_<name>.py beside this file; times, warm-up and tokens are the same for all. A peer has

    PACKAGES                        whose versions are told
    build(job, setting)             the model
    Training(model, job, setting)   forward (token batch -> loss), backward, step, close; its `device`
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> int:
    """Runs one peer; 0, or 1 with the error told over the channel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer")
    parser.add_argument("job", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--setting", type=json.loads, default={})
    parser.add_argument("--channel", type=int)
    given = parser.parse_args()

    def tell(kind: str, **fields: Any) -> None:
        if given.channel is not None:
            line = (
                json.dumps({"kind": kind, "time_ns": time.monotonic_ns(), **fields}).encode()
                + b"\n"
            )
            while line:
                line = line[os.write(given.channel, line) :]

    try:
        train(given.peer, json.loads(given.job.read_text()), given.tokens, given.setting, tell)
    except Exception as error:
        message = str(error) or "no message"
        tell("error", type=type(error).__name__, message=message, trace=traceback.format_exc())
        traceback.print_exc()
        return 1
    return 0


def train(
    name: str,
    job: dict[str, Any],
    tokens_file: Path,
    setting: dict[str, Any],
    tell: Callable[..., None],
) -> None:
    """Builds the peer and trains it for the job's steps."""
    tell("phase", name="the imports")
    import numpy
    import torch

    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    tokens = numpy.load(tokens_file)
    sys.path.append(str(Path(__file__).parent))
    peer = importlib.import_module(f"peer_{name}")
    tell("phase", name="building the model")
    model = peer.build(job, setting)
    model.train()
    if job["is_checkpointing"]:
        enable = (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )
        enable()
    tell("phase", name="initialize")
    training = peer.Training(model, job, setting)
    num_params = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    tell(
        "ready",
        num_params=num_params,
        threads=torch.get_num_threads(),
        device=training.device,
        versions={package: sys.modules[package].__version__ for package in peer.PACKAGES}
        | {"python": platform.python_version()},
        state_bytes=num_params * (12 if job["precision"] == "fp32" else 14),
    )
    _run_steps(training, job, tokens, tell)
    tell("phase", name="close")
    on_device = _device_fields(training.device)
    training.close()
    tell("done", peak_rss_bytes=_peak_resident(), **on_device)


def _run_steps(training: Any, job: dict[str, Any], tokens: Any, tell: Callable[..., None]) -> None:
    import torch

    def timed(
        seconds: dict[str, float], what: str, step: int, verb: Callable[..., Any], *arguments: Any
    ) -> Any:
        tell("phase", name=f"{what} of step {step}")
        begin = time.monotonic()
        answer = verb(*arguments)
        if training.device != "cpu":
            torch.cuda.synchronize()
        seconds[what] += time.monotonic() - begin
        return answer

    num_micro = int(job["config"].get("gradient_accumulation_steps", 1))
    for step in range(1, job["steps"] + 1):
        started = time.monotonic_ns()
        seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        loss_sum = 0.0
        for micro in range(num_micro):
            batch = torch.from_numpy(tokens[(step - 1) * num_micro + micro].astype("int64")).to(
                training.device
            )

            loss = timed(seconds, "forward", step, training.forward, batch)
            timed(seconds, "backward", step, training.backward, loss)
            loss_sum += float(loss.detach())
            del loss
            timed(seconds, "step", step, training.step)
        tell(
            "step",
            step=step,
            start_ns=started,
            end_ns=time.monotonic_ns(),
            loss=loss_sum / num_micro,
            **{f"{what}_s": taken for what, taken in seconds.items()},
            tokens=num_micro * int(batch.numel()),
            **_device_fields(training.device),
        )


def _device_fields(device: str) -> dict[str, Any]:
    """What run_record.py's device_fields tells of our own run."""
    if device == "cpu":
        return {}
    import torch

    free, total = torch.cuda.mem_get_info()
    figures = {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "free_bytes": free,
        "total_bytes": total,
    }
    return {"device_memory": {**figures, "device": device}}


def _peak_resident() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


if __name__ == "__main__":
    sys.exit(main())
