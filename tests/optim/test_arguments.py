"""Is what an optimizer cannot do refused, saying what was given, what is allowed and what to
change?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import models
from programs.twins import loss_of, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.optimizers import PARAMS


def build(kind: str, params: Any = None, **options: Any) -> torch.optim.Optimizer:
    return getattr(tiermem, kind)(
        [nn.Parameter(torch.ones(2, 2))] if params is None else params, **options
    )


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("group", [{}, {"lr": -1.0}, {"lr": float("nan")}, {"weight_decay": -0.1}])
def test_values_out_of_range_are_refused_in_every_group(kind: str, group: dict[str, float]) -> None:
    params = [
        {"params": [nn.Parameter(torch.ones(2, 2))]},
        {"params": [nn.Parameter(torch.ones(2))], **group},
    ]
    if not group:
        assert len(build(kind, params).param_groups) == 2
        return
    with pytest.raises(ValueError, match=rf"{next(iter(group))} is .*; allowed are 0.0 to inf"):
        build(kind, params)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("AdamW", {"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0; allowed are 0.0 to 1.0 \(excluded\)"),
        ("Lion", {"betas": (0.9, -0.1)}, r"betas\[1\] is -0.1"),
        ("Muon", {"betas": (0.9, 1.5)}, r"betas\[1\] is 1.5"),
        ("Adagrad", {"initial_accumulator_value": -1.0}, "initial_accumulator_value is -1.0"),
        ("SGD", {"momentum": 0.0, "nesterov": True}, "nesterov=True with momentum=0.0"),
        ("SGD", {"momentum": 0.9, "dampening": 0.1, "nesterov": True}, "dampening of 0"),
        ("Muon", {"adjust_lr_fn": "mine"}, "'mine'; allowed are None, original, match_rms_adamw"),
        ("Muon", {"ns_steps": 100}, "ns_steps is 100; allowed are 0 to 99"),
        (
            "Muon",
            {"ns_dtype": torch.float16},
            "float16; allowed are torch.bfloat16 and torch.float32",
        ),
        ("AdamW", {"precision": "small"}, "preset is 'small'; allowed are exact, compact"),
    ],
)
def test_options_out_of_range_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(kind, **options)


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable", "differentiable"])
def test_a_choice_of_implementation_is_taken_only_when_it_asks_for_nothing(option: str) -> None:
    build("AdamW", **{option: False})
    with pytest.raises(
        ValueError, match=f"{option}=True asks for something that does not exist here"
    ):
        build("AdamW", **{option: True})
    with pytest.raises(ValueError, match=f"{option}=True"):
        build("AdamW", [{"params": [nn.Parameter(torch.ones(1))], option: True}])


@pytest.mark.parametrize(
    ("param", "precision", "message"),
    [
        (
            torch.ones(2, dtype=torch.float64),
            None,
            "'0' is torch.float64; an optimizer steps torch.float32",
        ),
        (
            torch.ones(2, dtype=torch.float16),
            "compact",
            "master is 'split' and parameter '0' is torch.float16",
        ),
        (
            torch.ones(2, dtype=torch.float16),
            "bf16",
            "master is 'bf16' and parameter '0' is torch.float16",
        ),
        (
            torch.ones(2, dtype=torch.bfloat16),
            Precision(grads="fp32"),
            "autograd accumulates its gradient in its own",
        ),
    ],
)
def test_parameters_that_cannot_be_kept_so_are_refused_at_once(
    param: torch.Tensor, precision: Precision | str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build("AdamW", [nn.Parameter(param)], precision=precision)


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    optim = build("AdamW")
    with pytest.raises(ValueError, match="float64"):
        optim.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    assert len(optim.param_groups) == 1
    optim.step()


def test_gradients_that_cannot_be_stepped_are_refused_before_anything_is() -> None:
    first = nn.Parameter(torch.ones(2))
    table = nn.Embedding(5, 3, sparse=True)
    optim = build("AdamW", [("first", first), ("table", table.weight)])
    (table(torch.tensor([1])).sum() + first.sum()).backward()
    with pytest.raises(
        ValueError, match=r"'table' is torch.sparse_coo; .* torch\.optim\.SparseAdam"
    ):
        optim.step()
    assert (first == 1).all()
    assert not optim.state


def test_a_parameter_of_overlapping_elements_is_refused() -> None:
    param = nn.Parameter(torch.ones(1, 3).expand(4, 3))
    optim = build("AdamW", [param])
    param.sum().backward()
    with pytest.raises(ValueError, match="Make it contiguous"):
        optim.step()


def test_a_parameter_elsewhere_is_refused() -> None:
    param = nn.Parameter(torch.ones(3, device="meta"))
    optim = build("AdamW", [param])
    param.grad = torch.ones(3, device="meta")
    with pytest.raises(ValueError, match="'0' is on meta; such are stepped on the CPU"):
        optim.step()


# ---- against the plan ----------------------------------------------------------------------------


def test_more_moments_than_planned_are_refused_with_the_arithmetic() -> None:
    model = seeded(models.ShortTower)
    with tiermem.shard(model) as shards:
        numel = sum(live.unit.shard_numel for live in shards.units)
        message = rf"keeps 3 moments .*num_moments=2 .* 3 x {numel} = {3 * numel} .*OffloadPolicy\(num_moments=3\)"
        with pytest.raises(ValueError, match=message):
            build("AdamW", model.parameters(), amsgrad=True)
        build("AdamW", model.parameters())  # the refusal has taken nothing


@pytest.mark.parametrize(
    ("kind", "options", "num_moments"),
    [
        ("AdamW", {"amsgrad": True}, 3),
        ("Lion", {}, 1),
        ("SGD", {"momentum": 0.9}, 1),
        ("SGD", {}, 0),
        ("Adagrad", {}, 1),
    ],
)
def test_every_rule_steps_a_sharded_model_as_an_ordinary_one(
    kind: str, options: dict[str, Any], num_moments: int, tmp_path: Any
) -> None:
    policy = OffloadPolicy(
        params=Tier.NVME,
        optim=Tier.NVME,
        paths=[tmp_path],
        num_moments=num_moments,
        tile_numel=4096,
    )
    weights = []
    for is_sharded in (False, True):
        model = seeded(models.ShortTower)
        shards = tiermem.shard(model, policy) if is_sharded else None
        optim = build(kind, model.parameters(), lr=1e-3, weight_decay=0.1, **options)
        for step in range(4):
            loss_of(model, step).backward()
            optim.step()
            optim.zero_grad()
        if shards is not None:
            shards.close(materialize=True)
        weights.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    assert torch.equal(*weights)


def test_a_precision_that_contradicts_the_policy_is_refused() -> None:
    model = seeded(models.ShortTower)
    with tiermem.shard(model):
        with pytest.raises(ValueError, match=r"set OffloadPolicy\(precision=\.\.\.\)"):
            build("AdamW", model.parameters(), precision="compact")
        build("AdamW", model.parameters(), precision="exact")


def test_names_of_the_references_optimizers_lead_to_ours() -> None:
    optimizer = build("AdamW", seeded(models.ShortTower).parameters())
    with pytest.raises(
        AttributeError,
        match=r"'AdamW' object has no attribute 'fp16_groups': safe_get_full_fp32_param",
    ):
        optimizer.fp16_groups  # noqa: B018
    with pytest.raises(AttributeError, match=r"'step_subgroup': tiermem.step_in_backward"):
        optimizer.step_subgroup()
    assert not hasattr(optimizer, "anything_else")
