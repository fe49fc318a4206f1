"""Does a compiled engine compute what a compiled plain model does, with its hooks outside the
graphs?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, loss_of, seeded
from torch import nn

import tiermem


def started(model: nn.Module, folder: Path) -> tiermem.Engine:
    on_nvme = {"device": "nvme", "nvme_path": str(folder)}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 50, "offload_optimizer": on_nvme, "offload_param": on_nvme,
        },
    }  # fmt: skip
    return tiermem.initialize(model=model, config=config)[0]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_compiled_engine_trains_as_a_compiled_plain_model(backend: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    model = seeded(models.ShortTower)
    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
    engine = started(model, tmp_path)
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    engine.compile(backend=counting, compile_kwargs={"fullgraph": True})
    engine.compile(backend="not looked at again")
    assert engine.is_compiled
    twin = tiermem.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    for number in range(3):
        loss, other = loss_of(engine, number), loss_of(plain, number)
        assert loss.item() == other.item()
        engine.backward(loss)
        engine.step()
        other.backward()
        twin.step()
        twin.zero_grad()
    assert 1 <= len(graphs) <= 3  # embedding, head and one for all blocks
    assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
    engine.close()
    assert not any("forward" in vars(module) for module in model.modules())
    torch.compiler.reset()


def test_only_modules_that_hold_no_other_units_are_compiled(tmp_path: Path) -> None:
    engine = started(seeded(models.NanoGPT), tmp_path)
    assert not engine.is_compiled
    engine.compile(backend="eager")
    named = {name for name, module in engine.module.named_modules() if "forward" in vars(module)}
    assert {f"transformer.h.{i}" for i in range(3)} <= named
    assert "" not in named
    engine.close()


def test_what_does_not_exist_here_is_refused(tmp_path: Path) -> None:
    engine = started(seeded(models.ShortTower), tmp_path)
    for asked in ({"schedule": [(0, [])]}, {"compiled_autograd_enabled": True}):
        with pytest.raises(ValueError, match="no schedule of passes and no compiled autograd here"):
            engine.compile(**asked)
    engine.close()
