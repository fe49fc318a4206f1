"""Does every snippet of the ZeRO documentation work when its imports are replaced?

Typos of the document are corrected here and nowhere else: commas between sections of a config,
`super().__init__()` without `self`, `backward(loss)`, `safe_set_*` where it says `safe_get_*` to
set, the local tensor made like `ds_tensor`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import VOCAB, Block
from programs.twins import batch, seeded
from torch import nn
from torch.nn import functional as F

import tiermem
from tiermem import zero

OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
}


def example(number: int, nvme: Path) -> dict[str, Any]:
    """The example configurations, with the `...` filled in: a micro-batch, and an optimizer where
    none is shown."""
    sections: list[dict[str, Any]] = [
        {"stage": 3},
        {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(nvme)},
            "offload_param": {"device": "nvme", "nvme_path": str(nvme)},
        },
        {"stage": 3, "mics_shard_size": 1},
    ]
    config: dict[str, Any] = {
        "zero_optimization": sections[number - 1],
        "train_micro_batch_size_per_gpu": 2,
    }
    precision: dict[str, Any] = (
        {"fp16": {"enabled": True}} if number == 1 else {"bf16": {"enabled": True}}
    )
    return config | precision | {"optimizer": OPTIMIZER}


class MyLargeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, 31)
        self.layers = nn.ModuleList([Block(31, 97) for _ in range(2)])
        self.head = nn.Linear(31, VOCAB)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(inputs)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_example_configurations_train(number: int, tmp_path: Path) -> None:
    config = example(number, tmp_path)
    model = seeded(MyLargeModel)
    engine, _, _, _ = tiermem.initialize(model=model, config=config)
    losses = []
    for _ in range(12):
        loss = engine(*batch(0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    assert losses[-1] < losses[0]


def test_massive_models_are_built_in_the_context_and_the_cache_is_emptied(tmp_path: Path) -> None:
    config = example(4, tmp_path)
    with zero.Init(config_dict_or_path=config):
        model = MyLargeModel()
    ds_engine, _, _, _ = tiermem.initialize(model=model, config=config)
    for step in range(3):
        loss = ds_engine(*batch(step))
        ds_engine.backward(loss)
        ds_engine.step()

    # Free memory consumed by model parameters
    ds_engine.empty_partition_cache()
    assert not any(live.is_present for live in ds_engine.shards.units if not live.unit.is_resident)
    ds_engine.destroy()


def test_init_needs_no_config() -> None:
    with zero.Init():
        model = MyLargeModel()
    engine, _, _, _ = tiermem.initialize(
        model=model, config=example(2, Path()) | {"bf16": {"enabled": False}}
    )
    assert engine(*batch(0)).isfinite()
    engine.destroy()


# ---- external parameters -------------------------------------------------------------------------


def compute_logits(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(output, weight)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, 31)
        self.body = Block(31, 97)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        embeds = self.embeddings(inputs)
        output = self.body(embeds)
        return compute_logits(output, self.embeddings.weight)


class CustomLinear(torch.nn.Linear):
    def forward(self, *input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = super().forward(*input)
        return output, self.bias


class UsesCustomLinear(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.custom = CustomLinear(31, 31)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output, bias = self.custom(self.embeddings(inputs))
        return compute_logits(output + 2 * bias, self.embeddings.weight)


class OtherLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(31, 31)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(self.own(x), weight)


class ModuleZ3(torch.nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.embeddings = nn.Embedding(VOCAB, 31)
        self.layer1 = nn.Linear(31, VOCAB)
        self.layer2 = OtherLayer()
        zero.register_external_parameter(self, self.layer1.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.layer1(self.embeddings(input))
        # self.layer1.weight is required by self.layer2.forward
        return self.layer2(F.linear(x, self.layer1.weight.t()), self.layer1.weight)


@pytest.mark.parametrize("kind", [LanguageModel, UsesCustomLinear, ModuleZ3])
def test_external_parameters_are_coordinated(kind: type[nn.Module], tmp_path: Path) -> None:
    model = seeded(kind)
    plain = copy.deepcopy(model)
    config = example(4, tmp_path) | {"bf16": {"enabled": False}, "gradient_clipping": 0.0}
    config["zero_optimization"] |= {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
    }
    engine, _, _, _ = tiermem.initialize(model=model, config=config)
    optim = torch.optim.AdamW(plain.parameters(), **OPTIMIZER["params"])
    for step in range(3):
        inputs, labels = batch(step)
        loss, twin = (
            F.cross_entropy(m(inputs).flatten(0, 1), labels.flatten()) for m in (engine, plain)
        )
        assert loss.item() == pytest.approx(twin.item(), rel=1e-6)
        engine.backward(loss)
        engine.step()
        twin.backward()
        optim.step()
        optim.zero_grad()
    engine.destroy()


def test_registering_what_is_no_parameter_raises() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.nn\.Parameter"):
        zero.register_external_parameter(nn.Linear(2, 2), torch.zeros(2))


# ---- debugging -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 4])
def test_states_are_seen_between_backward_and_step(number: int, tmp_path: Path) -> None:
    from tiermem.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
    )

    model = seeded(MyLargeModel)
    engine, _, _, _ = tiermem.initialize(model=model, config=example(number, tmp_path))
    for step in range(2):
        loss = engine(*batch(step))
        engine.backward(loss)
        for n, lp in model.named_parameters():
            # 1. Access the full states
            hp_grad = safe_get_full_grad(lp)
            hp = safe_get_full_fp32_param(lp)
            exp_avg = safe_get_full_optimizer_state(lp, "exp_avg")
            exp_avg_sq = safe_get_full_optimizer_state(lp, "exp_avg_sq")
            for each in (hp_grad, hp, exp_avg, exp_avg_sq):
                assert (each.shape, each.dtype) == (lp.shape, torch.float32), n
            assert exp_avg.any() == (step > 0)

            # 2. Access the local states (zero3)
            local_hp = safe_get_local_fp32_param(lp)
            local_hp_grad = safe_get_local_grad(lp)
            local_exp_avg = safe_get_local_optimizer_state(lp, "exp_avg")
            local_exp_avg_sq = safe_get_local_optimizer_state(lp, "exp_avg_sq")
            for local, full in (
                (local_hp, hp),
                (local_hp_grad, hp_grad),
                (local_exp_avg, exp_avg),
                (local_exp_avg_sq, exp_avg_sq),
            ):
                assert torch.equal(local, full.flatten()), n  # one rank has it all
        engine.step()
    engine.destroy()


@pytest.mark.parametrize("number", [2, 4])
def test_states_are_set_to_zero(number: int, tmp_path: Path) -> None:
    from tiermem.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    for is_local in (False, True):
        model = seeded(MyLargeModel)
        engine, _, _, _ = tiermem.initialize(model=model, config=example(number, tmp_path))
        engine.backward(engine(*batch(0)))
        engine.step()
        for _, lp in model.named_parameters():
            if is_local:
                # For zero stage 3, each process sets its local fp32 parameters and their local
                # optimizer states individually
                zero_tensor_local = torch.zeros_like(lp.ds_tensor)

                safe_set_local_fp32_param(lp, zero_tensor_local)
                safe_set_local_optimizer_state(lp, zero_tensor_local, "exp_avg")
                safe_set_local_optimizer_state(lp, zero_tensor_local, "exp_avg_sq")
            else:
                # For zero stage 1 or 2, set the full fp32 and their full optim states
                zero_tensor = torch.zeros_like(lp)

                safe_set_full_fp32_param(lp, zero_tensor)
                safe_set_full_optimizer_state(lp, zero_tensor, "exp_avg")
                safe_set_full_optimizer_state(lp, zero_tensor, "exp_avg_sq")
        for n, lp in model.named_parameters():
            assert not safe_get_full_fp32_param(lp).any(), n
            assert not safe_get_full_optimizer_state(lp, "exp_avg").any(), n
            assert not engine.shards.weight(lp).any(), n
        engine.destroy()
