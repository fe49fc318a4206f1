"""Reads a DeepSpeed ZeRO-3 checkpoint of any number of ranks as a Foreign, without DeepSpeed.

    DIR/latest                                             the tag
    DIR/<tag>/zero_pp_rank_R_mp_rank_00_model_states.pt    shapes, buffers, frozen parameters, scheduler, counters
    DIR/<tag>/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt
        sub-group i:   fp32_flat_groups[i]   = this rank's part of each of its parameters, one after another
                       state[i]["exp_avg"]   the same for a moment

A part is ceil(numel / ranks) elements of the flat parameter; the end of the last part is padding.
The files are memory-mapped and opened weights-only: objects of DeepSpeed's classes become
`Attributes`. The file holds no 16-bit weights of trainable parameters; they are the masters,
rounded, as in DeepSpeed's own loading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pydantic
import torch
from pydantic import FailFast
from typing_extensions import NotRequired, TypedDict

from tiermem.checkpoint.format.fields import Json, Whole, read
from tiermem.checkpoint.format.finding import OTHER_STAGES
from tiermem.checkpoint.format.manifest import WEIGHT
from tiermem.checkpoint.interchange.foreign import (
    STEP,
    Foreign,
    ForeignParameter,
    ForeignState,
    check_state,
    of_tensor,
    states_in,
    steps_in,
    steps_of,
    tie,
)
from tiermem.checkpoint.interchange.from_torch import Attributes, load_torch
from tiermem.swap.disk import durable
from tiermem.units.state_layout import MASTER

_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")
_SCALER = "deepspeed.runtime.fp16.loss_scaler."
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
_CLASSES = (
    f"{_SCALER}LossScaler",
    f"{_SCALER}DynamicLossScaler",
    f"{_SCALER}LossScalerBase",
    _STAGE,
)
_MAX_LATEST_BYTES = 4096
_OURS = frozenset(
    (
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
        "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts", "ds_config",
        "ds_version", "checkpoint_parallel_dimensions", "autoep_layers", "universal_checkpoint_info",
    )
)  # fmt: skip
"""Keys that DeepSpeed saves in the same dict as the client's own state."""


def is_deepspeed(path: Path) -> bool:
    """Whether a folder, or the tag's folder that its `latest` names, holds files of a ZeRO
    checkpoint."""
    try:
        folder = _tag_folder(path, None)
    except (ValueError, OSError):
        return False
    return any(folder.glob("*_optim_states.pt"))


def deepspeed_tags(path: Path) -> list[str]:
    """The tags of a folder that hold files of a ZeRO checkpoint."""
    return sorted({file.parent.name for file in path.glob("*/*_optim_states.pt")})


def read_deepspeed(path: Path, tag: str | None = None) -> Foreign:
    """Opens a checkpoint folder, or the folder of one tag. Reads shapes and scalars; values are
    read later.

    Raises ValueError when it is incomplete, not ZeRO-3 or would execute code; OSError when it
    cannot be read.
    """
    folder = _tag_folder(path, tag)
    models = _find_ranks(folder, "model")
    optims = _find_ranks(folder, "optim")
    if len(models) != len(optims):
        raise ValueError(
            f"{folder}: model states of {len(models)} ranks and optimizer states of {len(optims)}"
        )
    with_models = [_model_file(file) for file in models]
    with_optims = [_optim_file(file, len(optims)) for file in optims]
    _check_alike(models, [_facts_of_model(each) for each in with_models])
    _check_alike(optims, list(map(_facts_of_optim, optims, with_optims)))
    return _DeepSpeedReader(folder, with_models, with_optims).foreign()


class _Optim(NamedTuple):
    """The content of one rank's optimizer file."""

    flat_groups: Sequence[torch.Tensor]
    states: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    scaler: Any


def _facts_of_optim(file: Path, optim: _Optim) -> Mapping[str, object]:
    """Values that are equal on all ranks of one save."""
    return {
        "the number of sub-groups": len(optim.flat_groups),
        "the steps": {
            i: steps_in(entry.get(STEP, 0), f"{file}: sub-group {i}")
            for i, entry in optim.states.items()
        },
        "the names of the states": {i: {*entry} for i, entry in optim.states.items()},
        "the params of the groups": [group.get("params") for group in optim.groups],
    }


def _facts_of_model(found: Mapping[str, Any]) -> Mapping[str, object]:
    """Values that are equal on all ranks of one save."""
    return {
        "global_steps": _count(found, "global_steps"),
        "param_shapes": [list(shapes.items()) for shapes in found["param_shapes"]],
        "frozen_param_shapes": found.get("frozen_param_shapes") or {},
    }


def _check_alike(files: Sequence[Path], facts: Sequence[Mapping[str, object]]) -> None:
    """Raises ValueError where the file of a rank says something else than that of rank 0."""
    for file, own in zip(files, facts, strict=True):
        for name, value in own.items():
            if value != facts[0][name]:
                raise ValueError(
                    f"{file}: {name} differ from those in {files[0].name}: the files are of two "
                    "saves; take the files of all ranks from one save"
                )


class _DeepSpeedReader:
    """The opened files of all ranks."""

    def __init__(
        self, folder: Path, models: Sequence[Mapping[str, Any]], optims: Sequence[_Optim]
    ) -> None:
        self._folder = folder
        self._models = models
        self._optims = optims
        self._first = models[0]
        self._left_behind: set[str] = set()

    def foreign(self) -> Foreign:
        first = self._first
        found = {p.name: p for p in (*self._trainable(), *self._frozen(), *self._buffers())}
        ties = first.get("shared_params") or {}
        others = first["module"].keys() - found.keys() - ties.keys()
        self._left_behind.update(f"{name!r} of the model" for name in others)
        order = [*first["module"], *found]
        parameters = tie([found.pop(name) for name in order if name in found], ties)
        if not any(p.moments for p in parameters):
            self._left_behind.add("no moments are in it: the optimizer begins anew")
        return Foreign(
            kind=f"DeepSpeed {first.get('ds_version') or ''} ZeRO-3, {len(self._models)} ranks".replace(
                "  ", " "
            ),
            parameters=parameters,
            groups=[
                {k: v for k, v in group.items() if k != "params"}
                for group in self._optims[0].groups
            ],
            global_steps=_count(first, "global_steps"),
            global_samples=_count(first, "global_samples"),
            skipped_steps=_count(first, "skipped_steps"),
            loss_scale=_loss_scale(self._optims[0].scaler),
            scheduler=first.get("lr_scheduler")
            if isinstance(first.get("lr_scheduler"), dict)
            else None,
            client_state={key: value for key, value in first.items() if key not in _OURS},
            left_behind=sorted(self._left_behind),
        )

    def _trainable(self) -> Iterator[ForeignParameter]:
        group_of = {
            i: g for g, group in enumerate(self._optims[0].groups) for i in group.get("params", ())
        }
        self._check_states()
        for sub_group, shapes in enumerate(self._first["param_shapes"]):
            self._check_sub_group(sub_group, shapes)
            what = f"{self._folder}: sub-group {sub_group}"
            if group_of and sub_group not in group_of:
                raise ValueError(f"{what} is in no parameter group of the optimizer's files")
            masters = [optim.flat_groups[sub_group] for optim in self._optims]
            flats = {MASTER: masters, **self._moments(sub_group, what)}
            group = group_of.get(sub_group)
            num_steps = steps_of(
                self._optims[0].states.get(sub_group, {}),
                {} if group is None else self._optims[0].groups[group],
                what,
            )
            start = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                states = self._states(
                    name, {state: _joined(flat, start, numel) for state, flat in flats.items()}
                )
                yield ForeignParameter(name, tuple(shape), states, num_steps=num_steps, group=group)
                start += -(-numel // len(self._models))

    def _check_states(self) -> None:
        """Raises ValueError unless the files of the model and of the optimizer have the same
        sub-groups, and all or none of them have states."""
        num = len(self._first["param_shapes"])
        optim = self._optims[0]
        extra = [
            *range(num, len(optim.flat_groups)),
            *(i for i in optim.states if i not in range(num)),
        ]
        if extra:
            raise ValueError(
                f"{self._folder}: the optimizer has a sub-group {extra[0]}, and the model's files "
                f"name the parameters of {num}: take the files of one save"
            )
        bare = [i for i in range(num) if not states_in(optim.states.get(i, {}), set())]
        if len(bare) not in (0, num):
            raise ValueError(
                f"{self._folder}: the optimizer has no states of sub-group {bare[0]}, and has those "
                "of others: its files are damaged"
            )

    def _check_sub_group(self, sub_group: int, shapes: Mapping[str, Any]) -> None:
        due = sum(-(-math.prod(shape) // len(self._models)) for shape in shapes.values())
        for rank, optim in enumerate(self._optims):
            there = (
                optim.flat_groups[sub_group].numel() if sub_group < len(optim.flat_groups) else 0
            )
            if there == 0 and due:
                raise ValueError(
                    f"{self._folder}: the masters of sub-group {sub_group} of rank {rank} are not "
                    "in the file: they were on NVMe. Save from a run with the optimizer on the "
                    "CPU, or import weights from save_16bit_model"
                )
            if there != due:
                raise ValueError(
                    f"{self._folder}: sub-group {sub_group} of rank {rank} has {there} elements, "
                    f"not {due}"
                )

    def _moments(self, sub_group: int, what: str) -> dict[str, list[torch.Tensor]]:
        """The moments of a sub-group: the flat tensor of each rank. Raises ValueError."""
        kept = [
            (optim.states.get(sub_group, {}), optim.flat_groups[sub_group].numel())
            for optim in self._optims
        ]
        return {
            state: [
                check_state(what, state, own.get(state), numel).reshape(-1) for own, numel in kept
            ]
            for state in states_in(kept[0][0], self._left_behind)
        }

    def _states(self, name: str, found: dict[str, ForeignState]) -> dict[str, ForeignState]:
        """The states of a parameter, from its master and moments. Its weight is the master in the
        dtype in which the model is trained: DeepSpeed keeps an empty tensor of it in place of each
        parameter."""
        master = found[MASTER]
        kept = self._first["module"].get(name)
        dtype = (
            kept.dtype
            if isinstance(kept, torch.Tensor) and kept.is_floating_point()
            else master.dtype
        )
        if dtype == torch.float32:
            del found[MASTER]
        return {
            WEIGHT: ForeignState(dtype, lambda: (piece.to(dtype) for piece in master.pieces())),
            **found,
        }

    def _frozen(self) -> Iterator[ForeignParameter]:
        for name, shape in (self._first.get("frozen_param_shapes") or {}).items():
            numel = math.prod(shape)
            fragments = [
                (model.get("frozen_param_fragments") or {}).get(name) for model in self._models
            ]
            parts = [f for f in fragments if isinstance(f, torch.Tensor)]
            if len(parts) < len(fragments) or sum(part.numel() for part in parts) < numel:
                raise ValueError(
                    f"{self._folder}: frozen {name} has not all of its {numel} elements"
                )
            weight = _joined([part.reshape(-1) for part in parts], 0, numel)
            yield ForeignParameter(name, tuple(shape), {WEIGHT: weight}, is_trainable=False)

    def _buffers(self) -> Iterator[ForeignParameter]:
        for name in self._first["buffer_names"]:
            value = self._first["module"].get(name)
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{self._folder}: buffer {name} has no value in the model's files")
            yield ForeignParameter(
                name, tuple(value.shape), {WEIGHT: of_tensor(value)}, is_buffer=True
            )


def _joined(flats: Sequence[torch.Tensor], start: int, numel: int) -> ForeignState:
    """A parameter from the parts of all ranks; each part begins at `start` in that rank's tensor.
    Padding is left out."""

    def pieces() -> Iterator[torch.Tensor]:
        part = -(-numel // len(flats))
        for flat, before in zip(flats, range(0, numel, part or 1), strict=False):
            yield flat[start : start + min(part, numel - before)]

    return ForeignState(flats[0].dtype, pieces)


def _loss_scale(scaler: Any) -> Json:
    """The state dict of a LossScaler; None without a loss scale."""
    if not isinstance(scaler, Attributes):
        return None
    kept = vars(scaler)
    scale = kept.get("cur_scale")
    if not isinstance(scale, int | float) or not scale > 0:
        return None
    if scale == 1 and not kept.get("dynamic"):
        return None
    good = kept.get("cur_iter", 0) - kept.get("last_overflow_iter", -1) - 1
    left = kept.get("cur_hysteresis")
    return {
        "scale": float(scale),
        "hysteresis_left": left if type(left) is int else 1,
        "num_good": max(0, good),
    }


# Each stops at its first error: a million errors would take memory a hundred times the file.
_Shapes = Annotated[dict[str, Annotated[tuple[Whole, ...], FailFast()]], FailFast()]
_OR_NONE = pydantic.BeforeValidator(lambda value: {} if value is None else value)
_Named = Annotated[dict[str, Any], FailFast()]


class _ModelFile(TypedDict):
    """The keys of a model file that are read by their types."""

    module: _Named
    param_shapes: Annotated[list[_Shapes], FailFast()]
    buffer_names: Annotated[list[str], FailFast()]
    frozen_param_shapes: NotRequired[Annotated[_Shapes, _OR_NONE]]
    frozen_param_fragments: NotRequired[Annotated[_Named, _OR_NONE]]
    shared_params: NotRequired[Annotated[dict[str, str], FailFast(), _OR_NONE]]


@pydantic.with_config(extra="allow")
class _SavedGroup(TypedDict):
    """A parameter group: its sub-groups, and settings."""

    params: NotRequired[Annotated[list[pydantic.StrictInt], FailFast()]]


class _States(TypedDict):
    """A torch optimizer's state dict: states by sub-group, and groups."""

    state: NotRequired[Annotated[dict[Any, dict[Any, Any]], FailFast()]]
    param_groups: NotRequired[Annotated[list[_SavedGroup], FailFast()]]


def _model_file(file: Path) -> Mapping[str, Any]:
    found = load_torch(file, _CLASSES)
    if isinstance(found, dict) and found.get("mp_world_size", 1) != 1:
        raise ValueError(
            f"{file}: the model was cut over {found['mp_world_size']} tensor-parallel ranks; only "
            "ZeRO-3 alone is read"
        )
    return {**found, **read(_ModelFile, found, f"{file}: no model states of ZeRO")}


def _optim_file(file: Path, num_ranks: int) -> _Optim:
    found = load_torch(file, _CLASSES)
    kept = found.get("optimizer_state_dict") if isinstance(found, dict) else None
    if not isinstance(kept, dict):
        raise ValueError(f"{file}: no optimizer states of ZeRO: optimizer_state_dict is missing")
    stage = kept.get("zero_stage")
    if isinstance(stage, Attributes) and stage.arguments:  # (value,), or (class, name)
        stage = _STAGES.get(str(stage.arguments[-1]), stage.arguments[-1])
    if stage != 3:
        raise ValueError(f"{file}: ZeRO stage {stage}; stage 3 is read, and {OTHER_STAGES}")
    if kept.get("partition_count") != num_ranks:
        raise ValueError(
            f"{file}: written by {kept.get('partition_count')} ranks, files of {num_ranks} are "
            "here: some are missing, or left of an older save"
        )
    flat = kept.get("fp32_flat_groups")
    if not isinstance(flat, list) or not all(isinstance(group, torch.Tensor) for group in flat):
        raise ValueError(f"{file}: fp32_flat_groups must be a list of tensors")
    found = read(
        _States, kept.get("optimizer_state_dict") or {}, f"{file}: the optimizer's state dict"
    )
    return _Optim(
        [group.reshape(-1) for group in flat],
        found.get("state", {}),
        found.get("param_groups", []),
        kept.get("loss_scaler"),
    )


def _find_ranks(folder: Path, kind: str) -> list[Path]:
    """The files of all ranks, by rank. Raises ValueError that names missing ranks."""
    ranks: dict[int, Path] = {}
    for file in sorted(folder.glob(f"*_{kind}_states.pt")):
        match = _FILE.fullmatch(file.name)
        if match is None:
            raise ValueError(
                f"{file}: its name is not one of ZeRO-3 "
                f"(zero_pp_rank_R_mp_rank_00_{kind}_states.pt): pipeline stages, experts and "
                f"universal checkpoints are not read; {OTHER_STAGES}"
            )
        if int(match[2]) != 0:
            raise ValueError(f"{file}: a tensor-parallel part; only ZeRO-3 alone is read")
        if ranks.setdefault(int(match[1]), file) != file:
            raise ValueError(
                f"{file} and {ranks[int(match[1])]} are of one rank; one of them is of another save"
            )
    # not up to a number in a name
    missing = [rank for rank in range(len(ranks) or 1) if rank not in ranks]
    if missing:
        raise ValueError(f"{folder}: no {kind} states of rank {', '.join(map(str, missing))}")
    return [ranks[rank] for rank in sorted(ranks)]


def _tag_folder(path: Path, tag: str | None) -> Path:
    if tag is None and not any(path.glob("*_model_states.pt")):
        latest = path / "latest"
        if not latest.exists():
            tags = ", ".join(deepspeed_tags(path))
            raise FileNotFoundError(
                2, f"no file `latest` names one of its tags ({tags}): name one", str(path)
            )
        tag = (
            durable.read_file(latest, _MAX_LATEST_BYTES, follows=True)
            .decode(errors="replace")
            .strip()
        )
    if tag is None:
        return path
    if Path(tag).name != tag or tag in ("", ".", ".."):
        raise ValueError(f"{path}: the tag is {tag!r}; a tag names one folder")
    durable.check_folder(path / tag)
    return path / tag


def _count(found: Mapping[str, Any], name: str) -> int:
    value = found.get(name, 0)
    return value if type(value) is int and value >= 0 else 0
