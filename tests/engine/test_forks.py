"""Is a forked child, which has neither arena nor threads, refused at every entry to a model? Else
it ends with SIGSEGV."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forked
from programs.models import Tower
from programs.twins import batch, loss_of, seeded

import tiermem
from tiermem import utils
from tiermem.zero import GatheredParameters

PLACES: dict[str, dict[str, Any]] = {
    "persistent": {"stage": 3},
    "host": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "cpu"},
    },
    "nvme": {
        "stage": 3,
        "stage3_param_persistence_threshold": 50,
        "offload_param": {"device": "nvme"},
    },
    "stage 0": {"stage": 0},
}
HARMLESS = {
    *("close", "destroy"),  # they do nothing in a child
    *("no_sync", "scale", "set_gradient_accumulation_boundary", "is_compiled", "micro_steps"),
    *("set_train_batch_size", "set_train_micro_batch_size"),
    *("coalesce_grad_reduction", "is_gradient_accumulation_boundary", "compile"),
    *("empty_partition_cache", "offload_states", "reload_states"),  # nothing is gathered in a child
    # tried below: "writes" and "module_state_dict" do the same
    *("apply", "save_fp16_model", "save_16bit_model"),
}
"""Public names of Engine that need no refusal, or are others' names."""


REFUSALS = [
    "forked child may not use it",
    "its run lives",  # to every other process
    "would be lost",  # to every writer
    "fork-based multiprocessing",  # by torch, where a device's backward has run in the parent
]


def entries(engine: tiermem.Engine, folder: Path) -> dict[str, Callable[[], object]]:
    """Everything that would use the parent's memory, by the name of a method of the engine or of a
    function."""
    model, shards, optimizer, x = engine.module, engine.shards, engine.optimizer, batch(0)[0]
    assert optimizer is not None
    param = model.head.weight
    whole, part, states = torch.zeros(param.shape), torch.zeros(param.numel()), "exp_avg"
    partly = [] if shards.policy.stage == 0 else ["local"]
    safe = {f"get_{form}_fp32_param": (param,) for form in ("full", *partly)}
    found: dict[str, tuple[Any, ...]] = dict(safe)
    for form, value in (("full", whole), *((each, part) for each in partly)):
        found |= {
            f"set_{form}_fp32_param": (param, value),
            f"get_{form}_optimizer_state": (param, states),
        }
        found |= {f"set_{form}_optimizer_state": (param, value, states)}
        found |= {f"get_{form}_grad": (param,), f"set_{form}_grad": (param, value)}
    found["update_full_grad_vectorized"] = ([param], lambda value, param: value)
    found["update_local_states_vectorized"] = ([param], lambda states, param, elements: None)
    uses: dict[str, Callable[[], object]] = {
        f"safe_{name}": lambda name=name, given=given: getattr(utils, f"safe_{name}")(*given)  # type: ignore[misc]
        for name, given in found.items()
    }
    loss, loss_of_model, loss_of_module = (
        loss_of(engine, 0),
        loss_of(model, 1),
        model.layers[0](torch.randn(2, 31)).sum(),
    )
    return uses | {
        "forward": lambda: engine(x),
        "model": lambda: model(x),
        "module": lambda: model.layers[0](torch.randn(2, 31)),
        "read": lambda: param.sum(),
        "write": lambda: param.data.fill_(1.0),
        "writes": lambda: [each.data.fill_(1.0) for each in model.parameters()],
        "GatheredParameters": lambda: (GatheredParameters([param]).__enter__(), param.sum()),
        "backward": lambda: engine.backward(loss),
        "backward of the model": loss_of_model.backward,
        "backward of a module": loss_of_module.backward,
        "step": engine.step,
        "train_batch": lambda: engine.train_batch([(x, x)], lambda made, _: made.sum()),
        "optimizer.step": optimizer.step,
        "optimizer.state_dict": optimizer.state_dict,
        "allreduce_gradients": engine.allreduce_gradients,
        "module_state_dict": engine.module_state_dict,
        "load_state_dict": lambda: model.load_state_dict(seeded(Tower).state_dict()),
        "weight": lambda: shards.weight(param),
        "save_checkpoint": lambda: engine.save_checkpoint(folder / "other"),
        "load_checkpoint": lambda: engine.load_checkpoint(folder / "saved"),
        "wait_checkpoint": engine.wait_checkpoint,
        "save": lambda: tiermem.checkpoint.save(shards, optimizer, folder / "other"),
    }


@pytest.mark.parametrize("place", PLACES)
def test_a_forked_child_is_refused_at_every_entry(place: str, tmp_path: Path) -> None:
    zero = dict(PLACES[place])
    if "offload_param" in zero:
        zero["offload_param"] = zero["offload_optimizer"] = {
            **zero["offload_param"],
            "nvme_path": str(tmp_path),
        }
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    engine = tiermem.initialize(model=seeded(Tower), config=config)[0]
    engine.backward(loss_of(engine, 0))
    engine.step()
    engine.save_checkpoint(tmp_path / "saved")
    uses = entries(engine, tmp_path)
    assert {name for name in vars(tiermem.Engine) if not name.startswith("_")} <= {*uses, *HARMLESS}

    def use_all() -> None:
        torch.set_num_threads(1)  # a child has no threads of OpenMP to wait for
        assert all(
            each.ds_tensor.isnan().all()
            for each in engine.module.parameters()
            if hasattr(each, "ds_tensor")
        )
        for name, use in uses.items():
            with pytest.raises((RuntimeError, OSError), match="|".join(REFUSALS)):
                print(name, use())
        engine.close()

    assert os.waitstatus_to_exitcode(os.waitpid(forked(use_all), 0)[1]) == 0
    engine.step()
    assert torch.isfinite(loss_of(engine, 3))
    engine.close()
