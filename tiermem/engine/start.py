"""Start: `initialize` makes an engine from a config; the loaders of training data that it
returns."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from tiermem.config.load import Given, is_json, load_config, named_in_errors
from tiermem.engine.choice import OptimizerFactory, Parameters
from tiermem.engine.engine import Engine, SchedulerFactory
from tiermem.optim.base import NativeOptimizer
from tiermem.ranks.joining import join_ranks
from tiermem.swap.memory.accelerator import find_device

# ---- loaders of training data --------------------------------------------------------------------

T = TypeVar("T")


def build_loader(
    dataset: Dataset[Any],
    micro_batch: int,
    rank: int = 0,
    num_ranks: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    drop_last: bool = True,
) -> TrainingLoader:
    """Builds the loader of this rank's micro-batches of `micro_batch` samples. Raises ValueError
    for impossible numbers.

    Ranks get disjoint parts of the shuffled data set. The order depends on the seed and the epoch
    alone. With several ranks a DistributedSampler gives every rank the same number of samples: with
    drop_last it leaves out the rest, otherwise it gives some samples twice.
    `loader.sampler.set_epoch(n)` gives each epoch another order; RepeatingLoader calls it. An
    iterable data set is read in its own order and must divide its samples over the ranks itself.
    """
    if micro_batch < 1:
        raise ValueError(f"micro_batch is {micro_batch}; it must be at least 1")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank} of {num_ranks}; allowed are 0 to {num_ranks - 1}")
    is_stream = isinstance(dataset, IterableDataset)
    generator = torch.Generator().manual_seed(seed)
    sampler: _DealtSamples | _ShuffledSamples | None = None
    if num_ranks > 1 and not is_stream:
        sampler = _DealtSamples(
            dataset, num_replicas=num_ranks, rank=rank, shuffle=True, seed=seed, drop_last=drop_last
        )
    elif not is_stream:
        sampler = _ShuffledSamples(dataset, generator=generator)  # type: ignore[arg-type]  # a data set that has a length
    return TrainingLoader(
        dataset,
        batch_size=micro_batch,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        generator=generator,
    )


class _Skipping:
    """A sampler that leaves out the first `num_skipped` samples of its next pass, and none after
    that."""

    num_skipped = 0

    def __iter__(self) -> Iterator[int]:
        num_skipped = self.num_skipped
        self.num_skipped = 0
        return itertools.islice(super().__iter__(), num_skipped, None)  # type: ignore[misc]  # of the sampler beside it


class _DealtSamples(_Skipping, DistributedSampler[Any]):
    """This rank's samples."""


class _ShuffledSamples(_Skipping, RandomSampler):
    """All samples."""


class TrainingLoader(DataLoader[Any]):
    """torch's DataLoader with a `state_dict`, which counts the batches of this pass.

    After `load_state_dict` on a loader that was built alike, the next batch is the one that would
    have come. The sampler leaves out earlier samples by their number, so they are not read; a
    stream reads and drops them.
    """

    _num_batches = 0  # yielded in this pass
    _epoch_start: torch.Tensor | None = None  # the generator's state when this pass began
    _to_skip = 0  # batches to leave out in the next pass

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own iterators, counted
        skipped = self._to_skip
        self._to_skip = 0
        self._num_batches = skipped
        self._epoch_start = self.generator.get_state() if self.generator is not None else None
        sampler: object = self.sampler
        if isinstance(sampler, _Skipping):
            sampler.num_skipped = skipped * (self.batch_size or 1)
            skipped = 0
        return self._count(super().__iter__(), skipped)

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of batches of this pass, the epoch, and the generator's state at the
        start of the pass."""
        epoch = self.sampler.epoch if isinstance(self.sampler, DistributedSampler) else 0
        start = self._epoch_start
        if start is None and self.generator is not None:
            start = self.generator.get_state()
        return {"num_batches": self._num_batches, "epoch": epoch, "generator": start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` continue from a state of `state_dict`."""
        self._num_batches = self._to_skip = int(state["num_batches"])
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(int(state["epoch"]))
        if self.generator is not None and state["generator"] is not None:
            self.generator.set_state(state["generator"])
            self._epoch_start = state["generator"]

    def _count(self, batches: Iterator[Any], to_pass_over: int) -> Iterator[Any]:
        for batch in itertools.islice(batches, to_pass_over, None):
            self._num_batches += 1
            yield batch


class RepeatingLoader(Generic[T]):
    """Iterates over a loader without end; each pass has the next epoch's order.

    A second `iter()` continues where the first one stopped. Raises ValueError when the loader
    yields no batch.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._batches: Iterator[T] | None = None  # of this epoch, from its first batch on

    def __iter__(self) -> Iterator[T]:
        return self

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> T:
        if self._batches is None:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            return self._first_of_next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the loader inside. Raises TypeError when that loader has no
        state_dict."""
        inside = getattr(self.loader, "state_dict", None)
        if inside is None:
            raise TypeError(
                f"a {type(self.loader).__name__} has no state_dict, so its place is not known; "
                "build_loader's has"
            )
        return {"loader": inside()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the loader inside continue from a state of `state_dict`."""
        self._batches = None
        self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]  # as `state_dict` has asked

    def _first_of_next_epoch(self) -> T:
        sampler = getattr(self.loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(sampler.epoch + 1)
        self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError(
                "the loader yields no batch: fewer samples than one micro-batch on this rank?"
            ) from None


# ---- initialize ----------------------------------------------------------------------------------


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | SchedulerFactory | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Given | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: Given | None = None,
    device: torch.device | str | None = None,
) -> tuple[Engine, NativeOptimizer | None, DataLoader[Any] | None, LRScheduler | None]:
    """Shards a model by a config and returns (engine, optimizer, loader, scheduler).

        config -> torchrun's ranks join, unless there is a process group -> Engine -> a loader of
        micro-batches, if asked for

    Args:
        args: a namespace whose `deepspeed_config` names the config file, when `config` is not
            given. The model may be the first argument instead: `initialize(model, config=...)`.
        model: built plainly or under `tiermem.zero.Init`.
        optimizer: one of tiermem's, or torch's of the same name, or a function of the parameters.
            Its groups and settings are kept; tiermem computes the step. Default: the config's. With
            neither, the engine is for inference.
        model_parameters: the parameters or groups that the optimizer steps; default: all that
            require gradients.
        training_data: a dataset; initialize returns a loader of this rank's micro-batches.
        lr_scheduler: a scheduler or a function of the optimizer; default: the config's.
        distributed_port: accepted for compatibility, without effect; MASTER_PORT sets the port.
        mpu: its get_data_parallel_group() returns the ranks that share the model; model-parallel
            ranks are refused.
        dist_init_required: False: a process group must exist already.
        mesh_param: (data-parallel, sequence-parallel) ranks; the second must be 1.
        config: a DeepSpeed-style dict or the path of a JSON file; `config_params` is its older
            name.
        device: the device that computes and holds the model from now on; default: this rank's
            accelerator, else the CPU.

    Collective; blocks. Raises ConfigError (a ValueError) for a wrong config, ValueError when the
    plan does not fit the budget, and OSError when a path is missing, not writable or too full, all
    before any weight is moved. Raises RuntimeError when dist_init_required is False and there is no
    process group.
    """
    if isinstance(args, nn.Module):
        if model is not None:
            raise ValueError(
                "two models are given: initialize(model, config=...), or initialize(args, model, "
                "...)"
            )
        args, model = None, args
    if model is None:
        raise ValueError("initialize needs a model")
    _check_kinds(model, optimizer, lr_scheduler, model_parameters, training_data)
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    if given is None:
        raise ValueError("initialize needs a config: a dict or the path of a JSON file")
    loaded = load_config(given)
    on = find_device(device)
    policy = loaded.policy()
    if dist_init_required is False and not dist.is_initialized():
        raise RuntimeError(
            "dist_init_required is False and there is no process group: make one, or leave it out"
        )
    join_ranks(policy.timeout_s, on, policy.join_timeout_s)
    sharing = _sharing(mpu, mesh_param)
    has_source = isinstance(given, (str, os.PathLike)) and not is_json(given)
    with named_in_errors(str(given) if has_source else "the config"):
        engine = Engine(model, loaded, optimizer, model_parameters, lr_scheduler, on, sharing)
    loader = None
    if training_data is not None:
        topology = engine.shards.topology
        loader = build_loader(
            training_data,
            engine.train_micro_batch_size_per_gpu(),
            topology.rank,
            topology.world,
            collate_fn,
            loaded.seed,
            loaded.dataloader_drop_last,
        )
        engine.training_dataloader = loader
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _check_kinds(model: Any, optimizer: Any, scheduler: Any, parameters: Any, data: Any) -> None:
    """Raises ValueError for arguments of another kind than `initialize` takes."""
    for name, given, is_so, allowed in (
        ("model", model, isinstance(model, nn.Module), "a torch.nn.Module"),
        ("optimizer", optimizer, isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer),
         "an optimizer, or a function of the parameters that makes one; the config names one by its type"),
        ("lr_scheduler", scheduler, isinstance(scheduler, LRScheduler) or callable(scheduler),
         "a schedule, or a function of the optimizer that makes one; the config names one by its type"),
        ("model_parameters", parameters, isinstance(parameters, Iterable) and not isinstance(parameters, (str, torch.Tensor)),
         "parameters or groups of them, such as model.parameters()"),
        ("training_data", data, hasattr(data, "__getitem__") or hasattr(data, "__iter__"), "a data set"),
    ):  # fmt: skip
        if given is not None and not is_so:
            raise ValueError(f"{name} is {given!r:.60}; give {allowed}")


def _sharing(mpu: Any, mesh_param: Sequence[int] | None) -> dist.ProcessGroup | None:
    """Returns the group of ranks that share the model, or None when mpu is not given.

    Raises ValueError when ranks would divide layers or sequences.
    """
    if mesh_param is not None and (
        not isinstance(mesh_param, Sequence) or list(mesh_param[1:]) != [1]
    ):
        raise ValueError(
            f"mesh_param is {mesh_param!r}: sequence parallelism does not exist here; give "
            "(data-parallel ranks, 1), or leave it out"
        )
    if mpu is None:
        return None
    if not hasattr(mpu, "get_data_parallel_group"):
        raise ValueError(
            f"mpu is {mpu!r:.60}; give an object with get_data_parallel_group(), or leave it out"
        )
    names = ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    size = next((getattr(mpu, name)() for name in names if hasattr(mpu, name)), 1)
    if size != 1:
        raise ValueError(
            f"mpu has {size} model-parallel ranks: a layer is not divided here, so give one of a "
            "single rank"
        )
    return cast(dist.ProcessGroup, mpu.get_data_parallel_group())
