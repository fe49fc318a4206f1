"""Is a model that cannot be trained here refused with what to change, before a weight is moved?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier


@pytest.fixture(params=[Tier.DEVICE, Tier.NVME])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> OffloadPolicy:
    return OffloadPolicy(
        params=request.param, optim=request.param, paths=[tmp_path], persistence_numel=20
    )


def test_a_complex_parameter_is_refused(policy: OffloadPolicy) -> None:
    model = nn.Linear(13, 31, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"'weight' is torch\.complex64.*view_as_real"):
        tiermem.shard(model, policy)
    assert model.weight.isfinite().all()


def test_a_frozen_complex_parameter_is_kept(policy: OffloadPolicy) -> None:
    class Rotate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(
                torch.polar(torch.ones(31), torch.arange(31.0)), requires_grad=False
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(torch.view_as_complex(x) * self.turn)

    model, x = Rotate(), torch.randn(3, 31, 2)
    expected = model(x)
    with tiermem.shard(model, policy):
        assert torch.equal(model(x), expected)


def test_gradients_of_a_sparse_embedding_are_refused(policy: OffloadPolicy) -> None:
    model = nn.Sequential(nn.Embedding(61, 13, sparse=True), nn.Linear(13, 3))
    with pytest.raises(ValueError, match=r"'0' makes sparse gradients.*sparse=False"):
        tiermem.shard(model, policy)
    assert model[0].weight.isfinite().all()


def test_a_sparse_embedding_that_is_frozen_is_kept(policy: OffloadPolicy) -> None:
    model = nn.Sequential(nn.Embedding(61, 13, sparse=True).requires_grad_(False), nn.Linear(13, 3))
    tokens = torch.tensor([[1, 5, 60]])
    expected = model(tokens)
    with tiermem.shard(model, policy):
        assert torch.equal(model(tokens), expected)


def test_a_lazy_module_that_was_never_called_is_refused(policy: OffloadPolicy) -> None:
    model = nn.Sequential(nn.LazyLinear(31), nn.Linear(31, 3))
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet.*call the model once"):
        tiermem.shard(model, policy)


def test_a_parameter_without_values_is_refused(policy: OffloadPolicy) -> None:
    model = nn.Sequential(nn.Linear(3, 31), nn.Linear(31, 3, device="meta"))
    with pytest.raises(ValueError, match=r"'1\.weight' is on the meta device.*zero\.Init"):
        tiermem.shard(model, policy)
    assert model[0].weight.isfinite().all()


def test_rwkv_that_rescales_its_weights_is_refused(policy: OffloadPolicy) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.RwkvConfig(vocab_size=61, hidden_size=32, num_hidden_layers=4)
    config.rescale_every = 2
    model, x = transformers.RwkvForCausalLM(config).eval(), torch.arange(12)[None]
    with torch.no_grad():
        expected = model(x).logits
    model.train()(x)  # which restores the weights
    if policy.params is not Tier.DEVICE:  # where weights are always present
        with pytest.raises(ValueError, match=r"'rwkv' writes its weights.*rescale_every = 0"):
            tiermem.shard(model, policy)
        config.rescale_every = 0
    with tiermem.shard(model, policy):
        model(x, labels=x).loss.backward()
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x).logits, expected, rtol=0, atol=1e-3)
