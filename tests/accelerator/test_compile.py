"""Does torch.compile work where weights are streamed to a device, and are CUDA graphs refused
there?"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import batch, seeded
from torch.nn import functional as F

import tiermem

STREAMED = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
RESIDENT = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


def engine_of(zero: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
    }
    return tiermem.initialize(model=seeded(Tower), config=config)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"compile_kwargs": {"mode": "reduce-overhead"}}, "mode='reduce-overhead'"),
        ({"compile_kwargs": {"mode": "max-autotune"}}, "mode='max-autotune'"),
        ({"compile_kwargs": {"options": {"triton.cudagraphs": True}}}, "triton.cudagraphs"),
        ({"backend": "cudagraphs"}, "backend='cudagraphs'"),
    ],
)
def test_graphs_are_refused_where_addresses_change(
    options: dict[str, Any], asked: str, sim: ModuleType
) -> None:
    engine = engine_of(STREAMED)
    with pytest.raises(ValueError, match=f"compile: {asked} captures CUDA graphs"):
        engine.compile(**options)
    engine.compile(compile_kwargs={"mode": "max-autotune-no-cudagraphs"})
    engine.close()
    engine = engine_of(RESIDENT)  # weights that stay keep their address
    engine.compile(**options)
    engine.close()


def test_a_capture_is_refused_where_addresses_change_and_training_goes_on(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `torch.cuda.graph` begins one: weights that stay may be captured."""
    expected = None
    for is_captured in (False, True):
        engine, losses = engine_of(STREAMED), []
        for step in range(2):
            tokens, targets = (each.to("sim") for each in batch(step))
            if is_captured:
                with monkeypatch.context() as patched:
                    patched.setattr(sim, "is_current_stream_capturing", lambda: True, raising=False)
                    with pytest.raises(RuntimeError, match="a graph is being captured with unit"):
                        engine(tokens)
            loss = F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
        assert losses == (expected := expected or losses)
    monkeypatch.setattr(sim, "is_current_stream_capturing", lambda: True, raising=False)
    engine = engine_of(RESIDENT)
    engine(tokens)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("per_block", [True, pytest.param(False, marks=[pytest.mark.slow])])
def test_a_compiled_model_has_the_bits_of_the_plain_one(per_block: bool, sim: ModuleType) -> None:
    losses = []
    for compiled in (False, True):
        engine = engine_of(STREAMED)
        model = engine
        if compiled and per_block:
            engine.compile(backend="aot_eager")
        elif compiled:
            model = torch.compile(engine.module, backend="aot_eager")
        for step in range(2):
            tokens, targets = (each.to(engine.device) for each in batch(step))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
    assert losses[:2] == losses[2:]
