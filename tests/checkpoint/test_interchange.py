"""Does training go on through tiermem and back: torch -> tiermem, tiermem -> torch, with optimizer
states?"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.deepspeed_folders import SUB_GROUPS, WrittenModel, write_deepspeed
from checkpoint.test_dcp_import import save
from checkpoint.test_torch_import import Net, by_name, plain, train, two_groups
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tiermem
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.checkpoint.interchange.export import export_dcp
from tiermem.checkpoint.interchange.write import read_foreign, write_checkpoint
from tiermem.checkpoint.opening.loading import load
from tiermem.checkpoint.opening.source import Source
from tiermem.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

MAKERS = {"plain": plain, "two_groups": two_groups, "by_name": by_name}


def losses_of(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> list[float]:
    torch.manual_seed(5)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        x = torch.randint(0, 13, (6,))
        loss = nn.functional.cross_entropy(net(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("is_dcp", [False, True])
@pytest.mark.parametrize("kind", ["plain", "two_groups"])
def test_what_torch_saved_goes_on_in_tiermem(tmp_path: Path, kind: str, is_dcp: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = MAKERS[kind](net)
    train(net, optimizer)
    if is_dcp:
        model, optim = get_state_dict(net, optimizer)
        save({"model": model, "optim": optim}, tmp_path / "src")
    else:
        torch.save(
            {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "src"
        )
    write_checkpoint(read_foreign(tmp_path / "src"), tmp_path / "ours")
    ours = Net()
    policy = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST, num_moments=3)
    with tiermem.shard(ours, policy) as shards:
        flat = [p for p in ours.parameters() if p.dim() == 1]
        wide = [p for p in ours.parameters() if p.dim() > 1]
        groups = (
            [{"params": flat}, {"params": wide}]
            if kind == "two_groups"
            else [{"params": flat + wide}]
        )
        stepper = (
            tiermem.Adam(groups, lr=1.0, amsgrad=True)
            if len(groups) > 1
            else tiermem.AdamW(groups, lr=1.0)
        )
        loaded = load(shards, stepper, tmp_path / "ours")
        assert loaded is not None
        assert loaded.has_states
        assert [g["lr"] for g in stepper.param_groups] == [g["lr"] for g in optimizer.param_groups]
        assert losses_of(ours, stepper) == pytest.approx(losses_of(net, optimizer), rel=1e-5)


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_what_tiermem_exports_goes_on_in_torch_to_the_bit(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = MAKERS[kind](net)
    train(net, optimizer)
    model, optim = get_state_dict(net, optimizer)
    save({"model": model, "optim": optim}, tmp_path / "src")
    write_checkpoint(read_foreign(tmp_path / "src"), tmp_path / "ours")
    with Source.open(tmp_path / "ours") as source:
        export_dcp(source, tmp_path / "out")
    other = Net()
    theirs = MAKERS[kind](other)
    model, optim = get_state_dict(other, theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": model, "optim": optim}, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(other, theirs, model_state_dict=model, optim_state_dict=optim)
    assert losses_of(other, theirs) == losses_of(net, optimizer)
    for (name, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deepspeed_checkpoint_fills_model_and_optimizer(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    written = write_deepspeed(tmp_path / "ds", 2, dtype)
    write_checkpoint(read_foreign(tmp_path / "ds"), tmp_path / "ours")
    model = WrittenModel().to(dtype)
    model.mean = model.mean.float()
    (tmp_path / "nvme").mkdir()
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=[str(tmp_path / "nvme")], host_bytes=64 << 20
    )
    with tiermem.shard(model, policy) as shards:
        wide = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        flat = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
        optimizer = tiermem.AdamW([{"params": wide}, {"params": flat}], lr=1.0)
        loaded = load(shards, optimizer, tmp_path / "ours")
        assert loaded is not None
        assert (loaded.step, loaded.client_state) == (4, {"epoch": (2, "half")})
        assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 1e-4]
        assert torch.equal(model.seen, written.buffers["seen"])
        assert torch.equal(model.mean, written.buffers["mean"])
        for name, param in model.named_parameters():
            states = written.states[name]
            assert torch.equal(shards.weight(param), states["weight"]), name
            if param.requires_grad:
                assert torch.equal(
                    safe_get_full_fp32_param(param), states.get("master", states["weight"])
                ), name
                for state in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(
                        safe_get_full_optimizer_state(param, state), states[state]
                    ), name
    assert {name for group in SUB_GROUPS for name in group} < set(written.states)


def test_fp32_weights_become_split_masters_to_the_bit(tmp_path: Path) -> None:
    """A plain fp32 state dict is opened by a bf16 model that keeps the bits its weights lack."""
    torch.manual_seed(0)
    values = nn.Linear(33, 17).state_dict()
    torch.save(values, tmp_path / "a.pt")
    write_checkpoint(read_foreign(tmp_path / "a.pt"), tmp_path / "ours")
    model = nn.Linear(33, 17).bfloat16()
    precision = Precision.preset("compact")
    with tiermem.shard(
        model, OffloadPolicy(params=Tier.HOST, optim=Tier.HOST, precision=precision)
    ) as shards:
        optimizer = tiermem.AdamW(model.parameters())
        load(shards, optimizer, tmp_path / "ours")
        for name, param in model.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(param), values[name]), name
