"""The readers that are fuzzed: one table. Each makes a scene, a small valid checkpoint, and reads
it with one file changed."""

from __future__ import annotations

import json
import random
import secrets
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from checkpoint import runs
from checkpoint.deepspeed_folders import write_deepspeed
from checkpoint.fuzzing import Bound, Wrong, bounded, sealed
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import tiermem
from tiermem import Precision
from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.fields import crc32c, decode
from tiermem.checkpoint.format.manifest import parse_manifest, parse_part, parse_pointer
from tiermem.checkpoint.interchange.write import read_foreign
from tiermem.checkpoint.opening.source import Source
from tiermem.checkpoint.survey import survey

EVERY_KIND: Any = {
    "floats": [0.5, float("inf"), float("nan"), 1 - 2j],
    "keys": {(1, "a"): {2, 3}, 7: frozenset({b"\0\xff"})},
    "torch": (torch.arange(3, dtype=torch.int16), torch.ones(2, 0), torch.tensor(1.5, dtype=torch.bfloat16)),
    "more": [torch.Size([2, 3]), torch.float16, np.arange(4, dtype="u1").reshape(2, 2), np.float32(2.5), np.zeros((0, 2))],
}  # fmt: skip
"""A value of every kind that a manifest can hold."""


class Scene:
    """A folder with a valid checkpoint of another system. `files` are those that are fuzzed, each
    with the path to open."""

    def __init__(self, folder: Path, files: Mapping[Path, Path]) -> None:
        self.folder, self._path_of = folder, files
        self._files = {str(file.relative_to(folder)): file.read_bytes() for file in files}
        self._all = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    def seeds(self) -> Iterator[bytes]:
        """A case for each file, unchanged."""
        for name, data in self._files.items():
            yield name.encode() + b"\n" + data

    def bounded(self, case: bytes, cpu_s_per_byte: float = 20e-6) -> Bound:
        """Reads the checkpoint with the file of this case. Raises Wrong."""
        name, _, data = case.partition(b"\n")
        if name.decode(errors="replace") not in self._files:
            return Bound(0.0, 0, False)
        file = self.folder / name.decode()
        file.write_bytes(data)
        linked = self.prepare(file)
        size = sum(each.stat().st_size for each in self._all)
        try:
            took = bounded(lambda: self.read(file), size, cpu_s_per_byte)
            there = {each for each in self.folder.rglob("*") if each.is_file()}
            if there != set(self._all):
                raise Wrong(f"files were made or removed: {there ^ set(self._all)}")
            return took
        finally:
            for each in linked:
                each.write_bytes(self._all[each])

    def read(self, file: Path) -> None:
        """Reads all of the checkpoint, a piece at a time, after `file` was changed. Raises
        ValueError, OSError."""
        for parameter in read_foreign(self._path_of[file]).parameters:
            for state in parameter.states.values():
                for piece in state.pieces():
                    piece.view(-1)

    def prepare(self, file: Path) -> list[Path]:
        """Changes other files so that they fit the changed one; returns the changed ones."""
        return [file]


# ---- tiermem's own files -------------------------------------------------------------------------

PARSERS: dict[str, Callable[[bytes, str], Any]] = {
    "manifest": parse_manifest,
    "part": parse_part,
    "tiermem": parse_pointer,
}


class OwnScene(Scene):
    """A complete copy of a step. The sizes and checksums by which files name each other are set
    right after a change."""

    # of the case that was read last
    _parsed: tuple[Callable[[bytes, str], Any], Any, int] | None = None

    def bounded(self, case: bytes, cpu_s_per_byte: float = 20e-6) -> Bound:
        """Reads the case, and writes again what it says: apart, since a writer that lacks memory
        ends the process."""
        took = super().bounded(case, cpu_s_per_byte)
        if self._parsed is not None:
            parse, value, version = self._parsed
            if version > 1:  # what is read of version 1 is not written again
                assert parse(value.dump(), "again") == value
        return took

    def read(self, file: Path) -> None:
        """Parses the changed file. If it is valid, opens and reads the step, decodes its values,
        and surveys the folder."""
        self._parsed = None
        if (parse := PARSERS.get(file.stem.partition("-")[0])) is not None:
            data = file.read_bytes()
            self._parsed = parse, parse(data, str(file)), json.loads(data)["version"]
        found = survey(self.folder)
        assert all(step.state in ("whole", "broken", "damaged") for step in found.steps), found
        with Source.open(self._path_of[file]) as source:
            manifest = source.manifest
            for name, parameter in source.parameters.items():
                for state in source.states(name):
                    if kinds.SCALES in state:  # it is read with its codes
                        deque(source.verify(name, state))
                    else:
                        source.fp32(name, state, 0, parameter.numel)
            for each in (
                manifest.optimizer,
                manifest.scheduler,
                manifest.engine,
                manifest.client_state,
                manifest.config,
            ):
                decode(each, "value")
            for part in source.parts:
                decode(part.rng, "value")

    def prepare(self, file: Path) -> list[Path]:
        """Gives the files that name the changed one, or that it names, the right sizes and
        checksums."""
        beside = [
            *file.parent.glob("part-*.json"),
            *file.parent.glob("manifest-*.json"),
            file.parent / "tiermem.json",
        ]
        linked = beside[beside.index(file) :] if file in beside else [file]
        for each in linked:
            _fit(each)
        return linked


def _fit(file: Path) -> None:
    """Gives every object of a file that names another file the right size and checksum of that
    file."""
    try:
        content = json.loads(file.read_bytes())
        own = content.pop("crc32c")
        before = json.dumps(content)
        for each in [content, *content.get("parts", ())]:
            named = file.parent / each["folder"] / each["file"] if "bytes" in each else file
            if named != file and named.is_file():
                data = named.read_bytes()
                each["bytes"], each["crc32c_of" if each is content else "crc32c"] = (
                    len(data),
                    f"{crc32c(data):08x}",
                )
        if json.dumps(content) != before and isinstance(own, str):
            file.write_bytes(sealed(json.dumps(content, separators=(",", ":")).encode()[:-1]))
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
        return


def _ours(folder: Path) -> Path:
    """Two tags of a small model, complete copies; the bytes are the same on every machine."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(float(parameter.numel())).view(parameter.shape))
    names = iter(f"{n:012x}" for n in range(1, 100))
    with mock.patch.object(secrets, "token_hex", side_effect=names):
        shards = tiermem.shard(
            model, runs.policy("cpu", folder, precision=Precision(moments="8bit"))
        )
        optimizer = tiermem.AdamW(model.parameters(), lr=0.1)
        for tag in ("global_step0", "global_step1"):
            model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            tiermem.checkpoint.save(
                shards, optimizer, folder, tag=tag, copy=True, client_state=EVERY_KIND
            )
        shards.close()
    return folder


def of_ours(kind: str) -> Callable[[Path], Scene]:
    """A scene in which a file of this kind is changed. It is opened at the place that names the
    file."""

    def scene(folder: Path) -> Scene:
        _ours(folder)
        tag = folder / "global_step1"
        manifest = next(tag.glob("manifest-*"))
        files = {
            "manifest": {manifest: manifest},
            "part": dict.fromkeys(tag.glob("part-*"), manifest),
            "pointer": {tag / "tiermem.json": tag, folder / "latest": folder},
        }
        return OwnScene(folder, files[kind])

    return scene


# ---- other systems' files ------------------------------------------------------------------------


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.1)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def _safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    state = {name: value.contiguous() for name, value in _trained()[0].state_dict().items()}
    first = dict(list(state.items())[:3])
    save_file(first, folder / "a.safetensors", {"tied": "0.weight"})
    save_file({k: v for k, v in state.items() if k not in first}, folder / "b.safetensors")
    where = {name: "a.safetensors" if name in first else "b.safetensors" for name in state}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def _torch(folder: Path) -> None:
    net, optimizer = _trained()
    state = net.state_dict()
    torch.save(state, folder / "b.bin")
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(state, "b.bin")})
    )
    both = {
        "model": state,
        "optimizer": optimizer.state_dict(),
        "step": 1,
        "note": [1, ("a", None)],
    }
    torch.save(both, folder / "a.pt")


def _deepspeed(folder: Path) -> None:
    write_deepspeed(folder, 2, torch.bfloat16, is_dynamic=True)


def _dcp(folder: Path) -> None:
    model, optim = get_state_dict(*_trained())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = {"model": model, "optim": optim, "step": 1, "lr_scheduler": {"n": 2}}
        dcp.save(content, checkpoint_id=folder, no_dist=True)


def of_others(write: Callable[[Path], None]) -> Callable[[Path], Scene]:
    """A scene in which any file of another system's checkpoint is changed."""

    def scene(folder: Path) -> Scene:
        folder.mkdir(parents=True)
        write(folder)
        files = sorted(each for each in folder.rglob("*") if each.is_file())
        return Scene(
            folder,
            {each: each if each.suffix == ".pt" and write is _torch else folder for each in files},
        )

    return scene


READERS: dict[str, Callable[[Path], Scene]] = {
    **{kind: of_ours(kind) for kind in ("manifest", "part", "pointer")},
    **{each.__name__[1:]: of_others(each) for each in (_safetensors, _torch, _deepspeed, _dcp)},
}
"""Makes a scene in a new folder, by the name of the reader. `pointer` is also the reader of
`latest`."""
