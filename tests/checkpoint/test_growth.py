"""Do time and memory of opening and importing grow with the bytes of the file, whatever it lists,
repeats or nests?"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.fuzz_readers import READERS, Scene
from checkpoint.fuzzing import bounded, sealed, slots
from checkpoint.manifests import manifest, parts
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tiermem.checkpoint.format.fields import crc32c, decode
from tiermem.checkpoint.format.finding import cover
from tiermem.checkpoint.format.manifest import (
    Manifest,
    Part,
    PartFile,
    PartState,
    parse_manifest,
    parse_part,
)
from tiermem.checkpoint.interchange.foreign import (
    Foreign,
    ForeignParameter,
    of_tensor,
    optimizer_of,
)
from tiermem.checkpoint.interchange.from_dcp import Plain
from tiermem.checkpoint.interchange.from_dcp import _DcpReader as DcpReader
from tiermem.checkpoint.interchange.write import read_foreign

CPU_S_PER_BYTE = 2e-6
"""A bound that linear readers keep with room to spare; a quadratic one takes more at these
sizes."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    folder = tmp_path_factory.mktemp("scenes")
    return {name: make(folder / name) for name, make in READERS.items()}


# ---- any value of any file, grown ----------------------------------------------------------------

HOW = ("repeated", "different", "long", "deep")
_DEEP = "a value that is nested"


def grown(content: Any, chance: random.Random, how: str, num: int, deep: Any = _DEEP) -> Any:
    """A structure in which one value has so many items or characters, or is `deep`."""
    found = list(slots(content))
    lists = [each for each in found if isinstance(_in(each), list | tuple | dict) and _in(each)]
    holder, key = chance.choice(lists if lists and how in ("repeated", "different") else found)
    value = _in((holder, key))
    if not isinstance(value, list | tuple | dict) or not value:
        value = [value]
    if how == "repeated":
        new = (
            dict.fromkeys(map(str, range(num)), next(iter(value.values())))
            if isinstance(value, dict)
            else [*value][:1] * num
        )
    elif how == "different":
        first = next(iter(value))
        new = [_numbered(first, i) for i in range(num)]
        new = {f"{first}{i}": value[first] for i in range(num)} if isinstance(value, dict) else new
    else:
        new = deep if how == "deep" else "x" * num
    (holder if isinstance(holder, dict | list) else vars(holder))[key] = new
    return content


def _in(slot: tuple[Any, Any]) -> Any:
    holder, key = slot
    return (holder if isinstance(holder, dict | list) else vars(holder))[key]


def _numbered(value: Any, number: int) -> Any:
    """A value like this one, with numbers and names of its own."""
    if isinstance(value, dict):
        return {key: _numbered(each, number) for key, each in value.items()}
    if isinstance(value, str):
        return f"{value}{number}"
    return value + number if isinstance(value, int) and not isinstance(value, bool) else value


def grown_file(data: bytes, name: str, chance: random.Random, how: str, num: int) -> bytes:
    """The same for the file of a scene."""
    if name.endswith((".pt", ".bin", ".metadata")):
        out = io.BytesIO()
        load, save = (
            (pickle.loads, pickle.dump) if name.endswith(".metadata") else (_loaded, torch.save)
        )
        deep: Any = 1
        for _ in range(min(num, 200)):
            deep = [deep]
        save(grown(load(data), chance, how, num, deep), out)
        return out.getvalue()
    nested = ("[" * num + "]" * num).encode()
    if name.endswith(".safetensors"):
        length = int.from_bytes(data[:8], "little")
        text = json.dumps(grown(json.loads(data[8 : 8 + length]), chance, how, num)).encode()
        text = text.replace(json.dumps(_DEEP).encode(), nested)
        return len(text).to_bytes(8, "little") + text + data[8 + length :]
    content = json.loads(data)
    is_sealed = content.pop("crc32c", None) is not None
    text = json.dumps(grown(content, chance, how, num), separators=(",", ":")).encode()
    text = text.replace(json.dumps(_DEEP).encode(), nested)
    return sealed(text[:-1]) if is_sealed else text


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def try_one(scene: Scene, chance: random.Random, how: str, num: int) -> None:
    """Grows a value of a file of a scene, and reads it within the bounds."""
    name, _, data = chance.choice(list(scene.seeds())).partition(b"\n")
    # no structure, or classes that do not exist here
    if name.endswith((b"latest", b".distcp", b"_optim_states.pt")):
        return
    try:
        file = grown_file(data, name.decode(), chance, how, num)
    except RuntimeError:  # a class of torch refuses to be written with such a value
        return
    scene.bounded(name + b"\n" + file, 4 * CPU_S_PER_BYTE)


def growing(examples: int) -> Callable[..., Any]:
    fixed = settings(
        max_examples=examples, phases=[Phase.generate]
    )  # looking for less would take minutes
    return lambda test: fixed(
        given(
            reader=st.sampled_from(sorted(READERS)), seed=st.integers(0, 1 << 32), how=st.sampled_from(HOW),
            num=st.integers(10, 100_000),
        )(test)
    )  # fmt: skip


@growing(12)
def test_any_grown_value_is_read_or_refused_in_linear_time(
    scenes: dict[str, Scene], reader: str, seed: int, how: str, num: int
) -> None:
    try_one(scenes[reader], random.Random(seed), how, min(num, 5_000))


def test_a_shape_of_thousands_of_dimensions_is_refused_in_one_line(
    scenes: dict[str, Scene],
) -> None:
    try_one(scenes["dcp"], random.Random(48_496), "different", 48_496)


@pytest.mark.soak
@growing(5_000)
def test_any_value_of_100000_entries_is_read_or_refused_in_linear_time(
    scenes: dict[str, Scene], reader: str, seed: int, how: str, num: int
) -> None:
    try_one(scenes[reader], random.Random(seed), how, num)


# ---- structures that passed for valid and took quadratic time or more ----------------------------


def _of_manifest(num: int, folder: Path) -> None:
    """Parameters, aliases, excluded names, states and checksums."""
    base, part = manifest(), parts()[0]
    one = base.parameters[1]
    named = tuple(dataclasses.replace(one, name=f"p{i}", aliases=(f"a{i}",)) for i in range(num))
    states = tuple(PartState(f"p{i}", "weight", "fp32", [(0, 6, 0, 24 * i)]) for i in range(num))
    own = dataclasses.replace(part, states=states, files=("a", *(f"f{i}" for i in range(num))))
    data = own.dump()
    files = (PartFile(0, ".", "part", len(data), crc32c(data)),)
    made = dataclasses.replace(
        base, parameters=named, excluded=tuple(f"e{i}" for i in range(num)), parts=files, world=1, num_shards=1,
        checksums={f"p{i}": {"weight": (1,)} for i in range(num)},
    )  # fmt: skip
    (folder / "manifest").write_bytes(made.dump())
    (folder / "part").write_bytes(data)


def _open_manifest(folder: Path) -> None:
    found: Manifest = parse_manifest((folder / "manifest").read_bytes(), "manifest")
    part: Part = parse_part((folder / "part").read_bytes(), "part")
    cover(found, [part], "manifest")


def _of_hashes(num: int, folder: Path) -> None:
    """A set and a dict whose keys have one hash."""
    keys = [i * ((1 << 61) - 1) for i in range(num)]
    both = [{"$": "set", "value": keys}, {"$": "dict", "value": [[key, 0] for key in keys]}]
    (folder / "value").write_text(json.dumps(both))


def _decode(folder: Path) -> None:
    for value in json.loads((folder / "value").read_text()):
        decode(value, "value")


def _of_ties(num: int, folder: Path) -> None:
    """Names of one tensor, in a safetensors file."""
    header: Any = {
        f"w{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(num)
    }
    header["__metadata__"] = {f"tied{i}": f"w{i}" for i in range(num)}
    text = json.dumps(header).encode()
    (folder / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def _of_aliases(num: int, folder: Path) -> None:
    """Names of one tensor, in a torch file."""
    torch.save(dict.fromkeys(map(str, range(num)), torch.ones(2)), folder / "pytorch_model.bin")


def _of_groups(num: int, folder: Path) -> None:
    """Groups of one parameter each, without names."""
    weights = {f"w{i}": torch.zeros(1)[:0].view(0, i + 1) for i in range(num // 4)}
    state = {i: {"exp_avg": value} for i, value in enumerate(weights.values())}
    groups = [{"lr": 0.1, "params": [i]} for i in range(num // 4)]
    torch.save(
        {"model": weights, "optimizer": {"state": state, "param_groups": groups}},
        folder / "pytorch_model.bin",
    )


def _of_sub_group(num: int, folder: Path) -> None:
    """Parameters and unknown states of one sub-group of DeepSpeed."""
    kept = {"state": {0: {f"x{i}": 0 for i in range(num)}}, "param_groups": [{"params": [0]}]}
    optim = {
        "zero_stage": 3,
        "partition_count": 1,
        "fp32_flat_groups": [torch.zeros(num)],
        "optimizer_state_dict": kept,
    }
    torch.save(
        {"optimizer_state_dict": optim}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    model = {
        "module": {},
        "param_shapes": [{f"w{i}": (1,) for i in range(num)}],
        "buffer_names": [],
    }
    torch.save(model, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def _of_wrong_types(num: int, folder: Path) -> None:
    """Values of wrong types in every list and object of DeepSpeed's model file."""
    _of_sub_group(4, folder)
    shapes = [dict.fromkeys(range(num), "x"), {"w": ("x",) * num}, *["x"] * num]
    model = {
        "module": dict.fromkeys(range(num)),
        "param_shapes": shapes,
        "buffer_names": [*range(num)],
    }
    torch.save(model, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def _of_names(num: int, folder: Path) -> None:
    (folder / "names").write_text(" ".join(f"w{i}" for i in range(num)))


def _order_one_group(folder: Path) -> None:
    names = (folder / "names").read_text().split()
    states = {"weight": of_tensor(torch.zeros(1))}
    optimizer_of(
        Foreign(
            "",
            [ForeignParameter(name, (1,), states, group=0) for name in names],
            [{"params": names}],
        ),
        [],
    )


class _Number(Plain):
    def load(self) -> Any:
        return self.offset


def _order_flat_groups(folder: Path) -> None:
    """The settings of each parameter, as a flattened state dict has them."""
    names = (folder / "names").read_text().split()
    where = {
        ("optim", f"param_groups.{name}.lr"): _Number(folder, i, 0, name)
        for i, name in enumerate(names)
    }
    assert len(DcpReader(folder, where).foreign().groups) == len(names)


def _of_shared_lists(num: int, folder: Path) -> None:
    """Lists that hold the list before twice: 2^n values."""
    value: Any = 1
    for _ in range(round(math.log2(num)) * 3):
        value = [value, value]
    torch.save(
        {"model": {}, "note": value, "optimizer": {"state": {}, "param_groups": [value]}},
        folder / "pytorch_model.bin",
    )


def _import(folder: Path) -> None:
    read_foreign(folder)


CASES: dict[str, tuple[int, Callable[[int, Path], None], Callable[[Path], object]]] = {
    "manifest": (10_000, _of_manifest, _open_manifest),
    "hashes": (20_000, _of_hashes, _decode),
    "ties": (10_000, _of_ties, _import),
    "aliases": (100_000, _of_aliases, _import),
    "groups": (20_000, _of_groups, _import),
    "one group": (20_000, _of_names, _order_one_group),
    "flat groups": (10_000, _of_names, _order_flat_groups),
    "sub-group": (10_000, _of_sub_group, _import),
    "wrong types": (60_000, _of_wrong_types, _import),
    "shared lists": (20_000, _of_shared_lists, _import),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [name if name == "manifest" else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_a_large_file_takes_time_and_memory_as_its_bytes(tmp_path: Path, name: str) -> None:
    num, write, read = CASES[name]
    write(num, tmp_path)
    took = bounded(
        lambda: read(tmp_path),
        num_bytes := sum(file.stat().st_size for file in tmp_path.iterdir()),
        CPU_S_PER_BYTE,
    )
    print(name, num_bytes, took, took.cpu_s / num_bytes)
