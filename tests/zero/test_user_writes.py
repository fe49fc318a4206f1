"""Is what the user writes to a weight honoured, wherever the weight rests, as plain PyTorch honours
it?

Each way to write (user_writes.py) is tried in each place between steps.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import asked, launch
from programs.twins import assert_same_tensors
from torch import nn
from user_writes import (
    CASES,
    MOMENTS,
    NUM_STEPS,
    PLACES,
    PRECISIONS,
    WAYS,
    batch,
    loss_of,
    losses_of,
    model_of,
    trained,
)

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.run.shards import Shards
from tiermem.units import registry


def all_writes() -> list[Any]:
    """Every way in every place at every moment; each way in each place at one moment is not marked
    slow."""
    return [
        pytest.param(
            way, place, moment, marks=[] if (i + j + k) % len(MOMENTS) == 0 else pytest.mark.slow
        )
        for i, way in enumerate(WAYS)
        for j, place in enumerate(PLACES)
        for k, moment in enumerate(MOMENTS)
    ]


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("way", "place", "moment"), all_writes())
def test_a_write_is_honoured_as_by_fp32_masters(
    way: str, place: str, moment: str, tmp_path: Path
) -> None:
    policy = OffloadPolicy(paths=[str(tmp_path)], **PLACES[place])
    for dtype in (torch.bfloat16, torch.float32):
        theirs, ours = (trained(each, WAYS[way], moment, dtype) for each in (None, policy))
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5 if dtype is torch.float32 else 1e-3)
        for name, value in theirs[1].items():
            assert torch.allclose(ours[1][name].float(), value.float(), rtol=0.02, atol=1e-4), name


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("way", WAYS)
def test_a_write_is_honoured_by_steps_in_backward(way: str, precision: str) -> None:
    """Also at the step under the very next backward."""
    found = [
        trained(
            OffloadPolicy(
                stage=2,
                optim=Tier.HOST,
                precision=PRECISIONS[precision],
                step_in_backward=is_early,
            ),
            WAYS[way],
            "before forward",
            torch.bfloat16,
        )
        for is_early in (True, False)
    ]
    assert found[0][0] == found[1][0]
    assert_same_tensors(*(weights for _, weights in found))


def test_a_loaded_state_dict_is_not_taken_for_writes_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would be compared with its master, and would wait for the accelerator. Only what the
    user writes after it is."""
    model, taken = model_of(), list[str]()
    with tiermem.shard(model, OffloadPolicy(params=Tier.DEVICE)) as shards:
        take = shards._take_writes_of
        monkeypatch.setattr(
            shards, "_take_writes_of", lambda live: (taken.append(live.unit.name), take(live))
        )
        model.load_state_dict(model_of().state_dict())
        shards.take_writes()
        assert not taken
        with torch.no_grad():
            next(model.parameters()).zero_()
        shards.take_writes()
        assert len(taken) == 1


@pytest.mark.sampled(16)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["zero_a_row", "zero_all", "clamp"])
def test_unwritten_elements_keep_their_master_to_the_bit(
    way: str, place: str, precision: str, tmp_path: Path
) -> None:
    """A write at every step, in every format of masters. Zeroed elements become zero, never NaN."""
    model = model_of()
    policy = OffloadPolicy(paths=[str(tmp_path)], precision=PRECISIONS[precision], **PLACES[place])
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        tiles = optim.tiles_of(shards)
        for step in range(NUM_STEPS):
            loss_of(model, step).backward()
            optim.step()
            optim.zero_grad()
            for _, shard in shards.parameters():
                if shard.name != "0.weight":
                    continue
                master, weight = (
                    tiles.state(shard, "master"),
                    shard.param.detach().clone().flatten(),
                )
                WAYS[way](model)
                new = shard.param.detach().clone().flatten()
                now = tiles.state(shard, "master")
                is_written = weight != new
                assert is_written.any() and torch.equal(now[~is_written], master[~is_written])
                is_exact = (
                    step > 0
                    or precision == "exact"
                    or way != "clamp"
                    or place.startswith("stage 2, ")
                )
                wanted = new[is_written].float()
                assert torch.allclose(
                    now[is_written], wanted, rtol=0.0 if is_exact and step else 2**-8, atol=1e-40
                )
        assert loss_of(model, 9).isfinite()


@pytest.mark.parametrize("place", PLACES)
def test_a_step_while_the_old_memory_is_held_is_refused(place: str, tmp_path: Path) -> None:
    """The step would write what the user wants to put back; what is written meanwhile is not
    lost."""
    model = model_of()
    with tiermem.shard(model, OffloadPolicy(paths=[str(tmp_path)], **PLACES[place])):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, 0).backward()
        backup = model[0].weight.data
        model[0].weight.data = torch.full_like(backup, 0.5)
        with pytest.raises(RuntimeError, match=r"backup = p.data.clone\(\)"):
            optim.step()
        assert (model.state_dict()["0.weight"] == 0.5).all()
        del backup
        optim.step()
        assert (model[0].weight.detach().float() - 0.5).abs().max() < 0.02


@pytest.mark.parametrize("place", PLACES)
def test_parameters_may_exchange_their_memory(place: str, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(67, 67) for _ in range(3)))
    one, two, three = (layer.weight for layer in model)
    old = [weight.detach().clone() for weight in (one, two, three)]
    with tiermem.shard(model, OffloadPolicy(paths=[str(tmp_path)], **PLACES[place])) as shards:
        one.data, two.data, three.data = two.data, three.data, one.data
        shards.take_writes()
        for weight, value in zip((one, two, three), (old[1], old[2], old[0]), strict=True):
            assert torch.equal(shards.weight(weight), value)


@pytest.mark.parametrize("way", ["zero_all", "load"])
@pytest.mark.parametrize("place", PLACES)
def test_a_write_after_the_states_were_reset_counts(way: str, place: str, tmp_path: Path) -> None:
    """Masters outlive the states of a dict without steps."""
    model = model_of()
    with tiermem.shard(model, OffloadPolicy(paths=[str(tmp_path)], **PLACES[place])):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        begin = optim.state_dict()
        loss_of(model, 0).backward()
        optim.step()
        optim.load_state_dict(begin)
        WAYS[way](model)
        expected = model[0].weight.detach().clone()
        optim.param_groups[0]["lr"] = 0.0
        loss_of(model, 1).backward()
        optim.step()
        assert torch.equal(model[0].weight, expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double])
def test_another_dtype_or_device_is_refused_at_the_write(
    change: Callable[[nn.Module], object], place: str, tmp_path: Path
) -> None:
    model = model_of()
    with tiermem.shard(model, OffloadPolicy(paths=[str(tmp_path)], **PLACES[place])):
        before = loss_of(model, 0).item()
        with pytest.raises(RuntimeError, match="policy or config says the dtype"):
            change(model)
        model.bfloat16()
        assert loss_of(model, 0).item() == before


def test_parameters_are_ordinary_ones_after_closing(tmp_path: Path) -> None:
    model = model_of()
    tiermem.shard(model, OffloadPolicy(paths=[str(tmp_path)], **PLACES["host"])).close(
        materialize=True
    )
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    model.half()


# ---- written in forward --------------------------------------------------------------------------


class WritesInForward(nn.Module):
    """Sets its shift from the first batch, as ActNorm does, and keeps its rows' norms below one, as
    some codebooks do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.shift = nn.Parameter(torch.zeros(67))
        self.book = nn.Parameter(torch.randn(67, 67, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if not self.is_set:
                shift = x.mean(0) + 3
                if self.way == "data":
                    self.shift.data = shift
                else:
                    self.shift.copy_(shift)
                self.is_set.fill_(True)
            self.book.data.renorm_(2, 0, 1.0)
        return (x - self.shift) @ self.book


def losses_with_writes(policy: OffloadPolicy | None, way: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(67, 67), WritesInForward(way), nn.Linear(67, 67))
    shards = None if policy is None else tiermem.shard(model, policy)
    kind: Any = torch.optim.AdamW if policy is None else tiermem.AdamW
    optim = kind(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(batch(step, torch.float32)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    if shards is not None:
        shards.close()
    return losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("way", ["in place", "data"])
def test_a_write_in_forward_is_kept_on_every_tier(
    way: str, tier: Tier, overlap: Any, tmp_path: Path
) -> None:
    policy = OffloadPolicy(
        params=tier,
        optim=tier,
        paths=[str(tmp_path)],
        persistence_numel=20,
        overlap=overlap,
        tile_numel=1024,
    )
    assert losses_with_writes(policy, way) == pytest.approx(losses_with_writes(None, way), rel=1e-5)


# ---- changed between a forward and its backward --------------------------------------------------


class Saves(nn.Module):
    """Its backward reads the weights of `body`, but for those of the first Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body[1](self.body[0](x).tanh())
        return result


class SavesNothing(nn.Module):
    """Its backward reads no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Embedding(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.body[0](x.abs().mul(8).long().clamp(0, 7)).sum(1)
        result: torch.Tensor = rows.tanh() + self.body[1](x)
        return result


def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    optim.step()


def load_half(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def replace_one(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    param = model.get_parameter("body.1.weight")
    owner = registry.owner_of(param)
    with torch.no_grad():
        value = torch.full((8, 8), 0.25)
        owner.replace(param, value) if isinstance(owner, Shards) else param.copy_(value)


def load_gathered(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    with tiermem.zero.GatheredParameters(list(model.parameters())):
        load_half(model, optim)


HOMES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "present": {"params": Tier.HOST, "persistence_numel": 1 << 20},
    "host": {"params": Tier.HOST, "persistence_numel": 0},
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME, "persistence_numel": 0},
}


def changed_between(
    model: nn.Module, act: Callable[[nn.Module, Any], object], policy: OffloadPolicy | None
) -> tuple[bool, list[torch.Tensor]]:
    """Whether torch refuses the backward of a forward before the change, and the weights after
    another step."""
    with tiermem.shard(model, policy) if policy else contextlib.nullcontext():
        params = list(model.parameters())
        optim = (tiermem.AdamW if policy else torch.optim.AdamW)(params, lr=1e-2)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        model(x).square().sum().backward()
        loss = model(x).square().sum()
        act(model, optim)
        optim.zero_grad()
        message = ""
        try:
            loss.backward()
        except RuntimeError as error:
            message = str(error)
            optim.zero_grad()
            model(x).square().sum().backward()
        optim.step()
        is_refused = "modified by an inplace operation" in message
        assert is_refused or not message
        return is_refused, [value.clone() for value in model.state_dict().values()]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("act", [step, load_half, replace_one, load_gathered])
@pytest.mark.parametrize("kind", [Saves, SavesNothing])
def test_a_backward_after_a_change_is_refused_where_torch_refuses_it(
    kind: Callable[[], nn.Module],
    act: Callable[[nn.Module, Any], object],
    home: str,
    overlap: Any,
    tmp_path: Path,
) -> None:
    policy = OffloadPolicy(paths=[str(tmp_path)], overlap=overlap, **HOMES[home])
    torch.manual_seed(0)
    model = kind()
    theirs = changed_between(copy.deepcopy(model), act, None)
    ours = changed_between(model, act, policy)
    assert ours[0] == theirs[0] == (kind is Saves)
    for value, expected in zip(ours[1], theirs[1], strict=True):
        assert torch.allclose(value, expected, rtol=1e-4, atol=1e-6)


def test_a_refused_backward_has_named_the_unit(caplog: pytest.LogCaptureFixture) -> None:
    policy = OffloadPolicy(params=Tier.HOST, persistence_numel=0)
    with contextlib.suppress(RuntimeError):
        changed_between(Saves(), step, policy)
    assert "unit 'body.1' were stepped or replaced" in caplog.text


# ---- memory that weights share -------------------------------------------------------------------


def share_whole(model: nn.Sequential) -> None:
    model[2].weight.data = model[0].weight.data.view(67, 41)


def share_a_part(model: nn.Sequential) -> None:
    model[2].bias.data = model[0].weight.data.view(-1)[11 : 11 + 67]


def share_with_a_buffer(model: nn.Sequential) -> None:
    model[1].register_buffer("seen", model[0].weight.data[:3])


@pytest.mark.parametrize("share", [share_whole, share_a_part, share_with_a_buffer])
def test_weights_that_share_memory_are_refused_with_both_names(
    share: Callable[[nn.Sequential], None],
) -> None:
    """Torch steps such memory once for each parameter, which no tier here does."""
    model = model_of()
    share(model)
    with pytest.raises(ValueError, match=r"share memory.*one parameter for both") as refused:
        tiermem.shard(model, OffloadPolicy())
    assert "0.weight" in str(refused.value) and (
        "2." in str(refused.value) or "1.seen" in str(refused.value)
    )


def test_frozen_weights_over_the_same_elements_become_one_parameter() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).requires_grad_(
        False
    )
    model[1].weight.data = model[0].weight.data
    x = torch.ones(2, 8)
    before = model(x)
    with tiermem.shard(model, OffloadPolicy(params=Tier.HOST, persistence_numel=1)):
        assert model[1].weight is model[0].weight
        assert torch.equal(model(x), before)


# ---- several ranks -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, list[float]]]:
    """The losses of each case on each of two ranks, which see the same batches."""
    script, out = Path(__file__).parent / "user_writes.py", tmp_path_factory.mktemp("out")
    return launch(script, 2, out, *asked(request, "case"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_honour_a_write_as_a_plain_model_does(
    case: str, on_two_ranks: list[dict[str, list[float]]]
) -> None:
    theirs = losses_of(case, is_sharded=False)
    for rank in on_two_ranks:
        assert rank[case] == pytest.approx(theirs, rel=1e-5 if case.endswith("float32") else 2e-3)


@pytest.mark.parametrize("place", PLACES)
def test_a_weight_made_in_inference_mode_trains_again_after_a_step(
    place: str, tmp_path: Path
) -> None:
    model = model_of(torch.float32)
    first, last = (model.get_parameter(f"{number}.weight") for number in (0, 2))
    with tiermem.shard(model, OffloadPolicy(paths=[str(tmp_path)], **PLACES[place])):
        optim = tiermem.SGD(model.parameters(), lr=0.1)
        with torch.inference_mode():
            given = torch.full_like(first, 0.25)
        first.data = given
        for number in range(2):
            loss_of(model, number).backward()
            assert (first.grad is None) == (number == 0)
            optim.step()
            assert torch.equal(first, given) == (number == 0)
            optim.zero_grad()
        with torch.inference_mode():
            last.data = torch.full_like(last, 0.25)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            loss_of(model, 2)


# ---- gradients that the user writes --------------------------------------------------------------


def halved_in_hooks(policy: OffloadPolicy | None) -> tuple[list[float], list[torch.Tensor]]:
    """What hooks that halve the accumulated gradient see in three micro-batches, and the weights
    after the step."""
    model, seen = model_of(torch.float32), list[float]()

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.abs().sum().item())
        param.grad.mul_(0.5)

    params = list(model.parameters())
    with tiermem.shard(model, policy) if policy else contextlib.nullcontext():
        optim = (tiermem.SGD if policy else torch.optim.SGD)(params, lr=0.5)
        for param in params[:3]:
            param.register_post_accumulate_grad_hook(halve)
        for number in range(3):
            loss_of(model, number).backward()
        optim.step()
        return sorted(seen), [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("home", HOMES)
def test_a_hook_sees_and_writes_the_sum_over_micro_batches(home: str, tmp_path: Path) -> None:
    theirs = halved_in_hooks(None)
    ours = halved_in_hooks(OffloadPolicy(paths=[str(tmp_path)], **HOMES[home]))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for value, expected in zip(ours[1], theirs[1], strict=True):
        assert torch.allclose(value, expected, rtol=1e-5, atol=1e-7)


def scaled_after_hooks(policy: OffloadPolicy | None) -> list[torch.Tensor]:
    """The weights after steps before which gradients that hooks have kept are scaled."""
    model, kept = model_of(torch.float32), dict[torch.Tensor, torch.Tensor]()
    params = list(model.parameters())
    with tiermem.shard(model, policy) if policy else contextlib.nullcontext():
        optim = (tiermem.SGD if policy else torch.optim.SGD)(params, lr=0.5)
        for param in params:
            param.register_post_accumulate_grad_hook(lambda p: kept.update({p: p.grad}))
        for number in range(4):
            loss_of(model, number).backward()
            if number % 2:
                for grad in kept.values():
                    grad.mul_(0.25)
                del grad
                optim.step()
                optim.zero_grad()
        return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("home", HOMES)
def test_a_gradient_that_a_hook_has_kept_is_written_there(home: str, tmp_path: Path) -> None:
    theirs = scaled_after_hooks(None)
    ours = scaled_after_hooks(OffloadPolicy(paths=[str(tmp_path)], **HOMES[home]))
    for value, expected in zip(ours, theirs, strict=True):
        assert torch.allclose(value, expected, rtol=1e-5, atol=1e-7)


def trained_with_own_gradients(
    policy: OffloadPolicy | None, has_views: bool
) -> tuple[list[float], list[torch.Tensor]]:
    """Gradients in the user's own memory, which he zeroes, reads and clamps, or in views of it: the
    norms that he has read, and the weights."""
    model, norms = model_of(torch.float32), list[float]()
    params = list(model.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    views = [
        part.view(param.shape)
        for part, param in zip(flat.split([p.numel() for p in params]), params, strict=True)
    ]
    own = [flat] if has_views else [view.clone() for view in views]
    with tiermem.shard(model, policy) if policy else contextlib.nullcontext():
        optim = (tiermem.SGD if policy else torch.optim.SGD)(params, lr=0.5)
        for param, grad in zip(params, views if has_views else own, strict=True):
            param.grad = grad
        del views, param, grad
        for number in range(4):
            loss_of(model, number).backward()
            norms.append(sum(float(each.square().sum()) for each in own))
            if number == 1:
                for each in own:
                    each.clamp_(-1e-3, 1e-3)
                norms.append(float(nn.utils.clip_grad_norm_(params, 1e-3)))
            optim.step()
            optim.zero_grad(set_to_none=False) if number % 2 else [e.zero_() for e in own]
        return norms, [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("has_views", [True, False])
@pytest.mark.parametrize("home", HOMES)
def test_gradients_in_the_users_own_memory_are_read_and_written_there(
    home: str, has_views: bool, tmp_path: Path
) -> None:
    policy = OffloadPolicy(paths=[str(tmp_path)], **HOMES[home])
    theirs, ours = (trained_with_own_gradients(each, has_views) for each in (None, policy))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for value, expected in zip(ours[1], theirs[1], strict=True):
        assert torch.allclose(value, expected, rtol=1e-5, atol=1e-7)
