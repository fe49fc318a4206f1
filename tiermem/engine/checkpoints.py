"""`save_checkpoint`, `load_checkpoint` and `save_16bit_model` of an engine, under the reference's names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tiermem.checkpoint.opening.loading import CustomLoad, Loaded, load
from tiermem.checkpoint.saving.saver import Beside, make_durable, save, wait
from tiermem.config import TiermemConfig
from tiermem.engine.facts import Accumulation
from tiermem.optim.base import NativeOptimizer
from tiermem.optim.rules import LossScaler
from tiermem.weights import SafetensorsFile, TorchFile, WeightEntry, WeightFile
from tiermem.zero.collectives import exchange
from tiermem.zero.shards import Shards

# ---- Saving: a sharded model's weights, whole, in one file, one parameter in memory at a time ------------------------
#
#     rank 0    writes `<file>.partial`, makes its room first, syncs it and renames it over the file
#     others    take part in the gathers
#
# A name that ends in `.safetensors` is that format, any other torch's own; see weights.py. Weights have the dtype
# in which they are trained. Read back: weights.py, `load_state_dict`.


class _Entry(NamedTuple):
    """One tensor of a state dict and all its names."""

    names: list[str]
    tensor: torch.Tensor  # the parameter or buffer
    dtype: torch.dtype

    def in_file(self) -> WeightEntry:
        return WeightEntry(self.names, tuple(self.tensor.shape), self.dtype)


def save_weights(shards: Shards, path: Path, exclude_frozen: bool = False) -> None:
    """Writes parameters and persistent buffers to one file. Collective; blocks.

    What failed on rank 0 is raised there, and on the others as an OSError that says so; then no file is changed.
    """
    entries = _entries(shards, exclude_frozen)
    writer = _Attempt(path, entries) if shards.topology.rank == 0 else None
    for entry in entries:
        value = _value(shards, entry)
        if writer is not None:
            writer.put(entry, value)
    error = writer.end() if writer is not None else None
    said = exchange(shards.topology, "" if error is None else str(error))[0]
    if error is not None:
        raise error
    if said:
        raise OSError(f"rank 0 could not write {path}: {said}")


def consolidated(shards: Shards, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """Parameters and persistent buffers, whole, on rank 0's CPU; None on the others. Collective; blocks."""
    found: dict[str, torch.Tensor] = {}
    for entry in _entries(shards, exclude_frozen):
        value = _value(shards, entry)
        if shards.topology.rank == 0:
            found.update(dict.fromkeys(entry.names, value))
    return found if shards.topology.rank == 0 else None


def _entries(shards: Shards, exclude_frozen: bool) -> list[_Entry]:
    """What a state dict holds, tied names together, in the order of the model."""
    found: dict[int, _Entry] = {}
    for prefix, module in shards.model.named_modules(remove_duplicate=False):
        prefix = f"{prefix}." if prefix else ""
        for name, param in module._parameters.items():
            if param is not None and (param.requires_grad or not exclude_frozen):
                entry = found.setdefault(id(param), _Entry([], param, _dtype_of(shards, param)))
                entry.names.append(prefix + name)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), _Entry([], buffer, buffer.dtype)).names.append(prefix + name)
    return list(found.values())


def _dtype_of(shards: Shards, param: nn.Parameter) -> torch.dtype:
    return shards.find(param)[0].unit.dtype


def _value(shards: Shards, entry: _Entry) -> torch.Tensor:
    if isinstance(entry.tensor, nn.Parameter):
        return shards.weight(entry.tensor)
    return entry.tensor.detach().to("cpu", copy=True)


class _Attempt:
    """Rank 0's side: writes until something fails, then only remembers that, so that the other ranks are not left alone."""

    def __init__(self, path: Path, entries: Sequence[_Entry]) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._file: WeightFile | None = None
        self._error: Exception | None = None
        kind = SafetensorsFile if path.suffix == ".safetensors" else TorchFile
        self._try(lambda: self._open(kind, [entry.in_file() for entry in entries]))

    def put(self, entry: _Entry, value: torch.Tensor) -> None:
        """Adds the next entry."""
        if self._file is not None:
            file = self._file
            self._try(lambda: file.put(entry.in_file(), 0, value.contiguous().view(-1)))

    def end(self) -> Exception | None:
        """Puts the file in its place, or takes it away; returns what went wrong."""
        if self._file is not None:
            self._try(self._file.close)
        if self._error is None:
            self._try(self._put_in_place)
        if self._error is not None:
            with contextlib.suppress(OSError):  # the first error is told, and the other ranks wait to hear of it
                self._partial.unlink(missing_ok=True)
        return self._error

    def _open(self, kind: Callable[[Path, Sequence[WeightEntry]], WeightFile], entries: Sequence[WeightEntry]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = kind(self._partial, entries)

    def _put_in_place(self) -> None:
        with open(self._partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._partial, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _try(self, act: Callable[[], None]) -> None:
        if self._error is None:
            try:
                act()
            except Exception as error:  # raised by `save_weights`, once the others know
                self._error = error


# ---- EngineCheckpoints: `save_checkpoint` and `load_checkpoint` of an engine, under the reference's names ------------
#
#     save_checkpoint    a tag, between steps; with durability="step" every step is made durable, too
#     load_checkpoint    by the engine that saved it, right after, as well as by a new one
#
# The model and its optimizer are checkpoint/saving/saver.py's and opening/loading.py's; here are the engine's own
# counters, schedule, loss scale and place in the data.


class EngineCheckpoints:
    """What an engine does with checkpoints; `Engine` has the attributes."""

    config: TiermemConfig
    shards: Shards
    optimizer: NativeOptimizer | None
    lr_scheduler: LRScheduler | None
    training_dataloader: Any
    global_steps: int
    global_samples: int
    skipped_steps: int
    step_client_state: Mapping[str, Any]  # saved with every step of durability="step"; yours to set
    _scaler: LossScaler
    _accumulation: Accumulation
    _was_step_applied: bool

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        copy: bool = False,
    ) -> bool:
        """Saves weights, optimizer states and all that a run needs to go on to the bit; returns True. Collective; blocks.

        Args:
            save_dir: a folder; on the file system of the NVMe paths what rests there is synced and named, not copied.
            tag: its name in there; default: `global_step<steps>`.
            client_state: numbers, strings, lists, dicts, tensors and the like, given back by `load_checkpoint`.
            save_latest: whether `<save_dir>/latest` names it.
            exclude_frozen_parameters: leaves out what does not require gradients.
            copy: a complete copy in `<save_dir>/<tag>/`, made behind while training goes on: `wait_checkpoint`.

        Between steps alone: RuntimeError while gradients add up. Other errors: tiermem.checkpoint.save.
        """
        self._check_between_steps()
        beside = self._beside(client_state)
        return save(
            self.shards,
            self.optimizer,
            save_dir,
            tag,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
            copy=copy,
            beside=beside,
            tag_validation=self.config.checkpoint.tag_validation,
        )

    def wait_checkpoint(self) -> None:
        """Blocks until the copy that `save_checkpoint` has begun is whole. Raises what it failed with."""
        wait(self.shards)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: CustomLoad | None = None,
        *,
        allow_older: bool = False,
        newest: bool = False,
    ) -> tuple[str | None, Any]:
        """Opens what `save_checkpoint` saved, on any number of ranks, stage, tiers, tile sizes, paths and precisions.

        Args:
            load_dir: the folder given to `save_checkpoint`; or that of a tag or a run, or a manifest.
            tag: default: what `latest` names.
            load_module_strict: names that only the model or the checkpoint has are an error with both lists; else a warning.
            load_optimizer_states: False: moments stay as they are, new in a new engine.
            load_lr_scheduler_states: whether the schedule goes on from where it was.
            load_module_only: weights and buffers, and nothing else; masters are made from the weights, as they are with
                `load_from_fp32_weights` false.
            custom_load_fn: called with src= (saved weights by name, each read when it is asked for) and dst= (the model), to
                put weights in place itself; masters are made from what it leaves.
            allow_older: opens the next older tag when this one is not whole.
            newest: where there is no `latest`, opens the newest tag; else tags without it are an error that lists them.

        Returns the path that was opened and the client state; (None, None), with a warning, when no tag is given and nothing is
        saved there. On as many ranks as there were, training goes on to the bit. Gradients that have added up are dropped.

        Collective; blocks; every byte is verified. Errors: tiermem.checkpoint.load.
        """
        self._check_here()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        loaded = load(
            self.shards,
            self.optimizer,
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
            allow_older=allow_older,
            newest=newest,
            scheduler=self.lr_scheduler if load_lr_scheduler_states else None,
            loss_scaler=self._scaler,
            loader=self.training_dataloader,
        )
        if loaded is None:
            return None, None
        self._accumulation.begin_anew()
        if not load_module_only:
            self._count_from(loaded)
            if load_lr_scheduler_states and not loaded.has_states:
                self._show_rates()
        return str(loaded.path), loaded.client_state

    def _check_here(self) -> None:
        """Raises RuntimeError while the model is not on its device."""
        raise NotImplementedError

    def _end_step(self) -> None:
        """When everything that a step changes has changed. Collective with durability="step"."""
        if self.shards.policy.durability == "step":
            make_durable(self.shards, self.optimizer, self._beside(self.step_client_state))

    def _beside(self, client_state: Mapping[str, Any] | None) -> Beside:
        """What is saved beside the states."""
        names = ("global_steps", "skipped_steps", "global_samples")
        return Beside(
            self.lr_scheduler,
            self._scaler,
            self.training_dataloader,
            {name: getattr(self, name) for name in names} | {"micro_steps": self._accumulation.micro_steps},
            self.config.model_dump(mode="json", exclude_unset=True),
            dict(client_state or {}),
        )

    def _check_between_steps(self) -> None:
        """Raises RuntimeError while there are gradients, which are not saved."""
        has_gradients = any(shard.param.grad is not None for _, shard in self.shards.parameters())
        if has_gradients or self._accumulation.is_under_way:
            raise RuntimeError(
                "save_checkpoint between a backward and the step that ends it: gradients are not saved, so what is loaded "
                "would not go on as this run does. Save after step(), at the end of an accumulation"
            )

    def _count_from(self, loaded: Loaded) -> None:
        for name in ("global_steps", "global_samples", "skipped_steps"):
            setattr(self, name, int(loaded.engine.get(name, 0)))
        self._accumulation.begin_anew(int(loaded.engine.get("micro_steps", 0)))
        self._was_step_applied = False

    def _show_rates(self) -> None:
        """The groups of a new optimizer follow a schedule that goes on."""
        if self.lr_scheduler is not None and self.optimizer is not None:
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
