"""`save_checkpoint`, `load_checkpoint` and `save_16bit_model` of an engine, under the reference's
names."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem.checkpoint.format.finding import named_folder
from tiermem.checkpoint.interchange.write import in_own_format
from tiermem.checkpoint.opening.loading import CustomLoad, Loaded, load
from tiermem.checkpoint.saving.saver import Beside, capture_step, save, wait
from tiermem.engine.adapters import adapters_state, has_adapters
from tiermem.engine.facts import Accumulation, EngineFacts
from tiermem.ranks.collectives import exchange
from tiermem.run.shards import Shards
from tiermem.swap.disk import durable
from tiermem.weights_io import SafetensorsFile, TorchFile, WeightEntry, WeightFile

# ---- full weights in one file --------------------------------------------------------------------


class Batch(NamedTuple):
    """Tensors of a model that are in memory together while a file is written, and what the file
    holds of them."""

    tensors: Sequence[torch.Tensor]  # parameters and buffers
    in_file: Sequence[WeightEntry]
    convert: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = lambda values: values
    """Makes the values of `in_file` from those of `tensors`."""


Entries = Mapping[torch.Tensor, WeightEntry]
"""The parameters and buffers of a model, and the names, shape and dtype of each in a file."""


def one_by_one(entries: Entries) -> list[Batch]:
    """A batch for each tensor, which the file holds as it is."""
    return [Batch([tensor], [entry]) for tensor, entry in entries.items()]


def save_weights(
    shards: Shards,
    path: Path,
    exclude_frozen: bool = False,
    batched: Callable[[Entries], list[Batch]] = one_by_one,
) -> None:
    """Writes full parameters and persistent buffers to one file, with one parameter in memory at a
    time. Collective; blocks.

        rank 0    takes the disk space of a file with a random name, writes it, syncs it and renames it over the file
        others    take part in the gathers

    A file name that ends in `.safetensors` gets that format, any other name torch's
    (tiermem/weights_io.py, which also reads them). Weights have the dtype that they are trained in.
    `batched` converts them to the names and shapes of another format, with one batch in memory at a
    time. Rank 0 raises its error; the other ranks raise an OSError that quotes it. Then no file is
    changed.
    """
    batches = batched(_entries(shards, exclude_frozen))
    writing = _writing(path, batches) if shards.topology.rank == 0 else None
    error: Exception | None = None
    gathered = ([_value(shards, tensor) for tensor in batch.tensors] for batch in batches)
    for values in itertools.chain([None], gathered):  # with the first the file is opened
        if writing is not None and error is None:
            try:
                with contextlib.suppress(StopIteration):  # the file is in its place
                    writing.send(values)
            except Exception as failed:  # raised when the other ranks know; no gather hangs
                error = failed
    said = exchange(shards.topology, "" if error is None else str(error))[0]
    if error is not None:
        raise error
    if said:
        raise OSError(f"rank 0 could not write {path}: {said}")


def consolidated(shards: Shards, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """Returns full parameters and persistent buffers on rank 0's CPU, None on the other ranks.
    Collective; blocks.

    exclude_frozen: leaves out frozen parameters, but for those that peft writes of a model with
        adapters.
    """
    is_first = shards.topology.rank == 0
    found = {}
    if exclude_frozen and has_adapters(shards.model):
        state = adapters_state(shards, shards.model)
        found = {name: each for name, each in state.items() if not each.is_meta}
    else:
        for tensor, entry in _entries(shards, exclude_frozen).items():
            value = _value(shards, tensor)
            if is_first:
                found.update(dict.fromkeys(entry.names, value))
    return found if is_first else None


def _entries(shards: Shards, exclude_frozen: bool) -> dict[torch.Tensor, WeightEntry]:
    """Returns the parameters and buffers of a state dict in the order of the model; tied names
    share one entry."""
    dtypes: dict[torch.Tensor, torch.dtype] = {}
    names: dict[torch.Tensor, list[str]] = {}
    for prefix, module in shards.model.named_modules(remove_duplicate=False):
        prefix = f"{prefix}." if prefix else ""
        for name, param in module._parameters.items():
            if param is not None and (param.requires_grad or not exclude_frozen):
                dtypes[param] = shards.find(param)[0].unit.dtype
                names.setdefault(param, []).append(prefix + name)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.setdefault(buffer, []).append(prefix + name)
    return {
        each: WeightEntry(said, tuple(each.shape), dtypes.get(each, each.dtype))
        for each, said in names.items()
    }


def _value(shards: Shards, tensor: torch.Tensor) -> torch.Tensor:
    return (
        shards.weight(tensor)
        if isinstance(tensor, nn.Parameter)
        else tensor.detach().to("cpu", copy=True)
    )


def _writing(
    path: Path, batches: Sequence[Batch]
) -> Generator[None, list[torch.Tensor] | None, None]:
    """Rank 0's part of saving: is sent the values of one batch after the other. The file is in its
    place at the end, and is removed after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind: type[WeightFile] = SafetensorsFile if path.suffix == ".safetensors" else TorchFile
    with durable.NewFile(path) as new:
        file = kind(new, [entry for batch in batches for entry in batch.in_file])
        for batch in batches:
            values = yield
            assert values is not None
            for entry, value in zip(batch.in_file, batch.convert(values), strict=True):
                file.put(entry, 0, value.contiguous().view(-1))
            del values
        file.close()
        new.sync()
        new.place()
        new.sync_names()


# ---- checkpoints of an engine --------------------------------------------------------------------

_COUNTERS = ("global_steps", "skipped_steps", "global_samples")


class EngineCheckpoints(EngineFacts):
    """Saves and loads an engine's checkpoints; `Engine` inherits this and has the attributes.

    checkpoint/saving/saver.py and checkpoint/opening/loading.py handle the model and the optimizer.
    This class adds the engine's counters, schedule, loss scale and position in the data. With
    durability="step" every step is made durable, too.
    """

    training_dataloader: Any
    global_steps: int
    global_samples: int
    skipped_steps: int
    step_client_state: Mapping[str, Any]  # the user's; saved with every step of durability="step"
    _accumulation: Accumulation

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        copy: bool = False,
    ) -> bool:
        """Saves weights, optimizer states and the rest of a run, so that it continues to the bit.
        Collective; blocks.

        Args:
            save_dir: a folder. On the file system of the NVMe paths, states on NVMe are synced and
                named, not copied.
            tag: the checkpoint's name in save_dir; default: `global_step<steps>`.
            client_state: numbers, strings, lists, dicts, tensors and the like, which
                `load_checkpoint` returns.
            save_latest: whether `<save_dir>/latest` names this tag.
            exclude_frozen_parameters: leaves out parameters that do not require gradients.
            copy: makes a complete copy in `<save_dir>/<tag>/` in the background: see
                `wait_checkpoint`.

        Returns True. Within an accumulation it warns: its gradients are not saved, and what is
        loaded begins a new step. Errors are those of tiermem.checkpoint.save.
        """
        self._tell_of_gradients()
        if client_state is not None and not isinstance(client_state, Mapping):
            raise ValueError(f"client_state is {client_state!r:.60}; give a dict")
        return save(
            self.shards,
            self.optimizer,
            save_dir,
            tag,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
            copy=copy,
            beside=self._beside(client_state),
            tag_validation=self.config.checkpoint.tag_validation,
        )

    def wait_checkpoint(self) -> None:
        """Blocks until the copy that `save_checkpoint` began is complete, and the last step of
        durability="step" is durable.

        Collective; raises the error of either.
        """
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
        """Loads a checkpoint of `save_checkpoint`, on any number of ranks, stage, tiers, tile
        sizes, paths and precisions.

        Args:
            load_dir: the folder given to `save_checkpoint`, or the folder of a tag or a run, or a
                manifest; or a ZeRO-3 checkpoint of DeepSpeed, of which a copy is made for the time
                of loading.
            tag: default: the tag that `latest` names.
            load_module_strict: raises an error with both lists when only the model or only the
                checkpoint has a name; False: warns.
            load_optimizer_states: False: the engine's moments do not change (they are new in a new
                engine).
            load_lr_scheduler_states: whether the schedule continues from the saved state.
            load_module_only: loads weights and buffers only. Masters are made from the weights, as
                with `load_from_fp32_weights` false.
            custom_load_fn: called with src= (saved weights by name, each read on access) and dst=
                (the model). It sets the weights itself; masters are made from those weights.
            allow_older: opens the next older tag when this one is not complete.
            newest: without a file `latest`, opens the newest tag; False: raises an error that lists
                the tags.

        Returns the opened path and the client state; (None, None), with a warning, when no tag is
        given and nothing is saved there. On the same number of ranks training continues to the bit.
        Accumulated gradients are dropped.

        Collective; blocks; verifies every byte. Errors are those of tiermem.checkpoint.load.
        """
        self._check_here()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        given = named_folder("load_dir", load_dir)
        with in_own_format(self.shards.topology, given, None if tag is None else str(tag)) as (
            folder,
            own_tag,
        ):
            loaded = load(
                self.shards,
                self.optimizer,
                folder,
                own_tag,
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
        return str(loaded.path if folder == given else given), loaded.client_state

    def _end_step(self) -> None:
        """Captures a step that is to be made durable with durability="step"; else does nothing.
        Collective then."""
        if self.shards.policy.durability == "step":
            capture_step(self.shards, self.optimizer, self._beside(self.step_client_state))

    def _beside(self, client_state: Mapping[str, Any] | None) -> Beside:
        """Returns what a checkpoint saves beside weights and optimizer states."""
        return Beside(
            self.lr_scheduler,
            self._scaler,
            self.training_dataloader,
            {name: getattr(self, name) for name in _COUNTERS}
            | {"micro_steps": self._accumulation.micro_steps},
            self.config.model_dump(mode="json", exclude_unset=True),
            dict(client_state or {}),
        )

    def _tell_of_gradients(self) -> None:
        """Warns while there are gradients, because a checkpoint does not save them."""
        has_gradients = any(shard.param.grad is not None for _, shard in self.shards.parameters())
        if has_gradients or self._accumulation.is_under_way:
            held = self._accumulation.num_held
            warnings.warn(
                f"save_checkpoint within an accumulation: the gradients of {held} micro-batches "
                "since the last step are not saved. This run goes on with them; what is loaded "
                "begins a new step with the next micro-batch. To continue to the bit, save when "
                "engine.step() has ended an accumulation",
                stacklevel=3,  # the caller of save_checkpoint
            )

    def _count_from(self, loaded: Loaded) -> None:
        for name in _COUNTERS:
            setattr(self, name, int(loaded.engine.get(name, 0)))
        self._accumulation.begin_anew(int(loaded.engine.get("micro_steps", 0)))
        self._was_step_applied = False

    def _show_rates(self) -> None:
        """Sets the learning rates of a new optimizer's groups to those of the loaded schedule."""
        if self.lr_scheduler is not None and self.optimizer is not None:
            for group, rate in zip(
                self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True
            ):
                group["lr"] = rate
