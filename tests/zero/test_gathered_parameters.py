"""What does GatheredParameters show, what does it keep, and what does it refuse? On one rank;
touch_on_ranks.py has more."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from programs import models
from programs.homes import all_at
from programs.models import logits_of
from programs.twins import assert_same_tensors, batch, is_absent, loss_of, seeded
from torch import nn
from torch.nn import functional as F

import tiermem
from tiermem import OffloadPolicy, Precision, Shards, Tier
from tiermem.weights.absent import RestingParameter
from tiermem.zero import GatheredParameters, Init

HOMES = [Tier.DEVICE, Tier.HOST, Tier.NVME]


@pytest.fixture
def model() -> nn.Module:
    return seeded(models.tied_tower)


@pytest.fixture
def plain(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


@pytest.fixture(params=HOMES, ids=lambda home: home.name)
def shards(
    request: pytest.FixtureRequest, model: nn.Module, plain: nn.Module, tmp_path: Path
) -> Iterator[Shards]:
    with tiermem.shard(model, all_at(request.param, tmp_path)) as shards:
        yield shards


def test_all_parameters_have_their_values(
    shards: Shards, model: nn.Module, plain: nn.Module
) -> None:
    with GatheredParameters(model.parameters()):
        assert_same_tensors(dict(model.named_parameters()), dict(plain.named_parameters()))
        assert model.head.weight is model.embed.weight
    assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
    assert loss_of(model, 0).item() == loss_of(plain, 0).item()


@pytest.mark.parametrize("what", ["single", "list", "generator", "dict"])
def test_params_may_be_one_or_any_iterable(
    what: str, shards: Shards, model: nn.Module, plain: nn.Module
) -> None:
    weight = model.layers[0].up.weight
    given = {
        "single": weight,
        "list": [weight, weight],
        "generator": (p for p in model.layers[0].parameters()),
        "dict": {weight: 1},
    }[what]
    with GatheredParameters(given):
        assert torch.equal(weight, plain.layers[0].up.weight)


@pytest.mark.parametrize(
    "what", [None, 3, [], "weight", [None, "weight"], torch.zeros(3), nn.Parameter(torch.zeros(2))]
)
def test_what_is_not_partitioned_is_passed_over(what: object) -> None:
    with GatheredParameters(what, modifier_rank=0):
        pass


@pytest.mark.parametrize("numel", [0, 50, 1 << 20])
def test_what_the_modifier_writes_is_kept(
    numel: int, model: nn.Module, plain: nn.Module, tmp_path: Path
) -> None:
    with tiermem.shard(model, all_at(Tier.NVME, tmp_path, persistence_numel=numel)):
        for each in (model, plain):
            with GatheredParameters(each.parameters(), modifier_rank=0), torch.no_grad():
                for param in each.parameters():
                    param.mul_(2.0)
                each.embed.weight.data[3] = 7.0  # not seen by autograd
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
        assert loss_of(model, 0).item() == loss_of(plain, 0).item()


@pytest.mark.parametrize("master", ["fp32", "split", "bf16"])
@pytest.mark.parametrize("home", HOMES, ids=lambda home: home.name)
def test_masters_follow_what_is_written_between_steps(
    home: Tier, master: str, tmp_path: Path
) -> None:
    model = seeded(models.tied_tower).bfloat16()
    with tiermem.shard(model, all_at(home, tmp_path, precision=Precision(master=master))) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        tiles = optim.tiles_of(shards)
        loss_of(model, 0).backward()
        optim.step()
        optim.zero_grad()
        weight = model.layers[1].down.weight
        others = {name: shards.weight(p) for name, p in model.named_parameters() if p is not weight}
        with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.fill_(0.375)
        shard = next(s for _, s in shards.parameters() if s.param is weight)
        assert torch.equal(tiles.state(shard, "master"), torch.full((weight.numel(),), 0.375))
        assert tiles.state(shard, "exp_avg").any()  # moments stay
        assert (shards.weight(weight) == 0.375).all()
        assert_same_tensors(
            {n: shards.weight(p) for n, p in model.named_parameters() if n in others}, others
        )
        # a step without a push leaves the value near by
        (model(batch(1)[0]).sum() * 0.0).backward()
        optim.step()
        assert (shards.weight(weight).float() - 0.375).abs().max() < 0.02


def test_writing_without_a_modifier_is_refused_and_lost(
    tmp_path: Path, model: nn.Module, plain: nn.Module
) -> None:
    with tiermem.shard(model, all_at(Tier.NVME, tmp_path)):
        weight = model.layers[0].up.weight

        def write() -> None:
            with GatheredParameters(weight), torch.no_grad():
                weight[2] = 1.0

        with pytest.raises(
            RuntimeError,
            match=r"1 gathered parameters were written.*\(97, 31\).*Give modifier_rank",
        ):
            write()
        assert is_absent(weight)
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


def test_an_exception_inside_drops_what_was_written(
    tmp_path: Path, model: nn.Module, plain: nn.Module
) -> None:
    with tiermem.shard(model, all_at(Tier.NVME, tmp_path)):

        def fail() -> None:
            with GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
                model.embed.weight.zero_()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
        with GatheredParameters(model.parameters()):  # and they can be gathered again
            assert torch.equal(model.embed.weight, plain.embed.weight)


def test_contexts_nest_and_the_outer_one_keeps_what_both_look_at(
    shards: Shards, model: nn.Module
) -> None:
    # on one rank what rests in memory is always there
    was_absent = is_absent(model.layers[1].up.weight)
    with GatheredParameters(model.layers[0].parameters()):
        with GatheredParameters([model.layers[1].up.weight, model.layers[0].up.weight]):
            assert not model.layers[1].up.weight.isnan().any()
            assert not model.layers[0].up.weight.isnan().any()
        assert is_absent(model.layers[1].up.weight) == was_absent
        assert not model.layers[0].up.weight.isnan().any()
    assert is_absent(model.layers[0].up.weight) == was_absent


def test_what_the_outer_context_changes_the_inner_one_may_look_at(
    shards: Shards, model: nn.Module
) -> None:
    weight = model.layers[0].up.weight
    with GatheredParameters(weight, modifier_rank=0):
        with torch.no_grad():
            weight.fill_(3.0)
        with GatheredParameters(weight):
            assert (weight == 3.0).all()
    assert (shards.weight(weight) == 3.0).all()


def test_an_inner_context_may_not_change_what_is_gathered(shards: Shards, model: nn.Module) -> None:
    with GatheredParameters(model.layers[0].parameters()):
        inner = GatheredParameters(
            [model.layers[2].up.weight, model.layers[0].up.weight], modifier_rank=0
        )
        with pytest.raises(RuntimeError, match="gathered by a context around this one"):
            inner.__enter__()
        assert not model.layers[0].up.weight.isnan().any()
    with GatheredParameters(model.layers[0].parameters()):
        pass


def test_disabled_context_does_nothing(shards: Shards, model: nn.Module) -> None:
    weight = model.layers[0].up.weight
    before = is_absent(weight)
    with GatheredParameters(weight, enabled=False):
        assert is_absent(weight) == before


@pytest.mark.parametrize("rank", [1, -1, True, "0"])
def test_a_modifier_rank_that_does_not_exist_is_refused(
    rank: object, shards: Shards, model: nn.Module
) -> None:
    with pytest.raises(ValueError, match="allowed are 0 to 0"):
        GatheredParameters(model.parameters(), modifier_rank=rank)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_nothing_is_partitioned(stage: int, model: nn.Module) -> None:
    with tiermem.shard(model, OffloadPolicy(stage=stage)), GatheredParameters(model.parameters()):
        assert not hasattr(model.embed.weight, "ds_id")
        assert not model.embed.weight.isnan().any()


def test_memory_holds_the_gathered_set_and_not_its_unit(model: nn.Module, tmp_path: Path) -> None:
    with tiermem.shard(model, all_at(Tier.NVME, tmp_path)) as shards:
        weight = model.layers[0].up.weight
        with GatheredParameters(weight):
            assert weight.untyped_storage().nbytes() == weight.nbytes
            assert is_absent(model.layers[0].down.weight)
            assert not any(live.is_present for live in shards.units if not live.unit.is_resident)
        with torch._C.DisableTorchFunctionSubclass():
            assert weight.untyped_storage().nbytes() == 4  # one NaN


def test_a_forward_inside_sees_what_was_written_and_ends_as_it_began(
    model: nn.Module, plain: nn.Module, tmp_path: Path
) -> None:
    with tiermem.shard(model, all_at(Tier.NVME, tmp_path, max_reuse_numel=0)):
        for each in (model, plain):
            with GatheredParameters(each.layers[1].parameters(), modifier_rank=0), torch.no_grad():
                each.layers[1].up.weight.mul_(3.0)
                each.output = logits_of(each(batch(0)[0]))
                assert not each.layers[1].down.weight.isnan().any()
        assert torch.equal(model.output, plain.output)
        assert loss_of(model, 1).item() == loss_of(plain, 1).item()


class Borrower(nn.Module):
    """Gathers another module's weight in its own forward, as people did before it was automatic."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(61, 31),
            nn.ModuleList([nn.Linear(31, 31), nn.Linear(31, 31)]),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](self.embed(tokens)).tanh())
        with GatheredParameters(self.embed.weight):
            return F.linear(x, self.embed.weight)


def test_gathering_in_forward_serves_backward_too(tmp_path: Path) -> None:
    model = seeded(Borrower)
    plain = copy.deepcopy(model)
    loss_of(plain, 0).backward()
    with tiermem.shard(
        model, all_at(Tier.NVME, tmp_path, max_reuse_numel=0, persistence_numel=0)
    ) as shards:
        loss_of(model, 0).backward()
        for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(shards.gradient(param), twin.grad), name


def test_fwd_module_registers_what_is_gathered(model: nn.Module, tmp_path: Path) -> None:
    with tiermem.shard(model, all_at(Tier.NVME, tmp_path)):
        with GatheredParameters(model.layers[0].up.weight, fwd_module=model.layers[2]):
            pass
        seen = []
        model.layers[2].register_forward_pre_hook(
            lambda *_: seen.append(type(model.layers[0].up.weight) is not RestingParameter)
        )
        model(batch(0)[0])
        assert seen == [True]


# ---- before the model is sharded -----------------------------------------------------------------


@pytest.mark.parametrize("home", HOMES, ids=lambda home: home.name)
@pytest.mark.parametrize("is_inside", [True, False])
def test_works_while_and_after_building(is_inside: bool, home: Tier, tmp_path: Path) -> None:
    policy, plain = all_at(home, tmp_path), seeded(models.tied_tower)

    def touch(each: nn.Module) -> None:
        with GatheredParameters(each.parameters()):
            assert_same_tensors(dict(each.named_parameters()), dict(plain.named_parameters()))
        with (
            GatheredParameters([each.embed.weight, each.layers[0].up.weight], modifier_rank=0),
            torch.no_grad(),
        ):
            each.embed.weight.add_(1.0)
            each.layers[0].up.weight.data.fill_(0.5)

    torch.manual_seed(0)
    with Init(policy=policy):
        model = models.tied_tower()
        if is_inside:
            touch(model)
    if not is_inside:
        touch(model)
    assert is_absent(model.embed.weight)
    with torch.no_grad():
        plain.embed.weight.add_(1.0)
        plain.layers[0].up.weight.fill_(0.5)
    with tiermem.shard(model, policy):
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


def test_looking_after_building_keeps_the_precision_built_in(tmp_path: Path) -> None:
    policy = all_at(Tier.NVME, tmp_path, master_from="init", persistence_numel=0)
    torch.manual_seed(0)
    with Init(policy=policy, dtype=torch.bfloat16):
        model = models.tied_tower()
    plain = seeded(models.tied_tower)
    with GatheredParameters(model.embed.weight):
        assert torch.equal(model.embed.weight, plain.embed.weight.bfloat16())
    with tiermem.shard(model, policy) as shards:
        tiles = tiermem.AdamW(model.parameters()).tiles_of(shards)
        shard = next(s for _, s in shards.parameters() if s.param is model.embed.weight)
        assert torch.equal(tiles.state(shard, "master"), plain.embed.weight.detach().flatten())
