"""Is a forward's maths counted once, by the parameters that multiply, whether their units come and
go or stay?"""

from __future__ import annotations

import pytest
from programs import models
from programs.twins import seeded
from torch import nn

from tiermem import OffloadPolicy, Tier
from tiermem.forecast import uses_of
from tiermem.forecast.rates import Compute
from tiermem.units.unit import divide


def total(model: nn.Module, persistence_numel: int, compute: Compute) -> tuple[float, float]:
    policy = OffloadPolicy(params=Tier.HOST, persistence_numel=persistence_numel)
    uses = uses_of(model, divide(model, policy, 1), compute)
    return sum(use.forward_s for use in uses), sum(use.backward_s for use in uses)


def matrices(model: nn.Module) -> int:
    embedded = {
        param for m in model.modules() if isinstance(m, nn.Embedding) for param in m.parameters()
    }
    return sum(
        param.numel() for param in model.parameters() if param.dim() > 1 and param not in embedded
    )


@pytest.mark.parametrize("persistence_numel", [0, 50, 4000, 1 << 30])
def test_every_matrix_multiplies_once_also_when_it_is_always_present(
    persistence_numel: int,
) -> None:
    model = seeded(models.ShortTower)
    forward_s, backward_s = total(model, persistence_numel, Compute(1.0, 2.0))
    assert (forward_s, backward_s) == (matrices(model), 2 * matrices(model))


@pytest.mark.parametrize("persistence_numel", [0, 1 << 30])
def test_the_rest_of_a_measured_model_is_taken_whole(persistence_numel: int) -> None:
    model = seeded(models.ShortTower)
    in_blocks = sum(matrices(each) for each in model.modules() if isinstance(each, nn.ModuleList))
    forward_s, backward_s = total(model, persistence_numel, Compute(1.0, 2.0, 70_000.0, 110_000.0))
    assert (forward_s, backward_s) == (in_blocks + 70_000, 2 * in_blocks + 110_000)


def test_a_tied_head_multiplies_what_the_embedding_looks_up() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(31, 7), nn.Linear(7, 31, bias=False)
            self.head.weight = self.embedding.weight

    assert total(Tied(), 0, Compute(1.0, 2.0)) == (31 * 7, 2 * 31 * 7)


def test_peaks_count_two_operations_forward_and_four_or_six_backward() -> None:
    plain, recomputed = Compute.of_peak(1e12, 50), Compute.of_peak(1e12, 50, recomputed=1)
    assert plain == (2 * 50 / 1e12, 4 * 50 / 1e12, None, None, 50)
    assert recomputed.backward_s == pytest.approx(6 * 50 / 1e12)
