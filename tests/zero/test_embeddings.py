"""What does an embedding's table cost in backward, and which embeddings are trained as plain torch
trains them?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.twins import assert_same_tensors, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Shards, Tier

NUM_ROWS, WIDTH = 37, 11
TOKENS = torch.tensor([[3, 5, 3, 0], [36, 3, 2, 5]])


class Table(nn.Module):
    """An embedding, a Linear, and a loss of both."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_ROWS, WIDTH, **options)
        self.head = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)).square().mean()


def policy(folder: Path, **fields: Any) -> OffloadPolicy:
    return OffloadPolicy(
        **(
            {"params": Tier.NVME, "paths": [folder], "persistence_numel": 0, "unit_buffers": 1}
            | fields
        )
    )


def reads(shards: Shards) -> list[str]:
    found = [
        event.name.split("/")[-1] for event in shards.store.recorder.events if event.lane == "read"
    ]
    shards.store.recorder.forget()
    return found


def train(model: nn.Module) -> list[float]:
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    return train_steps(model, optim, range(3), loss_of=lambda model, _: model(TOKENS))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_its_table_is_read_for_forward_alone_and_trains_like_a_plain_one(
    options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Table(**options)
    plain = copy.deepcopy(model)
    with tiermem.shard(model, policy(tmp_path)) as shards:
        reads(shards)
        model(TOKENS).backward()
        assert reads(shards) == ["embed", "head"]
        model.zero_grad()
        assert train(model) == train(plain)
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_users_hook_that_multiplies_by_the_table_has_it_in_backward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Table()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each.embed.register_forward_hook(
            lambda module, args, out: out @ module.weight.t() @ module.weight
        )
    with tiermem.shard(model, policy(tmp_path)):
        assert train(model) == train(plain)


def test_a_subclass_has_it_in_backward(tmp_path: Path) -> None:
    class Projected(nn.Embedding):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) @ self.weight.t() @ self.weight

    torch.manual_seed(0)
    model = Table()
    model.embed = Projected(NUM_ROWS, WIDTH)
    plain = copy.deepcopy(model)
    with tiermem.shard(model, policy(tmp_path)):
        assert train(model) == train(plain)


def test_a_table_that_makes_the_logits_too_is_there_for_their_backward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Table()
    model.head = nn.Linear(WIDTH, NUM_ROWS, bias=False)
    model.head.weight = model.embed.weight
    plain = copy.deepcopy(model)
    with tiermem.shard(model, policy(tmp_path)):
        assert train(model) == train(plain)


def test_a_gradient_penalty_goes_back_through_the_lookup(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Table()
    plain = copy.deepcopy(model)
    norms = []
    with tiermem.shard(model, policy(tmp_path)):
        for each in (model, plain):
            looked_up = each.embed(TOKENS)
            (slope,) = torch.autograd.grad(
                each.head(looked_up).pow(3).sum(), looked_up, create_graph=True
            )
            slope.square().sum().backward()
            optim = tiermem.AdamW(each.parameters(), lr=1e-2)
            optim.step()
            norms.append(each(TOKENS).item())
    assert norms[0] == norms[1]


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_is_refused_where_it_would_be_lost(make: Any) -> None:
    model = nn.ModuleDict({"table": make(5, 3, max_norm=1.0)})
    with pytest.raises(
        ValueError, match=r"'table' has max_norm=1\.0: it writes its weights in forward"
    ):
        tiermem.shard(model)
    model.requires_grad_(False)
    tiermem.shard(model).close()
