"""Run once per rank by test_touch_on_ranks.py: what people do to partitioned parameters, on several
ranks.

touch_on_ranks.py OUT NVME CASE...     writes OUT/<rank>.pt: {case: "" or what went wrong}
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import externals
import pytest
import torch
import torch.distributed as dist
from absent_calls import READS, WRITES, outcome
from launch import as_rank
from programs import models
from programs.twins import assert_same_tensors, batch, loss_of, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.zero import GatheredParameters, Init, TiledLinear, ZeroParamStatus

HOMES = {"device": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
CASES: dict[str, Callable[[Path], None]] = {}


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[function.__name__] = function
    return function


def policy_at(nvme: Path, home: str = "cpu", **fields: Any) -> OffloadPolicy:
    tier = HOMES[home]
    defaults: dict[str, Any] = {"persistence_numel": 50, "timeout_s": 60.0}
    return OffloadPolicy(params=tier, optim=tier, paths=[nvme], **(defaults | fields))


def average_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def train_beside_a_twin(kind: str, policy: OffloadPolicy) -> None:
    """Each rank its own batches; the twin averages gradients itself."""
    model, plain = seeded(externals.MODELS[kind]), seeded(externals.MODELS[kind])
    adam = torch.optim.Adam(plain.parameters(), lr=1e-2)
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.Adam(model.parameters(), lr=1e-2)
        for step in range(3):
            mine = 10 * step + dist.get_rank()
            loss, twin = loss_of(model, mine), loss_of(plain, mine)
            assert abs(loss.item() - twin.item()) <= 1e-6 * abs(twin.item()), (
                kind,
                step,
                loss.item(),
                twin.item(),
            )
            loss.backward()
            twin.backward()
            average_gradients(plain)
            for each in (optim, adam):
                each.step()
                each.zero_grad()
        assert all(live.num_users == 0 for live in shards.units)


@case
def externals_train_as_their_twins(nvme: Path) -> None:
    for kind in externals.MODELS:
        for home in ("device", "nvme"):
            train_beside_a_twin(kind, policy_at(nvme, home, persistence_numel=0, max_reuse_numel=0))


@case
def gathered_values_are_whole(nvme: Path) -> None:
    for home in HOMES:
        model, plain = seeded(models.tied_tower), seeded(models.tied_tower)
        with tiermem.shard(model, policy_at(nvme, home)):
            with GatheredParameters(model.parameters()):
                assert_same_tensors(dict(model.named_parameters()), dict(plain.named_parameters()))
            with GatheredParameters(model.layers[1].up.weight):
                assert torch.equal(model.layers[1].up.weight, plain.layers[1].up.weight)


@case
def calls_on_absent_parameters_are_those_of_the_table(nvme: Path) -> None:
    model, plain = seeded(models.tied_tower), seeded(models.tied_tower)
    with tiermem.shard(model, policy_at(nvme, "nvme", persistence_numel=0)):
        for call, outcomes in (READS | WRITES).items():
            assert outcome(call, model, plain) == outcomes.split(" | ")[1], call
        with pytest.raises(RuntimeError, match="GatheredParameters"):
            model.embed.weight.sum()


@case
def a_gradient_that_was_set_and_is_written_later_is_refused(nvme: Path) -> None:
    """At home is the sum over ranks."""
    model = seeded(models.tied_tower)
    with tiermem.shard(model, policy_at(nvme)):
        optim = tiermem.SGD(model.parameters(), lr=0.1)
        own = model.embed.weight.grad = torch.ones_like(model.embed.weight)
        optim.step()
        own.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"the `p.grad` of embed.weight was written after"):
            optim.step()
        model.embed.weight.grad = own
        optim.step()


@case
def what_one_rank_writes_is_everybodys(nvme: Path) -> None:
    last = dist.get_world_size() - 1
    for home in HOMES:
        for writer in (0, last):
            model, plain = seeded(models.tied_tower), seeded(models.tied_tower)
            with torch.no_grad():
                plain.embed.weight.add_(writer)
                plain.layers[0].norm.bias.add_(writer)  # small enough to be always there
            with tiermem.shard(model, policy_at(nvme, home)):
                with GatheredParameters(model.parameters(), modifier_rank=writer), torch.no_grad():
                    model.embed.weight.add_(dist.get_rank())
                    model.layers[0].norm.bias.add_(dist.get_rank())
                assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
                assert loss_of_tower(model) == loss_of_tower(plain)


def loss_of_tower(model: nn.Module) -> float:
    return loss_of(model, 0).item()


@case
def masters_follow_between_steps(nvme: Path) -> None:
    for home in ("device", "nvme"):
        model = seeded(models.tied_tower).bfloat16()
        with tiermem.shard(
            model, policy_at(nvme, home, precision=Precision(master="split"))
        ) as shards:
            optim = tiermem.AdamW(model.parameters(), lr=1e-3)
            loss_of(model, dist.get_rank()).backward()
            optim.step()
            optim.zero_grad()
            for param in (model.layers[1].down.weight, model.layers[1].norm.weight):
                with GatheredParameters(param, modifier_rank=0), torch.no_grad():
                    param.fill_(0.5 if dist.get_rank() == 0 else 7.0)
                assert (tiermem.utils.safe_get_full_fp32_param(param) == 0.5).all()
                assert (shards.weight(param) == 0.5).all()


@case
def writing_without_a_modifier_raises_on_every_rank(nvme: Path) -> None:
    model, plain = seeded(models.tied_tower), seeded(models.tied_tower)
    with tiermem.shard(model, policy_at(nvme)):

        def write() -> None:
            with GatheredParameters(model.layers[0].parameters()), torch.no_grad():
                if dist.get_rank() == 1:
                    model.layers[0].up.weight[3] = 1.0

        with pytest.raises(RuntimeError, match="1 gathered parameters were written"):
            write()
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


@case
def init_gathers_and_modifies(nvme: Path) -> None:
    for home in ("cpu", "nvme"):
        torch.manual_seed(dist.get_rank())
        policy = policy_at(nvme, home)
        with Init(policy=policy):
            model = seeded(models.tied_tower)
            with GatheredParameters(model.embed.weight, modifier_rank=1), torch.no_grad():
                model.embed.weight.fill_(float(dist.get_rank()))
        with GatheredParameters(model.embed.weight):
            assert (model.embed.weight == 1.0).all()
        with GatheredParameters(model.layers[0].up.weight, modifier_rank=0), torch.no_grad():
            model.layers[0].up.weight.fill_(float(dist.get_rank()) + 3.0)
        plain = seeded(models.tied_tower)
        with torch.no_grad():
            plain.embed.weight.fill_(1.0)
            plain.layers[0].up.weight.fill_(3.0)
        with tiermem.shard(model, policy):
            assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


class Turned(Init):
    """Parts are dealt the other way round."""

    def get_partition_rank(self) -> int:
        return dist.get_world_size() - 1 - dist.get_rank()


class SameForAll(Init):
    def get_partition_rank(self) -> int:
        return 0


class Alone(Init):
    """Every rank keeps its parameters to itself."""

    def get_dp_process_group(self) -> Any:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        return groups[dist.get_rank()]


@case
def a_subclass_says_which_part_is_whose(nvme: Path) -> None:
    policy, plain = policy_at(nvme), seeded(models.tied_tower)
    with Turned(policy=policy) as init:
        model = seeded(models.tied_tower)
        assert init._built is not None
        assert init._built.topology.shard_rank == dist.get_world_size() - 1 - dist.get_rank()
        assert torch.equal(model.embed.weight + 0, plain.embed.weight)
    with GatheredParameters(model.parameters()):
        assert_same_tensors(dict(model.named_parameters()), dict(plain.named_parameters()))
    with tiermem.shard(model, policy):
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
    with pytest.raises(ValueError, match="together they must be 0 to"):
        SameForAll(policy=policy).__enter__()


WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "nvme": {},
    "cpu": {"gather_way": "all_reduce"},
}


@case
def which_part_is_whose_holds_while_the_model_is_trained(nvme: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for home, fields in WAYS.items():
        policy, plain = (
            dataclasses.replace(policy_at(nvme, home), **fields),
            seeded(models.tied_tower),
        )
        with Turned(policy=policy):
            # rank 0's weights win
            model = seeded(models.tied_tower) if rank == 0 else seeded(models.tied_tower, seed=5)
        with tiermem.shard(model, policy) as shards:
            assert (shards.topology.rank, shards.topology.shard_rank) == (rank, world - 1 - rank)
            part = -(-plain.head.weight.numel() // world)
            mine = plain.head.weight.detach().flatten()[part * (world - 1 - rank) :][:part]
            assert torch.equal(shards.local_weight(model.head.weight)[: mine.numel()], mine)
            optim, twin = (
                tiermem.AdamW(model.parameters(), lr=1e-2),
                tiermem.AdamW(plain.parameters(), lr=1e-2),
            )
            for step in range(2):
                loss = loss_of(model, step)
                expected = loss_of(plain, step)
                assert abs(loss.item() - expected.item()) <= 1e-6 * abs(expected.item())
                loss.backward()
                expected.backward()
                average_gradients(plain)
                for each in (optim, twin):
                    each.step()
                    each.zero_grad()
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-6)


@case
def who_keeps_a_second_copy_is_said_by_hand(nvme: Path) -> None:
    world = dist.get_world_size()
    singles = [dist.new_group([rank]) for rank in range(world)]
    everyone = dist.new_group(list(range(world)))
    for home, group, size in (("device", everyone, world), ("nvme", singles[dist.get_rank()], 1)):
        policy = policy_at(nvme, home)
        with Init(policy=policy, zero_param_parallel_group=group):
            model = seeded(models.tied_tower)
        with tiermem.shard(model, policy) as shards:
            assert shards.policy.secondary_group_size == size
    if world > 2:
        first_and_last = dist.new_group([0, world - 1])
        if dist.get_rank() in (0, world - 1):
            with pytest.raises(
                ValueError,
                match=r"holds ranks \[0, 2\] of \[0, 1, 2\].*allowed are \[0\], \[1\], \[2\]; ",
            ):
                Init(policy=policy_at(nvme), zero_param_parallel_group=first_and_last).__enter__()


@case
def a_subclass_says_who_shares(nvme: Path) -> None:
    policy = policy_at(nvme)
    with Alone(policy=policy) as init:
        model = seeded(models.tied_tower, seed=dist.get_rank())
        assert init._built is not None
        assert init._built.topology.num_shards == 1
    with GatheredParameters(model.parameters()):  # nobody else's values came in
        own = seeded(models.tied_tower, seed=dist.get_rank())
        assert_same_tensors(dict(model.named_parameters()), dict(own.named_parameters()))
    with tiermem.shard(model, policy) as shards:  # and none do when it is trained
        assert (shards.topology.world, shards.topology.num_shards) == (1, 1)
        assert_same_tensors(dict(model.state_dict()), dict(own.state_dict()))
    with Alone(policy=policy):
        model = seeded(models.tied_tower)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    engine, _, _, _ = tiermem.initialize(model=model, config=config)
    assert (engine.train_batch_size(), engine.shards.topology.world) == (2, 1)
    engine.close()


@case
def attributes_describe_the_parts(nvme: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for home in HOMES:
        model, plain = seeded(models.ShortTower), seeded(models.ShortTower)
        with tiermem.shard(model, policy_at(nvme, home)):
            for (name, param), twin in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                part = -(-twin.numel() // world)
                assert (param.ds_shape, param.ds_numel) == (twin.shape, twin.numel()), name
                assert param.ds_tensor.shape == (part,), name
                if home != "nvme":
                    mine = twin.detach().flatten()[part * rank : part * (rank + 1)]
                    assert torch.equal(param.ds_tensor[: mine.numel()], mine), name
            weight = model.layers[0].up.weight
            assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
            with GatheredParameters(weight):
                assert weight.ds_status is ZeroParamStatus.AVAILABLE
            assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
            seen = []
            model.layers[0].register_forward_pre_hook(
                lambda *_, w=weight, s=seen: s.append(w.ds_status)
            )
            model(batch(0)[0])
            assert seen == [ZeroParamStatus.AVAILABLE]
            assert len({p.ds_id for p in model.parameters()}) == len(list(model.parameters()))
        assert not hasattr(weight, "ds_id")


class RoutedModel(nn.Module):
    """Experts behind a router; which of them run depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 31)
        # outside every ModuleList: each expert would be fetched by itself
        self.block = models.SparseBlock(num_experts=3)
        self.block.chosen = dist.get_rank() % 3
        self.head = nn.Linear(31, 61)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))


def straying() -> nn.Module:
    """Branches without a router; which of them runs depends on the rank."""
    model = models.Tower(num_blocks=3, block=lambda width, _: nn.Linear(width, width))
    model.path = [dist.get_rank() % 3]
    return model


def train_apart(model: nn.Module, plain: nn.Module, shards: tiermem.Shards) -> None:
    """Trains a model of which each rank uses another part, beside its twin."""
    for step in range(2):
        loss, twin = loss_of(model, step), loss_of(plain, step)
        assert abs(loss.item() - twin.item()) <= 1e-6 * abs(twin.item())
        loss.backward()
        twin.backward()
        for param in plain.parameters():  # what was not used on this rank adds zeros
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        average_gradients(plain)
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            found = shards.gradient(param)
            found = torch.zeros_like(other) if found is None else found
            torch.testing.assert_close(found, other.grad, rtol=1e-5, atol=1e-7)
            param.grad = other.grad = None


@case
def ranks_take_different_experts(nvme: Path) -> None:
    model, plain = seeded(RoutedModel), seeded(RoutedModel)
    with tiermem.shard(model, policy_at(nvme, persistence_numel=0, max_reuse_numel=0)) as shards:
        of_block = {
            live.unit.name for live, s in shards.parameters() if s.name.startswith("block.")
        }
        assert of_block == {"block"}, of_block
        assert tiermem.utils.z3_leaf_parameter(model.block.experts[2].up.weight)
        train_apart(model, plain, shards)


@case
def ranks_take_different_parts_of_a_marked_model(nvme: Path) -> None:
    model, plain = seeded(straying), seeded(straying)
    tiermem.utils.set_z3_leaf_module(model, True)
    with tiermem.shard(model, policy_at(nvme, persistence_numel=0, max_reuse_numel=0)) as shards:
        assert [live.unit.name for live in shards.units] == ["root"]
        train_apart(model, plain, shards)


@case
def ranks_take_different_parts_of_a_marked_list(nvme: Path) -> None:
    model, plain = seeded(straying), seeded(straying)
    tiermem.utils.set_z3_leaf_modules(model, [nn.ModuleList])
    with tiermem.shard(model, policy_at(nvme, persistence_numel=0, max_reuse_numel=0)) as shards:
        assert [live.unit.name for live in shards.units] == ["embed", "layers", "head"]
        train_apart(model, plain, shards)


class Islands(nn.Module):
    """A model under autocast, some of whose modules turn it off."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.mix = nn.Conv1d(32, 32, 1)
        self.head = nn.Linear(32, 61)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(tokens))
        with torch.autocast("cpu", enabled=False):
            x = self.layers[1](x.float()).tanh()
            x = self.mix(x.transpose(1, 2)).transpose(1, 2)
            x = self.layers[1](x)
        return self.head(self.layers[2](x))


@case
def an_island_of_fp32_computes_with_fp32_weights(nvme: Path) -> None:
    for is_checkpointed in (False, True):
        model, plain = seeded(Islands), seeded(Islands)
        policy = policy_at(nvme, persistence_numel=0, max_reuse_numel=0, gather_dtype="bf16")
        with tiermem.shard(model, policy) as shards:
            for step in range(2):
                found = []
                for each in (model, plain):
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        if is_checkpointed:
                            run = functools.partial(
                                torch.utils.checkpoint.checkpoint, each, use_reentrant=False
                            )
                        found.append(loss_of(run if is_checkpointed else each, step))
                    found[-1].backward()
                assert found[0].item() == found[1].item()
                average_gradients(plain)
                for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(
                        shards.gradient(param), other.grad, rtol=1e-2, atol=1e-4
                    )
                    param.grad = other.grad = None
            assert type(model.layers[1].weight) is not torch.Tensor


@case
def tiles_are_copied_from_rank_0(nvme: Path) -> None:
    whole = seeded(lambda: nn.Linear(6, 4), seed=dist.get_rank())
    first = seeded(lambda: nn.Linear(6, 4), seed=0)
    policy, x = policy_at(nvme, persistence_numel=0), torch.ones(2, 6)
    with Init(policy=policy):
        model = nn.Sequential(TiledLinear(6, 4, in_splits=2, out_splits=2, init_linear=whole))
    with tiermem.shard(model, policy, is_trained=False):
        torch.testing.assert_close(model(x), first(x))
        with torch.no_grad():
            for each in (whole, first):
                each.weight.mul_(2.0)
        model[0].copy_params_from(whole)
        torch.testing.assert_close(model(x), first(x))


@case
def apply_reaches_every_module_once(nvme: Path) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(0.25 + dist.get_rank())
            module.bias.data.zero_() if module.bias is not None else None

    plain = seeded(models.ShortTower)
    copied = copy.deepcopy(plain)
    for module in copied.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(0.25)
            module.bias.data.zero_() if module.bias is not None else None
    with tiermem.shard(plain, policy_at(nvme)):
        tiermem.zero.apply_gathered(plain, init)
        assert_same_tensors(dict(plain.state_dict()), dict(copied.state_dict()))


def outcomes(nvme: Path, names: list[str]) -> dict[str, str]:
    """The traceback of each case, or nothing."""
    found = {}
    for name in names:
        try:
            CASES[name](nvme)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            print(f"{name}: {found[name]}", file=sys.stderr)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found[name])
        if any(everywhere) and not all(everywhere):  # ranks may be at different places now
            found |= dict.fromkeys(names[len(found) :], f"not run after {name} failed")
            break
    return found


if __name__ == "__main__":
    with as_rank() as (_, out, (nvme, *names)):
        torch.save(outcomes(Path(nvme), names), out)
