"""Is a damaged or hostile foreign checkpoint a ValueError or an OSError, with nothing of it executed, in bounded memory?

Valid ones are changed: bytes of any of their files; values inside of headers, state dicts and metadata; programs put into
their pickles, which would leave a folder behind if they were run. `make soak` does it a million times, or for ten minutes.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import pickletools
import random
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.deepspeed_folders import write_deepspeed
from fuzzing import scrambled, soak
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from tiermem.checkpoint.interchange.foreign import Foreign
from tiermem.checkpoint.interchange.write import read_foreign, write_checkpoint

POOL: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 1.5, float("nan"), float("inf"), 1 << 40, 1 << 63, 10**400, "", "x", "..", "\0", b"x", "F32",
    "BF16", [], {}, (), [[]], [1 << 40], [-1], (1 << 31, 1 << 31), [1] * 70, {"a": 1}, {1: 2},
    {"state": {}, "param_groups": [{}]}, torch.float16,
    torch.zeros(3), torch.zeros(0), torch.tensor(2.0), torch.zeros(1).expand(1 << 40), torch.ones(2, dtype=torch.int8),
    torch.eye(2).to_sparse(), torch.Size([3, 5]),
)  # fmt: skip
NUM_KINDS = 5


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.1)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A small checkpoint of every kind that is read."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("originals")
    net, optimizer = trained()
    state = {name: value.contiguous() for name, value in net.state_dict().items()}
    for name in ("safetensors", "bin", "torch"):
        (folder / name).mkdir()
    first = dict(list(state.items())[:3])
    save_file(first, folder / "safetensors" / "a.safetensors", {"tied": "0.weight"})
    save_file({k: v for k, v in state.items() if k not in first}, folder / "safetensors" / "b.safetensors")
    where = {name: "a.safetensors" if name in first else "b.safetensors" for name in state}
    (folder / "safetensors" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    torch.save(state, folder / "bin" / "b.bin")
    (folder / "bin" / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(state, "b.bin")})
    )
    both = {"model": state, "optimizer": optimizer.state_dict(), "step": 1, "note": [1, ("a", None)]}
    torch.save(both, folder / "torch" / "a.pt")
    write_deepspeed(folder / "deepspeed", 2, torch.bfloat16, is_dynamic=True)
    model, optim = get_state_dict(net, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": model, "optim": optim, "step": 1, "lr_scheduler": {"n": 2}},
            checkpoint_id=folder / "dcp",
            no_dist=True,
        )
    found = [folder / "safetensors", folder / "bin", folder / "torch" / "a.pt", folder / "deepspeed", folder / "dcp"]
    assert len(found) == NUM_KINDS and all(consume(path) for path in found)
    return found


def consume(path: Path, out: Path | None = None) -> int:
    """Reads all of a checkpoint, a piece at a time, or imports it; how many parameters it has."""
    found: Foreign = read_foreign(path)
    if out is not None:
        write_checkpoint(found, out)
    else:
        for parameter in found.parameters:
            for state in parameter.states.values():
                for piece in state.pieces():
                    piece.view(-1)
    return len(found.parameters)


def try_one(original: Path, scratch: Path, chance: random.Random) -> bool:
    """Changes a copy, and opens it: whether that went well. Anything but that, ValueError or OSError fails the test."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    path, canary = scratch / original.name, scratch / "executed"
    if original.is_dir():
        shutil.copytree(original, path)
    else:
        shutil.copy(original, path)
    files = sorted(file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    change(chance.choice(files), chance, canary)
    error = refusal(lambda: consume(path, scratch / "out" if chance.random() < 0.25 else None))
    assert not canary.exists(), "something of the checkpoint was executed"
    assert error is None or 0 < len(str(error)) < 20_000
    return error is None


def refusal(act: Callable[[], object]) -> ValueError | OSError | None:
    """The documented error that something ends with; None: it goes well."""
    try:
        act()
    except (ValueError, OSError) as error:
        return error
    return None


def change(file: Path, chance: random.Random, canary: Path) -> None:
    """Changes a file in one way or another."""
    data = file.read_bytes()
    ways: list[Callable[[], bytes]] = [lambda: scrambled(data, chance), lambda: data[: chance.randrange(len(data) + 1)]]
    if file.suffix == ".safetensors":
        ways += [lambda: with_header(data, chance)] * 4
    elif file.suffix == ".json":
        ways += [lambda: json.dumps(replaced(json.loads(data), chance), default=str).encode()] * 2
    elif file.name == ".metadata":
        ways += [lambda: pickle.dumps(replaced(pickle.loads(data), chance))] * 4
        ways += [lambda: with_program(data, chance, canary), lambda: scrambled(data[:-1], chance) + b"."]
    elif file.suffix in (".pt", ".bin"):
        ways += [lambda: with_pickle(data, lambda inner: with_program(inner, chance, canary))] * 2
        ways += [lambda: with_pickle(data, lambda inner: scrambled(inner, chance))] * 2
        if not file.name.endswith("_optim_states.pt"):  # whose classes are not there to be made
            ways += [lambda: saved_anew(data, chance)] * 4
    try:
        changed = chance.choice(ways)()
    except (TypeError, AttributeError, RuntimeError, OverflowError, ValueError):  # no such file can be written
        changed = scrambled(data, chance)
    file.write_bytes(changed)


def with_header(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file whose header says something else."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(replaced(header, chance), default=str).encode()
    said = chance.choice([len(text), len(text), len(text), len(text) + 1, length, 1 << 40, (1 << 64) - 1])
    return said.to_bytes(8, "little") + text + data[8 + length :]


def saved_anew(data: bytes, chance: random.Random) -> bytes:
    """A torch file with other values in it."""
    out = io.BytesIO()
    torch.save(replaced(torch.load(io.BytesIO(data)), chance), out)
    return out.getvalue()


def with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A torch file with another program in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            inner = old.read(name)
            new.writestr(name, change(inner) if name.endswith("data.pkl") else inner)
    return out.getvalue()


def with_program(data: bytes, chance: random.Random, canary: Path) -> bytes:
    """A pickle that makes a folder on its way, by one of the ways there are to call something."""
    name = str(canary).encode()
    text = b"X" + len(name).to_bytes(4, "little") + name
    code = f"__import__('os').mkdir({str(canary)!r})".encode()
    program = chance.choice(
        [
            b"cposix\nmkdir\n" + text + b"\x85R0",
            b"(cposix\nmkdir\n" + text + b"o0",
            b"(" + text + b"iposix\nmkdir\n0",
            b"\x8c\x05posix\x8c\x05mkdir\x93" + text + b"\x85R0",
            b"cbuiltins\neval\nX" + len(code).to_bytes(4, "little") + code + b"\x85R0",
            b"cposix\nmkdir\n" + text + b"\x85\x810",
            b"ctorch._utils\n_rebuild_tensor_v2\ncposix\nmkdir\n" + text + b"\x85R\x85R0",
            b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemscposix\nmkdir\nsb0",
            b"ctorch.hub\nload\n" + text + b"\x85R0",
        ]
    )
    starts = [place for _, _, place in pickletools.genops(data) if place]
    at = chance.choice([starts[0], starts[0], *starts])
    return data[:at] + program + data[at:]


def replaced(content: Any, chance: random.Random) -> Any:
    """The same structure with one or two of its values replaced or removed."""
    content = copy.deepcopy(content)
    for _ in range(chance.choice([1, 1, 2])):
        holder, key = chance.choice(list(slots(content)))
        inside = holder if isinstance(holder, dict | list) else vars(holder)
        if chance.random() < 0.15:
            del inside[key]
        elif isinstance(inside, dict) and chance.random() < 0.15:
            inside[chance.choice([3, "x", "0.weight", ("a",), "state", ""])] = inside.pop(key)
        else:
            value = chance.choice(POOL)
            inside[key] = value + 1 if isinstance(value, int | float) and chance.random() < 0.3 else value
        if not list(slots(content)):
            break
    return content


def slots(content: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of every value in nested dicts, lists and objects."""
    inside = content if isinstance(content, dict) else getattr(content, "__dict__", None)
    if isinstance(content, list):
        items: list[tuple[Any, Any]] = list(enumerate(content))
    elif isinstance(inside, dict) and not isinstance(content, torch.Tensor):
        items = list(inside.items())
    else:
        return
    for key, value in items:
        yield content, key
        yield from slots(value)
        yield from slots(key)


def test_the_programs_would_run(originals: list[Path], tmp_path: Path) -> None:
    """Where a pickle is trusted they leave what the other tests look for."""
    data, num_run = (originals[-1] / ".metadata").read_bytes(), 0
    for seed in range(40):
        canary = tmp_path / str(seed)
        with contextlib.suppress(Exception):
            pickle.loads(with_program(data, random.Random(seed), canary))
        num_run += canary.exists()
    assert num_run > 15


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, NUM_KINDS - 1), seed=st.integers(0, 1 << 32))
def test_changed_checkpoints_are_refused_or_read(originals: list[Path], tmp_path: Path, which: int, seed: int) -> None:
    try_one(originals[which], tmp_path / "scratch", random.Random(seed))


@pytest.mark.soak
def test_a_million_changed_checkpoints_execute_nothing(originals: list[Path], tmp_path: Path) -> None:
    totals = soak("import fuzz", lambda chance: try_one(chance.choice(originals), tmp_path / "scratch", chance))
    assert totals["inputs"] > 1000 and totals["valid"]
