"""Is what torch.distributed.checkpoint wrote read to the bit, cut over ranks or not, and is none of
its pickle executed?"""

from __future__ import annotations

import enum
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.test_deepspeed_import import values_of
from checkpoint.test_torch_import import Net, by_name, plain, train, two_groups
from launch import launch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tiermem.checkpoint.interchange.foreign import Foreign
from tiermem.checkpoint.interchange.from_dcp import is_dcp, read_dcp

HERE = Path(__file__).parent


def save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def check(found: Foreign, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    read = {p.name: p for p in found.parameters}
    assert set(read) == set(net.state_dict())
    for name, value in net.state_dict().items():
        assert torch.equal(values_of(read[name])["weight"], value), name
    for number, group in enumerate(optimizer.param_groups):
        assert found.groups[number]["lr"] == group["lr"]
        for param in group["params"]:
            name = next(n for n, p in net.named_parameters() if p is param)
            states = values_of(read[name])
            kept = {k: v for k, v in optimizer.state[param].items() if k != "step"}
            assert set(states) == {"weight", *kept}
            assert all(torch.equal(states[k], kept[k]) for k in kept), name
            assert (read[name].group, read[name].num_steps) == (number, 3)


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("make", [plain, two_groups, by_name])
def test_a_plain_models_checkpoint_is_read(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer], is_flat: bool
) -> None:
    net = Net()
    optimizer = make(net)
    train(net, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    model, optim = get_state_dict(net, optimizer, options=options)
    save({"model": model, "optim": optim, "step": 7, "epoch": [1, 2]}, tmp_path / "dcp")
    assert is_dcp(tmp_path / "dcp")
    found = read_dcp(tmp_path / "dcp")
    check(found, net, optimizer)
    assert (found.global_steps, found.client_state, found.left_behind) == (7, {"epoch": [1, 2]}, [])


def test_tensors_beside_the_model_are_numbers_or_left_behind(tmp_path: Path) -> None:
    one, two = torch.tensor(7), torch.ones(2)
    state = {"model": Net().state_dict(), "step": one, "epoch": one, "seen": two}
    save(state | {"sched": {"last": one, "rates": two}, "deep": {"x": {"y": one}}}, tmp_path)
    found = read_dcp(tmp_path)
    assert (found.global_steps, found.client_state, found.scheduler) == (
        7, {"epoch": 7}, {"last": 7},
    )  # fmt: skip
    assert found.left_behind == [
        "'deep' of the checkpoint", "'sched.rates' of the checkpoint", "'seen' of the checkpoint",
    ]  # fmt: skip


def test_a_common_first_key_one_of_a_part_and_none_at_all_are_understood(tmp_path: Path) -> None:
    net = Net()
    optimizer = plain(net)
    train(net, optimizer)
    model, optim = get_state_dict(net, optimizer)
    save({"app": {"model": model, "optim": optim}}, tmp_path / "app")
    check(read_dcp(tmp_path / "app"), net, optimizer)
    save(
        {**model, "optimizer": optim, "train_state": {"step": torch.tensor(3)}}, tmp_path / "spread"
    )
    found = read_dcp(tmp_path / "spread")
    check(found, net, optimizer)
    assert (found.global_steps, found.left_behind) == (3, ["'train_state' of the checkpoint"])
    save(model, tmp_path / "bare")
    found = read_dcp(tmp_path / "bare")
    assert {p.name for p in found.parameters} == set(net.state_dict())
    assert found.groups == []


def test_members_of_enumerations_are_read_as_early_pythons_3_11_pickle_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )
    net = Net()
    save(get_state_dict(net, [])[0], tmp_path)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert {p.name for p in read_dcp(tmp_path).parameters} == set(net.state_dict())


@pytest.mark.slow
def test_two_ranks_of_fsdp2_go_on_through_us_to_the_bit(tmp_path: Path) -> None:
    """FSDP2 saves; we read it, and write it again; FSDP2 opens that and goes on as the first goes
    on."""
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    found = launch(HERE / "fsdp_writes.py", 2, ranks, str(tmp_path / "dcp"))
    read = {p.name: p for p in read_dcp(tmp_path / "dcp").parameters}
    expected = found[0]["states"]
    assert set(read) == set(expected)
    for name, states in expected.items():
        values = values_of(read[name])
        assert set(values) == set(states)
        assert all(torch.equal(values[state], value) for state, value in states.items()), name
    for rank in found:
        assert rank["losses"] == rank["again"]
        assert all(torch.equal(a, b) for a, b in zip(*rank["ends"], strict=True))


def test_a_hostile_pickle_is_named_and_never_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ValueError, match=r"\.metadata: it holds posix.mkdir, which is code"):
        read_dcp(tmp_path)
    save({"model": Net().state_dict(), "x": "plain"}, tmp_path / "dcp")
    file = tmp_path / "dcp" / "__0_0.distcp"
    bad = tmp_path / "bad.pt"
    torch.save(Runs(), bad)
    found = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    info = next(v for k, v in found.storage_data.items() if k.fqn == "x")
    info.offset, info.length = file.stat().st_size, bad.stat().st_size
    file.write_bytes(file.read_bytes() + bad.read_bytes())
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"__0_0.distcp: x: it holds posix.mkdir"):
        read_dcp(tmp_path / "dcp")
    assert not (tmp_path / "pwned").exists()


def change_path(found: Any) -> None:
    next(iter(found.storage_data.values())).relative_path = "../../etc/passwd"


def change_length(found: Any) -> None:
    next(iter(found.storage_data.values())).length = 1 << 60


def change_size(found: Any) -> None:
    found.state_dict_metadata["model.embed.weight"].size = torch.Size([1 << 40, 7])


def change_chunk(found: Any) -> None:
    stored = found.state_dict_metadata["model.embed.weight"]
    stored.size = stored.chunks[0].sizes = torch.Size([1 << 40, 7])


def double_chunk(found: Any) -> None:
    stored = found.state_dict_metadata["model.embed.weight"]
    stored.chunks.append(stored.chunks[0])


def share_bytes(found: Any) -> None:
    """Two values of one size lie on the same bytes: tensors of terabytes would stand in a small
    file."""
    places = [
        info
        for key, info in found.storage_data.items()
        if key.fqn.endswith((".running_mean", ".running_var"))
    ]
    places[0].offset = places[1].offset


def leave_utf_8(found: Any) -> None:
    next(iter(found.storage_data.values())).relative_path = "\ud800"


def lose_place(found: Any) -> None:
    found.storage_data.clear()


def lose_all(found: Any) -> None:
    found.state_dict_metadata = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_path, "files of the same folder"),
        (change_length, "it was cut"),
        (change_size, "do not make up its shape"),
        (change_chunk, "do not lie in"),
        (double_chunk, "do not make up its shape"),
        (share_bytes, "lie on the same bytes of"),
        (leave_utf_8, "files of the same folder"),
        (lose_place, "not where it lies"),
        (lose_all, "not the metadata"),
    ],
)
def test_metadata_that_lies_is_refused(
    tmp_path: Path, change: Callable[[Any], None], reason: str
) -> None:
    save({"model": Net().state_dict()}, tmp_path)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    change(found)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=reason):
        read_dcp(tmp_path)


def test_a_pickle_that_claims_terabytes_takes_none(tmp_path: Path) -> None:
    for code in (b"\x96", b"\x8e", b"\x8d"):  # BYTEARRAY8, BINBYTES8, BINUNICODE8
        (tmp_path / ".metadata").write_bytes(
            b"\x80\x05" + code + (1 << 44).to_bytes(8, "little") + b"x."
        )
        with pytest.raises(ValueError, match=r"\.metadata: "):
            read_dcp(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_pickle_is_one_line(tmp_path: Path, keep: int) -> None:
    save({"model": Net().state_dict()}, tmp_path)
    file = tmp_path / ".metadata"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"\.metadata: "):
        read_dcp(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    save({"model": Net().state_dict()}, tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(FileNotFoundError, match=r"__0_0\.distcp"):
        read_dcp(tmp_path)
