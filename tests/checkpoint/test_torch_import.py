"""Are state dicts, safetensors and torch optimizers' states read, matched by name or order, and
refused when unclear?"""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_deepspeed_import import values_of
from torch import nn
from torch.serialization import get_crc32_options, set_crc32_options

from tiermem.checkpoint.interchange.foreign import Foreign
from tiermem.checkpoint.interchange.from_torch import BIN_INDEX_NAME, load_torch, read_torch
from tiermem.checkpoint.interchange.write import read_foreign
from tiermem.weights_io import INDEX_NAME


class Net(nn.Module):
    def __init__(self, has_twins: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.norm = nn.BatchNorm1d(7)
        self.hidden = nn.Linear(7, 11)
        self.back = nn.Linear(11, 7, bias=False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.twin = nn.Linear(11, 7, bias=False) if has_twins else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(self.norm(self.embed(x))))
        return self.head(
            self.back(hidden) + (self.twin(hidden) if isinstance(self.twin, nn.Linear) else 0)
        )


def train(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        x = torch.randint(0, 13, (5,))
        nn.functional.cross_entropy(net(x), x).backward()
        optimizer.step()


def check(found: Foreign, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every weight, buffer and moment is there, to the bit."""
    read = {p.name: p for p in found.parameters}
    names = {alias: p.name for p in found.parameters for alias in (p.name, *p.aliases)}
    assert set(names) == set(net.state_dict())
    for name, value in net.state_dict().items():
        assert torch.equal(values_of(read[names[name]])["weight"], value), name
    for name, param in net.named_parameters():
        states = values_of(read[name])
        kept = optimizer.state.get(param, {})
        assert set(states) == {"weight", *(k for k in kept if k != "step")}
        assert all(torch.equal(states[k], kept[k]) for k in kept if k != "step"), name
        assert read[name].num_steps == (int(kept["step"]) if kept else 0)
        assert not read[name].is_buffer


def plain(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def two_groups(net: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices alone: torch numbers the parameters in another order than the
    model's."""
    flat, wide = (
        [p for p in net.parameters() if p.dim() == 1],
        [p for p in net.parameters() if p.dim() > 1],
    )
    return torch.optim.Adam(
        [{"params": flat, "weight_decay": 0.0}, {"params": wide, "weight_decay": 0.1}], amsgrad=True
    )


def by_name(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(net.named_parameters())[::-1], lr=1e-2)


@pytest.mark.parametrize("make", [plain, two_groups, by_name])
@pytest.mark.parametrize(
    "keys",
    [("model", "optimizer"), ("model_state_dict", "optimizer_state_dict"), ("module", "optim")],
)
def test_a_file_of_both_is_read(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer], keys: tuple[str, str]
) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = make(net)
    train(net, optimizer)
    torch.save(
        {keys[0]: net.state_dict(), keys[1]: optimizer.state_dict(), "epoch": 4}, tmp_path / "a.pt"
    )
    found = read_torch(tmp_path / "a.pt")
    check(found, net, optimizer)
    assert [group["lr"] for group in found.groups] == [
        group["lr"] for group in optimizer.param_groups
    ]
    assert found.global_steps == 3
    assert found.left_behind == ["'epoch' of the file"]


def test_an_optimizers_file_of_its_own_is_read(tmp_path: Path) -> None:
    net = Net()
    optimizer = plain(net)
    train(net, optimizer)
    torch.save(net.state_dict(), tmp_path / "model.pth")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    check(read_torch(tmp_path / "model.pth", tmp_path / "optimizer.pt"), net, optimizer)


def test_steps_that_groups_count_are_their_parameters(tmp_path: Path) -> None:
    net = Net()
    optimizer = two_groups(net)
    train(net, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    without_steps(kept)
    for group in kept["param_groups"]:
        group["step"] = 3
    torch.save({"model": net.state_dict(), "optimizer": kept}, tmp_path / "a.pt")
    check(read_torch(tmp_path / "a.pt"), net, optimizer)


def without_a_moment(optimizer: dict[str, Any]) -> None:
    del optimizer["state"][1]["exp_avg_sq"]


def without_steps(optimizer: dict[str, Any]) -> None:
    for entry in optimizer["state"].values():
        del entry["step"]


def without_a_group(optimizer: dict[str, Any]) -> None:
    optimizer["param_groups"].pop()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_moment, "has no exp_avg_sq, which .* of the same group has"),
        (without_steps, "exp_avg_sq is there and no step"),
        (without_a_group, "the optimizer has states of .*, which no param_groups list"),
    ],
)
def test_an_optimizer_that_lacks_something_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    net = Net()
    optimizer = by_name(net)
    train(net, optimizer)
    kept = optimizer.state_dict()
    change(kept)
    torch.save({"model": net.state_dict(), "optimizer": kept}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=said) as caught:
        read_foreign(tmp_path / "a.pt")
    assert str(tmp_path / "a.pt") in str(caught.value)


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt: there are no weights in it"):
        read_foreign(tmp_path / "a.pt")


def test_a_bare_state_dict_is_weights_alone(tmp_path: Path) -> None:
    net = Net()
    torch.save(net.state_dict(), tmp_path / "model.pt")
    found = read_torch(tmp_path / "model.pt")
    check(found, net, plain(net))
    assert found.groups == []


def test_states_by_name_are_read(tmp_path: Path) -> None:
    net = Net()
    optimizer = plain(net)
    train(net, optimizer)
    names = [name for name, _ in net.named_parameters()]
    kept = optimizer.state_dict()
    named = {
        "state": {names[i]: entry for i, entry in kept["state"].items()},
        "param_groups": [{"lr": 1e-2, "params": names}],
    }
    torch.save({"model": net.state_dict(), "optim": named}, tmp_path / "a.pt")
    check(read_torch(tmp_path / "a.pt"), net, optimizer)


def test_frozen_parameters_are_passed_over(tmp_path: Path) -> None:
    net = Net()
    net.hidden.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    train(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    found = read_torch(tmp_path / "a.pt")
    check(found, net, optimizer)
    assert [p.name for p in found.parameters if not p.is_trainable and not p.is_buffer] == [
        "hidden.weight",
        "hidden.bias",
    ]


def test_states_that_could_go_two_ways_are_refused(tmp_path: Path) -> None:
    net = Net(has_twins=True)
    net.back.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    train(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    with pytest.raises(
        ValueError,
        match=r"in more than one way; make the optimizer with model.named_parameters\(\)",
    ):
        read_torch(tmp_path / "a.pt")


def test_states_in_another_order_are_refused(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(list(net.parameters())[::-1])
    train(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="do not follow the model's parameters in order and shape"):
        read_torch(tmp_path / "a.pt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    net = Net().to(dtype)
    state = {name: value for name, value in net.state_dict().items() if name != "head.weight"}
    first = dict(list(state.items())[:4])
    save_file(first, tmp_path / "a.safetensors", {"format": "pt", "head.weight": "embed.weight"})
    save_file(
        {name: value for name, value in state.items() if name not in first},
        tmp_path / "b.safetensors",
    )
    check(read_torch(tmp_path), net, plain(net))


@pytest.mark.parametrize("num_layers", [1, 11])
def test_states_without_names_find_a_shape_that_safetensors_hold_once(
    tmp_path: Path, num_layers: int
) -> None:
    """The file has 0.bias before 0.weight, and 10.weight before 2.weight."""
    from safetensors.torch import save_file

    net = nn.Sequential(*(nn.Linear(7, 7, bias=num_layers == 1) for _ in range(num_layers)))
    optimizer = plain(net)
    for param in net.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    files = tmp_path / "model.safetensors", tmp_path / "optimizer.pt"
    save_file(net.state_dict(), files[0])
    torch.save(optimizer.state_dict(), files[1])
    if num_layers == 1:
        check(read_torch(*files), net, optimizer)
    else:
        with pytest.raises(ValueError, match=r"in more than one way; make .*named_parameters"):
            read_torch(*files)


def list_more(folder: Path, index: Path, shards: list[str]) -> None:
    found = json.loads(index.read_text())
    found["weight_map"]["ghost"] = shards[1]
    index.write_text(json.dumps(found))


def exchange_a_shard(folder: Path, index: Path, shards: list[str]) -> None:
    shutil.copy(folder / shards[0], folder / shards[1])


def lose_index_and_shard(folder: Path, index: Path, shards: list[str]) -> None:
    index.unlink()
    (folder / shards[1]).unlink()


def cut_the_index(folder: Path, index: Path, shards: list[str]) -> None:
    index.write_bytes(index.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("safetensors", list_more, r"index.json says that 'ghost' is in model-00002-of-00002"),
        ("bin", list_more, r"index.json says that 'ghost' is in model-00002-of-00002"),
        ("safetensors", exchange_a_shard, r"00002.safetensors: b is in .*00001-of.* too"),
        ("bin", exchange_a_shard, r"index.json says that 'w' is in model-00002-of-00002.bin; no"),
        ("safetensors", lose_index_and_shard, "no such file: .*model-00002-of-00002.safetensors"),
        ("safetensors", cut_the_index, "index.json: the index is no JSON: .*; fetch the file anew"),
        ("bin", cut_the_index, "index.json: the index is no JSON: .*; fetch the file anew"),
    ],
)
def test_shards_that_are_not_those_of_the_index_are_refused(
    tmp_path: Path, kind: str, change: Callable[[Path, Path, list[str]], None], said: str
) -> None:
    from safetensors.torch import save_file

    shards = [f"model-0000{i}-of-00002.{kind}" for i in (1, 2)]
    for shard, tensors in zip(shards, ({"b": torch.ones(2)}, {"w": torch.ones(3)}), strict=True):
        if kind == "bin":
            torch.save(tensors, tmp_path / shard)
        else:
            save_file(tensors, tmp_path / shard)
    index = tmp_path / (INDEX_NAME if kind == "safetensors" else BIN_INDEX_NAME)
    index.write_text(json.dumps({"weight_map": dict(zip("bw", shards, strict=True))}))
    assert [p.name for p in read_torch(tmp_path).parameters] == ["b", "w"]
    change(tmp_path, index, shards)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        read_torch(tmp_path)


def test_shards_of_pickles_are_read(tmp_path: Path) -> None:
    net = Net()
    state = list(net.state_dict().items())
    for number, part in enumerate((dict(state[:5]), dict(state[5:])), 1):
        torch.save(part, tmp_path / f"pytorch_model-{number}.bin")
    place = {name: f"pytorch_model-{1 if i < 5 else 2}.bin" for i, (name, _) in enumerate(state)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": place}))
    found = read_torch(tmp_path)
    # ties across files are not seen
    assert {p.name for p in found.parameters} == set(net.state_dict())


@pytest.mark.parametrize("what", ["model.pt", "optimizer.pt", "pytorch_model.bin"])
def test_a_hostile_pickle_is_never_run(tmp_path: Path, what: str) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    torch.save(Net().state_dict(), tmp_path / "good.pt")
    torch.save({"weight": Runs()}, tmp_path / what)
    optimizer = tmp_path / what if what == "optimizer.pt" else None
    path = {"model.pt": tmp_path / what, "optimizer.pt": tmp_path / "good.pt"}.get(what, tmp_path)
    with pytest.raises(ValueError, match=rf"{what}: it holds posix.mkdir"):
        read_torch(path, optimizer)
    assert not (tmp_path / "pwned").exists()


def test_a_few_bytes_do_not_say_that_they_are_terabytes(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1).expand(1 << 40)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="stands on 4 bytes, not on 4398046511104"):
        load_torch(tmp_path / "a.pt")


def test_a_few_bytes_take_no_more_memory_than_a_few_times_as_many(tmp_path: Path) -> None:
    takes = (
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x04" + (600 << 20).to_bytes(4, "little") + b"\x85R."
    )
    (tmp_path / "legacy.pt").write_bytes(takes)
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as file:
        file.writestr("zip/data.pkl", takes)
        file.writestr("zip/version", "3\n")
        file.writestr("zip/byteorder", "little")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    for name in ("legacy.pt", "zip.pt"):
        with pytest.raises(ValueError, match=f"{name}: its .* bytes ask for more memory"):
            read_torch(tmp_path / name)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_tensors_on_the_same_bytes_are_not_written_again_and_again(tmp_path: Path) -> None:
    values = torch.arange(1000.0)
    torch.save({f"w{start}": values[start:] for start in range(100)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="stand on the same 4000 bytes"):
        read_torch(tmp_path / "a.pt")
    torch.save({"a": values.view(10, 100), "b": values.view(100, 10).t()}, tmp_path / "b.pt")
    assert len(read_torch(tmp_path / "b.pt").parameters) == 2


@pytest.mark.parametrize("kind", ["device", "fifo"])
@pytest.mark.parametrize(
    "name", ["a.pt", "folder/pytorch_model.bin", "folder/model.safetensors", "folder/.metadata"]
)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if kind == "device":
        file.symlink_to("/dev/zero")
    else:
        os.mkfifo(file)
    (tmp_path / "folder").mkdir(exist_ok=True)
    (tmp_path / "folder" / "__0_0.distcp").touch()
    signal.alarm(20)
    try:
        with pytest.raises(
            OSError,
            match=r"is a (device|FIFO) where a regular file|no such file|no checkpoint that is known",
        ):
            read_foreign(file if name == "a.pt" else file.parent)
    finally:
        signal.alarm(0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a file that torch.save wrote"),
        (b"hello world", "not a file that torch.save wrote"),
        (b"PK\x03\x04 and so on", "the end is missing"),
        (b"PK\x06\x07" + bytes(12) + b"\2\0\0\0PK\x05\x06" + bytes(18), "span multiple disks"),
        (b"\x80\x02]q\x01.", "not a file that torch.save wrote|does more"),
        (b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00trueR.", "it holds os.system|does more"),
    ],
)
def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ValueError, match=reason) as caught:
        read_torch(tmp_path / "a.pt")
    assert str(tmp_path / "a.pt") in str(caught.value)


@pytest.mark.parametrize("has_sums", [True, False])
def test_a_flipped_bit_of_a_weight_is_seen(tmp_path: Path, has_sums: bool) -> None:
    file = tmp_path / "a.pt"
    before = get_crc32_options()
    set_crc32_options(has_sums)
    torch.save({"weight": torch.full((1000,), 1.5)}, file)
    set_crc32_options(before)
    data = file.read_bytes()
    read_torch(file)
    place = data.index(torch.full((9,), 1.5).numpy().tobytes())
    file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    if has_sums:
        with pytest.raises(ValueError, match=r"a\.pt: .*damaged.*CRC-32 for file 'a/data/0'"):
            read_torch(file)
    else:
        read_torch(file)


def test_values_that_are_no_tensors_are_named(tmp_path: Path) -> None:
    torch.save({"weight": [1.0, 2.0]}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="'weight' is list; a state dict of weights holds tensors"):
        read_torch(tmp_path / "a.pt")


def test_names_that_are_no_strings_are_named(tmp_path: Path) -> None:
    torch.save({3: torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="a tensor is called 3; names are strings"):
        read_torch(tmp_path / "a.pt")
    groups = {"state": {}, "param_groups": [{"params": [[0]]}]}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": groups}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match="param_groups, each with params"):
        read_torch(tmp_path / "b.pt")


def test_a_folder_without_a_checkpoint_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint that is known"):
        read_torch(tmp_path)
