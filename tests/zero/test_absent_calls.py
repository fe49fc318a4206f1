"""What do reading, writing and copying an absent parameter do? docs/absent.md answers with a table,
which these tests run."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from absent_calls import READS, WHOLE, WRITES, outcome, table
from programs import models
from programs.twins import batch, is_absent, loss_of, seeded
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import tiermem
from tiermem import OffloadPolicy, Shards, Tier
from tiermem.zero import GatheredParameters, Init

DOCS = Path(__file__).parents[2] / "docs" / "absent.md"
ROWS = READS | WRITES
MODES: dict[str, Any] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.fixture
def model() -> nn.Module:
    return seeded(models.ShortTower)


@pytest.fixture
def plain(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


@pytest.fixture
def shards(model: nn.Module, plain: nn.Module, tmp_path: Path) -> Iterator[Shards]:
    policy = OffloadPolicy(params=Tier.NVME, paths=[tmp_path], persistence_numel=0, unit_buffers=16)
    with tiermem.shard(model, policy) as shards:
        yield shards
        assert torch.equal(shards.weight(model.get_parameter(WHOLE)), plain.get_parameter(WHOLE))


def expected(column: int) -> dict[str, str]:
    return {call: outcomes.split(" | ")[column] for call, outcomes in ROWS.items()}


def differences(found: dict[str, str], rows: dict[str, str]) -> dict[str, str]:
    assert found.keys() == rows.keys()
    return {call: word[:200] for call, word in found.items() if word != rows[call]}


def test_the_document_shows_these_tables() -> None:
    text = DOCS.read_text()
    assert table(READS) in text and table(WRITES) in text


@pytest.mark.parametrize("mode", MODES)
def test_outside_a_forward(mode: str, shards: Shards, model: nn.Module, plain: nn.Module) -> None:
    rows = {call: word for call, word in expected(0).items() if call in READS or mode == "grad"}
    with MODES[mode]():
        found = {call: outcome(call, model, plain) for call in rows}
    assert differences(found, rows) == {}
    assert is_absent(model.get_parameter(WHOLE))
    assert not any(live.is_present or live.num_users for live in shards.units)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_inside_a_forward_or_backward(
    place: str, shards: Shards, model: nn.Module, plain: nn.Module
) -> None:
    found, due = {}, list(ROWS)

    def run(*_: Any) -> None:
        found[due[-1]] = outcome(due[-1], model, plain)

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if place == "forward":
            run()
        else:
            output.register_hook(run)

    model.layers[2].register_forward_hook(hook)
    while due:  # a view that records a graph keeps the parameter present until the forward ends
        with contextlib.suppress(RuntimeError) if due[-1] in WRITES else contextlib.nullcontext():
            loss_of(model, 0).backward()  # after a refused write, autograd may refuse the graph too
        model.zero_grad()
        due.pop()
    # the unit may still be in memory
    present = {call for call, word in found.items() if word == "same"}
    rows = {
        c: "same" if word == "placeholder" and c in present else word
        for c, word in expected(2).items()
    }
    assert differences(found, rows) == {}


def test_before_the_model_is_sharded(plain: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with Init(policy=OffloadPolicy(params=Tier.NVME, paths=[tmp_path], persistence_numel=0)):
        model = models.ShortTower()
    rows = {c: word for c, word in expected(0).items() if "model" not in c}
    differing = differences({call: outcome(call, model, plain) for call in rows}, rows)
    # copies and writes, which add up here
    counted = {call for call in differing if rows[call] == "raises"}
    assert {
        call: word for call, word in differing.items() if call not in counted or "Error" in word
    } == {}
    assert {"copy.deepcopy(p)", "p += 1", "p.data = x"} <= counted
    tiermem.shard(
        model, OffloadPolicy(params=Tier.NVME, paths=[tmp_path], persistence_numel=0)
    ).close()


# ---- every operation that writes -----------------------------------------------------------------


def _value(kind: str, x: torch.Tensor) -> Any:
    """Any value of a schema's type; the call is refused before it is looked at."""
    if kind.startswith("Optional["):
        return None
    if kind.startswith("List["):
        return [_value(kind[5:-1], x)]
    return {"Tensor": x, "bool": False, "float": 0.5, "str": "mean", "number": 1.0}.get(kind, 1)


def _writers() -> Iterator[tuple[Any, int | str, list[Any], dict[str, Any]]]:
    """Every operator of torch that writes an argument: with the argument's place, and other
    arguments."""
    x = torch.ones(97, 31)
    for schema in torch._C._jit_get_all_schemas():
        written = [(i, a) for i, a in enumerate(schema.arguments) if a.is_write]
        if (
            not schema.name.startswith("aten::")
            or not written
            or str(written[0][1].type) not in ("Tensor", "List[Tensor]")
        ):
            continue
        place, argument = written[0]
        op = getattr(torch.ops.aten, schema.name[6:], None)
        overload = getattr(op, schema.overload_name or "default", None)
        if overload is not None:
            plain = [_value(str(a.type), x) for a in schema.arguments if not a.kwarg_only]
            by_name = {a.name: _value(str(a.type), x) for a in schema.arguments if a.kwarg_only}
            yield overload, argument.name if argument.kwarg_only else place, plain, by_name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_data", [False, True], ids=["p", "p.data"])
def test_every_operation_that_writes_raises(
    is_data: bool, model: nn.Module, tmp_path: Path
) -> None:
    with tiermem.shard(
        model, OffloadPolicy(params=Tier.NVME, paths=[tmp_path], persistence_numel=0)
    ) as shards:
        param = model.get_parameter(WHOLE)
        before, refused, other = shards.weight(param), 0, []
        for op, place, args, kwargs in _writers():
            given: Any = args if isinstance(place, int) else kwargs
            mine = param.data if is_data else param
            given[place] = [mine] if isinstance(given[place], list) else mine
            with torch.no_grad():
                try:
                    op(*args, **kwargs)
                    other.append(f"{op} wrote")
                except Exception as error:
                    is_ours = "whose values rest elsewhere" in str(error)
                    refused += is_ours
                    other += [] if is_ours else [f"{op}: {type(error).__name__}: {str(error)[:80]}"]
        assert other[:5] == []
        assert refused > 1000
        assert torch.equal(shards.weight(param), before)
        assert is_absent(param)


# ---- graphs, views, threads ----------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before the forward", "after the forward", "alone"])
def test_a_penalty_has_the_gradient_of_plain_torch(
    order: str, shards: Shards, model: nn.Module, plain: nn.Module
) -> None:
    for each in (model, plain):

        def penalty(each: nn.Module = each) -> torch.Tensor:
            return 1e-4 * sum(
                p.pow(2).sum() + p.data.norm() * p.abs().max() for p in each.parameters()
            )

        first = penalty() if order != "after the forward" else 0.0
        loss = first + (loss_of(each, 0) if order != "alone" else 0.0)
        (loss + penalty() if order == "after the forward" else loss).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(shards.gradient(mine), theirs.grad)


def test_a_penalty_of_all_weights_in_one_call_has_its_gradient(
    shards: Shards, model: nn.Module, plain: nn.Module
) -> None:
    for each in (model, plain):
        nn.utils.parameters_to_vector(each.parameters()).pow(2).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(shards.gradient(mine), theirs.grad)


@pytest.mark.parametrize("way", ["step", "load_state_dict", "gathered"])
def test_a_graph_keeps_no_copy_and_refuses_weights_that_have_changed(
    way: str, shards: Shards, model: nn.Module, plain: nn.Module
) -> None:
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    param = model.get_parameter(WHOLE)
    penalty = param.pow(2).sum()
    assert callable(penalty.grad_fn.next_functions[0][0]._raw_saved_self.data)
    if way == "step":
        loss_of(model, 0).backward()
        optim.step()
    elif way == "load_state_dict":
        model.load_state_dict({WHOLE: torch.ones(97, 31)}, strict=False)
    else:
        with GatheredParameters(param, modifier_rank=0), torch.no_grad():
            param.mul_(0.5)
    with pytest.raises(
        RuntimeError, match=r"shape \(97, 31\) was made before the parameter was stepped or written"
    ):
        penalty.backward()
    shards.replace(param, plain.get_parameter(WHOLE).detach())


def test_hooks_on_gradients_find_where_an_absent_parameters_gradient_comes(
    shards: Shards, model: nn.Module, plain: nn.Module
) -> None:
    """As get_gradient_edge and register_multi_grad_hook do, and older code by `p.expand_as(p)`."""
    found = []
    for each in (model, plain):
        param, seen = each.get_parameter(WHOLE), list[torch.Tensor]()
        handle = register_multi_grad_hook([param], lambda grads, seen=seen: seen.extend(grads))
        node = param.expand_as(param).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, seen=seen: seen.append(torch.ones(1)))
        loss = loss_of(each, 0)
        loss.backward(retain_graph=True)
        handle.remove()
        seen += torch.autograd.grad(loss, [get_gradient_edge(param)])
        found.append(seen)
    assert len(found[0]) == 3
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_a_view_that_is_kept_shows_the_values_of_now(
    shards: Shards, model: nn.Module, plain: nn.Module
) -> None:
    param = model.get_parameter(WHOLE)
    kept = [param.data, param.view(-1), param[3:], param.detach().t()]
    loss_of(model, 0)
    shards.replace(param, torch.full((97, 31), 0.5))
    assert all((view == 0.5).all() and not view[1:].ne(0.5).any() for view in kept)
    with GatheredParameters(param, modifier_rank=0):
        kept[0].fill_(0.25)  # the parameter is present, so this is a write to it
    assert (kept[1] == 0.25).all() and (param == 0.25).all()
    shards.replace(param, plain.get_parameter(WHOLE).detach())


def test_a_view_taken_while_gathered_keeps_its_values(
    shards: Shards, model: nn.Module, plain: nn.Module
) -> None:
    param = model.get_parameter(WHOLE)
    with GatheredParameters(param):
        view = param.view(-1)
    assert torch.equal(view, plain.get_parameter(WHOLE).view(-1))


def test_a_thread_beside_the_one_that_computes_is_refused(
    shards: Shards, model: nn.Module, plain: nn.Module
) -> None:
    found = []

    def read() -> None:
        with contextlib.suppress(ZeroDivisionError):
            try:
                found.append(model.get_parameter(WHOLE).sum().item())
            except RuntimeError as error:
                found.append(str(error))

    def compute() -> None:
        with torch.no_grad():
            model(batch(0)[0])
        read()

    for target in (read, compute):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    read()  # the thread that computed last has ended
    total = plain.get_parameter(WHOLE).sum().item()
    assert "in another thread than the one that computes" in found[0]
    assert found[1:] == [total, total]
