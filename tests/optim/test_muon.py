"""Are matrices stepped whole, as torch's Muon steps them, and everything else by AdamW?"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.optim.rules import orthogonalise

NS = (3.4445, -4.775, 2.0315)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Hidden matrices and biases; embedding and head apart."""
    apart = [model.embed.weight, model.head.weight]
    hidden = [p for p in model.parameters() if all(p is not other for other in apart)]
    return [{"params": hidden}, {"params": apart, "use_muon": False, "eps": 1e-6}]


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (33, 33), (1, 7)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_matrices_follow_torch(shape: tuple[int, int], nesterov: bool, adjust: str | None) -> None:
    numbers = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in "12")
    options = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust}
    optim, twin = tiermem.Muon([ours], **options), torch.optim.Muon([theirs], **options)
    for _ in range(5):
        grad = torch.randn(shape, generator=numbers)
        for param, each in ((ours, optim), (theirs, twin)):
            param.grad = grad.clone()
            each.step()
    # a momentum that rounds to the neighbouring bf16 moves the iteration by some of its units
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05 * 0.02)
    torch.testing.assert_close(
        optim.state[ours]["momentum_buffer"], twin.state[theirs]["momentum_buffer"]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(20, 50), (50, 20)])
def test_the_update_is_nearly_orthogonal(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrix, NS, 5, 1e-7, dtype).float())
    assert values.min() > 0.5 and values.max() < 1.5
    assert orthogonalise(torch.zeros(shape), NS, 5, 1e-7, dtype).abs().max() == 0


def test_what_is_no_matrix_and_what_is_kept_apart_is_stepped_by_adamw() -> None:
    matrix, bias, head = (nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (4,), (5, 4)))
    twins = [nn.Parameter(p.detach().clone()) for p in (bias, head)]
    groups = [{"params": [matrix, bias]}, {"params": [head], "use_muon": False, "eps": 1e-4}]
    optim = tiermem.Muon(groups, lr=0.1, weight_decay=0.2)
    twin = torch.optim.AdamW(
        [{"params": twins[:1]}, {"params": twins[1:], "eps": 1e-4}],
        lr=0.1,
        betas=(0.9, 0.95),
        weight_decay=0.2,
    )
    for _ in range(3):
        for param in (matrix, bias, head, *twins):
            param.grad = torch.full_like(param, 1e-3)
        optim.step()
        twin.step()
    torch.testing.assert_close(bias, twins[0])
    torch.testing.assert_close(head, twins[1])
    assert set(optim.state[matrix]) == {"step", "momentum_buffer"}
    assert set(optim.state[head]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("preset", ["exact", "compact", "bf16", "tiny"])
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_a_sharded_model_is_stepped_as_an_ordinary_one(
    preset: str, home: Tier, tmp_path: Path
) -> None:
    model = seeded(lambda: Tower(width=64, inner=128, num_blocks=2)).bfloat16()
    plain = copy.deepcopy(model)
    names = {id(p): name for name, p in plain.named_parameters()}
    groups = [{**g, "params": [(names[id(p)], p) for p in g["params"]]} for g in groups_of(plain)]
    losses = train_steps(plain, tiermem.Muon(groups, lr=0.02, precision=preset), range(4))
    policy = OffloadPolicy(
        params=home,
        optim=home,
        paths=[tmp_path],
        persistence_numel=200,  # biases elsewhere, so that matrices end where pages do
        tile_numel=8192,
        precision=Precision.preset(preset),
    )
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.Muon(groups_of(model), lr=0.02)
        assert train_steps(model, optim, range(4)) == losses
        tiles = optim.tiles_of(shards).tiles
        if home is Tier.NVME:
            # between matrices, never through one
            assert len([t for t in tiles if "layers.0" in t.live.unit.name]) > 1


def test_a_matrix_larger_than_a_tile_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    model = seeded(lambda: Tower(width=64, inner=128, num_blocks=1))
    policy = OffloadPolicy(
        optim=Tier.NVME, params=Tier.NVME, paths=[tmp_path], persistence_numel=0, tile_numel=4096
    )
    with tiermem.shard(model, policy):
        message = r"layers\.0\.\w+\.weight has 8192 elements .* a tile's buffer holds 4096.*OffloadPolicy\(tile_numel=\d+\)"
        with pytest.raises(ValueError, match=message):
            tiermem.Muon(groups_of(model))


def test_the_size_that_a_refusal_names_is_enough(tmp_path: Path) -> None:
    # no parameter ends where a page does
    model = seeded(lambda: Tower(width=48, inner=100, num_blocks=1))

    def refusal(tile_numel: int) -> str | None:
        policy = OffloadPolicy(
            optim=Tier.NVME,
            params=Tier.NVME,
            paths=[tmp_path],
            persistence_numel=0,
            tile_numel=tile_numel,
        )
        with tiermem.shard(copy.deepcopy(model), policy) as shards:
            try:
                tiermem.Muon(groups_of(shards.model))
            except ValueError as error:
                return str(error)
        return None

    tile_numel, message = 4096, refusal(4096)
    while message is not None:
        found = re.search(r"OffloadPolicy\(tile_numel=(\d+)\)", message)
        assert found is not None and int(found[1]) > tile_numel
        tile_numel = int(found[1])
        message = refusal(tile_numel)
    assert tile_numel <= 4 * 4096
